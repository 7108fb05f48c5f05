"""What is left of a configuration without the keys that are wrong: so that the rest can be checked together with them."""

from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from hps.configuration.fields import Notices
from hps.configuration.load import Configuration, Source, document_of_source

_ROUNDS = 8
"""Of leaving keys out: a value that is right by itself may be wrong beside a default."""
_PLACES = ("version_path", "sparse_files")


@dataclass(frozen=True, slots=True)
class UsablePart:
    """The part of a wrong configuration that is right. *Immutable.*

    Attributes:
        configuration: without the keys that are wrong, and without the models whose files cannot be told.
        places: where each of its models stands in the whole, as a report calls it, by its name.
        widthless: models whose widths are wrong; each table has width 1 here.
    """

    configuration: Configuration
    places: dict[str, str]
    widthless: frozenset[str]


def usable_part(source: Source) -> UsablePart | None:
    """Leave out of a configuration what is wrong; None if no model is left.

    Raises:
        ConfigError: it is no document at all.
    """
    content = document_of_source(source).content
    models = content.get("models")
    entries = {i: dict(one) for i, one in enumerate(models if isinstance(models, list) else []) if isinstance(one, dict)}
    widthless: set[int] = set()
    for _ in range(_ROUNDS):
        _name(entries)
        indexes = list(entries)
        try:
            configuration = Configuration.model_validate({**content, "models": list(entries.values())}, context=Notices())
        except ValidationError as error:
            for location in {detail["loc"] for detail in error.errors(include_url=False)}:
                if location[:1] == ("models",) and len(location) > 2:
                    index = indexes[int(location[1])]
                    if not _leave_out(entries, index, str(location[2])):
                        entries.pop(index, None)
                    elif location[2] == "embedding_vecsize_per_table":
                        widthless.add(index)
                elif location != ("models",):
                    section = content.get(str(location[0])) if location else None
                    if len(location) > 1 and isinstance(section, dict):
                        content[str(location[0])] = {key: one for key, one in section.items() if key != location[1]}
                    elif location:
                        content.pop(str(location[0]), None)
                else:
                    content.pop("service", None)  # its load_models name a model that is left out
            continue
        names = {entry["model"]: index for index, entry in entries.items()}
        places = {name: f"models[{index}]" for name, index in names.items()}
        return UsablePart(configuration, places, frozenset(name for name, index in names.items() if index in widthless))
    return None


def _name(entries: dict[int, dict[str, Any]]) -> None:
    """Give names to models that have none of their own."""
    taken: set[Any] = set()
    for index, entry in entries.items():
        name = entry.get("model")
        if not isinstance(name, str) or name in taken:
            entry["model"] = f"models-{index}"
        taken.add(entry["model"])


def _leave_out(entries: dict[int, dict[str, Any]], index: int, key: str) -> bool:
    """Replace a key by what is always right; False where the files of the model cannot be told without it."""
    entry = entries.get(index, {})
    tables = len(files) if isinstance(files := entry.get("sparse_files"), list) else 0
    stands = {
        "model": f"models-{index}",
        "embedding_vecsize_per_table": [1] * tables,
        "maxnum_catfeature_query_per_table_per_sample": [1] * tables,
        "default_value_for_each_table": [0.0] * tables,
        "deployed_device_list": [0],
    }
    if key in _PLACES or not tables:
        return False
    if key in stands:
        entry[key] = stands[key]
    else:
        entry.pop(key, None)
    return True
