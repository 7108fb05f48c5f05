"""Checks of requests: strict JSON values, the tables of the model, the limits on keys."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt
import orjson

from hps.errors import InvalidDtypeError, InvalidInputError, TooManyKeysError, UnknownTableError
from hps.scoring.signature import Feature, Output, Signature
from hps.tensors.transforms import Transform
from hps.types import FloatArray, KeyArray, TableSpec

BAG_OPTIONS = ("combiner", "max_norm", "padding_key")
"""Options of the bags of all tables, or of one."""

_MOST_ID_DIGITS = 10
_KINDS = {bool: "a boolean", float: "a float", str: "a string", list: "a list", dict: "an object", type(None): "null"}


def parse_object(text: bytes | bytearray) -> dict[str, Any]:
    """Parse JSON whose value must be an object.

    Raises:
        InvalidInputError: it is not JSON, or not an object, or names a member twice.
    """
    try:
        value = orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise InvalidInputError(f"reading the request: it is not JSON: {error}") from error
    if type(value) is not dict:
        raise InvalidInputError(f"reading the request: got {kind_of(value)}, expected a JSON object")
    members = len(value)
    for member in value.values():
        if type(member) is dict:
            members += len(member)
    # The parser keeps the last of two members with one name. Counting colons finds repeated names at little cost: if there are
    # more than members, a name is repeated or a string has a colon, and the slow parser of the standard library decides.
    colons = text.count(b":")
    if colons != members and colons != _count_members(value):
        try:
            json.loads(text, object_pairs_hook=_members_named_once)
        except RecursionError as error:
            raise InvalidInputError("reading the request: it is nested too deeply") from error
    return value


def _count_members(value: Any) -> int:
    """Count the members of an object and its nested objects, as deep as requests go."""
    members, pending = 0, [value]
    while pending:
        if type(value := pending.pop()) is dict:
            members += len(value)
            pending += value.values()
        elif type(value) is list and value and type(value[0]) is dict and {dict}.issuperset(map(type, value)):
            pending += value
    return members


def _members_named_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members = dict(pairs)
    if len(members) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in members if names.count(name) > 1)
        raise InvalidInputError(f"reading the request: {twice[:120]!r} is given twice, expected each name once")
    return members


def int64_array(values: Any, what: str) -> KeyArray:
    """Convert a JSON list to int64. Floats, booleans and strings are errors: nothing is rounded, truncated or parsed.

    Args:
        what: name of the list in errors.

    Raises:
        InvalidDtypeError: it is not a list, or an element is not a 64-bit integer.
    """
    if type(values) is not list:
        raise InvalidDtypeError(f"{what}: got {kind_of(values)}, expected a list of integers")
    # numpy would accept true, 1.5 and "1" as integers
    if not {int}.issuperset(map(type, values)):
        position, value = next((i, value) for i, value in enumerate(values) if type(value) is not int)
        raise InvalidDtypeError(f"{what}: got {kind_of(value)} at position {position}, expected 64-bit integers")
    try:
        return np.array(values, dtype=np.int64)
    except OverflowError as error:
        position, value = next((i, value) for i, value in enumerate(values) if not -(2**63) <= value < 2**63)
        raise InvalidDtypeError(f"{what}: got {value} at position {position}, expected signed 64-bit integers") from error


def float32_array(values: Any, what: str, width: int = 0) -> FloatArray:
    """Convert a JSON list of numbers to float32, rounded to nearest; as `int64_array`. width: of rows, for errors.

    Raises:
        InvalidDtypeError: it is not a list, or an element is not a number.
        InvalidInputError: a number does not fit float32.
    """
    with np.errstate(over="ignore"):
        floats = float64_array(values, what, width).astype(np.float32)
    if not np.isfinite(floats).all():
        position = int(np.argmin(np.isfinite(floats)))
        raise InvalidInputError(f"{what}: got {values[position]!r}: the number {_place(position, width)} does not fit float32")
    return floats


def float64_array(values: Any, what: str, width: int = 0) -> npt.NDArray[np.float64]:
    """Convert a JSON list of numbers to float64; as `float32_array`.

    Raises:
        InvalidDtypeError: it is not a list, or an element is not a number.
    """
    if type(values) is not list:
        raise InvalidDtypeError(f"{what}: got {kind_of(values)}, expected a list of numbers")
    if not {float, int}.issuperset(map(type, values)):
        position, value = next((i, value) for i, value in enumerate(values) if type(value) not in (float, int))
        raise InvalidDtypeError(f"{what}: got {kind_of(value)} {_place(position, width)}, expected numbers")
    return np.array(values, np.float64)


def _place(position: int, width: int) -> str:
    return f"in row {position // width}" if width else f"at position {position}"


def flattened(lists: Any, what: str, each: str) -> tuple[list[Any], KeyArray]:
    """Flatten a JSON list of lists. Returns the elements, and the offsets of the lists, including the end.

    Raises:
        InvalidDtypeError: it is not a list of lists. each: description of the lists.
    """
    if type(lists) is not list or not {list}.issuperset(map(type, lists)):
        got = "a list of other things" if type(lists) is list else kind_of(lists)
        raise InvalidDtypeError(f"{what}: got {got}, expected a list of lists, {each}")
    offsets = np.zeros(len(lists) + 1, np.int64)
    np.cumsum(np.fromiter(map(len, lists), np.int64, len(lists)), out=offsets[1:])
    return list(chain.from_iterable(lists)), offsets


def check_bag_option(option: str, value: Any, what: str) -> None:
    """Check the type of a value of `BAG_OPTIONS`, or None; `hps.tensors.bags` checks the rest.

    Raises:
        InvalidInputError: it has another type.
    """
    types, expected = {
        "combiner": ((str,), "a string"),
        "max_norm": ((int, float), "a number"),
        "padding_key": ((int,), "a 64-bit integer"),
    }[option]
    if value is None or (type(value) in types and not (option == "padding_key" and not -(2**63) <= value < 2**63)):
        return
    raise InvalidInputError(f"{what} is {kind_of(value)}, expected {expected}")


def read_flag(members: Mapping[str, Any], name: str, what: str, *, default: bool = False) -> bool:
    """Read a boolean member. Raises InvalidInputError if it is something else."""
    value = members.get(name, default)
    if type(value) is not bool:
        raise InvalidInputError(f"{what}: {name!r} is {kind_of(value)}, expected true or false")
    return value


def read_id(request: Mapping[str, Any]) -> str | None:
    """Read the id of a request, if it has one. Raises InvalidInputError if it is not a string."""
    request_id = request.get("id")
    if request_id is not None and type(request_id) is not str:
        raise InvalidInputError(f"reading the request: 'id' is {kind_of(request_id)}, expected a string")
    return request_id


def check_total(total: int, max_keys: int, what: str = "keys") -> None:
    """Raise TooManyKeysError if all tables together have more keys (or bags) than the service allows."""
    if total > max_keys:
        raise TooManyKeysError(
            f"reading the request: got {total} {what}, expected at most {max_keys} (service.max_keys_per_request); "
            "send fewer at once"
        )


def kind_of(value: Any) -> str:
    """Describe a JSON value in an error: its kind and, for a number, the value."""
    kind = _KINDS.get(type(value), "an integer")
    return f"{kind} ({value!r})" if isinstance(value, int | float) and not isinstance(value, bool) else kind


def read_device(value: Any, what: str) -> int | None:
    """Read the id of a device, an integer or decimal digits; None if the request has none.

    Raises:
        InvalidInputError: it is something else.
    """
    if value is None or type(value) is int:
        return value
    if type(value) is str and value.isascii() and value.isdigit() and len(value) <= _MOST_ID_DIGITS:
        return int(value)
    raise InvalidInputError(f"{what} is {kind_of(value)}, expected the id of a device")


@dataclass(frozen=True, slots=True, eq=False)
class PublishedNetwork:
    """A network as published to frontends. *Immutable*; equal only to itself.

    Attributes:
        model: its name.
        max_samples: limit of a request.
        tables: names of the tables.
        features_by_name: features that requests have.
        lookup_inputs: names of the inputs of lookups.
    """

    model: str
    signature: Signature
    outputs: tuple[Output, ...]
    max_samples: int
    tables: tuple[str, ...] = ()
    features_by_name: Mapping[str, Feature] = field(init=False)
    lookup_inputs: frozenset[str] = field(init=False)

    def __post_init__(self) -> None:
        given = {feature.name: feature for feature in self.signature.features if not feature.index}
        object.__setattr__(self, "features_by_name", given)
        of_tables = {name + end for name in self.tables for end in ("", ".offsets", ".weights")}
        object.__setattr__(self, "lookup_inputs", of_tables | {"KEYS", "NUMKEYS", "OFFSETS", "WEIGHTS"})


class ModelTables:
    """The tables of one version of a model, by name and by index. *Immutable*; equal only to itself.

    Args:
        tables: at least one, in the order of their ids.
        keys_per_sample: maximum keys of a sample over all tables.
        network: its network, if it has one.
        transform: what it does to inputs of requests, if anything.

    Attributes:
        indices: index by name.
    """

    def __init__(
        self,
        name: str,
        tables: tuple[TableSpec, ...],
        version: str = "1",
        keys_per_sample: int = 1,
        network: PublishedNetwork | None = None,
        transform: Transform | None = None,
    ) -> None:
        self.name = name
        self.tables = tables
        self.version = version
        self.keys_per_sample = keys_per_sample
        self.network = network
        self.transform = transform
        self.indices = {table.table_name: index for index, table in enumerate(tables)}

    def table_index(self, name: str, what: str) -> int:
        """Return the index of a table.

        Raises:
            UnknownTableError: the model has no such table.
        """
        try:
            return self.indices[name]
        except KeyError:
            known = ", ".join(self.indices)
            raise UnknownTableError(
                f"{what}: got table {name[:120]!r}, expected a table of model {self.name!r}: {known}"
            ) from None


def check_numkeys(counts: Sequence[int], keys: int, model: ModelTables, source: str = "NUMKEYS", what: str = "its sum") -> None:
    """Check the number of keys per table, for concatenated keys.

    Args:
        source, what: the input with the numbers, and the name of their sum.

    Raises:
        InvalidInputError: not one number per table, or they do not add up to the keys.
    """
    if len(counts) != len(model.tables):
        known = ", ".join(table.table_name for table in model.tables)
        raise InvalidInputError(
            f"reading input {source!r}: got {len(counts)} numbers, expected {len(model.tables)}, one for each table of model "
            f"{model.name!r}: {known}"
        )
    if min(counts) < 0:
        raise InvalidInputError(f"reading input {source!r}: got {min(counts)}, expected numbers of at least 0")
    if sum(counts) != keys:
        raise InvalidInputError(f"reading input {source!r}: {what} is {sum(counts)}, expected {keys}, the number of KEYS")


def check_counts(counts: Iterable[tuple[TableSpec, int]], max_keys: int, what: str = "keys") -> int:
    """Check the limits of the service and the tables on keys (or bags), before memory is allocated for their vectors.

    Args:
        counts: tables, and their numbers of keys (or bags).
        max_keys: limit on all tables together.
        what: what is counted.

    Returns:
        Number of floats in the vectors of all keys (or bags).

    Raises:
        TooManyKeysError: names the exceeded limit.
    """
    total = floats = 0
    for table, count in counts:
        if count > table.max_keys:
            raise TooManyKeysError(
                f"looking up table {table.table_name!r} of model {table.model_name!r}: got {count} {what}, expected at most "
                f"{table.max_keys} (max_batch_size x maxnum_catfeature_query_per_table_per_sample); send fewer at once"
            )
        total += count
        floats += count * table.dim
    check_total(total, max_keys, what)
    return floats
