"""What is wrong with a configuration, and how it is said."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from hps.configuration.load import load_configuration
from hps.errors import ConfigError
from tests.servers.running_service import model_of

MODEL = model_of(
    "ranker", ["models/user", "models/item"], {"user": 16, "item": 32}, maxnum_catfeature_query_per_table_per_sample=[1, 50]
)


def problems(source: Any) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load_configuration(source)
    return caught.value.problems


def assert_said(found: list[str], *texts: str) -> None:
    """The problems are these; in a text, ` ... ` stands for any words."""
    for problem, text in zip(found, texts, strict=True):
        head, dots, tail = text.partition(" ... ")
        assert problem == text or (dots and problem.startswith(head) and problem.endswith(tail)), problem


def document(model: dict[str, Any] | None = None, **top: Any) -> dict[str, Any]:
    return copy.deepcopy({"models": [{**MODEL, **(model or {})}], **top})


# Rows of one wrong value each: where it stands, the value, the whole problem after the path.
MODEL_VALUES = [
    ("model", "", 'got "", expected 1 to 120 of the characters a-z A-Z 0-9 _ -'),
    ("model", "a\n", 'got "a\\n", expected 1 to 120 of the characters a-z A-Z 0-9 _ -'),
    ("model", "a" * 121, f'got "{"a" * 60}"... (121 characters), expected 1 to 120 of the characters a-z A-Z 0-9 _ -'),
    ("model", None, "got null, expected a string"),
    ("sparse_files", [], "got an empty list, expected at least one element"),
    ("sparse_files", "models/user", 'got "models/user", expected a list; write ["models/user"]'),
    ("sparse_files", {"models/user"}, "got a Python set, expected a list"),
    ("embedding_vecsize_per_table", [16, 32, 64], "3 widths for 2 sparse_files"),
    ("embedding_table_names", ["user"], "1 name for 2 sparse_files"),
    ("embedding_table_names", ["user", "user"], '"user" is at positions 0 and 1; expected it once'),
    ("maxnum_catfeature_query_per_table_per_sample", [1], "1 maximum for 2 sparse_files"),
    ("deployed_device_list", [1, 0, 1], "1 is at positions 0 and 2; expected it once"),
    ("max_batch_size", 0, "got 0, expected at least 1"),
    ("max_batch_size", 2**31, "got 2147483648, expected at most 2147483647"),
    # Python does not print that many digits.
    pytest.param("max_batch_size", 10**5000, "got a number of 16610 bits, expected at most 2147483647", id="many digits"),
    ("max_batch_size", 8.5, "got 8.5, expected a whole number"),
    ("max_batch_size", True, "got true, expected a whole number"),
    ("max_batch_size", "8 samples", 'got "8 samples", expected a whole number'),
    ("max_batch_size", "1_000", 'got "1_000", expected a whole number'),
    ("gpucacheper", 4.5, "got 4.5, expected at most 4"),
    ("gpucacheper", -0.1, "got -0.1, expected at least 0"),
    ("gpucacheper", float("nan"), "got nan, expected a finite number"),
    ("hit_rate_threshold", float("inf"), "got inf, expected a finite number"),
    ("hit_rate_threshold", 10**400, "got a number of 1329 bits, expected a number"),
    ("gpucache", 1, "got 1, expected true or false; write true"),
    ("gpucache", "yes", 'got "yes", expected true or false; write true'),
    ("cache_refresh_percentage_per_iteration", 10, "got 10, expected at most 1; it is a share, so write 0.1 for 10 %"),
    ("num_of_worker_buffer_in_pool", 257, "got 257, expected at most 256"),
    ("workspace_timeout_s", 0, "got 0, expected more than 0"),
    ("insert_queue_length", 0, "got 0, expected at least 1"),
    ("refresh_interval", -1, "got -1, expected at least 0"),
    ("refresh_jitter", 1.5, "got 1.5, expected at most 1"),
    ("refresh_device_share", 0, "got 0, expected more than 0"),
    ("refresh_device_share", 1.5, "got 1.5, expected at most 1"),
    ("max_batchsize", 1, "unknown key; it is called max_batch_size here"),  # the name in HugeCTR's Python structs
    ("cache_size_percentage", 1, "unknown key; it is called gpucacheper here"),
    ("embedding_cache_type", "dynamik", 'got "dynamik", expected one of: ... uvm, stochastic; did you mean dynamic?'),
    ("device_sharing", "partitioned", 'got "partitioned", expected one of: replicate, partition, hot; did you mean partition?'),
]
TOP_VALUES = [
    ("device", "gpu", 'got "gpu", expected one of: auto, cuda, cpu; did you mean cuda?'),
    ("supportlonglong", 64, "got 64, expected true or false"),
    ("volatile_db", [], "got an empty list, expected an object"),
    ("volatile_db", None, 'got null, expected an object; write {"type": "disabled"}'),
    ("models", [], "got none, expected at least one model, or a model_repository"),
    ("volatile_db.type", "hash_mpa", 'got "hash_mpa", expected one of: disabled, ... redis_cluster; did you mean hash_map?'),
    ("volatile_db.type", "rocksdb", 'got "rocks_db": this type belongs in ... hash_map, parallel_hash_map, redis_cluster'),
    ("persistent_db.type", "hash_mapp", 'got "hash_mapp", which looks like ... expected one of: disabled, rocks_db, row_files'),
    ("volatile_db.type", "multi_process_map", 'got "multi_process_hash_map": it ... between processes, otherwise hash_map'),
    ("volatile_db.num_partitions", 0, "got 0, expected at least 1"),
    ("volatile_db.num_node_connections", 7, "got 7 connections for 6 num_partitions, expected at most one a partition"),
    ("volatile_db.address", "redis:port", 'got "redis:port", expected host[:port], several of them separated by commas'),
    ("volatile_db.address", "", 'got "", expected host[:port], several of them separated by commas'),
    ("volatile_db.tls_ca_certificate", "", 'got "", expected a path or URI that is not empty and has no NUL character'),
    ("volatile_db.password", 5, "got a value that is not shown, expected a string"),
    ("volatile_db.overflow_margin", 2**64, "got 18446744073709551616, expected at most 18446744073709551615"),
    ("volatile_db.overflow_policy", "evict_eldest", 'got "evict_eldest", expected one of: ... did you mean evict_oldest?'),
    ("volatile_db.overflow_resolution_target", 80, "got 80, expected at most 1; it is a share, so write 0.8 for 80 %"),
    ("volatile_db.update_filters", ["("], "not a regular expression: missing ), unterminated subpattern at position 0"),
    ("volatile_db.max_get_batch_size", "x", 'got "x", expected a whole number'),
    (
        "persistent_db.type",
        "hash_map",
        'got "hash_map": this type belongs in volatile_db; expected one of: disabled, rocks_db, row_files',
    ),
    ("persistent_db.backend", "none", 'got "rocks_db" here and "disabled" as ... name of this key; write one of them'),
    ("persistent_db.path", "", 'got "", expected a path or URI that is not empty and has no NUL character'),
    ("volatile_db.options", {"a": 1}, "got options for redis_cluster, ... databases of other packages take options"),
    ("persistent_db.options", 5, "got 5, expected an object"),
    ("update_source.type", "kafak", 'got "kafak", expected one of: null, ... did you mean kafka_message_queue?'),
    ("model_source.s3_endpoint_url", "minio:9000", 'got "minio:9000", expected ... with a port, or an empty string'),
    ("update_source.type", None, 'got null, expected one of: null, ... did you mean "null", in quotes?'),
    ("update_source.metadata_refresh_interval_ms", 9, "got 9, expected at least 10"),
    ("update_source.receive_buffer_size", 1023, "got 1023, expected at least 1024"),
    ("update_source.poll_timeout_ms", 0, "got 0, expected at least 1"),
    ("update_source.max_batch_size", 0, "got 0, expected at least 1"),
    ("update_source.max_commit_interval", 0, "got 0, expected at least 1"),
    ("update_source.begin", "now", 'got "now", expected one of: earliest, latest; did you mean latest?'),
    ("update_source.device_share", 0, "got 0, expected more than 0"),
    ("update_source.ready_lag_s", -1, "got -1, expected at least 0"),
    ("service.port", 65536, "got 65536, expected at most 65535"),
    ("service.host", "", 'got "", expected at least one character'),
    ("service.request_timeout_s", 0, "got 0, expected more than 0"),
    ("service.bearer_token", "two words", "got a value that is not shown, ... ASCII characters (no space, no line end)"),
]


@pytest.mark.parametrize(("key", "value", "text"), MODEL_VALUES)
def test_a_wrong_value_of_a_model_is_one_problem(key: str, value: Any, text: str) -> None:
    assert_said(problems(document({key: value})), f"models[0].{key}: {text}")


@pytest.mark.parametrize(("key", "value", "text"), TOP_VALUES)
def test_a_wrong_value_elsewhere_is_one_problem(key: str, value: Any, text: str) -> None:
    section, _, name = key.partition(".")
    base = {
        "volatile_db": {"type": "redis", "num_partitions": 6, "enable_tls": True},
        "persistent_db": {"type": "rocks_db", "path": "p"},
        "update_source": {"type": "kafka"},
    }
    top = {section: {**base.get(section, {}), name: value} if name else value}
    [problem] = problems({"models": [MODEL], **top})
    place, _, rest = problem.partition(": ")
    assert place.startswith(key) or key == "persistent_db.backend"
    assert_said([rest], text)


MEANT = [
    *(("device", "GPU", "cuda"), ("device", "cuda:0", "cuda"), ("device", "gpu:1", "cuda"), ("device", "host", "cpu")),
    *(("device", "cudda", "cuda"), ("volatile_db.type", "RAM", "hash_map")),
    ("volatile_db.type", "DatabaseType_t::RedisClusters", "redis_cluster"),
    *(("volatile_db.type", "DatabaseType_t.hash_map", "hash_map"), ("volatile_db.type", "redis://r1:6379", "redis_cluster")),
    *(("volatile_db.type", "off", "disabled"), ("volatile_db.type", False, "disabled")),
    *(("volatile_db.overflow_policy", "LRU", "evict_oldest"), ("volatile_db.overflow_policy", "lfu", "evict_least_used")),
    *(("persistent_db.type", "disk", "rocks_db"), ("persistent_db.type", None, "disabled")),
    *(("update_source.type", "redis", "redis_stream"), ("update_source.type", "off", "null")),
    *(("service.log_level", "warn", "warning"), ("service.model_control_mode", "manual", "explicit")),
]


@pytest.mark.parametrize(("key", "value", "word"), MEANT)
def test_a_word_for_another_value_names_that_value(key: str, value: Any, word: str) -> None:
    section, _, name = key.partition(".")
    source = document({name: value}) if section == "models" else document(**{section: {name: value} if name else value})
    assert [problem for problem in problems(source) if problem.endswith(f"; did you mean {word}?")]


@pytest.mark.parametrize(
    ("key", "value", "text"),
    [
        *(("service.max_body_bytes", "64MB", "64000000"), ("service.max_body_bytes", "1 GiB", "1073741824")),
        *(("service.max_body_bytes", "8k", "8192"), ("service.request_timeout_s", "500ms", "0.5")),
        *(("service.drain_s", "1m", "60"), ("update_source.poll_timeout_ms", "2s", "2000")),
        *(("models.gpucacheper", "20%", "0.2"), ("models.gpucache", "no", "false")),
        *(("volatile_db", "redis", '{"type": "redis"}'), ("volatile_db", False, '{"type": "disabled"}')),
        *(("models.deployed_device_list", 3, "[3]"), ("update_source.brokers", "kafka://u:p@k1:9092", "k1:9092")),
        ("service.host", "localhost:8000", "the port as service.port"),
    ],
)
def test_a_value_in_another_form_says_how_to_write_it(key: str, value: Any, text: str) -> None:
    section, _, name = key.partition(".")
    base = {"type": "kafka"} if section == "update_source" else {}
    source = document({name: value}) if section == "models" else document(**{section: {**base, name: value} if name else value})
    [problem] = problems(source)
    assert problem.endswith(f"; write {text}")


@pytest.mark.parametrize(
    ("source", "text"),
    [
        (document(gpu_cache_per=1), "gpu_cache_per: unknown key here; did you mean gpucacheper in an entry of models?"),
        (document(cache_size_percentage=1), "cache_size_percentage: unknown key ... you mean gpucacheper in an entry of "),
        (document({"dims": [1]}), "models[0].dims: unknown key; it is called embedding_vecsize_per_table here"),
        (document({"maxBatchSize": 1}), "models[0].maxBatchSize: unknown key; did you mean max_batch_size?"),
        (document(volatile_db={"url": "r1"}), "volatile_db.url: unknown key; it is called address here"),
        (document(service={"gpucacheper": 1}), "service.gpucacheper: unknown key here; it belongs in an entry of models"),
        (
            document({"versions": [{"version": 2, "sparse_files": ["a", "b"], "delta": "1"}]}),
            "models[0].versions[0].delta: unknown key; did you mean delta_of?",
        ),
        (
            document({"versions": [{"version": 2, "sparse_files": ["a", "b"], "keep_versions": 1}]}),
            "models[0].versions[0].keep_versions: unknown key here; it belongs in an entry of models; did you mean version?",
        ),
    ],
)
def test_an_unknown_key_names_the_nearest_one_wherever_it_belongs(source: dict[str, Any], text: str) -> None:
    [problem] = problems(source)
    head, _, rest = text.partition(" ... ")
    assert problem.startswith(head)
    assert rest in problem


KAFKA, READ_ONLY = {"update_source": {"type": "kafka"}}, {"type": "rocks_db", "read_only": True}
REQUIRED = """model sparse_files deployed_device_list maxnum_catfeature_query_per_table_per_sample
embedding_vecsize_per_table default_value_for_each_table"""
# Other documents, each with its problem.
MISTAKES = [
    ({}, "models: got none, expected at least one model, or a model_repository"),
    *(
        ({"models": [{name: MODEL[name] for name in MODEL if name != key}]}, f"models[0].{key}: missing; it has no default")
        for key in REQUIRED.split()
    ),
    ({"models": [MODEL, MODEL]}, 'models: the name "ranker" is at positions 0 and 1; expected it once'),
    (
        document({"max_batch_size": 2**20, "maxnum_catfeature_query_per_table_per_sample": [1, 2048]}),
        "models[0].maxnum_catfeature_query_per_table_per_sample: got 2048 keys a sample and 1048576 samples (max_batch_size), "
        "2147483648 keys in one lookup; expected at most 2147483647",
    ),
    (
        document(persistent_db={"type": "rocks_db", "read_only": True, "initialize_after_startup": True}),
        "persistent_db.initialize_after_startup: a read_only database cannot be filled at startup; set this to false, or "
        "read_only to false",
    ),
    (
        document(update_source={"type": "kafka"}, volatile_db={"type": "disabled"}),
        "update_source: ... null if there are no updates",
    ),
    (
        document(update_source={"type": "kafka"}, persistent_db={"type": "rocks_db", "read_only": True}),
        "update_source: got kafka_message_queue, but persistent_db.read_only does ... null if there are no updates",
    ),
    (document(peristent_db={}), "peristent_db: unknown key; did you mean persistent_db?"),
    (document(gpucacheper=1), "gpucacheper: unknown key here; it belongs in an entry of models"),
    (document(update_filters=[]), "update_filters: unknown key here; it belongs in volatile_db or persistent_db"),
    (document(volatile_db={"type": "redis", "pasword": "hunter2"}), "volatile_db.pasword: ... key; did you mean password?"),
    (document(service={"prot": 1}), "service.prot: unknown key; did you mean port?"),
    (document(**{"a.b": 1}), '["a.b"]: unknown key; known are: device, ... supportlonglong, update_source, volatile_db'),
]


@pytest.mark.parametrize(("source", "problem"), MISTAKES)
def test_a_mistake_is_one_problem(source: dict[str, Any], problem: str) -> None:
    assert_said(problems(source), problem)


def test_all_problems_are_in_one_report() -> None:
    first = {
        "embedding_vecsize_per_table": [0, 32, "wide"],
        "gpucacheper": 5,
        "max_batchsize": 3,
        "embedding_table_names": ["user", "user", "?"],
    }
    second = {"sparse_files": 1, "gpucache": "maybe"}
    source = {
        "models": [{**MODEL, **first}, {**MODEL, **second}],
        "device": "tpu",
        "volatile_db": {"type": "rocks", "num_partitions": "many"},
        "servise": {},
    }
    found = problems(source)
    first_model = (
        "embedding_table_names embedding_table_names embedding_table_names[2] embedding_vecsize_per_table "
        "embedding_vecsize_per_table[0] embedding_vecsize_per_table[2] gpucacheper max_batchsize"
    )
    assert [problem.partition(":")[0] for problem in found] == [
        *("device", "volatile_db.type", "volatile_db.num_partitions", "models"),
        *(f"models[0].{key}" for key in first_model.split()),
        *("models[1].sparse_files", "models[1].gpucache", "servise"),
    ]


def test_the_message_holds_the_source_and_every_problem(tmp_path: Path) -> None:
    path = tmp_path / "ps.json"
    path.write_text(json.dumps(document({"gpucacheper": 5, "max_batch_size": 0})))
    with pytest.raises(ConfigError) as caught:
        load_configuration(path)
    first, *lines = str(caught.value).splitlines()
    assert first == f"{path}: 2 problems"
    assert [line.strip() for line in lines] == caught.value.problems
    assert caught.value.source == str(path)


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (b"", "line 1, column 1: not JSON: Expecting value"),
        (b'{"models": [\n  // ranker\n]}', "line 2, column 3: not JSON: Expecting value; JSON has no comments"),
        (b'{\n  "models": [,]\n}', "line 2, column 14: not JSON: Expecting value"),
        (b'{"models": []} x', "line 1, column 16: not JSON: Extra data"),
        (b'{"model\xff": 1}', "byte 7: not UTF-8 (invalid start byte); save the file as UTF-8"),
        (b"[" * 100_000, "top level: objects and lists are nested too deeply, or contain themselves"),
        (b'{"models": ' + b"1" * 5000 + b"}", "top level: one of its numbers has thousands of digits"),
        (b"[]", "top level: got an empty list, expected an object with the key models"),
        (b"null", "top level: got null, expected an object with the key models"),
        (b'"models"', 'top level: got "models", expected an object with the key models'),
    ],
)
def test_a_file_that_holds_no_object_says_where_and_why(tmp_path: Path, content: bytes, text: str) -> None:
    path = tmp_path / "ps.json"
    path.write_bytes(content)
    [problem] = problems(path)
    assert problem.startswith(text)


def test_keys_that_stand_twice_are_named_with_their_path(tmp_path: Path) -> None:
    path = tmp_path / "ps.json"
    text = json.dumps(document(device="cpu")).replace('"device"', '"device": "auto", "device"')
    path.write_text(text.replace('"model"', '"model": "a", "model": "b", "model"'))
    assert problems(path) == [
        "device: appears more than once in this object; keep one",
        "models[0].model: appears more than once in this object; keep one",
    ]


def test_not_a_number_in_a_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "ps.json"
    path.write_text(
        json.dumps(document({"gpucacheper": float("nan"), "hit_rate_threshold": 1e300}), indent=1).replace("300", "999")
    )
    assert problems(path) == [
        "models[0].gpucacheper: got nan, expected a finite number",
        "models[0].hit_rate_threshold: got inf, expected a finite number",
    ]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("missing.json", "file: cannot be read (No such file or directory); expected the path of a ps.json"),
        ("", "file: cannot be read (Is a directory); expected the path of a ... or of a directory with <model>/model.json"),
        ("nul\0", "file: cannot be read (embedded null byte); expected the path of a ps.json"),
    ],
)
def test_a_file_that_cannot_be_read_says_why(tmp_path: Path, name: str, text: str) -> None:
    assert_said(problems(f"{tmp_path}/{name}"), text)


@pytest.mark.parametrize("source", [None, 5, b"ps.json", ["ps.json"]])
def test_a_source_of_another_type_says_what_is_expected(source: Any) -> None:
    [problem] = problems(source)
    assert problem.startswith("top level: got ")
    assert problem.endswith("expected the path of a ps.json, a mapping, a ParameterServerConfig or a Configuration")


def test_a_mapping_that_contains_itself_is_refused() -> None:
    source = document()
    source["models"][0]["label_dim"] = source
    assert problems(source) == ["top level: objects and lists are nested too deeply, or contain themselves"]


def test_keys_that_json_cannot_have_are_refused() -> None:
    found = problems(document({5: 1, "\ud800": 2}, **{"volatile_db": {None: 3, "type": "hash_map"}}))
    assert found == [
        "models[0]: got the key 5, expected a string of valid Unicode",
        'models[0]: got the key "\\ud800", expected a string of valid Unicode',
        "volatile_db: got the key null, expected a string of valid Unicode",
    ]
