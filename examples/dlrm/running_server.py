"""Starts `hps serve` and stops it again."""

import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

START_S = 120


@contextmanager
def running_server(config: Path) -> Iterator[str]:
    """A server of this configuration in a process of its own, ready to answer; its address."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "hps", "serve", str(config), "--port", str(port), "--log-level", "warning"]
    process = subprocess.Popen(command)
    try:
        deadline = time.monotonic() + START_S
        while not _ready(url):
            if process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(f"{' '.join(command)}: it is not ready after {START_S} s, or has ended")
            time.sleep(0.1)
        yield url
    finally:
        process.terminate()
        process.wait(30)


def _ready(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/v2/health/ready", timeout=5):
            return True
    except (urllib.error.URLError, ConnectionError, TimeoutError):
        return False
