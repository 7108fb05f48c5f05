"""What a valid configuration is read as."""

import copy
import json
import logging
import re
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest

from hps.configuration.load import Configuration, ModelConfig, load_configuration, read_configuration
from hps.errors import ConfigError
from hps.types import TableSpec

MODEL = {
    "model": "ranker",
    "sparse_files": ["models/user", "s3://bucket/item"],
    "embedding_vecsize_per_table": [16, 32],
    "maxnum_catfeature_query_per_table_per_sample": [1, 50],
    "default_value_for_each_table": [0.0, 0.5],
    "deployed_device_list": [0],
}


def load(model: dict[str, Any] | None = None, **top: Any) -> Configuration:
    return load_configuration({"models": [{**MODEL, **(model or {})}], **copy.deepcopy(top)})


def notices(model: dict[str, Any] | None = None, **top: Any) -> str:
    """What the reader of a configuration is told, one line a notice."""
    found = read_configuration({"models": [{**MODEL, **(model or {})}], **copy.deepcopy(top)}).unlogged
    return "\n".join(f"{logging.getLevelName(level)} {text}" for level, text in found)


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig"])  # the latter begins with a byte order mark
def test_reads_a_file_given_as_text_or_as_a_path(tmp_path: Path, encoding: str) -> None:
    path = tmp_path / "ps.json"
    path.write_text(json.dumps({"models": [MODEL], "device": "cpu"}), encoding=encoding)
    assert load_configuration(path) == load_configuration(str(path)) == load(device="cpu")


def test_returns_a_configuration_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HPS_BEARER_TOKEN", "token")
    configuration = Configuration(models=(ModelConfig(**MODEL),))
    assert load_configuration(configuration) is configuration
    assert configuration.service.bearer_token == ""


def test_notices_that_nobody_heard_are_logged_when_the_configuration_is_used(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "hps")
    document = {"models": [{**MODEL, "max_batch_size": "7"}]}
    configuration = read_configuration(document)  # as where logging is not set up
    assert not caplog.records
    for _ in range(2):
        assert load_configuration(configuration) is configuration
        assert [record.levelname for record in caplog.records] == ["INFO"]
    assert "models[].max_batch_size" in caplog.text
    assert configuration == read_configuration(document)


@pytest.mark.parametrize("given", [None, "http://127.0.0.1:1"])
def test_traces_go_where_the_environment_says_unless_the_file_does(monkeypatch: pytest.MonkeyPatch, given: str | None) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:2")
    service = load(service={"otlp_endpoint": given}) if given else load()
    assert service.service.otlp_endpoint == (given or "http://127.0.0.1:2")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "collector:4317")
    with pytest.raises(ConfigError, match=r"OTEL_EXPORTER_OTLP_ENDPOINT: .*expected the URL of an OTLP/HTTP receiver"):
        load()


def test_takes_any_mapping_and_numpy_values_and_leaves_them_alone() -> None:
    document = {"models": ({**MODEL, "embedding_vecsize_per_table": np.array([16, 32]), "max_batch_size": np.int64(7)},)}
    before = copy.deepcopy(document)
    model = load_configuration(MappingProxyType(document)).models[0]
    assert model.embedding_vecsize_per_table == (16, 32)
    assert type(model.embedding_vecsize_per_table[0]) is int
    assert model.max_batch_size == 7
    assert str(document) == str(before)


def test_defaults_of_a_model_are_those_of_hugectrs_json() -> None:
    """But for hit_rate_threshold. test_config_documentation.py holds all others."""
    said = (
        "max_batch_size=64 gpucache=True gpucacheper=0.2 num_of_worker_buffer_in_pool=1 "
        "num_of_refresher_buffer_in_pool=1 thread_pool_size=16 cache_refresh_percentage_per_iteration=0.0 refresh_delay=0.0 "
        "refresh_interval=0.0 use_static_table=False embedding_cache_type=dynamic use_context_stream=True "
        "use_hctr_cache_implementation=True init_ec=True enable_pagelock=False fp8_quant=False"
    )
    model = load().models[0]
    assert [f"{key}={getattr(model, key)}" for key in (one.partition("=")[0] for one in said.split())] == said.split()
    assert model.embedding_table_names == ("sparse_embedding0", "sparse_embedding1")


def test_tables_hold_what_the_lists_say() -> None:
    model = load({"max_batch_size": 8, "embedding_table_names": ["user", "item"]}).models[0]
    assert model.tables == (TableSpec("ranker", "user", 16, 0.0, 8), TableSpec("ranker", "item", 32, 0.5, 400))


