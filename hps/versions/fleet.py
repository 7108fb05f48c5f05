"""The version that every replica of a fleet should serve: `serving.json`, beside the versions of a model.

{"format": 1, "number": 1764050644100000, "version": "2", "previous": "", "withdrawn": ["3"], "by": "rollback",
 "since": 1764050644.1, "writer": "5f0c2a9d41b7"}

Replicas poll it, and keep a copy beside their persistent database. A document that cannot be read, is deleted or has a lower
number changes nothing: the replica serves on.
"""

import json
import logging
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

import pydantic

from hps.configuration.models import VersionPolicy
from hps.errors import (
    ConflictError,
    HPSError,
    ModelFileChangedError,
    ModelFileError,
    ModelFileNotFoundError,
    UnknownVersionError,
)
from hps.models.manifest import VERSION, read_small_file, within
from hps.models.sources import ModelSources
from hps.versions.canary.plan import RolloutPlan
from hps.versions.desired import DesiredVersion
from hps.versions.kept_files import KeptFiles

_log = logging.getLogger(__name__)
SERVING = "serving.json"
FLEET = "hps-fleet"
_FORMAT = 2  # 1 without a rollout, so that earlier releases can read it
_MOST_WITHDRAWN = 100
_MOST_BYTES = 16 << 10
_TRIES = 3  # of reads that a writer interrupts

FleetChange: TypeAlias = Literal["deploy", "rollback", "unpin", "canary", "promote"]
_Version = pydantic.Field(default="", pattern=rf"^({VERSION.pattern})?$")


class ServingDocument(pydantic.BaseModel):
    """The content of `serving.json`. *Immutable.*

    Attributes:
        number: higher than that of every document before: the time of the change in microseconds since the epoch, or one more
            than the last number.
        version: the version to serve; empty if the model's `version_policy` chooses.
        previous: the version to roll back to; empty after a roll-back.
        withdrawn: versions that were rolled back from and not deployed since. No replica chooses one by itself.
        by: the change that wrote it.
        since: time of that change, in seconds since the epoch.
        writer: random text that distinguishes documents of two writers.
        rollout: the canary or shadow of another version beside `version`, if any.
    """

    model_config = pydantic.ConfigDict(frozen=True, extra="forbid", strict=True)

    format: Literal[1, 2] = 1
    number: int = pydantic.Field(ge=1)
    version: str = _Version
    previous: str = _Version
    withdrawn: tuple[str, ...] = pydantic.Field(default=(), max_length=_MOST_WITHDRAWN)
    by: FleetChange
    since: float = pydantic.Field(ge=0, le=1e11)
    writer: str = pydantic.Field(min_length=1, max_length=64)
    rollout: RolloutPlan | None = None

    def __str__(self) -> str:
        return str(self.desired)

    @property
    def desired(self) -> DesiredVersion:
        return DesiredVersion(self.version, self.by, self.since, "fleet", self.previous, self.withdrawn)


@dataclass(frozen=True)
class FleetStatus:
    """Whether a replica serves what the serving document of a model says. *Immutable.*

    Attributes:
        document: the last known one.
        serving: the serving version; empty if none.
        follows: the serving version is that of the document, which is known to be current.
        pending: a deployment is under way or about to start.
        reason: why it does not follow; empty if it does.
        age_s: seconds since the document was last read; None if never.
    """

    document: ServingDocument
    serving: str
    follows: bool
    pending: bool
    reason: str
    age_s: float | None


