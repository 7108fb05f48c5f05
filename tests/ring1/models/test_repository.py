"""Which versions and models a directory has, and what a version says of itself."""

import json
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from hps.configuration.load import load_dense
from hps.errors import ModelFileError, ModelFileNotFoundError
from hps.filesystems.local import LocalFileSystem
from hps.models.manifest import FileCheck, below, read_manifest
from hps.models.repository import VersionFiles, list_models, list_versions, table_sources, version_files, with_log_starts
from hps.models.sources import ModelSources


def put(path: Path, content: Any = b"") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often the file system is asked what."""
    asked: Counter[str] = Counter()

    def counting(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def ask(self: LocalFileSystem, *arguments: Any) -> Any:
            asked[name] += 1
            return real(self, *arguments)

        return ask

    for name in ("exists", "status", "read_into", "list", "directories"):
        monkeypatch.setattr(LocalFileSystem, name, counting(name, getattr(LocalFileSystem, name)))
    return asked


def test_versions_are_directories_with_positive_numbers_in_their_order(tmp_path: Path, asked: Counter[str]) -> None:
    assert list_versions(str(tmp_path), ModelSources()) == {}
    for name in ("0", "01", "-1", "+1", "1.5", "1e3", "٣", "²", "v4", "4 ", ".5.x.tmp", "5.tmp", "latest"):
        (tmp_path / name).mkdir()
    for name in ("10", "9", "2", "123456789012345678"):
        (tmp_path / name).mkdir()
    put(tmp_path / "7")
    put(tmp_path / "model.json", {})
    versions = list_versions(str(tmp_path), ModelSources())
    assert versions == {name: f"{tmp_path}/{name}" for name in ("2", "9", "10", "123456789012345678")}
    assert list(versions) == ["2", "9", "10", "123456789012345678"]
    assert asked == {"directories": 2}
    for find in (list_versions, list_models):
        with pytest.raises(ModelFileNotFoundError, match="absent"):
            find(str(tmp_path / "absent"), ModelSources())  # type: ignore[operator]


def test_versions_without_a_manifest_are_hidden_where_one_is_required(tmp_path: Path, asked: Counter[str]) -> None:
    (tmp_path / "1").mkdir()
    put(tmp_path / "2" / "version.json", {})
    assert list(list_versions(str(tmp_path), ModelSources(), manifest_required=True)) == ["2"]
    assert list(list_versions(f"{tmp_path}/", ModelSources())) == ["1", "2"]
    asked.clear()
    put(tmp_path / "3" / "version.json", {})
    assert list(list_versions(str(tmp_path), ModelSources(), manifest_required=True, known={"1", "2"})) == ["1", "2", "3"]
    assert asked == {"directories": 1, "exists": 1}


def test_a_manifest_says_what_a_version_is_and_its_files_are_below_it(tmp_path: Path) -> None:
    assert read_manifest(str(tmp_path / "2"), ModelSources()) is None
    files = {
        "item/key": {"size_bytes": 16, "crc32": "00ff00ff"},
        "./user/emb/../key": {"size_bytes": 8},
        "x": {"size_bytes": 1},
    }
    put(tmp_path / "2" / "version.json", {"delta_of": "12", "note": "Tuesday's", "files": files})
    manifest = read_manifest(str(tmp_path / "2"), ModelSources())
    assert manifest is not None
    assert (manifest.delta_of, manifest.note) == ("12", "Tuesday's")
    item, user, top = (
        {"key": FileCheck(size_bytes=16, crc32="00ff00ff")},
        {"key": FileCheck(size_bytes=8)},
        {"x": FileCheck(size_bytes=1)},
    )
    for table, checks in (("item", item), ("item/", item), ("./item", item), ("user", user), (".", top), ("other", {})):
        assert manifest.of_table(table) == checks
    found = version_files("2", f"{tmp_path}/2/", [".", "./item/", "a/b"], ModelSources())
    assert found.sparse_files == (f"{tmp_path}/2/", f"{tmp_path}/2/item", f"{tmp_path}/2/a/b")
    assert (found.delta_of, found.checks) == ("12", (top, item, {}))
    assert version_files("3", f"{tmp_path}/3", ["item"], ModelSources()).delta_of is None


@pytest.mark.parametrize(
    ("content", "message"),
    [
        *((b"", "it is not JSON"), (b'{"delta_of": "1"', "it is not JSON"), (b"\xff\xfe", "it is not JSON")),
        *((b"[" * 100_000, "it is not JSON"), (b"[]", "got list, expected a JSON object")),
        ({"delta_off": "1"}, "delta_off: .*write delta_of, note, step, written_at_us, files, updates, dense"),
        *(({"delta_of": 1}, "delta_of: "), ({"delta_of": "01"}, "delta_of: "), ({"delta_of": "1\n"}, "delta_of: ")),
        ({"files": {"key": {"size_bytes": -1}}}, "size_bytes"),
        ({"files": {"key": {"size_bytes": 8, "crc32": "abc"}}}, "crc32"),
        *(({"updates": {"item": {"0": value}}}, "updates.item.0: ") for value in (8, "")),
        ({"updates": {"item": {"first": "8"}}}, "updates.item.first"),
    ],
)
def test_a_manifest_that_is_not_as_it_should_be_is_an_error(tmp_path: Path, content: Any, message: str) -> None:
    put(tmp_path / "version.json", content)
    with pytest.raises(ModelFileError, match=f"{tmp_path}/version.json: .*{message}"):
        read_manifest(str(tmp_path), ModelSources())


def test_a_delta_without_positions_in_the_log_has_those_of_the_version_that_it_changes(tmp_path: Path) -> None:
    put(tmp_path / "1" / "version.json", {"updates": {"a": {"0": "7"}, "./b/": {"0": "3", "hps_et.shop.b/1": "4-0"}}})
    put(tmp_path / "2" / "version.json", {"delta_of": "1", "updates": {"a": {"0": "9"}}})

    def starts(version: str) -> list[Mapping[str, str]]:
        found = table_sources(version, lambda one: version_files(one, f"{tmp_path}/{one}", ["a", "b"], ModelSources()))
        return [one.log_start for one in found]

    assert starts("1") == [{"0": "7"}, {"0": "3", "hps_et.shop.b/1": "4-0"}]
    assert starts("2") == [{"0": "9"}, {"0": "3", "hps_et.shop.b/1": "4-0"}]


@pytest.mark.parametrize(
    ("manifest", "places", "found"),
    [
        ({"updates": {"a": {"0": "7"}}, "delta_of": "9", "written_at_us": 5}, ["1/a", "1/b/"], (({"0": "7"}, {}), 5)),
        ({"updates": {"a": {"0": "7"}}}, ["1/a"], (({"0": "7"},), 0)),
        ({"updates": {"a": {"0": "7"}}}, ["1/a", "2/b"], ((), 0)),  # of two versions: nobody can have meant that
        (None, ["1/a"], ((), 0)),
        ({"schema": "of something else"}, ["1/a"], ((), 0)),
    ],
)
def test_positions_are_found_beside_directories_that_are_configured_one_by_one(
    tmp_path: Path, manifest: Any, places: list[str], found: Any
) -> None:
    if manifest:
        put(tmp_path / "1" / "version.json", manifest)
    files = VersionFiles("1", tuple(f"{tmp_path}/{place}" for place in places))
    completed = with_log_starts(files, ModelSources())
    assert (completed.updates, completed.written_at_us) == found


def test_the_models_of_a_repository_are_found_and_a_broken_one_hides_no_other(tmp_path: Path, asked: Counter[str]) -> None:
    models = {
        "shop": ({"sparse_files": ["item"]}, {"sparse_files": ["item"], "model": "shop"}),
        "news": ({"model": "news"}, {"model": "news"}),
        "renamed": ({"model": "other"}, "got model 'other', expected 'renamed'"),
        "torn": (b'{"sparse_', "it is not JSON"),
        "no name": ({}, "no model can be called 'no name'"),
        "huge": (b" " * (17 << 20), "expected at most"),
    }
    for name, (content, _) in models.items():
        put(tmp_path / name / "model.json", content)
    (tmp_path / "folder" / "model.json").mkdir(parents=True)
    put(tmp_path / "other" / "config.pbtxt", b"name: x")
    put(tmp_path / "README", b"x")
    found = list_models(str(tmp_path), ModelSources())
    assert found.keys() == models.keys() | {"folder"}
    for name, (_, expected) in (models | {"folder": (None, "it is a directory")}).items():
        if isinstance(expected, str):
            assert isinstance(found[name], ModelFileError)
            assert expected in str(found[name])
        else:
            assert found[name] == expected
    assert asked == {"directories": 1, "status": 8, "read_into": 5}


OUTSIDE = ["../x", "../../../etc/passwd", "a/../../x", "..", "/etc/passwd", "%2e%2e/x", "a/%2E%2E/%2e%2e/x", "./../x"]
DENSE = {"format": "onnx", "file": "dense.onnx", "inputs": {"x": {}}, "outputs": ["y"]}
PROGRAM = {"file": "keys.onnx", "inputs": ["x"], "outputs": ["k"]}


@pytest.mark.parametrize("place", ["", "file://", "s3://bucket"])
@pytest.mark.parametrize("path", OUTSIDE)
def test_no_path_of_a_repository_leads_out_of_the_directory_of_its_version(path: str, place: str, tmp_path: Path) -> None:
    """Whoever writes a version must not choose which other files of the machine or bucket a server reads."""
    with pytest.raises(ModelFileError, match=r"got the path .*, expected a file or directory below it"):
        below(f"{place}{tmp_path}/1", path)
    dense = [{**DENSE, "file": path}, {**DENSE, "keys": [{**PROGRAM, "file": path}]}]
    for files, said in ([path], {}), (["item"], {"dense": dense[0]}), (["item"], {"dense": dense[1]}):
        put(tmp_path / "1" / "version.json", said)
        with pytest.raises(ModelFileError, match=r"got the path .*, expected a file or directory below it"):
            version_files("1", str(tmp_path / "1"), files, ModelSources())
    put(tmp_path / "1" / "version.json", {})
    with pytest.raises(ModelFileError, match="got the path"):
        version_files("1", str(tmp_path / "1"), ["item"], ModelSources(), load_dense(dense[0]))


@pytest.mark.parametrize("path", ["item", "./item", "a/../item", "item/", "..item", "a..b/item"])
def test_paths_within_the_directory_are_taken(path: str) -> None:
    assert below("s3://b/m/1", path) == f"s3://b/m/1/{path.rstrip('/').removeprefix('./').removeprefix('a/../')}"
    assert below("s3://b/m/1", ".") == "s3://b/m/1"
