"""Pins: versions chosen by a roll-back or a deployment by number, stored beside the persistent database.

Without a pin, polling or a restart would deploy the newest version again, perhaps the one that was just rolled back.
"""

import json
import logging
import time
from dataclasses import replace
from datetime import UTC, datetime
from typing import Literal

from hps.errors import DatabaseCorruptError, DatabaseError
from hps.versions.desired import DesiredVersion
from hps.versions.kept_files import KeptFiles

_log = logging.getLogger(__name__)
PINS = "hps-pins"


class Pins:
    """The pins of this process' models, one file each. *Thread-safe*; a model has one change at a time.

    Args:
        kept: their files; without a directory, pins end with the process.
    """

    def __init__(self, kept: KeptFiles | None = None) -> None:
        self._kept = kept or KeptFiles(None, PINS)
        self._known: dict[str, DesiredVersion | None] = {}

    def of(self, model: str) -> DesiredVersion | None:
        """Return the pin of a model, if it has one.

        Raises:
            DatabaseError: its file cannot be read.
            DatabaseCorruptError: its file is damaged.
        """
        if model not in self._known:
            self._known[model] = _read(self._kept, model)
        return self._known[model]

    def known(self, model: str) -> DesiredVersion | None:
        """Return the pin of a model for display; None if it cannot be read."""
        try:
            return self.of(model)
        except DatabaseError:
            return None

    def pin(self, model: str, version: str, by: Literal["deploy", "rollback", "canary"]) -> DesiredVersion:
        """Pin a model to its serving version; only until a restart if the pin cannot be written."""
        pin = DesiredVersion(version, by, time.time(), "pin")
        if self._kept.directory is None:
            pin = replace(pin, problem="a restart ends it: no persistent_db keeps it")
        elif self._kept.read_only:
            pin = replace(pin, problem="a restart ends it: persistent_db is read-only")
        else:
            try:
                self._kept.write(model, {"model": model, "version": version, "by": by, "since": pin.since})
            except OSError as error:
                pin = replace(pin, problem=f"a restart ends it: writing it to {self._kept.directory} failed: {error}")
                _log.error("model %r: version %s is %s, but %s", model, version, pin, pin.problem)
        self._known[model] = pin
        return pin

    def end(self, model: str) -> None:
        """Remove the pin of a model, if it has one.

        Raises:
            DatabaseError: its file cannot be removed.
        """
        # First in memory: if the file cannot be removed, the process serves what was requested, and the error says what a
        # restart would do.
        self._known[model] = None
        self._kept.remove(model)

    def check_integrity(self) -> list[str]:
        """Return a sentence for each pin whose file differs from the one in memory."""
        found = []
        for model, pin in list(self._known.items()):
            if pin is None or not pin.problem:
                try:
                    kept = _read(self._kept, model)
                except DatabaseError as error:
                    found.append(f"model {model!r}: {error}")
                    continue
                if kept != pin and self._known.get(model) is pin and not self._kept.read_only:
                    found.append(f"model {model!r}: its pin is {pin}, and a restart would find {kept}")
        return found


def _read(kept: KeptFiles, model: str) -> DesiredVersion | None:
    if (text := kept.read(model)) is None:
        return None
    try:
        match json.loads(text):
            case {
                "model": str(name),
                "version": str(version),
                "by": "deploy" | "rollback" | "canary" as by,
                "since": int() | float() as since,
            }:
                if name == model and version.isascii() and version.isdecimal():
                    datetime.fromtimestamp(since, UTC)
                    return DesiredVersion(version, by, float(since), "pin")
    except (ValueError, OverflowError, OSError, RecursionError):
        pass
    raise DatabaseCorruptError(
        f"reading the pin of model {model!r} in {kept.path(model)}: it is damaged, so the version to serve is unknown; roll "
        "back or deploy again, or `hps unpin` the model to serve what its version_policy chooses"
    )
