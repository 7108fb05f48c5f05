"""The Helm chart: what it renders is valid, agrees with itself and with the service; its pod runs under its restrictions."""

import functools
import json
import re
import subprocess
from pathlib import Path

import numpy as np
import pytest
import yaml

from hps.configuration.load import load_configuration
from hps.models.writer import write_sparse_model
from tests import ROOT
from tests.servers.compose_file import read_dockerfile
from tests.servers.helm import CHART, helm
from tests.servers.helm import rendered as render
from tests.servers.running_service import document_of, model_of, running_service

pytestmark = pytest.mark.helm
VALUES = sorted((CHART / "ci").glob("*.yaml"))
ENOUGH = ("--set", "config.model_repository=s3://bucket/models")
UID = 10001
rendered = functools.cache(render)
"""Each set of settings is rendered once; nobody changes the objects."""


@pytest.fixture(params=VALUES, ids=lambda path: path.stem)
def values(request) -> Path:
    return request.param


def pods_of(objects):
    (one,) = [one for one in objects.values() if one["kind"] in ("StatefulSet", "Deployment")]
    return one, one["spec"]["template"]["spec"], one["spec"]["template"]["spec"]["containers"][0]


def configuration_of(objects):
    (text,) = [one["data"]["ps.json"] for one in objects.values() if "ps.json" in one.get("data", {})]
    return json.loads(text)


def test_there_are_five_sets_of_values():
    assert len(VALUES) == 5


def test_what_is_rendered_is_valid(values):
    from tests.servers.custom_kinds import validate

    assert helm("lint", "--strict", CHART, "--values", values).returncode == 0
    objects = rendered("--values", values)
    assert len(objects) >= 6
    for name, one in objects.items():
        validate(one)
        assert one["metadata"]["labels"]["app.kubernetes.io/instance"] == "shop-hps", name


@pytest.mark.parametrize(
    ("name", "kind", "change"),
    [
        ("keda", "ScaledObject", {"cooldownPeriods": 5}),
        ("keda", "ScaledObject", {"advanced": {"horizontalPodAutoscalerConfig": {"behavior": {"scaleDown": {"seconds": 5}}}}}),
        ("secured", "ServiceMonitor", {"endpoints": [{"port": "http", "tlsConfig": {"caFile": {}}}]}),
        ("secured", "Certificate", {"usages": ["client"]}),
        ("gpu", "PrometheusRule", {"groups": [{"name": "hps", "rules": [{"expr": "up", "for": "soon"}]}]}),
        ("gpu", "Service", {"port": 8000}),
    ],
)
def test_a_wrong_field_is_found(name, kind, change):
    from tests.servers.custom_kinds import validate

    (one,) = [one for one in rendered("--values", CHART / "ci" / f"{name}-values.yaml").values() if one["kind"] == kind][:1]
    validate(one)
    with pytest.raises(Exception, match=r"(?i)additional properties|is not one of|does not match"):
        validate(one | {"spec": one["spec"] | change})


def test_the_configuration_is_one_that_the_service_reads(values, tmp_path, monkeypatch):
    monkeypatch.setenv("HPS_REDIS_PASSWORD", "")
    document = configuration_of(rendered("--values", values))
    configuration = load_configuration(document)
    assert (configuration.service.host, configuration.service.port) == ("0.0.0.0", 8000)


