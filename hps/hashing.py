"""The mixing hash of keys, shared by partitions, hash map buckets and cache sets."""

import numpy as np
import numpy.typing as npt
from numba import njit

from hps.types import KeyArray

_M1 = np.uint64(0xA24BAED4963EE407)
_M2 = np.uint64(0x9FB21C651E98DF25)


@njit(inline="always")
def mix(key: np.int64) -> np.uint64:
    """Mix a key into 64 well-spread bits; for use inside numba kernels.

    The function is `rrxmrrxmsx_0` (Pelle Evensen, public domain) as HugeCTR HPS 4.2 and later use it to choose a
    partition, so it must not change: data in a shared Redis are placed by it.
    """
    x = np.uint64(key)
    x ^= ((x >> np.uint64(25)) | (x << np.uint64(39))) ^ ((x >> np.uint64(50)) | (x << np.uint64(14)))
    x *= _M1
    x ^= ((x >> np.uint64(24)) | (x << np.uint64(40))) ^ ((x >> np.uint64(49)) | (x << np.uint64(15)))
    x *= _M2
    return x ^ (x >> np.uint64(28))


@njit(inline="always")
def scale(hashed: np.uint64, n: np.int64) -> np.int64:
    """Map 64 mixed bits evenly to [0, n), n < 2^32: the upper 32 bits times n, without a division."""
    return np.int64(((hashed >> np.uint64(32)) * np.uint64(n)) >> np.uint64(32))


@njit(nogil=True, cache=True)
def _partitions(keys, partitions, out):  # type: ignore[no-untyped-def]
    for i in range(keys.size):
        out[i] = mix(keys[i]) % partitions


def partition_of(
    keys: KeyArray,  # (n,)
    partitions: int,
) -> npt.NDArray[np.int64]:  # (n,)
    """The partition of each key, in [0, partitions), as HugeCTR HPS 4.2 and later place it."""
    out = np.empty(keys.size, np.int64)
    _partitions(keys, np.uint64(partitions), out)
    return out
