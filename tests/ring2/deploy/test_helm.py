"""The Helm chart: what it renders is valid, agrees with itself and with the service; its pod runs under its restrictions."""

import functools
import json
import re
from pathlib import Path

import numpy as np
import pytest
import yaml

from hps.configuration.load import load_configuration
from hps.models.writer import write_sparse_model
from tests import ROOT
from tests.ring1.deploy.test_deploy_files import run
from tests.servers.compose_file import read_dockerfile
from tests.servers.helm import CHART, helm
from tests.servers.helm import rendered as render
from tests.servers.running_service import document_of, model_of, running_service

pytestmark = pytest.mark.helm
VALUES = [*sorted((CHART / "ci").glob("*.yaml")), CHART / "values-try.yaml"]
ENOUGH = ("--set", "config.model_repository=s3://bucket/models")
UID = 10001
rendered = functools.cache(render)
"""Each set of settings is rendered once; nobody changes the objects."""


@pytest.fixture(params=VALUES, ids=lambda path: path.stem)
def values(request) -> Path:
    return request.param


def pods_of(objects):
    (one,) = [object_ for object_ in objects.values() if object_["kind"] in ("StatefulSet", "Deployment")]
    return one, one["spec"]["template"]["spec"], one["spec"]["template"]["spec"]["containers"][0]


def configuration_of(objects):
    (text,) = [object_["data"]["ps.json"] for object_ in objects.values() if "ps.json" in object_.get("data", {})]
    return json.loads(text)


def test_what_is_rendered_is_valid(values, monkeypatch):
    from tests.servers.custom_kinds import validate

    assert len(VALUES) == 7
    assert helm("lint", "--strict", CHART, "--values", values).returncode == 0
    objects = rendered("--values", values)
    assert len(objects) >= 6
    for name, one in objects.items():
        validate(one)
        assert one["metadata"]["labels"]["app.kubernetes.io/instance"] == "shop-hps", name
        assert one["kind"] != "Secret"
    monkeypatch.setenv("HPS_REDIS_PASSWORD", "")
    service = load_configuration(configuration_of(objects)).service
    assert (service.host, service.port) == ("0.0.0.0", 8000)


def test_a_pod_is_confined_and_has_time_to_leave(values):
    objects = rendered("--values", values)
    _, pod, container = pods_of(objects)
    drain_s, ready = configuration_of(objects)["service"].get("drain_s", 5.0), container["readinessProbe"]
    assert pod["terminationGracePeriodSeconds"] >= drain_s + 30
    assert ready["periodSeconds"] * ready["failureThreshold"] < drain_s
    security = {"runAsNonRoot": True, "runAsUser": UID, "seccompProfile": {"type": "RuntimeDefault"}}
    assert security.items() <= pod["securityContext"].items()
    assert pod["enableServiceLinks"] is False
    confined = {"allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"]}}
    assert container["securityContext"] == confined
    assert container["resources"]["limits"].keys() >= {"cpu", "memory"}
    assert not [one["name"] for one in container.get("env", ()) if "value" in one and "PASSWORD" in one["name"]]
    dockerfile = read_dockerfile(ROOT / "deploy" / "Dockerfile")["runtime"]
    assert [rest for name, rest in dockerfile.instructions if name == "USER"] == [f"{UID}:{UID}"]


def test_a_wrong_field_is_found():
    from tests.servers.custom_kinds import validate

    for name, kind, change in (("secured", "Certificate", {"usages": ["client"]}), ("gpu", "Service", {"port": 8000})):
        objects = rendered("--values", CHART / "ci" / f"{name}-values.yaml")
        one = next(object_ for object_ in objects.values() if object_["kind"] == kind)
        with pytest.raises(Exception, match=r"(?i)additional properties|is not one of|does not match"):
            validate(one | {"spec": one["spec"] | change})


