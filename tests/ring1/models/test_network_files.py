"""The files of a network: found, checked and identified like those of tables."""

import io
import json
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hps
from hps.configuration.load import DenseConfig, load_dense
from hps.configuration.tiers import ModelSourceConfig
from hps.filesystems.local import LocalFileSystem
from hps.models.manifest import FileCheck, read_manifest
from hps.models.network_files import NetworkFiles
from hps.models.repository import VersionFiles, network_of, version_files
from hps.models.sources import ModelSources

SAID = {"format": "onnx", "file": "dense.onnx", "inputs": {"item": {"table": "item"}}, "outputs": ["score"]}
ROWS = {"item": (np.arange(3), np.ones((3, 2), np.float32))}
SOURCES = ModelSources()


def said(**changes: Any) -> DenseConfig:
    return load_dense({**SAID, **changes})


CUT = said(
    keys=[{"file": f"keys/{place}.onnx", "inputs": ["age"], "outputs": [f"k{place}"]} for place in range(2)],
    inputs={"age": {"dtype": "int64"}},
    lookups={"item": {"table": "item", "keys": {"output": "k1"}}},
)


def network(version: Path, base: DenseConfig | None = None) -> NetworkFiles:
    found = version_files(version.name, str(version), ["item"], SOURCES, base).network
    assert found is not None
    return found


@pytest.fixture
def version(tmp_path: Path) -> Path:
    hps.write_version(tmp_path / "1", ROWS, network=(SAID, b"a network"))
    return tmp_path / "1"


