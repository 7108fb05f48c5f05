"""CUDA kernels compiled ahead, by NVRTC alone: no GPU is needed, and a process with one finds them."""

import subprocess
import sys

import pytest

from hps.ground.kernels import machine_code
from hps.ground.kernels.compilations import COMPILATIONS
from hps.testing.waiting import PATIENCE_S

pytest.importorskip("cupy", reason="NVRTC is called through CuPy")
compiler = pytest.importorskip("hps.cache.cuda.compiler", reason="NVRTC is not installed")
from hps.cache.cuda import kernels  # noqa: E402
from hps.errors import InvalidInputError  # noqa: E402


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch):
    """An empty directory for machine code, and no other."""
    monkeypatch.setattr(machine_code, "_places", lambda: iter([tmp_path]))
    monkeypatch.setattr(machine_code, "directory", lambda: tmp_path)
    return tmp_path


def compiled() -> int:
    return COMPILATIONS.all().get("cuda", (0, 0.0))[0]


ERASE = kernels.erase_kernel()


def code_of(kernel=ERASE, architecture="90"):
    return compiler.machine_code_of(kernel.code, kernel.name, architecture)


def test_code_is_compiled_once(place):
    before = compiled()
    code, anew = code_of()
    assert (code[:4], anew, compiled()) == (b"\x7fELF", True, before + 1)
    assert code_of() == (code, False)
    assert compiled() == before + 1
    assert len(list(place.iterdir())) == 1


def test_code_belongs_to_source_architecture_options_and_compiler(place, monkeypatch):
    code_of()
    assert code_of(architecture="100")[1]
    assert code_of(kernels.dump_kernel())[1]
    other = kernels.Kernel("erase", "erase", (("ANYTHING", 1),))
    assert code_of(other)[1]
    monkeypatch.setattr(compiler, "_OPTIONS", (*compiler._OPTIONS, "-lineinfo"))
    assert code_of()[1]
    real = compiler.nvrtc
    monkeypatch.setattr(
        compiler,
        "nvrtc",
        type("Later", (), {**{n: getattr(real, n) for n in dir(real)}, "getVersion": staticmethod(lambda: (99, 0))}),
    )
    assert code_of()[1]
    assert len(list(place.iterdir())) == 6


@pytest.mark.parametrize("damage", ["cut", "changed", "foreign"])
def test_a_corrupt_or_foreign_file_is_refused_and_replaced(place, damage):
    code, _ = code_of()
    (path,) = place.iterdir()
    whole = path.read_bytes()
    if damage == "foreign":
        code_of(kernels.dump_kernel())
        (other,) = set(place.iterdir()) - {path}
        path.write_bytes(other.read_bytes())
    else:
        path.write_bytes(whole[:-1] if damage == "cut" else whole[:500] + bytes([whole[500] ^ 1]) + whole[501:])
    assert code_of() == (code, True)
    assert path.read_bytes() == whole
    assert code_of() == (code, False)


def test_an_architecture_that_nvrtc_does_not_know_gets_ptx():
    code, _ = code_of(architecture="999")
    assert b".target sm_" in code


def test_ahead_compiles_what_a_models_tables_need():
    tables = [kernels.Rows(8), kernels.Rows(16, 3)]
    needed = [*kernels.lookup_kernels(tables), *kernels.link_kernels(tables), *kernels.modification_kernels(tables)]
    count = len(set(needed))
    assert compiler.count_kept(needed, "90") == (count, 0)
    assert compiler.compile_ahead(needed, "90") == (count, 0)
    assert compiler.count_kept(needed, "90") == (count, count)
    assert compiler.count_kept(needed, "80") == (count, 0)
    assert compiler.compile_ahead(needed, "90") == (0, count)
    with pytest.raises(InvalidInputError, match="got architecture sm_12, expected one of sm_"):
        compiler.compile_ahead(needed, "12")


def test_the_kernels_compiled_ahead_are_those_of_a_cache():
    alone, both = [kernels.Rows(32, 3)], [kernels.Rows(32, 3), kernels.Rows(7)]
    assert kernels.query_kernel(kernels.Shape.of(alone, kernels.ALIGNED)) in kernels.lookup_kernels(alone)
    assert kernels.query_kernel(kernels.Shape.of(both, kernels.ALIGNED)) in kernels.lookup_kernels(both)
    assert {kernel.name for kernel in kernels.link_kernels(alone)} == set(kernels.ANSWERS)


def test_the_command_needs_no_gpu(tmp_path):
    command = [sys.executable, "-c", "import hps.cache.cuda.cache; print('imported')"]
    assert subprocess.run(command, capture_output=True, text=True, check=False, timeout=PATIENCE_S).stdout == "imported\n"
