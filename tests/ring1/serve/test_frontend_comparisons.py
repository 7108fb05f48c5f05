"""What waits to be compared is bounded in number and bytes, dropped first, and begun seldom while clients wait."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from hps.errors import HPSError
from hps.regions.layout import SLAB
from hps.serve.frontend.comparisons import Comparisons
from hps.serve.frontend.exchange import Slots
from hps.serve.frontend.pending import Lookup
from hps.serve.frontend.published import FrontendVersion, LookupTarget
from hps.serve.frontend.rollouts import FrontendRollout
from hps.serve.http.http_metrics import InferenceCounts
from hps.serve.logs.requests import Served
from hps.serve.protocol.request_checks import ModelTables
from hps.versions.canary.counts import RolloutCounts
from hps.versions.canary.plan import SenderSelection

KIB = 1 << 10


class Loop:
    """An event loop whose time the test sets."""

    def __init__(self) -> None:
        self.now = 100.0
        self.soon: list[Callable[[], None]] = []
        self.later: list[tuple[float, Callable[[], None]]] = []

    def call_soon(self, call: Callable[[], None]) -> None:
        self.soon.append(call)

    def call_later(self, delay_s: float, call: Callable[[], None]) -> None:
        self.later.append((delay_s, call))

    def time(self) -> float:
        return self.now


class Exchange:
    """The part of an exchange that comparisons use: real slots, and posts that are refused."""

    def __init__(self, size: int) -> None:
        self.slots = Slots(SLAB + size)
        self.pending: dict[int, Any] = {}
        self.settings = SimpleNamespace(max_keys_per_request=1000)
        self.shared: set[int] = set()
        self.posted = 0

    def share_slot(self, slot: int) -> None:
        self.shared.add(slot)

    def release(self, slot: int) -> None:
        if slot in self.shared:
            self.shared.remove(slot)
        else:
            self.slots.free(slot)

    def disown(self, lookup: Lookup) -> None:
        self.posted += 1


def rollout_of(requests: int = 64, size: int = 1 << 20) -> FrontendRollout:
    old, new = (FrontendVersion(ModelTables("m", (), version, 1, None), {0: 1}, InferenceCounts()) for version in "12")
    published = {
        "id": "a", "mode": "shadow", "version": "2", "serving": "1", "share": 1.0, "header": "x-user-id", "compare": True,
        "queue_requests": requests, "queue_bytes": size,
    }  # fmt: skip
    return FrontendRollout("m", published, old, new, RolloutCounts())


def answered(exchange: Exchange, rollout: FrontendRollout, size: int = 4 * KIB) -> Lookup:
    lookup = Lookup(None, LookupTarget("/v1/models/{model}/lookup", "m"), Served(), rollout.old, b"")
    lookup.served.id = b"id"
    lookup.slot = exchange.slots.allocate(size)
    return lookup


@pytest.mark.parametrize(("requests", "size", "fits"), [(3, 1 << 20, 3), (64, 20 * KIB, 5), (64, 19 * KIB, 4)])
def test_the_queue_is_bounded_in_number_and_bytes_and_drops_are_counted(requests: int, size: int, fits: int) -> None:
    exchange, rollout = Exchange(1 << 20), rollout_of(requests, size)
    comparisons = Comparisons(exchange, Loop)  # type: ignore[arg-type]
    lookups = [answered(exchange, rollout) for _ in range(8)]
    for lookup in lookups:
        comparisons.add(rollout, lookup)
    assert rollout.counts.compared.dropped == 8 - fits
    for lookup in lookups:  # the clients have their answers
        exchange.release(lookup.slot)
    assert exchange.slots.used == fits * 4 * KIB
    assert comparisons.drop_all()
    assert not comparisons.drop_all()
    assert (exchange.slots.used, rollout.counts.compared.dropped) == (0, 8)
    again = answered(exchange, rollout)
    comparisons.add(rollout, again)
    assert rollout.counts.compared.dropped == 8, "what was dropped has left its place"


def test_the_bodies_that_wait_count_with_their_slots() -> None:
    exchange, rollout = Exchange(1 << 20), rollout_of(64, 10 * KIB)
    comparisons = Comparisons(exchange, Loop)  # type: ignore[arg-type]
    for number, field in enumerate(("body", "raw", "body")):
        lookup = answered(exchange, rollout)
        setattr(lookup, field, bytes(2 * KIB if number < 2 else KIB))
        comparisons.add(rollout, lookup)
        assert rollout.counts.compared.dropped == min(number, 1) * number


def test_a_shadow_counts_times_in_the_engine_and_compares_its_share() -> None:
    rollout = rollout_of()
    lookup = Lookup(None, LookupTarget("/v1/models/{model}/lookup", "m"), Served(), rollout.old, b"")
    lookup.served.id = b"id"
    assert rollout.answered(lookup, 1_000_000, 1000)
    assert rollout.counts.old.times.total_ns == 1000, "a shadow's requests are handed over late"
    rollout._selection = SenderSelection("m", "2", 0.0)
    assert not rollout.answered(lookup, 1_000_000, 1000)


def test_a_crowded_slab_takes_none() -> None:
    exchange, rollout = Exchange(16 * KIB), rollout_of()
    comparisons = Comparisons(exchange, Loop)  # type: ignore[arg-type]
    lookups = [answered(exchange, rollout) for _ in range(3)]
    comparisons.add(rollout, lookups[0])
    assert (rollout.counts.compared.dropped, exchange.shared) == (1, set())


def test_few_begin_while_clients_wait_and_a_failure_is_counted_and_frees_the_slot() -> None:
    exchange, rollout, loop = Exchange(1 << 20), rollout_of(), Loop()
    comparisons = Comparisons(exchange, lambda: loop)  # type: ignore[arg-type,return-value]
    for _ in range(2):
        lookup = answered(exchange, rollout)
        lookup.body = b"no JSON"
        comparisons.add(rollout, lookup)
        exchange.release(lookup.slot)
    exchange.pending[1] = "a client's"
    loop.soon.pop()()
    assert rollout.counts.compared.failed == 1, "the first one is posted at once, and its body is refused"
    [(delay_s, resume)] = loop.later
    assert delay_s == pytest.approx(0.02)
    loop.now += delay_s
    resume()
    assert (rollout.counts.compared.failed, exchange.slots.used, exchange.shared) == (2, 0, set())


def test_a_failed_request_of_the_new_version_is_the_serving_ones_and_counted_if_the_client_was_right() -> None:
    rollout = rollout_of()
    lookup = Lookup(None, LookupTarget("/v1/models/{model}/lookup", "m"), Served(), rollout.new, b"")
    assert rollout.failed(lookup, 400)
    assert rollout.counts.new.errors == 0, "the client may be wrong"
    assert rollout.version_of(lookup.served) is rollout.old
    lookup.version = rollout.old
    rollout.answered(lookup, 1, 1)
    assert (rollout.counts.new.errors, rollout.counts.old.errors) == (1, 0)
    assert not rollout.failed(lookup, 500)
    assert rollout.counts.old.errors == 1
    other = Lookup(None, lookup.target, Served(), rollout.new, b"")
    assert rollout.failed(other, 500)
    other.version = rollout.old
    rollout.answered(other, 1, 1)
    assert rollout.counts.new.errors == 2, "once"


def test_an_error_without_a_comparison_is_ignored() -> None:
    Comparisons(Exchange(1 << 20), Loop).refuse(HPSError("late"))  # type: ignore[arg-type]
