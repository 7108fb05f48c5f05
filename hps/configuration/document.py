"""Read a configuration from a file or copy it from objects, and report its problems.

A report has one line per problem: the path of the key, the value, and what was expected.
"""

import json
import os
import re
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from difflib import get_close_matches
from enum import Enum
from typing import Any, TypeAlias

from pydantic import ValidationError

from hps.errors import ConfigError
from hps.ground.small_files import read_small

Location: TypeAlias = tuple[str | int, ...]

_SECRETS = frozenset({"password", "bearer_token", "admin_token", "token", "sha256", "azure_connection_string"})
_KINDS = {
    "bool_type": "true or false",
    "int_type": "a whole number",
    "float_type": "a number",
    "string_type": "a string",
    "model_type": "an object",
    "dict_type": "an object",
    "finite_number": "a finite number",
    "string_unicode": "a string of valid Unicode",
    "greater_than": "more than {gt}",
    "greater_than_equal": "at least {ge}",
    "less_than_equal": "at most {le}",
    "string_too_short": "at least one character",
    "expected": "{text}",
}


def path_of(location: Location) -> str:
    """Write a location as the author of the file would: `models[0].sparse_files[1]`."""
    text = ""
    for step in location:
        if isinstance(step, int):
            text += f"[{step}]"
        elif step.isidentifier() and len(step) <= 60:
            text += f".{step}" if text else step
        else:
            text += f"[{shown(step)}]"
    return text or "top level"


def shown(value: Any) -> str:
    """Write a value as JSON, cut to a readable length; name containers instead of printing them."""
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    if isinstance(value, int):
        return str(value) if value.bit_length() <= 128 else f"a number of {value.bit_length()} bits"
    if isinstance(value, float):
        return repr(value)
    if isinstance(value, str):
        text = json.dumps(value[:60], ensure_ascii=not value[:60].isprintable())
        return text if len(value) <= 60 else f"{text}... ({len(value)} characters)"
    if isinstance(value, dict):
        return "an object"
    if isinstance(value, list | tuple):
        return "a list" if value else "an empty list"
    return f"a Python {type(value).__name__}"


class _Object(dict[str, Any]):
    """A JSON object that remembers its repeated keys."""

    def __init__(self, pairs: list[tuple[str, Any]]) -> None:
        super().__init__(pairs)
        counts = Counter(key for key, _ in pairs)
        self.repeated = [key for key, count in counts.items() if count > 1]


def read_json(path: str, name: str, what: str = "a ps.json") -> Any:
    """Read a JSON file.

    Args:
        path: path of the file.
        name: name of the file in reports.
        what: kind of the file in reports.

    Raises:
        ConfigError: the file cannot be read or is not JSON; the message says where and why.
    """
    try:
        raw = read_small(path)
    except (OSError, ValueError) as error:  # ValueError: a NUL character in the path
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise ConfigError(name, [f"file: cannot be read ({reason}); expected the path of {what}"]) from error
    try:
        return json.loads(raw.decode("utf-8-sig"), object_pairs_hook=_Object)
    except UnicodeDecodeError as error:
        raise ConfigError(name, [f"byte {error.start}: not UTF-8 ({error.reason}); save the file as UTF-8"]) from error
    except json.JSONDecodeError as error:
        hint = "; JSON has no comments" if error.doc[error.pos : error.pos + 1] in ("/", "#") else ""
        raise ConfigError(name, [f"line {error.lineno}, column {error.colno}: not JSON: {error.msg}{hint}"]) from error
    except ValueError as error:  # Python limits the digits of an integer
        raise ConfigError(name, ["top level: one of its numbers has thousands of digits"]) from error


def plain(
    value: Any,
    problems: list[str],
    location: Location = (),
    path: Callable[[Location], str] = path_of,
) -> Any:
    """Copy mappings, sequences, enums, paths, and NumPy's arrays and numbers into dicts, lists and scalars.

    Args:
        problems: receives a line for every key that is repeated or not a string.
        location: location of `value`.
        path: formats a location.

    Raises:
        RecursionError: the value contains itself.
    """
    if isinstance(value, Mapping):
        repeated = getattr(value, "repeated", ())
        problems.extend(f"{path((*location, key))}: appears more than once in this object; keep one" for key in repeated)
        copy = {}
        for key, inner in value.items():
            if isinstance(key, str) and _is_unicode(key):
                copy[key] = plain(inner, problems, (*location, key), path)
            else:
                problems.append(f"{path(location)}: got the key {shown(key)}, expected a string of valid Unicode")
        return copy
    if isinstance(value, list | tuple):
        return [plain(inner, problems, (*location, i), path) for i, inner in enumerate(value)]
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, os.PathLike):
        return os.fsdecode(value)
    return value.tolist() if hasattr(value, "tolist") else value


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:  # half of a surrogate pair
        return False
    return True


