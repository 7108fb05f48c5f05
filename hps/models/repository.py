"""Finds the versions of models in directories: numbered ones of a model, and those of all models of a repository.

    <repository>/<model>/model.json         an entry of `models` without its place; `sparse_files` are relative to a version
    <repository>/<model>/<version>/         a positive decimal number that does not begin with 0, as Triton has it
    <repository>/<model>/<version>/version.json     what it consists of (`VersionManifest`); optional
    <repository>/<model>/<version>/<sparse file>/key, emb_vector

**What is being written must not pass for whole.** A directory counts as a version by its name alone. So a publisher writes
under any other name (`.2.tmp`) and renames the directory, where that is one step (a local disk, HDFS). Object stores cannot
rename: there `version.json` is written last, and versions without it are not seen. Sizes and checksums that it names are
checked: against a copy that stalled in a file of full length, or files of two versions in one directory. Without it a version
that is not all there fails where its sizes do not fit, and can be tried again later.
"""

import logging
import posixpath
import re
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hps.errors import HPSError, ModelFileError, ModelFileNotFoundError
from hps.models.deltas import MOST_DELTAS, HeldTable, TableSource
from hps.models.manifest import MANIFEST, VERSION, FileCheck, VersionManifest, read_json, read_manifest, within
from hps.models.sources import ModelSources

MODEL_ENTRY = "model.json"
_log = logging.getLogger(__name__)

_MODEL = re.compile(r"[a-zA-Z0-9_-]{1,120}")


def list_versions(
    place: str, sources: ModelSources, *, manifest_required: bool | None = None, known: Container[str] = ()
) -> dict[str, str]:
    """Find the versions of a model: one request for its directory, and with `manifest_required` one for each new version.

    Args:
        place: path or URI of the model's directory.
        sources: the file systems.
        manifest_required: leave out versions without `version.json`; by default where directories cannot be renamed.
        known: versions that were found before, whose `version.json` need not be looked for again.

    Returns:
        The directory of each version, ascending by number. Other names, and files, are ignored.

    Raises:
        ModelFileNotFoundError: there is no such directory.
        ModelFileError, ModelSourceError: it cannot be listed.
    """
    filesystem, directory = sources.locate(place)
    versions = sorted(filter(VERSION.fullmatch, filesystem.directories(directory)), key=int)
    places = {version: within(directory, version) for version in versions}
    if manifest_required is None:
        manifest_required = not filesystem.renames_directories
    if manifest_required:
        places = {one: at for one, at in places.items() if one in known or filesystem.exists(within(at, MANIFEST))}
    return places


def list_models(place: str, sources: ModelSources) -> dict[str, dict[str, Any] | HPSError]:
    """Find the models of a repository: one request for its directory, and two for each model.

    Returns:
        By name of the directory, what its `model.json` says, with the name as `model`; or the error that says what is wrong
        with it, which is no reason to do without the other models. Directories without `model.json` are ignored.

    Raises:
        ModelFileNotFoundError: there is no such repository.
        ModelFileError, ModelSourceError: it cannot be listed.
    """
    filesystem, repository = sources.locate(place)
    found: dict[str, dict[str, Any] | HPSError] = {}
    for name in filesystem.directories(repository):
        try:
            entry = read_json(filesystem, within(within(repository, name), MODEL_ENTRY))
            if entry is not None:
                found[name] = _checked_entry(within(repository, name), name, entry)
        except HPSError as error:
            found[name] = error
    return found


@dataclass(frozen=True, slots=True)
class VersionFiles:
    """The files of one version, before they are opened. *Immutable.*

    Attributes:
        version: its number.
        sparse_files: directory or URI of each table.
        delta_of: the version that it changes; None if it has all rows itself.
        checks: what `version.json` says of each table's files; empty if it says nothing.
        updates: of each table, the positions in the log of updates that its files contain, as `version.json` says.
    """

    version: str
    sparse_files: tuple[str, ...]
    delta_of: str | None = None
    checks: tuple[Mapping[str, FileCheck], ...] = ()
    updates: tuple[Mapping[str, str], ...] = ()


