"""Types of configuration values, with the spellings that HugeCTR accepts."""

import json
import re
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Annotated, Any, TypeAlias, TypeVar

from pydantic import AfterValidator, BeforeValidator, Field, ValidationError, ValidationInfo
from pydantic_core import InitErrorDetails, PydanticCustomError

from hps.configuration.document import shown
from hps.errors import ConfigError, MissingDependencyError
from hps.ground import registry

T = TypeVar("T")

INT32_MAX = 2**31 - 1
UINT64_MAX = 2**64 - 1
FLOAT32_MAX = 3.4028234663852886e38


@dataclass(slots=True)
class Notices:
    """Notices about a valid configuration, collected while it is checked. *One per thread.*

    Attributes:
        quoted: keys with numbers or booleans in quotes.
        ignored: keys without effect.
        databases: keys by which HugeCTR up to 3.2 named databases.
        older: keys of HugeCTR 4.1.
        warnings: sentences.
    """

    quoted: set[str] = field(default_factory=set)
    ignored: set[str] = field(default_factory=set)
    databases: set[str] = field(default_factory=set)
    older: set[str] = field(default_factory=set)
    warnings: list[str] = field(default_factory=list)


def notices_of(info: ValidationInfo) -> Notices:
    """Return the notices of the running load; a new object when a model is constructed directly."""
    return info.context if isinstance(info.context, Notices) else Notices()


def problem(text: str) -> PydanticCustomError:
    """Make a validator's error with the text of the report."""
    return PydanticCustomError("problem", "{text}", {"text": text})


def expected(text: str) -> PydanticCustomError:
    """Make a validator's error; the report says the value, then that `text` was expected."""
    return PydanticCustomError("expected", "{text}", {"text": text})


def validate_with(
    handler: Callable[[Any], T],
    value: Any,
    text: str | None,
) -> T:
    """Validate a value; report the problem `text`, if any, together with its other problems."""
    if text is None:
        return handler(value)
    found = [InitErrorDetails(type=problem(text), loc=(), input=value)]
    try:
        handler(value)
    except ValidationError as error:
        for detail in error.errors(include_url=False):
            kind = PydanticCustomError(detail["type"], "{msg}", {**detail.get("ctx", {}), "msg": detail["msg"]})
            found.append(InitErrorDetails(type=kind, loc=detail["loc"], input=detail["input"]))
    raise ValidationError.from_exception_data("", found)


# HugeCTR's core parser requires JSON numbers and booleans; the parser of its Triton backend also reads them from strings.


def _unquoted(value: Any, read: Callable[[str], Any], info: ValidationInfo) -> Any:
    if not isinstance(value, str):
        return value
    try:
        number = read(value.strip())
    except (ValueError, KeyError):
        return value
    title = info.config.get("title", "") if info.config else ""
    notices_of(info).quoted.add(f"{title}.{info.field_name}" if title else str(info.field_name))
    return number


def _flag(value: Any, info: ValidationInfo) -> Any:
    flags = {"true": True, "1": True, "false": False, "0": False}
    return _unquoted(value, lambda text: flags[text.lower()], info)


def _read_number(text: str) -> int | float:
    if not re.fullmatch(r"[-+.0-9eE]+", text):  # int() and float() read more than JSON: 1_000, nan, digits of any script
        raise ValueError(text)
    return int(text) if re.fullmatch(r"[-+]?[0-9]+", text) else float(text)


def _integer(value: Any, info: ValidationInfo) -> Any:
    value = _unquoted(value, _read_number, info)
    if isinstance(value, float) and value.is_integer():  # 1e6 is a float to JSON
        return int(value)
    return value


def _real(value: Any, info: ValidationInfo) -> Any:
    return _unquoted(value, _read_number, info)


def _as_tuple(value: Any) -> Any:
    # pydantic would also accept iterators, and sets, which have no order.
    if isinstance(value, list | tuple):
        return tuple(value)
    single = isinstance(value, str | int | float) and not isinstance(value, bool)
    raise expected(f"a list; write [{shown(value)}]" if single else "a list")


