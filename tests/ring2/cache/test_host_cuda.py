"""What Python does for a lookup on a GPU, without one: tests of a GPU that need its CuPy alone, on a stand-in."""

import subprocess
import sys

from hps.testing.waiting import PATIENCE_S

TESTS = {
    "tests/ring1/engine/test_prepared.py": "cuda and not torch and not static and not widened",
    "tests/gpu/test_concatenated.py": "cupy",
    "tests/gpu/test_triton.py": "keys",
    "tests/gpu/test_shared_copies.py": "test",
    "tests/gpu/test_two_devices.py": "current",
}
"""Files, and which of their tests."""


def test_tests_of_a_gpu_pass_on_the_stand_in() -> None:
    chosen = " or ".join(f"({path.rpartition('/')[2]} and {words})" for path, words in TESTS.items())
    options = ["-q", "-rN", "-p", "no:cacheprovider", "-k", chosen]
    command = [sys.executable, "-m", "tests.fakes.host_cuda", *options, *TESTS]
    child = subprocess.run(command, capture_output=True, text=True, timeout=5 * PATIENCE_S, check=False)
    assert child.returncode == 0, child.stdout[-5000:] + child.stderr[-1000:]
