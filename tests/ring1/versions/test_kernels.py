"""Which numba kernels a configuration compiles before its first lookup: those that it uses, and no others."""

import pytest

from hps.configuration.load import load_configuration
from hps.registry import implementation
from hps.versions.deployment import kernels_of
from tests.servers.running_service import document_of, model_of

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
    settings = {"maxnum_catfeature_query_per_table_per_sample": [100], "max_batch_size": 100, "gpucacheper": 0.5} | settings
    model = model_of("m", [tmp_path / "t.model"], {"t": 16}, hit_rate_threshold=1.1, **settings)
    return document_of(model, persistent=tmp_path / "db", volatile_db=volatile)


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