def _as_full_tuple(value: Any) -> Any:
    # pydantic's min_length would also fire when there are elements and all of them are wrong.
    values = _as_tuple(value)
    if not values:
        raise expected("at least one element")
    return values


Flag: TypeAlias = Annotated[bool, BeforeValidator(_flag)]
Integer: TypeAlias = Annotated[int, BeforeValidator(_integer)]
Real: TypeAlias = Annotated[float, BeforeValidator(_real), Field(allow_inf_nan=False)]
ListOf: TypeAlias = Annotated[tuple[T, ...], BeforeValidator(_as_tuple)]
NonEmptyListOf: TypeAlias = Annotated[tuple[T, ...], BeforeValidator(_as_full_tuple)]

Positive: TypeAlias = Annotated[Integer, Field(ge=1, le=INT32_MAX)]
NonNegative: TypeAlias = Annotated[Integer, Field(ge=0, le=INT32_MAX)]
Bytes: TypeAlias = Annotated[Integer, Field(ge=1, le=2**63 - 1)]
Share: TypeAlias = Annotated[Real, Field(ge=0, le=1)]
Float32: TypeAlias = Annotated[Real, Field(ge=-FLOAT32_MAX, le=FLOAT32_MAX)]
Seconds: TypeAlias = Annotated[Real, Field(ge=0, le=1e9)]
Timeout: TypeAlias = Annotated[Real, Field(gt=0, le=1e6)]
Secret: TypeAlias = Annotated[str, Field(repr=False)]
Ignored: TypeAlias = Annotated[Any, BeforeValidator(lambda _: None), Field(deprecated=True, exclude=True, repr=False)]
"""A key that is accepted and has no effect."""
Older: TypeAlias = Annotated[T | None, Field(deprecated=True, exclude=True, repr=False)]
"""A key of an older version; read the current key, which takes its value."""


def _matching(pattern: str, text: str) -> AfterValidator:
    """Accept only strings that match a pattern completely; `text` describes them."""

    def check(value: str) -> str:
        if not re.fullmatch(pattern, value, re.DOTALL):
            raise expected(text)
        return value

    return AfterValidator(check)


def check_place(value: str) -> str:
    """Check a path or URI."""
    if not value or "\0" in value:
        raise expected("a path or URI that is not empty and has no NUL character")
    return value


def check_addresses(value: str) -> str:
    """Check the addresses of servers, separated by `,` or, as in HugeCTR's manual, `;`."""
    for address in re.split("[,;]", value):
        found = re.fullmatch(r"(?:\[[0-9a-fA-F:.]+\]|[^\s:\[\]]+)(?::([0-9]{1,5}))?", address.strip())
        if found is None or not 0 < int(found[1] or 1) < 65536:
            bare = re.search(r"://(?:[^@/]*@)?([^/@\s]+)", address)
            hint = f"; write {bare[1]}" if bare else ""
            raise expected(f"host[:port], several of them separated by commas{hint}")
    return value


def check_redis_addresses(value: str) -> str:
    """Check the addresses of Redis servers, which may be unix sockets."""
    for address in re.split("[,;]", value):
        if not re.fullmatch(r"unix:///[^\s?#]+", address.strip()):
            check_addresses(address)
    return value


def check_host(value: str) -> str:
    """Check a name or address of this machine, without a port."""
    if "/" in value or re.fullmatch(r"[^:]*:[0-9]+", value):
        raise expected("a name or an address alone; write the port as service.port")
    return value


def _expression(value: str) -> str:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # patterns that a later Python reads differently are not errors today
            re.compile(value)
    except (re.error, OverflowError, RecursionError) as error:
        raise problem(f"not a regular expression: {error}") from error
    return value


Name: TypeAlias = Annotated[str, _matching(r"[a-zA-Z0-9_-]{1,120}", "1 to 120 of the characters a-z A-Z 0-9 _ -")]


def _version(value: Any) -> Any:
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else value


