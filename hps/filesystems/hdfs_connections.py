"""Addresses in HDFS, and questions to it through hdfs-native, each within its time."""

import re
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import hdfs_native

from hps.configuration.tiers import ModelSourceConfig
from hps.errors import ModelFileError
from hps.filesystems.hdfs_errors import hdfs_failure
from hps.filesystems.retries import UnansweredError, retried, within

T = TypeVar("T")

_DEFAULT_PORT = 8020  # Hadoop 2, and 3 since 3.0.1
_MOST_THREADS = 128

_URI = re.compile(r"hdfs:(?://([^/]*))?(/.*)?", re.IGNORECASE | re.DOTALL)
_AUTHORITY = re.compile(r"(?:[^\s/?#@:\[\]%]+|\[[0-9A-Fa-f:.]+\])(?::[0-9]{1,5})?")


@dataclass(frozen=True, slots=True)
class HdfsAddress:
    """A file or directory. *Immutable.*

    Attributes:
        uri: as it was given, for messages.
        authority: `host:port`, `host`, a nameservice, or empty for fs.defaultFS.
        path: absolute, without a slash at its end unless it is the root.
    """

    uri: str
    authority: str
    path: str


def hdfs_address(uri: str, doing: str) -> HdfsAddress:
    """Take a URI apart. Its path is literal: percent signs are not decoded, `?` and `#` have no meaning.

    Raises:
        ModelFileError: it is not a URI of HDFS, or no file can have this name.
    """
    match = _URI.fullmatch(uri)
    if match is None or (match[1] and not _AUTHORITY.fullmatch(match[1])):
        raise ModelFileError(
            f"{doing} {uri!r}: expected hdfs://host:port/path, hdfs://nameservice/path or hdfs:///path; "
            "HADOOP_USER_NAME or a Kerberos ticket names the user"
        )
    try:
        path = match[2] or "/"
        path.encode()
    except UnicodeEncodeError as error:
        raise ModelFileError(f"{doing} {uri!r}: an undecodable character is in the path; no file can have this name") from error
    if "\0" in path:
        raise ModelFileError(f"{doing} {uri!r}: a NUL is in the path; no file can have this name")
    if {".", ".."} & set(path.split("/")):
        raise ModelFileError(f"{doing} {uri!r}: HDFS has no such names; leave out `.` and `..`")
    return HdfsAddress(uri, match[1] or "", re.sub("/+", "/", path).rstrip("/") or "/")


class HdfsConnections:
    """One client of hdfs-native for each authority, made at first use and again after one got no answer. *Thread-safe.*

    hdfs-native waits for ever when a NameNode accepts connections and never answers (it is stopped, or its disk hangs). So each
    question has a thread of its own, which is left behind and ends when the NameNode goes on or dies. There are at most
    `_MOST_THREADS` of them. (hdfs-native's asynchronous client could be cancelled, but it reads at two thirds of the speed, and
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
        """Call `question` with a client of hdfs-native, as often as the settings allow."""
        return retried(self.settings, lambda deadline: self.ask_once(doing, address, deadline, question))

    def ask_once(self, doing: str, address: HdfsAddress, deadline: float, question: Callable[[Any], T]) -> T:
        """Call `question` once, and wait until the deadline, but no longer than `timeout_s`."""
        deadline = min(deadline, time.monotonic() + self.settings.timeout_s)
        client: Any = None

        def ask() -> T:
            nonlocal client
            client = self.client(address)
            return question(client)

        call = self.counted(doing, address, deadline, ask)
        try:
            return within(f"{doing} {address.uri}", deadline, call)
        except UnansweredError:
            self.drop(address, client)
            raise
        except Exception as error:  # those of hdfs-native have no class in common
            raise hdfs_failure(doing, address.uri, error) from error

    def counted(self, doing: str, address: HdfsAddress, deadline: float, call: Callable[[], T]) -> Callable[[], T]:
        """Count a call as one of `_MOST_THREADS` until it ends. The result is what its thread runs; it must be run."""
        seconds = max(deadline - time.monotonic(), 0.0)
        if not self._threads.acquire(timeout=seconds):
            raise UnansweredError(f"{doing} {address.uri}", seconds)

        def run() -> T:
            try:
                return call()
            except Exception:
                raise
            except BaseException as error:  # a panic of Rust
                raise RuntimeError(f"hdfs-native: {error}") from error
            finally:
                self._threads.release()

        return run

    def client(self, address: HdfsAddress) -> Any:
        """The client for an authority; it connects when it is asked something.

        Called in a thread that may be left behind: the first call reads the configuration of Hadoop, and may ask name servers.
        """
        authority = address.authority
        with self._lock:
            client, shuffle = self._clients.get(authority), authority in self._unanswered
        if client is not None:
            return client
        client = self._make(authority, shuffle=shuffle)
        with self._lock:
            return self._clients.setdefault(authority, client)

    def drop(self, address: HdfsAddress, client: Any) -> None:
        """Forget a client that got no answer: it would go on waiting at the same socket. None where there is none yet."""
        with self._lock:
            if client is not None and self._clients.get(address.authority) is client:
                del self._clients[address.authority]
            self._unanswered.add(address.authority)

    def _make(self, authority: str, *, shuffle: bool) -> Any:
        config = {
            # hdfs-native goes through the NameNodes of a nameservice, but must not repeat that: it would take minutes.
            "dfs.client.failover.max.attempts": "4",
            "dfs.client.failover.sleep.base.millis": "10",
            "dfs.client.failover.sleep.max.millis": "200",
            "dfs.client.socket-timeout": str(max(1, round(self.settings.timeout_s * 1000))),
        }
        if shuffle:  # the first NameNode of a nameservice may be the one that does not answer
            config[f"dfs.client.failover.random.order.{authority}"] = "true"
        try:
            return hdfs_native.Client(f"hdfs://{authority}/", config)
        except RuntimeError as error:
            if "No NameNode hosts found" not in str(error) or not authority:
                raise
        return hdfs_native.Client(f"hdfs://{authority}:{_DEFAULT_PORT}/", config)  # no nameservice: a NameNode
