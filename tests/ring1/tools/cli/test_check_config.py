"""`hps check-config`: everything at once, also what is right beside what is wrong, and with --connect what is there."""

import json
import re
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner, Result

from hps.ground.registry import IMPLEMENTATIONS, install_hint
from hps.models.writer import write_sparse_model
from hps.tools.cli.app import app
from tests.servers.certificates import Authority
from tests.servers.redis_server import free_ports
from tests.servers.running_service import document_of, model_of

DIMS = {"user": 4, "item": 8}


def run(*arguments: object, **environment: str) -> Result:
    result = CliRunner().invoke(app, ["check-config", *map(str, arguments)], env={"COLUMNS": "200", **environment})
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result


def findings(path: Path, *arguments: object) -> tuple[int, dict[str, list[tuple[str, str]]]]:
    """The exit code, and levels and texts by where they belong."""
    result = run(path, "--json", *arguments)
    report = json.loads(result.stdout)
    assert report["exit_code"] == result.exit_code
    assert report["good"] == (result.exit_code == 0)
    found: dict[str, list[tuple[str, str]]] = {}
    for one in report["findings"]:
        found.setdefault(one["where"], []).append((one["level"], one["text"]))
    return result.exit_code, found


@pytest.fixture
def content(tmp_path: Path) -> dict[str, Any]:
    for name, dim in DIMS.items():
        write_sparse_model(tmp_path / name, (np.arange(10), np.ones((10, dim), np.float32)))
    content = document_of(model_of("shop", [tmp_path / name for name in DIMS], DIMS, hit_rate_threshold=1.1))
    return content | {"service": {"port": free_ports(1)[0]}}


def written(tmp_path: Path, content: dict[str, Any]) -> Path:
    path = tmp_path / "ps.json"
    path.write_text(json.dumps(content))
    return path


def test_transforms_that_would_not_be_called_are_found(tmp_path: Path, content: dict[str, Any]) -> None:
    [model] = content["models"]
    model["transform"] = {"function": "tests.fakes.transforms:nothing", "inputs": {"user": "bytes"}}
    for trust, problem in ((False, "it names code"), (True, "cannot be imported: AttributeError")):
        content["model_source"] = {"trust": trust}
        code, found = findings(written(tmp_path, content))
        [(level, text)] = found["models[0].transform"]
        assert (code, level, problem in text) == (2, "wrong", True)
    model["transform"]["function"] = "fnv1a"
    assert run(written(tmp_path, content)).exit_code == 0


def test_wrong_keys_do_not_hide_what_is_wrong_with_files(tmp_path: Path, content: dict[str, Any]) -> None:
    [model] = content["models"]
    (tmp_path / "item" / "key").unlink()
    unnamed = {key: value for key, value in model.items() if key not in ("model", "default_value_for_each_table")}
    content["models"] = [
        {**model, "gpucachepr": 1, "max_batch_size": 0},
        {**unnamed, "embedding_vecsize_per_table": [4, 9], "sparse_files": [str(tmp_path / "user")] * 2},
        {**model, "model": "third", "sparse_files": "user"},  # its files cannot be told
    ]
    content["device"] = "gpu"
    content["volatile_db"] = "redis"
    content["service"] |= {"model_control_mode": "explicit", "load_models": ["gone"]}
    code, found = findings(written(tmp_path, content))
    assert code == 2
    of_models = "[0].gpucachepr [0].max_batch_size [1].model [1].default_value_for_each_table [2].sparse_files"
    wrong = {
        "device",
        "volatile_db",
        *(f"models{one}" for one in (*of_models.split(), "[0].sparse_files[1]", "[1].sparse_files[1]")),
    }
    assert {where: len(texts) for where, texts in found.items()} == dict.fromkeys(wrong, 1)
    assert "key not found" in found["models[0].sparse_files[1]"][0][1]
    assert "the files fit embedding_vecsize_per_table 4" in found["models[1].sparse_files[1]"][0][1]


def test_a_repository_that_is_not_there_hides_nothing(tmp_path: Path, content: dict[str, Any]) -> None:
    (tmp_path / "item" / "key").unlink()
    code, found = findings(written(tmp_path, content | {"model_repository": str(tmp_path / "gone"), "device": "gpu"}))
    assert (code, set(found)) == (2, {"device", "model_repository", "models[0].sparse_files[1]"})