def test_objects_agree_with_each_other(values):
    objects = rendered("--values", values)
    owner, pod, container = pods_of(objects)
    labels = owner["spec"]["template"]["metadata"]["labels"]
    document = configuration_of(objects)

    def selects(selector):
        return selector.items() <= labels.items()

    assert selects(owner["spec"]["selector"]["matchLabels"])
    services = [one for one in objects.values() if one["kind"] == "Service"]
    assert len(services) == 2
    assert all(selects(one["spec"]["selector"]) for one in services)
    ports = {one["name"]: one["containerPort"] for one in container["ports"]}
    assert ports == {"http": document["service"]["port"]} | (
        {"grpc": document["service"]["grpc_port"]} if "grpc_port" in document["service"] else {}
    )
    for one in services:
        assert {port["targetPort"] for port in one["spec"]["ports"]} == ports.keys()
        cleartext = [port["name"] for port in one["spec"]["ports"] if port.get("appProtocol") == "kubernetes.io/h2c"]
        assert cleartext == (["grpc"] if "grpc" in ports and "tls_key_path" not in document["service"] else [])
    if owner["kind"] == "StatefulSet":
        assert f"Service/{owner['spec']['serviceName']}" in objects
        assert document["persistent_db"]["path"].startswith("/var/lib/hps/")
    mounts = {one["name"]: one["mountPath"] for one in container["volumeMounts"]}
    kept = [one["metadata"]["name"] for one in owner["spec"].get("volumeClaimTemplates", ())]
    assert mounts.keys() == {one["name"] for one in pod["volumes"]} | set(kept)
    named = [
        document["service"].get(key) for key in ("tokens_path", "tls_certificate_path", "tls_key_path", "tls_client_ca_path")
    ]
    named += [document.get("volatile_db", {}).get(key) for key in ("password_path", "tls_ca_certificate")]
    named += [document.get("update_source", {}).get("config", {}).get("ssl.ca.location")]
    for path in filter(None, named):
        assert any(path.startswith(f"{place}/") for place in mounts.values()), path
    for one in objects.values():
        match one["kind"]:
            case "PodDisruptionBudget" | "NetworkPolicy":
                selector = one["spec"].get("selector") or one["spec"]["podSelector"]
                assert selects(selector["matchLabels"])
            case "HorizontalPodAutoscaler" | "ScaledObject":
                target = one["spec"]["scaleTargetRef"]
                assert f"{target['kind']}/{target['name']}" in objects
                spec = one["spec"].get("advanced", {}).get("horizontalPodAutoscalerConfig") or one["spec"]
                assert spec["behavior"]["scaleDown"]["stabilizationWindowSeconds"] == 1800
                assert "replicas" not in owner["spec"]
            case "Certificate":  # the probe and Prometheus show the server's certificate as clients
                assert ("client auth" in one["spec"]["usages"]) == ("tls_client_ca_path" in document["service"])
            case "ServiceMonitor":
                selector = one["spec"]["selector"]
                chosen = [each for each in services if selector["matchLabels"].items() <= each["metadata"]["labels"].items()]
                left = [each for each in chosen if selector["matchExpressions"][0]["key"] not in each["metadata"]["labels"]]
                assert len(left) == 1


def test_a_pod_has_time_to_leave(values):
    objects = rendered("--values", values)
    _, pod, container = pods_of(objects)
    service = configuration_of(objects)["service"]
    ready = container["readinessProbe"]
    drain_s = service.get("drain_s", 5.0)
    assert pod["terminationGracePeriodSeconds"] >= drain_s + 30
    assert ready["periodSeconds"] * ready["failureThreshold"] < drain_s


def test_a_pod_is_confined(values):
    _, pod, container = pods_of(rendered("--values", values))
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["runAsUser"] == UID
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert pod["enableServiceLinks"] is False
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert container["resources"]["limits"].keys() >= {"cpu", "memory"}
    dockerfile = read_dockerfile(ROOT / "deploy" / "Dockerfile")["runtime"]
    (user,) = [rest for name, rest in dockerfile.instructions if name == "USER"]
    assert user == f"{UID}:{UID}"


def test_probes_and_metrics_are_those_of_the_service(tmp_path):
    write_sparse_model(tmp_path / "item.model", (np.arange(10), np.zeros((10, 4), np.float32)))
    objects = rendered("--values", CHART / "ci" / "keda-values.yaml")
    _, _, container = pods_of(objects)
    (scaled,) = [one for one in objects.values() if one["kind"] == "ScaledObject"]
    with running_service(document_of(model_of("m", [tmp_path / "item.model"], {"item": 4}))) as service:
        for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
            assert service.client.get(container[probe]["httpGet"]["path"]).status_code == 200
        metrics = service.client.get("/metrics").text
    query = scaled["spec"]["triggers"][0]["metadata"]["query"]
    assert re.findall(r"\bhps_\w+\{.*?\}", query) == ['hps_http_lookups_pending{namespace="shop",service="shop-hps"}']
    assert "\nhps_http_lookups_pending{" in metrics