Version: TypeAlias = Annotated[
    str, BeforeValidator(_version), _matching(r"[1-9][0-9]{0,18}", "a number of at least 1, as in the name of its directory")
]
Place: TypeAlias = Annotated[str, AfterValidator(check_place)]
Token: TypeAlias = Annotated[Secret, _matching(r"[!-~]*", "only visible ASCII characters (no space, no line end)")]
Endpoint: TypeAlias = Annotated[
    str,
    _matching(r"(https?://[^/\s]+.*)?", "https://host or http://host, optionally with a port, or an empty string"),
]
PeerUrl: TypeAlias = Annotated[
    str, _matching(r"https?://[^/\s?#@]+/?", "http://host or https://host, optionally with a port, and without a path")
]
Expression: TypeAlias = Annotated[str, AfterValidator(_expression)]


def choice(
    *rows: str,
    refused: Mapping[str, str] | None = None,
    kind: str = "",
    section: str | None = None,
) -> BeforeValidator:
    """Turn any spelling of an enum value into the canonical one.

    As in HugeCTR's Triton backend, case does not matter, and blanks and hyphens count as underscores.

    Args:
        rows: spellings of each value, separated by `|`, the canonical one first.
        refused: known values that are not allowed here, each with the reason and the cure.
        kind: kind of the registry, if any; importable names that other packages register there are accepted, too.
        section: section of the configuration; databases of other packages must belong there.
    """
    canonical = {spelling: row.split("|")[0] for row in rows for spelling in row.split("|")}
    refused = refused or {}
    allowed = [name for row in rows if (name := row.split("|")[0]) not in refused]

    def read(value: Any) -> Any:
        if isinstance(value, str):
            word = re.sub(r"[\s-]", "_", value.strip().lower())
            found = canonical.get(word)
            if found is not None and found in refused:
                raise problem(f'got "{found}": {refused[found]}')
            if found is not None:
                return found
            if kind and registry.is_registered(kind, word):
                return of_other_package(word)
        others = registry.external_names(kind) if kind else []
        name = _meant(value, canonical | {name: name for name in others})
        if name in refused:
            raise problem(f'got {shown(value)}, which looks like "{name}": {refused[name]}')
        quoted = f'"{name}", in quotes' if not isinstance(value, str) and name in ("null", "none") else name
        hint = f"; did you mean {quoted}?" if name else ""
        raise problem(f"got {shown(value)}, expected one of: {', '.join([*allowed, *others])}{hint}")

    def of_other_package(name: str) -> str:
        try:
            found = registry.implementation(kind, name)
        except (ConfigError, MissingDependencyError) as error:
            raise problem(" ".join(str(error).split())) from error
        if section and registry.section_of(found) != section:
            raise problem(f'got "{name}": this type belongs in {registry.section_of(found)}')
        return name

    return BeforeValidator(read)


_SYNONYMS = (
    *(("gpu", "cuda"), ("host", "cpu"), ("ram", "hash_map"), ("disk", "rocks_db"), ("redis", "redis_stream")),
    *(("lru", "evict_oldest"), ("lfu", "evict_least_used"), ("now", "latest"), ("manual", "explicit")),
    *((word, name) for word in ("off", "false", "null") for name in ("none", "disabled")),
)
"""Common words for a value that difflib does not match with it. They are refused; the report names the value."""


def _meant(value: Any, spellings: Mapping[str, str]) -> str:
    """Guess which value was meant: a synonym before a similar spelling; empty if none."""
    known = {word: spellings[name] for word, name in _SYNONYMS if name in spellings} | dict(spellings)
    if not isinstance(value, str):
        return known.get(json.dumps(value), "") if value is None or isinstance(value, bool) else ""
    *_, last = re.split(r"\.|::", value.strip())  # DatabaseType_t.hash_map, DatabaseType_t::RedisCluster
    word = re.sub(r"[\s-]", "_", last.lower())
    candidates = [word, re.split(r"[:/]", word)[0], *get_close_matches(word, known, n=1)]  # cuda:0, redis://host:6379
    return next((known[candidate] for candidate in candidates if candidate in known), "")
