"""Requests for scores as JSON rows, for curl: an object with the inputs that all samples share, and a list of the others.

    {"user": {"history": [1, 2, 3], "age": 31}, "items": [{"id": 7}, {"id": 9}]}

Inputs of one parameter of a module have names such as `batch.id`, and may be nested: `{"batch": {"id": 7}}`. An input of bags,
whose offsets are another input, is a list of any length for each sample, without the offsets. If the request has the offsets,
the bags are in `user` as the network takes them; so is any other input whose first dimension is not the samples.
"""

from collections.abc import Iterator, Mapping
from functools import lru_cache
from itertools import chain
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import orjson

from hps.configuration.networks import SAMPLES
from hps.errors import InvalidInputError, TooManyKeysError
from hps.ground.sizes import SizeExpression
from hps.scoring.features import OFFSETS, meant, read_request
from hps.scoring.signature import Feature, Signature
from hps.serve.protocol.request_checks import (
    PublishedNetwork,
    check_total,
    flattened,
    int64_array,
    kind_of,
    parse_object,
    read_device,
)
from hps.serve.protocol.score_requests import MOST_TIMEOUT_US, ScoreBody, ScoreHeader, count_keys, json_values

_EXAMPLE: Final = '{"user": {"<input>": 1}, "items": [{"<input>": 7}, {"<input>": 9}]}'
_LONGEST_EXAMPLE: Final = 2000


def decode_rows(body: bytes | bytearray, network: PublishedNetwork, max_keys: int) -> ScoreBody:
    """Decode JSON rows.

    Raises:
        InvalidInputError, InvalidDtypeError: they are invalid; the message says where, and what was expected.
        TooManyKeysError: there are too many samples or keys.
    """
    request = parse_object(body)
    if unknown := request.keys() - {"user", "items", "timeout_us", "device"}:
        got = f"got the member {min(unknown)[:120]!r}"
        raise InvalidInputError(f"reading the request: {got}, expected {_EXAMPLE} and, optionally, timeout_us, device")
    user, items = request.get("user", {}), request.get("items", [{}] if "user" in request else None)
    if type(user) is not dict or type(items) is not list or not {dict}.issuperset(map(type, items)):
        raise InvalidInputError(f"reading the request: got something else, expected {_EXAMPLE}")
    if len(items) > network.max_samples:
        raise TooManyKeysError(
            f"reading the request: got {len(items)} items, expected at most {network.max_samples} (max_batch_size)"
        )
    timeout: Any = request.get("timeout_us", 0)
    if type(timeout) is not int or not 0 <= timeout <= MOST_TIMEOUT_US:
        raise InvalidInputError(
            f"reading the request: 'timeout_us' is {kind_of(timeout)}, expected an integer, at most an hour"
        )
    device = read_device(request.get("device"), "reading the request: 'device'")
    user = _named(user, network, "'user'")
    items = [_named(item, network, f"items[{place}]") for place, item in enumerate(items)]
    arrays = _Rows(network.signature, user, items).arrays()
    samples = len(items)
    sizes: Mapping[str, int] = {}
    if network.signature.is_sized:  # the engine checks the shapes of other networks
        read = read_request(network.signature, arrays, network.max_samples, network.model)
        samples, sizes = read.samples, read.sizes
    keys = count_keys({name: array.shape for name, array in arrays.items()}, network)
    outputs = tuple((output, False) for output in network.outputs)
    header = ScoreHeader(None, {}, 0, samples, sizes, keys, outputs, timeout, device)
    check_total(header.keys, max_keys)
    return ScoreBody(header, arrays, rows=True)


def _named(given: Mapping[str, Any], network: PublishedNetwork, where: str) -> Mapping[str, Any]:
    """Return the inputs by name: `{"x": {"id": 7}}` and `{"x": [7]}` are `x.id` and `x.0`."""
    names = network.features_by_name
    if given.keys() <= names.keys():
        return given
    found: dict[str, Any] = {}
    for key, value in given.items():
        for name, leaf in _leaves(key, value, names, _prefixes(network)):
            if name not in names:
                expected = f"expected some of {', '.join(sorted(names))}{meant(name, names)}"
                raise InvalidInputError(f"reading {where}: got {name[:120]!r}, {expected}")
            if name in found:
                raise InvalidInputError(f"reading {where}: {name[:120]!r} is given twice, expected it once")
            found[name] = leaf
    return found


