"""Lookups of PyTorch layers in a server over HTTP: a client with ids of tables, versions, and a fallback.

The location of a server is a string, which saved programs contain: addresses, and after a `#` the layer's options.

    http://a:8000,http://b:8000#timeout_s=0.05&fallback=0.0
"""

import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple, TypeAlias

from hps.client.client import Client
from hps.errors import (
    InvalidInputError,
    NotReadyError,
    RemoteConnectionError,
    RemoteTimeoutError,
    UnknownTableError,
    UnknownVersionError,
    VersionMismatchError,
)
from hps.ground.log_limits import OnceAMinute
from hps.tensors.bags import Bags
from hps.types import FloatArray, KeyArray

_log = logging.getLogger(__name__)
_log.addFilter(OnceAMinute())
_UNAVAILABLE: Final = (RemoteConnectionError, RemoteTimeoutError, NotReadyError)
_SCHEMES: Final = ("http://", "https://", "unix://")
_MOST_VERSIONS: Final = 64
Turn: TypeAlias = Mapping[int | str, Any]
"""The contents of one request: keys or bags by table, id or name."""


class Options(NamedTuple):
    """Options of a layer that looks up over HTTP. *Immutable.*"""

    timeout_s: float | None = None  # of each call; None: that of the client
    fallback: float | None = None  # value of each output element while the server is unavailable; None: such calls fail

    def check(self) -> "Options":
        """Return itself.

        Raises:
            InvalidInputError: a number is wrong.
        """
        if self.timeout_s is not None and not 0 < self.timeout_s < math.inf:
            raise InvalidInputError(f"making a layer: got timeout_s {self.timeout_s!r}, expected a number above 0")
        if self.fallback is not None and not math.isfinite(self.fallback):
            raise InvalidInputError(f"making a layer: got fallback {self.fallback!r}, expected a finite number")
        return self

    def changed(self, others: "Options") -> "Options":
        """Return these options, overridden by those of `others` that are set."""
        return self._replace(**{name: value for name, value in others._asdict().items() if value is not None})

    def text(self) -> str:
        """Return the options as the end of a location; empty if there are none."""
        options = [f"{name}={float(value)!r}" for name, value in self._asdict().items() if value is not None]
        return f"#{'&'.join(options)}" if options else ""


def split_options(location: str) -> tuple[str, Options]:
    """Split a location from its options; a `#` in a file's path is no separator."""
    before, _, text = location.rpartition("#")
    options = dict(option.split("=", 1) for option in text.split("&") if "=" in option)
    if not before or not options or not options.keys() <= {*Options._fields}:
        return location, Options()
    try:
        return before, Options(**{name: float(value) for name, value in options.items()}).check()
    except ValueError as error:
        raise InvalidInputError(f"looking up through a layer: got options {text!r}, expected numbers") from error


def is_address(location: str) -> bool:
    """Return whether a location is one or more addresses of servers."""
    return location.startswith(_SCHEMES)


