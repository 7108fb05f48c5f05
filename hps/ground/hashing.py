"""The hash of keys for numba kernels; it chooses partitions, hash map buckets and cache sets."""

import numpy as np
from numba import njit

from hps.ground.shares import SHARE_SEED

_M1 = np.uint64(0xA24BAED4963EE407)
_M2 = np.uint64(0x9FB21C651E98DF25)


@njit(inline="always")
def mix(key: np.int64) -> np.uint64:
    """Mix a key into 64 well-distributed bits.

    The function is `rrxmrrxmsx_0` (Pelle Evensen, public domain) as HugeCTR HPS 4.2 and later use it: the partition of a key is
    `mix(key) % partitions`. It must not change, since it places the rows in a shared Redis.
    """
    x = np.uint64(key)
    x ^= ((x >> np.uint64(25)) | (x << np.uint64(39))) ^ ((x >> np.uint64(50)) | (x << np.uint64(14)))
    x *= _M1
    x ^= ((x >> np.uint64(24)) | (x << np.uint64(40))) ^ ((x >> np.uint64(49)) | (x << np.uint64(15)))
    x *= _M2
    return x ^ (x >> np.uint64(28))


@njit(inline="always")
def share_hash(key: np.int64) -> np.uint64:
    """Mix a key by the hash of shares, which also orders the records of a row file: so a share is a range of the file."""
    return mix(np.int64(key ^ SHARE_SEED))


@njit(inline="always")
def scale(hashed: np.uint64, n: np.int64) -> np.int64:
    """Map 64 mixed bits evenly to [0, n), n < 2^32, without a division: the upper 32 bits times n, over 2^32."""
    return np.int64(((hashed >> np.uint64(32)) * np.uint64(n)) >> np.uint64(32))
