"""What benchmarks of a whole server share: its configuration, and processes that answer HTTP."""

import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from hps.client.addresses import Address, read_addresses

_START_S = 60.0


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


@contextmanager
def server(kind: str, directory: Path) -> Iterator[tuple[int, int]]:
    """Start a server of `http_servers`; yield its port, once it answers, and its process id."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
    command = [sys.executable, "-m", "benchmarks.http_servers", kind, str(port), str(directory)]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as process:
        try:
            deadline = time.monotonic() + _START_S
            while not _answers(kind, port):
                if process.poll() is not None or time.monotonic() > deadline:
                    raise RuntimeError(f"the server {kind} on port {port} did not get ready")
                time.sleep(0.1)
            yield port, process.pid
        finally:
            process.terminate()


def _answers(kind: str, port: int) -> bool:
    with suppress(OSError), socket.create_connection(("127.0.0.1", port), 1) as connection:
        connection.sendall(b"GET /v2/health/ready HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        return kind != "service" or connection.recv(100).startswith(b"HTTP/1.1 200")
    return False


def address_of(port: int) -> Address:
    """Return the address of a server of this machine."""
    return read_addresses(f"http://127.0.0.1:{port}")[0]


def head(path: str, length: int, text_length: int | None = None) -> bytes:
    """Return the head of a POST; `text_length` is that of the JSON before binary tensors."""
    line = "" if text_length is None else f"Inference-Header-Content-Length: {text_length}\r\n"
    return f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\n{line}Content-Length: {length}\r\n\r\n".encode()
