"""What an object store and the models in it survive, and how what they do not survive ends; S3 and GCS subclass it."""

import functools
import gc
import logging
import socket
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any, ClassVar

import pytest

from hps.configuration.tiers import ModelSourceConfig
from hps.errors import ModelFileChangedError, ModelSourceError
from hps.filesystems.object_store import ObjectStore
from hps.models.manifest import write_file
from hps.models.sources import ModelSources
from hps.models.writer import write_sparse_model
from hps.stores.hash_map.database import HashMapDatabase
from hps.stores.rocks_db.database import RocksDatabase
from hps.testing.filesystems import noise
from hps.tools.cli.tables.sample import sample_chunks
from tests.servers.misbehaving_proxy import Answer, Before, Drop, Fault, Reheaded, Request, Reset, Silence
from tests.servers.misbehaving_proxy import MisbehavingProxy as Proxy

# isort: split
from tests.servers.misbehaving_proxy import SlowHead, Trickle, Truncate, always, first
from tests.tables.models_in_stores import DIM, ROWS, TABLE, ModelsInStores, assert_holds
from tests.tables.table_loads import load_table

SIZE = 300_000
"""Of the file that the tests read."""
HASTY: dict[str, Any] = {"timeout_s": 0.5, "deadline_s": 2.0, "max_attempts": 3}


@functools.cache
def sources_at(url: str, **settings: Any) -> ModelSources:
    """Model sources that ask an endpoint for every object; kept, because a boto3 client takes long to make."""
    return ModelSources(ModelSourceConfig(s3_endpoint_url=url, gcs_endpoint_url=url, **settings))


def store_at(url: str, path: str, **settings: Any) -> Any:
    """The file system of a path, which asks an endpoint."""
    return sources_at(url, **settings).locate(path)[0]


def read(filesystem: ObjectStore, path: str, offset: int = 0, size: int = SIZE, version: str = "") -> bytes:
    buffer = bytearray(size)
    filesystem.read_into(path, offset, memoryview(buffer), version)
    return bytes(buffer)


def name_of(given: object) -> str | None:
    """The id of a test: what goes wrong."""
    if isinstance(given, Answer):
        return str(given.status)
    if isinstance(given, Reset | Truncate | Trickle):
        return f"{type(given).__name__} at {given.after_bytes}"
    return type(given).__name__ if isinstance(given, Fault) else None


OPERATIONS: dict[str, Callable[[ObjectStore, str], object]] = {
    "exists": lambda filesystem, path: filesystem.exists(path),
    "status": lambda filesystem, path: filesystem.status(path),
    "read_into": lambda filesystem, path: read(filesystem, path),
    "list": lambda filesystem, path: filesystem.list(path.rpartition("/")[0]),
    "write": lambda filesystem, path: write_file(filesystem, f"{path}-2", b"x"),
    "delete": lambda filesystem, path: filesystem.delete(path),
}