def test_a_hash_map_is_used_without_volatile_db_and_none_with_an_empty_one() -> None:
    assert (load().volatile_db.type, notices()) == ("parallel_hash_map", "")
    assert load(volatile_db={"num_partitions": 3}).volatile_db.type == "disabled"
    assert "WARNING configuration: volatile_db has no type and is disabled" in notices(volatile_db={"num_partitions": 3})


def test_batch_sizes_of_4_1_stand_for_max_batch_size() -> None:
    older = {"type": "hash_map", "max_get_batch_size": 300, "max_set_batch_size": 200, "refresh_time_after_fetch": True}
    top = {"volatile_db": older, "persistent_db": {"type": "rocks_db", "max_get_batch_size": 400}}
    configuration = load(**top)
    assert (configuration.volatile_db.max_batch_size, configuration.persistent_db.max_batch_size) == (200, 400)
    assert load(volatile_db={**older, "max_batch_size": 1000}).volatile_db.max_batch_size == 1000
    [notice] = notices(**top).splitlines()
    for key in ("volatile_db.max_get_batch_size", "volatile_db.refresh_time_after_fetch", "persistent_db.max_get_batch_size"):
        assert key in notice


def test_dense_keys_of_all_models_are_ignored_with_one_log_line(caplog: pytest.LogCaptureFixture) -> None:
    dense = {"dense_file": "a.model", "network_file": None, "label_dim": "many", "use_mixed_precision": [], "slot_num": -1}
    with caplog.at_level(logging.INFO, "hps"):
        configuration = load_configuration({"models": [{**MODEL, **dense}, {**MODEL, **dense, "model": "other"}]})
    assert len(configuration.models) == 2
    assert [record.levelname for record in caplog.records] == ["INFO"]
    assert all(key in caplog.text for key in dense)


def test_keys_by_which_hugectr_3_2_named_databases_are_ignored_with_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    old = {"db_type": "redis", "redis_ip": "127.0.0.1:7000", "rocksdb_path": 5, "cache_size_percentage_redis": 0.5}
    with caplog.at_level(logging.INFO, "hps"):
        configuration = load_configuration({**old, "models": [{**MODEL, **old, "mixed_precision": True}]})
    assert configuration.volatile_db.type == "parallel_hash_map"
    assert sorted(record.levelname for record in caplog.records) == ["INFO", "WARNING"]
    [warning] = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert "HugeCTR 3.2 and earlier have no effect; volatile_db and persistent_db say which databases there are" in warning
    assert all(f" {key}," in f"{warning}," and f"models[].{key}" in warning for key in old)
    assert "models[].mixed_precision" in caplog.text


@pytest.mark.parametrize(
    ("given", "read", "warns"),
    [
        ([0.0], (0.0, 0.0), ""),
        ([], (0.0, 0.0), ""),
        ([1.0], (1.0, 0.0), "has 1 value for 2 sparse_files; the other tables have 0, as in HugeCTR; write one for each"),
        ([1.0, 0.5, 2], (1.0, 0.5), "has 3 values for 2 sparse_files; the last ones have no effect, as in HugeCTR; write"),
        (["1.0"], (1.0, 0.0), "has 1 value for 2 sparse_files"),
        ([0.0, 0.5], (0.0, 0.5), ""),
    ],
)
def test_tables_without_a_default_value_have_0_as_in_hugectr(given: Any, read: tuple[float, ...], warns: str) -> None:
    assert load({"default_value_for_each_table": given}).models[0].default_value_for_each_table == read
    told = notices({"default_value_for_each_table": given})
    assert told.count("model ranker: default_value_for_each_table") == bool(warns)
    assert warns in told


def test_numbers_and_booleans_in_quotes_are_read_with_a_log_line() -> None:
    quoted: dict[str, Any] = {"max_batch_size": "8", "gpucache": "False", "gpucacheper": " 0.25 ", "hit_rate_threshold": "1"}
    quoted |= {"embedding_vecsize_per_table": ["16", 32], "default_value_for_each_table": ["0.0", "0.5"]}
    plain = {
        "max_batch_size": 8,
        "gpucache": False,
        "gpucacheper": 0.25,
        "hit_rate_threshold": 1.0,
        "deployed_device_list": [1],
    }
    quoted |= {"deployed_device_list": ["1"]}
    assert load(quoted, supportlonglong="false") == load(plain, supportlonglong=False)
    [notice] = notices(quoted, supportlonglong="false").splitlines()
    assert "models[].max_batch_size" in notice


