"""Log lines as text or JSON, one per record.

A record may carry fields, `logger.info("...", extra=fields(status=200))`: members of a JSON line, `status=200` after a text.
"""

import json
import logging
import re
import time
from collections.abc import Mapping
from typing import Any, Final, Literal, TypeAlias

LogFormat: TypeAlias = Literal["text", "json"]

_PLAIN: Final = re.compile(r"[A-Za-z0-9._:/{}+*-]+")


def fields(**values: Any) -> dict[str, Any]:
    """Return the `extra` of a logging call that adds these strings and numbers to its line, without those that are None."""
    return {"fields": {name: value for name, value in values.items() if value is not None}}


def escaped(text: str) -> str:
    """Escape unprintable characters (line ends, terminal controls, bidirectional marks), so that the text is one line."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode("ascii") for char in text)


class TextLines(logging.Formatter):
    """A line per record: time, level, logger, message, fields. Tracebacks follow, indented. *Thread-safe.*"""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:
        line = escaped(super().formatMessage(record))
        for name, value in _fields_of(record).items():
            text = str(value)
            line += f" {name}={text if _PLAIN.fullmatch(text) else json.dumps(escaped(text), ensure_ascii=False)}"
        return line

    def formatException(self, ei: Any) -> str:
        """Format the lines of a traceback, indented so that none looks like a record."""
        return "\n".join(f"    {escaped(line)}" for line in super().formatException(ei).splitlines())


class JSONLines(logging.Formatter):
    """A JSON object per record, one line of ASCII: time, level, logger, message, fields, exception. *Thread-safe.*"""

    def format(self, record: logging.LogRecord) -> str:
        """Format a record. Its own members win over fields of the same names."""
        seconds, fraction = divmod(record.created, 1)
        line = {
            "time": f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(seconds))}.{int(fraction * 1000):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        line = {**line, **_fields_of(record), **line}
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


def _fields_of(record: logging.LogRecord) -> Mapping[str, Any]:
    found: Mapping[str, Any] = getattr(record, "fields", {})
    return found


def formatter_of(log_format: LogFormat) -> logging.Formatter:
    return JSONLines() if log_format == "json" else TextLines()


def configure_logging(log_format: LogFormat | None, level: str | None) -> None:
    """Set the format of handlers with a formatter of `formatter_of`, and the level; None leaves either unchanged."""
    root = logging.getLogger()
    if level is not None:
        root.setLevel(level.upper())
    for handler in root.handlers:
        if log_format is not None and isinstance(handler.formatter, TextLines | JSONLines):
            handler.setFormatter(formatter_of(log_format))
