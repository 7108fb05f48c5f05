"""librdkafka's own cluster of brokers, in this process: it has the faults that a good broker does not have.

It is reached over sockets as any cluster is. confluent-kafka does not offer it, so it is called in the library that is loaded.
"""

import ctypes
from pathlib import Path
from typing import Any

import confluent_kafka
from confluent_kafka import KafkaError

PRODUCE, FETCH, METADATA = 0, 1, 3
"""Kinds of requests, as the protocol numbers them."""


def _library() -> ctypes.CDLL:
    folder = Path(confluent_kafka.__file__).parent.with_suffix(".libs")
    return ctypes.CDLL(str(next(folder.glob("librdkafka*"))))


class KafkaMock:
    """A cluster of brokers 1 to `brokers`. Topics are made with `create`, not by clients.

    Args:
        brokers: how many.
    """

    def __init__(self, brokers: int = 3) -> None:
        self._library = _library()
        for name in ("rd_kafka_conf_new", "rd_kafka_new", "rd_kafka_mock_cluster_new"):
            getattr(self._library, name).restype = ctypes.c_void_p
        self._library.rd_kafka_mock_cluster_bootstraps.restype = ctypes.c_char_p
        settings = ctypes.c_void_p(self._library.rd_kafka_conf_new())
        for name, value in ((b"log_level", b"2"), (b"bootstrap.servers", b"127.0.0.1:1")):
            self._library.rd_kafka_conf_set(settings, name, value, None, ctypes.c_size_t(0))
        self._client = ctypes.c_void_p(self._library.rd_kafka_new(0, settings, None, ctypes.c_size_t(0)))
        self._cluster = ctypes.c_void_p(self._library.rd_kafka_mock_cluster_new(self._client, brokers))
        self.address: str = self._library.rd_kafka_mock_cluster_bootstraps(self._cluster).decode()
        self._do("group_initial_rebalance_delay_ms", 0)
        self._do("set_controller_id", 1)

    def create(self, topic: str, partitions: int) -> None:
        self._do("topic_create", topic.encode(), partitions, 1)

    def delete(self, topic: str) -> None:
        self._do("topic_delete", topic.encode())

    def refuse(self, topic: str, error: int) -> None:
        """Answer with this error whoever asks for a topic; with 0 again as it is."""
        self._do("topic_set_error", topic.encode(), error)

    def lead(self, topic: str, partition: int, broker: int) -> None:
        """Make a broker the leader of a partition."""
        self._do("partition_set_leader", topic.encode(), partition, broker)

    def remove_until(self, topic: str, partition: int, offset: int) -> None:
        """Remove messages as retention does; the one at `offset` is the last."""
        self._do("partition_delete_records", topic.encode(), partition, ctypes.c_int64(offset + 1))

    def down(self, broker: int = -1) -> None:
        """End a broker's connections and take no more; of all brokers if -1."""
        self._do("broker_set_down", broker)

    def up(self, broker: int = -1) -> None:
        self._do("broker_set_up", broker)

    def fail(self, request: int, *errors: int) -> None:
        """Answer the next requests of a kind with these errors; `KafkaError._TRANSPORT` breaks the connection instead."""
        self._do(
            "push_request_errors_array",
            ctypes.c_int16(request),
            ctypes.c_size_t(len(errors)),
            (ctypes.c_int * len(errors))(*errors),
        )

    def work(self, request: int) -> None:
        """Answer requests of a kind again."""
        self._do("clear_request_errors", ctypes.c_int16(request))

    def close(self) -> None:
        self._library.rd_kafka_mock_cluster_destroy(self._cluster)
        self._library.rd_kafka_destroy(self._client)

    def __enter__(self) -> "KafkaMock":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _do(self, name: str, *arguments: Any) -> None:
        code = getattr(self._library, f"rd_kafka_mock_{name}")(self._cluster, *arguments)
        answers = not name.endswith(("_array", "_error", "_errors", "_ms", "_id"))  # the others return nothing
        assert not answers or code == 0, KafkaError(code).str()