def next_document(
    known: ServingDocument | None,
    by: FleetChange,
    version: str | None,
    serving: str,
    versions: Sequence[str],
    policy: VersionPolicy,
    rollout: RolloutPlan | None = None,
) -> ServingDocument:
    """Return the document after a change.

    Args:
        known: the document before, if any.
        version: the version to deploy; by default what the policy chooses now.
        serving: the version that serves; empty if none.
        versions: existing versions.
        rollout: the canary or shadow to begin, or to change.

    Raises:
        UnknownVersionError: the version does not exist, or the policy chooses none.
        ConflictError: there is no version to roll back to, or no canary to promote.
    """
    under_way = known.rollout if known else None
    current = (known.version if known else "") or serving
    withdrawn = list(known.withdrawn) if known else []
    previous = known.previous if known else ""
    if by == "deploy":
        allowed = [version for version in versions if version not in withdrawn]
        version = version or next(iter(policy.chosen(allowed)[-1:]), "")
        if version not in versions:
            raise UnknownVersionError(
                f"deploying a version on the fleet: got {version[:40] or 'none'!r}, expected one of "
                f"{', '.join(versions) or 'none'}"
            )
        previous = current if current != version else previous
    elif by == "canary":
        version = current
        if rollout is None or rollout.version not in versions or rollout.version == current:
            raise UnknownVersionError(
                f"trying a version out on the fleet: got {'none' if rollout is None else rollout.version}, expected one of "
                f"{', '.join(versions) or 'none'} beside {current or 'none'}"
            )
    elif by == "promote":
        if under_way is None:
            raise ConflictError("promoting on the fleet: no canary or shadow is under way")
        version, previous = under_way.version, current
    elif by == "rollback" and under_way is not None:
        version = current
        withdrawn.append(under_way.version)
    elif by == "rollback":
        below = [version for version in versions if current and int(version) < int(current) and version not in withdrawn]
        version = previous if previous in versions and previous != current else next(iter(below[-1:]), "")
        if not version:
            raise ConflictError(
                f"rolling back the fleet: there is no version to go back to from {current or 'none'}; versions are "
                f"{', '.join(versions) or 'none'}, withdrawn {', '.join(withdrawn) or 'none'}"
            )
        withdrawn.append(current)
        previous = ""
    else:
        version, previous = "", ""
    withdrawn = [number for number in dict.fromkeys(withdrawn) if number != version][-_MOST_WITHDRAWN:]
    now = time.time()
    return ServingDocument(
        format=2 if by == "canary" else 1,
        rollout=rollout if by == "canary" else None,
        # The time, so that a document written after the file was lost has a higher number than the lost one, which replicas
        # know.
        number=max(known.number + 1 if known else 1, int(now * 1e6)),
        version=version,
        previous="" if previous in withdrawn else previous,
        withdrawn=tuple(withdrawn),
        by=by,
        since=now,
        writer=secrets.token_hex(6),
    )


@dataclass(frozen=True)
class _Reading:
    """The outcome of reading a model's document.

    Attributes:
        document: the last valid one; None if there is none.
        version: version of the last file, valid or not; empty if there was no file.
        error: why `document` may be outdated.
        read_at: time of the last successful read, by `time.monotonic`.
    """

    document: ServingDocument | None = None
    version: str = ""
    error: HPSError | None = None
    read_at: float | None = None


