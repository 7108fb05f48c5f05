"""The forms of batches that memory is kept for, and where their inputs lie in it: for the scorer, and for plans."""

from dataclasses import dataclass
from math import prod
from typing import NamedTuple

import numpy as np

from hps.scoring.signature import Signature

_ALIGNED = 64
_LEAST = 16
_STEP = 4  # between the sizes that memory is kept for


class BatchForm(NamedTuple):
    """The form of batches that share memory. *Immutable.*

    Attributes:
        samples, requests: most of them; no requests if they give nothing once.
        once: by place of the feature, whether each request gives one row.
    """

    samples: int
    requests: int
    once: tuple[bool, ...]

    @property
    def rows(self) -> list[int]:
        """Most rows of each input."""
        return [self.requests if once else self.samples for once in self.once]


@dataclass(frozen=True, slots=True)
class BatchLayout:
    """Where the inputs of batches of one form lie in one piece of memory. *Immutable.*

    It begins with the index, (indices,) int64: the request of each sample.

    Attributes:
        indices: samples if anything is given once, else 0.
        starts: by input, where its values begin; keys of lookups lie behind all else, from `keys_at` on.
        limits: by input, how many bytes have room.
        shapes: by input, of what the network gets, a row a request if it is given once.
        vector_bytes: size of the vectors of all lookups, which have memory of their own.
    """

    indices: int
    starts: tuple[int, ...]
    limits: tuple[int, ...]
    shapes: tuple[tuple[int, ...], ...]
    keys_at: int
    size_bytes: int
    vector_bytes: int


def room_for(count: int, most: int) -> int:
    """Return for how many samples or requests, of at most `most`, there is room where there is for `count`."""
    room = _LEAST
    while room < count:
        room *= _STEP
    return min(room, most)


def kept_forms(signature: Signature, max_samples: int) -> list[BatchForm]:
    """Return the forms that memory is kept for from the start: of all numbers of samples, with nothing and all given once.

    None for networks that get the request index. Batches of many requests that give something once have other forms.
    """
    features = signature.features
    if any(one.index for one in features):
        return []
    none, once = (False,) * len(features), tuple(one.per_request for one in features)
    forms: list[BatchForm] = []
    samples = 0
    while samples < max_samples:
        samples = room_for(samples + 1, max_samples)
        forms += [BatchForm(samples, room_for(1, samples) if any(given) else 0, given) for given in dict.fromkeys((none, once))]
    return forms


def lay_out(signature: Signature, form: BatchForm, max_samples: int) -> BatchLayout:
    """Lay out the inputs of batches of a form, of a model of at most `max_samples`."""
    indices = form.samples if form.requests else 0
    starts, limits, shapes, at = [], [], [], aligned(8 * indices)
    keys_bytes = vector_bytes = 0
    tensors = {one.name: one for one in signature.tensors()}
    for one, n in zip(signature.features, form.rows, strict=True):
        starts.append(at)
        shapes.append((n, *(tensors[one.name].shape or ())[1:]))
        if one.is_lookup:
            keys = one.max_keys // max_samples if one.bags else 0
            limits.append(8 * min(n * (one.hotness or keys or 1), one.max_keys))
            keys_bytes += aligned(limits[-1])
            vector_bytes += 4 * prod(shapes[-1])
        else:
            limits.append(n * prod(shapes[-1][1:]) * np.dtype(one.dtype).itemsize)
            at += aligned(limits[-1])
    return BatchLayout(indices, tuple(starts), tuple(limits), tuple(shapes), at, at + keys_bytes, vector_bytes)


def aligned(size: int) -> int:
    """Round a number of bytes up to where the next input may begin."""
    return -(-size // _ALIGNED) * _ALIGNED