def test_objects_agree_with_each_other(values):
    objects = rendered("--values", values)
    owner, pod, container = pods_of(objects)
    labels = owner["spec"]["template"]["metadata"]["labels"]
    document = configuration_of(objects)

    def selects(selector):
        return selector.items() <= labels.items()

    assert selects(owner["spec"]["selector"]["matchLabels"])
    services = [object_ for object_ in objects.values() if object_["kind"] == "Service"]
    assert len(services) == 2
    assert all(selects(service["spec"]["selector"]) for service in services)
    asking = objects["Pod/shop-hps-test"]["metadata"]["labels"]
    assert not [service for service in services if service["spec"]["selector"].items() <= asking.items()]
    ports = {one["name"]: one["containerPort"] for one in container["ports"]}
    configured = {"http": document["service"]["port"], "grpc": document["service"].get("grpc_port")}
    assert ports == {name: port for name, port in configured.items() if port}
    for service in services:
        assert {port["targetPort"] for port in service["spec"]["ports"]} == ports.keys()
        cleartext = [port["name"] for port in service["spec"]["ports"] if port.get("appProtocol") == "kubernetes.io/h2c"]
        assert cleartext == (["grpc"] if "grpc" in ports and "tls_key_path" not in document["service"] else [])
    if owner["kind"] == "StatefulSet":
        assert f"Service/{owner['spec']['serviceName']}" in objects
        assert document["persistent_db"]["path"].startswith("/var/lib/hps/")
    mounts = {one["name"]: one["mountPath"] for one in container["volumeMounts"]}
    kept = [one["metadata"]["name"] for one in owner["spec"].get("volumeClaimTemplates", ())]
    assert mounts.keys() == {one["name"] for one in pod["volumes"]} | set(kept)
    named = re.findall(r'"(?:tokens|tls_\w+|password)_path": "(.*?)"', json.dumps(document))
    named += re.findall(r'"(?:tls_ca_certificate|ssl\.ca\.location)": "(.*?)"', json.dumps(document))
    for path in named:
        assert any(path.startswith(f"{place}/") for place in mounts.values()), path
    for object_ in objects.values():
        match object_["kind"]:
            case "PodDisruptionBudget" | "NetworkPolicy":
                selector = object_["spec"].get("selector") or object_["spec"]["podSelector"]
                assert selects(selector["matchLabels"])
            case "HorizontalPodAutoscaler" | "ScaledObject":
                target = object_["spec"]["scaleTargetRef"]
                assert f"{target['kind']}/{target['name']}" in objects
                spec = object_["spec"].get("advanced", {}).get("horizontalPodAutoscalerConfig") or object_["spec"]
                assert spec["behavior"]["scaleDown"]["stabilizationWindowSeconds"] == 1800
                assert "replicas" not in owner["spec"]
            case "Certificate":  # the probe and Prometheus show the server's certificate as clients
                assert ("client auth" in object_["spec"]["usages"]) == ("tls_client_ca_path" in document["service"])
            case "Ingress":
                [rule] = object_["spec"]["rules"]
                [path] = rule["http"]["paths"]
                target = path["backend"]["service"]
                [service] = [one for one in services if one["metadata"]["name"] == target["name"]]
                assert target["port"]["name"] in {port["name"] for port in service["spec"]["ports"]}
                assert [one["hosts"] for one in object_["spec"]["tls"]] == [[rule["host"]]]
            case "ServiceMonitor":
                selector = object_["spec"]["selector"]
                chosen = [each for each in services if selector["matchLabels"].items() <= each["metadata"]["labels"].items()]
                left = [each for each in chosen if selector["matchExpressions"][0]["key"] not in each["metadata"]["labels"]]
                assert len(left) == 1


def test_probes_and_metrics_are_those_of_the_service(tmp_path):
    write_sparse_model(tmp_path / "item.model", (np.arange(10), np.zeros((10, 4), np.float32)))
    objects = rendered("--values", CHART / "ci" / "keda-values.yaml")
    _, _, container = pods_of(objects)
    (scaled,) = [object_ for object_ in objects.values() if object_["kind"] == "ScaledObject"]
    with running_service(document_of(model_of("m", [tmp_path / "item.model"], {"item": 4}))) as service:
        for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
            assert service.client.get(container[probe]["httpGet"]["path"]).status_code == 200
        metrics = service.client.get("/metrics").text
    query = scaled["spec"]["triggers"][0]["metadata"]["query"]
    assert re.findall(r"\bhps_\w+\{.*?\}", query) == ['hps_http_lookups_pending{namespace="shop",service="shop-hps"}']
    assert "\nhps_http_lookups_pending{" in metrics


def rules_of(*settings):
    """The specification of a chart's rules, and each rule by its name."""
    objects = rendered(*ENOUGH, "--set", "monitoring.rules=true", *settings)
    (spec,) = [object_["spec"] for object_ in objects.values() if object_["kind"] == "PrometheusRule"]
    return spec, by_name(spec)


def by_name(document):
    return {one.get("alert", one.get("record")): one for group in document["groups"] for one in group["rules"]}


def test_rules_are_those_of_the_repository_and_a_release_counts_its_own_replicas():
    _, rules = rules_of()
    expected = by_name(yaml.safe_load((ROOT / "deploy" / "prometheus" / "alerts.yml").read_text()))
    changed = [name for name, one in expected.items() if rules[name]["expr"] != one["expr"]]
    assert changed == ["HPSNoReplicaReady", "HPSReplicaLost"]
    assert rules.keys() == expected.keys()
    assert expected.keys() - rules_of("--set", "autoscaling.kind=hpa")[1].keys() == {"HPSReplicaLost"}
    for name in changed:
        assert rules[name]["labels"] == expected[name]["labels"] | {"namespace": "shop", "service": "shop-hps"}
    same = {"annotations": None, "expr": None, "labels": None}
    assert {name: one | same for name, one in rules.items()} == {name: one | same for name, one in expected.items()}