class Fleet:
    """The serving documents of this process' models. *Thread-safe.*

    Args:
        kept: files beside the persistent database, which keep the last document of each model for a restart.
    """

    def __init__(self, sources: ModelSources, kept: KeptFiles | None = None) -> None:
        self._sources = sources
        self._kept = kept or KeptFiles(None, FLEET)
        self._lock = threading.Lock()
        self._readings: dict[str, _Reading] = {}

    def of(self, model: str, place: str) -> ServingDocument | None:
        """Return the last known document of a model, read on the first call; None if it has none.

        Args:
            place: directory of its versions; empty if it has none, and so no document.

        Raises:
            ModelFileError: it cannot be read, and none is known from before.
        """
        if not place:
            return None
        reading = self._readings.get(model) or self.read(model, place)
        if reading.document is None and reading.error is not None:
            raise reading.error
        return reading.document

    def known(self, model: str) -> ServingDocument | None:
        """Return the last known document of a model, without reading any file."""
        reading = self._readings.get(model)
        return None if reading is None else reading.document

    def problem(self, model: str) -> str:
        """Return why the last known document may be outdated; empty if it is current."""
        reading = self._readings.get(model)
        return "" if reading is None or reading.error is None else str(reading.error)

    def age_s(self, model: str) -> float | None:
        """Return the seconds since a document was last read; None if never."""
        reading = self._readings.get(model)
        return None if reading is None or reading.read_at is None else max(0.0, time.monotonic() - reading.read_at)

    def read(self, model: str, place: str) -> _Reading:
        """Reload the document of a model. A failure becomes the reading's `error`."""
        if model not in self._readings:
            kept = self._from_disk(model)
            with self._lock:
                self._readings.setdefault(model, _Reading(kept))
        before = self._readings[model]
        try:
            document, version = self._fetched(place, before)
        except HPSError as error:
            return self._adopt(model, None, "", error)
        return self._adopt(model, document, version, None)

    def write(self, model: str, place: str, change: Callable[[ServingDocument | None], ServingDocument]) -> ServingDocument:
        """Replace the document of a model, unless another writer does so at the same time.

        Args:
            change: returns the new document, given the known one.

        Raises:
            ConflictError: another writer was faster, or a newer release wrote it; nothing was written.
            ModelFileError: the document cannot be written.
            ModelSourceError: no answer; it may have been written.
        """
        filesystem, directory = self._sources.locate(place)
        path = within(directory, SERVING)
        reading = self.read(model, place)
        found = read_small_file(filesystem, path, _MOST_BYTES)
        version = ""
        if found is not None:
            content, version = found
            if _format_of(content) > _FORMAT:
                raise ConflictError(f"writing {path}: a newer release of hps wrote it; change the fleet with that release")
        if version != reading.version:
            raise ConflictError(f"writing {path}: it was changed just now; read it, and decide anew")
        document = change(reading.document)
        try:
            version = filesystem.replace(path, _text(document), version)
        except ModelFileChangedError as error:
            raise ConflictError(
                f"changing what the fleet serves of model {model!r}: somebody else changed it at the same time ({error}); see "
                "what it says now, and decide anew"
            ) from error
        self._adopt(model, document, version, None)
        return document

    def forget(self, model: str) -> None:
        """Forget the known document of a model whose file is gone: the model leaves the fleet.

        Raises:
            ConflictError: the file exists, or it is unknown whether it does.
            DatabaseError: the kept copy cannot be removed.
        """
        reading = self._readings.get(model, _Reading())
        if not isinstance(reading.error, _DeletedDocumentError):
            raise ConflictError(
                f"changing model {model!r}: its {SERVING} says what the fleet serves: {reading.document}; change it for all "
                f"replicas (--fleet)"
            )
        self._kept.remove(model)
        with self._lock:
            self._readings[model] = _Reading(None, "", None, reading.read_at)

    def check_integrity(self) -> list[str]:
        """Return a sentence for each document that withdraws its own version, or whose kept copy is newer."""
        found = []
        for model, reading in list(self._readings.items()):
            if (document := reading.document) is None:
                continue
            if {document.version, document.previous} & {*document.withdrawn}:
                found.append(f"model {model!r}: its {SERVING} withdraws what it serves: {document}")
            kept = self._from_disk(model)
            if kept is not None and kept.number > document.number and self.known(model) is document:
                found.append(f"model {model!r}: the kept {SERVING} has number {kept.number}, the known one {document.number}")
        return found

    def _fetched(self, place: str, before: _Reading) -> tuple[ServingDocument | None, str]:
        """Return the document in the file, and the file's version; None and empty if there is no file."""
        filesystem, directory = self._sources.locate(place)
        path = within(directory, SERVING)
        known = before.version if before.error is None else ""
        for attempt in range(1, _TRIES + 1):
            try:
                found = read_small_file(filesystem, path, _MOST_BYTES, known=known)
                break
            except ModelFileChangedError:
                if attempt == _TRIES:
                    raise
        if found is None:
            if before.document is not None:
                raise _DeletedDocumentError(
                    f"reading {path}: it is gone; the last one said {before.document}, which stays. Write it again (`hps "
                    "deploy MODEL --version V --fleet`), or let this replica leave the fleet (`hps unpin MODEL`)"
                )
            return None, ""
        content, version = found
        if known and version == known:
            return before.document, version
        if _format_of(content) > _FORMAT:
            raise _InvalidError(f"reading {path}: a newer release of hps wrote it; update this replica", version)
        try:
            return ServingDocument.model_validate_json(content), version
        except (pydantic.ValidationError, RecursionError) as error:
            raise _InvalidError(
                f"reading {path}: it is not a serving document ({_problems(error)}); write it again with `hps deploy MODEL "
                "--version V --fleet`",
                version,
            ) from error

    def _adopt(self, model: str, document: ServingDocument | None, version: str, error: HPSError | None) -> _Reading:
        now = time.monotonic()
        with self._lock:
            before = self._readings.get(model, _Reading())
            known = before.document
            if error is not None:
                # The version that `write` expects: of the invalid file that it may replace, none after a deletion. After a
                # failed read the file is unknown, so the last version stays.
                version = before.version
                if isinstance(error, _InvalidError):
                    version = error.version
                elif isinstance(error, _DeletedDocumentError):
                    version = ""
                reading = replace(before, error=error, version=version)
            elif known is not None and document is not None and document != known and document.number <= known.number:
                error = ModelFileError(
                    f"reading {SERVING} of model {model!r}: it went back from number {known.number}, which said {known}, to "
                    f"{document.number}; what it said stays until it is written again (`hps deploy MODEL --version V --fleet`)"
                )
                reading = replace(before, error=error, version=version, read_at=now)
            elif known is not None and document is None:  # another thread read one in the meantime
                reading = before
            else:
                reading = _Reading(document, version, None, now)
            self._readings[model] = reading
        if error is not None and str(before.error) != str(error):
            _log.warning("model %r: what the fleet serves is not known to be current: %s", model, error)
        if reading.document is not None and reading.document != known:
            _log.info("model %r: the fleet serves %s", model, reading.document)
            self._store(model)
        return reading

    def _store(self, model: str) -> None:
        """Write the known document to disk."""
        # Two threads may adopt documents in one order and write them in the other: write until the file has the known one.
        while (document := self.known(model)) is not None:
            try:
                self._kept.write(model, document.model_dump(mode="json", exclude_none=True))
            except OSError as error:
                _log.error("model %r: keeping the %s beside the persistent database failed: %s", model, SERVING, error)
                return
            if self.known(model) is document:
                return

    def _from_disk(self, model: str) -> ServingDocument | None:
        try:
            content = self._kept.read(model)
            return None if content is None else ServingDocument.model_validate_json(content)
        except (HPSError, pydantic.ValidationError) as error:
            _log.error("model %r: the kept copy of its %s is unusable: %s", model, SERVING, error)
            return None


class _DeletedDocumentError(ModelFileNotFoundError):
    """The document was deleted."""


class _InvalidError(ModelFileError):
    """The document is invalid."""

    def __init__(self, message: str, version: str) -> None:
        super().__init__(message)
        self.version = version


def _text(document: ServingDocument) -> bytes:
    return json.dumps(document.model_dump(mode="json", exclude_none=True), indent=1).encode() + b"\n"


def _format_of(content: bytes) -> int:
    try:
        found = json.loads(content).get("format")
    except (ValueError, AttributeError, RecursionError):
        return 0
    return found if isinstance(found, int) else 0


def _problems(error: Exception) -> str:
    if not isinstance(error, pydantic.ValidationError):
        return "nested too deeply"
    return "; ".join(f"{'.'.join(map(str, detail['loc'])) or 'it'}: {detail['msg']}" for detail in error.errors())[:400]
