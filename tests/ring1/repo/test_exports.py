import subprocess
import sys

import pytest

import hps
import hps.errors


def test_every_exported_name_is_there():
    for name in hps.__all__:
        assert getattr(hps, name).__name__ == name


def test_every_error_is_exported_drawn_in_the_tree_and_an_hps_error():
    errors = {name for name, value in vars(hps.errors).items() if isinstance(value, type) and issubclass(value, Exception)}
    drawn = {word.strip("()") for word in hps.errors.__doc__.split() if word.endswith("Error")}
    assert errors <= set(hps.__all__) & drawn
    assert all(issubclass(getattr(hps, name), hps.HPSError) for name in errors)


@pytest.mark.parametrize(
    ("module", "more"),
    [
        ("hps", {"numpy", "pydantic", "typer"}),
        ("hps.configuration.load", {"typer"}),
        ("hps.tools.cli.app", {"numpy", "pydantic"}),  # `hps --help` is quick
    ],
)
def test_importing_a_module_loads_nothing_heavy(module: str, more: set[str]) -> None:
    heavy = ["numba", "rocksdict", "redis", "boto3", "cupy", "fastapi", "uvicorn", "prometheus_client", "torch"]
    code = f"import sys, {module}; print(sorted({more.union(heavy)} & set(sys.modules)))"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert shown.stdout == "[]\n"
