"""What numba's compiler does not see, and a reader easily overlooks."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
KERNEL_DECORATORS = {"njit", "kernel"}


def kernels() -> Iterator[tuple[str, ast.FunctionDef]]:
    for path in sorted((ROOT / "hps").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef) and any(
                isinstance(name, ast.Name) and name.id in KERNEL_DECORATORS
                for decorator in node.decorator_list
                for name in ast.walk(decorator)
            ):
                yield f"{path.relative_to(ROOT)}:{node.name}", node


KERNELS = dict(kernels())


def test_kernels_are_found() -> None:
    assert "hps/databases/hash_map/fetch.py:fetch" in KERNELS
    assert len(KERNELS) > 40


@pytest.mark.parametrize("name", KERNELS)
def test_no_kernel_goes_by_the_address_of_an_array_of_its_own(name: str) -> None:
    """numba frees an array after the last use of its name: the address that was taken then is somebody else's memory."""
    arguments = {argument.arg for argument in ast.walk(KERNELS[name].args) if isinstance(argument, ast.arg)}
    addressed = {
        node.value.id
        for node in ast.walk(KERNELS[name])
        if isinstance(node, ast.Attribute) and node.attr == "ctypes" and isinstance(node.value, ast.Name)
    }
    assert addressed <= arguments
