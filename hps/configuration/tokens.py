"""The file of named tokens, with their rights and limits. `docs/security.md` explains it."""

import hashlib
import logging
import os
from collections.abc import Iterable
from typing import Annotated, Any, Final, Literal, TypeAlias

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field, ValidationError, ValidationInfo, field_validator

from hps.configuration.document import plain, problems_of, read_json, shown
from hps.configuration.fields import ListOf, Name, Real, choice, expected, problem
from hps.configuration.tiers import Section
from hps.errors import ConfigError
from hps.ground.small_files import FileMarks

_log = logging.getLogger(__name__)

Right: TypeAlias = Literal["lookup", "write", "files", "admin"]
_RIGHTS: Final = ("lookup", "write", "files", "admin")


def _listed(value: Any) -> Any:
    return (value,) if isinstance(value, str) else value


def _check_token(value: str) -> str:
    if not value or not all("!" <= character <= "~" for character in value):
        raise expected("visible ASCII characters (no space, no line end), at least one")
    return value


def _check_digest(value: str) -> str:
    if len(value) != 64 or not set(value.lower()) <= set("0123456789abcdef"):
        raise expected("the SHA-256 of a token, 64 hexadecimal digits")
    return value.lower()


_ONE_OR_MORE: Final = BeforeValidator(_listed)
Rate: TypeAlias = Annotated[Real, Field(gt=0, le=1e12)]


class TokenConfig(Section):
    """An entry of `tokens`: a client, or several that share their rights and limits. *Immutable.*

    Attributes:
        sha256: digests of its tokens, also of those given as `token`, which are not kept.
    """

    model_config = ConfigDict(title="tokens[]")

    name: Name
    rights: ListOf[Annotated[Right, choice(*_RIGHTS)]]
    token: Annotated[ListOf[Annotated[str, AfterValidator(_check_token)]], _ONE_OR_MORE, Field(repr=False)] = ()
    sha256: Annotated[ListOf[Annotated[str, AfterValidator(_check_digest)]], _ONE_OR_MORE] = ()
    certificate: Annotated[ListOf[Annotated[str, Field(min_length=1)]], _ONE_OR_MORE, Field(validate_default=True)] = ()
    requests_per_s: Rate | None = None
    burst: Annotated[Real, Field(ge=1, le=1e12)] | None = None
    keys_per_s: Rate | None = None

    @field_validator("certificate")
    @classmethod
    def _require_identity(cls, value: tuple[str, ...], info: ValidationInfo) -> tuple[str, ...]:
        if not value and not any(info.data.get(key, "wrong") for key in ("token", "sha256")):
            raise problem("got none, expected at least one of sha256, token and certificate")
        return value

    @field_validator("burst")
    @classmethod
    def _require_rate(cls, value: float | None, info: ValidationInfo) -> float | None:
        if value is not None and info.data.get("requests_per_s", 1.0) is None:
            raise problem("it has no effect alone, expected requests_per_s, too")
        return value


class TokensFile(Section):
    """The content of the file."""

    model_config = ConfigDict(title="")

    tokens: ListOf[TokenConfig]

    @field_validator("tokens")
    @classmethod
    def _entries_differ(cls, value: tuple[TokenConfig, ...]) -> tuple[TokenConfig, ...]:
        seen: dict[tuple[str, str], int] = {}
        for index, entry in enumerate(value):
            digests = (*entry.sha256, *map(digest_of, entry.token))
            for kind, texts in (("name", (entry.name,)), ("token", digests), ("certificate", entry.certificate)):
                for text in texts:
                    if (before := seen.setdefault((kind, text), index)) != index:
                        raise problem(f"the entries {before} and {index} have the same {kind}, expected it once")
        return value


_KEYS = {"": TokensFile.model_fields.keys(), "tokens": TokenConfig.model_fields.keys()}


def digest_of(token: str) -> str:
    return hashlib.sha256(token.encode()).hexdigest()


def load_tokens(path: str | os.PathLike[str]) -> tuple[TokenConfig, ...]:
    """Read a file of tokens. The result has their digests alone.

    Raises:
        ConfigError: it cannot be read, or its keys or values are wrong; one report of all problems, without a token.
    """
    name = os.fsdecode(path)
    problems: list[str] = []
    content = plain(read_json(name, name, "a file of tokens"), problems)
    if not isinstance(content, dict):
        raise ConfigError(name, [f"top level: got {shown(content)}, expected an object with the key tokens"])
    try:
        entries = TokensFile.model_validate(content).tokens
    except ValidationError as error:
        problems += problems_of(error, _KEYS, {})
    if problems:
        raise ConfigError(name, problems)
    digests = ((*entry.sha256, *map(digest_of, entry.token)) for entry in entries)
    return tuple(entry.model_copy(update={"token": (), "sha256": own}) for entry, own in zip(entries, digests, strict=True))


class WatchedTokens:
    """The tokens of a file, which is read again when it changes. *One thread.*

    Args:

    Attributes:
        entries: as last read; an invalid file changes nothing, and leaves none at the start.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self.entries: tuple[TokenConfig, ...] = ()
        self._marks = FileMarks(path)
        self._read()

    def poll(self) -> bool:
        """Reload the file if it has changed; return True on success. Call this twice a second."""
        if not self._marks.changed() or not self._read():
            return False
        _log.info("the tokens were reloaded: %d names in %s", len(self.entries), self.path)
        return True

    def _read(self) -> bool:
        try:
            self.entries = load_tokens(self.path)
        except ConfigError as error:
            _log.error("the tokens stay as they are: %s", error)
            return False
        return True


def published(entries: Iterable[TokenConfig]) -> list[dict[str, Any]]:
    return [entry.model_dump(mode="json") for entry in entries]
