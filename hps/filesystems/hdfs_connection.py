"""Asks HDFS through hdfs-native, each question within its time."""

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable
from functools import cache
from typing import Any, TypeVar

import hdfs_native

from hps.config_tiers import ModelSourceConfig
from hps.errors import ModelSourceError
from hps.filesystems.hdfs_address import HdfsAddress
from hps.filesystems.hdfs_errors import UnansweredError, hdfs_failure
from hps.filesystems.retries import retried, within

T = TypeVar("T")

_DEFAULT_PORT = 8020  # Hadoop 2, and 3 since 3.0.1
_LATE_S = 5.0  # how late the event loop may be on a busy machine


class HdfsConnection:
    """The clients of one authority: of a NameNode, or of a nameservice of Hadoop's configuration. *Thread-safe.*

    Questions to a NameNode go through hdfs-native's asynchronous client: one that gets no answer is cancelled, so that a
    NameNode which accepts connections and never answers (it is stopped, or its disk hangs) costs no thread a question.
    Contents come through the synchronous client, which is faster by half.

    Args:
        authority: `host:port`, `host`, a nameservice, or nothing for fs.defaultFS.
        settings: timeouts.
        shuffle: ask the NameNodes of a nameservice in any order, since the first one did not answer.
    """

    def __init__(self, authority: str, settings: ModelSourceConfig, *, shuffle: bool = False) -> None:
        config = {
            # Going through the NameNodes of a nameservice is left to hdfs-native, trying again is not: it takes minutes.
            "dfs.client.failover.max.attempts": "4",
            "dfs.client.failover.sleep.base.millis": "10",
            "dfs.client.failover.sleep.max.millis": "200",
            "dfs.client.socket-timeout": str(max(1, round(settings.timeout_s * 1000))),
        }
        if shuffle:
            config[f"dfs.client.failover.random.order.{authority}"] = "true"
        self._timeout_s = settings.timeout_s
        try:
            self._asynchronous, self.synchronous = _clients(f"hdfs://{authority}/", config)
        except RuntimeError as error:
            if "No NameNode hosts found" not in str(error) or not authority:
                raise
            # No nameservice: a NameNode, at the default port.
            self._asynchronous, self.synchronous = _clients(f"hdfs://{authority}:{_DEFAULT_PORT}/", config)

    def ask(self, left_s: float, question: Callable[[Any], Awaitable[T]]) -> T:
        """Await what `question` makes of the asynchronous client, or cancel it after `timeout_s` or `left_s`.

        Raises:
            TimeoutError: no answer in time.
            Exception: of hdfs-native; see `hdfs_failure`.
        """
        seconds = min(left_s, self._timeout_s)

        async def bounded() -> T:
            async with asyncio.timeout(seconds):
                return await question(self._asynchronous)

        future = asyncio.run_coroutine_threadsafe(bounded(), _event_loop())
        try:
            return future.result(seconds + _LATE_S)
        except TimeoutError:
            future.cancel()
            raise


class HdfsConnections:
    """One `HdfsConnection` an authority, made at first use, and anew after one got no answer. *Thread-safe.*

    Raises of every question:
        ModelSourceError: no answer within the deadline, or a failure that may pass until then.
        ModelFileError: HDFS refused.
    """

    def __init__(self, settings: ModelSourceConfig) -> None:
        self.settings = settings
        self._lock = threading.Lock()
        self._connections: dict[str, HdfsConnection] = {}
        self._unanswered: set[str] = set()

    def ask(self, doing: str, address: HdfsAddress, question: Callable[[Any], Awaitable[T]]) -> T:
        """Ask as often as the settings allow."""
        return retried(self.settings, lambda left_s: self.ask_once(doing, address, time.monotonic() + left_s, question))

    def ask_once(self, doing: str, address: HdfsAddress, deadline: float, question: Callable[[Any], Awaitable[T]]) -> T:
        """Ask, until `deadline` by `time.monotonic`, and at most for `timeout_s`."""
        connection = self.get(doing, address, deadline)
        left_s = max(deadline - time.monotonic(), 0.001)
        try:
            return connection.ask(left_s, question)
        except TimeoutError as error:
            self.drop(address, connection)
            raise UnansweredError(doing, address.uri, min(left_s, self.settings.timeout_s)) from error
        except Exception as error:  # hdfs-native's have no class in common
            raise hdfs_failure(doing, address.uri, error) from error

    def get(self, doing: str, address: HdfsAddress, deadline: float) -> HdfsConnection:
        """The connection to who holds a file. None is made to the outside before a question is asked."""
        authority = address.authority
        with self._lock:
            connection, shuffle = self._connections.get(authority), authority in self._unanswered
        if connection is not None:
            return connection
        seconds = max(min(deadline - time.monotonic(), self.settings.timeout_s), 0.001)
        try:
            # In a thread: it reads Hadoop's configuration and, where that wants names resolved, asks name servers.
            connection = within(
                f"{doing} {address.uri}", seconds, lambda: HdfsConnection(authority, self.settings, shuffle=shuffle)
            )
        except ModelSourceError:
            raise
        except (RuntimeError, OSError) as error:
            raise hdfs_failure(doing, address.uri, error) from error
        with self._lock:
            return self._connections.setdefault(authority, connection)

    def drop(self, address: HdfsAddress, connection: HdfsConnection) -> None:
        """Forget a connection that got no answer: hdfs-native would go on waiting at the same socket."""
        with self._lock:
            if self._connections.get(address.authority) is connection:
                del self._connections[address.authority]
            self._unanswered.add(address.authority)


def _clients(place: str, config: dict[str, str]) -> tuple[Any, Any]:
    return hdfs_native.AsyncClient(place, config), hdfs_native.Client(place, config)


@cache
def _event_loop() -> asyncio.AbstractEventLoop:
    """The loop of the asynchronous clients, in a thread of its own, for as long as the process lives."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="hps-hdfs-questions", daemon=True).start()
    return loop
