"""The reports of checks, where people, other replicas and the next start find them.

`checks-<version>.json` lies beside the directories of a model's versions, as `serving.json` does, for as long as that of the
version; the last report of each model also lies beside the persistent database, without the checks that passed.
"""

import logging
import re
from typing import Final

import pydantic

from hps.errors import DatabaseError, HPSError
from hps.filesystems.base import FileSystem
from hps.models.manifest import VERSION, read_small_file, within, write_file
from hps.models.sources import ModelSources
from hps.versions.checks.report import CheckReport
from hps.versions.kept_files import KeptFiles

_log = logging.getLogger(__name__)

CHECKS_DIRECTORY: Final = "hps-checks"
_MOST_BYTES: Final = 4 << 20
_MOST_KEPT: Final = 20  # failed checks, and characters of their texts: `KeptFiles` reads 64 KB
_MOST_CHARACTERS: Final = 300
_NAME: Final = re.compile(rf"checks-({VERSION.pattern})\.json")


class CheckDocuments:
    """Reads and writes the reports of checks. *Thread-safe*; a model has one change at a time.

    A report that cannot be read or written is logged: it is evidence, and never a reason not to serve.

    Args:
        kept: files beside the persistent database.
    """

    def __init__(self, sources: ModelSources, kept: KeptFiles | None = None) -> None:
        self._sources = sources
        self._kept = kept or KeptFiles(None, CHECKS_DIRECTORY)

    def read(self, model: str, place: str, version: str, fingerprint: str) -> CheckReport | None:
        """Return the report of a version with these files; None if there is none.

        Args:
            place: directory of the model's versions; empty if it has none.
        """
        found = [self._beside_versions(place, version) if place else None, self._beside_database(model)]
        of_files = (model, version, fingerprint)
        reports = [each for each in found if each is not None and (each.model, each.version, each.fingerprint) == of_files]
        # The first is out of date if its place became read-only before the version was accepted.
        return max(reports, key=lambda report: report.accepted_at is not None, default=None)

    def write(self, report: CheckReport, place: str) -> None:
        """Write a report to both places, and delete those of versions whose directories are gone."""
        written, problems = False, []
        if place:
            filesystem, directory = self._sources.locate(place)
            try:
                write_file(filesystem, within(directory, _name(report.version)), report.model_dump_json(indent=1).encode())
                written = True
                _delete_leftovers(filesystem, directory, report.version)
            except (HPSError, OSError) as error:  # read-only, mostly
                problems.append(str(error))
        failed = [found.model_copy(update={"text": found.text[:_MOST_CHARACTERS]}) for found in report.failed[:_MOST_KEPT]]
        if self._kept.directory is not None and not self._kept.read_only:
            try:
                self._kept.write(report.model, report.model_copy(update={"checks": tuple(failed)}).model_dump())
                written = True
            except OSError as error:
                problems.append(str(error))
        if not written and report.failed:
            why = "; ".join(problems) or "no persistent_db keeps it"
            _log.warning(
                "model %r: a restart forgets that version %s is %s: %s", report.model, report.version, report.verdict, why
            )
        elif problems:
            _log.info("model %r: the report of version %s: %s", report.model, report.version, "; ".join(problems))

    def _beside_versions(self, place: str, version: str) -> CheckReport | None:
        filesystem, directory = self._sources.locate(place)
        path = within(directory, _name(version))
        try:
            found = read_small_file(filesystem, path, _MOST_BYTES)
        except HPSError as error:
            _log.warning("reading %s: %s; it is ignored", path, error)
            return None
        return None if found is None else _parsed(path, found[0])

    def _beside_database(self, model: str) -> CheckReport | None:
        try:
            found = self._kept.read(model)
        except DatabaseError as error:
            _log.warning("%s; it is ignored", error)
            return None
        return None if found is None else _parsed(str(self._kept.path(model)), found)


def _name(version: str) -> str:
    return f"checks-{version}.json"


def _delete_leftovers(filesystem: FileSystem, directory: str, version: str) -> None:
    """Delete the reports of versions without a directory, except of the version that was just written about."""
    names = filesystem.list(directory)
    present = {version, *names}
    for name in names:
        if (found := _NAME.fullmatch(name)) and found[1] not in present:
            filesystem.delete(within(directory, name))


def _parsed(path: str, content: bytes) -> CheckReport | None:
    try:
        return CheckReport.model_validate_json(content)
    except pydantic.ValidationError as error:  # damaged, or of a newer release
        _log.warning("reading %s: %s; it is ignored", path, str(error).replace("\n", " ")[:200])
        return None
