import pytest

from hps.serve.http.http_answer import OverloadedError, RequestError
from hps.serve.http.memory_budget import SMALL_BYTES, MemoryBudget

LIMIT = 8 * SMALL_BYTES
LARGE = 6 * SMALL_BYTES  # three quarters of it


def test_small_requests_may_take_all_and_larger_ones_three_quarters():
    for held, size, status in (
        (0, LARGE, None),
        (0, LARGE + 1, 413),
        (0, LIMIT, 413),
        (LARGE - SMALL_BYTES - 1, SMALL_BYTES + 1, None),
        (LARGE - SMALL_BYTES, SMALL_BYTES + 1, 503),
        (LIMIT - SMALL_BYTES, SMALL_BYTES, None),
        (LIMIT - SMALL_BYTES + 1, SMALL_BYTES, 503),
        (LIMIT, 0, None),
        (LIMIT, 1, 503),
    ):
        memory = MemoryBudget(LIMIT)
        memory.used = held
        if status is None:
            assert (memory.reserve(size, "reading"), memory.used) == (size, held + size)
        else:
            with pytest.raises(RequestError) as refused:
                memory.reserve(size, "reading")
            assert (refused.value.status, memory.used) == (status, held)


def test_a_limit_of_less_than_a_small_request_refuses_it():
    with pytest.raises(RequestError, match=f"up to {SMALL_BYTES} bytes of memory, expected at most {SMALL_BYTES - 1} "):
        MemoryBudget(SMALL_BYTES - 1).reserve(SMALL_BYTES, "reading")


def test_every_new_limit_holds_for_small_and_for_large_requests():
    memory = MemoryBudget(LIMIT)
    for limit in (4 * LIMIT, LIMIT, 2 * LIMIT, 3 * LIMIT):
        memory.limit_to(limit)
        memory.reserve(limit * 3 // 4, "reading")
        memory.used = 0
        with pytest.raises(RequestError, match=f"expected at most {limit * 3 // 4} "):
            memory.reserve(limit * 3 // 4 + 1, "reading")
        memory.used = limit - SMALL_BYTES
        memory.reserve(SMALL_BYTES, "reading")
        with pytest.raises(OverloadedError, match=f"expected at most {limit} "):
            memory.reserve(1, "reading")
        memory.used = 0


def test_what_is_held_stays_held_under_a_lower_limit_until_it_is_released():
    memory = MemoryBudget(LIMIT)
    for _ in range(2):
        for _ in range(3):
            memory.reserve(SMALL_BYTES, "reading")
        memory.limit_to(2 * SMALL_BYTES)
        with pytest.raises(OverloadedError, match=f"hold {3 * SMALL_BYTES} bytes"):
            memory.reserve(1, "reading")
        memory.used -= 2 * SMALL_BYTES
        assert memory.reserve(SMALL_BYTES, "reading") == SMALL_BYTES
        memory.used -= 2 * SMALL_BYTES
        memory.limit_to(LIMIT)
        assert memory.used == 0
