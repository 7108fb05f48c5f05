"""Where compiled kernels are kept, and that they are never those of other sources: each test runs a copy of the package."""

import os
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from numba import int64, void

import hps
from hps.ground.numba_kernels import compile_kernels, kernel, read_only

PROGRAM = """
import logging
logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s %(message)s")
import numba, numpy
from hps.models.sample import sample_vectors
print(sample_vectors(numpy.array([7]), 1)[0, 0], repr(numba.config.CACHE_DIR))
"""


class Installation:
    """A copy of the package, in a process of which kernels can be compiled."""

    def __init__(self, directory: Path):
        self.package = directory / "site" / "hps"
        self.temporary = directory / "tmp"
        self.temporary.mkdir()
        self.environment = {
            "PATH": os.environ["PATH"],
            "PYTHONPATH": str(self.package.parent),
            "HOME": "/dev/null",
            "TMPDIR": str(self.temporary),
        }
        shutil.copytree(Path(hps.__file__).parent, self.package, ignore=shutil.ignore_patterns("__pycache__"))

    def start(self, **environment: str) -> subprocess.Popen:
        command = [sys.executable, "-c", PROGRAM]
        environment = self.environment | environment
        return subprocess.Popen(
            command, env=environment, cwd=self.temporary, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )

    def run(self, **environment: str) -> tuple[str, list[str]]:
        """The program's output, and the lines of its log."""
        return self.result(self.start(**environment))

    @staticmethod
    def result(process: subprocess.Popen) -> tuple[str, list[str]]:
        try:
            output, log = process.communicate(timeout=120)
        finally:
            process.kill()
        assert process.returncode == 0, log
        return output, log.splitlines()

    def make_unwritable(self) -> None:
        """Nothing can be made below a file, not even by root."""
        shutil.rmtree(self.package / "__pycache__", ignore_errors=True)
        (self.package / "__pycache__").touch()


@pytest.fixture
def installation(tmp_path):
    return Installation(tmp_path)


def kept(directory: Path) -> list[Path]:
    return sorted(directory.glob("hps-kernels-*"))


@pytest.fixture(scope="module")
def started(tmp_path_factory):
    """An installation that was started once, with what its program printed and logged."""
    installation = Installation(tmp_path_factory.mktemp("started"))
    return installation, *installation.run()


def test_a_cold_start_says_once_that_it_compiles_and_a_warm_one_is_silent(started):
    installation, answer, log = started
    assert len(log) == 2
    assert "INFO hps.ground.numba_kernels compiling kernels for this machine, which takes about 1 s" in log[0]
    assert any(str(directory) in log[0] for directory in kept(installation.package / "__pycache__"))
    assert "INFO hps.ground.numba_kernels compiled the kernels in" in log[1]
    assert installation.run() == (answer, [])


def test_an_edit_of_what_a_kernel_inlines_is_compiled(started):
    installation, before, _ = started
    hashing = installation.package / "ground/hashing.py"
    source = hashing.read_text()
    hashing.write_text(source.replace("0xA24BAED4963EE407", "0xA24BAED4963EE409"))
    after, log = installation.run()
    assert after != before
    assert len(log) == 2
    hashing.write_text(source)
    assert installation.run() == (before, []), "the machine code of the old sources is still there"


def test_an_edit_elsewhere_compiles_nothing(started):
    installation, answer, _ = started
    with (installation.package / "errors.py").open("a") as file:
        file.write("\n# changed\n")
    assert installation.run() == (answer, [])


def test_kernels_go_below_the_directory_that_the_user_names(installation, tmp_path):
    output, _ = installation.run(NUMBA_CACHE_DIR=str(tmp_path / "named"))
    assert list(tmp_path.glob("named/hps-kernels-*/**/*.nbi"))
    assert not kept(installation.package / "__pycache__")
    assert output.split()[1] == repr(str(tmp_path / "named")), "the user's own kernels go where they went before"


def test_a_user_without_write_access_keeps_kernels_at_home(installation, tmp_path):
    installation.make_unwritable()
    _, log = installation.run(HOME=str(tmp_path))
    assert [line.split()[0] for line in log] == ["INFO", "INFO"]
    assert kept(tmp_path / ".cache" / "hps")


@pytest.mark.parametrize("named", [False, True])
def test_a_read_only_installation_works_and_says_what_to_set(installation, named):
    installation.make_unwritable()
    options = {"NUMBA_CACHE_DIR": "/dev/null/named"} if named else {}
    answer, log = installation.run(**options)
    (private,) = kept(installation.temporary)
    unwritable = "/dev/null/named" if named else f"{installation.package}/__pycache__ or /dev/null/.cache/hps"
    assert f"WARNING hps.ground.numba_kernels cannot keep compiled kernels in {unwritable}; they go to {private}" in log[0]
    assert "Set NUMBA_CACHE_DIR to a directory that this user can write to" in log[0]
    assert private.stat().st_mode & 0o777 == 0o700
    assert installation.run(**options) == (answer, log[:1]), "the second start is warm"


def test_a_temporary_directory_that_others_may_write_to_is_not_trusted(installation):
    installation.make_unwritable()
    shared = installation.temporary / f"hps-kernels-{os.getuid()}"
    shared.mkdir()
    shared.chmod(0o777)
    _, log = installation.run()
    assert "every start compiles them again" in log[0]
    assert len(log) == 3
    assert not list(shared.iterdir())


@pytest.mark.slow
def test_two_processes_compile_at_once(installation):
    both = [installation.start(), installation.start()]
    (first, _), (second, _) = [installation.result(process) for process in both]
    assert first == second
    assert installation.run() == (first, [])


def test_the_machine_code_of_older_sources_is_bounded(installation):
    parent = installation.package / "__pycache__"
    old = [parent / f"hps-kernels-{number}" for number in range(6)]
    now = time.time()
    for age, directory in enumerate(old):
        (directory / "hps_0").mkdir(parents=True)
        os.utime(directory, (now - 86400 - age, now - 86400 - age))
    just_used = parent / "hps-kernels-used"
    just_used.mkdir()
    installation.run()
    left = kept(parent)
    assert just_used in left
    assert set(left) & set(old) == set(old[:3])
    assert len(left) == 5


def test_a_compiled_kernel_takes_one_signature_from_any_number_of_threads():
    @kernel(void, read_only(int64[::1]), int64[::1])
    def double(values, out):
        for i in range(values.size):
            out[i] = 2 * values[i]

    with ThreadPoolExecutor(4) as pool:
        for done in [pool.submit(compile_kernels) for _ in range(8)]:
            done.result(timeout=60)
    assert len(double.signatures) == 1
    values, out = np.arange(3), np.zeros(3, np.int64)
    double(values, out)
    values.flags.writeable = False
    double(values, out)
    assert out.tolist() == [0, 2, 4]
    for wrong in (np.zeros(3, np.int32), np.zeros(6, np.int64)[::2], np.zeros((3, 1), np.int64)):
        with pytest.raises(TypeError):
            double(values, wrong)
