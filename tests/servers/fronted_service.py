"""`hps serve` with front processes, as a child of the test, and models whose vectors say whose they are."""

import json
import os
import re
import signal
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import numpy as np

from hps.regions import layout
from hps.testing.waiting import wait_until
from tests.servers.child_processes import ChildProcesses
from tests.servers.running_service import document_of, model_of
from tests.servers.service_processes import children_of, region_of, state_of

ROWS = 5000
DIMS = {"t0": 32, "t1": 8}


def vectors_of(table: int, keys: np.ndarray) -> np.ndarray:
    """The vectors of these keys: element c of key k is the float with the bits table << 23 | k << 5 | c."""
    dim = [*DIMS.values()][table]
    keys = np.asarray(keys)
    bits = np.uint32(table << 23) | keys.astype(np.uint32)[..., None] << 5 | np.arange(dim, dtype=np.uint32)
    return bits.view(np.float32)


def write_tables(place: Path) -> list[Path]:
    found = []
    for number, name in enumerate(DIMS):
        found.append(place / f"{name}.model")
        found[-1].mkdir(parents=True)
        keys = np.arange(ROWS, dtype="<i8")
        keys.tofile(found[-1] / "key")
        vectors_of(number, keys).tofile(found[-1] / "emb_vector")
    return found


class FrontedService:
    """A running service whose model `m` has the tables of `DIMS`.

    Attributes:
        process: the parent; the first of its children is the engine.
        url: of HTTP.
        grpc: address of gRPC.
    """

    def __init__(
        self,
        children: ChildProcesses,
        place: Path,
        *arguments: object,
        fronts: int = 1,
        tls: ssl.SSLContext | None = None,
        **service: object,
    ) -> None:
        place.mkdir(exist_ok=True)
        most = [1000] * len(DIMS)
        sources = write_tables(place / "tables")
        model = model_of("m", sources, DIMS, maxnum_catfeature_query_per_table_per_sample=most, hit_rate_threshold=1.1)
        document = document_of(model, service={"drain_s": 0, **service})
        (place / "ps.json").write_text(json.dumps(document))
        headers = {"authorization": f"Bearer {service['bearer_token']}"} if "bearer_token" in service else {}
        self._asks = {"timeout": 5, "headers": headers, "verify": True if tls is None else tls}
        self.log = place / "log"
        command = ("serve", place / "ps.json", "--port", 0, "--grpc-port", 0, "--fronts", fronts, *arguments)
        with self.log.open("w") as log:
            self.process = children.hps(*command, stdout=log, stderr=log)
        wait_until(lambda: self._listens() or self.process.poll() is not None, "the service listens")
        assert self.process.poll() is None, self._text()
        self.url = re.search(r"listening on (https?://[\w.:]+)", self._text())[1]
        self.grpc = re.search(r"listening for gRPC on ([\w.:]+)", self._text())[1]
        wait_until(self.is_ready, "the service is ready")

    def _listens(self) -> bool:
        text = self._text()
        return "listening on" in text and "listening for gRPC" in text

    def _text(self) -> str:
        return self.log.read_text()

    @property
    def port(self) -> int:
        return int(self.grpc.rpartition(":")[2])

    def is_ready(self) -> bool:
        try:
            asked = httpx.post(f"{self.url}/v1/models/m/lookup", json={"tables": {"t0": [1]}}, **self._asks)
            return asked.status_code == 200 and httpx.get(f"{self.url}/v2/health/ready", **self._asks).status_code == 200
        except httpx.TransportError:
            return False

    def children(self) -> list[int]:
        """The engine, and then the fronts, unless one was replaced."""
        return children_of(self.process.pid)

    def figure(self, name: str) -> float:
        """The sum of a figure of /metrics over all fronts."""
        text = httpx.get(f"{self.url}/metrics", **self._asks).text
        return sum(map(float, re.findall(rf"^{name}{{[^}}]*}} (\S+)$", text, re.MULTILINE)))

    def posted(self) -> int:
        """How many lookups the front that is alone has ever posted, also while the engine stands."""
        return int(region_of(self.children()[1], 0)[layout.SUBMITTED])

    def stop(self) -> None:
        self.process.send_signal(signal.SIGTERM)
        assert self.process.wait(30) == 0, self._text()

    @contextmanager
    def paused_engine(self) -> Iterator[None]:
        """The engine stands still meanwhile."""
        engine = self.children()[0]
        os.kill(engine, signal.SIGSTOP)
        wait_until(lambda: state_of(engine) == "T", "the process stands")
        try:
            yield
        finally:
            os.kill(engine, signal.SIGCONT)
