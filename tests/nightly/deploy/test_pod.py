"""The command of a pod of the Helm chart runs under the pod's restrictions, and answers."""

import json
import os
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import httpx
import numpy as np
import pytest

from hps.models.writer import write_sparse_model
from hps.testing.waiting import wait_until
from hps.tools.cli.tables.sample import sample_vectors
from tests import ROOT
from tests.fakes.installation import Installation
from tests.ring2.deploy.test_helm import UID, configuration_of, pods_of
from tests.servers.child_processes import ChildProcesses
from tests.servers.compose_file import read_dockerfile
from tests.servers.compose_runner import as_pod
from tests.servers.helm import CHART, rendered
from tests.servers.redis_server import free_ports

pytestmark = pytest.mark.helm


def children_of(process):
    return [int(one) for one in Path(f"/proc/{process}/task/{process}/children").read_text().split()]


@pytest.fixture
def place() -> Iterator[Path]:
    """The only directory that the pod's process may write to, which its user can reach."""
    directory = Path(tempfile.mkdtemp(prefix="hps-pod-"))
    directory.chmod(0o755)
    yield directory
    shutil.rmtree(directory)


@pytest.mark.skipif(os.geteuid() != 0, reason="not root: processes of another user cannot be started")
def test_the_command_of_a_pod_answers_under_its_restrictions(place, children: ChildProcesses):
    objects = rendered("--values", CHART / "ci" / "gpu-values.yaml", "--set", "config.device=cpu,gpu.count=0")
    _, _, container = pods_of(objects)
    document = configuration_of(objects)
    keys = np.arange(1000)
    write_sparse_model(place / "models" / "user.model", (keys, sample_vectors(keys, 128)))
    document["models"][0]["sparse_files"] = [str(place / "models" / "user.model")]
    document["persistent_db"]["path"] = f"{place}{document['persistent_db']['path']}"
    port, grpc_port = free_ports(2)
    document["service"] |= {"host": "127.0.0.1", "port": port, "grpc_port": grpc_port}
    (place / "ps.json").write_text(json.dumps(document))
    for mount in container["volumeMounts"]:
        (place / mount["mountPath"].lstrip("/")).mkdir(parents=True, exist_ok=True)
    for one in (place, *place.rglob("*")):
        one.chmod(0o755 if one.is_dir() else 0o644)
    for writable in ("var/lib/hps", "tmp"):
        shutil.chown(place / writable, UID, UID)
    image = Installation(place / "image")
    compiling = [sys.executable, "-m", "hps", "compile", "--baseline"]  # as the image does
    subprocess.run(compiling, cwd=place, env=image.environment, check=True, capture_output=True, timeout=240)
    environment = dict(read_dockerfile(ROOT / "deploy" / "Dockerfile")["runtime"].environment)
    environment = {name: value.replace("/var/lib/hps", str(place / "var/lib/hps")) for name, value in environment.items()}
    environment |= {"TMPDIR": str(place / "tmp"), "PATH": "/usr/bin:/bin", "PYTHONPATH": str(image.package.parent)}
    assert container["args"] == ["serve", "/etc/hps/ps.json"]
    command = as_pod([sys.executable, "-m", "hps", "serve", str(place / "ps.json")], place, UID)
    with (place / "log").open("w") as log:
        pod = children.start(*command, env=environment, cwd="/", stdout=log, stderr=log)
    url = f"http://127.0.0.1:{port}"

    def answers():
        assert pod.poll() is None, (place / "log").read_text()
        try:
            return httpx.get(f"{url}{container['readinessProbe']['httpGet']['path']}", timeout=5).status_code == 200
        except httpx.TransportError:
            return False

    def look_up():
        wait_until(answers, "the pod is ready")
        answer = httpx.post(f"{url}/v1/models/ranking/lookup", json={"tables": {"user": [3, 999, 10**9]}}).json()
        expected = np.concatenate([sample_vectors(np.array([3, 999]), 128), np.zeros((1, 128), np.float32)])
        np.testing.assert_array_equal(np.array(answer["tables"]["user"], np.float32), expected)

    look_up()
    written = [one for one in place.rglob("*") if one.lstat().st_uid == UID and not stat.S_ISSOCK(one.lstat().st_mode)]
    assert written
    allowed = (place / "var/lib/hps", place / "tmp")
    assert all(any(one.is_relative_to(root) for root in allowed) for one in written)
    assert "compiling" not in (place / "log").read_text()
    first = children_of(pod.pid)[0] if command[0] == "unshare" else pod.pid
    status = Path(f"/proc/{first}/status").read_text()
    assert (f"NSpid:\t{first}\t1\n" in status) == (command[0] == "unshare")
    assert f"Uid:\t{UID}\t{UID}" in status
    assert "CapEff:\t0000000000000000" in status
    for one in (killed := children_of(first)):
        os.kill(one, signal.SIGKILL)
    wait_until(lambda: not set(killed) & set(children_of(first)), "the first process has buried the others")
    look_up()
    os.kill(first, signal.SIGTERM)
    assert pod.wait(60) == 0, (place / "log").read_text()
