"""Estimates how many keys a second a GPU looks up, from measured rates of reading rows.

The time of a key is `local / local rate + neighbour / neighbour rate + host / host rate`: reads of the three places do not
overlap. The time of a row is a line in its bytes through the smallest and the largest measured row. Smaller rows take the time
of the smallest one, since finding a row takes time, too.
"""

from dataclasses import dataclass
from typing import Final

MEASURED_ON: Final = "an H200 and on two H100s (NVLink 4)"
ROWS_PER_S: Final = {
    "local": {128: 9129e6, 512: 3318e6},
    "neighbour": {128: 2331e6, 512: 632e6},
    "host": {128: 52.6e6, 512: 34.6e6},
}
"""Measured rows per second of a GPU, by where they lie and their bytes, in queries of 262,144 keys (`benchmarks/results/`):

*   local: `gpu_cache.json`, hits of a query on its own cache (`query`, uniform keys).
*   neighbour: `sharing.json`, rows of the other GPU while both read (`resident`, 2 devices). They are half of the keys, so this
    is half of the rate there, as if local reads took no time.
*   host: `misses.json`, 28,000 misses that a GPU reads from pinned host memory in a lookup of keys by popularity: the misses by
    `link_us` (`mixed`, `link`, after 600 batches). Ten times as many are read three times as fast: they lie closer together.
"""


@dataclass(frozen=True, slots=True)
class Reads:
    """Where a device's lookups find their rows, as shares of their keys. *Immutable.*"""

    local: float  # in its own memory
    neighbour: float  # in the memory of another device of the host
    host: float  # in no cache

    @property
    def hit_rate(self) -> float:
        """Share of the keys that are in some cache."""
        return self.local + self.neighbour


def seconds_per_key(reads: Reads, row_bytes: int) -> float:
    """Estimate the time that a GPU takes for a key of a large lookup; see the module."""
    shares = {"local": reads.local, "neighbour": reads.neighbour, "host": reads.host}
    return sum(share * _seconds_per_row(place, row_bytes) for place, share in shares.items())


def _seconds_per_row(place: str, row_bytes: int) -> float:
    seconds = {size: 1 / rate for size, rate in ROWS_PER_S[place].items()}
    smallest, largest = min(seconds), max(seconds)
    slope = (seconds[largest] - seconds[smallest]) / (largest - smallest)
    return seconds[smallest] + slope * max(row_bytes - smallest, 0)
