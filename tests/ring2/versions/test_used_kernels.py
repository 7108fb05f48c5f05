"""Loads, lookups and changes use the kernels that a configuration compiles before its first lookup, and no others."""

import json
import subprocess
import sys

import numpy as np
import pytest

from hps.ground.rows import decode, encode
from hps.models.writer import write_sparse_model
from hps.tools.cli.tables.sample import sample_vectors
from tests.ring1.versions.test_deployment import DENSE, HASH_MAP, LOOKUP, ROWS, SETS, kernels_document

PROGRAM = """
import json, sys
import numpy as np
import hps
from hps.ground.kernels import numba_kernels
with hps.HPS(json.loads(sys.argv[1])) as server:
    prepared = sorted(one.name for one in numba_kernels._declared.values() if one.ready)
    for count in (10, 300, 20_000):  # the last by several threads
        vectors = server.lookup(np.arange(count) % 1000, "m", "t")
    server.lookup(np.arange(990, 1010, dtype=np.int32), "m", "t", return_found=True)
    for combiner in ("sum", "mean", "sqrtn", "max"):
        for count in (20, 20_000):
            weights = None if combiner == "max" else np.ones(count, np.float32)
            bags = hps.Bags(np.arange(count) % 1100, np.array([0, 7, count]), weights, combiner=combiner, padding_key=3)
            server.lookup_pooled({"t": bags}, "m")
            server.lookup_pooled({"t": hps.Bags((np.arange(count) % 1100).reshape(-1, 2), combiner=combiner)}, "m")
    server.insert(np.arange(2000, 2010), np.ones((10, 16), np.float32), "m", "t")
    server.delete(np.arange(2000, 2005), "m", "t")
    used = sorted(one.name for one in numba_kernels._declared.values() if one.ready)
print(json.dumps([prepared, used, float(vectors.sum())]))
"""


@pytest.mark.parametrize(
    ("settings", "expected"),
    [({}, SETS | HASH_MAP | DENSE | LOOKUP), ({"row_dtype": "bfloat16", "gpucache": False}, SETS | HASH_MAP | DENSE | ROWS)],
)
def test_loads_and_lookups_use_no_other_kernels(tmp_path, settings, expected):
    keys = np.arange(1000)
    write_sparse_model(tmp_path / "t.model", [(keys, sample_vectors(keys, 16))])
    config = kernels_document(tmp_path, {"type": "hash_map"}, maxnum_catfeature_query_per_table_per_sample=[20_000], **settings)
    command = [sys.executable, "-c", PROGRAM, json.dumps(config)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    prepared, used, total = json.loads(done.stdout)
    assert prepared == used, "no lookup waits for a compiler"
    assert {name.partition(":")[2] for name in used} == expected
    row_dtype = settings.get("row_dtype", "float32")
    stored = decode(encode("storing", sample_vectors(np.arange(20_000) % 1000, 16), row_dtype), 16, row_dtype)
    assert total == pytest.approx(float(stored.sum(dtype=np.float64)), rel=1e-3)