# What a document says, where to look, and what must be there.
READ: list[tuple[dict[str, Any], str, Any]] = [
    ({}, "supportlonglong", True),
    ({"supportlonglong": False}, "supportlonglong", False),
    ({}, "persistent_db.type", "disabled"),
    ({}, "update_source.type", "null"),
    ({}, "volatile_db.overflow_margin", 2**64 - 1),  # never evicts
    # test_config_documentation.py reads every spelling of an enum; these are forgiven.
    ({"volatile_db": {"type": "Redis-Cluster"}}, "volatile_db.type", "redis_cluster"),
    ({"volatile_db": {"type": " PARALLEL Hash_map"}}, "volatile_db.type", "parallel_hash_map"),
    ({"volatile_db": {"overflow_policy": "Evict Oldest"}}, "volatile_db.overflow_policy", "evict_oldest"),
    ({"persistent_db": {"backend": "rocksdb"}}, "persistent_db.type", "rocks_db"),
    ({"persistent_db": {"backend": "rocksdb", "type": "rocks_db"}}, "persistent_db.type", "rocks_db"),
    *(
        ({"volatile_db": {"type": "redis", "address": address}}, "volatile_db.address", address)
        for address in ("redis", "10.0.0.1:7000,10.0.0.2:7000", "a:1; b:2", "unix:///run/a.sock,[::1]:7000;redis")
    ),
    ({"volatile_db": {"type": "redis", "num_partitions": 2}}, "volatile_db.num_node_connections", 2),
    ({"volatile_db": {"type": "redis", "num_partitions": 12}}, "volatile_db.num_node_connections", 5),
    ({"volatile_db": {"type": "redis", "initialize_after_startup": False}}, "volatile_db.initialize_after_startup", False),
    ({"persistent_db": {"type": "rocks_db"}}, "persistent_db.initialize_after_startup", True),
    ({"persistent_db": {"type": "rocks_db", "read_only": True}}, "persistent_db.initialize_after_startup", False),
    ({"model": {"embedding_cache_type": "UVM"}}, "models.0.embedding_cache_type", "uvm"),
    ({"model": {"use_static_table": True}}, "models.0.embedding_cache_type", "static"),
    ({"model": {"use_static_table": True, "embedding_cache_type": "uvm"}}, "models.0.embedding_cache_type", "static"),
    ({"model": {"max_batch_size": 1e3}}, "models.0.max_batch_size", 1000),
    ({"model": {"hit_rate_threshold": 1.1}}, "models.0.hit_rate_threshold", 1.1),
    ({"model": {"hit_rate_threshold": -3}}, "models.0.hit_rate_threshold", -3.0),
    # Paths are read as text.
    ({"model": {"sparse_files": [Path("a"), Path("/b")]}}, "models.0.sparse_files", ("a", "/b")),
    ({"persistent_db": {"type": "rocks_db", "path": Path("/db")}}, "persistent_db.path", "/db"),
    # What the chosen type does not use is not judged.
    ({"volatile_db": {"type": "hash_map", "address": "", "tls_client_key": ""}}, "volatile_db.address", ""),
    (
        {"volatile_db": {"type": "hash_map", "num_partitions": 4, "num_node_connections": 9}},
        "volatile_db.num_node_connections",
        9,
    ),
    ({"persistent_db": {"type": "disabled", "path": ""}}, "persistent_db.path", ""),
    ({"update_source": {"type": "null", "brokers": ""}}, "update_source.brokers", ""),
]


@pytest.mark.parametrize(("document", "place", "expected"), READ)
def test_a_value_is_read_as_it_is_meant(document: dict[str, Any], place: str, expected: Any) -> None:
    found: Any = load(**document)
    for step in place.split("."):
        found = found[int(step)] if step.isdecimal() else getattr(found, step)
    assert found == expected
    assert type(found) is type(expected)


@pytest.mark.parametrize("address", ["unix://run/redis.sock", "unix:///run/redis.sock?db=1", "unix:///a b"])
def test_an_address_of_a_unix_socket_is_its_path(address: str) -> None:
    with pytest.raises(ConfigError, match=r"volatile_db\.address"):
        load(volatile_db={"type": "redis", "address": address})


