"""What is kept of the requests for scores, and that a file of it is read as the requests that it was made of."""

import json

import numpy as np
import pytest

from hps.scoring.recording import RequestRecorder
from hps.versions.checks.scores import read_requests
from tests.fakes.clock import Clock
from tests.ring1.scoring.test_features import arrays, read, signature
from tests.ring1.scoring.test_packing import SIGNATURE, Region, request


def recorder(clock: Clock, count: int = 3, *, features: bool = True) -> RequestRecorder:
    return RequestRecorder(signature(), 8, "m", count, features=features, clock=clock)


def test_the_last_requests_are_kept_at_most_ten_a_second() -> None:
    clock = Clock(0.0)
    kept = recorder(clock)
    for user in range(60):
        kept.see(read(arrays(user=np.array([user]))))
        clock.now += 0.06
    assert [json.loads(line)["inputs"]["user"] for line in kept.lines()] == [[54], [56], [58]]


@pytest.mark.parametrize("features", [True, False])
def test_a_file_of_recorded_requests_is_read_as_they_were(features: bool) -> None:
    kept = recorder(Clock(0.0), features=features)
    kept.see(read(arrays()))
    found = read_requests("\n".join(kept.lines()).encode(), "requests.jsonl", signature())
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
