"""`hps import --delta-of`: a base and its increments become versions that answer as the trainer's table would."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner, Result

import hps
from hps.errors import InvalidInputError, ModelFileError, ModelFileNotFoundError
from hps.models.importing.increments import import_delta
from hps.models.manifest import read_manifest
from hps.models.sources import ModelSources
from hps.tools.cli.app import app
from tests.servers.running_service import document_of, model_of
from tests.tables.trainer_dumps import NO_KEYS, save_delta, save_dynamicemb, save_torcheasyrec

Array = np.ndarray[Any, Any]
DIMS = {"item": 3, "user": 2}
KEYS = np.arange(20, dtype=np.int64)


def rows(keys: Any, dim: int, step: int) -> tuple[Array, Array]:
    """Rows whose vectors say of which key and step they are."""
    keys = np.asarray(keys, np.int64)
    return keys, (keys[:, None] + np.arange(dim) * 100 + step * 1000).astype(np.float32)


def run(*arguments: object) -> Result:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments], env={"COLUMNS": "300"})
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """The model's directory, with version 1."""
    dump = save_dynamicemb(tmp_path / "base", {name: rows(KEYS, dim, 0) for name, dim in DIMS.items()})
    done = run("import", dump, tmp_path / "shop" / "1", "--tables", "*", "--write-config", tmp_path / "whole.json")
    assert done.exit_code == 0, done.output
    return tmp_path / "shop"


def answers(model: Path, version: str) -> dict[str, dict[int, tuple[int, ...]]]:
    """What a server answers for every key; of absent keys nothing."""
    entry = model_of("shop", [f"{name}.model" for name in DIMS], DIMS, version_path=str(model))
    entry["default_value_for_each_table"] = [-1.0] * len(DIMS)
    entry["version_policy"] = {"specific": {"versions": [int(version)]}}
    with hps.HPS(document_of(entry)) as server:
        asked = np.arange(40, dtype=np.int64)
        found = server.lookup_tables(dict.fromkeys(DIMS, asked), "shop")
    return {
        name: {key: tuple(map(int, row)) for key, row in zip(asked.tolist(), found[name], strict=True) if row[0] != -1}
        for name in DIMS
    }


def expected(*steps: dict[str, tuple[Any, int, Any]]) -> dict[str, dict[int, tuple[int, ...]]]:
    """The tables after steps: of each table the changed keys, the step, and the deleted keys."""
    tables: dict[str, dict[int, tuple[int, ...]]] = {name: {} for name in DIMS}
    for step in (dict.fromkeys(DIMS, (KEYS, 0, ())), *steps):
        for name, (changed, number, gone) in step.items():
            for key in gone:
                tables[name].pop(key, None)
            keys, vectors = rows(changed, DIMS[name], number)
            tables[name] |= {key: tuple(map(int, row)) for key, row in zip(keys.tolist(), vectors, strict=True)}
    return tables


def write_step(path: Path, number: int, change: dict[str, tuple[Any, int, Any]], world: int = 3) -> Path:
    tables = {
        f"model.ebc.{name}": (*rows(changed, DIMS[name], step), np.asarray(gone, np.int64))
        for name, (changed, step, gone) in change.items()
    }
    return save_delta(path, number, tables, world)


STEPS: dict[int, dict[str, tuple[Any, int, Any]]] = {
    100: {"item": ([1, 2, 25], 100, [3, 4]), "user": ([0], 100, [19])},
    200: {"item": ([2, 3], 200, [25, 5])},
    300: {"item": ([25, 4], 300, [1]), "user": ([], 300, [0, 7])},
}
PATTERN = "model.ebc.*"


@pytest.mark.parametrize(
    ("numbers", "options", "message"),
    [
        (
            (100, 300, 400, 500),
            {},
            "no increment of step 200 among steps 100, 300, .* for each multiple of 100",
        ),
        ((200, 300, 400, 500), {"after": 0}, "no increment of step 100 among steps 200, 300, 400, 500"),
        ((100, 200, 400, 500), {"after": 250}, "no increment of step 300 among steps 400, 500"),
        ((100, 200, 400, 500), {"every": 50}, "no increment of step 150, 250, 300, 350, 450 among"),
        ((100, 200, 300, 400), {"after": 400}, "expected one after 400"),
        ((517, 840, 1155), {}, "--every 0 for an irregular one"),
        ((1, 2, 10**15), {}, "no increment of step 3, 4, 5, 6, 7, 8, 9, 10 among"),
        ((517, 840, 1155), {"every": 0}, None),
        ((100, 200, 300, 400, 450, 500), {"after": 50}, None),  # a training that ended at 450 and went on
        ((8, 9, 10), {}, None),  # numbers, not texts
    ],
)
def test_a_missing_step_is_named(
    base: Path, tmp_path: Path, numbers: tuple[int, ...], options: Any, message: str | None
) -> None:
    source = steps_of(tmp_path / "deltas", *numbers)
    if message is None:
        assert import_delta(source, base / "2", "1", tables=PATTERN, **options).steps == numbers
        assert answers(base, "2")["item"] == expected({"item": ([1], numbers[-1], [])})["item"]
        return
    with pytest.raises(ModelFileError, match=message):
        import_delta(source, base / "2", "1", tables=PATTERN, **options)
    assert [one.name for one in base.iterdir()] == ["1"]


