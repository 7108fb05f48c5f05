"""The files of deploy/: checked by the tools that read them where those are here, and against the code."""

import importlib.metadata
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
from hps.models.sample import sample_chunks
from hps.models.writer import write_sparse_model
from hps.service.app import CLOSE_TIMEOUT_S
from tests import ROOT
from tests.servers.compose_file import Compose, compose_of, read_dockerfile, seconds
from tests.servers.running_service import document_of, model_of, running_service

DEPLOY = ROOT / "deploy"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
VARIANTS = ("cpu", "cuda12", "cuda13")
PROFILES = ("cpu", "gpu", "cluster", "monitoring")
SECRETS = {"HPS_BEARER_TOKEN": "a", "HPS_REDIS_PASSWORD": "b", "GRAFANA_PASSWORD": "c"}
EVERYTHING = compose_of(PROFILES)
ALERTS = DEPLOY / "prometheus" / "alerts.yml"
DASHBOARD = json.loads((DEPLOY / "grafana" / "dashboards" / "hps.json").read_text())
_METRIC = re.compile(r"\b(?:hps|process|haproxy|redis)_\w+\b|\bup\b(?=\{)")


def run(*command, cwd=DEPLOY, env=None):
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("script", sorted(path.name for path in DEPLOY.glob("*.sh")))
def test_scripts_are_shell(script):
    run("sh", "-n", script)


@pytest.mark.parametrize("secret", SECRETS)
def test_no_secret_has_a_default(secret):
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
def test_every_service_is_confined(name):
    service = EVERYTHING.services[name]
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert service["restart"] in {"unless-stopped", "on-failure:3"}
    assert {"cpus", "memory", "pids"} <= set(service["deploy"]["resources"]["limits"])
    assert {"max-size", "max-file"} <= set(service["logging"]["options"])
    assert service.get("healthcheck") or EVERYTHING.stage(name).healthcheck
    assert not service.get("privileged")
    for port in service.get("ports", ()):
        assert port.startswith("127.0.0.1:")


@pytest.mark.parametrize("name", EVERYTHING.services)
def test_every_image_is_pinned_and_runs_as_nobody_special(name):
    image = EVERYTHING.services[name]["image"]
    assert re.fullmatch(r"[\w/-]+:v?\d+\.\d+\.\d+[\w.-]*", image)
    stage = EVERYTHING.stage(name)
    if "build" in EVERYTHING.services[name]:
        assert re.fullmatch(r"python:\d+\.\d+\.\d+-slim-\w+@sha256:[0-9a-f]{64}", stage.image)
        assert stage.image.startswith(f"python:{lock.PYTHON}.")
        assert stage.user == "10001:10001"


def test_nothing_but_the_balancer_and_the_monitors_is_published():
    assert {name for name, service in EVERYTHING.services.items() if "ports" in service} == {
        "balancer",
        "prometheus",
        "grafana",
    }
    redis = [name for name, service in EVERYTHING.services.items() if service["image"].startswith("redis:")]
    assert len(redis) == 8
    assert all(list(EVERYTHING.services[name]["networks"]) == ["back"] for name in redis)
    assert EVERYTHING.document["networks"]["back"]["internal"] is True


def test_every_writable_volume_has_one_owner():
    owners = {}
    for name, service in EVERYTHING.services.items():
        for one in service.get("volumes", ()):
            source, _, *mode = one.split(":")
            if "/" not in source and mode != ["ro"]:
                owners.setdefault(source, []).append(name)
    assert all(len(names) == 1 for names in owners.values()), owners
    assert set(owners) == set(EVERYTHING.document["volumes"])


def test_replicas_may_end_what_they_do():
    replicas = [service for service in EVERYTHING.services.values() if service["image"].startswith("hps-server")]
    drain_s = load_configuration(ROOT / "configs" / "docker.json").service.drain_s
    for service in replicas:
        if "stop_grace_period" in service:  # the one-shot needs none
            # the requests', the lookups', and the parameter server's
            assert seconds(service["stop_grace_period"]) > drain_s + 3 * CLOSE_TIMEOUT_S
    assert sum("stop_grace_period" in service for service in replicas) == 4


def test_balancer_waits_longer_than_a_request_may_take_and_notices_a_stop_before_it_is_one():
    service = load_configuration(ROOT / "configs" / "docker.json").service
    text = (DEPLOY / "haproxy.cfg").read_text()
    assert seconds(re.search(r"timeout server (\w+)", text)[1]) > service.request_timeout_s
    interval, failures = re.search(r"check inter (\w+) fall (\d+)", text).groups()
    assert seconds(interval) * int(failures) + seconds(re.search(r"timeout check (\w+)", text)[1]) < service.drain_s


