"""Asks HDFS through hdfs-native, each question within its time."""

import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

import hdfs_native

from hps.configuration.tiers import ModelSourceConfig
from hps.errors import ModelFileError, ModelSourceError
from hps.filesystems.hdfs.address import HdfsAddress
from hps.filesystems.hdfs.errors import UnansweredError, hdfs_failure
from hps.filesystems.retries import retried, within

T = TypeVar("T")

_DEFAULT_PORT = 8020  # Hadoop 2, and 3 since 3.0.1
_MOST_THREADS = 128


class HdfsConnections:
    """One client of hdfs-native an authority, made at first use, and anew after one got no answer. *Thread-safe.*

    A question to a NameNode that accepts connections and never answers (it is stopped, or its disk hangs) waits for ever in
    hdfs-native. It is left behind in a thread of its own, which ends when the NameNode goes on or dies; until then no more than
    `_MOST_THREADS` are begun. (hdfs-native's asynchronous client could be cancelled, but reads at two thirds of the speed, and
    panics when the first NameNode of a nameservice is down.)

    Raises of every question:
        ModelSourceError: no answer within the deadline, or a failure that may pass until then.
        ModelFileError: HDFS refused.
    """

    def __init__(self, settings: ModelSourceConfig) -> None:
        self.settings = settings
        self._lock = threading.Lock()
        self._clients: dict[str, Any] = {}
        self._unanswered: set[str] = set()
        self._threads = threading.BoundedSemaphore(_MOST_THREADS)

    def ask(self, doing: str, address: HdfsAddress, question: Callable[[Any], T]) -> T:
        """Ask as often as the settings allow what `question` asks a client of hdfs-native."""
        return retried(self.settings, lambda left_s: self.ask_once(doing, address, left_s, question))

    def ask_once(self, doing: str, address: HdfsAddress, left_s: float, question: Callable[[Any], T]) -> T:
        """Ask, and wait for `left_s`, but no longer than `timeout_s`."""
        started = time.monotonic()
        seconds = min(left_s, self.settings.timeout_s)
        client = self.client(doing, address, seconds)
        seconds = max(seconds - (time.monotonic() - started), 0.001)
        call = self.counted(doing, address, seconds, lambda: question(client))
        try:
            return within(f"{doing} {address.uri}", seconds, call)
        except ModelSourceError as error:
            self.drop(address, client)
            raise UnansweredError(doing, address.uri, seconds) from error
        except Exception as error:  # hdfs-native's have no class in common
            raise hdfs_failure(doing, address.uri, error) from error

    def counted(self, doing: str, address: HdfsAddress, seconds: float, call: Callable[[], T]) -> Callable[[], T]:
        """What a thread is to run: the call, as one of `_MOST_THREADS`. It must be run."""
        if not self._threads.acquire(timeout=seconds):
            raise UnansweredError(doing, address.uri, seconds)

        def run() -> T:
            try:
                return call()
            except Exception:
                raise
            except BaseException as error:  # a panic of Rust's
                raise RuntimeError(f"hdfs-native: {error}") from error
            finally:
                self._threads.release()

        return run

    def client(self, doing: str, address: HdfsAddress, seconds: float) -> Any:
        """The client for who holds a file. It connects when it is asked something."""
        authority = address.authority
        with self._lock:
            client, shuffle = self._clients.get(authority), authority in self._unanswered
        if client is not None:
            return client
        make = self.counted(doing, address, seconds, lambda: self._make(authority, shuffle=shuffle))
        try:
            # In a thread: it reads Hadoop's configuration and, where that wants names resolved, asks name servers.
            client = within(f"{doing} {address.uri}", seconds, make)
        except ModelFileError:
            raise
        except Exception as error:
            raise hdfs_failure(doing, address.uri, error) from error
        with self._lock:
            return self._clients.setdefault(authority, client)

    def drop(self, address: HdfsAddress, client: Any) -> None:
        """Forget a client that got no answer: it would go on waiting at the same socket."""
        with self._lock:
            if self._clients.get(address.authority) is client:
                del self._clients[address.authority]
            self._unanswered.add(address.authority)

    def _make(self, authority: str, *, shuffle: bool) -> Any:
        config = {
            # To go through the NameNodes of a nameservice is left to hdfs-native, to try again is not: it takes minutes.
            "dfs.client.failover.max.attempts": "4",
            "dfs.client.failover.sleep.base.millis": "10",
            "dfs.client.failover.sleep.max.millis": "200",
            "dfs.client.socket-timeout": str(max(1, round(self.settings.timeout_s * 1000))),
        }
        if shuffle:  # the first one of a nameservice may be the one that does not answer
            config[f"dfs.client.failover.random.order.{authority}"] = "true"
        try:
            return hdfs_native.Client(f"hdfs://{authority}/", config)
        except RuntimeError as error:
            if "No NameNode hosts found" not in str(error) or not authority:
                raise
        return hdfs_native.Client(f"hdfs://{authority}:{_DEFAULT_PORT}/", config)  # no nameservice: a NameNode
