"""HugeCTR's Python structs: their keywords, and what is made and said of them."""

import copy
import inspect
import json
import logging
import os
import tempfile
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hps import HPS, InvalidInputError, write_sparse_model
from hps.configuration.hugectr_structs import (
    DatabaseOverflowPolicy_t,
    DatabaseType_t,
    EmbeddingCacheType_t,
    InferenceParams,
    ParameterServerConfig,
    PersistentDatabaseParams,
    UpdateSourceParams,
    UpdateSourceType_t,
    VolatileDatabaseParams,
)
from hps.configuration.load import load_configuration
from hps.errors import ConfigError


def inference_params(**changes: Any) -> InferenceParams:
    files = ["models/user", "models/item"]
    named: dict[str, Any] = {"model_name": "dcn", "max_batchsize": 64, "hit_rate_threshold": 0.8, "dense_model_file": ""}
    named |= {"use_gpu_embedding_cache": True, "cache_size_percentage": 0.5, "i64_input_key": True}
    return InferenceParams(**{"sparse_model_files": files, **named, **changes})


def server_config(*params: InferenceParams, **changes: Any) -> ParameterServerConfig:
    params = params or (inference_params(),)
    arguments: dict[str, Any] = {
        "emb_table_name": {param.model_name: ["user", "item"] for param in params},
        "embedding_vec_size": {param.model_name: [16, 32] for param in params},
        "max_feature_num_per_sample_per_emb_table": {param.model_name: [1, 50] for param in params},
        "inference_params_array": list(params),
    }
    return ParameterServerConfig(**{**arguments, **changes})


def problems(config: ParameterServerConfig) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load_configuration(config)
    return caught.value.problems


ARGUMENTS = {
    ParameterServerConfig: "emb_table_name embedding_vec_size max_feature_num_per_sample_per_emb_table "
    "inference_params_array volatile_db persistent_db update_source",
    VolatileDatabaseParams: "type=parallel_hash_map address=127.0.0.1:7000 user_name=default password= num_partitions "
    "allocation_rate=268435456 shared_memory_size=17179869184 shared_memory_name=hctr_mp_hash_map_database "
    "shared_memory_auto_remove=True num_node_connections=5 max_batch_size=65536 enable_tls=False "
    "tls_ca_certificate=cacertbundle.crt tls_client_certificate=client_cert.pem tls_client_key=client_key.pem "
    "tls_server_name_identification=redis.localhost overflow_margin=18446744073709551615 overflow_policy=evict_random "
    "overflow_resolution_target=0.8 initialize_after_startup=True initial_cache_rate=1.0 cache_missed_embeddings=False "
    "update_filters=['^hps_.+$']",
    PersistentDatabaseParams: "backend=disabled path num_threads=16 read_only=False max_batch_size=65536 "
    "initialize_after_startup=True update_filters=['^hps_.+$']",
    UpdateSourceParams: "type=null brokers=127.0.0.1:9092 metadata_refresh_interval_ms=30000 receive_buffer_size=262144 "
    "poll_timeout_ms=500 max_batch_size=8192 failure_backoff_ms=50 max_commit_interval=32",
    InferenceParams: "model_name max_batchsize hit_rate_threshold dense_model_file sparse_model_files device_id=0 "
    "use_gpu_embedding_cache cache_size_percentage i64_input_key use_mixed_precision=False scaler=1.0 "
    "use_algorithm_search=True use_cuda_graph=True number_of_worker_buffers_in_pool=2 number_of_refresh_buffers_in_pool=1 "
    "thread_pool_size=16 cache_refresh_percentage_per_iteration=0.0 deployed_devices=[0] default_value_for_each_table=[0.0] "
    "volatile_db persistent_db update_source maxnum_des_feature_per_sample=26 refresh_delay=0.0 refresh_interval=0.0 "
    "maxnum_catfeature_query_per_table_per_sample=[26] embedding_vecsize_per_table=[128] embedding_table_names=[''] "
    "network_file= label_dim=1 slot_num=10 non_trainable_params_file= use_static_table=False embedding_cache_type=Dynamic "
    "use_context_stream=True fuse_embedding_table=False use_hctr_cache_implementation=True init_ec=True "
    "enable_pagelock=False fp8_quant=False",
}
"""The structs' arguments in HugeCTR's order with its defaults; without one that is required or depends on something else."""


