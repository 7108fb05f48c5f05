"""Replicas that are killed while they follow a log of updates, whose broker is killed, too, and a replay to compare with."""

import json
import select
import subprocess
import sys
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import confluent_kafka
import numpy as np

import hps
from hps.configuration.tiers import UpdateSourceConfig
from hps.ground import rows as row_formats
from hps.ground.registry import implementation
from hps.testing.waiting import PATIENCE_S, wait_until
from hps.types import KeyArray
from hps.updates.base import TOPIC_PREFIX, Message, Partition, UpdateLog, UpdateLogWriter
from hps.updates.framing import encode
from tests.servers.child_processes import ChildProcesses
from tests.servers.kafka_broker import KafkaBroker
from tests.servers.redis_server import RedisServer
from tests.servers.running_service import document_of, model_of
from tests.tables.numbered_updates import DEFAULT, NumberedPublisher, NumberedRows, replay
from tests.tables.update_replica import BY_HUGECTR, DIMS, MODEL

SEED, BATCH = 20_261_122, 500
PARTITIONS, MORE_PARTITIONS = 4, 6  # of the first table; the second half of its changes goes to more
GROUP = "replicas"


class Replica:
    """A process of `update_replica`, started again and again."""

    def __init__(self, children: ChildProcesses, configuration: Path, key_bits: int) -> None:
        self._children = children
        self._command = [sys.executable, "-m", "tests.tables.update_replica", configuration, key_bits]
        self.log = configuration.with_suffix(".log")

    def start(self) -> None:
        with self.log.open("a") as log:
            self.process = self._children.start(*self._command, stdin=subprocess.PIPE, stderr=log)

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate(timeout=60)

    def heard(self) -> Any:
        """The next line that it says."""
        assert self.process.stdout is not None
        ready, _, _ = select.select([self.process.stdout], [], [], PATIENCE_S)
        line = self.process.stdout.readline() if ready else ""
        assert line, self.log.read_text()[-4000:]
        return json.loads(line)

    def ask(self, **command: object) -> Any:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(command) + "\n")
        self.process.stdin.flush()
        return self.heard()


