"""The command line: what each command prints and leaves, and the exit code of every kind of failure."""

import json
import os
import re
import socket
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner, Result

from hps import errors
from hps.configuration.load import load_configuration
from hps.ground.registry import implementation
from hps.models.files import open_sparse_model
from hps.models.writer import write_sparse_model
from hps.tools.cli.app import app
from hps.tools.cli.server.live_models import _rollout_text
from hps.tools.cli.tables.sample import sample_vectors
from tests.servers.running_service import document_of, model_of
from tests.tables.sparse_models import chunks_of

CHANGES = ["models", "deploy", "undeploy", "rollback", "unpin", "refresh"]
COMMANDS = ["init", "serve", "load", "import", "lookup", "profile", "check-config", "check-database", "create-model", "publish"]
COMMANDS += ["plan", *CHANGES]
TABLES = {"user": (300, 4, 1), "item": (500, 8, 2)}  # rows, dim, seed


def run(*arguments: object, code: int | None = None, **environment: str) -> Result:
    """Run a command within this process; it may only end by an exit code, and by this one if it is given."""
    result = CliRunner().invoke(app, [str(argument) for argument in arguments], env={"COLUMNS": "200", **environment})
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    assert "Traceback" not in result.output
    assert code in (None, result.exit_code), result.output
    return result


def words(text: str) -> str:
    """Without the lines and frames that depend on the width of the terminal."""
    return re.sub(r"[\s│╭╮╰╯─]+", " ", text)


@pytest.fixture
def content(tmp_path: Path) -> dict[str, Any]:
    """A configuration of one model with two tables, in RocksDB and a hash map; its files are written."""
    for name, (rows, dim, seed) in TABLES.items():
        keys = np.arange(rows, dtype=np.int64) - 10
        write_sparse_model(tmp_path / name, (keys, sample_vectors(keys, dim, seed)))
    model = model_of(
        "shop",
        [tmp_path / name for name in TABLES],
        {name: dim for name, (_, dim, _) in TABLES.items()},
        maxnum_catfeature_query_per_table_per_sample=[1, 50],
        default_value_for_each_table=[0.0, 0.5],
        gpucacheper=0.5,
    )
    return document_of(model, persistent=tmp_path / "rocksdb")


@pytest.fixture
def config(tmp_path: Path, content: dict[str, Any]) -> Path:
    return write_config(tmp_path, content)


def write_config(tmp_path: Path, content: dict[str, Any]) -> Path:
    path = tmp_path / "ps.json"
    path.write_text(json.dumps(content))
    return path


def test_help_names_every_command_and_a_first_step() -> None:
    result = run("--help", code=0)
    for text in [*COMMANDS, "hps create-model models/sample/item.model --rows 50000 --dim 32"]:
        assert text in words(result.stdout)


def test_the_help_of_a_command_has_an_example_of_it() -> None:
    for number, command in enumerate(COMMANDS):
        result = run(command, ("--help", "-h")[number % 2], code=0)
        example = re.search(r"Example: hps (.*?) *$", result.stdout, re.MULTILINE)
        assert example, command
        assert example[1].startswith(command)


def test_without_a_command_help_is_shown_and_the_code_is_2() -> None:
    result = run()
    assert (result.exit_code, "create-model" in result.output) == (2, True)
    assert run("--version").stdout == "hps 0.1.0\n"


WRONG = [
    *("frobnicate", "load", "serve x --port 70000", "create-model x", "create-model x --rows 0 --dim 1"),
    "create-model x --rows 1 --dim 0",
]


@pytest.mark.parametrize("arguments", WRONG)
def test_wrong_usage_is_code_2_and_writes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: str) -> None:
    monkeypatch.chdir(tmp_path)
    run(*arguments.split(), code=2)
    assert os.listdir(tmp_path) == []


def test_create_model_writes_the_sample_vectors_of_its_keys(tmp_path: Path) -> None:
    result = run("create-model", tmp_path / "m", "--rows", 1000, "--dim", 6, "--seed", 3, code=0)
    assert result.stdout == f"{tmp_path}/m: 1,000 rows of 6 float32, 32.0 kB, keys 0 to 999\n"
    ((keys, vectors),) = chunks_of(open_sparse_model(tmp_path / "m", 6))
    np.testing.assert_array_equal(keys, np.arange(1000))
    np.testing.assert_array_equal(vectors, sample_vectors(keys, 6, 3))