def test_secrets_of_the_environment_stand_in_for_configured_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    redis = {"type": "redis", "password": "file"}
    monkeypatch.setenv("HPS_BEARER_TOKEN", "")
    monkeypatch.setenv("HPS_REDIS_PASSWORD", "")
    configuration = load(service={"bearer_token": "file"}, volatile_db=redis)
    assert (configuration.service.bearer_token, configuration.volatile_db.password) == ("file", "file")
    monkeypatch.setenv("HPS_BEARER_TOKEN", "token")
    monkeypatch.setenv("HPS_REDIS_PASSWORD", "secret")
    monkeypatch.setenv("HPS_UPDATE_PASSWORD", "another")
    configuration = load(service={"bearer_token": "file"}, volatile_db=redis, update_source={"type": "redis_streams"})
    assert (configuration.service.bearer_token, configuration.volatile_db.password) == ("token", "secret")
    assert configuration.update_source.password == "another"
    monkeypatch.setenv("HPS_SENTINEL_PASSWORD", "third")
    assert load(volatile_db=redis).volatile_db.sentinel_password == "third"
    with pytest.raises(ConfigError, match="password_path: got a password, too"):
        load(volatile_db={"type": "redis", "password_path": "/run/secrets/redis"})
    configuration = load()
    assert (configuration.service.bearer_token, configuration.volatile_db.type) == ("token", "parallel_hash_map")


def test_a_bad_secret_of_the_environment_is_named_and_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HPS_BEARER_TOKEN", "hunter2\n")
    with pytest.raises(ConfigError) as caught:
        load()
    assert caught.value.problems[0].startswith("environment variable HPS_BEARER_TOKEN: ")
    assert "hunter2" not in str(caught.value)


def test_secrets_are_in_no_repr() -> None:
    configuration = load(service={"bearer_token": "hunter2"}, volatile_db={"type": "redis", "password": "hunter2"})
    assert "hunter2" not in repr(configuration)


@pytest.mark.parametrize(
    ("model", "top", "warning"),
    [
        ({"fp8_quant": True}, {}, "fp8_quant is not implemented"),
        ({"enable_pagelock": True}, {}, "enable_pagelock is not implemented"),
        ({"embedding_cache_type": "stochastic"}, {}, "stochastic"),
        ({"miss_path": "link"}, {"device": "cpu"}, "miss_path link is impossible: device is cpu"),
        ({"miss_path": "link", "gpucache": False}, {}, "miss_path link is impossible: gpucache is false"),
        ({"miss_path": "link"}, {"volatile_db": {"type": "redis"}}, "miss_path link is impossible:.*is redis_cluster"),
        (
            {"miss_path": "link"},
            {"volatile_db": {"type": "disabled"}, "persistent_db": {"type": "rocks_db", "path": "x"}},
            "miss_path link is impossible: volatile_db is disabled, and persistent_db not row_files",
        ),
        (
            {"miss_path": "link"},
            {"volatile_db": {"type": "hash_map", "overflow_margin": 10, "overflow_policy": "evict_oldest"}},
            "miss_path link is impossible: overflow_policy evict_oldest",
        ),
        ({"index_on_device": True}, {"device": "cpu"}, "index_on_device has no effect: device is cpu"),
        ({"index_on_device": True, "embedding_cache_type": "static"}, {}, "index_on_device has no effect:.*is static"),
        ({"index_on_device": True, "miss_path": "copy"}, {}, "index_on_device has no effect: miss_path is copy"),
        (
            {"device_sharing": "hot", "deployed_device_list": [0, 1]},
            {"device": "cpu"},
            "model ranker: device_sharing hot has no effect: device is cpu",
        ),
        (
            {"device_sharing": "hot", "deployed_device_list": [0, 1], "gpucache": False},
            {},
            "device_sharing hot has no effect: gpucache is false",
        ),
        ({"device_sharing": "partition"}, {}, "device_sharing partition has no effect: deployed_device_list names one device"),
        ({}, {"persistent_db": {"path": "x"}}, "persistent_db has no type"),
    ],
)
def test_what_is_read_and_not_done_is_a_warning(model: dict[str, Any], top: dict[str, Any], warning: str) -> None:
    assert re.search(f"WARNING .*{warning}", notices(model, **top))