class Scene:
    """Two replicas, a log, and a publisher for each table."""

    def __init__(
        self,
        directory: Path,
        children: ChildProcesses,
        source: Mapping[str, Any],
        tiers: str,
        updates: int,
        row_dtype: str,
        redis: str = "",
    ) -> None:
        self.source = UpdateSourceConfig(**source)
        self.key_bits = (updates // 10).bit_length()
        self.rows = {table: NumberedRows(self.key_bits, dim, table != BY_HUGECTR, row_dtype) for table, dim in DIMS.items()}
        self.tiers = tiers
        self.writer = self.new_writer()
        self.publishers = {
            table: NumberedPublisher(self.writer, f"{TOPIC_PREFIX}{MODEL}.{table}", rows, hctr=table == BY_HUGECTR)
            for table, rows in self.rows.items()
        }
        self.partitions = dict.fromkeys(DIMS, PARTITIONS)
        for publisher in self.publishers.values():
            assert self.writer.partitions(publisher.topic, 60, create=PARTITIONS) == PARTITIONS
        for table, rows in self.rows.items():
            hps.write_sparse_model(directory / table, (self.loaded(table), rows.vectors(self.loaded(table), 0)))
        limits = {"gpucacheper": 0.3, "hit_rate_threshold": 1.1, "default_value_for_each_table": [DEFAULT] * len(DIMS)}
        model = model_of(MODEL, [directory / table for table in DIMS], DIMS, **limits, row_dtype=row_dtype)
        self.replicas: list[Replica] = []
        for name in "ab":
            persistent = directory / f"rocksdb-{name}" if "rocks_db" in tiers else None
            volatile = {"type": tiers.partition("+")[0], **({"address": redis} if redis else {})}
            settings = {"volatile_db": volatile, "update_source": {**source, "group": GROUP}}
            document = document_of(model, persistent=persistent, **settings)
            (path := directory / f"{name}.json").write_text(json.dumps(document))
            self.replicas.append(Replica(children, path, self.key_bits))

    def new_writer(self) -> UpdateLogWriter:
        writer: UpdateLogWriter = implementation("update_log_writer", self.source.type).from_config(self.source)
        return writer

    def loaded(self, table: str) -> KeyArray:
        """The keys that the model files have."""
        return np.arange(self.rows[table].keys // 2)

    def publish(self, rng: np.random.Generator, updates: int) -> None:
        """Change rows of both tables, a few messages of each in turn."""
        for _ in range(max(1, updates // (20 * BATCH))):
            for table, publisher in self.publishers.items():
                publisher.publish(rng, 10 * BATCH, BATCH, self.partitions[table], mischief=0.1)
        assert self.writer.flush(PATIENCE_S) == 0
        assert [publisher.failures for publisher in self.publishers.values()] == [[], []]

    def messages(self) -> dict[str, list[Message]]:
        """All of the log by table, as another reader finds them."""
        last = self.last()
        log: UpdateLog = implementation("update_log", self.source.type).from_config(self.source, "auditor")
        found: list[Message] = []
        reached: dict[str, str] = {}

        def more_is_read() -> bool:
            messages = log.poll(0.5, 64 << 20)
            found.extend(messages)
            reached.update({str(message.partition): message.position for message in messages})
            return bool(messages)

        try:
            log.follow([publisher.topic for publisher in self.publishers.values()], {}, "earliest")
            while reached != last:
                wait_until(more_is_read, "more of the log is read")
        finally:
            log.close()
        return {table: [one for one in found if one.partition.topic == p.topic] for table, p in self.publishers.items()}

    def wait_applied(self) -> None:
        """Wait until every replica has applied all that was published, as long as each goes on."""
        last = self.last()
        for replica in self.replicas:
            reached: list[Any] = [None]

            def has_gone_on(replica: Replica = replica, reached: list[Any] = reached) -> bool:
                before, now = reached[-1], replica.ask(do="positions")
                reached.append(now)
                return bool(now == last or now != before)

            while reached[-1] != last:
                wait_until(has_gone_on, f"a replica has applied more: {replica.log}")

    def check(self, directory: Path, expected: Mapping[str, tuple[np.ndarray, np.ndarray]]) -> set[str]:
        """Compare every row of every tier of every replica with what a replay leaves, bit by bit. Returns the tiers."""
        names: set[str] = set()
        for replica in self.replicas:
            checked = replica.ask(do="dump", to=str(path := directory / "dump.npz"))
            assert checked["wrong"] == []
            assert checked["checked"] > 0
            with np.load(path) as dump:
                for name in {file.rpartition("/")[0] for file in dump.files}:
                    table, tier = name.split("/")
                    there, vectors = expected[table]
                    keys = dump[f"{name}/keys"]
                    if tier == "cache" or (tier == "redis_cluster" and "rocks_db" in self.tiers):  # they may lack rows
                        assert there[keys].all(), f"{name}: a row that was deleted"
                    else:
                        np.testing.assert_array_equal(keys, np.flatnonzero(there), err_msg=name)
                    rows = row_formats.encode("replaying", vectors[keys], self.rows[table].row_dtype)
                    np.testing.assert_array_equal(dump[f"{name}/rows"].view(np.uint32), rows.view(np.uint32), name)
                    names.add(tier)
        return names

    def mark_end(self) -> None:
        """Let each partition end with a message that changes nothing, whose position is known: nobody is killed meanwhile."""
        sequence = time.time_ns() // 1000
        for table, publisher in self.publishers.items():
            for number in range(self.partitions[table]):
                nothing = np.empty(0, np.int64), np.empty((0, publisher.rows.dim), np.float32)
                publisher.append(Partition(publisher.topic, number), encode(*nothing, sequence=sequence))
        assert self.writer.flush(PATIENCE_S) == 0
        wait_until(lambda: all(self.last().values()), "the writer has told all positions")

    def republish(self, messages: Mapping[str, list[Message]]) -> None:
        """Append a log to itself: every message once more, those of each partition in their order."""
        for table, some in messages.items():
            for message in some:
                self.publishers[table].append(message.partition, message.value)
        assert self.writer.flush(PATIENCE_S) == 0

    def add_partitions(self, grow: Callable[[str, int], object]) -> None:
        """Give the first table's topic more partitions, to which many of its keys move."""
        self.writer.close()
        grow(self.publishers["item"].topic, MORE_PARTITIONS)
        self.writer, self.partitions["item"] = self.new_writer(), MORE_PARTITIONS
        for publisher in self.publishers.values():
            publisher.writer = self.writer

    def run(
        self,
        kills: int,
        updates: int,
        disturb: Callable[[], object],
        grow: Callable[[str, int], object],
        moment: Callable[[Replica, float], object],
    ) -> int:
        """Publish while the replicas are killed in turn. Returns how often there was something to apply.

        Some times, while a replica is down, `disturb` kills the log and starts it again. `grow` gives a topic so many
        partitions. `moment` waits for the moment to kill a replica; it gets the seconds that a round takes.
        """
        rng = np.random.default_rng(SEED)
        for replica in self.replicas:
            replica.start()
        for replica in self.replicas:
            assert replica.heard() == "ready"
        broker_kills = max(1, kills // 4)
        behind, usual_s, rounds = 0, 0.2, kills * len(self.replicas)
        with ThreadPoolExecutor(1) as pool:
            for number in range(rounds):
                replica, began = self.replicas[number % len(self.replicas)], time.monotonic()
                if number == rounds // 2:
                    self.add_partitions(grow)
                publishing = pool.submit(self.publish, rng, updates // rounds)
                moment(replica, usual_s)
                behind += self.last() != replica.ask(do="positions")
                replica.kill()
                if number % max(1, rounds // broker_kills) == 0:
                    disturb()
                replica.start()
                publishing.result()
                usual_s = time.monotonic() - began
                assert replica.heard() == "ready"
        sys.stdout.write(f"{rounds} kills, {behind} of them while there was something to apply\n")
        return behind

    def last(self) -> dict[str, str]:
        """The last position in each partition."""
        return {partition: at for publisher in self.publishers.values() for partition, at in publisher.last.items()}

    def verify(self, directory: Path) -> set[str]:
        """Let the replicas come to the end of the log, compare them with a replay of it, and say everything once more."""
        self.mark_end()
        self.wait_applied()
        messages, expected, lost = self.messages(), {}, 0
        for table, rows in self.rows.items():
            there, vectors = np.zeros(rows.keys, np.bool_), rows.vectors(np.arange(rows.keys), 0)
            there[self.loaded(table)] = True
            replay(messages[table], rows, there, vectors)
            expected[table] = there, vectors
            for partition, sent in self.publishers[table].sent.items():
                logged = [zlib.crc32(message.value) for message in messages[table] if str(message.partition) == partition]
                lost += len(sent) - len(logged)
                following = iter(sent)
                assert all(one in following for one in logged), "what was sent, once and in order"
        assert lost == 0 or self.source.type == "kafka_message_queue", "Tansu, killed, can lose what it was about to take"
        sys.stdout.write(f"{sum(map(len, messages.values()))} messages in the log, {lost} lost by the broker\n")
        tiers = self.check(directory, expected)
        self.republish(messages)
        self.mark_end()
        self.wait_applied()
        assert self.check(directory, expected) == tiers
        return tiers


@contextmanager
def rebalanced(broker: KafkaBroker, topics: list[str]) -> Iterator[threading.Event]:
    """A stranger in the replicas' group, which shares its topics out, while the block runs; the event: it has got some."""
    consumer = confluent_kafka.Consumer(broker.client_settings(group_id=GROUP, session_timeout_ms=6000))
    joined, done = threading.Event(), threading.Event()
    consumer.subscribe(topics, on_assign=lambda _, partitions: joined.set() if partitions else None)

    def consume() -> None:
        while not done.is_set():
            consumer.poll(0.2)
        consumer.close()

    with ThreadPoolExecutor(1) as pool:
        consuming = pool.submit(consume)
        try:
            yield joined
        finally:
            done.set()
            consuming.result(PATIENCE_S)


def run_on_streams(
    directory: Path,
    children: ChildProcesses,
    kills: int,
    updates: int,
    row_dtype: str,
    moment: Callable[[Replica, float], object],
) -> int:
    """Kill replicas that follow streams, and their Redis, and compare; returns how many kills left something to apply."""
    with RedisServer(directory / "streams", "--appendonly", "yes", "--appendfsync", "always") as redis:
        source = {"type": "redis_stream", "address": redis.address}
        scene = Scene(directory, children, source, "hash_map+rocks_db", updates, row_dtype)

        def disturb() -> None:
            redis.kill()
            redis.start()

        behind = scene.run(kills, updates, disturb, lambda topic, count: redis.client().set(topic, count), moment)
        assert scene.verify(directory) == {"cache", "hash_map", "rocks_db"}
        return behind
