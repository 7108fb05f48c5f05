"""The files of deploy/: checked by the tools that read them where those are here, and against the code."""

import json
import re
import subprocess
import sys
import tomllib

import pytest
import yaml
from packaging.requirements import Requirement

from deploy import lock
from hps.configuration.load import load_configuration
from hps.models.writer import write_sparse_model
from hps.serve.engine.app import CLOSE_TIMEOUT_S
from hps.tools.cli.tables.sample import sample_chunks
from tests import ROOT
from tests.servers.compose_file import Compose, compose_of, read_dockerfile, seconds
from tests.servers.running_service import document_of, model_of, running_service

DEPLOY = ROOT / "deploy"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
VARIANTS = ("cpu", "cuda12", "cuda13")
PROFILES = ("cpu", "gpu", "cluster", "monitoring")
SECRETS = {"HPS_BEARER_TOKEN": "a", "HPS_REDIS_PASSWORD": "b", "GRAFANA_PASSWORD": "c"}
EVERYTHING = compose_of(PROFILES)
DASHBOARD = json.loads((DEPLOY / "grafana" / "dashboards" / "hps.json").read_text())
TEMPLATES = DEPLOY / "helm" / "hps" / "templates"
_METRIC = re.compile(r"\b(?:hps|process|haproxy|redis)_\w+\b|\bup\b(?=\{)")


def run(*command, cwd=DEPLOY, env=None):
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def stages_of(prefix=""):
    found = read_dockerfile(DEPLOY / "Dockerfile")
    return {name: found[f"{prefix}{name}"] for name in VARIANTS}


def yaml_of(*place):
    return yaml.safe_load(DEPLOY.joinpath(*place).read_text())


def test_scripts_are_shell():
    for script in DEPLOY.glob("*.sh"):
        run("sh", "-n", script)


def test_no_secret_has_a_default():
    for secret in SECRETS:
        with pytest.raises(KeyError, match=secret):
            Compose(DEPLOY / "docker-compose.yml", {key: value for key, value in SECRETS.items() if key != secret}, *PROFILES)


def test_example_environment_names_every_variable_of_the_compose_file():
    text = (DEPLOY / "docker-compose.yml").read_text()
    used = set(re.findall(r"(?<!\$)\$\{(\w+)", text))
    example = (DEPLOY / ".env.example").read_text()
    assert used == set(re.findall(r"^(?:# )?(\w+)=", example, re.MULTILINE))
    for name, default in re.findall(r"^# (\w+)=(\S+)", example, re.MULTILINE):
        assert f"${{{name}:-{default}}}" in text
    assert ".env" in (DEPLOY / ".gitignore").read_text().split()


@pytest.mark.parametrize("name", EVERYTHING.services)
def test_every_service_is_confined_and_its_image_pinned(name):
    service = EVERYTHING.services[name]
    confined = {"read_only": True, "cap_drop": ["ALL"], "security_opt": ["no-new-privileges:true"]}
    assert confined.items() <= service.items()
    assert service["restart"] in {"unless-stopped", "on-failure:3"}
    assert {"cpus", "memory", "pids"} <= set(service["deploy"]["resources"]["limits"])
    assert {"max-size", "max-file"} <= set(service["logging"]["options"])
    stage = EVERYTHING.stage(name)
    assert service.get("healthcheck") or stage.healthcheck
    assert not service.get("privileged")
    assert all(port.startswith("127.0.0.1:") for port in service.get("ports", ()))
    assert re.fullmatch(r"[\w/-]+:v?\d+\.\d+\.\d+[\w.-]*", service["image"])
    if "build" in service:
        assert re.fullmatch(rf"python:{lock.PYTHON}\.\d+-slim-\w+@sha256:[0-9a-f]{{64}}", stage.image)
        assert stage.user == "10001:10001"


def test_nothing_but_the_balancer_and_the_monitors_is_published():
    published = {name for name, service in EVERYTHING.services.items() if "ports" in service}
    assert published == {"balancer", "prometheus", "grafana"}
    redis = [service for service in EVERYTHING.services.values() if service["image"].startswith("redis:")]
    assert [list(service["networks"]) for service in redis] == [["back"]] * 8
    assert EVERYTHING.document["networks"]["back"]["internal"] is True