OLDER = {
    VolatileDatabaseParams: "max_get_batch_size max_set_batch_size refresh_time_after_fetch",
    PersistentDatabaseParams: "max_get_batch_size max_set_batch_size",
}
"""Arguments of HugeCTR up to 4.2, which later ones have replaced."""
METHODS = {
    "lookup": "h_keys model_name table_id device_id=0",
    "lookup_fromdlpack": "keys out_tensor model_name table_id device_id=0",
}


@pytest.mark.parametrize("struct", ARGUMENTS)
def test_keywords_their_order_and_defaults_are_hugectrs(struct: type) -> None:
    arguments = [argument.partition("=") for argument in ARGUMENTS[struct].split()]
    parameters = inspect.signature(struct).parameters.values()
    assert [parameter.name for parameter in parameters if parameter.kind is not parameter.KEYWORD_ONLY] == [
        name for name, _, _ in arguments
    ]
    assert [parameter.name for parameter in parameters if parameter.kind is parameter.KEYWORD_ONLY] == OLDER.get(
        struct, ""
    ).split()
    made: dict[type, Any] = {InferenceParams: inference_params(), ParameterServerConfig: server_config()}
    one = made.get(struct) or struct()
    for name, equals, default in arguments:
        if equals:
            value = getattr(one, name)
            assert (value.name if isinstance(value, Enum) else str(value)) == default, name


@pytest.mark.parametrize("method", METHODS)
def test_lookups_have_hugectrs_keywords_in_its_order(method: str) -> None:
    _, *parameters = inspect.signature(getattr(HPS, method)).parameters.values()
    written = [
        parameter.name if parameter.default is parameter.empty else f"{parameter.name}={parameter.default}"
        for parameter in parameters
        if parameter.kind is not parameter.KEYWORD_ONLY
    ]
    assert written == METHODS[method].split()


def test_a_parameter_server_is_opened_by_hugectrs_keywords(tmp_path: Path) -> None:
    write_sparse_model(tmp_path / "user", (np.arange(3), np.ones((3, 4), np.float32)))
    tables = {"emb_table_name": {"dcn": ["user"]}, "embedding_vec_size": {"dcn": [4]}}
    params = inference_params(sparse_model_files=[str(tmp_path / "user")])
    config = server_config(params, **tables, max_feature_num_per_sample_per_emb_table={"dcn": [8]})
    document = load_configuration(config).model_dump(mode="json")
    (tmp_path / "ps.json").write_text(json.dumps({"device": "cpu", "models": document["models"]}))
    for keywords in ({"ps_config": config}, {"hps_json_config_file": str(tmp_path / "ps.json")}):
        with HPS(**keywords) as server:
            assert server.lookup(h_keys=[1, 2], model_name="dcn", table_id=0, device_id=0).tolist() == [[1] * 4] * 2
    for arguments, got in (((), "no configuration"), ((config, config), "2 configurations")):
        with pytest.raises(InvalidInputError, match=f"got {got}, expected one of config, ps_config and hps_json_config_file"):
            HPS(*arguments[:1], **({"ps_config": config} if arguments else {}))


def test_sizes_of_older_structs_are_read() -> None:
    volatile = VolatileDatabaseParams(max_get_batch_size=400, max_set_batch_size=200, refresh_time_after_fetch=True)
    persistent = PersistentDatabaseParams(max_get_batch_size=300)
    configuration = load_configuration(server_config(volatile_db=volatile, persistent_db=persistent))
    assert (configuration.volatile_db.max_batch_size, configuration.persistent_db.max_batch_size) == (200, 300)


@pytest.mark.parametrize(
    ("given", "read", "warns"),
    [
        ([0.0], (0.0, 0.0), ""),
        ([], (0.0, 0.0), ""),
        ([0.5], (0.5, 0.5), "has 1 value for 2 sparse_model_files; every table has the first, 0.5, as in HugeCTR; write one"),
        ([0.5, 1.0, 2.0], (0.5, 0.5), "has 3 values for 2 sparse_model_files; every table has the first, 0.5, as in HugeCTR"),
        ([0.5, 1.0], (0.5, 1.0), ""),
    ],
)
def test_every_table_of_a_struct_has_the_first_of_too_few_or_too_many_default_values(
    given: list[float], read: tuple[float, ...], warns: str, caplog: pytest.LogCaptureFixture
) -> None:
    model = load_configuration(server_config(inference_params(default_value_for_each_table=given))).models[0]
    assert model.default_value_for_each_table == read
    assert caplog.text.count("default_value_for_each_table") == bool(warns)
    assert warns in caplog.text


