"""The signature of a network: inputs, keys computed from them, lookups, and the sizes that it runs with.

    features (of the request) -> keys programs -> lookups -> network

Each of them is called by its name: a feature, an output of a keys program, or a lookup, whose vectors the network reads. Only
the two names of an input with a table are the same: that of its keys, and that of their vectors.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import numpy as np

from hps.configuration.networks import SAMPLES, DenseConfig, SourceConfig
from hps.ground.sizes import SizeCondition, SizeExpression
from hps.networks.base import NetworkTensor
from hps.tensors.bags import Bags
from hps.types import TableSpec

_NO_PLACE: Final = -1
_MOST_FULFILLED: Final = 10_000
_MOST_PADDING: Final = 2
_MOST_TRIED: Final = 64


@dataclass(frozen=True, slots=True)
class Feature:
    """An input of a request. *Immutable.*

    Attributes:
        table: index of the table of a lookup; -1 for others.
        hotness: keys of a sample; None: one for vectors of keys, any number where they are pooled.
        combiner: how vectors are pooled; empty: they are not.
        dtype: of a feature.
        shape: of a feature without its first size; a string is a named size, or an expression of sizes.
        per_request: whether a request may give it once.
        index: whether it is the request index.
        max_keys: most keys of a lookup of the table.
        first: first size of a feature: -1 for the samples, or as in `shape`.
        offsets_of: place of the input that its offsets are of; -1: it has none.
    """

    name: str
    table: int = _NO_PLACE
    hotness: int | None = None
    combiner: str = ""
    dtype: str = "float32"
    shape: tuple[int | str, ...] = ()
    per_request: bool = False
    index: bool = False
    max_keys: int = 0
    first: int | str = -1
    offsets_of: int = _NO_PLACE

    @property
    def is_lookup(self) -> bool:
        return self.table != _NO_PLACE

    @property
    def bags(self) -> bool:
        """Whether bags of any size are allowed."""
        return bool(self.combiner) and self.hotness is None

    @property
    def drops_first(self) -> bool:
        """Whether its offsets end with the number of keys: of later requests of a batch the first one is dropped."""
        return self.offsets_of != _NO_PLACE and isinstance(self.first, str)

    def shape_with(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        """Return its shape in a request of these sizes; of keys, one key a sample where any number is allowed."""
        if self.is_lookup:
            return sizes[SAMPLES], self.hotness or 1
        first = sizes[SAMPLES] if self.first == -1 else self.first
        return tuple(size if isinstance(size, int) else SizeExpression(size).value(sizes) for size in (first, *self.shape))

    def tensor(self) -> NetworkTensor:
        sizes = (self.first, *self.shape)
        return NetworkTensor(self.name, self.dtype, tuple(-1 if isinstance(size, str) else size for size in sizes))


@dataclass(frozen=True, slots=True)
class Output:
    """An output of a network. *Immutable.*

    Attributes:
        shape: of one sample; a string is an expression of named sizes.
    """

    name: str
    dtype: str
    shape: tuple[int | str, ...]

    def shape_with(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        """Return the shape of one sample of a request of these sizes."""
        return tuple(size if isinstance(size, int) else SizeExpression(size).value(sizes) for size in self.shape)


class Source(NamedTuple):
    """The values that a lookup needs. `name` is that of a feature, or of an output of a keys program."""

    name: str
    column: int | None = None


@dataclass(frozen=True, slots=True)
class NetworkLookup:
    """Vectors that a network reads. *Immutable.*

    Attributes:
        table: index of the table.
        dim: width of its vectors.
        combiner: how vectors are pooled; empty: they are not.
        max_norm, padding_key, include_last_offset: see `Bags`.
        keys, offsets, weights: their sources. A feature with a table has its own offsets and weights.
        feature: place of the feature with a table whose keys they are; -1 for others.
        max_keys: most keys of a lookup of the table.
    """

    name: str
    table: int
    dim: int
    keys: Source
    offsets: Source | None = None
    weights: Source | None = None
    combiner: str = ""
    max_norm: float | None = None
    padding_key: int | None = None
    include_last_offset: bool = True
    feature: int = -1
    max_keys: int = 0

    @property
    def clips(self) -> bool:
        """Whether vectors are clipped without pooling; each is then a bag of its own."""
        return not self.combiner and self.max_norm is not None

    def pools(self, keys: int) -> bool:
        """Return whether bags of so many keys are pooled: without weights, one vector is its own sum and mean."""
        pooled = bool(self.combiner) and (keys != 1 or self.padding_key is not None or self.weights is not None)
        return pooled or self.max_norm is not None

    def bags_of(self, keys: Any, offsets: Any = None, weights: Any = None) -> Bags:
        return Bags(
            keys,
            offsets,
            weights,
            combiner=self.combiner or "sum",  # type: ignore[arg-type]
            max_norm=self.max_norm,
            padding_key=self.padding_key,
            include_last_offset=self.include_last_offset,
        )


@dataclass(frozen=True, slots=True)
class KeysProgram:
    """A program that computes what lookups need. *Immutable.*

    Attributes:
        per_request: whether each of its inputs may be given once per request.
    """

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    per_request: bool


@dataclass(frozen=True, slots=True, eq=False)
class Signature:
    """The inputs, lookups and sizes of a network. *Immutable*, but for a cache of accepted sizes. *Thread-safe.*

    Attributes:
        features: inputs, in the order of the configuration.
        lookups: those of features with a table first.
        network_inputs: names of features and lookups that the network reads, in its order.
        guards: conditions that the sizes of requests and batches must fulfil.
        request_guards: those that a request must fulfil before it is padded.
        sizes: a value of each named size with which the network runs.
        merges: whether requests can be put together.
        pads: whether the last sample may be repeated until the number of samples is one with which the network runs.
        inner: named sizes that requests must share to be put together.
        named: of each size that is alone in a shape, place of the feature, axis, and name.
        derived: of each size that is an expression of others, place, axis and expression.
        shifted: places of features that are offsets of others.
        counted: of lookups whose number of keys follows from a request, place and column of the feature.
        limits: by place in `counted`, most keys of a lookup.
    """

    features: tuple[Feature, ...]
    lookups: tuple[NetworkLookup, ...]
    programs: tuple[KeysProgram, ...] = ()
    network_inputs: tuple[str, ...] = ()
    guards: tuple[SizeCondition, ...] = ()
    sizes: Mapping[str, int] = field(default_factory=dict)
    merges: bool = True
    pads: bool = False
    inner: tuple[str, ...] = ()
    named: tuple[tuple[int, int, str], ...] = ()
    derived: tuple[tuple[int, int, SizeExpression], ...] = ()
    shifted: tuple[int, ...] = ()
    counted: tuple[tuple[int, int | None], ...] = ()
    limits: tuple[int, ...] = ()
    request_guards: tuple[SizeCondition, ...] = ()
    _fulfilled: set[tuple[int, ...]] = field(default_factory=set)

    @property
    def is_sized(self) -> bool:
        """Whether sizes other than the number of samples are free, or any is refused."""
        return bool(self.named or self.derived or self.shifted or self.guards)

    def tensors(self) -> list[NetworkTensor]:
        lookups = {lookup.name: lookup for lookup in self.lookups}
        features = {feature.name: feature for feature in self.features}
        found = []
        for name in self.network_inputs:
            if (lookup := lookups.get(name)) is None:
                found.append(features[name].tensor())
            elif lookup.feature >= 0:
                feature = self.features[lookup.feature]
                rows = () if lookup.combiner or feature.hotness is None else (feature.hotness,)
                found.append(NetworkTensor(name, "float32", (-1, *rows, lookup.dim)))
            else:
                found.append(NetworkTensor(name, "float32", self._vectors_shape(lookup)))
        return found

    def _vectors_shape(self, lookup: NetworkLookup) -> tuple[int, ...] | None:
        """Return the shape of vectors; None if it depends on the keys program."""
        feature = next((feature for feature in self.features if feature.name == lookup.keys.name), None)
        if lookup.combiner or lookup.keys.column is not None:
            return -1, lookup.dim
        return None if feature is None else (*(feature.tensor().shape or ()), lookup.dim)

    def inputs_of(self, program: KeysProgram) -> list[NetworkTensor]:
        features = {feature.name: feature for feature in self.features}
        return [features[name].tensor() for name in program.inputs]

    def refused_by(self, samples: int, sizes: Mapping[str, int]) -> SizeCondition | None:
        """Return the first guard that does not hold; None if all hold."""
        if not self.guards:
            return None
        combination = samples, *[sizes[name] for name in self.sizes]
        if combination in self._fulfilled:
            return None
        known = {**sizes, SAMPLES: samples}
        if (found := next((guard for guard in self.guards if not guard.is_met(known)), None)) is None:
            if len(self._fulfilled) >= _MOST_FULFILLED:
                self._fulfilled.clear()
            self._fulfilled.add(combination)
        return found

    def padding(self, samples: int, sizes: Mapping[str, int]) -> int | None:
        """Return how often to repeat the last sample of a batch; None if the guards refuse it with any padding."""
        for more in range(1 + _MOST_PADDING if self.pads else 1):
            if self.refused_by(samples + more, sizes) is None:
                return more
        return None

    def admits(self, samples: int, sizes: Mapping[str, int]) -> bool:
        """Return True if a request of these sizes is answered, with padding if necessary."""
        known = {**sizes, SAMPLES: samples}
        return all(guard.is_met(known) for guard in self.request_guards) and self.padding(samples, sizes) is not None

    def trial_samples(self) -> tuple[int, ...]:
        """Return the numbers of samples of trials: 1 and 3, or the next ones that the network runs with."""
        first = self._runs_from(1)
        if first is None:
            return ()
        second = self._runs_from(max(3, first + 1))
        return (first,) if second is None else (first, second)

    def _runs_from(self, least: int) -> int | None:
        numbers = range(least, least + _MOST_TRIED)
        return next((samples for samples in numbers if self.refused_by(samples, self.sizes) is None), None)

    def other_sizes(self, samples: int, names: Collection[str]) -> dict[str, int] | None:
        """Return sizes with which the network runs, of which those of `names` differ from `sizes`; None if it finds none."""
        for more in range(1, _MOST_TRIED):
            for step in (more, -more):
                found = {name: size + step if name in names else size for name, size in self.sizes.items()}
                if min(found.values()) > 0 and self.refused_by(samples, found) is None:
                    return found
        return None

    def zeros(self, samples: int, sizes: Mapping[str, int] | None = None) -> dict[str, np.ndarray]:
        """Return features of so many samples: zeros, and offsets of bags of about one size.

        Args:
            sizes: default: `sizes` of the network.
        """
        known = {**(self.sizes if sizes is None else sizes), SAMPLES: samples}
        found = {
            feature.name: np.empty(feature.shape_with(known), "int64" if feature.is_lookup else feature.dtype)
            for feature in self.features
        }
        for values in found.values():
            values.fill(0)  # np.zeros takes no memory until it is read
        for feature in self.features:
            if feature.offsets_of >= 0 and found[feature.name].ndim == 1:
                bags = len(found[feature.name]) - feature.drops_first
                count = len(found[self.features[feature.offsets_of].name])
                found[feature.name][:] = np.arange(bags + feature.drops_first) * count // max(bags, 1)
        return found


def signature_of(dense: DenseConfig, tables: Sequence[TableSpec]) -> Signature:
    """Return the signature of a network, whose configuration was checked against the tables."""
    places = {table.table_name: place for place, table in enumerate(tables)}
    names = {name: place for place, name in enumerate(dense.inputs)}
    features: list[Feature] = []
    lookups: list[NetworkLookup] = []
    for name, input_ in dense.inputs.items():
        if input_.table is not None:
            place = places[input_.table]
            table = tables[place]
            combiner = "" if input_.pooling == "none" else input_.pooling
            lookups.append(
                NetworkLookup(
                    name,
                    place,
                    table.dim,
                    Source(name),
                    combiner=combiner,
                    max_norm=input_.max_norm,
                    padding_key=input_.padding_key,
                    feature=len(features),
                    max_keys=table.max_keys,
                )
            )
            features.append(
                Feature(name, place, input_.hotness, combiner, per_request=input_.per_request, max_keys=table.max_keys)
            )
        elif input_.request_index:
            features.append(Feature(name, dtype="int64", index=True))
        else:
            first, *shape = input_.shape
            offsets_of = -1 if input_.offsets_of is None else names[input_.offsets_of]
            first = -1 if first == SAMPLES else first
            features.append(
                Feature(
                    name,
                    dtype=input_.dtype,
                    shape=tuple(shape),
                    per_request=input_.per_request,
                    first=first,
                    offsets_of=offsets_of,
                )
            )
    for name, lookup in dense.lookups.items():
        place = places[lookup.table]
        keys, offsets, weights = (_source(source) for source in (lookup.keys, lookup.offsets, lookup.weights))
        lookups.append(
            NetworkLookup(
                name,
                place,
                tables[place].dim,
                keys or Source(name),
                offsets,
                weights,
                "" if lookup.pooling == "none" else lookup.pooling,
                lookup.max_norm,
                lookup.padding_key,
                lookup.include_last_offset,
                max_keys=tables[place].max_keys,
            )
        )
    counted = [(lookup, names[lookup.keys.name]) for lookup in lookups if lookup.keys.name in dense.inputs]
    strings = [
        (place, axis, SizeExpression(width))
        for place, feature in enumerate(features)
        for axis, width in enumerate((feature.first, *feature.shape))
        if isinstance(width, str)
    ]
    named = tuple((place, axis, size.text) for place, axis, size in strings if size.text in dense.sizes)
    programs = tuple(
        KeysProgram(key.inputs, key.outputs, all(dense.inputs[name].per_request for name in key.inputs)) for key in dense.keys
    )
    request_guards = tuple(map(SizeCondition, dense.request_guards))
    guards = (*map(SizeCondition, dense.guards), *request_guards)
    merges, inner = _merging(features, dense.sizes, guards)
    delimited = {features[feature.offsets_of].first for feature in features if feature.offsets_of >= 0}
    can_pad = all(feature.first == -1 or feature.offsets_of >= 0 or feature.first in delimited for feature in features)
    return Signature(
        tuple(features),
        tuple(lookups),
        programs,
        dense.network_inputs or (*dense.inputs, *dense.lookups),
        guards,
        dense.sizes,
        merges,
        dense.dynamic_batching and merges and can_pad,
        inner,
        named,
        tuple(string for string in strings if string[2].text not in dense.sizes),
        tuple(place for place, feature in enumerate(features) if feature.offsets_of >= 0),
        tuple((place, lookup.keys.column) for lookup, place in counted),
        tuple(lookup.max_keys for lookup, _ in counted),
        request_guards,
    )


def _source(config: SourceConfig | None) -> Source | None:
    return None if config is None else Source(config.input or config.output or "", config.column)


def _merging(
    features: Sequence[Feature], sizes: Mapping[str, int], guards: Sequence[SizeCondition]
) -> tuple[bool, tuple[str, ...]]:
    """Return whether requests can be put together, and the sizes that they must share.

    First sizes must be the samples, or have a name of their own; offsets may be one more than the samples. Values of which
    there are several a sample may be grouped by something else, as the lengths of a KeyedJaggedTensor are by feature.
    """
    summed = {SAMPLES, *(str(feature.first) for feature in features if feature.first in sizes)}
    widths = [width for feature in features for width in feature.shape if isinstance(width, str)]
    if summed & {name for width in widths for name in SizeExpression(width).names}:
        return False, ()
    summed_names = summed - {SAMPLES}
    if any(
        "==" in guard.text and summed_names.intersection(guard.names) for guard in guards
    ):  # such as m == 3*samples, or m % 3 == 0
        return False, ()
    for feature in features:
        ends = feature.drops_first and SizeExpression(str(feature.first)).value({**sizes, SAMPLES: 2}) == 3
        if not (feature.index or feature.first == -1 or feature.first in sizes or ends):
            return False, ()
    return True, tuple(name for name in sizes if name not in summed)