@pytest.mark.parametrize("connect", [[], ["--connect"]], ids=["files", "connect"])
def test_a_package_that_is_missing_hides_nothing(
    tmp_path: Path, content: dict[str, Any], connect: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for kind, name in (("filesystem", "hdfs"), ("filesystem", "gs"), ("update_log", "kafka_message_queue")):
        known = IMPLEMENTATIONS[kind][name]
        monkeypatch.setitem(IMPLEMENTATIONS[kind], name, known._replace(target="hps.no_such_module:Thing"))
    (tmp_path / "item" / "key").unlink()
    [model] = content["models"]
    places = ["hdfs://nn/m/user", "gs://b/m/user", "s3://localhost:9000/b/m/user"]
    content["models"] += [{**model, "model": f"m{i}", "sparse_files": [one] * 2} for i, one in enumerate(places)]
    content["models"].append({**model, "model": "versions", "version_path": "hdfs://nn/m", "sparse_files": ["user", "item"]})
    content |= {"update_source": {"type": "kafka", "brokers": "127.0.0.1:1"}, "model_repository": "gs://b/repository"}
    code, found = findings(written(tmp_path, content), *connect)
    assert code == 2
    hdfs, gcs, kafka = (install_hint(extra) for extra in ("hdfs", "gcs", "kafka"))
    wanted = {
        "models[0].sparse_files[1]": "item",
        "models[1]": hdfs,
        "models[2]": gcs,
        "models[3].sparse_files[0]": 'model_source.s3_endpoint_url to "http://localhost:9000"',
        "models[4]": hdfs,
        "model_repository": gcs,
        "update_source.type": kafka,
    }
    if connect:
        wanted |= {"hdfs://nn/m": hdfs, "gs://b/m": gcs, "gs://b/repository": gcs, "s3://localhost:9000/b/m": "s3_endpoint_url"}
        wanted |= {"update_source": kafka}
        assert found["service.port"][0][0] == "good"
    for where, text in wanted.items():
        assert any(level == "wrong" and text in said for level, said in found.get(where, ())), (where, found.get(where), found)


@pytest.mark.parametrize(
    ("service", "said"),
    [
        ({}, "no model to serve: looked in {} for <model>/model.json, got 1 directory: old (config.pbtxt)"),
        ({"model_control_mode": "explicit", "load_models": ["shop", "news"]}, "no model news, shop (service.load_models)"),
        ({"model_control_mode": "explicit"}, ""),
        ({"allow_empty": True}, ""),
    ],
)
def test_a_repository_without_models_is_wrong_unless_that_is_meant(tmp_path: Path, service: dict[str, Any], said: str) -> None:
    repository = tmp_path / "models"
    (repository / "old").mkdir(parents=True)
    (repository / "old" / "config.pbtxt").touch()
    path = written(tmp_path, document_of(model_repository=str(repository), service=service))
    for more in ((), ("--connect",)):
        code, found = findings(path, *more)
        assert code == (2 if said else 0)
        assert [one for one in found.get("model_repository", []) if one[0] == "wrong"] == (
            [("wrong", found["model_repository"][0][1])] if said else []
        )
        assert said.format(repository) in str(found)
    if said:
        assert "--allow-empty" in run(path).stderr


def test_no_model_at_all_is_no_configuration(tmp_path: Path) -> None:
    code, found = findings(written(tmp_path, document_of(service={"allow_empty": True})))
    assert (code, set(found)) == (2, {"models"})


def test_each_file_of_a_network_is_looked_for(tmp_path: Path, content: dict[str, Any]) -> None:
    x = {"dtype": "int64", "shape": [-1]}
    programs = [{"file": str(tmp_path / "keys"), "inputs": ["x"], "outputs": ["k"]}]
    lookups = {"vectors": {"table": "user", "keys": {"output": "k"}}}
    dense = {"format": "pt2", "file": str(tmp_path / "dense"), "inputs": {"x": x}, "outputs": ["s"], "lookups": lookups}
    content["models"][0]["dense"] = {**dense, "keys": programs}
    for name in ("dense", "keys"):
        code, found = findings(written(tmp_path, content))
        [(level, text)] = found["models[0].dense"]
        assert (code, level, str(tmp_path / name) in text) == (2, "wrong", True), text
        (tmp_path / name).write_bytes(b"a program")
    assert findings(written(tmp_path, content))[0] == 0


def test_files_of_tokens_and_certificates_are_checked(tmp_path: Path, content: dict[str, Any]) -> None:
    tokens, wrong = tmp_path / "tokens.json", tmp_path / "wrong"
    tokens.write_text('{"tokens": [{"name": "a", "rights": ["read"], "token": "s3cret"}, {"name": "b", "rights": []}]}')
    wrong.write_text("s3cret")
    content["service"] |= {"tokens_path": str(tokens), "tls_certificate_path": str(wrong)}
    code, found = findings(written(tmp_path, content))
    assert (code, set(found)) == (2, {"service.tokens_path", "service.tls_certificate_path"})
    assert [text.partition(": ")[2].partition(":")[0] for _, text in found["service.tokens_path"]] == [
        "tokens[0].rights[0]",
        "tokens[1].certificate",
    ]
    pair = Authority(tmp_path).sign("server")
    tokens.write_text('{"tokens": [{"name": "a", "rights": ["lookup"], "token": "s3cret"}]}')
    content["service"]["tls_certificate_path"] = str(pair.both)
    assert findings(written(tmp_path, content)) == (0, {})
    assert "serves on https://127.0.0.1" in run(written(tmp_path, content)).stdout


def test_too_few_widths_are_read_from_the_files(tmp_path: Path, content: dict[str, Any]) -> None:
    content["models"][0]["embedding_vecsize_per_table"] = [4]
    code, found = findings(written(tmp_path, content))
    assert code == 2
    texts = [text for _, text in found["models[0].embedding_vecsize_per_table"]]
    assert texts == ["1 width for 2 sparse_files; the files fit [4, 8]"]


@pytest.mark.parametrize(
    ("changes", "where"),
    [
        ({"models": {"gpucacheper": 0}}, "models[0].gpucacheper"),
        ({"models": {"hit_rate_threshold": 0}}, "models[0].hit_rate_threshold"),
        ({"volatile_db": {"overflow_margin": 100}}, "volatile_db.overflow_margin"),
        ({"volatile_db": {"initial_cache_rate": 0.5}}, "volatile_db.initial_cache_rate"),
        ({"volatile_db": {"type": "redis"}}, "volatile_db.num_partitions"),
        ({"persistent_db": {"type": "rocks_db"}}, "persistent_db.path"),
    ],
)
def test_what_is_allowed_and_hardly_meant_is_a_warning(
    tmp_path: Path, content: dict[str, Any], changes: dict[str, Any], where: str
) -> None:
    code, found = findings(written(tmp_path, content))
    assert (code, found) == (0, {})
    for section, keys in changes.items():
        (content["models"][0] if section == "models" else content.setdefault(section, {})).update(keys)
    code, found = findings(written(tmp_path, content))
    assert (code, list(found)) == (0, [where])
    assert found[where][0][0] == "warning"


def test_a_threshold_that_leaves_answers_incomplete_is_a_warning_in_keys(tmp_path: Path, content: dict[str, Any]) -> None:
    first = content["models"][0]
    del first["hit_rate_threshold"]
    first |= {"max_batch_size": 100, "maxnum_catfeature_query_per_table_per_sample": [3, 10]}
    content["models"] = [
        {**first, "model": "default"},
        {**first, "model": "without_cache", "gpucache": False, "hit_rate_threshold": 0.9},
        {**first, "model": "chosen", "hit_rate_threshold": 0.9},
        {**first, "model": "one", "hit_rate_threshold": 1},
    ]
    code, found = findings(written(tmp_path, content))
    assert (code, list(found)) == (0, ["models[2].hit_rate_threshold", "models[3].hit_rate_threshold"])
    [(level, text)] = found["models[2].hit_rate_threshold"]
    assert level == "warning"
    assert "0.9, so up to 100 of 1,000 keys of a table in a lookup get the default vector although they exist" in text


def test_a_file_that_is_no_json_is_reported_as_json(tmp_path: Path) -> None:
    path = tmp_path / "ps.json"
    path.write_text("{")
    assert findings(path)[0] == 2


def test_what_can_be_used_is_good_and_nothing_is_made(tmp_path: Path, content: dict[str, Any]) -> None:
    content["persistent_db"] = {"type": "rocks_db", "path": str(tmp_path / "a" / "rocksdb")}
    code, found = findings(written(tmp_path, content), "--connect")
    assert code == 0
    assert [level for texts in found.values() for level, _ in texts] == ["good"] * 3
    assert set(found) == {"persistent_db.path", "device", "service.port"}
    assert not (tmp_path / "a").exists()
    text = run(tmp_path / "ps.json", "--connect").stdout
    assert re.search(r"^good: persistent_db.path: .* would be created; 640 B to load, .* free$", text, re.MULTILINE)


@pytest.mark.parametrize(
    ("name", "settings", "text"),
    [
        ("file", {}, "is no directory"),
        ("file/below", {}, "is no directory"),
        ("gone", {"read_only": True}, "no database exists there"),
        ("damaged", {}, "the file CURRENT is missing"),
    ],
)
def test_a_path_that_cannot_be_a_database_is_wrong(
    tmp_path: Path, content: dict[str, Any], name: str, settings: dict[str, Any], text: str
) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged" / "000001.sst").write_text("")
    content["persistent_db"] = {"type": "rocks_db", "path": str(tmp_path / name), **settings}
    code, found = findings(written(tmp_path, content), "--connect")
    assert code == 2
    [(level, got)] = found["persistent_db.path"]
    assert (level, text in got) == ("wrong", True)


@pytest.fixture
def silent() -> Iterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield f"127.0.0.1:{listener.getsockname()[1]}"


def test_each_waits_its_own_time_and_hides_no_other(tmp_path: Path, content: dict[str, Any], silent: str) -> None:
    content["volatile_db"] = {"type": "redis", "address": silent, "num_partitions": 2}
    content["update_source"] = {"type": "kafka", "brokers": silent}
    code, found = findings(written(tmp_path, content), "--connect", "--timeout", 1)
    assert code == 1
    assert {where: texts[0][0] for where, texts in found.items()} == {
        "volatile_db": "unreachable",
        "update_source.brokers": "unreachable",
        "device": "good",
        "service.port": "good",
    }