def test_balancer_and_prometheus_know_every_replica():
    replicas = {
        name for name, service in EVERYTHING.services.items() if service.get("command") == ["serve", "/etc/hps/ps.json"]
    }
    assert replicas == set(re.findall(r"^ +server (\S+) \1:8000$", (DEPLOY / "haproxy.cfg").read_text(), re.MULTILINE))
    jobs = yaml.safe_load((DEPLOY / "prometheus" / "prometheus.yml").read_text())["scrape_configs"]
    assert replicas == set(next(job for job in jobs if job["job_name"] == "hps")["dns_sd_configs"][0]["names"])


def test_configuration_fits_what_the_compose_file_mounts_and_calls_its_services():
    configuration = load_configuration(ROOT / "configs" / "docker.json")
    volumes = [one.split(":")[1] for one in EVERYTHING.services["hps-1"]["volumes"]]
    assert str(configuration.persistent_db.path).startswith(next(one for one in volumes if one == "/var/lib/hps") + "/")
    assert all(source.startswith("/models/") for model in configuration.models for source in model.sparse_files)
    assert configuration.volatile_db.address == "redis:6379"
    assert configuration.service.port == 8000
    aliases = [
        service["networks"]["back"]["aliases"] for name, service in EVERYTHING.services.items() if re.match(r"redis-\d", name)
    ]
    assert aliases == [["redis"]] * 6


def test_images_have_no_build_tools():
    stages = read_dockerfile(DEPLOY / "Dockerfile")
    for name in VARIANTS:
        assert not [text for kind, text in stages[name].instructions if kind == "RUN" and re.search(r"apt|pip|gcc", text)]


def test_images_are_made_of_locked_wheels_and_list_what_was_installed():
    stages = read_dockerfile(DEPLOY / "Dockerfile")
    for name in VARIANTS:
        runs = [text for kind, text in stages[f"build-{name}"].instructions if kind == "RUN"]
        installing = [re.sub(r" {2,}", " ", one) for text in runs for one in text.split("&&") if " install " in one]
        ours = [one for one in installing if one.endswith("--no-index --no-deps dist/*.whl ")]
        locked = [one for one in installing if "--no-compile --require-hashes --only-binary :all: " in one]
        assert len(ours) == 1
        assert len(locked) == len(installing) - 1 == (1 if name == "cpu" else 2)
        assert f"--requirement deploy/requirements-{name}.txt" in locked[-1]
        assert runs[-1].endswith("&& /opt/hps/bin/python deploy/sbom.py > /opt/hps/sbom.cdx.json")
        assert {"NVIDIA_REQUIRE_CUDA": f"cuda>={name[4:]}.0"}.items() <= stages[name].environment.items() or name == "cpu"
        assert ("COPY", f"--from=build-{name} /opt/hps /opt/hps") == stages[name].instructions[-1]


@pytest.mark.parametrize("cuda", ["12", "13"])
def test_compose_builds_the_image_for_the_driver(cuda):
    compose = compose_of(("gpu",), HPS_CUDA=cuda)
    assert compose.services["hps-gpu"]["image"].endswith(f"-cuda{cuda}")
    assert compose.stage("hps-gpu").environment["NVIDIA_REQUIRE_CUDA"] == f"cuda>={cuda}.0"


def test_labels_say_what_pyproject_says():
    (text,) = [text for kind, text in read_dockerfile(DEPLOY / "Dockerfile")["runtime"].instructions if kind == "LABEL"]
    labels = dict(re.findall(r'org\.opencontainers\.image\.(\w+)="([^"]*)"', text))
    assert (labels["version"], labels["licenses"]) == (PROJECT["version"], PROJECT["license"])
    assert PROJECT["description"].startswith(labels["description"])


def pins(name):
    """The versions of a file of requirements, and how many hashes each has."""
    entries = lock.packages(lock.path_of(name).read_text())
    assert len(entries) == len(re.findall(r"^[\w-]+==", lock.path_of(name).read_text(), re.MULTILINE))
    return {
        (one := Requirement(key)).name: (next(iter(one.specifier)).version, entry.count("sha256:"))
        for key, entry in entries.items()
    }


@pytest.mark.parametrize("name", lock.sets())
def test_locked_versions_are_those_that_pyproject_asks_for(name):
    found = pins(name) | (pins("cpu") if name in VARIANTS else {})
    wanted = [Requirement(one) for one in lock.sets()[name]]
    assert wanted
    for one in wanted:
        version, hashes = found[one.name]
        assert one.specifier.contains(version), one
        assert hashes > 0, one
    assert name != "cpu" or len(found) > 2 * len(wanted), "what they need in turn is not there"


