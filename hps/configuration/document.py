"""A configuration before it is checked: read from a file, or copied into dicts, lists and scalars."""

import json
import os
from collections import Counter
from collections.abc import Callable, Mapping
from enum import Enum
from typing import Any

from hps.configuration.report import Location, path_of, shown
from hps.errors import ConfigError

_MAX_FILE_BYTES = 64 << 20


class _Object(dict[str, Any]):
    """A JSON object that remembers which keys stood in it more than once."""

    def __init__(self, pairs: list[tuple[str, Any]]) -> None:
        super().__init__(pairs)
        counts = Counter(key for key, _ in pairs)
        self.repeated = [key for key, count in counts.items() if count > 1]


def read_json(path: str, name: str) -> Any:
    """Read a JSON file.

    Args:
        path: where it is.
        name: what to call it in a report.

    Raises:
        ConfigError: it cannot be read or is not JSON; the message says where and why.
    """
    try:
        with open(path, "rb") as file:
            raw = file.read(_MAX_FILE_BYTES + 1)
    except (OSError, ValueError) as error:  # ValueError: a NUL character in the path
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise ConfigError(name, [f"file: cannot be read ({reason}); wanted the path of a ps.json"]) from None
    if len(raw) > _MAX_FILE_BYTES:
        raise ConfigError(name, [f"file: longer than {_MAX_FILE_BYTES} bytes; wanted a ps.json"])
    try:
        return json.loads(raw.decode("utf-8-sig"), object_pairs_hook=_Object)
    except UnicodeDecodeError as error:
        raise ConfigError(name, [f"byte {error.start}: not UTF-8 ({error.reason}); save the file as UTF-8"]) from None
    except json.JSONDecodeError as error:
        hint = "; JSON has no comments" if error.doc[error.pos : error.pos + 1] in ("/", "#") else ""
        raise ConfigError(name, [f"line {error.lineno}, column {error.colno}: not JSON: {error.msg}{hint}"]) from None
    except ValueError:  # Python's own bound on the digits of an integer
        raise ConfigError(name, ["top level: a number in it has thousands of digits"]) from None


def plain(
    value: Any,
    problems: list[str],
    location: Location = (),
    path: Callable[[Location], str] = path_of,
) -> Any:
    """Copy a document into dicts, lists and scalars: mappings, enums, paths, NumPy's arrays and numbers.

    Args:
        problems: gets a line for every key that no kind of value can make good.
        location: where `value` stands.
        path: how a location is written.

    Raises:
        RecursionError: it contains itself.
    """
    if isinstance(value, Mapping):
        repeated = getattr(value, "repeated", ())
        problems.extend(f"{path((*location, key))}: stands in this object more than once; keep one" for key in repeated)
        copy = {}
        for key, inner in value.items():
            if isinstance(key, str) and _is_unicode(key):
                copy[key] = plain(inner, problems, (*location, key), path)
            else:
                problems.append(f"{path(location)}: got the key {shown(key)}, wanted a string of valid Unicode")
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
