"""Invariants of cached tables, checked by `EmbeddingCache.check_integrity` on a copy of their memory."""

import numpy as np
import numpy.typing as npt

from hps.types import KeyArray


def hashes_of(keys: KeyArray) -> npt.NDArray[np.uint64]:
    """Return the mixing hash of keys, as `ground/hashing.py` and the kernels compute it."""
    x = keys.astype(np.int64, copy=False).view(np.uint64)
    x = x ^ _rotated(x, 25) ^ _rotated(x, 50)
    x = x * np.uint64(0xA24BAED4963EE407)
    x = x ^ _rotated(x, 24) ^ _rotated(x, 49)
    x = x * np.uint64(0x9FB21C651E98DF25)
    hashed: npt.NDArray[np.uint64] = x ^ x >> np.uint64(28)
    return hashed


def _rotated(x: npt.NDArray[np.uint64], by: int) -> npt.NDArray[np.uint64]:
    rotated: npt.NDArray[np.uint64] = x >> np.uint64(by) | x << np.uint64(64 - by)
    return rotated


def second_sets(
    hashes: npt.NDArray[np.uint64],
    homes: npt.NDArray[np.uint64],
    sets: int,
) -> npt.NDArray[np.uint64]:
    """Return the second sets of keys of a static table: of pairs of buckets on a GPU, of sets on the CPU."""
    apart = (hashes & np.uint64(0xFFFFFFFF)) * np.uint64(sets - 1) >> np.uint64(32)
    seconds: npt.NDArray[np.uint64] = (homes + np.uint64(1) + apart) % np.uint64(sets)
    return seconds


def check_keys_of_sets(tag: str, keys: KeyArray, owned_sets: int, misplaced: int, counted_rows: int) -> list[str]:
    """Check the invariants of a table that all caches have.

    Args:
        tag: of the table.
        keys: resident keys.
        owned_sets: sets whose version is odd, as while a writer changes them.
        misplaced: resident keys in a set that queries of them do not search.
        counted_rows: resident rows by the table's counters.

    Returns:
        A sentence for each broken invariant.
    """
    findings = []
    if owned_sets:
        findings.append(f"cached table {tag}: {owned_sets} sets are owned by a writer, expected none at rest")
    if (repeated := keys.size - np.unique(keys).size) > 0:
        findings.append(f"cached table {tag}: {repeated} keys are resident twice, expected each once")
    if misplaced:
        findings.append(f"cached table {tag}: {misplaced} keys are in a set that no query searches")
    if keys.size != counted_rows:
        findings.append(f"cached table {tag}: {keys.size} rows are resident, expected the {counted_rows} of its counters")
    return findings