def test_what_cuda_adds_is_nothing_that_every_image_has():
    assert not pins("cuda12").keys() & pins("cpu").keys()
    assert [name.rpartition("-cu")[0] or name for name in pins("cuda12") if "nvidia" in name] == [
        name for name in pins("cuda13") if "nvidia" in name
    ]


def test_a_change_of_pyproject_makes_the_files_stale(tmp_path):
    assert lock.stale() == []
    text = (ROOT / "pyproject.toml").read_text()

    def stale_with(old, new):
        assert old in text
        (tmp_path / "pyproject.toml").write_text(text.replace(old, new))
        return lock.stale(tmp_path)

    assert stale_with("description = ", "readme2 = ") == []
    assert stale_with('"orjson>=3.10"', '"orjson>=3.11"') == [f"requirements-{name}.txt" for name in VARIANTS]
    assert stale_with("cupy-cuda12x>=14", "cupy-cuda12x>=15") == ["requirements-cuda12.txt"]
    assert stale_with("hdfs-native>=0.14.7", "hdfs-native>=0.15") == [f"requirements-{name}.txt" for name in VARIANTS]
    assert stale_with('requires = ["hatchling>=1.26"]', 'requires = ["hatchling>=1.27"]') == ["requirements-build.txt"]


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
    assert {one["purl"]: one.get("licenses") for one in found["components"]} == {
        "pkg:pypi/fast-api@1.2%2Bcpu": [{"license": {"name": "MIT License"}}],
        "pkg:pypi/gpu@3": [{"license": {"name": "BSD"}}],
        "pkg:pypi/tiny@4": None,
    }
    assert {one["ref"]: one["dependsOn"] for one in found["dependencies"]} == {
        "pkg:pypi/hps-server@0.1.0": ["pkg:pypi/fast-api@1.2%2Bcpu", "pkg:pypi/gpu@3"],
        "pkg:pypi/fast-api@1.2%2Bcpu": ["pkg:pypi/tiny@4"],
        "pkg:pypi/gpu@3": [],
        "pkg:pypi/tiny@4": [],
    }


def test_the_list_of_this_environment_is_whole():
    found = json.loads(run(sys.executable, "-I", DEPLOY / "sbom.py"))
    names = {one["name"]: one["version"] for one in [found["metadata"]["component"], *found["components"]]}
    assert names["numpy"] == importlib.metadata.version("numpy")
    assert names["hps-server"] == importlib.metadata.version("hps-server")
    refs = [one["ref"] for one in found["dependencies"]]
    assert sorted(refs) == sorted({one["bom-ref"] for one in [found["metadata"]["component"], *found["components"]]})
    assert {need for one in found["dependencies"] for need in one["dependsOn"]} <= set(refs)


def test_build_context_holds_what_the_dockerfile_copies_and_nothing_secret():
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    assert "*" in ignored
    allowed = {line[1:] for line in ignored if line.startswith("!")}
    text = (DEPLOY / "Dockerfile").read_text()
    copied = [line.split()[1:-1] for line in text.splitlines() if line.startswith("COPY ") and "--from" not in line]
    assert {one for sources in copied for one in sources} == allowed
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
    rules = [rule for group in yaml.safe_load(ALERTS.read_text())["groups"] for rule in group["rules"]]
    used = {name for rule in rules for name in _METRIC.findall(rule["expr"])}
    assert {"hps_ready", "hps_lookup_seconds_bucket", "hps_tier_errors_total"} <= used
    assert used <= exposed


def test_dashboard_uses_metrics_that_there_are_and_shows_all_of_ours(exposed):
    panels = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
    used = {name for panel in panels for target in panel["targets"] for name in _METRIC.findall(target["expr"])}
    used |= {name for one in DASHBOARD["templating"]["list"] for name in _METRIC.findall(one["definition"])}
    assert used <= exposed
    ours = {name for name in exposed if name.startswith("hps_") and not name.endswith(("_created", "_sum", "_count"))}
    assert ours <= used


def test_dashboard_is_whole():
    panels = DASHBOARD["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    assert all(panel["datasource"]["uid"] == "prometheus" for panel in panels if panel["type"] != "row")
    source = yaml.safe_load((DEPLOY / "grafana" / "provisioning" / "datasources" / "prometheus.yml").read_text())
    assert source["datasources"][0]["uid"] == "prometheus"
    boxes = [panel["gridPos"] for panel in panels]
    for i, a in enumerate(boxes):
        assert a["x"] + a["w"] <= 24
        for b in boxes[:i]:
            apart = (
                a["x"] >= b["x"] + b["w"] or b["x"] >= a["x"] + a["w"] or a["y"] >= b["y"] + b["h"] or b["y"] >= a["y"] + a["h"]
            )
            assert apart
