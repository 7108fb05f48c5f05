"""Which counts break a bound, and which are chance; which requests a share selects; what two answers differ by."""

import json
from collections import Counter

import numpy as np
import pytest

from hps.configuration.canary import CanaryConfig, CanaryStep
from hps.versions.canary.counts import BOUNDS, Comparison, RolloutCounts, VersionCounts, _sample, slower_than
from hps.versions.canary.judgement import Window, broken_bound, is_step_done
from hps.versions.canary.plan import RolloutPlan, SenderSelection

MS = 1_000_000
CONFIG = CanaryConfig(max_difference=0.1)


def counts_of(
    old: tuple[int, int, float] = (1000, 0, 1.0), new: tuple[int, int, float] = (50, 0, 1.0), queued_ms: float = 0.0
) -> RolloutCounts:
    """Counts of two versions: of each its answers, errors, and the time of an answer in ms."""
    counts = RolloutCounts()
    for version, (answered, errors, each_ms) in ((counts.old, old), (counts.new, new)):
        for _ in range(answered):
            version.succeeded(round((each_ms + queued_ms) * MS), round(each_ms * MS))
        version.errors = errors
    return counts


@pytest.mark.parametrize(
    ("counts", "broken"),
    [
        (counts_of(), ""),
        (counts_of(new=(0, 2, 1.0)), ""),  # two errors may be chance
        (counts_of(new=(0, 3, 1.0)), "error rate"),
        (counts_of(new=(997, 3, 1.0)), ""),
        (counts_of(new=(985, 15, 1.0)), ""),  # ten are allowed, and chance gives five more
        (counts_of(new=(975, 25, 1.0)), "error rate"),
        (counts_of(old=(950, 50, 1.0), new=(950, 50, 1.0)), ""),  # both fail alike
        (counts_of(new=(4, 0, 50.0)), ""),
        (counts_of(new=(5, 0, 50.0)), "p99"),
        (counts_of(new=(50, 0, 1.5)), ""),
        (counts_of(new=(50, 0, 4.0)), "p99"),
        (counts_of(old=(1000, 0, 0.02), new=(50, 0, 0.2)), ""),  # below a millisecond is noise
        (counts_of(old=(0, 0, 1.0), new=(50, 0, 50.0)), ""),  # a canary of all requests has nothing to compare with
        (counts_of(new=(50, 0, 20.0), queued_ms=500.0), "p99"),  # both wait for the threads that the new one occupies
    ],
)
def test_a_version_breaks_a_bound_if_its_counts_exceed_chance(counts: RolloutCounts, broken: str) -> None:
    found = broken_bound([Window(5.0, counts, lambda: [counts] * 3)], "8", "7", CONFIG)
    assert found.startswith(f"{broken} of version 8" if broken else "")
    assert bool(found) == bool(broken)


def test_requests_that_were_slow_in_one_moment_are_the_machines() -> None:
    slow, quick = counts_of(new=(50, 0, 20.0)), counts_of()
    for slices, breaks in (([slow, slow, quick, quick], False), ([slow, quick, slow, slow], True)):
        window = Window(5.0, slow, lambda slices=slices: slices)  # type: ignore[misc]
        assert broken_bound([window], "8", "7", CONFIG).startswith("p99 of version 8") == breaks


def test_a_short_window_sees_what_an_hour_of_good_answers_hides() -> None:
    hour = counts_of(new=(100_000, 20, 1.0))
    assert broken_bound([Window(3600.0, hour)], "8", "7", CONFIG) == ""
    assert "20 of 20 requests in 5 s" in broken_bound(
        [Window(5.0, counts_of(new=(0, 20, 1.0))), Window(3600.0, hour)], "8", "7", CONFIG
    )


@pytest.mark.parametrize(
    ("factor", "requests", "broken"),
    [(1.2, 49, ""), (1.2, 50, "difference of version 8 from 7 is 0.2"), (1.05, 50, ""), (np.nan, 3, "error rate of version 8")],
)
def test_answers_that_differ_by_more_than_the_bound_break_it(factor: float, requests: int, broken: str) -> None:
    counts, old = counts_of(), np.arange(1, 5, dtype=np.float32)
    for _ in range(requests):
        counts.compared.compare([old], [(old * factor).astype(np.float32)])
    assert broken_bound([Window(5.0, counts)], "8", "7", CONFIG).startswith(broken)


def test_the_share_of_broken_answers_is_of_those_that_were_compared() -> None:
    counts, old = counts_of(new=(10_000, 0, 1.0)), np.ones(3)
    for _ in range(5):
        counts.compared.compare([old], [old * np.inf])
    assert broken_bound([Window(5.0, counts)], "8", "7", CONFIG).startswith("error rate of version 8 is 100.0%")


def test_what_the_serving_version_has_no_number_for_is_no_error_of_the_new_one() -> None:
    compared = Comparison()
    for new in (1.0, np.nan, np.inf):
        compared.compare([np.array([np.nan, 1.0])], [np.array([new, 1.0])])
    assert (compared.nonfinite, compared.different) == (0, 3)


def test_a_difference_in_one_number_of_many_is_seen_though_a_sample_is_compared() -> None:
    for size in (1024, 1025, 2047, 100_000):
        assert 512 <= _sample(np.zeros((size, 1))).size <= 1024
    old = np.zeros(3000)
    new = old.copy()
    new[1] = 1.0
    compared = Comparison()
    compared.compare([old], [new])
    assert (compared.identical, compared.different, compared.largest) == (0, 1, 0.0)