def _leaves(name: str, value: Any, names: Mapping[str, Feature], prefixes: frozenset[str]) -> Iterator[tuple[str, Any]]:
    if name in names or name not in prefixes or type(value) not in (dict, list):
        yield name, value
        return
    for key, member in value.items() if type(value) is dict else enumerate(value):
        yield from _leaves(f"{name}.{key}", member, names, prefixes)


@lru_cache(16)
def _prefixes(network: PublishedNetwork) -> frozenset[str]:
    """Return the names of nested values: of the input `x.y.0`, `x` and `x.y`."""
    parts = [name.split(".") for name in network.features_by_name]
    return frozenset(".".join(part[:end]) for part in parts for end in range(1, len(part)))


class _Rows:
    """The inputs of one request. *One request.*

    Args:
        user, items: inputs by name, of all samples and of each.
    """

    def __init__(self, signature: Signature, user: Mapping[str, Any], items: list[Mapping[str, Any]]) -> None:
        self._features = signature.features
        self._user = user
        self._items = items
        self._bags: set[int | str] = set()
        self._ends: dict[int | str, npt.NDArray[np.int64]] = {}
        if not signature.shifted:
            return
        offsets = [feature for feature in self._features if feature.offsets_of >= 0]
        given = [offset for offset in offsets if offset.name in user or bag_ends(offset, len(items)) is None]
        unsplit = {self._features[offset.offsets_of].first for offset in given}
        self._bags = {self._features[offset.offsets_of].first for offset in offsets} - unsplit

    def arrays(self) -> dict[str, npt.NDArray[Any]]:
        """Make the arrays of all inputs."""
        found: dict[str, npt.NDArray[Any]] = {}
        offsets: list[Feature] = []  # known once their bags are read
        for feature in self._features:
            if feature.index:
                continue
            if feature.first == -1 and feature.offsets_of < 0:
                _add_rows(found, feature, self._rows(feature))
            elif feature.offsets_of >= 0 and self._features[feature.offsets_of].first in self._bags:
                offsets.append(feature)
            elif feature.first in self._bags:
                found[feature.name] = self._bagged(feature)
            else:
                found[feature.name] = self._unsplit(feature)
        for offset in offsets:
            ends = self._ends[self._features[offset.offsets_of].first]
            self._refuse_in_items(offset, "none: its bags are lists, whose lengths give them")
            kept = ends[: bag_ends(offset, len(self._items))]
            found[offset.name] = kept.astype(offset.dtype)
        return found

    def _rows(self, feature: Feature) -> list[Any]:
        """Return the value of each sample, or the only value of an input per request."""
        if feature.name in self._user:
            self._refuse_in_items(feature, "it once", ", which 'user' has, too")
            return [self._user[feature.name]] * (1 if feature.per_request else len(self._items))
        values = [item[feature.name] for item in self._items if feature.name in item]
        if len(values) != len(self._items):
            first = next(place for place, item in enumerate(self._items) if feature.name not in item)
            raise InvalidInputError(f"reading items[{first}]: {feature.name!r} is missing, and 'user' has none")
        return values

    def _bagged(self, feature: Feature) -> npt.NDArray[Any]:
        """Concatenate the bags of all samples. Inputs that share a size must have bags of the same lengths."""
        values, ends = flattened(_lists(self._rows(feature)), f"reading {feature.name!r}", "one for each sample")
        known = self._ends.setdefault(feature.first, ends)
        if not np.array_equal(known, ends):
            first = next(known.name for known in self._features if known.first == feature.first)
            raise InvalidInputError(f"reading {feature.name!r}: got lists of other lengths than those of {first!r}")
        return _array(feature, values)

    def _unsplit(self, feature: Feature) -> npt.NDArray[Any]:
        """Return an input whose first dimension is not the samples."""
        self._refuse_in_items(feature, "all of it in 'user'")
        if feature.name not in self._user:
            raise InvalidInputError(f"reading 'user': {feature.name!r} is missing")
        if type(value := self._user[feature.name]) is not list:
            raise InvalidInputError(f"reading {feature.name!r}: got {kind_of(value)}, expected a list")
        return _array(feature, value)

    def _refuse_in_items(self, feature: Feature, expected: str, why: str = "") -> None:
        if any(feature.name in item for item in self._items):
            raise InvalidInputError(f"reading items: got {feature.name!r}{why}; expected {expected}")


