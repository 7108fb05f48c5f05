"""The files of deploy/, checked by the programs that read them."""

import json
import sys
from pathlib import Path

import pytest

from tests.ring1.deploy.test_deploy_files import DEPLOY, PROFILES, SECRETS, run, yaml_of
from tests.servers.compose_file import Compose

BIN = Path(sys.executable).parent  # with what comes from PyPI


@pytest.mark.parametrize("profile", PROFILES)
def test_compose_itself_takes_the_file_and_reads_it_as_the_tests_do(profile):
    files = (BIN / "docker-compose", "-f", "docker-compose.yml", "--env-file", "/dev/null", "--profile", profile)
    document = json.loads(run(*files, "config", "--format", "json", env=SECRETS).replace("$$", "$"))
    ours = Compose(DEPLOY / "docker-compose.yml", SECRETS, profile)
    assert set(document["services"]) == set(ours.services)
    for name, service in document["services"].items():
        assert service.get("command") == ours.services[name].get("command"), name
        assert service.get("environment", {}) == {
            key: str(value) for key, value in ours.services[name].get("environment", {}).items()
        }


def test_dockerfile_pleases_hadolint():
    run(BIN / "hadolint", "Dockerfile")


@pytest.mark.haproxy
def test_haproxy_takes_its_configuration():
    run("haproxy", "-c", "-f", "haproxy.cfg")


@pytest.mark.promtool
def test_prometheus_takes_its_configuration_and_the_alerts_fire_when_they_should():
    run("promtool", "check", "config", "--syntax-only", "prometheus.yml", cwd=DEPLOY / "prometheus")
    run("promtool", "check", "rules", "alerts.yml", cwd=DEPLOY / "prometheus")
    run("promtool", "test", "rules", "alerts_test.yml", cwd=DEPLOY / "prometheus")


def test_every_alert_is_seen_firing_and_silent():
    alerts = {
        one["alert"] for group in yaml_of("prometheus", "alerts.yml")["groups"] for one in group["rules"] if "alert" in one
    }
    tests = [one for test in yaml_of("prometheus", "alerts_test.yml")["tests"] for one in test["alert_rule_test"]]
    assert alerts == {one["alertname"] for one in tests if one["exp_alerts"]}
    assert alerts == {one["alertname"] for one in tests if not one["exp_alerts"]}
