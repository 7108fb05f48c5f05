"""Where compiled kernels are kept, and that they are never those of other sources: each test runs a copy of the package."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from hps.ground.kernels.machine_code import BASELINE
from tests.fakes.installation import Installation as Copy

PROGRAM = """
import logging
logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s %(message)s")
import numba, numpy
from hps.tools.cli.tables.sample import sample_vectors
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
def started(tmp_path_factory):
    """An installation that was started once, with what its program printed and logged."""
    installation = Installation(tmp_path_factory.mktemp("started"))
    return installation, *installation.run()


def test_a_cold_start_says_once_that_it_compiles_and_a_warm_one_is_silent(started):
    installation, answer, log = started
    assert len(log) == 2
    logger = "hps.ground.kernels.numba_kernels"
    said = rf"INFO {logger} compiling 1 kernel for this machine in 1 process, which takes about \d+ s; later"
    assert re.match(said, log[0])
    assert any(str(directory) in log[0] for directory in kept(installation.package / "__pycache__"))
    assert "INFO hps.ground.kernels.numba_kernels compiled the kernels in" in log[1]
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


def code_files(installation: Installation) -> list[Path]:
    return sorted(installation.package.glob("__pycache__/hps-kernels-*/*.code"))


def test_a_read_only_installation_brings_what_was_compiled_ahead(installation, tmp_path):
    assert len(installation.run()[1]) == 2
    (ahead,) = kept(installation.package / "__pycache__")
    moved = tmp_path / "elsewhere" / "hps"  # nothing depends on the path or on time stamps
    shutil.copytree(installation.package, moved, copy_function=shutil.copyfile)
    shutil.rmtree(installation.package)
    assert (moved / "__pycache__" / ahead.name).is_dir()
    environment = {"PYTHONPATH": str(moved.parent), "NUMBA_CACHE_DIR": "/dev/null/nowhere"}
    assert installation.run(**environment)[1] == [], "neither compiled nor warned of what cannot be written"


BASELINE_PROGRAM = "from hps.ground.kernels import machine_code\nmachine_code.choose_baseline()\n" + PROGRAM
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