def test_a_version_has_the_network_that_was_written_with_it(version: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = network(version, said(file="other"))
    assert (found.config, found.places) == (said(), (f"{version}/dense.onnx",))
    assert found.read(SOURCES) == {"dense.onnx": b"a network"}
    manifest = read_manifest(str(version), SOURCES)
    assert manifest is not None
    assert manifest.files["dense.onnx"] == FileCheck(size_bytes=9, crc32="a98fbbdd")
    content, other = bytes(range(256)) * 5, version.parent / "2"
    hps.write_version(other, ROWS, network=(said(file="./networks/dense.onnx"), content))
    monkeypatch.setattr(LocalFileSystem, "part_bytes", 100)
    assert network(other).read(SOURCES) == {"./networks/dense.onnx": content}
    with pytest.raises(hps.ConfigError, match="unknown key; did you mean outputs"):
        hps.write_version(version.parent / "3", ROWS, network=({**SAID, "output": ["s"]}, b"a network"))
    assert not (version.parent / "3").exists()


def test_a_version_has_the_keys_programs_of_its_network(tmp_path: Path) -> None:
    contents = {"dense.onnx": b"a network", "keys/0.onnx": b"a program", "keys/1.onnx": b"another"}
    version = tmp_path / "1"
    hps.write_version(version, ROWS, network=(CUT, contents))
    found = network(version)
    assert found.places == tuple(f"{version}/{name}" for name in contents)
    assert found.read(SOURCES) == contents
    assert found.size_bytes(SOURCES) == sum(map(len, contents.values()))
    assert network(version).fingerprint(SOURCES) == found.fingerprint(SOURCES)


@pytest.mark.parametrize("place", [0, 1, 2])
def test_each_file_of_a_network_is_checked(tmp_path: Path, place: int) -> None:
    contents = dict.fromkeys(CUT.files, b"content")
    version = tmp_path / "1"
    hps.write_version(version, ROWS, network=(CUT, contents))
    before, file = network(version).fingerprint(SOURCES), version / CUT.files[place]
    file.write_bytes(b"_ontent")
    with pytest.raises(hps.ModelFileError, match=rf"{file.name}: its content has CRC-32 [0-9a-f]{{8}}, expected the "):
        network(version).read(SOURCES)
    assert network(version).fingerprint(SOURCES) != before
    file.unlink()  # a version that is half copied
    for ask in ("read", "fingerprint", "size_bytes"):
        with pytest.raises(hps.ModelFileNotFoundError, match=file.name):
            getattr(network(version), ask)(SOURCES)


@pytest.mark.parametrize(
    ("contents", "got"),
    [
        (b"alone", "dense.onnx"),
        ({}, "none"),
        ({"dense.onnx": b"a", "keys/0.onnx": b"b"}, "dense.onnx, keys/0.onnx"),
        (
            {**dict.fromkeys(("dense.onnx", "keys/0.onnx", "keys/1.onnx"), b"a"), "x": b"b"},
            "dense.onnx, keys/0.onnx, keys/1.onnx, x",
        ),
    ],
)
def test_a_version_is_written_with_all_files_of_its_network_and_no_other(tmp_path: Path, contents: Any, got: str) -> None:
    expected = rf"got the network's files {got}, expected dense.onnx, keys/0.onnx, keys/1.onnx, as dense says"
    with pytest.raises(hps.InvalidInputError, match=expected):
        hps.write_version(tmp_path / "1", ROWS, network=(CUT, contents))
    assert list(tmp_path.iterdir()) == []


def test_what_is_said_by_default_is_not_written(tmp_path: Path) -> None:
    """A server of an earlier release reads the version, too."""
    hps.write_version(tmp_path / "1", ROWS, network=(said(dynamic_batching=True, sizes={}), b"a network"))
    assert json.loads((tmp_path / "1" / "version.json").read_text())["dense"] == SAID


def test_another_content_size_or_no_file_is_refused(version: Path) -> None:
    (version / "dense.onnx").write_bytes(b"b network")
    with pytest.raises(hps.ModelFileError, match=r"dense\.onnx: its content has CRC-32 [0-9a-f]{8}, expected the a98fbbdd"):
        network(version).read(SOURCES)
    (version / "dense.onnx").write_bytes(b"a longer network")
    for ask in ("read", "fingerprint"):
        with pytest.raises(hps.ModelFileError, match=r"dense\.onnx.* got 16 bytes|16"):
            getattr(network(version), ask)(SOURCES)
    (version / "dense.onnx").write_bytes(b"")
    with pytest.raises(hps.ModelFileError, match="got an empty file"):
        NetworkFiles(said(), (f"{version}/dense.onnx",)).read(SOURCES)
    (version / "dense.onnx").unlink()
    for ask in ("read", "fingerprint"):
        with pytest.raises(hps.ModelFileNotFoundError, match=r"dense\.onnx"):
            getattr(network(version), ask)(SOURCES)


def test_a_file_that_changes_while_it_is_read_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = tmp_path / "dense.onnx"
    place.write_bytes(bytes(1000))
    monkeypatch.setattr(LocalFileSystem, "part_bytes", 100)
    read_into = LocalFileSystem.read_into

    def changing(self: LocalFileSystem, path: str, offset: int, *rest: Any) -> None:
        if offset == 500:
            place.unlink()
            place.write_bytes(bytes(1001))
        read_into(self, path, offset, *rest)

    monkeypatch.setattr(LocalFileSystem, "read_into", changing)
    with pytest.raises(hps.ModelFileChangedError):
        NetworkFiles(said(), (str(place),)).read(SOURCES)


def test_the_fingerprint_follows_the_file_and_what_is_said_of_it(tmp_path: Path) -> None:
    place = tmp_path / "dense.onnx"
    place.write_bytes(b"1")

    def fingerprint(**changes: Any) -> str:
        return NetworkFiles(said(**changes), (str(place),)).fingerprint(SOURCES)

    first = fingerprint()
    assert fingerprint() == first
    assert fingerprint(dynamic_batching=False, max_queue_delay_us=5, refuse_nan=False) == first  # nothing to open again
    others = [
        fingerprint(outputs=["a"]),
        fingerprint(inputs={"item": {"table": "item", "pooling": "sum"}}),
        fingerprint(format="pt2"),
    ]
    place.unlink()
    place.write_bytes(b"22")
    others.append(fingerprint())
    assert len({first, *others}) == 5


def test_a_manifest_with_another_network_is_refused(version: Path) -> None:
    text = json.loads((version / "version.json").read_text())
    text["dense"]["inputs"]["item"]["tabel"] = 1
    (version / "version.json").write_text(json.dumps(text))
    with pytest.raises(hps.ModelFileError, match=r"version\.json: dense\.inputs\.item\.tabel: "):
        network(version)


def test_a_delta_has_its_own_network_or_that_of_its_base(tmp_path: Path) -> None:
    hps.write_version(tmp_path / "1", ROWS, network=(SAID, b"first"))
    hps.write_version(tmp_path / "2", ROWS, delta_of="1")
    hps.write_version(tmp_path / "3", ROWS, delta_of="2", network=(said(outputs=["other"]), b"third"))
    hps.write_version(tmp_path / "4", ROWS, delta_of="3")
    hps.write_version(tmp_path / "5", ROWS)

    def of(version: str, dense: DenseConfig | None = None) -> str:
        def find(number: str) -> VersionFiles:
            return version_files(number, str(tmp_path / number), ["item"], SOURCES, dense)

        found = network_of(version, find)
        return "" if found is None else found.places[0].removeprefix(f"{tmp_path}/")

    assert [of(str(number)) for number in range(1, 6)] == [f"{place}/dense.onnx" for place in "1133"] + [""]
    assert of("5", said(file="f")) == "5/f"  # the model's, for whole versions that name none
    assert of("2", said(file="f")) == "1/dense.onnx"


def archive(*members: str) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as written:
        for member in members:
            written.writestr(member, b"")
    return file.getvalue()


@pytest.mark.parametrize("place", [0, 1])
def test_machine_code_needs_trust_that_the_repository_cannot_give(tmp_path: Path, place: int) -> None:
    pytest.importorskip("torch")
    said = CUT.model_copy(update={"format": "pt2"})
    contents = dict.fromkeys(CUT.files, archive("m/models/model.json"))
    contents[CUT.files[place]] = archive("m/data/aotinductor/model/x.so")
    hps.write_version(tmp_path / "1", ROWS, network=(said, contents))
    found = network(tmp_path / "1")
    with pytest.raises(hps.ModelFileError, match=rf"{CUT.files[place]}: got machine code .* model_source\.trust: true in the"):
        found.read(SOURCES)
    assert found.read(ModelSources(ModelSourceConfig(trust=True))) == contents
    manifest = tmp_path / "1" / "version.json"
    for content in ({"trust": True}, {"model_source": {"trust": True}}):
        manifest.write_text(json.dumps({**json.loads(manifest.read_text()), **content}))
        with pytest.raises(hps.ModelFileError, match="Extra inputs are not permitted"):
            network(tmp_path / "1")
