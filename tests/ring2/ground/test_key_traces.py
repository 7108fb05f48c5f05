"""A hostile recording of keys, read in a process of its own."""

import resource

import pytest

from hps.errors import ModelFileError
from hps.statistics.key_traces import read_traces
from tests.ring1.ground.test_key_traces import HEAD, KEYS, block
from tests.servers.child_processes import run_alone


def test_a_recording_that_inflates_without_end_takes_bounded_memory(tmp_path):
    with open(tmp_path / "keys", "wb") as file:
        file.write(block(HEAD))
        n = 1 << 20
        one = block({**KEYS, "n": n, "asked": n}, bytes(16 * n))  # 16 MB in 16 kB
        for _ in range(150):
            file.write(one)
    assert (tmp_path / "keys").stat().st_size < 3 << 20
    run_alone(check_bounded_reading, str(tmp_path / "keys"))


def check_bounded_reading(path):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
    with pytest.raises(ModelFileError, match="inflates to more than recorded keys do"):
        read_traces(path)
    most = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10) - before
    assert most < 512 << 20, most
