"""The models of a configuration and of a repository, their versions, and which of them to serve."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hps
from hps.configuration.load import load_configuration
from hps.models.sources import ModelSources
from hps.versions.catalog import ModelCatalog
from hps.versions.kept_files import KeptFiles
from hps.versions.pins import Pins
from tests.servers.running_service import document_of, model_of

KEYS = np.arange(5)


def write(directory: Path, version: str = "1", model: str = "m", **entry: Any) -> None:
    hps.write_sparse_model(directory / model / version / "t", (KEYS, np.zeros((5, 4), np.float32)), overwrite=True)
    content = model_of(model, ["t"], {"t": 4}, **entry)
    (directory / model / "model.json").write_text(json.dumps(content))


def catalog_of(document: dict[str, Any], pins: Pins | None = None) -> ModelCatalog:
    configuration = load_configuration(document)
    return ModelCatalog(configuration, ModelSources(configuration.model_source), pins)


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    for version in ("1", "2", "10"):
        write(tmp_path, version)
    return tmp_path


@pytest.fixture
def catalog(repository: Path) -> ModelCatalog:
    return catalog_of({**document_of(), "model_repository": str(repository)})


def test_a_repository_is_read_when_it_is_scanned(catalog: ModelCatalog, repository: Path) -> None:
    assert catalog.names == ["m"]
    write(repository, model="n")
    assert catalog.names == ["m"]
    catalog.scan()
    assert catalog.names == ["m", "n"]
    write(repository, model="o")
    assert catalog.model("o").model == "o", "an unknown model is looked for"
    assert catalog.versions("m") == ["1", "2", "10"]
    with pytest.raises(hps.UnknownModelError, match="'p': it is not configured; configured are: m, n, o"):
        catalog.model("p")


def test_a_wrong_entry_is_the_problem_of_its_model_alone(catalog: ModelCatalog, repository: Path) -> None:
    write(repository, model="n")
    for text in ("{", '{"model": "n"}'):
        (repository / "n" / "model.json").write_text(text)
        catalog.scan()
        assert (catalog.names, list(catalog.problems)) == (["m"], ["n"])
        with pytest.raises(hps.HPSError) as problem:
            catalog.model("n")
        assert problem.value is catalog.problems["n"]
    write(repository, model="n")
    catalog.scan()
    assert (catalog.names, catalog.problems) == (["m", "n"], {})


def test_an_entry_that_is_added_stands_above_that_of_the_repository_until_it_is_restored(catalog: ModelCatalog) -> None:
    found = catalog.model("m")
    first, second = (found.model_copy(update={"max_batch_size": size}) for size in (1, 2))
    before = catalog.add(first)
    assert (before, catalog.add(second), catalog.model("m").max_batch_size) == (None, first, 2)
    catalog.restore("m", first)
    assert catalog.model("m") is first
    catalog.restore("m", None)
    assert catalog.model("m") is found
    other = found.model_copy(update={"model": "other"})
    assert (catalog.add(other), sorted(catalog.names)) == (None, ["m", "other"])
    catalog.restore("other", None)
    assert catalog.names == ["m"]


def test_versions_of_a_configuration_are_its_own(tmp_path: Path) -> None:
    places = [tmp_path / version / "t" for version in "123"]
    versions = [{"version": str(number), "sparse_files": [str(places[number - 1])]} for number in (2, 3)]
    catalog = catalog_of(document_of(model_of("m", places[:1], {"t": 4}, versions=versions)))
    catalog.scan()
    assert catalog.versions("m") == ["1", "2", "3"]
    for version, place in zip("123", places, strict=True):
        found = catalog.version("m", version)
        assert (found.config.version, found.config.sparse_files) == (version, (str(place),))
    with pytest.raises(hps.UnknownVersionError, match="got version '4', expected one of 1, 2, 3"):
        catalog.version("m", "4")
    assert (catalog.document("m"), catalog.document("nobody")) == (None, None)
    with pytest.raises(hps.ConflictError, match="set model_repository or version_path"):
        catalog.change_fleet("m", "rollback", None, "3")


TWO, SOME = {"latest": {"num_versions": 2}}, {"specific": {"versions": [1, 10, 5]}}


@pytest.mark.parametrize(
    ("policy", "pin", "chosen"),
    [
        ({}, "", ["10"]),
        (TWO, "", ["2", "10"]),
        ({"all": {}}, "", ["1", "2", "10"]),
        (SOME, "", ["1", "10"]),
        ({}, "2", ["2"]),
        ({}, "5", ["2"]),
        (TWO, "2", ["1", "2"]),
        (SOME, "2", ["1", "2"]),
    ],  # the files of 5 are gone: a version below
)
def test_a_pin_chooses_as_if_nothing_were_newer(repository: Path, policy: dict[str, Any], pin: str, chosen: list[str]) -> None:
    write(repository, **({"version_policy": policy} if policy else {}))
    catalog = catalog_of({**document_of(), "model_repository": str(repository)}, Pins(KeptFiles(None, "hps-pins")))
    without = catalog.to_serve("m")
    if pin:
        catalog.pins.pin("m", pin, "deploy")
    assert catalog.to_serve("m") == chosen
    assert catalog.to_serve("m", pinned=False) == without


def test_where_no_version_is_left_it_says_what_was_expected(repository: Path) -> None:
    write(repository, version_policy={"specific": {"versions": [5, 6]}})
    catalog = catalog_of({**document_of(), "model_repository": str(repository)}, Pins(KeptFiles(None, "hps-pins")))

    def says(complaint: str) -> None:
        with pytest.raises(hps.UnknownVersionError, match=complaint):
            catalog.to_serve("m")

    says(r"got versions 1, 2, 10, expected versions 5, 6 \(version_policy\)")
    (repository / "m" / "1").rename(repository / "aside-1")
    catalog.pins.pin("m", "1", "deploy")
    says("version 1 is pinned by deploy, .*, and its files are gone; got versions 2, 10")
    catalog.change_fleet("m", "rollback", None, "10")
    (repository / "m" / "2").rename(repository / "aside-2")
    says(r"the fleet serves version 2 .*; got versions 10, withdrawn 10")


def test_the_fleet_decides_before_the_pin_and_the_policy(catalog: ModelCatalog) -> None:
    catalog.pins.pin("m", "1", "deploy")
    catalog.change_fleet("m", "rollback", None, "10")
    assert (catalog.to_serve("m"), catalog.to_serve("m", pinned=False)) == (["2"], ["2"])
    document = catalog.document("m")
    assert document is not None
    assert (document.version, document.withdrawn) == ("2", ("10",))
    catalog.change_fleet("m", "unpin", None, "2")
    assert catalog.to_serve("m") == ["2"], "not the one that was withdrawn"


def test_a_model_of_a_fleet_whose_repository_is_away_is_not_gone(catalog: ModelCatalog, repository: Path) -> None:
    write(repository, model="n")
    catalog.scan()
    catalog.change_fleet("m", "rollback", None, "10")
    for name in ("m", "n"):
        (repository / name).rename(repository.parent / f"{repository.name}-{name}")
    for _ in range(2):
        catalog.scan()
        assert catalog.names == ["m"]