@pytest.mark.parametrize(
    ("settings", "page"),
    [
        ("replicas=2", "http://shop-hps-pods.shop.svc:8000/runbooks"),
        ("tls.existingSecret=t", "https://shop-hps-pods.shop.svc:8000/runbooks"),
        ("ingress.enabled=true,ingress.host=hps.example.com", "http://hps.example.com/runbooks"),
        ("ingress.enabled=true,ingress.host=hps.example.com,ingress.tlsSecret=t", "https://hps.example.com/runbooks"),
        ("monitoring.runbookBase=https://docs.example.com/hps/", "https://docs.example.com/hps/operations.html"),
        ("monitoring.runbookBase=https://docs.example.com", "https://docs.example.com/operations.html"),
    ],
)
def test_alerts_link_to_the_page_of_the_release_unless_another_is_named(settings, page):
    _, rules = rules_of("--set", settings)
    urls = {name: one["annotations"]["runbook_url"] for name, one in rules.items() if "alert" in one}
    assert len(urls) > 20
    assert urls == {name: f"{page}#{name.lower()}" for name in urls}


def test_an_ingress_leads_http_and_grpc_to_ports_that_speak_them():
    def ingresses(*settings):
        objects = rendered("--values", CHART / "ci" / "ingress-values.yaml", *settings)
        found = [one for one in objects.values() if one["kind"] == "Ingress"]
        protocol = "nginx.ingress.kubernetes.io/backend-protocol"
        return {one["spec"]["rules"][0]["host"]: one["metadata"]["annotations"][protocol] for one in found}

    assert ingresses() == {"hps.example.com": "HTTP", "hps-grpc.example.com": "GRPC"}
    secured = ("--set", "tls.existingSecret=t")
    assert ingresses(*secured) == {"hps.example.com": "HTTPS", "hps-grpc.example.com": "GRPCS"}
    assert ingresses("--set", "ingress.grpc.host=") == {"hps.example.com": "HTTP"}
    assert "Ingress" not in {one["kind"] for one in rendered(*ENOUGH).values()}