def test_create_model_overwrites_only_when_asked(tmp_path: Path) -> None:
    run("create-model", tmp_path / "m", "--rows", 10, "--dim", 6, code=0)
    result = run("create-model", tmp_path / "m", "--rows", 20, "--dim", 6, code=2)
    assert f"error: writing sparse model {tmp_path}/m: it exists" in result.stderr
    run("create-model", tmp_path / "m", "--rows", 20, "--dim", 6, "--overwrite", code=0)
    assert open_sparse_model(tmp_path / "m", 6).rows == 20


def test_check_config_shows_what_would_be_served(config: Path) -> None:
    result = run("check-config", config, code=0)
    lines = [words(line).strip() for line in result.stdout.splitlines()]
    assert "shop 1 user 0 300 4 0.0 154" in lines  # of 14 a set
    assert "shop 1 item 1 500 8 0.0 252" in lines
    assert f"device cpu, volatile_db hash_map, persistent_db rocks_db at {config.parent}/rocksdb" in lines
    assert lines[-1] == f"{config}: good"


@pytest.mark.parametrize(
    ("source", "filters", "code", "text"),
    [
        ({"brokers": "k1:9092"}, [".+"], 0, "update_source kafka_message_queue at k1:9092, followed by shop.user, shop.item"),
        ({}, ["item$"], 0, "update_source kafka_message_queue at 127.0.0.1:9092, followed by shop.item"),
        ({}, ["^none$"], 0, "followed by no table, since update_filters match none"),
        ({"config": {"group.instance.identity": "x"}}, [".+"], 2, "group.instance.identity"),
    ],
)
def test_check_config_says_which_tables_follow_updates(
    tmp_path: Path, content: dict[str, Any], source: dict[str, Any], filters: list[str], code: int, text: str
) -> None:
    content["update_source"] = {"type": "kafka", **source}
    content["volatile_db"]["update_filters"] = content["persistent_db"]["update_filters"] = filters
    result = run("check-config", write_config(tmp_path, content))
    assert result.exit_code == code
    assert text in (result.stderr if code else result.stdout)


def test_lookup_follows_no_log(tmp_path: Path, content: dict[str, Any]) -> None:
    content["update_source"] = {"type": "kafka", "brokers": "127.0.0.1:1", "ready_lag_s": 0.0}
    assert run("lookup", write_config(tmp_path, content), "shop", "item", 1).exit_code == 0  # nor waits for it


def test_check_config_reports_every_problem_of_the_files(tmp_path: Path, config: Path) -> None:
    (tmp_path / "user" / "key").unlink()
    (tmp_path / "item" / "emb_vector").write_bytes(b"x" * 500 * 4 * 9)
    result = run("check-config", config, code=2)
    for text in (
        "2 problems",
        "models[0].sparse_files[0]: opening sparse model",
        "key not found",
        "embedding_vecsize_per_table 9",
    ):
        assert text in result.stderr
    without = run("check-config", config, "--no-files")
    assert (without.exit_code, "shop 1 user 0 ? 4 ? ?" in words(without.stdout)) == (0, True)


def test_check_config_finds_keys_beyond_32_bits(tmp_path: Path, content: dict[str, Any]) -> None:
    content["supportlonglong"] = False
    result = run("check-config", write_config(tmp_path, content), code=2)
    assert "row 0 has key -10" in result.stderr


@pytest.mark.parametrize(("command", "text"), [("check-config", None), ("load", "{"), ("serve", "[]"), ("lookup", None)])
def test_a_configuration_that_cannot_be_read_is_code_2(tmp_path: Path, command: str, text: str | None) -> None:
    path = tmp_path / "ps.json"
    if text is not None:
        path.write_text(text)
    result = run(command, path, *["shop", "item", "1"] * (command == "lookup"), code=2)
    assert f"error: {path}" in result.stderr


