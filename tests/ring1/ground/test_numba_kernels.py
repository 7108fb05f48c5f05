"""Where compiled kernels are kept, and that they are never those of other sources: each test runs a copy of the package."""

import os
import re
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from numba import int64, void

from hps.ground.machine_code import BASELINE
from hps.ground.numba_kernels import compile_kernels, kernel, read_only
from tests.fakes.installation import Installation as Copy

PROGRAM = """
import logging
logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s %(message)s")
import numba, numpy
from hps.models.sample import sample_vectors
print(sample_vectors(numpy.array([7]), 1)[0, 0], repr(numba.config.CACHE_DIR))
"""


class Installation(Copy):
    """A copy that runs one kernel."""

    def start(self, program: str = PROGRAM, **environment: str) -> subprocess.Popen:
        return super().start(program, **environment)

    def run(self, program: str = PROGRAM, **environment: str) -> tuple[str, list[str]]:
        return super().run(program, **environment)


@pytest.fixture
def installation(tmp_path):
    return Installation(tmp_path)


def kept(directory: Path) -> list[Path]:
    return sorted(directory.glob("hps-kernels-*"))


@pytest.fixture(scope="module")
def warm(tmp_path_factory):
    """Another one, whose sources stay as they are."""
    installation = Installation(tmp_path_factory.mktemp("warm"))
    return installation, *installation.run()


@pytest.fixture(scope="module")
def started(tmp_path_factory):
    """An installation that was started once, with what its program printed and logged."""
    installation = Installation(tmp_path_factory.mktemp("started"))
    return installation, *installation.run()


def test_a_cold_start_says_once_that_it_compiles_and_a_warm_one_is_silent(started):
    installation, answer, log = started
    assert len(log) == 2
    said = r"INFO hps.ground.numba_kernels compiling 1 kernel for this machine in 1 process, which takes about \d+ s; later"
    assert re.match(said, log[0])
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
    assert list(tmp_path.glob("named/hps-kernels-*/*.code"))
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
    assert f"WARNING hps.ground.machine_code cannot keep compiled kernels in {unwritable}; they go to {private}" in log[0]
    assert "Set NUMBA_CACHE_DIR to a directory that this user can write to" in log[0]
    assert private.stat().st_mode & 0o777 == 0o700
    assert installation.run(**options) == (answer, []), "the second start is warm"


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
        for done in [pool.submit(compile_kernels, double) for _ in range(8)]:
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


def test_the_first_call_compiles_the_declared_signature():
    @kernel(int64, read_only(int64[::1]))
    def total(values):
        found = 0
        for i in range(values.size):
            found += values[i]
        return found

    values = np.arange(4)  # writable: what numba would compile for by itself
    assert total(values) == 6
    values.flags.writeable = False
    assert total(values) == 6
    assert len(total.signatures) == 1
    with pytest.raises(TypeError):
        total(values.astype(np.float32))


def code_files(installation: Installation) -> list[Path]:
    return sorted(installation.package.glob("__pycache__/hps-kernels-*/*.code"))


@pytest.mark.parametrize("damage", ["cut", "changed", "empty", "foreign", "of another place"])
def test_a_file_that_is_not_this_kernels_whole_code_is_compiled_anew(warm, damage):
    installation, answer, _ = warm
    (path,) = code_files(installation)
    whole = path.read_bytes()
    damaged = {
        "cut": whole[:-1],
        "changed": whole[:1000] + bytes([whole[1000] ^ 1]) + whole[1001:],
        "empty": b"",
        "foreign": foreign(installation, path.name, key=False),
        "of another place": foreign(installation, path.name, key=True),
    }
    path.write_bytes(damaged[damage])
    after, log = installation.run()
    assert after == answer
    assert len(log) == 2, "it was compiled"
    assert installation.run() == (answer, []), "and replaced"


def foreign(installation: Installation, name: str, key: bool) -> bytes:
    """Code under another kernel's key, or under this key by other sources."""
    program = "from hps.ground import machine_code as m; m.write({name!r}, {key!r}, b'foreign'); print(m.directory())"
    if key:
        hashing = installation.package / "ground/hashing.py"
        source = hashing.read_text()
        hashing.write_text(source + "# changed\n")
    environment = installation.environment
    command = [sys.executable, "-c", program.format(name=name, key="another kernel")]
    done = subprocess.run(command, env=environment, check=True, capture_output=True, text=True, timeout=60)
    if key:
        hashing.write_text(source)
    return (Path(done.stdout.strip()) / name).read_bytes()


def test_a_read_only_installation_brings_what_was_compiled_ahead(installation, tmp_path):
    assert len(installation.run()[1]) == 2
    (ahead,) = kept(installation.package / "__pycache__")
    moved = tmp_path / "elsewhere" / "hps"  # nothing depends on the path or on time stamps
    shutil.copytree(installation.package, moved, copy_function=shutil.copyfile)
    shutil.rmtree(installation.package)
    assert (moved / "__pycache__" / ahead.name).is_dir()
    environment = {"PYTHONPATH": str(moved.parent), "NUMBA_CACHE_DIR": "/dev/null/nowhere"}
    assert installation.run(**environment)[1] == [], "neither compiled nor warned of what cannot be written"


def test_what_the_user_compiled_precedes_what_the_installation_brings(installation, tmp_path):
    installation.run()
    (brought,) = code_files(installation)
    own = tmp_path / "own" / brought.parent.name
    own.mkdir(parents=True)
    shutil.copy(brought, own)
    brought.write_bytes(b"")
    assert installation.run(NUMBA_CACHE_DIR=str(own.parent))[1] == []


BASELINE_PROGRAM = "from hps.ground import machine_code\nmachine_code.choose_baseline()\n" + PROGRAM
NATIVE_PROGRAM = "from hps.ground import machine_code\nmachine_code.refuse_baseline()\n" + PROGRAM
OLD_PROGRAM = (
    "import llvmlite.binding as llvm\nfeatures = llvm.get_host_cpu_features()\nfeatures['avx2'] = False\n"
    "llvm.get_host_cpu_features = lambda: features\n" + PROGRAM
)


def test_code_for_the_baseline_is_loaded_where_there_is_none_for_this_processor(installation):
    answer, log = installation.run(BASELINE_PROGRAM)
    assert len(log) == 2
    assert [path.name.rpartition("-cpython")[2].endswith(f"-{BASELINE[0]}.code") for path in code_files(installation)] == [True]
    assert installation.run() == (answer, [])
    assert len(installation.run(OLD_PROGRAM)[1]) == 2, "a processor without its instructions compiles"
    assert len(code_files(installation)) == 2
    code_files(installation)[0].unlink()
    code_files(installation)[0].unlink()
    installation.run(BASELINE_PROGRAM)
    assert len(installation.run(NATIVE_PROGRAM)[1]) == 2, "`hps compile` compiles for this processor"