def test_defaults_that_depend_on_something_else_are_hugectrs() -> None:
    assert VolatileDatabaseParams().num_partitions == min(16, os.cpu_count() or 1)
    assert PersistentDatabaseParams().path == str(Path(tempfile.gettempdir()) / "rocksdb")
    for one in (inference_params(), server_config()):
        databases = (VolatileDatabaseParams(), PersistentDatabaseParams(), UpdateSourceParams())
        assert (one.volatile_db, one.persistent_db, one.update_source) == databases


@pytest.mark.parametrize(
    ("enum", "members"),
    [
        (DatabaseType_t, "disabled hash_map parallel_hash_map multi_process_hash_map redis_cluster rocks_db"),
        (DatabaseOverflowPolicy_t, "evict_random evict_least_used evict_oldest"),
        (UpdateSourceType_t, "null kafka_message_queue"),
        (EmbeddingCacheType_t, "Dynamic UVM Static stochastic"),
    ],
)
def test_enum_members_are_spelled_as_in_hugectr(enum: type[Enum], members: str) -> None:
    assert [member.name for member in enum] == members.split()


def test_a_missing_argument_is_a_type_error() -> None:
    with pytest.raises(TypeError, match="use_gpu_embedding_cache, cache_size_percentage, i64_input_key"):
        InferenceParams("dcn", 64, 0.8, "", ["models/user"])


def test_no_two_structs_share_a_list() -> None:
    one, other = inference_params(), inference_params()
    one.deployed_devices.append(1)
    one.volatile_db.update_filters.clear()
    assert other.deployed_devices == [0]
    assert other.volatile_db.update_filters == ["^hps_.+$"]


def test_the_dicts_and_the_arguments_become_a_model(caplog: pytest.LogCaptureFixture) -> None:
    params = inference_params(
        deployed_devices=[0, 2], device_id=2, embedding_cache_type=EmbeddingCacheType_t.UVM, number_of_worker_buffers_in_pool=3
    )
    with caplog.at_level(logging.INFO, "hps"):
        configuration = load_configuration(server_config(params))
    model = configuration.models[0]
    assert [(table.table_name, table.dim, table.max_keys) for table in model.tables] == [("user", 16, 64), ("item", 32, 3200)]
    assert (model.gpucacheper, model.hit_rate_threshold, model.gpucache) == (0.5, 0.8, True)
    assert (model.deployed_device_list, model.embedding_cache_type, model.num_of_worker_buffer_in_pool) == ((0, 2), "uvm", 3)
    assert configuration.supportlonglong is True
    assert configuration.volatile_db.type == "parallel_hash_map"
    assert not caplog.records


def test_databases_are_taken_from_the_parameter_server_config() -> None:
    config = server_config(
        volatile_db=VolatileDatabaseParams(
            type=DatabaseType_t.redis_cluster,
            address="a:1",
            num_partitions=3,
            overflow_policy=DatabaseOverflowPolicy_t.evict_oldest,
        ),
        persistent_db=PersistentDatabaseParams(backend=DatabaseType_t.rocks_db, path="db", initialize_after_startup=False),
        update_source=UpdateSourceParams(type=UpdateSourceType_t.kafka_message_queue, brokers="k:9092"),
    )
    configuration = load_configuration(config)
    volatile, persistent = configuration.volatile_db, configuration.persistent_db
    assert (volatile.type, volatile.address, volatile.overflow_policy) == ("redis_cluster", "a:1", "evict_oldest")
    assert (volatile.num_partitions, volatile.num_node_connections) == (3, 3)
    assert (persistent.type, persistent.path, persistent.initialize_after_startup) == ("rocks_db", "db", False)
    assert configuration.update_source.type == "kafka_message_queue"


