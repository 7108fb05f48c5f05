"""`hps row-formats`, and the `row_dtype` that `hps import` writes."""

import json
from pathlib import Path

import numpy as np
import pytest

import hps
from hps.errors import ConfigError, InvalidInputError
from hps.models.importing.importer import import_model, import_tables
from tests.ring1.tools.cli.test_cli import run
from tests.servers.running_service import document_of, model_of

RNG = np.random.default_rng(2)
GOOD = RNG.normal(size=(50, 8)).astype(np.float32)
BAD = GOOD.copy()
BAD[[4, 9], 1] = np.nan


@pytest.fixture
def config(tmp_path: Path) -> Path:
    np.savez(tmp_path / "m.npz", emb_good=GOOD, emb_bad=BAD)
    import_tables(tmp_path / "m.npz", tmp_path / "shop", "emb_*", first_key=100)
    return tmp_path / "shop" / "ps.json"


def test_each_table_and_format_is_measured(config: Path) -> None:
    result = run("row-formats", config, "--json", code=1)
    found = json.loads(result.stdout)
    assert [(one["table"], one["row_dtype"]) for one in found] == [
        (f"shop/{table}", row_dtype) for table in ("good", "bad") for row_dtype in ("float16", "bfloat16", "int8")
    ]
    last = found[-1]
    assert (last["rows"], last["row_bytes"], last["refused_rows"], last["first_refused_key"]) == (50, 12, 2, 104)
    assert last["findings"] == ["refused rows: 2, the first of key 104"]
    assert all(one["findings"] == [] for one in found[:-1])


def test_a_format_may_be_chosen_and_tables_that_suffer_are_named(config: Path) -> None:
    result = run("row-formats", config, "--row-dtype", "int8", code=1)
    assert [line.split()[:2] for line in result.stdout.splitlines()[1:3]] == [["shop/good", "int8"], ["shop/bad", "int8"]]
    assert "12 of 32" in result.stdout
    assert result.stdout.splitlines()[-1] == "shop/bad as int8: refused rows: 2, the first of key 104"
    result = run("row-formats", config, "--row-dtype", "bfloat16", "--row-dtype", "float16")
    assert (result.exit_code, result.stdout.splitlines()[-1]) == (0, "no table suffers")
    assert len(result.stdout.splitlines()) == 6
    result = run("row-formats", config, "--row-dtype", "int4", code=2)
    assert "got 'int4', expected one of: float16, bfloat16, int8" in result.stderr


def test_a_delta_is_measured_with_its_base(tmp_path: Path) -> None:
    keys = np.arange(50)
    hps.write_version(tmp_path / "shop" / "1", {"item": (keys, GOOD)})
    hps.write_version(
        tmp_path / "shop" / "2", {"item": (keys[:3], BAD[3:6])}, delta_of="1", deleted={"item": np.empty(0, np.int64)}
    )
    config = tmp_path / "ps.json"
    config.write_text(json.dumps(document_of(model_of("shop", ["item"], {"item": 8}, version_path=str(tmp_path / "shop")))))
    [found] = json.loads(run("row-formats", config, "--row-dtype", "int8", "--json").stdout)
    assert (found["rows"], found["refused_rows"], found["first_refused_key"]) == (53, 1, 1)


def test_an_import_writes_the_format_and_serves_it(tmp_path: Path) -> None:
    np.savez(tmp_path / "m.npz", emb_good=GOOD, emb_other=GOOD[:20])
    result = run("import", tmp_path / "m.npz", tmp_path / "shop", "--tables", "emb_*", "--row-dtype", "int8", code=0)
    config = tmp_path / "shop" / "ps.json"
    [entry] = json.loads(config.read_text())["models"]
    assert entry["row_dtype"] == ["int8"]
    content = json.loads(config.read_text()) | {"device": "cpu"}
    with hps.HPS(content) as server:
        got = server.lookup(np.arange(50), "shop", 0)
    assert 0 < np.abs(got - GOOD).max() < 0.02
    np.savez(tmp_path / "one.npz", vectors=GOOD, keys=np.arange(50))
    result = run("import", tmp_path / "one.npz", tmp_path / "one.model", "--row-dtype", "float16")
    assert result.stdout.endswith('"embedding_vecsize_per_table": [8], "row_dtype": ["float16"]\n')
    run("import", tmp_path / "m.npz", tmp_path / "plain", "--tables", "emb_*")
    assert "row_dtype" not in (tmp_path / "plain" / "ps.json").read_text()


def test_an_import_refuses_rows_that_could_not_be_served(tmp_path: Path) -> None:
    np.savez(tmp_path / "m.npz", emb_good=GOOD, emb_bad=BAD)
    result = run("import", tmp_path / "m.npz", tmp_path / "shop", "--tables", "emb_*", "--row-dtype", "int8", code=2)
    error = " ".join(result.stderr.split())
    assert "importing table 'bad' (1 of 2 are written)" in error
    assert "element 1 of key 4, which row_dtype int8 cannot hold" in error
    assert sorted(path.name for path in (tmp_path / "shop").iterdir()) == ["good.model"]
    with pytest.raises(InvalidInputError, match="got row_dtype 'int4', expected one of: float32"):
        import_model(tmp_path / "m.npz", tmp_path / "x.model", vectors="emb_good", first_key=0, row_dtype="int4")
    with pytest.raises(ConfigError, match="row_dtype"):
        import_tables(tmp_path / "m.npz", tmp_path / "y", "emb_*", row_dtype="int4")
    result = run("import", tmp_path / "m.npz", "s/2", "--tables", "*", "--delta-of", "1", "--row-dtype", "int8")
    assert (result.exit_code, "--row-dtype" in result.stderr) == (2, True)