def bag_ends(feature: Feature, samples: int) -> int | None:
    """Return the number of offsets with one bag per sample; None if only the client knows the number of bags."""
    if feature.first in (-1, SAMPLES):
        return samples
    first = SizeExpression(str(feature.first))
    return samples + 1 if first.names == (SAMPLES,) and first.value({SAMPLES: samples}) == samples + 1 else None


def _add_rows(arrays: dict[str, npt.NDArray[Any]], feature: Feature, values: list[Any]) -> None:
    if feature.bags:
        what = f"reading {feature.name!r}"
        flat, offsets = flattened(_lists(values), what, "a list of keys for each sample")
        arrays[feature.name], arrays[feature.name + OFFSETS] = int64_array(flat, what), offsets
        return
    arrays[feature.name] = _array(feature, values)


def _array(feature: Feature, values: list[Any]) -> npt.NDArray[Any]:
    """Make an array of a list of rows."""
    what = f"reading {feature.name!r}"
    rows, each = len(values), "for each sample" if feature.first == -1 else "in a list"
    shape: tuple[int | str, ...] = feature.shape
    dtype = np.dtype(np.int64 if feature.is_lookup else feature.dtype)
    if feature.is_lookup:
        shape = () if feature.hotness is None else (feature.hotness,)
    if shape == (1,):
        values = _lists(values)
    widths: list[int] = []
    for size in shape:
        lengths = {len(value) if type(value) is list else -1 for value in values}
        width = size if isinstance(size, int) else max(lengths, default=0)
        if width < 0 or not lengths <= {width}:
            expected = f"expected lists of shape [{', '.join(map(str, shape))}] {each}"
            if isinstance(size, str) and -1 not in lengths:
                expected = f"got lists of {min(lengths)} and {max(lengths)} values, {expected}, with one {size} for all"
            raise InvalidInputError(f"{what}: {expected}")
        widths.append(width)
        values = [*chain.from_iterable(values)]
    return json_values(values, dtype, what).reshape(rows, *widths)


def _lists(values: list[Any]) -> list[Any]:
    return [value if type(value) is list else [value] for value in values]


def rows_text(model: str, version: str, data: Mapping[str, Any]) -> dict[str, Any]:
    """Make the answer to JSON rows."""
    return {"model": model, "version": version, "outputs": dict(data)}


def example_of(signature: Signature) -> str:
    """Return a request that the network answers, of zeros; empty if it would be too long to print."""
    if not (tried := signature.trial_samples()):
        return ""
    samples = tried[0]
    user: dict[str, Any] = {}
    items: list[dict[str, Any]] = [{} for _ in range(samples)]
    features = signature.features
    offsets = [feature for feature in features if feature.offsets_of >= 0]
    unsplit = {features[offset.offsets_of].first for offset in offsets if bag_ends(offset, samples) is None}
    bags = {features[offset.offsets_of].first for offset in offsets} - unsplit
    values = signature.zeros(samples)
    for feature in features:
        name, zeros = feature.name, values[feature.name]
        target = features[feature.offsets_of] if feature.offsets_of >= 0 else None
        if feature.index or (target is not None and target.first in bags):
            continue
        if zeros.size > _LONGEST_EXAMPLE:
            return ""
        if feature.first in bags:
            parts = np.array_split(zeros, samples)
        elif feature.first == -1 and target is None and not feature.per_request:
            parts = [*zeros]
        else:
            user[name] = _value(feature, zeros[0] if feature.per_request else zeros)
            continue
        for item, part in zip(items, parts, strict=True):
            item[name] = _value(feature, part)
    text = orjson.dumps({**({"user": user} if user else {}), "items": items}).decode()
    return text if len(text) <= _LONGEST_EXAMPLE else ""


def _value(feature: Feature, values: npt.NDArray[Any]) -> Any:
    is_list = not feature.is_lookup or feature.hotness is not None or feature.bags
    return values.tolist() if is_list else values.reshape(-1)[0].item()
