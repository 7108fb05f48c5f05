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
_DURATION = {"type": "string", "pattern": r"^([0-9]+(ms|[smhdwy]))+$"}
_LABELS = {"type": "object", "additionalProperties": {"type": "string"}}
_COUNT = {"type": "integer", "minimum": 0}


def _object(required: str, **fields: Any) -> dict[str, Any]:
    return {"type": "object", "required": required.split(), "properties": fields, "additionalProperties": False}


def _list(items: Any) -> dict[str, Any]:
    return {"type": "array", "minItems": 1, "items": items}


_KEY = _object("name key", name=_TEXT, key=_TEXT, optional={"type": "boolean"})
_SELECTOR = _object(
    "",
    matchLabels=_LABELS,
    matchExpressions=_list(
        _object(
            "key operator",
            key=_TEXT,
            operator={"enum": ["In", "NotIn", "Exists", "DoesNotExist"]},
            values=_list({"type": "string"}),
        )
    ),
)
_SERVICE_MONITOR = _object(
    "selector endpoints",
    jobLabel=_TEXT,
    selector=_SELECTOR,
    endpoints=_list(
        _object(
            "port",
            port=_TEXT,
            path={"type": "string", "pattern": "^/"},
            interval=_DURATION,
            scrapeTimeout=_DURATION,
            scheme={"enum": ["http", "https"]},
            tlsConfig=_object(
                "",
                serverName=_TEXT,
                ca=_object("", secret=_KEY, configMap=_KEY),
                cert=_object("", secret=_KEY, configMap=_KEY),
                keySecret=_KEY,
            ),
            authorization=_object("credentials", type=_TEXT, credentials=_KEY),
        )
    ),
)
_RULE = _object(
    "expr",
    alert=_TEXT,
    record=_TEXT,
    expr=_TEXT,
    labels=_LABELS,
    annotations=_LABELS,
    **{"for": _DURATION, "keep_firing_for": _DURATION},
)
_RULES = _object("groups", groups=_list(_object("name rules", name=_TEXT, interval=_DURATION, rules=_list(_RULE))))
_CERTIFICATE = _object(
    "secretName issuerRef dnsNames",
    secretName=_TEXT,
    issuerRef=_object("name", name=_TEXT, kind=_TEXT, group=_TEXT),
    dnsNames=_list({"type": "string", "pattern": r"^(\*\.)?[a-z0-9]([-a-z0-9.]*[a-z0-9])?$", "maxLength": 253}),
    usages=_list({"enum": ["digital signature", "key encipherment", "server auth", "client auth"]}),
)
_SCALED_OBJECT = _object(
    "scaleTargetRef triggers",
    scaleTargetRef=_object("name", apiVersion=_TEXT, kind=_TEXT, name=_TEXT),
    minReplicaCount=_COUNT,
    maxReplicaCount=_COUNT,
    advanced=_object("", horizontalPodAutoscalerConfig=_object("", behavior={"type": "object"})),
    triggers=_list(
        _object(
            "type metadata",
            type={"const": "prometheus"},
            metadata=_object(
                "serverAddress query threshold",
                serverAddress={"type": "string", "pattern": "^https?://"},
                query=_TEXT,
                threshold={"type": "string", "pattern": "^[0-9.]+$"},
            ),
        )
    ),
)
_POD_PARTS = {"containers": _list({"type": "object"}), "volumes": _list({"type": "object"})}
_SERVING_RUNTIME = _object(
    "supportedModelFormats containers",
    supportedModelFormats=_list(
        _object("name", name=_TEXT, version=_TEXT, autoSelect={"type": "boolean"}, priority={"type": "integer", "minimum": 1})
    ),
    protocolVersions=_list({"enum": ["v1", "v2", "grpc-v1", "grpc-v2"]}),
    **_POD_PARTS,
)
_INFERENCE_SERVICE = _object(
    "predictor",
    predictor=_object(
        "model",
        minReplicas=_COUNT,
        maxReplicas=_COUNT,
        terminationGracePeriodSeconds=_COUNT,
        serviceAccountName=_TEXT,
        model=_object(
            "modelFormat",
            modelFormat=_object("name", name=_TEXT, version=_TEXT),
            protocolVersion={"enum": ["v1", "v2", "grpc-v1", "grpc-v2"]},
            runtime=_TEXT,
            storageUri={"type": "string", "pattern": "^(s3|gs|hdfs|https?|pvc|hf|oci)://"},
        ),
    ),
)
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
