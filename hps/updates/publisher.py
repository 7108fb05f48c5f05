"""Publishes row changes of a table: framed, in order, and each key always to the same partition."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from types import TracebackType
from typing import Any, Final, Self

import numpy as np
from numba import int64, types

from hps.configuration.load import Source, load_configuration
from hps.errors import ConfigError, InvalidDtypeError, InvalidInputError, UnknownTableError, UpdateLogError
from hps.ground.hashing import mix
from hps.ground.kernels.numba_kernels import compile_kernels, kernel, read_only
from hps.ground.progress import NoProgress, Progress
from hps.ground.registry import implementation
from hps.types import FloatArray, IndexArray, KeyArray
from hps.updates.base import TOPIC_PREFIX, Partition, UpdateLogWriter
from hps.updates.framing import HEADER_BYTES, Changes, VectorDtype, encode, sequence_of

MESSAGE_BYTES: Final = 256 << 10
"""Default message size in bytes; a single row may exceed it. Brokers accept a megabyte by default."""

_TIMEOUT_S: Final = 30.0
_void: Any = types.void
_NO_KEYS: Final = np.empty(0, np.int64)
_NO_VECTORS: Final = np.empty((0, 0), np.float32)


class Publisher:
    """Publishes row changes of one table to its topic. *One thread.* A context manager, made by `open_publisher`.

    Every change gets a sequence, by which replicas order two changes of a key: the time in microseconds, or the last sequence
    plus one if that is higher. It ascends across restarts and when the clock is set back.
    """

    def __init__(
        self,
        writer: UpdateLogWriter,
        topic: str,
        *,
        dim: int = 0,
        dtype: VectorDtype = "float32",
        message_bytes: int = MESSAGE_BYTES,
        rows_per_s: float = 0.0,
        create_partitions: int = 0,
        progress: Progress | None = None,
        owned: bool = False,
        now_us: Callable[[], int] = lambda: time.time_ns() // 1000,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        compile_kernels(_partition_numbers)  # so that no message waits for a compiler
        self._writer, self._topic, self._dim, self._dtype, self._owned = writer, topic, dim, dtype, owned
        self._message_bytes, self._rows_per_s = message_bytes, rows_per_s
        self._progress = progress or NoProgress()
        self._now_us, self._clock, self._sleep = now_us, clock, sleep
        self._started_at, self._paced_rows = clock(), 0
        self._lock = threading.Lock()
        self._failure: Exception | None = None
        self._sequence = 0
        self._positions: dict[str, str] = {}
        self.rows = 0
        """Number of published changes, including deletions."""
        self._partitions = [Partition(topic, i) for i in range(writer.partitions(topic, _TIMEOUT_S, create=create_partitions))]
        for partition in self._partitions:
            if (last := writer.last(partition, _TIMEOUT_S)) is not None:
                self._positions[str(partition)] = last.position
                self._sequence = max(self._sequence, sequence_of(last.value) or last.time_us)

    def insert(
        self,
        keys: KeyArray,  # (n,)
        vectors: FloatArray,  # (n, dim)
    ) -> None:
        """Publish rows to insert or replace. Blocks for the rate limit, and while too many messages are in flight.

        When the call returns the rows are in flight; `flush` waits until the log has them.

        Args:
            keys: (n,) int64, in host memory. Of a key that occurs twice the last row counts.
            vectors: (n, dim) float32, finite, in host memory.

        Raises:
            InvalidInputError: the shapes do not match each other or the table, or a vector is not finite in the sent dtype;
                earlier rows may have been published.
            UpdateLogError: the log cannot be reached, or it refused this or an earlier message.
        """
        if vectors.shape != (keys.size, self._dim or vectors.shape[-1]):
            expected = f"({keys.size}, {self._dim or 'dim'})"
            raise InvalidInputError(f"publishing to {self._topic}: got vectors {vectors.shape}, expected {expected}")
        for partition, rows in self._shares(keys, 8 + vectors.shape[1] * (4 if self._dtype == "float32" else 2)):
            self._send(partition, keys[rows], vectors[rows], _NO_KEYS)

    def delete(self, keys: KeyArray) -> None:
        """Publish keys whose rows are to be removed; otherwise as `insert`."""
        for partition, rows in self._shares(keys, 8):
            self._send(partition, _NO_KEYS, _NO_VECTORS, keys[rows])

    def flush(self, timeout_s: float = 60.0) -> dict[str, str]:
        """Wait until the log has everything published.

        Returns:
            Position of the last message by partition name, without empty partitions: the `updates` of `write_version` for
            model files that contain everything published.

        Raises:
            UpdateLogError: the log refused a message, or does not have them all in time.
        """
        waiting = self._writer.flush(timeout_s)
        self._check()
        if waiting:
            raise UpdateLogError(
                f"publishing to {self._topic}: {waiting} messages are not confirmed after {timeout_s:.0f} s; publish them again"
            )
        with self._lock:
            return dict(self._positions)

    def close(self) -> None:
        """Release the connection, unless it is shared. Unflushed messages may be lost."""
        if self._owned:
            self._writer.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            if kind is None:
                self.flush()
        finally:
            self.close()

    def _shares(self, keys: KeyArray, row_bytes: int) -> Iterator[tuple[Partition, IndexArray]]:
        if keys.dtype != np.int64 or keys.ndim != 1:
            raise InvalidDtypeError(f"publishing to {self._topic}: got keys {keys.dtype} {keys.shape}, expected int64 (n,)")
        step = self._step(row_bytes)
        numbers = np.empty(keys.size, np.int64)
        _partition_numbers(np.ascontiguousarray(keys), len(self._partitions), numbers)
        order = np.argsort(numbers.astype(np.uint16), kind="stable")  # a radix sort
        ends = np.cumsum(np.bincount(numbers, minlength=len(self._partitions)))
        for partition, rows in zip(self._partitions, np.split(order, ends[:-1]), strict=True):
            for low in range(0, rows.size, step):
                yield partition, rows[low : low + step]

    def _step(self, row_bytes: int) -> int:
        step = max(1, (self._message_bytes - HEADER_BYTES) // row_bytes)
        return min(step, max(1, int(self._rows_per_s))) if self._rows_per_s else step

    def _send(
        self,
        partition: Partition,
        keys: KeyArray,
        vectors: FloatArray,
        deleted: KeyArray,
        sequence: int = 0,  # 0: the next
        time_us: int = 0,  # 0: now
    ) -> None:
        rows = keys.size + deleted.size
        self._wait(rows)
        self._check()
        now_us = self._now_us()
        # Time alone would repeat or fall back when the clock is set back, and replicas would drop the later change of a key.
        if not sequence:
            sequence = self._sequence = max(now_us, self._sequence + 1)
        value = encode(keys, vectors, deleted, sequence=sequence, time_us=time_us or now_us, dtype=self._dtype)

        def sent(result: str | Exception) -> None:
            with self._lock:
                if isinstance(result, Exception):
                    self._failure = self._failure or result
                elif result:
                    self._positions[str(partition)] = result

        self._writer.send(partition, value, time_us=now_us, sent=sent)
        self.rows += rows
        self._progress.advance(self._topic, rows)

    def _check(self) -> None:
        with self._lock:
            failure, self._failure = self._failure, None
        if failure is not None:
            raise UpdateLogError(f"publishing to {self._topic}: a message was refused: {failure}") from failure

    def _wait(self, rows: int) -> None:
        """Sleep until the rate allows these rows; at most a second of unused rate carries over."""
        if not self._rows_per_s:
            return
        ahead = self._started_at + self._paced_rows / self._rows_per_s - self._clock()
        if ahead > 0:
            self._sleep(ahead)
        elif ahead < -1:
            self._started_at, self._paced_rows = self._clock() - 1, 0
        self._paced_rows += rows


class Republisher(Publisher):
    """Republishes messages that could not be applied, at their own place in the order of changes. *One thread.*"""

    def republish(self, number: int, changes: Changes, sequence: int) -> None:
        """Republish a message's changes with their original sequence, so that they replace nothing newer.

        Args:
            number: original partition, modulo the topic's partitions.
        """
        partition, dim = self._partitions[number % len(self._partitions)], changes.vectors.shape[1]
        step = self._step(8 + dim * (4 if self._dtype == "float32" else 2))
        for low in range(0, changes.keys.size, step):
            keys, vectors = changes.keys[low : low + step], changes.vectors[low : low + step]
            self._send(partition, keys, vectors, _NO_KEYS, sequence, changes.time_us)
        step = self._step(8)
        for low in range(0, changes.deleted_keys.size, step):
            deleted = changes.deleted_keys[low : low + step]
            self._send(partition, _NO_KEYS, _NO_VECTORS, deleted, sequence, changes.time_us)

    def mark(self) -> None:
        """End each partition with an empty message that has a new sequence, so that later publishers find a last sequence."""
        for partition in self._partitions:
            self._send(partition, _NO_KEYS, _NO_VECTORS, _NO_KEYS)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        with suppress(*(() if kind is None else (UpdateLogError,))):  # also after an interrupt: sent messages stay in the log
            self.mark()
            self.flush()
        self.close()


def open_publisher(
    config: Source,
    model: str,
    table: str,
    *,
    dtype: VectorDtype = "float32",
    message_bytes: int = MESSAGE_BYTES,
    rows_per_s: float = 0.0,
    create_partitions: int = 0,
) -> Publisher:
    """Connect to the log of online updates of a configuration, to publish changes of one table.

    Args:
        config: as for `HPS`; `update_source` names the log.
        model: name of the model.
        table: name of the table. If the configuration lists the model, it must have the table.
        dtype: dtype of vectors in messages: float32, float16 or bfloat16. Replicas convert back to float32.
        message_bytes: message size in bytes; a single row may exceed it.
        rows_per_s: rate limit; 0: unlimited.
        create_partitions: number of partitions to create a missing topic with; 0: do not create it.

    Raises:
        ConfigError: the configuration is wrong, or names no log.
        UnknownTableError: the model has no such table.
        MissingDependencyError: the log's client is not installed.
        UpdateLogError: the log cannot be reached, or has no such topic.
    """
    configuration = load_configuration(config)
    dims = [
        dict(zip(listed.embedding_table_names, listed.embedding_vecsize_per_table, strict=True))
        for listed in configuration.models
        if listed.model == model
    ]
    if dims and table not in dims[0]:
        raise UnknownTableError(f"publishing to {model}.{table}: got table {table!r}, expected one of: {', '.join(dims[0])}")
    writer = open_writer(configuration.update_source)
    try:
        return Publisher(
            writer,
            f"{TOPIC_PREFIX}{model}.{table}",
            dim=dims[0][table] if dims else 0,
            dtype=dtype,
            message_bytes=message_bytes,
            rows_per_s=rows_per_s,
            create_partitions=create_partitions,
            owned=True,
        )
    except BaseException:
        writer.close()
        raise


def open_writer(settings: Any) -> UpdateLogWriter:
    """Open the writer of the configured log.

    Raises:
        ConfigError: no log is configured, or its settings are wrong.
        MissingDependencyError: its client is not installed.
    """
    if settings.type == "null":
        raise ConfigError("update_source", ["type: got null, expected the log to publish to, e.g. kafka_message_queue"])
    writer: UpdateLogWriter = implementation("update_log_writer", settings.type).from_config(settings)
    return writer


@kernel(_void, read_only(int64[::1]), int64, int64[::1])
def _partition_numbers(keys: KeyArray, count: int, numbers: IndexArray) -> None:
    for i in range(keys.size):
        numbers[i] = np.int64(mix(keys[i]) % np.uint64(count))
