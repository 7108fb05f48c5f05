{{- define "hps.name" -}}
{{- if contains "hps" .Release.Name }}{{ .Release.Name | trunc 50 | trimSuffix "-" }}{{ else }}{{ printf "%s-hps" .Release.Name | trunc 50 | trimSuffix "-" }}{{ end }}
{{- end }}

{{- define "hps.selector" -}}
app.kubernetes.io/name: hps
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "hps.labels" -}}
{{ include "hps.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end }}

{{- define "hps.serviceAccount" -}}
{{- if .Values.serviceAccount.name }}{{ .Values.serviceAccount.name }}{{ else if .Values.serviceAccount.create }}{{ include "hps.name" . }}{{ else }}default{{ end }}
{{- end }}

{{- define "hps.tlsSecret" -}}
{{- if .Values.tls.existingSecret }}{{ .Values.tls.existingSecret }}{{ else if .Values.tls.certManager.enabled }}{{ include "hps.name" . }}-tls{{ end }}
{{- end }}

{{- define "hps.image" -}}
{{ printf "%s:%s" .Values.image.repository (default (printf "%s-%s" .Chart.AppVersion (ternary (printf "cuda%d" (int .Values.gpu.cuda)) "cpu" (gt (int .Values.gpu.count) 0))) .Values.image.tag) }}
{{- end }}

{{- define "hps.kind" -}}
{{- if .Values.persistence.enabled }}StatefulSet{{ else }}Deployment{{ end }}
{{- end }}

{{- /* ps.json: what the values say, and the places that the chart decides. */ -}}
{{- define "hps.config" -}}
{{- $config := deepCopy .Values.config }}
{{- $service := dict "host" "0.0.0.0" "port" 8000 }}
{{- if .Values.grpc.enabled }}{{ $_ := set $service "grpc_port" 8001 }}{{ end }}
{{- if .Values.tokens.existingSecret }}{{ $_ := set $service "tokens_path" (printf "/run/hps/tokens/%s" .Values.tokens.key) }}{{ end }}
{{- if include "hps.tlsSecret" . }}
{{- $_ := set $service "tls_certificate_path" "/run/hps/tls/tls.crt" }}
{{- $_ := set $service "tls_key_path" "/run/hps/tls/tls.key" }}
{{- if .Values.tls.clientCA }}{{ $_ := set $service "tls_client_ca_path" "/run/hps/tls/ca.crt" }}{{ end }}
{{- end }}
{{- $_ := set $config "service" (mergeOverwrite (dict) (default (dict) $config.service) $service) }}
{{- if and $config.persistent_db (has (default "" $config.persistent_db.type) (list "rocks_db" "row_files")) }}
{{- if not .Values.persistence.enabled }}{{ fail "config.persistent_db is on disk, so each replica needs a volume: set persistence.enabled, or take persistent_db out" }}{{ end }}
{{- $_ := set $config.persistent_db "path" (ternary "/var/lib/hps/rows" "/var/lib/hps/rocksdb" (eq $config.persistent_db.type "row_files")) }}
{{- end }}
{{- if .Values.redis.existingSecret }}
{{- if not $config.volatile_db }}{{ fail "redis.existingSecret is set, and config.volatile_db names no Redis" }}{{ end }}
{{- $_ := set $config.volatile_db "password_path" (printf "/run/hps/redis/%s" .Values.redis.key) }}
{{- end }}
{{- if and .Values.tls.existingSecret .Values.tls.certManager.enabled }}{{ fail "tls.existingSecret and tls.certManager.enabled are both set, expected one: a certificate has one source" }}{{ end }}
{{- if and .Values.tls.clientCA (not (include "hps.tlsSecret" .)) }}{{ fail "tls.clientCA is set, and there is no certificate of the server: set tls.existingSecret or tls.certManager.enabled" }}{{ end }}
{{- range $section, $keys := dict "service" (list "bearer_token" "admin_token") "volatile_db" (list "password" "sentinel_password") "update_source" (list "password") }}
{{- range $key := $keys }}{{ if dig $section $key "" $config }}{{ fail (printf "config.%s.%s is a secret, and a ConfigMap is none: name a Secret (tokens, redis, envFrom)" $section $key) }}{{ end }}{{ end }}
{{- end }}
{{- range $key, $_ := dig "update_source" "config" (dict) $config }}
{{- if regexMatch "(password|secret|key\\.pem|token)$" $key }}{{ fail (printf "config.update_source.config.%s is a secret, and a ConfigMap is none: name a Secret in envFrom with HPS_UPDATE_PASSWORD, or mount one with extraVolumes" $key) }}{{ end }}
{{- end }}
{{- if dig "model_source" "peers" "token" "" $config }}{{ fail "config.model_source.peers.token is a secret, and a ConfigMap is none: name a Secret in envFrom with HPS_PEERS_TOKEN" }}{{ end }}
{{- if .Values.peers.enabled }}
{{- if .Values.tls.clientCA }}{{ fail "peers.enabled with tls.clientCA: replicas have no client certificate for each other" }}{{ end }}
{{- $tls := include "hps.tlsSecret" . }}
{{- $peers := dict "urls" (list (printf "%s://%s-pods.%s.svc:8000" (ternary "https" "http" (ne $tls "")) (include "hps.name" .) .Release.Namespace)) }}
{{- $_ := set $config "model_source" (mergeOverwrite (dict "peers" $peers) (default (dict) $config.model_source)) }}
{{- end }}
{{- range .Values.env }}
{{- if and .value (regexMatch "(PASSWORD|TOKEN|SECRET|SECRET_ACCESS_KEY)$" .name) }}{{ fail (printf "env: the value of %s is a secret: take it from a Secret, with valueFrom or envFrom" .name) }}{{ end }}
{{- end }}
{{- if lt (dig "service" "drain_s" 5.0 $config | float64) 3.0 }}
{{- fail "config.service.drain_s: expected at least 3, since the readiness probe notices a leaving replica after 2 s" }}
{{- end }}
{{- if not $config.model_repository }}{{ $_ := unset $config "model_repository" }}{{ end }}
{{- if not (or $config.model_repository $config.models) }}{{ fail "config has neither model_repository nor models: there is nothing to serve" }}{{ end }}
{{- toPrettyJson $config }}
{{- end }}

{{- /* The rules of deploy/prometheus; those that add up replicas count this release's. Autoscalers remove replicas on purpose.
       Runbooks are where the value says, else on the page that the release serves itself: through the ingress, or to whom can
       reach the cluster's Services at all pods, ready or not. */ -}}
{{- define "hps.rules" -}}
{{- $spec := .Files.Get "files/alerts.yml" | fromYaml }}
{{- $scheme := ternary "http" "https" (eq (include "hps.tlsSecret" .) "") }}
{{- $runbooks := printf "%s://%s-pods.%s.svc:8000/runbooks" $scheme (include "hps.name" .) .Release.Namespace }}
{{- with .Values.ingress }}{{ if .enabled }}{{ $runbooks = printf "%s://%s/runbooks" (ternary "https" "http" (ne .tlsSecret "")) .host }}{{ end }}{{ end }}
{{- with .Values.monitoring.runbookBase }}{{ $runbooks = printf "%s/operations.html" (trimSuffix "/" .) }}{{ end }}
{{- $own := printf "hps_ready{namespace=%q,service=%q}" .Release.Namespace (include "hps.name" .) }}
{{- range $group := $spec.groups }}
{{- $rules := list }}
{{- range $rule := $group.rules }}
{{- with $rule.annotations }}
{{- $_ := set . "runbook_url" (printf "%s#%s" $runbooks (splitList "#" .runbook_url | last)) }}
{{- end }}
{{- if contains "sum(hps_ready)" $rule.expr }}
{{- $_ := set $rule "expr" (replace "hps_ready" $own $rule.expr) }}
{{- $_ := set $rule.labels "namespace" $.Release.Namespace }}
{{- $_ := set $rule.labels "service" (include "hps.name" $) }}
{{- end }}
{{- if or (eq $.Values.autoscaling.kind "none") (ne (get $rule "alert") "HPSReplicaLost") }}{{ $rules = append $rules $rule }}{{ end }}
{{- end }}
{{- $_ := set $group "rules" $rules }}
{{- end }}
{{- toYaml $spec }}
{{- end }}

{{- /* Asks the server itself, as the image's health check does, where the kubelet could not: it has no client certificate. */ -}}
{{- define "hps.probe" -}}
{{- $secret := include "hps.tlsSecret" .root -}}
{{- if .root.Values.tls.clientCA -}}
exec:
  command:
    - python
    - -I
    - -S
    - -c
    - "import ssl, urllib.request as r; c = ssl._create_unverified_context(); c.load_cert_chain('/run/hps/tls/tls.crt', '/run/hps/tls/tls.key'); r.urlopen('https://127.0.0.1:8000{{ .path }}', timeout=4, context=c)"
{{- else -}}
httpGet:
  path: {{ .path }}
  port: http
  scheme: {{ if $secret }}HTTPS{{ else }}HTTP{{ end }}
{{- end }}
timeoutSeconds: 5
{{- end }}
