"""Triton's own server, which the wheel nvidia-pytriton carries: `pip install --no-deps --target DIR nvidia-pytriton`."""

import os
import sys
import sysconfig
from pathlib import Path

import tritonclient.http as triton

from hps.testing.waiting import wait_until
from tests.servers.child_processes import ROOT, ChildProcesses

MODEL = ROOT / "deploy" / "triton" / "ranker"


def _home() -> Path | None:
    place = os.environ.get("HPS_PYTRITON")
    return Path(place) / "pytriton" / "tritonserver" if place else None


def _stub() -> Path:
    return _home() / "python_backend_stubs" / f"3.{sys.version_info.minor}" / "triton_python_backend_stub"


def what_is_missing() -> str | None:
    """Return why there is no Triton here; None if there is one."""
    if _home() is None:
        return "HPS_PYTRITON names no directory with nvidia-pytriton"
    if not sysconfig.get_config_var("Py_ENABLE_SHARED"):
        return "this Python has no shared library, which Triton links with"
    return None if _stub().is_file() else f"there is no {_stub()}"


def add_model(repository: Path, name: str, configuration: str, model: str = "") -> Path:
    """Add a model to a repository for Triton.

    Args:
        configuration: text of its config.pbtxt.
        model: text of its model.py; default: the one of deploy/triton.
    """
    place = repository / name
    (place / "1").mkdir(parents=True, exist_ok=True)
    (place / "config.pbtxt").write_text(configuration)
    if 'backend: "python"' in configuration:
        # The interpreter in Triton ignores PYTHONPATH: the tree that is tested comes first by this line.
        first = f"import sys; sys.path.insert(0, {str(ROOT)!r})\n"
        (place / "1" / "model.py").write_text(first + (model or (MODEL / "1" / "model.py").read_text()))
        stub = place / "triton_python_backend_stub"
        if not stub.exists():
            stub.symlink_to(_stub())  # it finds its libraries by its own place
    return place


def configuration_of(ps: Path, *parameters: tuple[str, str], instances: int = 1) -> str:
    """Return the config.pbtxt of deploy/triton for another `ps.json`, with further parameters."""
    text = (MODEL / "config.pbtxt").read_text()
    assert '"/models/ps.json"' in text
    assert "count: 1" in text
    text = text.replace("/models/ps.json", str(ps)).replace("count: 1", f"count: {instances}")
    return text + "".join(f'parameters {{ key: "{key}" value {{ string_value: "{value}" }} }}\n' for key, value in parameters)


class TritonServer:
    """A running tritonserver that loads models when it is told to.

    Attributes:
        http: its client.
        address, grpc_address: where it listens.
        log: its output.
    """

    def __init__(self, children: ChildProcesses, repository: Path, ports: tuple[int, int]) -> None:
        self.address, self.grpc_address = (f"127.0.0.1:{port}" for port in ports)
        self.log = repository.with_suffix(".log")
        command = [_home() / "bin" / "tritonserver", "--model-repository", repository, "--model-control-mode", "explicit"]
        command += ["--backend-directory", _home() / "backends", "--allow-metrics", "false", "--exit-timeout-secs", "5"]
        command += ["--http-address", "127.0.0.1", "--grpc-address", "127.0.0.1"]
        command += ["--http-port", ports[0], "--grpc-port", ports[1], "--id", repository.name]
        for program in (command[0], _stub()):
            program.chmod(0o755)
        # The interpreter whose packages models import, and its library.
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        environment = {**os.environ, "PATH": path, "LD_LIBRARY_PATH": sysconfig.get_config_var("LIBDIR")}
        with self.log.open("w") as log:
            self.process = children.start(*command, stdout=log, stderr=log, env=environment)
        self.http = triton.InferenceServerClient(self.address, concurrency=16, network_timeout=60)
        wait_until(self._is_ready, "Triton is ready")

    def _is_ready(self) -> bool:
        assert self.process.poll() is None, self.log.read_text()
        try:
            return bool(self.http.is_server_ready())
        except ConnectionRefusedError:
            return False

    def stop(self) -> int:
        """Stop it as an operator does, and return its exit code: 1 after a load over a loaded model that failed (24.10)."""
        self.http.close()
        self.process.terminate()
        return self.process.wait(60)
