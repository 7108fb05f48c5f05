"""Memory that is freed goes back to the system."""

import ctypes
import re
from pathlib import Path

import pytest

from hps.ground.memory.heap import trim_heap

MB = 1 << 20


def resident() -> int:
    return int(re.search(r"^Rss:\s+(\d+)", Path("/proc/self/smaps_rollup").read_text(), re.MULTILINE)[1]) * 1024  # type: ignore[index]


@pytest.mark.parametrize("nth", range(2))
def test_free_pages_between_blocks_that_stay_go_back(nth: int) -> None:
    library = ctypes.CDLL(None)
    library.malloc.restype, library.malloc.argtypes, library.free.argtypes = (
        ctypes.c_void_p,
        [ctypes.c_size_t],
        [ctypes.c_void_p],
    )
    blocks = [library.malloc(20_000) for _ in range(2000)]
    for one in blocks:
        ctypes.memset(one, 1, 20_000)
    for i, one in enumerate(blocks):
        if i % 10:
            library.free(one)
    before = resident()
    trim_heap()
    after = resident()
    for one in blocks[::10]:
        library.free(one)
    assert before - after > 20 * MB