def test_every_writable_volume_has_one_owner():
    mounts = [one.split(":") for service in EVERYTHING.services.values() for one in service.get("volumes", ())]
    written = sorted(source for source, _, *mode in mounts if "/" not in source and mode != ["ro"])
    assert written == sorted(EVERYTHING.document["volumes"])


def test_replicas_may_end_what_they_do():
    services = [service for service in EVERYTHING.services.values() if service["image"].startswith("hps-server")]
    pauses = [seconds(service["stop_grace_period"]) for service in services if "stop_grace_period" in service]
    assert len(pauses) == 4, "all but the one-shot"
    # the requests', the lookups', and the parameter server's
    assert min(pauses) > load_configuration(ROOT / "configs" / "docker.json").service.drain_s + 3 * CLOSE_TIMEOUT_S


def test_balancer_waits_longer_than_a_request_may_take_and_notices_a_stop_before_it_is_one():
    service = load_configuration(ROOT / "configs" / "docker.json").service
    text = (DEPLOY / "haproxy.cfg").read_text()
    assert seconds(re.search(r"timeout server (\w+)", text)[1]) > service.request_timeout_s
    interval, failures = re.search(r"check inter (\w+) fall (\d+)", text).groups()
    assert seconds(interval) * int(failures) + seconds(re.search(r"timeout check (\w+)", text)[1]) < service.drain_s


def test_balancer_and_prometheus_know_every_replica():
    serving = {name for name, one in EVERYTHING.services.items() if one.get("command") == ["serve", "/etc/hps/ps.json"]}
    assert serving == set(re.findall(r"^ +server (\S+) \1:8000$", (DEPLOY / "haproxy.cfg").read_text(), re.MULTILINE))
    jobs = yaml_of("prometheus", "prometheus.yml")["scrape_configs"]
    assert serving == set(next(job for job in jobs if job["job_name"] == "hps")["dns_sd_configs"][0]["names"])


def test_configuration_fits_what_the_compose_file_mounts_and_calls_its_services():
    configuration, services = load_configuration(ROOT / "configs" / "docker.json"), EVERYTHING.services
    assert "/var/lib/hps" in [service.split(":")[1] for service in services["hps-1"]["volumes"]]
    assert str(configuration.persistent_db.path).startswith("/var/lib/hps/")
    assert all(source.startswith("/models/") for model in configuration.models for source in model.sparse_files)
    assert (configuration.volatile_db.address, configuration.service.port) == ("redis:6379", 8000)
    aliases = [one["networks"]["back"]["aliases"] for name, one in services.items() if re.match(r"redis-\d", name)]
    assert aliases == [["redis"]] * 6


def test_images_have_no_build_tools():
    runs = [text for stage in stages_of().values() for kind, text in stage.instructions if kind == "RUN"]
    assert not [text for text in runs if re.search(r"apt|pip|gcc", text)]


@pytest.mark.parametrize("name", VARIANTS)
def test_images_are_made_of_locked_wheels_and_list_what_was_installed(name):
    stage = stages_of()[name]
    runs = [text for kind, text in stages_of("build-")[name].instructions if kind == "RUN"]
    installing = [re.sub(r" {2,}", " ", one) for text in runs for one in text.split("&&") if " install " in one]
    ours = [one for one in installing if one.endswith("--no-index --no-deps dist/*.whl ")]
    locked = [one for one in installing if "--no-compile --require-hashes --only-binary :all: " in one]
    assert (len(ours), len(locked)) == (1, len(installing) - 1) == (1, 1 if name == "cpu" else 2)
    assert f"--requirement deploy/requirements-{name}.txt" in locked[-1]
    assert runs[-1].endswith("&& /opt/hps/bin/python deploy/sbom.py > /opt/hps/sbom.cdx.json")
    assert ("COPY", f"--from=build-{name} /opt/hps /opt/hps") == stage.instructions[-1]
    if name != "cpu":
        compose = compose_of(("gpu",), HPS_CUDA=name[4:])
        assert compose.services["hps-gpu"]["image"].endswith(f"-{name}")
        for one in (stage, compose.stage("hps-gpu")):
            assert one.environment["NVIDIA_REQUIRE_CUDA"] == f"cuda>={name[4:]}.0"


