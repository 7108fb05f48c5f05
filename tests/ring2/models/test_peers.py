"""Servers that fill from each other: two real processes, and an object store that counts what it sends."""

import json
import signal
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import numpy as np
import pytest

from hps.models.sealing import seal_version
from hps.models.writer import write_version
from hps.stores.row_files.layout import FileHead
from hps.testing.waiting import wait_until
from tests.servers.object_files import ObjectFiles, object_files
from tests.servers.running_service import document_of, model_of
from tests.servers.s3_server import know_only_moto
from tests.servers.served_process import ServedProcess

DIM, ROWS = 32, 150_000  # 20 MB
KEYS = np.random.default_rng(3).permutation(np.arange(ROWS, dtype=np.int64)) * 5 + 1
TOKEN = "filling"
ROWS_KEY = "bucket/shop/1/item/rows"


def vectors_of(keys: np.ndarray) -> np.ndarray:
    return np.repeat((keys % 8_000_000).astype(np.float32)[:, None], DIM, axis=1)


@pytest.fixture(scope="module")
def bucket(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory of buckets with a sealed version."""
    place = tmp_path_factory.mktemp("objects")
    write_version(str(place / "bucket/shop/1"), {"item": (KEYS, vectors_of(KEYS))})
    seal_version(str(place / "bucket/shop/1"), replace=True)
    return place


@pytest.fixture
def store(bucket: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ObjectFiles]:
    know_only_moto(monkeypatch)
    with object_files(bucket) as store:
        yield store


@pytest.fixture
def start(store: ObjectFiles, tmp_path: Path) -> Iterator[Callable[..., "Asker"]]:
    """Start a server with an empty database, which fills from these peers."""
    started: list[Asker] = []

    def run(*urls: str, token: str = TOKEN, **peers: object) -> Asker:
        directory = tmp_path / str(len(started))
        directory.mkdir()
        model = model_of("shop", ["s3://bucket/shop/1/item"], {"item": DIM}, gpucache=False, max_batch_size=10_000)
        settings = {"urls": urls, "token": token, "least_bytes": 0, "timeout_s": 30, **peers}
        source = {"s3_endpoint_url": store.url, "peers": settings}
        document = document_of(model, persistent=directory / "rows", kind="row_files", model_source=source)
        tokens = directory / "tokens.json"
        tokens.write_text(json.dumps({"tokens": [{"name": "peer", "rights": ["files", "lookup"], "token": TOKEN}]}))
        document |= {"volatile_db": {"type": "disabled"}, "service": {"tokens_path": str(tokens)}}
        started.append(Asker(ServedProcess(document, directory)))
        return started[-1]

    yield run
    for asker in started:
        asker.close()


class Asker:
    """Starts a server, looks up keys there, and compares each answer."""

    def __init__(self, server: ServedProcess) -> None:
        self.server: ServedProcess | None = server
        server.start()
        self.url = server.url
        self._client = httpx.Client(base_url=server.url, headers={"authorization": f"Bearer {TOKEN}"}, timeout=30)

    def close(self, number: int = signal.SIGINT) -> None:
        """End the server by a signal."""
        self._client.close()
        server, self.server = self.server, None
        if server is not None:
            server.stop(number)

    def check(self, seed: int, count: int = 200) -> None:
        keys = np.random.default_rng(seed).integers(0, 5 * ROWS, count)
        answer = self._client.post("/v1/models/shop/lookup", json={"tables": {"item": keys.tolist()}})
        assert answer.status_code == 200, answer.text
        got = np.array(answer.json()["tables"]["item"], np.float32)
        expected = np.where((keys % 5 == 1)[:, None], vectors_of(keys), 0)
        assert (got == expected).all()

    def figures(self) -> dict[str, float]:
        """Figures of the download, by name without prefix, and source."""
        found: dict[str, float] = defaultdict(float)
        for line in self._client.get("/metrics").text.splitlines():
            if line.startswith("hps_row_file_"):
                name, _, value = line.removeprefix("hps_row_file_").rpartition(" ")
                found[name.partition("{")[0] + (" peers" if 'source="peers"' in name else "")] = float(value)
        return found

    def await_complete(self) -> dict[str, float]:
        wait_until(lambda: "missing_bytes" in (figures := self.figures()) and not figures["missing_bytes"])
        return self.figures()


def complete_file(directory: Path) -> Path:
    """The file of the only table in a server's database, once it has its name, which is later than its last byte."""
    [file] = wait_until(lambda: list((directory / "rows/tables").glob("*.rows")), "the file has its name")
    return file


def test_a_server_fills_from_another_one(start: Callable[..., Asker], store: ObjectFiles) -> None:
    first = start()
    first.await_complete()
    size = (store.directory / ROWS_KEY).stat().st_size
    store.sent.clear()
    second = start(first.url)
    second.check(1)
    figures = second.await_complete()
    second.check(2)
    assert sum(store.sent.values()) < 100_000  # heads
    assert figures["downloaded_bytes_total peers"] >= size * 0.95
    assert figures["peer_failures_total"] == 0
    assert first.figures()["sent_bytes_total"] >= size * 0.95


def test_a_peer_that_is_killed_costs_nothing_but_the_store(start: Callable[..., Asker], store: ObjectFiles) -> None:
    first = start(serve_bytes_per_s=4 << 20)
    first.await_complete()
    gate, asked = threading.Event(), []

    def wait(key: str, first_byte: int, last: int) -> None:
        asked.append(last - first_byte)
        if last - first_byte > 1 << 20:  # of the background
            assert gate.wait(60)

    store.before = wait
    store.sent.clear()
    second = start(first.url)
    wait_until(lambda: first.figures()["sent_bytes_total"] > 1 << 20 and second.figures()["downloaded_bytes_total peers"] > 0)
    second.check(1)
    first.close(signal.SIGKILL)
    second.check(2)
    wait_until(lambda: max(asked, default=0) > 1 << 20, "the background asks the store")
    gate.set()
    second.check(3)
    figures = second.await_complete()
    second.check(4, 5000)
    assert store.sent[ROWS_KEY] > 1 << 20
    assert figures["downloaded_bytes_total peers"] > 0


def test_a_peer_that_lies_is_never_answered(start: Callable[..., Asker], store: ObjectFiles, tmp_path: Path) -> None:
    first = start()
    first.await_complete()
    rows = complete_file(tmp_path / "0")
    rows.chmod(0o644)
    head = FileHead.unpacked(rows.read_bytes()[:4096])
    with rows.open("r+b") as file:
        for at in range(head.records_at + 3000, head.sums_at, 1 << 20):
            file.seek(at)
            [byte] = file.read(1)
            file.seek(at)
            file.write(bytes([byte ^ 4]))
    store.sent.clear()
    second = start(first.url)
    second.check(1, 5000)
    figures = second.await_complete()
    second.check(2, 5000)
    assert figures["peer_failures_total"] > 0
    assert store.sent[ROWS_KEY] > 1 << 20
    assert complete_file(tmp_path / "1").read_bytes() == (store.directory / ROWS_KEY).read_bytes()


def test_a_token_without_the_right_reads_no_file(start: Callable[..., Asker], store: ObjectFiles) -> None:
    first = start()
    first.await_complete()
    store.sent.clear()
    second = start(first.url, token="another")
    figures = second.await_complete()
    second.check(1)
    assert figures["downloaded_bytes_total peers"] == 0
    assert figures["peer_failures_total"] > 0
    assert store.sent[ROWS_KEY] > 1 << 20
