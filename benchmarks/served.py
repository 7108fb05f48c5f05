"""What benchmarks of a whole server share: its configuration, and processes that answer HTTP."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

_START_S = 300.0  # kernels are compiled at a first start
SERVICE = {"access_log_per_s": 0, "drain_s": 0}


def model(files: Sequence[Path | str], dims: Sequence[int], name: str = "m", **settings: Any) -> dict[str, Any]:
    """Return the entry of a model with tables t0, t1, ...: all rows cached, all answers complete, unless `settings` differ."""
    return {
        "model": name,
        "sparse_files": [str(file) for file in files],
        "embedding_table_names": [f"t{table}" for table in range(len(dims))],
        "embedding_vecsize_per_table": list(dims),
        "maxnum_catfeature_query_per_table_per_sample": [1] * len(dims),
        "default_value_for_each_table": [0.0] * len(dims),
        "deployed_device_list": [0],
        "max_batch_size": 1000,
        "gpucacheper": 1.0,
        "hit_rate_threshold": 1.1,
        "cache_refresh_percentage_per_iteration": 1.0,
        "num_of_worker_buffer_in_pool": 8,
        **settings,
    }


def document(*models: dict[str, Any], **settings: Any) -> dict[str, Any]:
    """Return a configuration: the hash map alone, on the CPU, unless `settings` say otherwise."""
    return {
        "supportlonglong": True,
        "device": "cpu",
        "volatile_db": {"type": "hash_map"},
        "persistent_db": {"type": "disabled"},
        "models": list(models),
        **settings,
    }


class Running(NamedTuple):
    """A server process that is ready."""

    port: int
    pid: int

    def processor_s(self) -> float:
        """Return the processor time of the process and its children."""
        children = Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text().split()
        return sum(processor_s(pid) for pid in (self.pid, *map(int, children)))


def processor_s(pid: int) -> float:
    """Return the processor time of one process."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@contextmanager
def serving(command: Sequence[object], port: int, log: Path) -> Iterator[Running]:
    """Run `python -m COMMAND` until it is not needed any more; yield once the port answers readiness with 200."""
    with log.open("wb") as file:
        environment = {"OMP_NUM_THREADS": "1", **os.environ}
        started = [sys.executable, "-m", *map(str, command)]
        process = subprocess.Popen(started, stdout=file, stderr=subprocess.STDOUT, env=environment)
    try:
        deadline = time.monotonic() + _START_S
        while not _is_ready(port):
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"{command} did not get ready: {log.read_text()[-3000:]}")
            time.sleep(0.02)
        yield Running(port, process.pid)
    finally:
        process.send_signal(signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            process.wait(20)
        process.kill()
        process.wait()


def _is_ready(port: int) -> bool:
    with suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{port}/v2/health/ready", timeout=1) as answer:
        return bool(answer.status == 200)
    return False


@contextmanager
def server(kind: str, directory: Path) -> Iterator[Running]:
    """Start a server of `http_servers`."""
    port = free_port()
    with serving(("benchmarks.http_servers", kind, port, directory), port, directory / f"{kind}.log") as running:
        yield running


@contextmanager
def hps_serve(configuration: dict[str, Any] | Path, directory: Path, *options: object, fronts: int = 0) -> Iterator[Running]:
    """Start `hps serve`; without fronts it is one process.

    Args:
        configuration: a document, or the path of one or of a repository.
        directory: where document and log are written.
    """
    if isinstance(configuration, dict):
        path = directory / "ps.json"
        path.write_text(json.dumps({"service": SERVICE, **configuration}))
    else:
        path = configuration
    port = free_port()
    with serving(("hps", "serve", path, "--port", port, "--fronts", fronts, *options), port, directory / "log") as running:
        yield running


def free_port() -> int:
    """Return a port of this machine that nothing uses."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
    return port


def address_of(port: int) -> Any:
    """Return the address of a server of this machine."""
    from hps.client.addresses import read_addresses  # `compare_cases` uses this file with older checkouts

    return read_addresses(f"http://127.0.0.1:{port}")[0]


def head(path: str, length: int, text_length: int | None = None) -> bytes:
    """Return the head of a POST; `text_length` is that of the JSON before binary tensors."""
    line = "" if text_length is None else f"Inference-Header-Content-Length: {text_length}\r\n"
    return f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\n{line}Content-Length: {length}\r\n\r\n".encode()


def binary_post(path: str, tensors: dict[str, Any], **parameters: Any) -> bytes:
    """Return a whole request with binary tensors (NumPy arrays by name), which asks for binary outputs."""
    names = {"int64": "INT64", "int32": "INT32", "float32": "FP32"}
    inputs = [
        {
            "name": name,
            "shape": list(tensor.shape),
            "datatype": names[tensor.dtype.name],
            "parameters": {"binary_data_size": tensor.nbytes},
        }
        for name, tensor in tensors.items()
    ]
    text = json.dumps({"inputs": inputs, "parameters": {"binary_data_output": True, **parameters}}).encode()
    body = text + b"".join(tensor.tobytes() for tensor in tensors.values())
    return head(path, len(body), len(text)) + body


def json_post(path: str, content: Any) -> bytes:
    """Return a whole request with JSON."""
    body = json.dumps(content).encode()
    return head(path, len(body)) + body


def float_tail(body: memoryview, count: int) -> Any:
    """Return the last `count` float32 of the body of an answer: the vectors of binary outputs."""
    return np.frombuffer(body[len(body) - 4 * count :], np.float32)