@pytest.mark.parametrize("work", [True, False])
def test_a_request_is_slower_than_a_limit_if_its_bucket_begins_there(work: bool) -> None:
    counts, place = VersionCounts(), 12
    for ns, work_ns in ((BOUNDS[place], BOUNDS[place + 1]), (BOUNDS[place + 1], BOUNDS[place])):
        counts.succeeded(int(1e9 * ns), int(1e9 * work_ns))
    assert slower_than(counts, BOUNDS[place - 1], work=work) == 2
    assert slower_than(counts, BOUNDS[place], work=work) == 1, "the other one lasted exactly that long"
    assert slower_than(counts, BOUNDS[place] * 1.1, work=work) == 0, "the limit is within the bucket"
    assert slower_than(counts, BOUNDS[-1] * 2, work=work) == 0


def test_a_plan_ends_with_its_last_step() -> None:
    steps = (CanaryStep(share=0.1, seconds=1), CanaryStep(share=0.5))
    plan = RolloutPlan(mode="canary", version="8", steps=steps, config=CONFIG)
    assert [plan.is_last(step) for step in range(2)] == [False, True]


@pytest.mark.parametrize(
    ("step", "seconds", "requests", "done"),
    [
        (CanaryStep(share=0.05), 1e6, 10**4, False),  # it stays until somebody promotes
        (CanaryStep(share=0.05, seconds=10), 9.9, 1, False),
        (CanaryStep(share=0.05, seconds=10), 10.0, 0, False),  # nothing is proved
        (CanaryStep(share=0.05, seconds=10), 10.0, 1, True),
        (CanaryStep(share=0.05, seconds=10, requests=5), 10.0, 4, False),
        (CanaryStep(share=0.05, requests=5), 0.0, 5, True),
    ],
)
def test_a_step_ends_after_its_time_and_its_requests(step: CanaryStep, seconds: float, requests: int, done: bool) -> None:
    assert is_step_done(step, seconds, counts_of(new=(requests, 0, 1.0))) == done


@pytest.mark.parametrize("share", [0.01, 0.05, 0.5])
def test_a_share_is_met_within_half_a_percent_and_a_larger_one_keeps_whom_it_had(share: float) -> None:
    users = [b"user-%d" % number for number in range(20_000)]
    taken = {user for user in users if SenderSelection("ranker", "8", share).takes(user)}
    assert abs(len(taken) / len(users) - share) < 0.005
    assert taken <= {user for user in users if SenderSelection("ranker", "8", share + 0.2).takes(user)}
    others = {user for user in users if SenderSelection("ranker", "9", share).takes(user)}
    assert abs(len(taken & others) / len(users) - share**2) < 0.005, "another version selects others"


def test_the_hash_is_the_same_in_every_release() -> None:
    """A change of it would move clients between replicas of two releases."""
    sides = Counter(SenderSelection("ranker", "8", 0.25).takes(b"user-%d" % number) for number in range(1000))
    assert sides[True] == 228
    assert [number for number in range(40) if SenderSelection("ranker", "8", 0.25).takes(b"user-%d" % number)] == [
        4,
        7,
        10,
        21,
        26,
        28,
        33,
        37,
    ]


def test_counts_of_several_processes_add_up_and_go_through_json() -> None:
    one, other = counts_of(new=(3, 1, 2.0)), counts_of(new=(4, 0, 8.0))
    one.compared.compare([np.array([1.0, 2.0])], [np.array([1.0, 3.0])])
    other.compared.compare([np.array([5.0])], [np.array([5.0])])
    both = RolloutCounts.total([one.values(), other.values()])
    assert (both.new.answered, both.new.errors, both.old.answered) == (7, 1, 2000)
    assert (both.compared.identical, both.compared.different, both.compared.largest) == (1, 1, 1.0)
    assert both.compared.difference == pytest.approx(1 / 8)
    later = RolloutCounts.since(both.values(), one.values())
    assert (later.new.answered, later.compared.identical, later.compared.largest) == (4, 1, 1.0)
    both.compared.failed, both.compared.dropped, both.compared.nonfinite = 3, 4, 5
    both.new.succeeded(8 * MS, 2 * MS)
    twice = RolloutCounts.total([both.values(), both.values()]).values()
    assert twice == [*(2 * value for value in both.values()[:-1]), 1.0], "each count is added to its own"
    with pytest.raises(ValueError, match="counts of a rollout"):
        both.add([1.0] * 3)
    with pytest.raises(ValueError, match="counts of a rollout"):
        both.add([float("nan"), *both.values()[1:]])
    assert len(VersionCounts().values()) == VersionCounts.SIZE


def test_the_largest_numbers_leave_counts_that_json_can_have() -> None:
    counts = RolloutCounts()
    for _ in range(1000):
        counts.compared.compare([np.full(4000, 1e308), np.array([-1e308])], [np.full(4000, -1e308), np.array([1e308])])
    sent = json.loads(json.dumps(counts.values()))
    found = RolloutCounts.total([sent, sent]).compared
    assert found.difference == pytest.approx(2.0)
    assert found.correlation == pytest.approx(-1.0)
    assert np.isfinite(found.largest)


def test_arrays_of_other_shapes_are_not_compared() -> None:
    compared = Comparison()
    compared.compare([np.zeros(3)], [np.zeros(4)])
    compared.compare([np.zeros(3)], [np.zeros(3), np.zeros(3)])
    assert (compared.failed, compared.requests, compared.difference, compared.correlation) == (2, 0, None, None)
