"""Say what is wrong with a configuration: one line a problem, with its path, what was got and what is allowed."""

import json
from collections.abc import Callable, Collection, Mapping
from difflib import get_close_matches
from typing import Any, TypeAlias

from pydantic import ValidationError

Location: TypeAlias = tuple[str | int, ...]

_SECRETS = frozenset({"password", "bearer_token"})
_KINDS = {
    "bool_type": "true or false",
    "int_type": "a whole number",
    "float_type": "a number",
    "string_type": "a string",
    "model_type": "an object",
    "finite_number": "a finite number",
    "string_unicode": "a string of valid Unicode",
    "greater_than": "more than {gt}",
    "greater_than_equal": "at least {ge}",
    "less_than_equal": "at most {le}",
    "string_too_short": "at least one character",
    "wanted": "{text}",
}


def path_of(location: Location) -> str:
    """Write a location as a reader of the file would: `models[0].sparse_files[1]`."""
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
    """Write a value in JSON's words, cut to a readable length; of a container, only what it is."""
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


def problems_of(
    error: ValidationError,
    keys: Mapping[str, Collection[str]],
    other_names: Mapping[str, str],
    path: Callable[[Location], str] = path_of,
) -> list[str]:
    """Turn pydantic's findings into lines.

    Args:
        keys: the known keys of each object of the configuration, by the object's own key (`""`: the top level).
        other_names: for keys that are known by another name elsewhere, the name here.
        path: how a location is written.
    """
    lines = []
    for detail in error.errors(include_url=False):
        kind, location, value = detail["type"], detail["loc"], detail["input"]
        if kind == "default_factory_not_called":  # its cause is another entry
            continue
        context = detail.get("ctx", {})
        got = "a value that is not shown" if location and location[-1] in _SECRETS else shown(value)
        if kind == "problem":
            text = context["text"]
        elif kind == "extra_forbidden":
            text = unknown_key(location, keys, other_names)
        elif kind == "missing":
            text = "missing; it has no default, write it"
        elif kind == "choice":
            text = f"got {got}, wanted one of: {', '.join(context['known'])}{_nearest(value, context['spellings'])}"
        else:
            allowed = _KINDS.get(kind)
            text = f"got {got}, wanted {allowed.format(**context)}" if allowed else f"got {got}: {detail['msg']}"
        lines.append(f"{path(location)}: {text}")
    return lines


def unknown_key(location: Location, keys: Mapping[str, Collection[str]], other_names: Mapping[str, str]) -> str:
    """What to say of a key that its object does not know."""
    key = str(location[-1])
    section = str(location[0]) if len(location) > 1 else ""
    here = keys[section]
    if other_names.get(key) in here:
        return f"unknown key; it is called {other_names[key]} here"
    near = get_close_matches(key, here, n=1)
    if near and near[0] != key:
        return f"unknown key; did you mean {near[0]}?"
    homes = [f"an entry of {name}" if name == "models" else name or "the top level" for name in keys if key in keys[name]]
    if homes:
        return f"unknown key here; it belongs in {' or '.join(homes)}"
    return f"unknown key; known are: {', '.join(sorted(here))}"


def _nearest(value: Any, spellings: Mapping[str, str]) -> str:
    near = get_close_matches(value.lower(), spellings, n=1) if isinstance(value, str) else []
    return f"; did you mean {spellings[near[0]]}?" if near else ""
