"""How many processes compile; `ring2/ground` starts them."""

import pytest

from hps.ground.kernels import numba_kernels
from hps.ground.threads import thread_pool


@pytest.mark.parametrize(("processors", "memory", "expected"), [(8, 64, 8), (2, 64, 2), (1, 64, 1), (8, 1, 2)])
def test_processes_are_bounded_by_the_processors_and_memory_of_a_container(monkeypatch, processors, memory, expected):
    monkeypatch.setattr(thread_pool, "available_processors", lambda: processors)
    monkeypatch.setattr(numba_kernels, "available_memory", lambda: (memory << 30, ""))
    assert numba_kernels._most_processes() == expected
