"""Schemas of the kinds of other projects that `deploy` uses, for which kubernetes-validate has none.

Written by hand from the published APIs: Prometheus operator (`monitoring.coreos.com/v1`), cert-manager (`cert-manager.io/v1`),
KEDA (`keda.sh/v1alpha1`) and KServe (`serving.kserve.io`). They know the fields that we use and few others, so that a misspelt
field, or one in the wrong place, is refused. Parts that are Kubernetes' own are checked by its schemas.
"""

from typing import Any

import jsonschema
import kubernetes_validate

from tests.servers.helm import KUBERNETES

_TEXT = {"type": "string", "minLength": 1}
_LABELS = {"type": "object", "additionalProperties": {"type": "string"}}
_COUNT = {"type": "integer", "minimum": 0}


def _like(pattern: str, **more: Any) -> dict[str, Any]:
    return {"type": "string", "pattern": pattern, **more}


def _one_of(*values: str) -> dict[str, Any]:
    return {"enum": list(values)}


def _object(required: str = "", texts: str = "", **fields: Any) -> dict[str, Any]:
    """An object with these fields alone, of which `texts` and required ones are texts unless something else is said of them."""
    properties = dict.fromkeys([*required.split(), *texts.split()], _TEXT) | fields
    return {"type": "object", "required": required.split(), "properties": properties, "additionalProperties": False}


def _list(items: Any) -> dict[str, Any]:
    return {"type": "array", "minItems": 1, "items": items}


_DURATION = _like(r"^([0-9]+(ms|[smhdwy]))+$")
_KEY = _object("name key", optional={"type": "boolean"})
_KEY_OF = _object(secret=_KEY, configMap=_KEY)
_OPERATORS = _one_of("In", "NotIn", "Exists", "DoesNotExist")
_EXPRESSION = _object("key operator", operator=_OPERATORS, values=_list({"type": "string"}))
_ENDPOINT = _object(
    "port",
    path=_like("^/"),
    interval=_DURATION,
    scrapeTimeout=_DURATION,
    scheme=_one_of("http", "https"),
    tlsConfig=_object(texts="serverName", ca=_KEY_OF, cert=_KEY_OF, keySecret=_KEY),
    authorization=_object("credentials", "type", credentials=_KEY),
)
_SELECTOR = _object(matchLabels=_LABELS, matchExpressions=_list(_EXPRESSION))
_SERVICE_MONITOR = _object("selector endpoints", "jobLabel", selector=_SELECTOR, endpoints=_list(_ENDPOINT))
_TIMES = {"for": _DURATION, "keep_firing_for": _DURATION}
_RULE = _object("expr", "alert record", labels=_LABELS, annotations=_LABELS, **_TIMES)
_RULES = _object("groups", groups=_list(_object("name rules", interval=_DURATION, rules=_list(_RULE))))
_CERTIFICATE = _object(
    "secretName issuerRef dnsNames",
    issuerRef=_object("name", "kind group"),
    dnsNames=_list(_like(r"^(\*\.)?[a-z0-9]([-a-z0-9.]*[a-z0-9])?$", maxLength=253)),
    usages=_list(_one_of("digital signature", "key encipherment", "server auth", "client auth")),
)
_METADATA = _object("serverAddress query threshold", serverAddress=_like("^https?://"), threshold=_like("^[0-9.]+$"))
_SCALED_OBJECT = _object(
    "scaleTargetRef triggers",
    scaleTargetRef=_object("name", "apiVersion kind"),
    minReplicaCount=_COUNT,
    maxReplicaCount=_COUNT,
    advanced=_object(horizontalPodAutoscalerConfig=_object(behavior={"type": "object"})),
    triggers=_list(_object("type metadata", type={"const": "prometheus"}, metadata=_METADATA)),
)
_POD_PARTS = {"containers": _list({"type": "object"}), "volumes": _list({"type": "object"})}
_PROTOCOL = _one_of("v1", "v2", "grpc-v1", "grpc-v2")
_FORMAT = _object("name", "version", autoSelect={"type": "boolean"}, priority={"type": "integer", "minimum": 1})
_SERVING_RUNTIME = _object(
    "supportedModelFormats containers", supportedModelFormats=_list(_FORMAT), protocolVersions=_list(_PROTOCOL), **_POD_PARTS
)
_MODEL = _object(
    "modelFormat",
    "runtime",
    modelFormat=_object("name", "version"),
    protocolVersion=_PROTOCOL,
    storageUri=_like("^(s3|gs|hdfs|https?|pvc|hf|oci)://"),
)
_REPLICAS = dict.fromkeys(("minReplicas", "maxReplicas", "terminationGracePeriodSeconds"), _COUNT)
_INFERENCE_SERVICE = _object("predictor", predictor=_object("model", "serviceAccountName", model=_MODEL, **_REPLICAS))
_SPECS = {
    ("monitoring.coreos.com/v1", "ServiceMonitor"): _SERVICE_MONITOR,
    ("monitoring.coreos.com/v1", "PrometheusRule"): _RULES,
    ("cert-manager.io/v1", "Certificate"): _CERTIFICATE,
    ("keda.sh/v1alpha1", "ScaledObject"): _SCALED_OBJECT,
    ("serving.kserve.io/v1alpha1", "ServingRuntime"): _SERVING_RUNTIME,
    ("serving.kserve.io/v1beta1", "InferenceService"): _INFERENCE_SERVICE,
}


def validate(one: dict[str, Any]) -> None:
    """Check an object of any kind that we use: Kubernetes' own strictly, by several versions of it.

    Raises:
        Exception: the object is wrong; the message names the field.
    """
    spec = _SPECS.get((one["apiVersion"], one["kind"]))
    if spec is None:
        for version in KUBERNETES:
            kubernetes_validate.validate(one, version, strict=True)
        return
    jsonschema.validate(one["spec"], spec)
    if one["kind"] == "ServingRuntime":
        _validate_own("v1", "Pod", one["metadata"], {name: one["spec"][name] for name in _POD_PARTS if name in one["spec"]})
    if one["kind"] == "ScaledObject":
        behavior = one["spec"]["advanced"]["horizontalPodAutoscalerConfig"]["behavior"]
        scaler = {"scaleTargetRef": one["spec"]["scaleTargetRef"], "maxReplicas": 1, "behavior": behavior}
        _validate_own("autoscaling/v2", "HorizontalPodAutoscaler", one["metadata"], scaler)


def _validate_own(version: str, kind: str, metadata: dict[str, Any], spec: dict[str, Any]) -> None:
    validate({"apiVersion": version, "kind": kind, "metadata": metadata, "spec": spec})
