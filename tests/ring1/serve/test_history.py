"""The past of a service: whole, bounded, and at regular times."""

from itertools import pairwise

from hps.serve.engine.history import MOST_POINTS, History
from hps.statistics.metrics import Metrics
from tests.fakes.clock import Clock


def test_a_history_of_any_length_has_few_points_from_its_start_to_now() -> None:
    clock, metrics = Clock(0.0), Metrics()
    history, counters = History(lambda: metrics, clock), metrics.table("m", "t")
    for number in range(5 * MOST_POINTS):
        clock.now = 5.0 * number
        counters.keys = 10 * number
        counters.hits[0], counters.misses[0] = 3 * number, number
        history.record()
        points = history.points()
        assert len(points) <= MOST_POINTS + 1
        assert (points[0].at_s, points[-1].at_s, points[-1].keys) == (0.0, clock.now, 10 * number)
        times = [point.at_s for point in points[:-1]]
        assert len({late - early for early, late in pairwise(times)}) <= 1  # regular
        assert all(point.keys == 2 * point.at_s for point in points)
    assert len(points) > MOST_POINTS / 2
    assert clock.now - points[-2].at_s < points[1].at_s
    assert (points[-1].hits, points[-1].misses) == (3 * number, number)


def test_a_history_adds_up_all_models_and_begins_before_there_are_any() -> None:
    clock, opened = Clock(7.0), None
    history = History(lambda: opened, clock)
    history.record()
    assert [(point.at_s, point.keys, point.latency.count) for point in history.points()] == [(7.0, 0, 0)] * 2
    opened = metrics = Metrics()
    for number, model in enumerate(("a", "b", "c"), 1):
        metrics.table(model, "t").keys += number
        metrics.table(model, "u").keys += 10 * number
        for _ in range(number):
            metrics.lookup_times(model).total.add(1_000_000)
    first, now = history.points()
    assert first.keys == 0
    assert (now.at_s, now.keys, now.latency.count, round(now.latency.total_s, 6)) == (7.0, 66, 6, 0.006)