def steps_of(path: Path, *numbers: int) -> Path:
    """Increments that change one row each."""
    for number in numbers:
        write_step(path, number, {"item": ([1], number, [])})
    return path


def test_increments_that_do_not_fit_the_version_or_each_other_leave_none(base: Path, tmp_path: Path) -> None:
    for number, (change, message) in enumerate(
        (
            (
                {"price": (*rows([1], 3, 0), NO_KEYS)},
                r"got table 'price', expected a table of the version .*item.model",
            ),
            ({"item": (*rows([1], 4, 0), NO_KEYS)}, r"got 4 elements a row of 'item', expected 3, as in the version"),
            ({}, "got no row of any table"),
        )
    ):
        save_delta(tmp_path / str(number), 100, change)
        with pytest.raises(ModelFileError, match=message):
            import_delta(tmp_path / str(number), base / "2", "1", tables="*")
    deltas = tmp_path / "deltas"
    for number, step in STEPS.items():
        write_step(deltas, number, step)
    file = deltas / "step_300" / "delta_embedding_step_300_rank_1_of_3.parquet"
    whole = file.read_bytes()
    for content in (whole[:-5], whole[: len(whole) // 2], b""):
        file.write_bytes(content)
        with pytest.raises(ModelFileError, match=r"step_300_rank_1_of_3\.parquet: it cannot be read"):
            import_delta(deltas, base / "2", "1", tables=PATTERN)
    file.unlink()
    with pytest.raises(ModelFileError, match="files of step 300 with rank 1 of 3 missing"):
        import_delta(deltas, base / "2", "1", tables=PATTERN)
    write_step(deltas, 100, STEPS[100], world=1)
    with pytest.raises(ModelFileError, match=r"delta_embedding_step_100.parquet .*of step 100, expected one increment"):
        import_delta(deltas, base / "2", "1", tables=PATTERN)
    for kind in ("keys", "values"):
        (tmp_path / f"t_emb_{kind}.rank_0.world_size_99999999999999").touch()
    with pytest.raises(ModelFileError, match="rank 1, 2, 3, "):  # at once
        import_delta(tmp_path, base / "2", "1", tables="*", file_format="dynamicemb")
    assert [one.name for one in base.iterdir()] == ["1"]


def test_increments_of_dynamicemb_by_step(base: Path, tmp_path: Path) -> None:
    """A directory for each step, with the keys and values that `incremental_dump` returned on each rank."""
    changes = {1: {"item": ([1, 2], 1, ())}, 2: {"item": ([2, 30], 2, ())}, 3: {"user": ([4], 3, ())}}
    for number, change in changes.items():
        tables = {name: rows(change.get(name, ([], 0, ()))[0], dim, number) for name, dim in DIMS.items()}
        save_dynamicemb(tmp_path / "deltas" / f"step_{number}", tables)
    import_delta(tmp_path / "deltas", base / "2", "1", tables="*")
    assert answers(base, "2") == expected(*changes.values())


def test_one_increment_without_a_step(base: Path, tmp_path: Path) -> None:
    source = save_torcheasyrec(tmp_path / "sparse", {}, {"user": rows([1, 21], 2, 5)})
    imported = import_delta(source, base / "2", "1", tables="*")
    assert (imported.steps, dict(imported.changed)) == ((), {"item.model": 0, "user.model": 2})
    assert answers(base, "2") == expected({"user": ([1, 21], 5, ())})
    with pytest.raises(InvalidInputError, match="expected a directory of increments named by their steps"):
        import_delta(source, base / "3", "2", tables="*", every=100)


def test_the_directory_of_one_step_is_that_step(base: Path, tmp_path: Path) -> None:
    for number, world in ((100, 3), (200, 1)):
        source = write_step(tmp_path / "deltas", number, STEPS[number], world)
        imported = import_delta(source, base / str(number // 100 + 1), str(number // 100), tables=PATTERN)
        assert imported.steps == (number,)
    assert answers(base, "3") == expected(STEPS[100], STEPS[200])
    with pytest.raises(ModelFileError, match="got steps 100, expected one after 200"):
        import_delta(tmp_path / "deltas" / "step_100", base / "4", "3", tables=PATTERN)
    source = save_torcheasyrec(tmp_path / "sparse", {}, {"user": rows([1], 2, 5)})
    import_delta(source, base / "4", "3", tables="*")  # does not say its step: what follows is still after 200
    manifest = read_manifest(str(base / "4"), ModelSources())
    assert manifest is not None
    assert manifest.step == 200


def test_without_the_base_there_is_no_delta(base: Path, tmp_path: Path) -> None:
    source = write_step(tmp_path / "deltas", 100, STEPS[100])
    for version, delta_of in (("x", "1"), ("2", "x"), ("02", "1")):
        with pytest.raises(InvalidInputError, match="expected <model>/<number>"):
            import_delta(source, base / version, delta_of, tables=PATTERN)
    with pytest.raises(ModelFileNotFoundError):
        import_delta(source, base / "3", "2", tables=PATTERN)
    shutil.copytree(base / "1" / "item.model", base / "1" / ".item.model.0123.tmp")  # a killed import left it
    assert set(import_delta(source, base / "2", "1", tables=PATTERN).changed) == {"item.model", "user.model"}
    shutil.rmtree(base / "1" / "item.model")
    shutil.rmtree(base / "1" / "user.model")
    with pytest.raises(ModelFileNotFoundError, match="has no table"):
        import_delta(source, base / "3", "1", tables=PATTERN)


def test_options_that_do_not_fit_each_other_are_refused(base: Path, tmp_path: Path) -> None:
    for arguments, message in (
        (["--delta-of", "1"], "--delta-of needs --tables"),
        (["--tables", "*", "--after", "3"], "--after and --every need --delta-of"),
        (["--tables", "*", "--delta-of", "1", "--overwrite"], "goes without --model, --write-config, --overwrite"),
    ):
        done = run("import", tmp_path / "deltas", base / "2", *arguments)
        assert done.exit_code == 2
        assert message in " ".join(done.output.split())


def test_a_base_that_is_imported_twice_answers_the_second(base: Path, tmp_path: Path) -> None:
    dump = save_dynamicemb(tmp_path / "again", {name: rows(KEYS[:9], dim, 7) for name, dim in DIMS.items()}, world=2)
    done = run("import", dump, base / "1", "--tables", "*", "--write-config", tmp_path / "whole.json", "--overwrite")
    assert done.exit_code == 0, done.output
    assert {key for key, row in answers(base, "1")["item"].items() if row[0] >= 7000} == set(range(9))
    assert json.loads((tmp_path / "whole.json").read_text())["models"][0]["embedding_vecsize_per_table"] == [3, 2]


@pytest.mark.parametrize("world", [1, 3])
def test_increments_are_one_version_and_a_second_import_continues(base: Path, tmp_path: Path, world: int) -> None:
    """Keys that a later step deletes, and deleted ones that a later step brings back."""
    deltas = tmp_path / "deltas"
    for number, change in STEPS.items():
        write_step(deltas, number, change, world)
    done = run("import", deltas, base / "2", "--tables", PATTERN, "--delta-of", 1)
    assert done.exit_code == 0, done.output
    assert "a delta of version 1, steps 100 to 300" in done.output
    assert "item.model: 5 rows changed, 5 keys deleted" in done.output
    assert answers(base, "2") == expected(*STEPS.values())
    manifest = read_manifest(str(base / "2"), ModelSources())
    assert manifest is not None
    assert (manifest.delta_of, manifest.step) == ("1", 300)
    more = {400: {"item": ([6], 400, [2])}, 500: {"user": ([30], 500, [])}, 600: {"item": ([2], 600, [])}}
    for number, change in more.items():
        write_step(deltas, number, change, world)
    assert import_delta(deltas, base / "3", "2", tables=PATTERN).steps == (400, 500, 600)
    assert answers(base, "3") == expected(*STEPS.values(), *more.values())
    assert answers(base, "2") == expected(*STEPS.values())
    for version, of, after, error, message in (
        ("4", "3", None, ModelFileError, "got steps 100, 200, 300, 400, 500, 600, expected one after 600"),
        ("3", "2", None, ModelFileError, "it exists"),
        ("4", "2", 100, InvalidInputError, "got --after 100, expected 300 or later"),
    ):
        with pytest.raises(error, match=message):
            import_delta(deltas, base / version, of, tables=PATTERN, after=after)
    assert not (base / "4").exists()
