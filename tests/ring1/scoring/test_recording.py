"""What is kept of the requests for scores, and that a file of it is read as the requests that it was made of."""

import itertools
import json

import numpy as np
import pytest

from hps.engine.refresh import Pace
from hps.errors import ModelFileError, NotReadyError
from hps.scoring.recording import RequestRecorder
from hps.versions.checks.scores import read_requests
from tests.fakes.clock import Clock
from tests.ring1.scoring.test_features import arrays, read, signature
from tests.ring1.scoring.test_packing import SIGNATURE, Region, request

PACE = Pace(1.0, lambda seconds: False)


def recorder(clock: Clock, count: int = 3, *, features: bool = True) -> RequestRecorder:
    return RequestRecorder(signature(), 8, "m", count, features=features, clock=clock)


def test_the_last_requests_are_kept_at_most_ten_a_second() -> None:
    clock = Clock(0.0)
    kept = recorder(clock)
    for user in range(60):
        kept.see(read(arrays(user=np.array([user]))))
        clock.now += 0.06
    assert [json.loads(line)["inputs"]["user"] for line in kept.lines()] == [[54], [56], [58]]


def test_requests_that_take_long_to_record_are_recorded_less_often() -> None:
    seconds = itertools.count()  # each look at the clock takes a second
    kept = RequestRecorder(signature(), 8, "m", 9, features=True, clock=lambda: float(next(seconds)))
    for _ in range(50):
        kept.see(read(arrays()))
    assert len(kept.lines()) == 1


@pytest.mark.parametrize("features", [True, False])
def test_a_file_of_recorded_requests_is_read_as_they_were(features: bool) -> None:
    kept = recorder(Clock(0.0), features=features)
    kept.see(read(arrays()))
    found = read_requests("\n".join(kept.lines()).encode(), "requests.jsonl", signature(), PACE)
    assert found.made_up is not features
    [request] = found.arrays
    again, wanted = read({name: np.ascontiguousarray(array) for name, array in request.items()}), read(arrays())
    assert (again.samples, again.keys) == (wanted.samples, wanted.keys)
    for feature, one, other in zip(signature().features, again.given, wanted.given, strict=True):
        assert (one.rows, one.values.dtype, one.values.shape) == (other.rows, other.values.dtype, other.values.shape)
        if features or feature.is_lookup:
            np.testing.assert_array_equal(one.values, other.values)


def test_a_request_in_shared_memory_is_copied() -> None:
    region = Region()
    given = request(np.random.default_rng(1), 3, "each")
    kept = RequestRecorder(SIGNATURE, 50, "m", 3, features=True, clock=Clock(0.0))
    kept.see(region.pack(given, 3))
    region.memory[:] = 0
    [line] = kept.lines()
    found = json.loads(line)["inputs"]
    assert {name: np.ravel(found[name]).tolist() for name in given} == {
        name: array.ravel().tolist() for name, array in given.items()
    }


def test_many_lines_are_read_evenly_and_in_pieces() -> None:
    line = json.dumps({"inputs": {"item": [7]}}).encode()
    lines = [b'{"inputs": {"item": [%d]}}' % number for number in range(10_000)]
    found = read_requests(b"\n".join(lines), "requests.jsonl", signature(item={"table": "t0"}), PACE)
    items = [int(arrays["item"][0]) for arrays in found.arrays]
    assert items == list(range(0, 10_000, 3))
    with pytest.raises(NotReadyError):
        read_requests(line, "requests.jsonl", signature(), Pace(1.0, lambda seconds: True))


@pytest.mark.parametrize(
    "line",
    [b"\xff\xfe", b"[]", b"[" * 100_000],
)
def test_a_line_that_is_no_request_is_named(line: bytes) -> None:
    with pytest.raises(ModelFileError, match=r"reading requests\.jsonl, line 2: .*expected \{\"inputs\""):
        read_requests(b'{"inputs": {"item": [7]}}\n' + line, "requests.jsonl", signature(), PACE)
