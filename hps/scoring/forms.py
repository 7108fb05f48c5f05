"""The forms of batches that have kept memory, and the layout of their inputs in it: for the scorer, and for plans."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

import numpy as np

from hps.configuration.networks import SAMPLES
from hps.scoring.signature import Feature, NetworkLookup, Signature, Source

_ALIGNED = 64
_LEAST = 16
_STEP = 4  # between the sizes that memory is kept for


class BatchForm(NamedTuple):
    """The form of batches that share memory. *Immutable.*

    Attributes:
        samples, requests: most of them; no requests if they give nothing once.
        once: by place of the feature, whether each request gives one row.
        sizes: of `Signature.inner`.
    """

    samples: int
    requests: int
    once: tuple[bool, ...]
    sizes: tuple[int, ...] = ()

    @property
    def rows(self) -> list[int]:
        return [self.requests if once else self.samples for once in self.once]


class KeptBuffer(NamedTuple):
    """Memory of keys or weights that a lookup reads, and that are copied or computed in each batch.

    Attributes:
        lookup: place of the lookup.
        shape: of all rows.
    """

    lookup: int
    source: Source
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class BatchLayout:
    """The layout of the inputs of one form of batches in one piece of memory, and the buffers besides. *Immutable.*

    It begins with the index, (indices,) int64: the request of each sample.

    Attributes:
        indices: samples if anything is given once, else 0.
        starts: by feature, offset of its values. Features that are only keys follow all others, from `keys_at` on, packed as
            they are filled.
        keys_only: names of these.
        limits: by feature, bytes of its room.
        shapes: by feature, a row a request if it is given once.
        once: names of features, outputs of keys programs, and lookups that have a row a request.
        vectors: by lookup, the shape of its vectors.
        buffers: separate memory for keys and weights.
    """

    indices: int
    starts: tuple[int, ...]
    limits: tuple[int, ...]
    shapes: tuple[tuple[int, ...], ...]
    keys_only: frozenset[str]
    keys_at: int
    size_bytes: int
    once: frozenset[str]
    vectors: tuple[tuple[int, ...], ...]
    buffers: tuple[KeptBuffer, ...]

    @property
    def buffer_bytes(self) -> int:
        buffers = sum(prod(buffer.shape) * np.dtype(buffer.dtype).itemsize for buffer in self.buffers)
        return buffers + sum(4 * prod(shape) for shape in self.vectors)


def room_for(count: int, most: int) -> int:
    """Return the room for `count` samples or requests, rounded up so that few forms exist; at most `most`."""
    room = _LEAST
    while room < count:
        room *= _STEP
    return min(room, most)


def rounded(rows: int, bits: int) -> int:
    """Round a number of rows up, to one whose binary digits after the first so many are 0."""
    step = 1 << max(0, (rows - 1).bit_length() - bits)
    return -(-rows // step) * step


def can_be_kept(signature: Signature) -> bool:
    """Return True if all features have a row a sample or a request, and the network does not expand them itself."""
    return (
        signature.merges
        and all(not feature.index and feature.first == -1 and feature.offsets_of < 0 for feature in signature.features)
        and all(lookup.offsets is None for lookup in signature.lookups)
    )


def kept_forms(signature: Signature, max_samples: int) -> list[BatchForm]:
    """Return the forms that memory is kept for from the start: of all numbers of samples, with nothing and all given once.

    Named sizes are those of `dense.sizes`. Batches of many requests that give something once have other forms.
    """
    if not can_be_kept(signature):
        return []
    none, once = (False,) * len(signature.features), tuple(feature.per_request for feature in signature.features)
    sizes = tuple(signature.sizes[name] for name in signature.inner)
    forms: list[BatchForm] = []
    samples = 0
    while samples < max_samples:
        samples = room_for(samples + 1, max_samples)
        forms += [
            BatchForm(samples, room_for(1, samples) if any(given) else 0, given, sizes) for given in dict.fromkeys((none, once))
        ]
    return forms


def lay_out(
    signature: Signature, form: BatchForm, max_samples: int, computed: Mapping[str, tuple[int, ...]] | None = None
) -> BatchLayout:
    """Lay out the inputs of batches of a form, of a model of at most `max_samples`.

    Args:
        computed: by name of an output of a keys program, the shape of a row. Default: that of its largest input.
    """
    known = {**signature.sizes, **dict(zip(signature.inner, form.sizes, strict=True)), SAMPLES: 1}
    rows = {feature.name: feature.shape_with(known)[1:] for feature in signature.features}
    once = {feature.name for feature, given in zip(signature.features, form.once, strict=True) if given}
    for program in signature.programs:
        largest = max((rows[name] for name in program.inputs), key=prod)
        rows |= {name: largest if computed is None else computed[name] for name in program.outputs}
        if once.issuperset(program.inputs):
            once |= {*program.outputs}
    features = {feature.name: feature for feature in signature.features}
    vectors, buffers = [], []
    for place, lookup in enumerate(signature.lookups):
        sources = [source for source in (lookup.keys, lookup.weights) if source is not None]
        if once.issuperset(source.name for source in sources):
            once.add(lookup.name)
        count = form.requests if lookup.name in once else form.samples
        for source, dtype in zip(sources, ("int64", "float32"), strict=False):
            shape = () if source.column is not None else rows[source.name]
            if not _reads(lookup, features.get(source.name), source, dtype, once):
                buffers.append(KeptBuffer(place, source, dtype, (count, *shape)))
        vectors.append((count, *_row_of(signature, lookup, rows), lookup.dim))
    indices = form.samples if form.requests else 0
    keys_only = _keys_only(signature, {(buffer.lookup, buffer.source) for buffer in buffers})
    starts, limits, shapes, at = [], [], [], aligned(8 * indices)
    keys_bytes = 0
    for feature, n in zip(signature.features, form.rows, strict=True):
        starts.append(at)
        shapes.append((n, *rows[feature.name]))
        if feature.is_lookup:
            keys = feature.max_keys // max_samples if feature.bags else 0
            limits.append(8 * min(n * (feature.hotness or keys or 1), feature.max_keys))
        else:
            limits.append(prod(shapes[-1]) * np.dtype(feature.dtype).itemsize)
        if feature.name in keys_only:
            keys_bytes += aligned(limits[-1])
        else:
            at += aligned(limits[-1])
    return BatchLayout(
        indices,
        tuple(starts),
        tuple(limits),
        tuple(shapes),
        frozenset(keys_only),
        at,
        at + keys_bytes,
        frozenset(once),
        tuple(vectors),
        tuple(buffers),
    )


def _reads(lookup: NetworkLookup, feature: Feature | None, source: Source, dtype: str, once: set[str]) -> bool:
    """Return True if a lookup reads a feature unchanged."""
    if feature is None or source.column is not None or (not feature.is_lookup and feature.dtype != dtype):
        return False
    return feature.name not in once or lookup.name in once


def _row_of(signature: Signature, lookup: NetworkLookup, rows: Mapping[str, tuple[int, ...]]) -> tuple[int, ...]:
    """Return the shape of a sample's vectors, without their width."""
    if lookup.combiner or lookup.keys.column is not None:
        return ()
    if lookup.feature >= 0 and signature.features[lookup.feature].hotness is None:
        return ()
    return rows[lookup.keys.name]


def _keys_only(signature: Signature, buffered: set[tuple[int, Source]]) -> set[str]:
    """Return the names of features that only lookups read, unchanged."""
    read = {name for program in signature.programs for name in program.inputs}
    read |= {source.name for _, source in buffered}
    lookups = {lookup.name for lookup in signature.lookups}
    read |= {name for name in signature.network_inputs if name not in lookups}
    keys = {lookup.keys.name for lookup in signature.lookups}
    return {feature.name for feature in signature.features if feature.name in keys and feature.name not in read}


def aligned(size: int) -> int:
    return -(-size // _ALIGNED) * _ALIGNED
