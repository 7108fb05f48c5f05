"""Lookups of layers in a server over HTTP: a client, and what layers need besides: ids of tables, versions, the fallback.

What says where a layer looks up is one string, which saved programs contain: addresses, and behind a `#` the layer's options.

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
_AWAY: Final = (RemoteConnectionError, RemoteTimeoutError, NotReadyError)
_SCHEMES: Final = ("http://", "https://", "unix://")
_MOST_VERSIONS: Final = 64
Turn: TypeAlias = Mapping[int | str, Any]
"""What one request asks for: keys or bags by table, id or name."""


class Options(NamedTuple):
    """Options of a layer that looks up over HTTP. *Immutable.*

    Attributes:
        timeout_s: of each call; None: that of the client.
        fallback: each element of the answers while the server is away; None: such calls fail.
    """

    timeout_s: float | None = None
    fallback: float | None = None

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
        """Return these options with those of the others that are given."""
        return self._replace(**{name: value for name, value in others._asdict().items() if value is not None})

    def text(self) -> str:
        """Write the options as the end of a place; empty if there are none."""
        given = [f"{name}={float(value)!r}" for name, value in self._asdict().items() if value is not None]
        return f"#{'&'.join(given)}" if given else ""


def split_options(place: str) -> tuple[str, Options]:
    """Split the options off a place; a `#` in the path of a file begins none."""
    before, _, text = place.rpartition("#")
    given = dict(one.split("=", 1) for one in text.split("&") if "=" in one)
    if not before or not given or not given.keys() <= {*Options._fields}:
        return place, Options()
    try:
        return before, Options(**{name: float(value) for name, value in given.items()}).check()
    except ValueError as error:
        raise InvalidInputError(f"looking up through a layer: got options {text!r}, expected numbers") from error


def is_address(place: str) -> bool:
    """Tell whether a place is the address of a server, or several."""
    return place.startswith(_SCHEMES)


class RemoteTables:
    """Answers layers from a server over HTTP. *Thread-safe*; a forked child may go on using it.

    Attributes:
        client: of the server.
        options: of the layers.
    """

    def __init__(self, client: Client, options: Options | None = None) -> None:
        self.client = client
        self.options = options or Options()
        self._names: dict[tuple[str, str], tuple[str, ...]] = {}  # of tables, by model and version; "": perhaps the serving one

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
            Their vectors; None: the server is away, and the layer has a fallback.

        Raises:
            VersionMismatchError: the version is not in service.
            HPSError: as `Client.lookup`.
        """
        found = self._ask(self.client.lookup_tables, [{table: keys}], model_name, version)
        return None if found is None else found[0][0]

    def deployed(self, model_name: str, version: str, tables: Sequence[str]) -> tuple[str, dict[str, int]]:
        """Return a version that is in service, and the widths of some of its tables.

        Args:
            version: empty: the serving one.

        Raises:
            UnknownModelError, UnknownVersionError, UnknownTableError: it has none, or lacks one of the tables.
            HPSError: as `Client.lookup_tables`.
        """
        found, answered = self.client.lookup_tables(
            dict.fromkeys(tables, ()),
            model_name,
            version=version or None,
            return_version=True,
            timeout_s=self.options.timeout_s,
        )
        return answered, {name: vectors.shape[1] for name, vectors in found.items()}

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
        return self._ask(self.client.lookup_pooled, turns, model_name, version)

    def _ask(
        self, look_up: Callable[..., Any], turns: Sequence[Turn], model_name: str, version: str
    ) -> list[list[FloatArray]] | None:
        timeout_s = self.options.timeout_s or self.client.timeout_s
        due = time.monotonic() + timeout_s

        def left() -> float:
            if (left := due - time.monotonic()) <= 0:
                raise RemoteTimeoutError(f"looking up through a layer: no complete answer within {timeout_s:g} s (timeout_s)")
            return left

        try:
            while True:
                found = self._ask_once(look_up, turns, model_name, version, left)
                if found is not None:
                    return found
        except UnknownVersionError as error:
            if not version:
                raise
            raise VersionMismatchError(
                f"looking up model {model_name!r} through a layer of version {version}: {error}. Make the layer, or convert "
                f"the module, again for the version that serves, or deploy version {version} again; a layer made with "
                "version='latest' follows the serving version"
            ) from error
        except _AWAY as error:
            self._names.clear()  # the next server may be another one
            if self.options.fallback is None or self.closed:
                raise
            _log.warning("layers of model %s answer %g for every element: %s", model_name, self.options.fallback, error)
            return None

    def _ask_once(
        self, look_up: Callable[..., Any], turns: Sequence[Turn], model_name: str, version: str, left: Callable[[], float]
    ) -> list[list[FloatArray]] | None:
        """Ask for all turns in one version; None if the server took over another one meanwhile."""
        by_id = any(isinstance(table, int) for turn in turns for table in turn)
        names = self._names_of(model_name, version, left) if by_id else ()
        own, found = version, []
        for turn in turns:
            tables = {_name(table, names, model_name): given for table, given in turn.items()}
            if len(tables) < len(turn):
                raise InvalidInputError(
                    f"looking up model {model_name!r} through a layer: got tables {', '.join(map(repr, turn))}, expected each "
                    "by id or by name"
                )
            try:
                vectors, answered = look_up(tables, model_name, version=own or None, return_version=True, timeout_s=left())
            except UnknownVersionError:
                if own == version:
                    raise
                return None
            except UnknownTableError:
                self._names.pop((model_name, version), None)
                if not by_id or self._names_of(model_name, version, left) == names:
                    raise
                return None
            if by_id and (right := self._names_of(model_name, answered, left)) != names:
                self._names[model_name, ""] = right
                return None
            own = answered
            found.append([vectors[name] for name in tables])
        return found

    def _names_of(self, model_name: str, version: str, left: Callable[[], float]) -> tuple[str, ...]:
        """Return the tables of a version in the order of their ids."""
        found = self._names.get((model_name, version))
        if found is None:
            if len(self._names) >= _MOST_VERSIONS:
                self._names.clear()
            found = tuple(self.client.tables(model_name, version=version or None, timeout_s=left()))
            self._names[model_name, version] = found
        return found


def _name(table: int | str, names: Sequence[str], model_name: str) -> str:
    if isinstance(table, str):
        return table
    if not 0 <= table < len(names):
        raise UnknownTableError(
            f"looking up model {model_name!r} through a layer: got table {table}, expected 0 to {len(names) - 1}"
        )
    return names[table]
