"""The rules of marks, searched exhaustively."""

from tests.tables.redis_order_model import Search, start

LEAST_TRANSITIONS = 1_000_000


def test_no_interleaving_shows_a_process_what_is_older_than_its_own_write():
    executions = transitions = 0
    for processes, budget in (
        (2, {"writes": 1, "fetches": 2, "losses": 1, "crashes": 1}),
        (2, {"writes": 1, "fetches": 2, "losses": 2, "failures": 1}),
        (2, {"writes": 2, "fetches": 1, "failures": 1, "crashes": 1}),
        (3, {"writes": 1, "fetches": 2, "losses": 1}),
        (1, {"writes": 2, "fetches": 1, "crashes": 1, "copies": 1}),
        (1, {"writes": 2, "fetches": 2, "losses": 1, "copies": 1}),
        (2, {"applies": 2, "fetches": 1}),
        (2, {"applies": 1, "fetches": 1, "losses": 1}),
        (2, {"applies": 1, "fetches": 1, "failures": 1, "refusals": 1}),
        (1, {"applies": 2, "fetches": 1, "copies": 1}),
        (1, {"applies": 2, "fetches": 2, "failures": 1, "losses": 1}),
        (2, {"writes": 1, "fetches": 2, "losses": 1, "fills": 1}),
        (2, {"writes": 2, "fetches": 1, "fills": 1}),
        (2, {"writes": 1, "fetches": 1, "failures": 1, "fills": 1}),
        (2, {"writes": 1, "fetches": 1, "crashes": 1, "fills": 1, "refusals": 1}),
        (1, {"writes": 2, "fetches": 1, "failures": 1, "crashes": 1, "fills": 1}),
        (1, {"writes": 2, "fetches": 1, "copies": 1, "fills": 1}),
        (2, {"applies": 1, "fetches": 1, "fills": 1}),
    ):
        search = Search()
        executions += search.executions(start(processes, **budget))
        transitions += search.transitions
    assert executions > transitions > LEAST_TRANSITIONS