@pytest.mark.parametrize(
    ("changes", "device", "top"),
    [
        ({"index_on_device": True}, "cuda", {}),
        ({"miss_path": "link"}, "cuda", {"persistent_db": {"type": "row_files", "path": "x"}}),
        ({"device_sharing": "replicate", "deployed_device_list": [0, 1]}, "cuda", {}),
        ({"device_sharing": "partition", "deployed_device_list": [0, 1]}, "auto", {}),
        ({"device_sharing": "hot", "deployed_device_list": [0, 1]}, "cuda", {}),
        ({}, "cpu", {}),
    ],
)
def test_what_is_read_and_done_gives_no_warning(changes: dict[str, Any], device: str, top: dict[str, Any]) -> None:
    assert notices(changes, device=device, **top) == ""
    assert load(changes, device=device).models[0].device_sharing == changes.get("device_sharing", "replicate")


def test_static_caches_have_no_hot_rows() -> None:
    static = {"embedding_cache_type": "static", "deployed_device_list": [0, 1]}
    with pytest.raises(ConfigError, match="device_sharing: got hot with embedding_cache_type static"):
        load({**static, "device_sharing": "hot"})
    assert load({**static, "device_sharing": "partition"}).models[0].device_sharing == "partition"


def test_the_directory_of_models_is_a_repository(tmp_path: Path) -> None:
    (tmp_path / "ctr").mkdir()
    (tmp_path / "ctr" / "model.json").write_text("{}")
    for place in (tmp_path, f"{tmp_path}/"):
        assert load_configuration(place).model_repository == str(place)
    with pytest.raises(ConfigError, match=r"expected the path of a ps\.json, or of a directory with <model>/model\.json"):
        load_configuration(tmp_path / "ctr")


@pytest.mark.parametrize(
    ("place", "repository"),
    [
        ("s3://bucket/models", "s3://bucket/models"),
        ("hdfs://host:8020/models/", "hdfs://host:8020/models/"),
        (Path("gs://bucket/models"), "gs://bucket/models"),  # which keeps one slash
    ],
)
def test_a_uri_is_a_repository(place: str | Path, repository: str) -> None:
    assert load_configuration(place).model_repository == repository


@pytest.mark.parametrize(
    ("written", "share"),
    [(None, None), ({"index": 1, "of": 4}, "1/4"), ("3/4", "3/4"), ({"index": 0, "of": 1}, None), ("0/1", None)],
)
def test_a_share_of_the_tables_is_part_of_each(written: Any, share: str | None) -> None:
    (model,) = load({"shard": written}).models
    assert [table.share and str(table.share) for table in model.tables] == [share] * 2


@pytest.mark.parametrize(
    ("variable", "written", "share"),
    [
        ("1/4", {}, "1/4"),
        ("hps-0/4", {}, "0/4"),
        ("ranking-hps-7/4", {}, "3/4"),  # the second server of share 3
        ("1/4", {"shard": "2/4"}, "2/4"),
        ("1/4", {"shard": None}, "None"),
        ("", {}, "None"),
    ],
)
def test_the_environment_has_the_share_of_models_that_name_none(
    monkeypatch: pytest.MonkeyPatch, variable: str, written: dict[str, Any], share: str
) -> None:
    monkeypatch.setenv("HPS_SHARD", variable)
    assert str(load(written).models[0].share) == share


def test_a_wrong_share_is_refused_by_where_it_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    for shard, text in (
        ({"index": 4, "of": 4}, r"shard\.of: got index 4 of 4 shares, expected an index from 0 to 3"),
        ({"index": 0, "of": 0}, r"shard\.of"),
        ({"index": -1, "of": 4}, r"shard\.index"),
        ({"index": 1, "off": 4}, r"shard\.off: unknown key.*did you mean of"),
        ("4/4", r'models\[0\]\.shard: got "4/4", expected .*"1/4"'),
        (1, r"models\[0\]\.shard"),
    ):
        with pytest.raises(ConfigError, match=text):
            load({"shard": shard})
    with pytest.raises(ConfigError, match=r"model ranker: shard 1/4 with volatile_db redis_cluster"):
        load({"shard": "1/4"}, volatile_db={"type": "redis"})
    monkeypatch.setenv("HPS_SHARD", "hps/4")
    with pytest.raises(ConfigError, match=r'environment variable HPS_SHARD: got "hps/4"'):
        load()
    for wrong in ("3/3", "a/b", "1"):
        monkeypatch.setenv("HPS_SHARD", wrong)
        with pytest.raises(ConfigError, match=rf'environment variable HPS_SHARD: got "{wrong}"'):
            load_configuration({"model_repository": "models"})
