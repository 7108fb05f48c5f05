"""The right parts of a wrong configuration, so that the files and databases that they name can be checked, too."""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from hps.configuration.fields import Notices
from hps.configuration.load import Configuration, ModelConfig, Source, document_of_source

_WIDTHS = "embedding_vecsize_per_table"
_PLACES = frozenset({"sparse_files", "version_path"})
_FILE_KEYS = ("model", _WIDTHS, "embedding_table_names", "version", "versions", "version_policy", *_PLACES)


@dataclass(frozen=True, slots=True)
class UsablePart:
    """The right parts of a configuration. *Immutable.*

    Attributes:
        configuration: sections without their wrong keys, and of a wrong model the keys that say where its files are.
        places: the path of each model in the original configuration, by its name.
        widthless: models whose widths are wrong; each table has width 1 here.
    """

    configuration: Configuration
    places: dict[str, str]
    widthless: frozenset[str]


def usable_part(source: Source) -> UsablePart | None:
    """Drop the wrong keys of a configuration; None if no model is left.

    Raises:
        ConfigError: it is not a document at all.
    """
    content = document_of_source(source).content
    entries = content.pop("models", None)
    models: dict[str, ModelConfig] = {}
    places, widthless = {}, set()
    for i, entry in enumerate(entries if isinstance(entries, list) else []):
        if isinstance(entry, dict) and (model := _files_of(entry, f"models-{i}", models)):
            models[model.model], places[model.model] = model, f"models[{i}]"
            if list(model.embedding_vecsize_per_table) != entry.get(_WIDTHS):
                widthless.add(model.model)
    while True:
        try:
            configuration = Configuration.model_validate({**content, "models": [*models.values()]}, context=Notices())
        except ValidationError as error:
            if not any(_drop(content, *detail["loc"][:2]) for detail in error.errors(include_url=False)):
                return None
        else:
            return UsablePart(configuration, places, frozenset(widthless))


def _files_of(entry: dict[str, Any], name: str, taken: Collection[str]) -> ModelConfig | None:
    """Keep the right keys about an entry's files; `name` replaces a wrong or taken one. None if the files are unknown."""
    files = entry.get("sparse_files")
    tables = len(files) if isinstance(files, list) else 0
    known = {key: entry[key] for key in _FILE_KEYS if key in entry and not (key == "model" and entry[key] in [*taken])}
    stand_ins = {
        "model": name,
        _WIDTHS: [1] * tables,
        "maxnum_catfeature_query_per_table_per_sample": [1] * tables,
        "default_value_for_each_table": [0.0] * tables,
        "deployed_device_list": [0],
    }
    while True:
        try:
            return ModelConfig.model_validate({**stand_ins, **known}, context=Notices())
        except ValidationError as error:
            wrong = known.keys() & {detail["loc"][0] for detail in error.errors(include_url=False)}
            if not wrong or wrong & _PLACES:
                return None
            known = {key: value for key, value in known.items() if key not in wrong}


def _drop(content: dict[str, Any], section: str | int = "", key: str | int = "") -> bool:
    """Remove a wrong key, or else its section; return True if it existed."""
    name = "service" if section == "models" else str(section)  # all models are right, but load_models names others
    section_content = content.get(name)
    if isinstance(section_content, dict) and key in section_content:
        del section_content[key]
        return True
    return content.pop(name, None) is not None