def test_labels_say_what_pyproject_says():
    (text,) = [text for kind, text in read_dockerfile(DEPLOY / "Dockerfile")["runtime"].instructions if kind == "LABEL"]
    labels = dict(re.findall(r'org\.opencontainers\.image\.(\w+)="([^"]*)"', text))
    assert (labels["version"], labels["licenses"]) == (PROJECT["version"], PROJECT["license"])
    assert PROJECT["description"].startswith(labels["description"])


def pins(name):
    """The versions of a file of requirements, and how many hashes each has."""
    text = lock.path_of(name).read_text()
    entries = {Requirement(key): entry.count("sha256:") for key, entry in lock.packages(text).items()}
    assert len(entries) == len(re.findall(r"^[\w-]+==", text, re.MULTILINE))
    return {one.name: (next(iter(one.specifier)).version, hashes) for one, hashes in entries.items()}


@pytest.mark.parametrize("name", lock.sets())
def test_locked_versions_are_those_that_pyproject_asks_for(name):
    found = pins(name) | (pins("cpu") if name in VARIANTS else {})
    wanted = [Requirement(set_) for set_ in lock.sets()[name]]
    assert wanted
    for one in wanted:
        version, hashes = found[one.name]
        assert one.specifier.contains(version), one
        assert hashes > 0, one
    assert name != "cpu" or len(found) > 2 * len(wanted), "what they need in turn is not there"


def test_what_cuda_adds_is_nothing_that_every_image_has():
    assert not pins("cuda12").keys() & pins("cpu").keys()
    mine, theirs = ([pin for pin in pins(name) if "nvidia" in pin] for name in ("cuda12", "cuda13"))
    assert [name.rpartition("-cu")[0] or name for name in mine] == theirs


def test_a_change_of_pyproject_makes_the_files_stale(tmp_path):
    assert lock.stale() == []
    text, every = (ROOT / "pyproject.toml").read_text(), [f"requirements-{name}.txt" for name in VARIANTS]
    for old, new, stale in (
        ("description = ", "readme2 = ", []),
        ('"orjson>=3.10"', '"orjson>=3.11"', every),
        ("cupy-cuda12x>=14", "cupy-cuda12x>=15", ["requirements-cuda12.txt"]),
        ("hdfs-native>=0.14.7", "hdfs-native>=0.15", every),
        ('requires = ["hatchling>=1.26"]', 'requires = ["hatchling>=1.27"]', ["requirements-build.txt"]),
    ):
        assert old in text
        (tmp_path / "pyproject.toml").write_text(text.replace(old, new))
        assert lock.stale(tmp_path) == stale