def test_rules_are_those_of_the_repository_and_a_release_counts_its_own_replicas():
    def rules_of(*settings):
        objects = rendered(*ENOUGH, "--set", "monitoring.rules=true", *settings)
        (spec,) = [one["spec"] for one in objects.values() if one["kind"] == "PrometheusRule"]
        return spec, {one.get("alert", one.get("record")): one for group in spec["groups"] for one in group["rules"]}

    _, rules = rules_of()
    original = yaml.safe_load((ROOT / "deploy" / "prometheus" / "alerts.yml").read_text())
    expected = {one.get("alert", one.get("record")): one for group in original["groups"] for one in group["rules"]}
    changed = [name for name, one in expected.items() if rules[name] != one]
    assert changed == ["HPSNoReplicaReady", "HPSReplicaLost"]
    assert rules.keys() == expected.keys()
    assert expected.keys() - rules_of("--set", "autoscaling.kind=hpa")[1].keys() == {"HPSReplicaLost"}
    for name in changed:
        assert rules[name]["labels"] == expected[name]["labels"] | {"namespace": "shop", "service": "shop-hps"}


def test_the_image_is_the_one_for_the_driver():
    def image(*settings):
        _, _, container = pods_of(rendered(*ENOUGH, *settings))
        return container["image"]

    version = yaml.safe_load((CHART / "Chart.yaml").read_text())["appVersion"]
    assert image() == f"hps-server:{version}-cpu"
    assert image("--set", "gpu.count=1") == f"hps-server:{version}-cuda13"
    assert image("--set", "gpu.count=1,gpu.cuda=12") == f"hps-server:{version}-cuda12"
    assert image("--set", "gpu.count=1,image.tag=mine") == "hps-server:mine"


@pytest.mark.parametrize("base", ["https://docs.example.com/hps", "https://docs.example.com/hps/"])
def test_runbooks_are_where_the_value_says(base):
    objects = rendered(*ENOUGH, "--set", f"monitoring.rules=true,monitoring.runbookBase={base}")
    (spec,) = [one["spec"] for one in objects.values() if one["kind"] == "PrometheusRule"]
    urls = {
        one["alert"]: one["annotations"]["runbook_url"] for group in spec["groups"] for one in group["rules"] if "alert" in one
    }
    assert len(urls) > 20
    assert urls == {name: f"https://docs.example.com/hps/operations.html#{name.lower()}" for name in urls}


