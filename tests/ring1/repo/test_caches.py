"""No client fills a cache: those that are not bounded in bytes have a reason why their entries are few."""

import ast
import re
from collections.abc import Iterator

import pytest

from tests import ROOT

SMALL = {
    "hps/cache/cuda/cache.py::_device_name": "one for each device",
    "hps/cache/cuda/compiler.py::report_compiling": "one for each kind of GPU",
    "hps/cache/cuda/device.py::kernels_of": "one for each device",
    "hps/cache/cuda/graphs.py::_libraries": "without arguments",
    "hps/cache/cuda/kernels.py::_directory": "without arguments",
    "hps/cache/cuda/kernels.py::source": "one for each source file of kernels",
    "hps/cache/cuda/kernels.py::unit_of": "one for each width of a table and alignment below 16",
    "hps/cache/cuda/queries.py::self.answer_of": "1,024 choices among the tables of a deployment, and it ends with that",
    "hps/cache/cuda/queries.py::self.pool": "1,024 choices among the shapes of a deployment, and it ends with that",
    "hps/cache/cuda/queries.py::self.query_of": "1,024 choices among the tables of a deployment, and it ends with that",
    "hps/cache/cuda/queries.py::self.scatter": "1,024 choices among the shapes of a deployment, and it ends with that",
    "hps/cache/cuda/spread_memory.py::_driver": "without arguments",
    "hps/models/files.py::_shift_by": "64 sizes of chunks of model files",
    "hps/client/routing.py::_seed": "one for each server that the caller names",
    "hps/networks/torch_networks.py::_capture_stream": "one for each device",
    "hps/stores/redis/requests.py::_framed": "16 marks, which the program makes",
    "hps/stores/redis/requests.py::_framed_size": "16 sizes of rows",
    "hps/stores/redis/requests.py::_packed": "4,096 commands with names of tables and partitions and without keys or values",
    "hps/ground/kernels/machine_code.py::_name": "without arguments",
    "hps/ground/kernels/machine_code.py::_record_use": "one for each directory of machine code",
    "hps/ground/kernels/machine_code.py::directory": "without arguments",
    "hps/ground/registry.py::_entry_points": "one for each kind of part and sys.path",
    "hps/serve/http/authorization.py::is_loopback": "256 addresses, which are those of sockets and never text of a request",
    "hps/serve/protocol/score_rows.py::_prefixes": "16 networks, whose input names the model has",
    "hps/statistics/prometheus.py::_label_text": "labels that are exported anyhow, of names in the configuration",
    "hps/torch/operators.py::_features_of": "layers of the caller's own module",
    "hps/updates/framing.py::_hugectr_row": "one for each width of a table that is checked before",
}
"""By path and name, why the arguments of a cache of `functools` are few."""


def caches_in(source: str) -> Iterator[str]:
    """Yield the names of what `functools.cache` or `functools.lru_cache` decorates or returns."""
    tree = ast.parse(source)
    known = {"functools.cache", "functools.lru_cache"}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module == "functools":
            known |= {alias.asname or alias.name for alias in node.names if alias.name in ("cache", "lru_cache")}
        elif isinstance(node, ast.Import):
            known |= {
                f"{alias.asname}.{end}" for alias in node.names if alias.name == "functools" for end in ("cache", "lru_cache")
            }
    decorators = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            for one in node.decorator_list:
                maker = one.func if isinstance(one, ast.Call) else one
                decorators |= set(ast.walk(one))
                if ast.unparse(maker) in known:
                    yield node.name
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign | ast.AnnAssign | ast.NamedExpr) and node.value is not None:
            makers = [one for one in ast.walk(node.value) if isinstance(one, ast.Name | ast.Attribute)]
            if any(ast.unparse(maker) in known for maker in makers):
                decorators |= set(makers)
                yield ast.unparse(node.targets[0] if isinstance(node, ast.Assign) else node.target)
    for node in ast.walk(tree):  # handed on, returned, or called in place
        if isinstance(node, ast.Name | ast.Attribute) and node not in decorators and ast.unparse(node) in known:
            yield f"line {node.lineno}"


def test_every_cache_without_a_bound_in_bytes_has_a_reason() -> None:
    found = set()
    for folder in ("hps", "hps_torch"):
        for path in (ROOT / folder).rglob("*.py"):
            if re.search(r"lru_cache|functools.*\bcache\b", source := path.read_text("utf-8")):  # parsing all takes seconds
                found |= {f"{path.relative_to(ROOT).as_posix()}::{name}" for name in caches_in(source)}
    new, gone = sorted(found - SMALL.keys()), sorted(SMALL.keys() - found)
    assert not new, (
        f"use hps.ground.memory.bounded_cache where clients choose the arguments, and say in SMALL why they are few: {new}"
    )
    assert not gone, f"these caches are gone: {gone}"


FORMS = {
    "a decorator": ("from functools import cache\n@cache\ndef f(): ...", ["f"]),
    "with a size": ("from functools import lru_cache as kept\n@kept(9)\ndef f(): ...", ["f"]),
    "by the module": ("import functools\n@functools.cache\ndef f(): ...", ["f"]),
    "another name of it": ("import functools as ft\nf = ft.lru_cache(9)(g)", ["f"]),
    "an attribute": ("from functools import lru_cache\nself.f = lru_cache(9)(g)", ["self.f"]),
    "handed on": ("from functools import cache\nuse(cache(g))", ["line 2"]),
    "a property": ("from functools import cached_property\n@cached_property\ndef f(self): ...", []),
    "another cache": ("from x import cache\n@cache\ndef f(): ...", []),
}


@pytest.mark.parametrize("form", FORMS)
def test_caches_are_found(form: str) -> None:
    source, names = FORMS[form]
    assert list(caches_in(source)) == names
