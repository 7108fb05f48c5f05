"""A model in Google Cloud Storage, whole and when things go wrong.

All on an emulator; what it does not do as the real service does is in `test_gcs_answers.py`.
"""

import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from hps.configuration.tiers import ModelSourceConfig
from hps.errors import ModelFileChangedError, ModelFileError, ModelFileNotFoundError, ModelSourceError
from hps.filesystems import gcs
from hps.filesystems.gcs import GcsFileSystem
from hps.models.sources import ModelSources
from tests.contracts.filesystem_contract import noise
from tests.contracts.models_in_object_stores import ModelsInObjectStores
from tests.servers.gcs_faults import SIZE, hasty, is_media, name_of, patient, read, refusal
from tests.servers.gcs_server import GcsServer
from tests.servers.misbehaving_proxy import (
    Answer,
    Before,
    Drop,
    Fault,
    MisbehavingProxy,
    Reheaded,
    Reset,
    Silence,
    Trickle,
    Truncate,
    always,
    first,
)

pytestmark = pytest.mark.gcs


@pytest.fixture
def server(gcs_server: GcsServer) -> GcsServer:
    return gcs_server


@pytest.fixture
def proxy(server: GcsServer) -> Iterator[MisbehavingProxy]:
    with MisbehavingProxy(server.port) as proxy:
        yield proxy


@pytest.fixture
def file(server: GcsServer) -> str:
    path = f"gs://{server.make_bucket()}/model/key"
    server.put(path, noise(SIZE))
    return path


class TestModelsInGcs(ModelsInObjectStores):
    store = GcsFileSystem

    @pytest.fixture(autouse=True)
    def _small_parts(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(gcs, "_PART_BYTES", 1 << 18)

    @pytest.fixture
    def root(self, server: GcsServer) -> str:
        return f"gs://{server.make_bucket()}/models"

    def sources(self, url: str, **settings: Any) -> ModelSources:
        return ModelSources(ModelSourceConfig(gcs_endpoint_url=url, **settings))


# -- faults that pass ---------------------------------------------------------------------------------------------------------

PASSING: list[Fault] = [
    refusal(500, "backendError", "Backend Error"),
    Answer(502, b"<html>Bad Gateway</html>"),
    refusal(503, "backendError", "We encountered an internal error. Please try again."),
    refusal(429, "rateLimitExceeded", "The rate of requests is too high"),
    refusal(403, "rateLimitExceeded", "The rate of requests is too high"),
    Answer(408),
    Drop(),
    Reset(),
    Reset(50_000),
    Truncate(),
    Truncate(99_999),
    Reheaded({"Content-Range": "bytes 1-100000/200000"}),
]


@pytest.mark.parametrize("fault", PASSING, ids=name_of)
def test_a_read_survives_what_passes(proxy: MisbehavingProxy, file: str, fault: Fault) -> None:
    proxy.rule = first(2, fault, is_media)
    assert read(patient(proxy.url), file) == noise(SIZE)
    assert 2 <= len(proxy.requests) <= 3  # what broke off goes on where it stopped


@pytest.mark.parametrize("fault", PASSING[:-1], ids=name_of)
def test_every_other_operation_survives_what_passes(
    proxy: MisbehavingProxy, server: GcsServer, file: str, fault: Fault
) -> None:
    filesystem = patient(proxy.url)
    writer = filesystem.create(f"{file}2")
    writer.write(memoryview(b"content"))
    operations: list[Callable[[], object]] = [writer.commit, lambda: filesystem.delete(file)]
    if not isinstance(fault, Truncate | Reset) or not fault.after_bytes:  # those answers are shorter
        operations = [
            lambda: filesystem.status(file),
            lambda: filesystem.list(file.rpartition("/")[0]),
            lambda: filesystem.exists(f"{file}/below"),
            *operations,
        ]
    for operation in operations:
        proxy.rule = first(2, fault)
        operation()
    assert server.get(f"{file}2") == b"content"
    assert server.get(file) is None


# -- faults that stay ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fault", "why"),
    [
        (refusal(500, "backendError", "Backend Error"), r"got HTTP 500 \(Backend Error\)"),
        (refusal(429, "rateLimitExceeded", "Too fast"), r"got HTTP 429 \(Too fast\).*limits the rate"),
        (Drop(), "closed connection without response"),
        (Reset(1000), "broke off"),
        (Truncate(1000), "broke off"),
        (Silence(), "no answer"),
        (Trickle(0.1, after_bytes=10_000), "it came too slowly"),
    ],
    ids=name_of,
)
def test_a_read_that_keeps_failing_ends_with_the_cause(proxy: MisbehavingProxy, file: str, fault: Fault, why: str) -> None:
    proxy.rule = always(fault, is_media)
    with pytest.raises(ModelSourceError, match=rf"reading {file}: .*{why}.*tried"):
        read(hasty(proxy.url), file)
    assert len(proxy.requests) == 3 or isinstance(fault, Trickle)


