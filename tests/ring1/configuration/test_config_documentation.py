"""The models, `configs/reference.json` and `docs/configuration.md` name the same keys, defaults and aliases."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from pydantic_core import PydanticUndefined

from hps.configuration.canary import CanaryConfig
from hps.configuration.checks import ChecksConfig
from hps.configuration.hugectr_structs import PYTHON_NAMES
from hps.configuration.load import (
    Configuration,
    DenseConfig,
    KeysProgramConfig,
    LookupConfig,
    ModelConfig,
    ModelSourceConfig,
    NetworkInputConfig,
    PersistentDbConfig,
    ServiceConfig,
    UpdateSourceConfig,
    VolatileDbConfig,
    load_configuration,
    read_configuration,
)
from hps.configuration.tiers import PeersConfig, Section
from tests import ROOT

REFERENCE = json.loads((ROOT / "configs" / "reference.json").read_text())
PAGE = (ROOT / "docs" / "configuration.md").read_text()
SECTIONS: list[tuple[str, type[Section], dict[str, Any]]] = [
    ("Top level", Configuration, REFERENCE),
    ("`models[]`", ModelConfig, REFERENCE["models"][0]),
    ("`models[].canary`", CanaryConfig, REFERENCE["models"][0]["canary"]),
    ("`models[].checks`", ChecksConfig, REFERENCE["models"][0]["checks"]),
    ("`models[].dense`", DenseConfig, REFERENCE["models"][0]["dense"]),
    ("`models[].dense.inputs`", NetworkInputConfig, REFERENCE["models"][0]["dense"]["inputs"]["items"]),
    ("`models[].dense.keys`", KeysProgramConfig, REFERENCE["models"][0]["dense"]["keys"][0]),
    ("`models[].dense.lookups`", LookupConfig, REFERENCE["models"][0]["dense"]["lookups"]["history_vectors"]),
    ("`volatile_db`", VolatileDbConfig, REFERENCE["volatile_db"]),
    ("`persistent_db`", PersistentDbConfig, REFERENCE["persistent_db"]),
    ("`model_source`", ModelSourceConfig, REFERENCE["model_source"]),
    ("`model_source.peers`", PeersConfig, REFERENCE["model_source"]["peers"]),
    ("`update_source`", UpdateSourceConfig, REFERENCE["update_source"]),
    ("`service`", ServiceConfig, REFERENCE["service"]),
]
each_section = pytest.mark.parametrize(("title", "section", "example"), SECTIONS, ids=[title for title, _, _ in SECTIONS])


def chapter(title: str) -> str:
    return PAGE.split(f"\n## {title}\n")[1].split("\n## ")[0]


def rows(title: str) -> list[list[str]]:
    lines = [line for line in chapter(title).splitlines() if line.startswith("| `")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def current_keys(section: type[Section]) -> list[str]:
    return [key for key, field in section.model_fields.items() if not field.deprecated]


@each_section
def test_reference_json_and_the_page_hold_every_key_and_no_other(
    title: str, section: type[Section], example: dict[str, Any]
) -> None:
    assert list(example) == [row[0].strip("`") for row in rows(title)] == current_keys(section)


def test_reference_json_holds_the_defaults_of_every_check() -> None:
    assert REFERENCE["models"][0]["checks"] == ChecksConfig().model_dump()


def test_reference_json_and_minimal_json_are_valid_and_give_no_notice() -> None:
    reference = read_configuration(ROOT / "configs" / "reference.json")
    minimal = read_configuration(ROOT / "configs" / "minimal.json")
    assert reference.models[0].tables[1].max_keys == 51200
    assert minimal.persistent_db.type == "row_files"
    assert [*reference.unlogged, *minimal.unlogged] == []


@each_section
def test_older_and_ignored_keys_are_documented(title: str, section: type[Section], example: dict[str, Any]) -> None:
    others = section.ignored_keys() | section.older_keys
    assert {key for key in others if f"`{key}`" not in chapter(title)} == set()


@each_section
def test_documented_defaults_are_those_of_the_models(title: str, section: type[Section], example: dict[str, Any]) -> None:
    for key, default, _ in rows(title):
        field = section.model_fields[key.strip("`")]
        if field.is_required():
            assert default == "required", key
        elif field.default is PydanticUndefined:  # it follows from something else, said in words
            assert default not in ("", "required"), key
        else:
            assert json.loads(default.strip("`")) == json.loads(json.dumps(field.default)), key


def test_documented_aliases_are_read() -> None:
    for value, spellings in rows("Aliases"):
        for spelling in re.findall("`(.*?)`", f"{value} {spellings}"):
            canonical = value.strip("`")
            if canonical == "multi_process_hash_map":
                with pytest.raises(ValueError, match=r"multi_process_hash_map.*not implemented"):
                    VolatileDbConfig(type=spelling)
            elif canonical in ("null", "kafka_message_queue", "redis_stream"):
                assert UpdateSourceConfig(type=spelling).type == canonical
            elif canonical.startswith("evict"):
                assert VolatileDbConfig(overflow_policy=spelling).overflow_policy == canonical
            elif canonical == "rocks_db":
                assert PersistentDbConfig(type=spelling).type == canonical
            else:
                assert VolatileDbConfig(type=spelling).type == canonical


def test_documented_python_names_are_those_that_are_translated() -> None:
    _, *names = rows("Python structs")
    assert {python.strip("`"): json_key.strip("`") for python, json_key in names} == PYTHON_NAMES


def test_the_report_in_the_documentation_is_what_is_printed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    document = json.loads(json.dumps(REFERENCE))
    document["volatile_db"]["type"] = "hash_mpa"
    document["models"][0].update(embedding_vecsize_per_table=[16, 32, 64], max_batchsize=8)
    (tmp_path / "ps.json").write_text(json.dumps(document))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError) as caught:
        load_configuration("ps.json")
    assert [line.strip() for line in str(caught.value).splitlines()] == [
        line.strip() for line in re.findall(r"^        (.+)$", PAGE, re.MULTILINE)
    ]