@pytest.mark.promtool
def test_a_release_without_a_ready_replica_is_noticed_beside_another_release(tmp_path):
    objects = rendered(*ENOUGH, "--set", "monitoring.rules=true")
    (spec,) = [one["spec"] for one in objects.values() if one["kind"] == "PrometheusRule"]
    (tmp_path / "rules.yml").write_text(yaml.safe_dump(spec))
    series = [
        {"series": 'hps_ready{namespace="shop",service="shop-hps",instance="a"}', "values": "1x10 0x20"},
        {"series": 'hps_ready{namespace="other",service="shop-hps",instance="b"}', "values": "1x30"},
    ]
    name, service = "HPSNoReplicaReady", {"namespace": "shop", "service": "shop-hps"}
    (annotations,) = [one["annotations"] for group in spec["groups"] for one in group["rules"] if one.get("alert") == name]
    fired = [{"exp_labels": {"severity": "critical", **service}, "exp_annotations": annotations}]
    alerts = [{"eval_time": at, "alertname": name, "exp_alerts": then} for at, then in (("9m", []), ("20m", fired))]
    test = {"rule_files": ["rules.yml"], "tests": [{"interval": "1m", "input_series": series, "alert_rule_test": alerts}]}
    (tmp_path / "test.yml").write_text(yaml.safe_dump(test))
    done = subprocess.run(
        ["promtool", "test", "rules", "test.yml"], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_change_of_the_configuration_restarts_pods_and_one_of_replicas_does_not():
    def checksum(*more):
        owner, _, _ = pods_of(rendered(*ENOUGH, *more))
        return owner["spec"]["template"]["metadata"]["annotations"]["checksum/configuration"]

    assert checksum() == checksum("--set", "replicas=5")
    assert checksum() != checksum("--set", "config.service.drain_s=9")


def test_the_chart_decides_places_and_nothing_else():
    more = ("--set", "config.service.port=1,config.service.max_keys_per_request=7,config.persistent_db.path=/x")
    document = configuration_of(rendered(*ENOUGH, *more))
    assert document["service"] == {"host": "0.0.0.0", "port": 8000, "max_keys_per_request": 7}
    assert document["persistent_db"] == {"type": "rocks_db", "path": "/var/lib/hps/rocksdb"}


@pytest.mark.parametrize(
    ("setting", "problem"),
    [
        ("replicas=-1", "replicas"),
        ("replica=3", "replica"),
        ("config.model_repository=", "nothing to serve"),
        ("persistence.enabled=false", "each replica needs a volume"),
        ("resources.limits.memory=lots", "memory"),
        ("autoscaling.kind=vpa", "kind"),
        ("image.pullPolicy=Sometimes", "pullPolicy"),
        ("tokens.existingSecret=Not A Name", "existingSecret"),
        ("gpu.count=one", "count"),
        ("gpu.cuda=11", "cuda"),
        ("podDisruptionBudget.maxUnavailable=0", "maxUnavailable"),
        ("config.service.bearer_token=abc", "is a secret"),
        ("config.volatile_db.password=abc", "is a secret"),
        ("redis.existingSecret=redis-auth", "names no Redis"),
        ("monitoring.interval=often", "interval"),
        ("autoscaling.kind=hpa,autoscaling.minReplicas=9", "got minReplicas 9, expected at most maxReplicas, 8"),
        ("tls.clientCA=true", "there is no certificate of the server"),
        ("config.service.drain_s=2", "drain_s: expected at least 3"),
        (r"config.update_source.config.sasl\.password=abc", "sasl.password is a secret"),
        ("env[0].name=HPS_ADMIN_TOKEN,env[0].value=abc", "HPS_ADMIN_TOKEN is a secret"),
        ("extraVolumes[0].emptyDir=x", "name"),
        ("config.service=null", "/config/service': got null, want object"),
        ("config.volatile_db=null", "/config/volatile_db': got null, want object"),
        ("config.update_source.config=null", "/config/update_source/config': got null, want object"),
        ("tls.existingSecret=one,tls.certManager.enabled=true", "are both set, expected one"),
        ("monitoring.runbookBase=docs", "runbookBase"),
    ],
)
def test_wrong_values_are_refused(setting, problem):
    done = helm("template", "r", CHART, *ENOUGH, "--set", setting)
    assert done.returncode != 0
    assert problem in done.stderr


def test_no_secret_is_rendered(values):
    objects = rendered("--values", values)
    assert not any(one["kind"] == "Secret" for one in objects.values())
    _, _, container = pods_of(objects)
    assert not [one["name"] for one in container.get("env", ()) if "value" in one and "PASSWORD" in one["name"]]


def test_a_packaged_chart_renders_the_same_elsewhere(tmp_path):
    assert helm("package", CHART, "--destination", tmp_path).returncode == 0  # as the release does
    (package,) = tmp_path.glob("hps-*.tgz")
    settings = (
        *ENOUGH,
        "--set",
        "monitoring.rules=true,monitoring.dashboard=true",
    )  # of files that are links in the repository
    ours, packaged = (helm("template", "r", chart, *settings).stdout for chart in (CHART, package))
    assert "HPSNoReplicaReady" in packaged
    assert ours == packaged