def version_files(version: str, place: str, sparse_files: Sequence[str], sources: ModelSources) -> VersionFiles:
    """Find out what the version in a directory consists of. Reads its `version.json`, if there is one.

    Args:
        version: its number.
        place: path or URI of its directory.
        sparse_files: of each table, relative to it.
        sources: the file systems.

    Raises:
        ModelFileError: `version.json` is not as it should be, or cannot be read.
    """
    manifest = read_manifest(place, sources) or VersionManifest()
    below = (posixpath.normpath(sparse_file) for sparse_file in sparse_files)  # a bucket would take dots literally
    places = tuple(place if path == "." else within(place, path) for path in below)
    checks, updates = tuple(map(manifest.of_table, sparse_files)), tuple(map(manifest.updates_of, sparse_files))
    return VersionFiles(version, places, manifest.delta_of or None, checks, updates)


def log_starts_beside(sparse_files: Sequence[str], sources: ModelSources) -> tuple[Mapping[str, str], ...]:
    """What a `version.json` beside the directories of tables says of the log of updates; empty if there is none.

    For versions whose directories are configured one by one: nothing else of it holds for them, and one that cannot be read may
    be somebody else's.
    """
    parents = {posixpath.split(place.rstrip("/"))[0] for place in sparse_files}
    if len(parents) != 1 or not (place := parents.pop()):
        return ()
    try:
        manifest = read_manifest(place, sources)
    except ModelFileError as error:
        _log.warning("the position in the log of updates is not known for %s: %s", place, error)
        return ()
    names = [posixpath.basename(one.rstrip("/")) for one in sparse_files]
    return () if manifest is None else tuple(map(manifest.updates_of, names))


def table_sources(
    version: str,
    find: Callable[[str], VersionFiles | None],
    held: Callable[[str], Sequence[HeldTable]] = lambda version: (),
) -> tuple[TableSource, ...]:
    """Follow a version to all versions that it changes.

    Args:
        version: its number.
        find: gives the files of a version; None if there is no such version.
        held: where this process has the tables of a version, in their order; empty if it has not.

    Returns:
        Where the rows of each table are, for `TableLoad` and `fingerprint_of`.

    Raises:
        ModelFileNotFoundError: there is no such version, or none that it changes.
        ModelFileError: versions change each other in a circle, there are too many, or they have other tables.
    """
    chain: list[VersionFiles] = []
    wanted: str | None = version
    while wanted:
        found = find(wanted)
        if found is None:
            of = f"version {chain[-1].version} says delta_of {wanted}, and " if chain else ""
            raise ModelFileNotFoundError(f"opening version {version}: {of}there is no version {wanted}; write it first")
        if len(chain) > MOST_DELTAS:  # this finds circles, too
            raise ModelFileError(
                f"opening version {version}: it changes {chain[1].version}, which changes another, and so on, more than "
                f"{MOST_DELTAS} times or in a circle; write a version with all rows"
            )
        if chain and len(found.sparse_files) != len(chain[0].sparse_files):
            raise ModelFileError(
                f"opening version {version}: got {len(chain[0].sparse_files)} sparse_files, expected the "
                f"{len(found.sparse_files)} of version {wanted}, which it changes"
            )
        chain.append(found)
        wanted = found.delta_of
    tables: tuple[TableSource, ...] = ()
    for one in reversed(chain):
        of_none = [None] * len(one.sparse_files)
        parts = zip(
            *(one.sparse_files, one.checks or of_none, tables or of_none, held(one.version) or of_none, one.updates or of_none),
            strict=True,
        )
        tables = tuple(
            TableSource(place, checks or {}, base, here, updates or (base.log_start if base else {}))
            for place, checks, base, here, updates in parts
        )
    return tables


def _checked_entry(place: str, name: str, entry: dict[str, Any]) -> dict[str, Any]:
    if not _MODEL.fullmatch(name):
        raise ModelFileError(f"listing {place}: no model can be called {name!r}, expected 1 to 120 of a-z A-Z 0-9 _ -")
    if (got := entry.setdefault("model", name)) != name:
        raise ModelFileError(f"reading {within(place, MODEL_ENTRY)}: got model {got!r}, expected {name!r}, as its directory")
    return entry
