"""Two served replicas whose rows age, killed while a publisher goes on; every answer is judged by the times of the writes."""

import signal
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

import numpy as np

import hps
from hps.configuration.tiers import UpdateSourceConfig
from hps.errors import HPSError
from hps.ground.registry import implementation
from hps.testing.waiting import PATIENCE_S, wait_until
from hps.types import BoolArray, FloatArray, IndexArray, KeyArray
from hps.updates.base import TOPIC_PREFIX, Partition
from hps.updates.framing import encode
from tests.servers.redis_server import RedisServer
from tests.servers.running_service import document_of, model_of
from tests.servers.served_process import ServedProcess

MODEL, TABLE, DIM = "shop", "item", 4
FILED: Final = np.arange(500)
ONLINE: Final = np.arange(1000, 4000)
TTL_S: Final = 4.0
TTL_US, GRACE_US = round(TTL_S * 1e6), 1_000_000
_BATCH, _LOOKED_UP, _PARTITIONS = 60, 400, 2


def now_us() -> int:
    return time.time_ns() // 1000


def vectors_of(keys: KeyArray, writes: IndexArray) -> FloatArray:
    """Encode each row's key and the number of its write."""
    return np.stack([keys, writes, keys + writes, -keys], 1).astype(np.float32)


class Writes:
    """All writes by number, 1 and up, and the messages they were. *Thread-safe.*"""

    def __init__(self, source: UpdateSourceConfig) -> None:
        self.times = np.zeros(1 << 20, np.int64)  # by number of the write; the sequence of its message
        self.count = 0
        self._topic = f"{TOPIC_PREFIX}{MODEL}.{TABLE}"
        self._writer = implementation("update_log_writer", source.type).from_config(source)
        assert self._writer.partitions(self._topic, PATIENCE_S, create=_PARTITIONS) == _PARTITIONS
        self._last = 0
        self._sent: list[tuple[int, Partition, bytes]] = []
        self._stop = threading.Event()
        self._failures: list[Exception] = []
        self._thread = threading.Thread(target=self._publish, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        self._thread.join(PATIENCE_S)
        assert self._failures == []
        self.flush()

    def flush(self) -> None:
        assert self._writer.flush(PATIENCE_S) == 0

    def write(self, keys: KeyArray) -> None:
        """Write keys now, in one message for each partition."""
        numbers = np.arange(self.count + 1, self.count + 1 + keys.size)
        for number in range(_PARTITIONS):
            chosen = keys % _PARTITIONS == number
            self._last = sequence = max(now_us(), self._last + 1)
            self.times[numbers[chosen]] = sequence  # before anybody can see it
            value = encode(keys[chosen], vectors_of(keys[chosen], numbers[chosen]), sequence=sequence, time_us=sequence)
            self._sent.append((sequence, Partition(self._topic, number), value))
            self._writer.send(*self._sent[-1][1:])
        self.count += keys.size

    def repeat(self, rng: np.random.Generator) -> None:
        """Send a message again, most often one whose rows have expired."""
        self._writer.send(*self._sent[int(rng.integers(len(self._sent)))][1:])

    def _publish(self) -> None:
        rng = np.random.default_rng(1)
        try:
            while not self._stop.wait(0.02):
                # Some keys are written all the time, most seldom enough to expire in between, some of the files' among them.
                hot, cold = rng.choice(ONLINE[:100], 10, replace=False), rng.choice(ONLINE[100:], _BATCH, replace=False)
                self.write(np.concatenate([hot, cold, rng.choice(FILED[:50], 1)]))
                if rng.random() < 0.2:
                    self.repeat(rng)
        except Exception as error:  # noqa: BLE001 - of a thread: `stop` reports it
            self._failures.append(error)


class Reader:
    """Looks random keys of one replica up, and judges each answer by the times of the writes. *One thread.*"""

    def __init__(self, replica: ServedProcess, writes: Writes, seed: int) -> None:
        self.answered = self.expired = self.failed = 0
        self.wrong: list[str] = []
        self.replica, self._writes = replica, writes
        self._seen = np.zeros(ONLINE[-1] + 1, np.int64)  # by key, the last write that this replica has answered
        self._rng = np.random.default_rng(seed)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._read, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        self._thread.join(PATIENCE_S)

    def look(self, client: Any, keys: KeyArray) -> tuple[KeyArray, BoolArray]:
        before = now_us()
        vectors, found = client.lookup(keys, MODEL, TABLE, return_found=True)
        after = now_us()
        self._judge(keys, vectors, found, before, after)
        return keys, found

    def _read(self) -> None:
        with hps.connect(self.replica.url) as client:
            while not self._stop.is_set():
                keys = np.concatenate([self._rng.choice(ONLINE, _LOOKED_UP, replace=False), FILED[:100]])
                try:
                    self.look(client, keys)
                except HPSError:  # it is down, or refuses
                    self.failed += 1
                    self._stop.wait(0.02)
                except Exception as error:  # noqa: BLE001 - of a thread: the test reports it
                    self.wrong.append(repr(error))
                    return

    def _judge(self, keys: KeyArray, vectors: FloatArray, found: BoolArray, before: int, after: int) -> None:
        numbers = vectors[:, 1].astype(np.int64)
        online = found & (numbers > 0)
        written = np.where(online, self._writes.times[np.where(online, numbers, 0)], 0)
        seen = self._seen[keys]
        alive = (seen > 0) & (after < self._writes.times[seen] + TTL_US)
        mixed = found & (vectors != vectors_of(keys, numbers)).any(axis=1)
        for what, which in (
            ("mixed", mixed),
            ("too late", online & (before > written + TTL_US + GRACE_US)),
            ("early", ~found & alive),
            ("older", online & (numbers < seen)),
            ("the file's row came back", found & (numbers == 0) & (seen > 0)),
            ("lost row of the files", ~found & (keys < FILED.size) & (keys >= 50)),
        ):
            for row in np.flatnonzero(which)[:3].tolist():
                ages = (before - written[row]) / 1e6, (after - self._writes.times[seen[row]]) / 1e6
                self.wrong.append(f"{what}: key {keys[row]}, write {numbers[row]} after {seen[row]}, ages {ages} s")
        self._seen[keys[online]] = np.maximum(seen[online], numbers[online])
        self.answered += int(online.sum())
        self.expired += int((~found & (seen > 0)).sum())


def run_storm(directory: Path, kills: int, tiers: str, moment: Callable[[], object]) -> None:
    """Kill two replicas in turn, which both follow a Redis stream, and start each again once rows have expired meanwhile.

    Args:
        kills: of each replica.
        tiers: types of the databases, joined by `+`.
        moment: waits for the moment to kill a replica.
    """
    with ExitStack() as stack:
        redis = stack.enter_context(RedisServer(directory / "streams", "--appendonly", "yes"))
        source = {"type": "redis_stream", "address": redis.address, "ready_lag_s": 1.0}
        hps.write_sparse_model(directory / TABLE, (FILED, vectors_of(FILED, np.zeros_like(FILED))))
        settings = {"gpucacheper": 0.5, "row_ttl_s": TTL_S, "hit_rate_threshold": 1.1, "max_batch_size": 4096}
        model = model_of(MODEL, [directory / TABLE], {TABLE: DIM}, **settings)
        writes = Writes(UpdateSourceConfig(**source))
        replicas: list[ServedProcess] = []
        for name in "ab":
            (place := directory / name).mkdir()
            upper, _, lower = tiers.partition("+")
            volatile = {"type": "disabled" if upper in ("rocks_db", "row_files") else upper}
            kind = lower or upper
            document = document_of(
                model,
                persistent=place / kind,
                kind=kind,
                **{"volatile_db": volatile, "update_source": {**source, "group": name}},
            )
            replicas.append(ServedProcess(document, place))
        writes.start()
        for replica in replicas:
            stack.enter_context(replica)
        readers = [Reader(replica, writes, seed) for seed, replica in enumerate(replicas)]
        for reader in readers:
            reader.start()
            wait_until(lambda reader=reader: reader.answered and reader.expired, "rows came and went")
        for number in range(2 * kills):
            replica, reader = replicas[number % 2], readers[number % 2]
            moment()
            replica.stop(signal.SIGKILL)
            last = writes.times[writes.count - 1]
            if number % 4 < 2:  # else it is back before they expire
                wait_until(lambda last=last: now_us() > last + TTL_US, "the last rows it has seen have expired")
            replica.start()
            answered = reader.answered
            wait_until(lambda reader=reader, answered=answered: reader.wrong or reader.answered > answered, "it answers again")
            assert reader.wrong == []
        writes.stop()
        for reader in readers:
            reader.stop()
            assert reader.wrong == []
        for reader in readers:
            with hps.connect(reader.replica.url) as client:
                writes.write(ONLINE)
                writes.flush()
                wait_until(lambda: reader.look(client, ONLINE)[1].any(), "the last writes are there")  # noqa: B023
                wait_until(lambda: not reader.look(client, ONLINE)[1].any(), "all rows have expired")  # noqa: B023
            assert reader.wrong == []
            assert reader.answered > reader.failed