def test_the_list_has_every_package_its_version_and_what_needs_it(tmp_path):
    def package(name, version, *metadata):
        place = tmp_path / f"{name}-{version}.dist-info"
        place.mkdir()
        lines = ["Metadata-Version: 2.4", f"Name: {name}", f"Version: {version}", *metadata]
        (place / "METADATA").write_text("\n".join(lines) + "\n\nLicense: of the text\n")

    ours = ("Requires-Dist: Fast.API[all] >=1; python_version > '3'", "Requires-Dist: gpu; extra == 'cuda'")
    package("hps_server", "0.1.0", "License-Expression: Apache-2.0", *ours)
    package("Fast_API", "1.2+cpu", "Classifier: License :: OSI Approved :: MIT License", "License: MIT", "Requires-Dist: tiny")
    package("gpu", "3", "License: BSD", "Requires-Dist: absent", "Requires-Dist: Fast-API; extra == 'more'")
    package("tiny", "4")
    code = f"import sys; sys.path[:] = [one for one in sys.path if 'packages' not in one] + [{str(tmp_path)!r}]; import runpy; "
    code += f"runpy.run_path({str(DEPLOY / 'sbom.py')!r}, run_name='__main__')"
    found = json.loads(run(sys.executable, "-I", "-S", "-c", code))
    root = found["metadata"]["component"]
    assert (found["bomFormat"], root["type"], root["purl"]) == ("CycloneDX", "application", "pkg:pypi/hps-server@0.1.0")
    assert root["licenses"] == [{"expression": "Apache-2.0"}]
    server, api, gpu, tiny = (f"pkg:pypi/{one}" for one in ("hps-server@0.1.0", "fast-api@1.2%2Bcpu", "gpu@3", "tiny@4"))
    licenses = {one["purl"]: [entry["license"]["name"] for entry in one.get("licenses", ())] for one in found["components"]}
    assert licenses == {api: ["MIT License"], gpu: ["BSD"], tiny: []}
    needs = {one["ref"]: one["dependsOn"] for one in found["dependencies"]}
    assert needs == {server: [api, gpu], api: [tiny], gpu: [], tiny: []}


def test_build_context_holds_what_the_dockerfile_copies_and_nothing_secret():
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    allowed = {line[1:] for line in ignored if line.startswith("!")}
    lines = (DEPLOY / "Dockerfile").read_text().splitlines()
    copied = [line.split()[1:-1] for line in lines if line.startswith("COPY ") and "--from" not in line]
    assert "*" in ignored
    assert {source for sources in copied for source in sources} == allowed
    assert all((ROOT / one).exists() for one in allowed)


@pytest.fixture(scope="module")
def exposed(tmp_path_factory):
    """The names of the series that a service really exposes, buckets and counts of histograms among them."""
    directory = tmp_path_factory.mktemp("metrics")
    write_sparse_model(directory / "user.model", sample_chunks(100, 4, 1))
    model = model_of("sample", [directory / "user.model"], {"user": 4})
    names = {"up"}
    log = {"type": "kafka", "brokers": "127.0.0.1:1"}
    with running_service(document_of(model, persistent=directory / "rocksdb", update_source=log)) as service:
        service.client.post("/v1/models/sample/lookup", json={"tables": {"user": [1, 1000]}})
        text = service.client.get("/metrics").text
    for name, kind in re.findall(r"^# TYPE (\S+) (\S+)$", text, re.MULTILINE):
        names |= {name + ending for ending in (("_bucket", "_count", "_sum") if kind == "histogram" else ("",))}
    return names


def test_alerts_use_metrics_that_there_are(exposed):
    rules = [rule for group in yaml_of("prometheus", "alerts.yml")["groups"] for rule in group["rules"]]
    used = {name for rule in rules for name in _METRIC.findall(rule["expr"])}
    assert {"hps_ready", "hps_lookup_seconds_bucket", "hps_tier_errors_total"} <= used <= exposed


def test_dashboard_uses_metrics_that_there_are_and_shows_all_of_ours(exposed):
    panels = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
    used = {name for panel in panels for target in panel["targets"] for name in _METRIC.findall(target["expr"])}
    used |= {name for one in DASHBOARD["templating"]["list"] for name in _METRIC.findall(one["definition"])}
    assert used <= exposed
    ours = {name for name in exposed if name.startswith("hps_") and not name.endswith(("_created", "_sum", "_count"))}
    assert ours <= used


def test_every_query_of_the_chart_is_of_its_own_namespace():
    """The load of staging must not scale production. `ring2/deploy/test_helm.py` renders the templates."""
    lines = [line for path in sorted(TEMPLATES.iterdir()) for line in path.read_text().splitlines()]
    queries = [line for line in lines if re.search(r"^ *(query|expr):|\bhps_\w+\{", line)]
    assert len(queries) == 2, "the selector that the rules get, and KEDA's query"
    for line in queries:
        metrics = re.findall(r"\bhps_\w+(?=\W)(\{namespace=)?", line)
        assert metrics, line
        assert all(metrics), line
        assert ".Release.Namespace" in line
