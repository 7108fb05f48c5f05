"""Recent warnings and errors, folded by kind: what the page at `/`, `hps top` and `GET /v1/stats` show."""

import logging
import re
import threading
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Final

from hps.serve.logs.lines import escaped

_MOST_TEXT: Final = 1000  # characters
_MOST_OTHERS: Final = 3
_QUOTED: Final = re.compile(r"""(?<!\w)(?:'[^']*'|"[^"]*")(?!\w)""")
_WORD: Final = re.compile(r"[^\s,;()\[\]]+")
_VARIES: Final = re.compile(r"\d|\w[.@/:=]\w|/\w|…")
_LIST: Final = re.compile(r"…(?:, ?…)+")  # also the groups of digits of a number


@dataclass(frozen=True, slots=True)
class Problem:
    """Warnings or errors of one kind. *Immutable.*"""

    first_s: float  # first and last occurrence, in seconds since 1970
    time_s: float
    level: str  # `warning`, `error` or `critical`
    logger: str
    text: str  # the latest: a line of at most a thousand characters, with the exception's text
    count: int  # number of occurrences
    others: tuple[str, ...]  # the latest other texts of this kind, at most three


def kind_of(text: str) -> str:
    """Return a problem's text without numbers, quoted strings, host names, paths, dotted names, and lists of them."""
    return _LIST.sub("…", _WORD.sub(lambda word: "…" if _VARIES.search(word[0]) else word[0], _QUOTED.sub("…", text)))


@dataclass(slots=True)
class _Kept:
    """A kind of problem. Mutable, under the handler's lock."""

    first_s: float
    time_s: float = 0.0
    count: int = 0
    texts: list[str] = field(default_factory=list)  # distinct, latest first

    def add(self, time_s: float, text: str) -> None:
        self.time_s, self.count = time_s, self.count + 1
        self.texts = [text, *(other for other in self.texts if other != text)][: 1 + _MOST_OTHERS]


class RecentProblems(logging.Handler):
    """Keeps the latest kinds of warnings and errors, and counts them. *Thread-safe.*

    Two records are of one kind if they have the same level and logger, and their texts differ only in what `kind_of` leaves
    out, or in arguments of one word, such as the name of a model.

    Args:
        most: number of kinds to keep.
    """

    def __init__(self, most: int = 50) -> None:
        super().__init__(logging.WARNING)
        self._most = most
        self._kept: OrderedDict[tuple[str, str, str], _Kept] = OrderedDict()  # latest last
        self._lock = threading.Lock()

    def emit(self, record: logging.LogRecord) -> None:
        try:
            text, pattern = record.getMessage(), _pattern(record)
            if record.exc_info and record.exc_info[1] is not None:
                cause = f": {type(record.exc_info[1]).__name__}: {record.exc_info[1]}"
                text, pattern = text + cause, pattern + cause
            text, kind = escaped(text[:_MOST_TEXT])[:_MOST_TEXT], kind_of(escaped(pattern[:_MOST_TEXT]))
        except Exception:  # noqa: BLE001 - the arguments do not fit the message: logging itself reports that
            self.handleError(record)
            return
        key = record.levelname.lower(), record.name, kind
        with self._lock:
            kept = self._kept.pop(key, None) or _Kept(record.created)
            kept.add(record.created, text)
            self._kept[key] = kept
            if len(self._kept) > self._most:
                self._kept.popitem(last=False)

    def entries(self) -> list[Problem]:
        """Return the kinds, the latest first."""
        with self._lock:
            return [
                Problem(kept.first_s, kept.time_s, level, logger, kept.texts[0], kept.count, tuple(kept.texts[1:]))
                for (level, logger, _), kept in reversed(self._kept.items())
            ]


def _pattern(record: logging.LogRecord) -> str:
    """Return the message with "…" for each argument of one word."""
    if not isinstance(record.args, tuple):
        return record.getMessage()
    shortened = ("…" if isinstance(argument, str) and not re.search(r"\s", argument) else argument for argument in record.args)
    return str(record.msg) % tuple(shortened) if record.args else str(record.msg)
