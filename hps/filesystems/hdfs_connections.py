"""Addresses in HDFS, and requests to it through hdfs-native, each with a timeout."""

import re
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import hdfs_native

from hps.configuration.tiers import ModelSourceConfig
from hps.errors import ModelFileError
from hps.filesystems.failures import hdfs_failure
from hps.filesystems.retries import MOST_THREADS, UnansweredError, bounded, retried

T = TypeVar("T")

_DEFAULT_PORT = 8020  # Hadoop 2, and 3 since 3.0.1

_URI = re.compile(r"hdfs:(?://([^/]*))?(/.*)?", re.IGNORECASE | re.DOTALL)
_AUTHORITY = re.compile(r"(?:[^\s/?#@:\[\]%]+|\[[0-9A-Fa-f:.]+\])(?::[0-9]{1,5})?")


@dataclass(frozen=True, slots=True)
class HdfsAddress:
    """A file or directory. *Immutable.*

    Attributes:
        uri: as given, for messages.
        authority: `host:port`, `host`, a nameservice, or empty for fs.defaultFS.
        path: absolute, without a trailing slash except for the root.
    """

    uri: str
    authority: str
    path: str


def hdfs_address(uri: str, doing: str) -> HdfsAddress:
    """Parse a URI. Its path is literal: percent signs are not decoded, `?` and `#` have no meaning.

    Raises:
        ModelFileError: it is not an HDFS URI, or its path is no legal file name.
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
    """One hdfs-native client for each authority, made on first use and replaced after an unanswered request. *Thread-safe.*

    Raises of every request:
        ModelSourceError: no answer within the deadline, or a transient failure until then.
        ModelFileError: HDFS refused.
    """

    def __init__(self, settings: ModelSourceConfig) -> None:
        self.settings = settings
        self._lock = threading.Lock()
        self._clients: dict[str, Any] = {}
        self._unanswered: set[str] = set()
        self._threads = threading.BoundedSemaphore(MOST_THREADS)

    def request(self, doing: str, address: HdfsAddress, call: Callable[[Any], T]) -> T:
        """Call a function with a client of hdfs-native, with retries, each for at most `timeout_s`."""

        def attempt(deadline: float) -> T:
            seconds = min(deadline - time.monotonic(), self.settings.timeout_s)
            return self.request_once(doing, address, seconds, call)

        return retried(self.settings, attempt)

    def request_once(self, doing: str, address: HdfsAddress, seconds: float, call: Callable[[Any], T]) -> T:
        """Call a function once, for at most `seconds`."""
        client = None

        def request() -> T:
            nonlocal client
            try:
                client = self.client(address)
                return call(client)
            except Exception:
                raise
            except BaseException as error:  # a panic of Rust
                raise RuntimeError(f"hdfs-native: {error}") from error

        # hdfs-native waits forever if a NameNode accepts connections and never answers (it is stopped, or its disk hangs). So
        # each request has its own thread, which is abandoned on timeout and ends when the NameNode continues or dies.
        # hdfs-native's asynchronous client could be cancelled, but it reads at two thirds of the speed, and panics when the
        # first NameNode of a nameservice is down.
        try:
            return bounded(f"{doing} {address.uri}", seconds, self._threads, request)
        except UnansweredError:
            self.drop(address, client)
            raise
        except ModelFileError:
            raise
        except Exception as error:  # hdfs-native's exceptions have no common class
            raise hdfs_failure(doing, address.uri, error) from error

    def client(self, address: HdfsAddress) -> Any:
        """Return the client for an authority; it connects on its first request.

        Called in a thread that may be abandoned: the first call reads the configuration of Hadoop, and may resolve host names.
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
        """Discard a client that got no answer, if there is one: it would keep waiting at the same socket."""
        with self._lock:
            if client is not None and self._clients.get(address.authority) is client:
                del self._clients[address.authority]
            self._unanswered.add(address.authority)

    def _make(self, authority: str, *, shuffle: bool) -> Any:
        config = {
            # hdfs-native tries the NameNodes of a nameservice, but must not repeat that: it would take minutes.
            "dfs.client.failover.max.attempts": "4",
            "dfs.client.failover.sleep.base.millis": "10",
            "dfs.client.failover.sleep.max.millis": "200",
            "dfs.client.socket-timeout": str(max(1, round(self.settings.timeout_s * 1000))),
        }
        if shuffle:  # the first NameNode of a nameservice may be the unresponsive one
            config[f"dfs.client.failover.random.order.{authority}"] = "true"
        try:
            return hdfs_native.Client(f"hdfs://{authority}/", config)
        except RuntimeError as error:
            if "No NameNode hosts found" not in str(error) or not authority:
                raise
        return hdfs_native.Client(f"hdfs://{authority}:{_DEFAULT_PORT}/", config)  # no nameservice: a NameNode
