"""Which numba kernels a configuration compiles before its first lookup: those that it uses, and no others."""

import json
import subprocess
import sys

import numpy as np
import pytest

from hps.configuration.load import load_configuration
from hps.ground.rows import decode, encode
from hps.models.sample import sample_vectors
from hps.models.writer import write_sparse_model
from hps.registry import implementation
from hps.versions.deployment import kernels_of

SETS = {"_add_keys", "_add_hashes", "_contains"}
HASH_MAP = {"fetch", "insert", "delete", "rehash", "retire", "count_by_hash"}
DENSE = {"mark_keys", "count_holes", "show_all_holes"}
EVICTION = {"_plan", "_protect", "_gather", "_evict"}
REDIS = {"group_by_partition", "write_fields", "write_rows", "read_rows"}
CACHE = {"query", "write", "scatter"}
DISTINCT = {"_find_distinct", "_count_parts", "_fill_parts", "_find_distinct_of_parts", "_close_ranks"}
PLACES = {"_index", "_match"}
LOOKUP = CACHE | DISTINCT | PLACES
ROWS = {"encode_rows", "decode_rows"}


def document(tmp_path, volatile, **settings):
    persistent = {"type": "rocks_db", "path": str(tmp_path / "db")}
    model = {
        "model": "m",
        "sparse_files": [str(tmp_path / "t.model")],
        "embedding_table_names": ["t"],
        "embedding_vecsize_per_table": [16],
        "maxnum_catfeature_query_per_table_per_sample": [100],
        "default_value_for_each_table": [0.0],
        "deployed_device_list": [0],
        "max_batch_size": 100,
        "gpucacheper": 0.5,
        "hit_rate_threshold": 1.1,
        **settings,
    }
    return {"supportlonglong": True, "device": "cpu", "volatile_db": volatile, "persistent_db": persistent, "models": [model]}


@pytest.mark.parametrize(
    ("volatile", "settings", "expected"),
    [
        ({"type": "hash_map"}, {}, SETS | HASH_MAP | DENSE | LOOKUP),
        ({"type": "hash_map", "overflow_margin": 1000}, {}, SETS | HASH_MAP | EVICTION | LOOKUP),
        ({"type": "hash_map"}, {"gpucache": False}, SETS | HASH_MAP | DENSE),
        ({"type": "hash_map"}, {"embedding_cache_type": "static"}, SETS | HASH_MAP | DENSE),
        ({"type": "redis_cluster"}, {}, SETS | REDIS | LOOKUP),
        ({"type": "disabled"}, {}, SETS | LOOKUP),
        ({"type": "hash_map"}, {"row_dtype": "int8"}, SETS | HASH_MAP | DENSE | LOOKUP | ROWS),
        ({"type": "hash_map"}, {"row_dtype": "float16", "gpucache": False}, SETS | HASH_MAP | DENSE | ROWS),
    ],
)
def test_a_configuration_has_the_kernels_that_it_uses(tmp_path, volatile, settings, expected):
    configuration = load_configuration(document(tmp_path, volatile, **settings))
    kernels = kernels_of(configuration, implementation("cache", "cpu"))
    assert len(kernels) == len(expected)
    assert {kernel.__name__ for kernel in kernels} == expected


PROGRAM = """
import json, sys
import numpy as np
import hps
from hps.ground import numba_kernels
with hps.HPS(json.loads(sys.argv[1])) as server:
    prepared = sorted(one.name for one in numba_kernels._declared.values() if one.ready)
    for count in (10, 300, 20_000):  # the last by several threads
        vectors = server.lookup(np.arange(count) % 1000, "m", "t")
    used = sorted(one.name for one in numba_kernels._declared.values() if one.ready)
print(json.dumps([prepared, used, float(vectors.sum())]))
"""


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, SETS | HASH_MAP | DENSE | LOOKUP),
        ({"row_dtype": "int8"}, SETS | HASH_MAP | DENSE | LOOKUP | ROWS),
        ({"row_dtype": "bfloat16", "gpucache": False}, SETS | HASH_MAP | DENSE | ROWS),
    ],
)
def test_loads_and_lookups_use_no_other_kernels(tmp_path, settings, expected):
    keys = np.arange(1000)
    write_sparse_model(tmp_path / "t.model", [(keys, sample_vectors(keys, 16))])
    config = document(tmp_path, {"type": "hash_map"}, maxnum_catfeature_query_per_table_per_sample=[20_000], **settings)
    command = [sys.executable, "-c", PROGRAM, json.dumps(config)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    prepared, used, total = json.loads(done.stdout)
    assert prepared == used, "no lookup waits for a compiler"
    assert {name.partition(":")[2] for name in used} == expected
    row_dtype = settings.get("row_dtype", "float32")
    stored = decode(encode("storing", sample_vectors(np.arange(20_000) % 1000, 16), row_dtype), 16, row_dtype)
    assert total == pytest.approx(float(stored.sum(dtype=np.float64)), rel=1e-3)