class ObjectStoreFaults(ModelsInStores):
    """Subclass it, give what stands here and the fixture `server`; `ring2/filesystems/conftest.py` makes the others of it."""

    store: ClassVar[type[ObjectStore]]
    version_header: ClassVar[str]
    """The header of an answer that says which version it is of."""
    overloaded: ClassVar[str]
    """Pattern for what is said of HTTP 500."""
    unreachable: ClassVar[str]
    """Pattern for what is said of a host that cannot be reached."""

    def is_read(self, request: Request) -> bool:
        """Whether a request reads content."""
        raise NotImplementedError

    def condition(self, request: Request) -> str | None:
        """The version that a read demands."""
        raise NotImplementedError

    @pytest.fixture
    def sources(self, server: Any) -> ModelSources:
        return sources_at(server.url)

    @pytest.mark.parametrize(
        "fault",
        [Answer(500), Answer(502, b"<html>"), Answer(503), Answer(429), Answer(408), Drop(), Reset(), Truncate(), Truncate(1)],
        ids=name_of,
    )
    def test_a_failure_that_passes_is_not_seen_by_any_operation(
        self, proxy: Proxy, patient: ObjectStore, server: Any, file: str, fault: Fault
    ) -> None:
        for name, operation in OPERATIONS.items():
            proxy.rule, proxy.requests = first(2, fault), []
            operation(patient, file)
            assert len(proxy.requests) >= 3 or isinstance(fault, Reset | Truncate), name
        assert server.get(f"{file}-2") == b"x"
        assert patient.list(file.rpartition("/")[0]) == ["key-2"]

    @pytest.mark.parametrize("fault", [Truncate(100_000), Reset(100_000)], ids=name_of)
    def test_a_body_that_breaks_off_is_asked_for_again(
        self, proxy: Proxy, patient: ObjectStore, file: str, fault: Fault
    ) -> None:
        """Under the condition of the first request, also where that seems to fail once."""
        version = patient.status(file).version
        proxy.rule, proxy.requests = first(2, fault, self.is_read), []
        assert read(patient, file, 10, SIZE - 20, version) == noise(SIZE)[10:-10]
        assert [request.headers["Range"] for request in proxy.requests] == [f"bytes=10-{SIZE - 11}"] * 3
        assert [self.condition(request) for request in proxy.requests] == [version] * 3
        proxy.rule = first(1, Answer(412), self.is_read)
        assert read(patient, file, version=version) == noise(SIZE)

    def test_a_body_that_stalls_is_asked_for_again(self, proxy: Proxy, file: str) -> None:
        proxy.rule = first(1, Trickle(pause_s=600, after_bytes=101_000), self.is_read)
        assert read(store_at(proxy.url, file, timeout_s=0.5, deadline_s=60, max_attempts=60), file) == noise(SIZE)
        assert len(proxy.requests) >= 2

    def test_connections_are_used_again(self, proxy: Proxy, patient: ObjectStore, file: str) -> None:
        patient.status(file)
        before = proxy.connections
        for _ in range(10):
            assert read(patient, file, 1, SIZE - 1) == noise(SIZE)[1:]
            patient.status(file)
            patient.exists(f"{file}/absent")
            patient.list(file.rpartition("/")[0])
        assert proxy.connections == before

    @pytest.mark.parametrize("operation", OPERATIONS)
    def test_a_store_that_fails_for_ever_is_a_source_error(
        self, proxy: Proxy, patient: ObjectStore, root: str, file: str, operation: str
    ) -> None:
        proxy.rule = always(Answer(500))
        with pytest.raises(ModelSourceError, match=rf"{root}/item.*: {self.overloaded}.*tried 4 times"):
            OPERATIONS[operation](patient, file)
        assert len(proxy.requests) == 4

    @pytest.mark.parametrize(
        ("fault", "why"),
        [
            (Drop(), "closed connection without response|broke off or cannot be reached"),
            (Reset(1000), "broke off|reset"),
            (Truncate(1000), "broke off"),
        ],
        ids=name_of,
    )
    def test_a_read_that_always_breaks_off_ends_after_its_attempts(
        self, proxy: Proxy, patient: ObjectStore, file: str, fault: Fault, why: str
    ) -> None:
        proxy.rule = always(fault, self.is_read)
        with pytest.raises(ModelSourceError, match=rf"reading {file}: .*({why}).*; check .*tried 4 times"):
            read(patient, file)
        assert len(proxy.requests) == 4

    @pytest.mark.parametrize(
        ("fault", "settings"),
        [
            *((Trickle(), HASTY), (Trickle(pause_s=600, after_bytes=10_000), HASTY)),
            # where one byte may take longer than the whole read
            (Trickle(pause_s=600, after_bytes=1000), {"timeout_s": 3000, "deadline_s": 5, "max_attempts": 1}),
        ],
        ids=name_of,
    )
    def test_a_read_that_never_ends_ends_at_its_deadline(
        self, proxy: Proxy, file: str, fault: Fault, settings: dict[str, Any]
    ) -> None:
        proxy.rule = always(fault, self.is_read)
        with pytest.raises(ModelSourceError, match=rf"reading {file}: .*(did not answer in time|no answer).*; check"):
            read(store_at(proxy.url, file, **settings), file)
        assert 1 <= len(proxy.requests) <= settings["max_attempts"]

    @pytest.mark.parametrize("fault", [Silence(), SlowHead(), Trickle(0.5, after_bytes=1)], ids=name_of)
    def test_every_operation_ends_at_its_deadline(self, proxy: Proxy, root: str, file: str, fault: Fault) -> None:
        """No timeout of a socket ends an answer that trickles: there always is another byte in time."""
        proxy.rule = always(fault)
        filesystem = store_at(proxy.url, file, timeout_s=0.5, deadline_s=1.0, max_attempts=2)
        operations = [OPERATIONS["list"]] if isinstance(fault, Trickle) else list(OPERATIONS.values())  # others have no body

        def fail(operation: Callable[[ObjectStore, str], object]) -> None:
            with pytest.raises(ModelSourceError, match=rf"{root}/item.*(no answer|in time).*; check that"):
                operation(filesystem, file)

        with ThreadPoolExecutor(len(operations)) as pool:
            list(pool.map(fail, operations))

    def test_nobody_holds_or_fills_a_buffer_whose_read_has_ended(
        self, proxy: Proxy, hasty: ObjectStore, file: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        caplog.set_level(logging.INFO, "hps")  # a record would hold the error, and that the frames of the read
        proxy.rule = always(Trickle(0.01, after_bytes=10_000), self.is_read)
        buffer = bytearray(SIZE)
        try:
            hasty.read_into(file, 0, memoryview(buffer))
        except ModelSourceError as error:
            message = str(error)
        assert "no answer" in message
        got = bytes(buffer)
        assert got != noise(SIZE)
        proxy.reset()
        for thread in threading.enumerate():
            if thread.name == "hps-bounded-call":
                thread.join(20)
        assert bytes(buffer) == got
        gc.collect()
        buffer.clear()  # a BufferError while anybody still has a view of it

    def test_a_host_that_refuses_or_is_unknown_is_named_with_a_cure(self, file: str) -> None:
        with socket.socket() as held:  # bound, so that nobody else listens there
            held.bind(("127.0.0.1", 0))
            for url in (f"http://127.0.0.1:{held.getsockname()[1]}", "http://no-such-host.invalid"):
                with pytest.raises(ModelSourceError, match=rf"reading {file}: .*{self.unreachable}"):
                    read(store_at(url, file, timeout_s=20, deadline_s=60, max_attempts=2), file)

    def test_a_model_that_is_replaced_while_it_loads_is_an_error_and_not_taken_for_whole(
        self, proxy: Proxy, sources: ModelSources, root: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("hps.models.files.CHUNK_BYTES", 100_000)
        source, through = f"{root}/item", sources_at(proxy.url, parallel_reads=1)
        write_sparse_model(source, sample_chunks(ROWS, DIM, seed=1), sources=sources)

        def replace() -> None:
            write_sparse_model(source, sample_chunks(ROWS, DIM, seed=2), overwrite=True, sources=sources)

        proxy.rule = first(1, Before(replace), lambda request: request.headers["Range"] == "bytes=20000-39999")
        with closing(HashMapDatabase()) as volatile, closing(RocksDatabase(tmp_path / "rocksdb")) as persistent:
            with pytest.raises(ModelFileChangedError, match=rf"{source}/.* changed while it was being read"):
                load_table(TABLE, source, [volatile, persistent], sources=through)
            record = persistent.load_record(TABLE.tag)
            assert record is None or not record.complete
            load_table(TABLE, source, [volatile, persistent], sources=through)
            assert_holds(volatile, 2)
            assert_holds(persistent, 2)

    def test_an_answer_of_another_range_or_version_is_refused(
        self, proxy: Proxy, patient: ObjectStore, server: Any, file: str
    ) -> None:
        version, other = patient.status(file).version, Reheaded({"Content-Range": f"bytes 51-150/{SIZE}"})
        for fault, got in ((Reheaded({"Content-Range": None}, 200), "0 to 100"), (other, "51 to 151")):
            proxy.rule = always(fault, self.is_read)
            with pytest.raises(ModelSourceError, match=rf"reading {file}: got bytes {got}, expected bytes 50 to 150"):
                read(patient, file, 50, 100)
            if fault is not other:  # the whole object is the range that was asked for
                assert read(patient, file) == noise(SIZE)
        proxy.rule = first(2, other, self.is_read)
        assert read(patient, file, 50, 100) == noise(SIZE)[50:150]
        proxy.rule = always(Reheaded({self.version_header: "12345"}), self.is_read)  # conditions are ignored
        with pytest.raises(ModelFileChangedError, match=rf"reading {file}: it changed .*version {version}, now 12345"):
            read(patient, file, version=version)
        faults = iter([Truncate(1000), Before(lambda: server.put(file, noise(SIZE, seed=2)))])
        proxy.rule = lambda request: next(faults, None)  # it is replaced between two attempts
        with pytest.raises(ModelFileChangedError, match=rf"reading {file}: it changed"):
            read(patient, file, version=version)