def test_the_steps_that_grow_a_volume_change_what_they_must_and_restart_no_pod():
    from tests.servers.custom_kinds import validate

    steps = (ROOT / "docs" / "kubernetes.md").read_text().partition("## Grow a volume\n")[2].partition("\n## ")[0]
    patches = re.findall(r"patch pvc (\S+) --patch '(.*)'", steps)
    (size,) = re.findall(r"persistence\.size=(\w+)", steps)
    before, after = (render(*ENOUGH, *more, release="ranking") for more in ((), ("--set", f"persistence.size={size}")))
    changed = [name for name in before if before[name] != after[name]]
    assert changed == ["StatefulSet/ranking-hps"]
    (old,), (new,) = (objects[changed[0]]["spec"].pop("volumeClaimTemplates") for objects in (before, after))
    assert before[changed[0]] == after[changed[0]], "its pods are adopted as they are"
    assert "statefulset ranking-hps --cascade=orphan" in steps
    replicas = range(before[changed[0]]["spec"]["replicas"])
    assert [claim for claim, _ in patches] == [f"{old['metadata']['name']}-ranking-hps-{ordinal}" for ordinal in replicas]
    for claim, patch in patches:
        wanted = json.loads(patch)["spec"]["resources"]
        assert wanted == new["spec"]["resources"]
        validate({"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {"name": claim}, "spec": new["spec"]})
    assert old["spec"]["resources"] != new["spec"]["resources"]
    assert old["spec"] | {"resources": {}} == new["spec"] | {"resources": {}}


def test_the_image_is_the_one_for_the_driver():
    def image(*settings):
        _, _, container = pods_of(rendered(*ENOUGH, *settings))
        return container["image"]

    version = yaml.safe_load((CHART / "Chart.yaml").read_text())["appVersion"]
    assert image() == f"hps-server:{version}-cpu"
    assert image("--set", "gpu.count=1") == f"hps-server:{version}-cuda13"
    assert image("--set", "gpu.count=1,gpu.cuda=12") == f"hps-server:{version}-cuda12"
    assert image("--set", "gpu.count=1,image.tag=mine") == "hps-server:mine"


@pytest.mark.promtool
def test_a_release_without_a_ready_replica_is_noticed_beside_another_release(tmp_path):
    spec, rules = rules_of()
    (tmp_path / "rules.yml").write_text(yaml.safe_dump(spec))
    series = [
        {"series": 'hps_ready{namespace="shop",service="shop-hps",instance="a"}', "values": "1x10 0x20"},
        {"series": 'hps_ready{namespace="other",service="shop-hps",instance="b"}', "values": "1x30"},
    ]
    name, labels = "HPSNoReplicaReady", {"severity": "critical", "namespace": "shop", "service": "shop-hps"}
    fired = [{"exp_labels": labels, "exp_annotations": rules[name]["annotations"]}]
    alerts = [{"eval_time": at, "alertname": name, "exp_alerts": then} for at, then in (("9m", []), ("20m", fired))]
    test = {"rule_files": ["rules.yml"], "tests": [{"interval": "1m", "input_series": series, "alert_rule_test": alerts}]}
    (tmp_path / "test.yml").write_text(yaml.safe_dump(test))
    run("promtool", "test", "rules", "test.yml", cwd=tmp_path)


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
    assert document["persistent_db"] == {"type": "row_files", "path": "/var/lib/hps/rows"}


def test_an_ordinal_is_a_share_of_the_tables(monkeypatch):
    _, _, container = pods_of(rendered(*ENOUGH, "--set", "shards=3,replicas=6"))
    pod, shard = container["env"]
    assert pod == {"name": "POD_NAME", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}}
    document = document_of(model_of("m", ["a"], {"a": 4}))
    for ordinal in range(6):
        monkeypatch.setenv(shard["name"], shard["value"].replace("$(POD_NAME)", f"shop-hps-{ordinal}"))
        assert str(load_configuration(document).models[0].share) == f"{ordinal % 3}/3"
    assert "env" not in pods_of(rendered(*ENOUGH))[2]


def test_replicas_are_each_others_peers_where_wanted():
    enabled = ("--set", "peers.enabled=true,config.model_source.parallel_reads=4")
    objects = rendered(*ENOUGH, *enabled)
    document = configuration_of(objects)
    [url] = load_configuration(document).model_source.peers.urls
    assert document["model_source"]["parallel_reads"] == 4
    [pods] = [one for one in objects.values() if one["kind"] == "Service" and one["spec"].get("clusterIP") == "None"]
    assert url.startswith(f"http://{pods['metadata']['name']}.")
    secured = configuration_of(rendered(*ENOUGH, *enabled, "--set", "tls.existingSecret=t"))
    assert secured["model_source"]["peers"]["urls"] == [url.replace("http:", "https:")]
    assert "model_source" not in configuration_of(rendered(*ENOUGH))


WRONG = [
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
    ("ingress.enabled=true", "ingress.host is empty"),
    ("ingress.enabled=true,ingress.host=a.b,ingress.grpc.host=c.b", "grpc.enabled is not"),
    ("ingress.enabled=true,ingress.host=a.b,ingress.grpc.host=c.b,grpc.enabled=true", "needs ingress.tlsSecret"),
    (
        "ingress.enabled=true,ingress.host=a.b,ingress.grpc.host=a.b,grpc.enabled=true,ingress.tlsSecret=t",
        "expected another name",
    ),
    ("ingress.host=Not A Host", "host"),
    ("models.sampleRows=5,models.existingClaim=c", "are both set"),
    ("test.token.key=", "key"),
    ("peers.enabled=true,tls.existingSecret=t,tls.clientCA=true", "replicas have no client certificate"),
    ("config.model_source.peers.token=t", "config.model_source.peers.token is a secret"),
    ("shards=0", "shards"),
    ("shards=3", "replicas: expected a multiple of shards"),
    ("shards=2,persistence.enabled=false,config.persistent_db=null", "expected a StatefulSet"),
    ("shards=2,autoscaling.kind=keda", "expected autoscaling.kind none"),
]


def test_wrong_values_are_refused():
    for setting, problem in WRONG:
        done = helm("template", "r", CHART, *ENOUGH, "--set", setting)
        assert (done.returncode != 0, problem in done.stderr) == (True, True), (setting, done.stderr)


def test_a_packaged_chart_renders_the_same_elsewhere(tmp_path):
    assert helm("package", CHART, "--destination", tmp_path).returncode == 0  # as the release does
    (package,) = tmp_path.glob("hps-*.tgz")
    linked = (*ENOUGH, "--set", "monitoring.rules=true,monitoring.dashboard=true")  # their files are links in the repository
    ours, packaged = (helm("template", "r", chart, *linked).stdout for chart in (CHART, package))
    assert "HPSNoReplicaReady" in packaged
    assert ours == packaged
