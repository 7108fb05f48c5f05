"""Shares of a table: which of several servers holds a key.

The hash of shares is independent of `mix`, by which caches, hash maps and sets of keys place a key: the keys of a range of
`mix` would fill a part of the sets of a cache, and of a hash map the buckets of that part many times over. Row files are
ordered by the hash of shares, so that a share is a range of a file.
"""

from dataclasses import dataclass
from typing import Final, Self, cast

import numpy as np
import numpy.typing as npt

MOST_SHARES: Final = 1 << 16
"""Largest number of shares of a table."""

SHARE_SEED: Final = np.int64(-0x61C8864680B583EB)
"""Combined with a key by exclusive or before it is mixed. It must not change: clients and servers of other releases use it."""

# `mix` of `hashing.py` in NumPy: clients route keys by it, and must not import numba, which takes a second. A test compares the
# two.
_ROTATIONS: Final = (((25, 39), (50, 14)), ((24, 40), (49, 15)))
_FACTORS: Final = (0xA24BAED4963EE407, 0x9FB21C651E98DF25)
_LAST_SHIFT: Final = np.uint64(28)
_HALF: Final = np.uint64(32)
_SURELY_SOME: Final = 40  # rows of a share on average: it has none with probability e^-40
_PIECE_KEYS: Final = 1 << 15  # of a pass, whose arrays then stay in the second-level cache


def share_indices(
    keys: npt.NDArray[np.int64],  # (n,)
    of: int,
) -> npt.NDArray[np.int64]:  # (n,)
    """Return the share of each key: `scale(share_hash(key), of)` of `hashing.py`."""
    indices = np.empty(keys.shape, np.int64)
    for start in range(0, keys.size, _PIECE_KEYS):
        piece = slice(start, start + _PIECE_KEYS)
        indices[piece] = ((_mixed(keys[piece] ^ SHARE_SEED) >> _HALF) * np.uint64(of)) >> _HALF
    return indices


def _mixed(keys: npt.NDArray[np.int64]) -> npt.NDArray[np.uint64]:
    x = keys.astype(np.uint64)
    with np.errstate(over="ignore"):
        for rotations, factor in zip(_ROTATIONS, _FACTORS, strict=True):
            turned = np.zeros_like(x)
            for right, left in rotations:
                turned ^= (x >> np.uint64(right)) | (x << np.uint64(left))
            x ^= turned
            x *= np.uint64(factor)
    return cast("npt.NDArray[np.uint64]", x ^ (x >> _LAST_SHIFT))


@dataclass(frozen=True, slots=True, order=True)
class TableShare:
    """The part of every table of a model that a server holds. *Immutable.*

    Attributes:
        index: number of the share, from 0.
        of: number of shares.
    """

    index: int
    of: int

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read `index/of`.

        Raises:
            ValueError: the text is of another form, or there is no such share.
        """
        index, _, of = text.partition("/")
        if not (index.isascii() and index.isdecimal() and of.isascii() and of.isdecimal()):
            raise ValueError(text)
        if not int(index) < int(of) <= MOST_SHARES:
            raise ValueError(text)
        return cls(int(index), int(of))

    def owns(self, keys: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
        """Return for each key whether it belongs to the share, (n,) bool."""
        owned: npt.NDArray[np.bool_] = share_indices(keys, self.of) == self.index
        return owned

    def covers(self, other: "TableShare") -> bool:
        """Return whether every key of another share, perhaps of another number of shares, belongs to this one."""
        return self.index * other.of <= other.index * self.of and (other.index + 1) * self.of <= (self.index + 1) * other.of

    def most_rows(self, rows: int) -> int:
        """Bound the rows of a share of a table: the mean, and six standard deviations of hashed keys."""
        mean = rows / self.of
        return min(rows, int(np.ceil(mean + 6 * np.sqrt(mean) + 6)))

    def __str__(self) -> str:
        return f"{self.index}/{self.of}"


def with_share(fingerprint: str, share: TableShare | None) -> str:
    """Return the fingerprint of a share of the files with this fingerprint."""
    return fingerprint if share is None else f"{fingerprint} {share}"


def share_text(fingerprint: str) -> str:
    """Return the share in a fingerprint, `index/of`; empty for all rows."""
    text = fingerprint.partition(" ")[2]
    return text if "/" in text else ""  # the fingerprints of other databases' records may have blanks


def share_in(fingerprint: str) -> TableShare | None:
    """Return the share in a fingerprint; None for all rows."""
    text = share_text(fingerprint)
    return TableShare.parse(text) if text else None


def may_be_empty(fingerprint: str, rows: int) -> bool:
    """Return whether the share in a fingerprint may have none of so many rows of the files."""
    share = share_in(fingerprint)
    return share is not None and rows / share.of < _SURELY_SOME


def owned_rows(
    share: TableShare | None,
    keys: npt.NDArray[np.int64],  # (n,)
    rows: npt.NDArray[np.float32],  # (n, width)
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]:
    """Return the rows of a share, in order; the given arrays for None."""
    if share is None:
        return keys, rows
    owned = share.owns(keys)
    return keys[owned], rows[owned]


def rows_of_share(share: TableShare | None, rows: int) -> int:
    """Return `most_rows` of a share; all rows for None."""
    return rows if share is None else share.most_rows(rows)
