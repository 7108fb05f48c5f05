"""What numba's compiler does not see, and a reader easily overlooks."""

import ast
import re
from collections.abc import Iterator

from hps.ground.kernels.machine_code import kernel_sources
from tests import ROOT

KERNEL_DECORATORS = {"njit", "kernel"}
SOURCES = {path.relative_to(ROOT).as_posix(): ast.parse(path.read_text()) for path in kernel_sources()}


def kernels() -> Iterator[tuple[str, ast.FunctionDef]]:
    for path, module in SOURCES.items():
        for node in ast.walk(module):
            if isinstance(node, ast.FunctionDef) and any(
                isinstance(name, ast.Name) and name.id in KERNEL_DECORATORS
                for decorator in node.decorator_list
                for name in ast.walk(decorator)
            ):
                yield f"{path}:{node.name}", node


KERNELS = dict(kernels())


def test_kernels_are_found() -> None:
    assert "hps/stores/hash_map/kernels.py:fetch" in KERNELS
    assert len(KERNELS) > 40


def test_every_module_that_uses_the_compiler_is_a_kernel_source() -> None:
    """The name of the directory of compiled kernels is a hash of those sources, so that it holds no stale ones."""
    users = {
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "hps").rglob("*.py")
        if re.search(r"^(from|import) (numba|llvmlite)\b", path.read_text(), re.MULTILINE)
    }
    assert users <= SOURCES.keys()


def test_a_kernel_uses_what_kernel_sources_define() -> None:
    imported = {
        path: {
            alias.asname or alias.name: node.module
            for node in ast.walk(source)
            if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("hps.")
            for alias in node.names
        }
        for path, source in SOURCES.items()
    }
    for name, kernel in KERNELS.items():
        known = imported[name.partition(":")[0]]
        used = {node.id for statement in kernel.body for node in ast.walk(statement) if isinstance(node, ast.Name)}
        files = {known[one].replace(".", "/") + ".py" for one in used & known.keys()}
        assert files <= SOURCES.keys(), f"{name}: move what the kernel uses into a module that defines kernels"


def test_no_kernel_goes_by_the_address_of_an_array_of_its_own() -> None:
    """numba frees an array after the last use of its name: the address that was taken then is somebody else's memory."""
    for name, kernel in KERNELS.items():
        arguments = {argument.arg for argument in ast.walk(kernel.args) if isinstance(argument, ast.arg)}
        addressed = {
            node.value.id
            for node in ast.walk(kernel)
            if isinstance(node, ast.Attribute) and node.attr == "ctypes" and isinstance(node.value, ast.Name)
        }
        assert addressed <= arguments, name
