"""What a release of the chart runs, as processes: the values to try it within their memory, and the pod of `helm test`."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from hps.models.writer import write_sparse_model
from hps.testing.waiting import wait_until
from hps.tools.cli.tables.sample import sample_vectors
from tests import ROOT
from tests.ring2.deploy.test_helm import ENOUGH, configuration_of, pods_of
from tests.servers.certificates import Authority
from tests.servers.child_processes import ChildProcesses
from tests.servers.helm import CHART, rendered
from tests.servers.memory_limit import memory_limit
from tests.servers.running_service import document_of, model_of, running_service

pytestmark = pytest.mark.helm
TRY = ("--values", CHART / "values-try.yaml")


def ask_as_the_pod_does(objects: dict[str, dict[str, Any]], **environment: str) -> "subprocess.CompletedProcess[str]":
    """Run the command of the pod of `helm test`, with other values of its variables."""
    (container,) = objects["Pod/shop-hps-test"]["spec"]["containers"]
    assert {one["name"] for one in container["env"]} == environment.keys()
    assert container["command"][0] == "python"
    command = [sys.executable, *container["command"][1:]]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)


def test_the_values_to_try_it_start_within_their_memory_and_answer(children: ChildProcesses, tmp_path: Path) -> None:
    objects = rendered(*TRY)
    owner, pod, container = pods_of(objects)
    assert (owner["kind"], owner["spec"]["replicas"]) == ("Deployment", 1)
    assert container["resources"]["limits"] == {"cpu": "1", "memory": "1Gi"}
    assert not [one for one in pod["volumes"] if "persistentVolumeClaim" in one]
    (sample,) = pod["initContainers"]
    document = configuration_of(objects)
    [model] = document["models"]
    here = lambda text: text.replace("/models", str(tmp_path / "models"))  # noqa: E731
    model["sparse_files"] = [here(path) for path in model["sparse_files"]]
    document["service"] |= {"host": "127.0.0.1", "port": 0}
    (tmp_path / "ps.json").write_text(json.dumps(document))
    assert container["args"] == ["serve", "/etc/hps/ps.json"]
    own = ChildProcesses()
    program = (sys.executable, "-m", "hps")
    with memory_limit(2**30) as limit:
        try:
            for _ in range(2):  # a pod may be started again
                made = children.start(*limit.inside(*program, *map(here, sample["args"])), cwd=ROOT)
                assert made.wait(120) == 0, made.stderr.read()
            with (tmp_path / "log").open("w") as log:
                served = own.start(*limit.inside(*program, "serve", tmp_path / "ps.json"), cwd=ROOT, stdout=log, stderr=log)
            url = wait_until(lambda: re.search(r"listening on (http\S+);", (tmp_path / "log").read_text()), "it listens")[1]

            def is_ready() -> bool:
                assert served.poll() is None, (tmp_path / "log").read_text()
                try:
                    return httpx.get(f"{url}{container['readinessProbe']['httpGet']['path']}", timeout=5).status_code == 200
                except httpx.TransportError:
                    return False

            wait_until(is_ready, "it is ready")
            for probe in ("startupProbe", "livenessProbe"):
                assert httpx.get(f"{url}{container[probe]['httpGet']['path']}").status_code == 200
            keys = np.arange(0, 50_000, 50)
            for _ in range(20):
                answer = httpx.post(f"{url}/v1/models/sample/lookup", json={"tables": {"item": keys.tolist()}}, timeout=30)
                assert answer.status_code == 200, answer.text
                np.testing.assert_array_equal(np.array(answer.json()["tables"]["item"], np.float32), sample_vectors(keys, 32))
            done = ask_as_the_pod_does(objects, URL=url)
            assert (done.returncode, done.stdout) == (0, "sample.item: a vector of 32 numbers\n"), done.stderr
            assert limit.killed == 0
            assert int(limit.peak.read_text()) < 2**29, "half of it is left for tables of one's own"
        finally:
            own.end()


def test_the_test_of_a_release_asks_with_token_and_certificate_and_says_what_is_wrong(tmp_path: Path) -> None:
    write_sparse_model(tmp_path / "item.model", (np.arange(10), np.zeros((10, 4), np.float32)))
    document = document_of(model_of("m", [tmp_path / "item.model"], {"item": 4}))
    authority = Authority(tmp_path)
    (tls := tmp_path / "tls").mkdir()
    pair = authority.sign("shop-hps.shop.svc")
    for source, name in ((pair.certificate, "tls.crt"), (pair.key, "tls.key"), (authority.path, "ca.crt")):
        (tls / name).write_bytes(source.read_bytes())
    (tmp_path / "tokens").write_text('{"tokens": [{"name": "test", "rights": ["lookup"], "token": "secret"}]}')
    service = {f"tls_{name}_path": str(tls / file) for name, file in (("certificate", "tls.crt"), ("key", "tls.key"))}
    service |= {"tls_client_ca_path": str(tls / "ca.crt"), "tokens_path": str(tmp_path / "tokens")}
    secured = "tls.existingSecret=t,tls.clientCA=true,tokens.existingSecret=t,test.token.existingSecret=test"
    objects = rendered(*ENOUGH, "--set", secured)
    assert objects["Pod/shop-hps-test"]["metadata"]["annotations"]["helm.sh/hook"] == "test"
    with running_service({**document, "service": service}) as served:
        url = served.url.replace("http:", "https:")
        done = ask_as_the_pod_does(objects, URL=url, TLS=str(tls), TOKEN="secret\n")
        assert (done.returncode, done.stdout) == (0, "m.item: a vector of 4 numbers\n"), done.stderr
        done = ask_as_the_pod_does(objects, URL=url, TLS=str(tls), TOKEN="wrong")
        assert done.returncode == 1
        assert "/v2: 401" in done.stderr
