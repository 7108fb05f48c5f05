"""Packages that add implementations, good and broken; `ring2/repo/test_extending.py` builds and installs one."""

import importlib.util
import json
import re
from pathlib import Path

import pytest

from hps import ConfigError, MissingDependencyError
from hps.configuration.load import load_configuration
from hps.ground.registry import IMPLEMENTATIONS, implementation, names
from tests import ROOT
from tests.fakes import entry_points

PAGE = (ROOT / "docs" / "extending.md").read_text()
FILES = dict(re.findall(r"^`(\S+)`[^\n`]*(?:`[^\n`]*`[^\n`]*)*:\n\n```\w+\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL))


def install(
    directory: Path, monkeypatch: pytest.MonkeyPatch, group: str, points: dict[str, str], package: str = "acme"
) -> None:
    """Put a package with these entry points on sys.path."""
    entry_points.install(directory, group, points, package)
    monkeypatch.syspath_prepend(directory)


def problems(section: str, kind: str) -> list[str]:
    model = json.loads(FILES["ps.json"])["models"][0]
    with pytest.raises(ConfigError) as caught:
        load_configuration({"models": [model], section: {"type": kind}})
    return caught.value.problems


BROKEN = {
    "absent": ("no_such_module:Database", "of the package acme 2.1 (no_such_module:Database) cannot be imported: No module"),
    "raising": ("acme_raises:Database", "cannot be imported: RuntimeError('boom'); install a version that works"),
    "misnamed": ("acme_empty:Database", "cannot be imported: AttributeError"),
    "no_class": ("json:dumps", "expected a subclass of hps.stores.base:Database"),
    "unfinished": ("hps.stores.base:PersistentDatabase", "it lacks methods of Database: close, "),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_package_that_does_not_work_is_named(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "acme_raises.py").write_text("raise RuntimeError('boom')")
    (tmp_path / "acme_empty.py").write_text("")
    install(tmp_path, monkeypatch, "hps.databases", {name: target for name, (target, _) in BROKEN.items()})
    [problem] = problems("persistent_db", name)
    assert problem.startswith("persistent_db.type: ")
    assert "acme 2.1" in problem
    assert BROKEN[name][1] in problem
    with pytest.raises(MissingDependencyError if name == "absent" else ConfigError, match=r"acme 2\.1"):
        implementation("database", name)


def test_a_database_in_the_wrong_section_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, monkeypatch, "hps.databases", {"shelf": "hps.stores.rocks_db.database:RocksDatabase"})
    assert problems("volatile_db", "shelf") == ['volatile_db.type: got "shelf": this type belongs in persistent_db']


def test_a_name_of_two_packages_is_refused_and_names_both(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for package in ("acme", "other"):
        install(tmp_path / package, monkeypatch, "hps.databases", {"twice": "json:dumps"}, package)
    [problem] = problems("volatile_db", "twice")
    assert re.search("'twice' is registered by (acme 2.1 and other 2.1|other 2.1 and acme 2.1); uninstall all but one", problem)


def test_a_name_of_ours_cannot_be_taken_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = implementation("database", "hash_map")
    install(tmp_path, monkeypatch, "hps.databases", {"hash_map": "json:dumps"})
    assert implementation("database", "hash_map") is before
    assert names("database") == list(IMPLEMENTATIONS["database"])


@pytest.mark.parametrize(
    ("kind", "target"),
    [
        ("cache", "hps.cache.cpu.cache:NumpyCache"),
        ("filesystem", "hps.filesystems.local:LocalFileSystem"),
        ("format", "hps.models.formats.numpy_files:NpyFiles"),
        ("network", "tests.fakes.networks:ArrayNetwork"),
        ("update_log", "hps.updates.kafka:KafkaLog"),
        ("update_log_writer", "hps.updates.kafka:KafkaWriter"),
    ],
)
def test_other_kinds_are_found_by_their_groups(kind: str, target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, monkeypatch, f"hps.{kind}s", {"acme_kind": target})
    assert implementation(kind, "acme_kind").__name__ == target.partition(":")[2]
    with pytest.raises(ConfigError, match="did you mean acme_kind"):
        implementation(kind, "acme_kin")


def test_a_device_of_another_package_is_accepted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, monkeypatch, "hps.caches", {"acme_device": "hps.cache.cpu.cache:NumpyCache", "bad": "nowhere:Cache"})
    model = json.loads(FILES["ps.json"])["models"][0]
    assert load_configuration({"models": [model], "device": "Acme-Device"}).device == "acme_device"
    with pytest.raises(ConfigError, match=r"device: .* acme 2\.1 .* cannot be imported"):
        load_configuration({"models": [model], "device": "bad"})


def test_a_database_that_keeps_no_order_and_a_log_of_another_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "acme_plain.py").write_text(
        "from hps.stores.unavailable import UnavailableDatabase\nclass Plain(UnavailableDatabase): ..."
    )
    install(tmp_path, monkeypatch, "hps.databases", {"plain": "acme_plain:Plain"})
    install(tmp_path / "log", monkeypatch, "hps.update_logs", {"acme_log": "tests.fakes.memory_log:MemoryLog"}, "logs")
    document = {"models": [json.loads(FILES["ps.json"])["models"][0]], "update_source": {"type": "Acme-Log"}}
    assert load_configuration(document).update_source.type == "acme_log"
    with pytest.raises(ConfigError, match="databases of type plain keep no order of updates") as caught:
        load_configuration({**document, "volatile_db": {"type": "plain"}})
    assert caught.value.problems[0].startswith("update_source: got acme_log, but ")


def test_our_own_names_read_no_entry_points(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hps.ground.registry.entry_points", lambda **_: pytest.fail("entry points were read"))
    load_configuration(ROOT / "configs" / "reference.json")
    for kind, ours in IMPLEMENTATIONS.items():
        for name in ours:
            lacking = ours[name].hint.count("[azure]") and not importlib.util.find_spec("azure")
            if not (kind == "cache" and name == "cuda") and not lacking:
                implementation(kind, name)