class RemoteTables:
    """The tables of a server over HTTP, for layers. *Thread-safe*; a forked child can use it."""

    def __init__(self, client: Client, options: Options | None = None) -> None:
        self.client = client
        self.options = options or Options()
        self._names: dict[tuple[str, str], tuple[str, ...]] = {}  # of tables, by model and version; "": the serving version

    @property
    def closed(self) -> bool:
        return self.client.closed

    def rows(
        self,
        keys: KeyArray,  # (n,)
        model_name: str,
        version: str,
        table: int | str,
    ) -> FloatArray | None:  # (n, dim)
        """Look up keys of one table.

        Args:
            keys: int64 or int32.
            version: empty: the serving one.

        Returns:
            Their vectors; None: the server is unavailable, and the layer has a fallback.

        Raises:
            VersionMismatchError: the version is not in service.
            HPSError: as `Client.lookup`.
        """
        vectors = self._request(self.client.lookup_tables, [{table: keys}], model_name, version)
        return None if vectors is None else vectors[0][0]

    def deployed(self, model_name: str, version: str, tables: Sequence[str]) -> tuple[str, dict[str, int]]:
        """Return a version that is in service, and the widths of the tables.

        Args:
            version: empty: the serving one.

        Raises:
            UnknownModelError, UnknownVersionError, UnknownTableError: not deployed.
            HPSError: as `Client.lookup_tables`.
        """
        vectors_by_table, answered = self.client.lookup_tables(
            dict.fromkeys(tables, ()),
            model_name,
            version=version or None,
            return_version=True,
            timeout_s=self.options.timeout_s,
        )
        return answered, {name: vectors.shape[1] for name, vectors in vectors_by_table.items()}

    def pooled(self, turns: Sequence[Mapping[int | str, Bags]], model_name: str, version: str) -> list[list[FloatArray]] | None:
        """Look up bags in several turns, all in one version.

        Args:
            turns: bags by table, in host memory.

        Returns:
            Vectors of each table of each turn, (bags, dim); or None, as for `rows`.

        Raises:
            InvalidInputError: a turn names a table twice. VersionMismatchError: as for `rows`.
            HPSError: as `Client.lookup_pooled`.
        """
        return self._request(self.client.lookup_pooled, turns, model_name, version)

    def _request(
        self, look_up: Callable[..., Any], turns: Sequence[Turn], model_name: str, version: str
    ) -> list[list[FloatArray]] | None:
        timeout_s = self.options.timeout_s or self.client.timeout_s
        due = time.monotonic() + timeout_s

        def remaining_s() -> float:
            if (remaining_s := due - time.monotonic()) <= 0:
                raise RemoteTimeoutError(f"looking up through a layer: no complete answer within {timeout_s:g} s (timeout_s)")
            return remaining_s

        try:
            while True:
                vectors = self._request_once(look_up, turns, model_name, version, remaining_s)
                if vectors is not None:
                    return vectors
        except UnknownVersionError as error:
            if not version:
                raise
            raise VersionMismatchError(
                f"looking up model {model_name!r} through a layer of version {version}: {error}. Make the layer, or convert "
                f"the module, again for the version that serves, or deploy version {version} again; a layer made with "
                "version='latest' follows the serving version"
            ) from error
        except _UNAVAILABLE as error:
            self._names.clear()  # the next answer may come from another server
            if self.options.fallback is None or self.closed:
                raise
            _log.warning("layers of model %s answer %g for every element: %s", model_name, self.options.fallback, error)
            return None

    def _request_once(
        self,
        look_up: Callable[..., Any],
        turns: Sequence[Turn],
        model_name: str,
        version: str,
        remaining_s: Callable[[], float],
    ) -> list[list[FloatArray]] | None:
        """Request all turns in one version; None if another version took over meanwhile."""
        by_id = any(isinstance(table, int) for turn in turns for table in turn)
        names = self._names_of(model_name, version, remaining_s) if by_id else ()
        answered_version, vectors_by_turn = version, []
        for turn in turns:
            tables = {_name(table, names, model_name): keys for table, keys in turn.items()}
            if len(tables) < len(turn):
                raise InvalidInputError(
                    f"looking up model {model_name!r} through a layer: got tables {', '.join(map(repr, turn))}, expected each "
                    "by id or by name"
                )
            try:
                vectors, answered = look_up(
                    tables, model_name, version=answered_version or None, return_version=True, timeout_s=remaining_s()
                )
            except UnknownVersionError:
                if answered_version == version:
                    raise
                return None
            except UnknownTableError:
                self._names.pop((model_name, version), None)
                if not by_id or self._names_of(model_name, version, remaining_s) == names:
                    raise
                return None
            if by_id and (right := self._names_of(model_name, answered, remaining_s)) != names:
                self._names[model_name, ""] = right
                return None
            answered_version = answered
            vectors_by_turn.append([vectors[name] for name in tables])
        return vectors_by_turn

    def _names_of(self, model_name: str, version: str, remaining_s: Callable[[], float]) -> tuple[str, ...]:
        """Return the tables of a version in the order of their ids."""
        names = self._names.get((model_name, version))
        if names is None:
            if len(self._names) >= _MOST_VERSIONS:
                self._names.clear()
            names = tuple(self.client.tables(model_name, version=version or None, timeout_s=remaining_s()))
            self._names[model_name, version] = names
        return names


def _name(table: int | str, names: Sequence[str], model_name: str) -> str:
    if isinstance(table, str):
        return table
    if not 0 <= table < len(names):
        raise UnknownTableError(
            f"looking up model {model_name!r} through a layer: got table {table}, expected 0 to {len(names) - 1}"
        )
    return names[table]