def test_load_fills_rocksdb_once(config: Path) -> None:
    result = run("load", config, code=0)
    assert re.fullmatch(
        r"hps_et\.shop\.user: rocks_db: loaded 300 rows in [\d.]+ s \([\d,]+ rows/s\)\n"
        r"hps_et\.shop\.item: rocks_db: loaded 500 rows in [\d.]+ s \([\d,]+ rows/s\)\n",
        result.stdout,
    )
    again = run("load", config, code=0)
    assert again.stdout == (
        "hps_et.shop.user: rocks_db: complete, nothing to do (300 rows)\n"
        "hps_et.shop.item: rocks_db: complete, nothing to do (500 rows)\n"
    )


def test_load_passes_over_models_that_use_no_database(tmp_path: Path, content: dict[str, Any]) -> None:
    content["models"][0]["embedding_cache_type"] = "stochastic"
    result = run("load", write_config(tmp_path, content), code=0)
    assert result.stdout == "shop: embedding_cache_type stochastic uses no database\n"


@pytest.mark.parametrize(
    ("persistent_db", "message"),
    [
        ({"type": "disabled"}, "persistent_db: got none, expected"),
        ({"type": "rocks_db", "path": "x", "read_only": True}, "persistent_db.read_only: got true, expected false"),
    ],
)
def test_load_needs_a_database_that_it_may_fill(
    tmp_path: Path, content: dict[str, Any], persistent_db: dict[str, Any], message: str
) -> None:
    content["persistent_db"] = persistent_db
    result = run("load", write_config(tmp_path, content), code=2)
    assert message in result.stderr


@pytest.mark.parametrize(
    ("raised", "code", "message"),
    [
        (errors.DatabaseError("writing table: no space left on device"), 1, "error: writing table: no space left on device\n"),
        (KeyboardInterrupt(), 130, "stopped\n"),
    ],
    ids=["failed", "interrupted"],
)
def test_a_load_that_ends_early_has_a_code_and_a_message(
    config: Path, monkeypatch: pytest.MonkeyPatch, raised: BaseException, code: int, message: str
) -> None:
    def end(*_: Any, **__: Any) -> None:
        raise raised

    monkeypatch.setattr("hps.models.loading.table_load.TableLoad.run", end)
    result = run("load", config)
    assert (result.exit_code, result.stderr) == (code, message)


@pytest.mark.parametrize(("table", "persistent"), [("item", True), ("1", False)])
def test_lookup_prints_vectors_and_marks_defaults(
    tmp_path: Path, content: dict[str, Any], table: str, persistent: bool
) -> None:
    if not persistent:
        del content["persistent_db"]
    result = run("lookup", write_config(tmp_path, content), "shop", table, 7, -3, 100_000, 7, code=0)
    lines = result.stdout.splitlines()
    assert [line.partition(":")[0] for line in lines] == ["7", "-3", "100000", "7"]
    for key, line in ((7, lines[0]), (-3, lines[1]), (7, lines[3])):
        printed = np.array(line.partition("[")[2].rstrip("]").split(", "), np.float32)
        np.testing.assert_array_equal(printed, sample_vectors(np.array([key]), 8, 2)[0])
    assert lines[2] == "100000: [0.5, 0.5, 0.5, 0.5, 0.5, 0.5, 0.5, 0.5]  (default vector: no database has this key)"


def test_lookup_prints_json_that_names_each_float32(config: Path) -> None:
    answer = json.loads(run("lookup", config, "shop", "user", "--json", -1, 5, 10**6, "--combiner", "sum").stdout)
    np.testing.assert_allclose(answer["sum"], sample_vectors(np.array([-1, 5]), 4, 1).sum(0), rtol=1e-6)
    assert (answer["model"], answer["table"]) == ("shop", "user")
    assert (answer["keys"], answer["found"]) == ([-1, 5, 10**6], [True, True, False])
    wanted = sample_vectors(np.array([-1, 5]), 4, 1)
    np.testing.assert_array_equal(np.array(answer["vectors"][:2], np.float32), wanted)
    assert answer["vectors"][2] == [0.0] * 4