def problems_of(
    error: ValidationError,
    keys: Mapping[str, Collection[str]],
    other_names: Mapping[str, str],
    path: Callable[[Location], str] = path_of,
) -> list[str]:
    """Turn pydantic's errors into lines.

    Args:
        keys: known keys of each object, by its path (`""` for the top level).
        other_names: keys by their names in HugeCTR's structs.
        path: formats a location.
    """
    lines = []
    for detail in error.errors(include_url=False):
        kind, location, value = detail["type"], detail["loc"], detail["input"]
        if kind == "default_factory_not_called":  # another detail has the cause
            continue
        if location[-1:] == ("[key]",):
            location = location[:-1]
        context = detail.get("ctx", {})
        got = "a value that is not shown" if _SECRETS.intersection(location) else shown(value)
        if kind == "problem":
            text = context["text"]
        elif kind == "extra_forbidden":
            text = _unknown_key(location, keys, other_names)
        elif kind == "missing":
            text = "missing; it has no default"
        else:
            allowed = _KINDS.get(kind)
            text = f"got {got}, expected {allowed.format(**context)}" if allowed else f"got {got}: {detail['msg']}"
            text += _written_as(kind, location, value)
        lines.append(f"{path(location)}: {text}")
    return lines


def _written_as(kind: str, location: Location, value: Any) -> str:
    """Suggest how to write a value of the wrong kind; empty if its meaning is unclear."""
    key = next((step for step in reversed(location) if isinstance(step, str)), "")
    if kind == "model_type" and len(location) == 1 and (value in (None, False) or isinstance(value, str)):
        return f"; write {json.dumps({'type': value or 'disabled'})}" if key.endswith(("_db", "_source")) else ""
    if kind == "bool_type":
        meant = {"yes": "true", "on": "true", "1": "true", "no": "false", "off": "false", "0": "false"}
        word = meant.get(str(value).lower())
        return f"; write {word}" if word else ""
    if kind == "less_than_equal" and isinstance(value, int | float) and 5 <= value <= 100 and _SHARE.search(key):
        return f"; it is a share, so write {value / 100:g} for {value:g} %"
    quantity = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*(%|[a-zA-Z]+)\s*", value) if isinstance(value, str) else None
    if kind not in ("int_type", "float_type") or quantity is None:
        return ""
    kinds = (("_bytes", _BYTES), ("_ms", {unit: 1000 * scale for unit, scale in _SECONDS.items()}), ("_s", _SECONDS))
    units = next((units for end, units in kinds if key.endswith(end)), {"%": 0.01})
    scale = units.get(quantity[2].lower())
    return "" if scale is None else f"; write {float(quantity[1]) * scale:.15g}"


_SHARE = re.compile("share|rate$|target$|per$|percentage|jitter|threshold")
_SECONDS = {"ms": 0.001, "s": 1, "sec": 1, "seconds": 1, "m": 60, "min": 60, "minutes": 60, "h": 3600}
_BYTES = {
    f"{unit}{end}": factor**power
    for power, unit in enumerate(("", "k", "m", "g", "t"))
    for end, factor in (("", 1024), ("b", 1000), ("ib", 1024))
}


def _unknown_key(location: Location, keys: Mapping[str, Collection[str]], other_names: Mapping[str, str]) -> str:
    """Describe an unknown key, with the key that was probably meant."""
    key, steps = str(location[-1]), [step for step in location[:-1] if isinstance(step, str)]
    while ".".join(steps) not in keys:  # the name of an input or a lookup of a network
        steps = unnamed if ".".join(unnamed := [*steps[:-2], steps[-1]]) in keys else steps[:-1]
    here = keys[".".join(steps)]
    word = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|[\s-]", "_", key).lower()  # maxBatchSize, max-batch-size
    if (name := other_names.get(key) or _SYNONYMS.get(word)) in here:
        return f"unknown key; it is called {name} here"
    near = get_close_matches(word, here, n=1)
    sure = get_close_matches(word, here, n=1, cutoff=0.9)
    homes = [_home(name) for name in keys if key in keys[name]]
    if homes and not sure:
        mean = f"; did you mean {near[0]}?" if near else ""
        return f"unknown key here; it belongs in {' or '.join(homes)}{mean}"
    if near and near[0] != key:
        return f"unknown key; did you mean {near[0]}?"
    for name, known in sorted(keys.items(), key=lambda item: other_names.get(key) not in item[1]):
        if elsewhere := {other_names.get(key, "")} & set(known) or get_close_matches(word, known, n=1, cutoff=0.8):
            return f"unknown key here; did you mean {next(iter(elsewhere))} in {_home(name)}?"
    return f"unknown key; known are: {', '.join(sorted(here))}"


def _home(section: str) -> str:
    """Name the object of a section in reports."""
    entries = {"": "the top level", "models": "an entry of models", "models.versions": "an entry of a model's versions"}
    return entries.get(section, section)


_SYNONYMS = {
    **{"url": "address", "host": "address", "username": "user_name", "tls": "enable_tls", "dir": "path"},
    **{"bootstrap_servers": "brokers", "token": "bearer_token", "name": "model", "files": "sparse_files"},
    **{"dim": "embedding_vecsize_per_table", "dims": "embedding_vecsize_per_table", "devices": "deployed_device_list"},
}
"""Common words for a key that difflib does not match with it."""