def test_loading_changes_no_struct() -> None:
    config = server_config(inference_params(), inference_params(model_name="wdl"))
    before = copy.deepcopy(config)
    assert [model.model for model in load_configuration(config).models] == ["dcn", "wdl"]
    assert config == before


@pytest.mark.parametrize(
    ("params", "changes", "expected"),
    [
        ({}, {"embedding_vec_size": {"dcn": [16]}}, 'embedding_vec_size["dcn"]: 1 width for 2 sparse_files'),
        ({}, {"embedding_vec_size": {"dcn": [16, 0]}}, 'embedding_vec_size["dcn"][1]: got 0, expected at least 1'),
        ({}, {"embedding_vec_size": {}}, 'embedding_vec_size["dcn"]: missing; it has no default'),
        ({}, {"emb_table_name": {}}, 'emb_table_name["dcn"]: missing; expected the names of this model\'s tables'),
        ({}, {"emb_table_name": {"dcn": ["user", "item"], "wdl": ["user"]}}, 'emb_table_name["wd ... inference_params_array'),
        ({}, {"max_feature_num_per_sample_per_emb_table": {"dcn": [1, 50, 3]}}, "max_feature_num_per ... for 2 sparse_files"),
        ({"embedding_vecsize_per_table": [16, 64]}, {}, "inference_params_array[0].embedding_vec ... which takes precedence"),
        (
            {"persistent_db": PersistentDatabaseParams(backend=DatabaseType_t.rocks_db)},
            {},
            "inference_params_array[0].persistent_db: differs from the persistent_db of the ParameterServerConfig, which "
            "takes precedence; set it there",
        ),
        ({"device_id": 3}, {}, "inference_params_array[0].device_id: got 3, expected one of the deployed_devices"),
        ({"deployed_devices": []}, {}, "inference_params_array[0].deployed_de ... empty list, expected at least one element"),
        (
            {"cache_size_percentage": 5},
            {},
            "inference_params_array[0].cache_size_percentage: got 5, ... for 5 %",
        ),
        ({"i64_input_key": "long"}, {}, 'inference_params_array[0].i64_input_key: got "long", expected true or false'),
        (
            {},
            {"persistent_db": PersistentDatabaseParams(backend=DatabaseType_t.hash_map)},
            'persistent_db.backend: got "hash_map": this type belongs in ... one of: disabled, rocks_db, row_files',
        ),
        ({}, {"volatile_db": PersistentDatabaseParams()}, "volatile_db: got a Python ... a VolatileDatabaseParams"),
        ({}, {"inference_params_array": []}, "inference_params_array: got none, ... least one model, or a model_repository"),
    ],
)
def test_a_mistake_is_reported_in_the_structs_own_names(params: dict[str, Any], changes: dict[str, Any], expected: str) -> None:
    found = problems(server_config(inference_params(**params), **changes))
    head, _, tail = expected.partition(" ... ")
    assert [one for one in found if one == expected or (tail and one.startswith(head) and one.endswith(tail))], found


def test_key_widths_must_agree() -> None:
    config = server_config(inference_params(), inference_params(model_name="wdl", i64_input_key=False))
    assert problems(config) == ["inference_params_array[1].i64_input_key: got false, expected the same value for every model"]


def test_a_wrong_array_is_reported() -> None:
    assert problems(server_config(inference_params_array=inference_params()))[0].startswith(
        "inference_params_array: got a Python"
    )
    [problem, *_] = problems(server_config(inference_params_array=[{"model_name": "dcn"}]))
    assert problem == "inference_params_array[0]: got an object, expected an InferenceParams"


def test_an_empty_volatile_database_is_a_hash_map_and_disabled_is_none() -> None:
    assert load_configuration(server_config(volatile_db=VolatileDatabaseParams())).volatile_db.type == "parallel_hash_map"
    disabled = VolatileDatabaseParams(type=DatabaseType_t.disabled)
    assert load_configuration(server_config(volatile_db=disabled)).volatile_db.type == "disabled"


def test_equal_databases_in_both_places_are_fine() -> None:
    database = PersistentDatabaseParams(backend=DatabaseType_t.rocks_db, path="db")
    config = server_config(inference_params(persistent_db=copy.deepcopy(database)), persistent_db=database)
    assert load_configuration(config).persistent_db.path == "db"