def test_lookup_prints_what_a_bag_of_the_keys_is_answered_with(config: Path) -> None:
    last = run("lookup", config, "shop", "user", -1, 5, "--combiner", "mean").stdout.splitlines()[-1]
    printed = json.loads(last.removeprefix("mean: "))
    np.testing.assert_allclose(printed, sample_vectors(np.array([-1, 5]), 4, 1).mean(0), rtol=1e-6)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["shop", "item", "1", "--combiner", "min"], "got combiner 'min', expected one of ['sum', 'mean', 'sqrtn', 'max']"),
        (["shopp", "item", "1"], "model 'shopp': it is not in the configuration, which has: shop"),
        (["shop", "itm", "1"], "'itm'"),
        (["shop", "7", "1"], "'7'"),
        (["shop", "item", str(2**63)], f"got '{2**63}', expected 64-bit integers"),
        (["shop", "item", "one"], "got 'one', expected 64-bit integers"),
        (["shop", "item", "1", "--jsn"], "got '--jsn'"),
        (["shop", "item"], "KEY"),
    ],
)
def test_lookup_of_what_is_not_there_is_code_2(config: Path, arguments: list[str], message: str) -> None:
    result = run("lookup", config, *arguments, code=2)
    assert message in words(result.stderr)


def test_lookup_beside_a_server_says_how_to_ask_it(config: Path) -> None:
    with closing(implementation("database", "rocks_db").from_config(load_configuration(config).persistent_db)):
        result = run("lookup", config, "shop", "1", -4)
    assert result.exit_code == 1
    assert 'curl -s http://127.0.0.1:8000/v1/models/shop/lookup -d \'{"tables": {"item": [-4]}}\'' in result.stderr


def test_serve_says_when_its_port_is_taken_before_it_opens_anything(config: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        result = run("serve", config, "--port", port)
    assert result.exit_code == 2
    assert f"cannot listen on 127.0.0.1:{port}: Address already in use" in words(result.stderr)
    assert not (config.parent / "rocksdb").exists()


@pytest.fixture
def remarkable(tmp_path: Path, content: dict[str, Any]) -> Path:
    """A valid configuration with a key that has no effect and a setting that is not implemented."""
    content["models"][0].update(dense_file="dcn.model", fp8_quant=True)
    return write_config(tmp_path, content)


def test_check_config_prints_notices(remarkable: Path) -> None:
    first, second, *_ = run("check-config", remarkable).stdout.splitlines()
    assert first == f"note: {remarkable}: these keys of HugeCTR's dense part have no effect: models[].dense_file"
    assert second == f"warning: {remarkable}: model shop: fp8_quant is not implemented; it is read as false"


@pytest.mark.parametrize("command", ["load {}", "lookup {} shop item 1", "import ids.npz out.model --config {}"])
def test_other_commands_log_notices(
    tmp_path: Path, remarkable: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, command: str
) -> None:
    monkeypatch.chdir(tmp_path)
    caplog.set_level("INFO", "hps")
    np.savez("ids.npz", keys=np.arange(3), vectors=np.ones((3, 4), np.float32))
    run(*command.format(remarkable).split())
    notices = [(record.levelname, record.getMessage()) for record in caplog.records if record.name == "hps.configuration.load"]
    assert [level for level, _ in notices] == ["INFO", "WARNING"]
    assert "models[].dense_file" in notices[0][1]
    assert "fp8_quant is not implemented" in notices[1][1]


@pytest.mark.parametrize(
    ("state", "requests", "figures"),
    [
        ("promoted", 9, "; version 7 9 requests, 0.00% errors; version 8 9 requests, 0.00% errors"),
        ("promoted", 0, ""),  # after a restart, which forgets how many there were
        ("running", 0, "; version 7 0 requests, 0.00% errors; version 8 0 requests, 0.00% errors"),
    ],
)
def test_the_figures_of_an_ended_rollout_are_shown_while_they_are_known(state: str, requests: int, figures: str) -> None:
    versions = [{"version": version, "requests": requests, "error_rate": 0.0} for version in ("7", "8")]
    rollout = {"mode": "canary", "version": "8", "state": state, "share": 0.05, "step": 1, "steps": [{}]}
    shown = {"running": "gets 5 % of the requests"}.get(state, f"is {state}")
    text = _rollout_text("ranker", {**rollout, "by": "", "reason": "", "versions": versions, "compared": {}})
    assert text == f"ranker: canary of version 8 {shown}{figures}"