@pytest.mark.parametrize("fault", [Silence(), Trickle(0.5, after_bytes=1), Answer(503)], ids=name_of)
def test_every_other_operation_ends_too(proxy: MisbehavingProxy, file: str, fault: Fault) -> None:
    proxy.rule = always(fault)
    filesystem = hasty(proxy.url, max_attempts=2, deadline_s=1)
    writer = filesystem.create(file)
    writer.write(memoryview(b"content"))
    operations: list[Callable[[], object]] = [
        lambda: filesystem.exists(file),
        lambda: filesystem.status(file),
        lambda: filesystem.list(file),
        lambda: filesystem.delete(file),
        writer.commit,
    ]

    def fail(operation: Callable[[], object]) -> None:
        with pytest.raises(ModelSourceError, match=file):
            operation()

    with ThreadPoolExecutor(len(operations)) as pool:
        list(pool.map(fail, operations))
    writer.abort()


def test_nobody_writes_to_the_buffer_after_the_call(proxy: MisbehavingProxy, file: str) -> None:
    proxy.rule = always(Trickle(0.01, after_bytes=10_000), is_media)
    buffer = bytearray(SIZE)
    with pytest.raises(ModelSourceError):
        hasty(proxy.url, deadline_s=1).read_into(file, 0, memoryview(buffer))
    got = bytes(buffer)
    assert got[:10_000] == noise(SIZE)[:10_000]
    assert got.rstrip(b"\0") != noise(SIZE)
    threads = [thread for thread in threading.enumerate() if thread.name == "hps-bounded-call"]
    for thread in threads:
        thread.join(20)
    assert bytes(buffer) == got


class SlowHead:
    """A server whose status line comes, and then a header that never ends."""

    def __enter__(self) -> str:
        self._closing = threading.Event()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()
        return f"http://127.0.0.1:{self._listener.getsockname()[1]}"

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            with connection:
                try:
                    connection.sendall(b"HTTP/1.1 200 OK\r\nX-Slow: ")
                    while not self._closing.wait(0.05):
                        connection.sendall(b"x")
                except OSError:
                    pass

    def __exit__(self, *_: object) -> None:
        self._closing.set()
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join(20)


def test_a_header_that_trickles_in_ends_at_the_deadline() -> None:
    with SlowHead() as url, pytest.raises(ModelSourceError, match="reading gs://models/key: no answer"):
        read(hasty(url, deadline_s=1), "gs://models/key")


def test_a_host_that_refuses_or_is_unknown_is_named_with_a_cure() -> None:
    with socket.socket() as held:  # bound, and nobody listens
        held.bind(("127.0.0.1", 0))
        refusing = f"http://127.0.0.1:{held.getsockname()[1]}"
        with pytest.raises(ModelSourceError, match=r"reading gs://models/key: Connection refused; check that the host"):
            read(hasty(refusing), "gs://models/key")
    with pytest.raises(ModelSourceError, match=r"gs://models/key: .*(not known|resolution|no answer).*; check that the host"):
        hasty("http://no-such-host.invalid").status("gs://models/key")


def test_a_host_that_is_no_object_store_is_told() -> None:
    with GcsServer() as server, MisbehavingProxy(server.port) as proxy:
        proxy.rule = always(Answer(200, b"<html>Please log in</html>", {"Content-Type": "text/html"}))
        with pytest.raises(ModelSourceError, match="not one of Google Cloud Storage"):
            hasty(proxy.url).status("gs://models/key")
        proxy.rule = always(Answer(302, b"", {"Location": "http://127.0.0.1:1/"}))
        with pytest.raises(ModelFileError, match=r"got HTTP 302.*gcs_endpoint_url"):
            hasty(proxy.url).status("gs://models/key")


# -- changes while it is read -------------------------------------------------------------------------------------------------


def test_a_file_that_is_replaced_between_two_parts_is_noticed(proxy: MisbehavingProxy, server: GcsServer, file: str) -> None:
    filesystem = patient(proxy.url)
    version = filesystem.status(file).version
    assert read(filesystem, file, 0, 1000, version) == noise(SIZE)[:1000]
    proxy.rule = first(1, Before(lambda: server.put(file, noise(SIZE, seed=2))), is_media)
    with pytest.raises(ModelFileChangedError, match=rf"{file}: it changed .*version {version}, now \d+"):
        read(filesystem, file, 1000, 1000, version)


def test_a_file_that_is_removed_or_cut_between_two_parts_is_noticed(server: GcsServer, file: str) -> None:
    filesystem = patient(server.url)
    version = filesystem.status(file).version
    filesystem.delete(file)
    with pytest.raises(ModelFileNotFoundError, match="there is no such object"):
        read(filesystem, file, 1000, 1000, version)
    server.put(file, noise(500))
    with pytest.raises(ModelFileChangedError, match=file):
        read(filesystem, file, 1000, 1000, version)
    with pytest.raises(ModelFileError, match="it ends at byte 500, expected bytes 1000 to 2000"):
        read(filesystem, file, 1000, 1000)


def test_a_condition_that_fails_only_once_is_tried_again(proxy: MisbehavingProxy, file: str) -> None:
    filesystem = patient(proxy.url)
    version = filesystem.status(file).version
    proxy.rule = first(1, refusal(412, "conditionNotMet", "not yet"), is_media)
    assert read(filesystem, file, version=version) == noise(SIZE)


def test_a_host_that_ignores_ranges_is_no_danger(proxy: MisbehavingProxy, file: str) -> None:
    whole = Answer(200, noise(SIZE))
    proxy.rule = always(whole, is_media)
    assert read(hasty(proxy.url), file) == noise(SIZE)
    with pytest.raises(ModelSourceError, match=f"got bytes 0 to {SIZE}, expected bytes 10 to 20"):
        read(hasty(proxy.url), file, 10, 10)
