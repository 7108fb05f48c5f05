"""What Python does for a lookup on a GPU, without one: tests of a GPU that need its CuPy alone, on a stand-in."""

import subprocess
import sys

import pytest

TESTS = {
    "tests/ring2/lookup/test_prepared.py": "cuda and not torch and not static",
    "tests/gpu/test_concatenated.py": "cupy",
    "tests/gpu/test_triton.py": "keys",
    "tests/gpu/test_shared_copies.py": "",
    "tests/gpu/test_two_devices.py": "current",
}


@pytest.mark.parametrize("path", TESTS)
def test_tests_of_a_gpu_pass_on_the_stand_in(path: str) -> None:
    command = [sys.executable, "-m", "tests.fakes.host_cuda", "-q", "-p", "no:cacheprovider", path, "-k", TESTS[path]]
    child = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert child.returncode == 0, child.stdout[-5000:] + child.stderr[-1000:]
