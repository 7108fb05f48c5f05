"""Finds the versions of a model, and the models of a repository.

    <repository>/<model>/model.json         an entry of `models` without its place; `sparse_files` are relative to a version
    <repository>/<model>/<version>/         a positive decimal number without leading zeros, as in Triton
    <repository>/<model>/<version>/version.json     optional; see `VersionManifest`
    <repository>/<model>/<version>/<sparse file>/key, emb_vector
    <repository>/<model>/<version>/<files>          of its network, if it has one

A publisher writes a version under another name (`.2.tmp`) and renames it where that is atomic (local disk, HDFS); elsewhere it
writes `version.json` last. Its sizes and checksums detect a partial copy, and files of two versions in one directory.
"""

import logging
import posixpath
import re
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from hps.configuration.networks import DenseConfig
from hps.errors import HPSError, ModelFileError, ModelFileNotFoundError
from hps.models.deltas import MOST_DELTAS, ResidentTable, TableSource
from hps.models.manifest import MANIFEST, VERSION, FileCheck, VersionManifest, below, read_json, read_manifest, within
from hps.models.network_files import NetworkFiles
from hps.models.sources import ModelSources

MODEL_ENTRY = "model.json"
_log = logging.getLogger(__name__)

_MOST_SHOWN = 4
_MODEL = re.compile(r"[a-zA-Z0-9_-]{1,120}")


def list_versions(
    place: str, sources: ModelSources, *, manifest_required: bool | None = None, known: Container[str] = ()
) -> dict[str, str]:
    """List the versions of a model: one request for its directory and, with `manifest_required`, one for each new version.

    Args:
        place: path or URI of the model's directory.
        manifest_required: ignore versions without `version.json`; by default, where directories cannot be renamed.
        known: versions whose `version.json` was found before, and is not requested again.

    Returns:
        The directory of each version, ascending by number. Other names, and files, are ignored.

    Raises:
        ModelFileNotFoundError: there is no such directory.
        ModelFileError, ModelSourceError: it cannot be listed.
    """
    filesystem, directory = sources.locate(place)
    versions = sorted(filter(VERSION.fullmatch, filesystem.directories(directory)), key=int)
    places = {version: within(directory, version) for version in versions}
    # Any directory with such a name counts as a version. Object stores cannot rename a complete one into place: there
    # `version.json`, which is written last, marks it as complete.
    if manifest_required is None:
        manifest_required = not filesystem.renames_directories
    if manifest_required:
        places = {number: at for number, at in places.items() if number in known or filesystem.exists(within(at, MANIFEST))}
    return places


def list_models(place: str, sources: ModelSources) -> dict[str, dict[str, Any] | HPSError]:
    """List the models of a repository: one request for its directory, and two for each model.

    Returns:
        By name of the directory, the content of its `model.json`, with the name as `model`; or the error, which does not affect
        other models. Directories without `model.json` are ignored.

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


def explain_no_models(
    place: str, sources: ModelSources, wanted: Sequence[str] = (), problems: Mapping[str, HPSError] | None = None
) -> str:
    """Describe what was searched in a repository and what was found, if there is no model to serve.

    Args:
        place: path or URI of the repository; empty if none is configured.
        wanted: names of the expected models; empty for any.
        problems: errors of ignored models.
    """
    missing = f"no model {', '.join(wanted)} (service.load_models)" if wanted else "no model to serve"
    if not place:
        return f"{missing}: it is not in `models`, and model_repository is not set"
    try:
        found = _contents(place, sources)
    except HPSError as error:
        found = str(error)
    left_out = "".join(f"; model {name} is left out: {error}" for name, error in (problems or {}).items())
    return (
        f"{missing}: looked in {place} for {wanted[0] if wanted else '<model>'}/{MODEL_ENTRY}, got {found}{left_out}; a "
        f"model's directory needs {MODEL_ENTRY}, and a directory for each version, as 1, with its tables. Correct "
        "model_repository, or put the models there; if that is intended, set service.allow_empty, or serve with --allow-empty"
    )


def _contents(place: str, sources: ModelSources) -> str:
    """List the contents of a directory and of its subdirectories."""
    filesystem, directory = sources.locate(place)
    names = filesystem.directories(directory)
    files = [name for name in filesystem.list(directory) if name not in names]
    contents = [f"{name} ({_listed(filesystem.list(within(directory, name)))})" for name in names[:_MOST_SHOWN]]
    if not names:
        return f"no directory; {_listed(files)}" if files else "nothing"
    return f"{len(names)} director{'y' if len(names) == 1 else 'ies'}: {_listed(contents, len(names))}"


def _listed(names: Sequence[str], count: int = 0) -> str:
    more = max(count, len(names)) - len(names[:_MOST_SHOWN])
    return ", ".join([*names[:_MOST_SHOWN], *([f"{more} more"] if more else [])]) or "nothing"


@dataclass(frozen=True, slots=True)
class VersionFiles:
    """The files of one version, before they are opened. *Immutable.*

    Attributes:
        version: version number.
        sparse_files: directory or URI of each table.
        delta_of: the version that it changes; None for a complete version.
        checks, updates: by table, from `version.json`; empty without it.
        network: its network; None if it has none, or if it is a delta and has that of its base.
        written_at_us: time of its rows in microseconds since 1970, from `version.json`; 0 if unknown.
    """

    version: str
    sparse_files: tuple[str, ...]
    delta_of: str | None = None
    checks: tuple[Mapping[str, FileCheck], ...] = ()
    updates: tuple[Mapping[str, str], ...] = ()
    network: NetworkFiles | None = None
    written_at_us: int = 0


def version_files(
    version: str, place: str, sparse_files: Sequence[str], sources: ModelSources, dense: DenseConfig | None = None
) -> VersionFiles:
    """List the files of a version. Reads its `version.json`, if any.

    Args:
        place: path or URI of its directory.
        sparse_files: directory of each table, relative to `place`.
        dense: the network of versions whose `version.json` names none; its files are relative to `place`.

    Raises:
        ModelFileError: `version.json` is invalid or cannot be read, or a path leads out of the version's directory.
    """
    manifest = read_manifest(place, sources) or VersionManifest()
    places = tuple(below(place, sparse_file) for sparse_file in sparse_files)
    checks, updates = tuple(map(manifest.of_table, sparse_files)), tuple(map(manifest.updates_of, sparse_files))
    network = None
    if (own := manifest.dense or (None if manifest.delta_of else dense)) is not None:
        files = tuple(below(place, name) for name in own.files)
        network = NetworkFiles(own, files, tuple(map(manifest.of_file, own.files)))
    written_at_us = manifest.written_at_us or 0
    return VersionFiles(version, places, manifest.delta_of or None, checks, updates, network, written_at_us)


def with_log_starts(files: VersionFiles, sources: ModelSources) -> VersionFiles:
    """Add positions in the log of updates and the time of the rows from a `version.json` beside the tables' directories.

    For versions whose directories are configured one by one; the rest of the file does not apply to them. A file that cannot be
    read may belong to another program, and is ignored.
    """
    parents = {posixpath.split(place.rstrip("/"))[0] for place in files.sparse_files}
    if len(parents) != 1 or not (place := parents.pop()):
        return files
    try:
        manifest = read_manifest(place, sources)
    except ModelFileError as error:
        _log.warning("position in the log of updates unknown for %s: %s", place, error)
        return files
    if manifest is None:
        return files
    names = [posixpath.basename(file.rstrip("/")) for file in files.sparse_files]
    return replace(files, updates=tuple(map(manifest.updates_of, names)), written_at_us=manifest.written_at_us or 0)


def table_sources(
    version: str,
    find: Callable[[str], VersionFiles | None],
    resident: Callable[[str], Sequence[ResidentTable]] = lambda version: (),
) -> tuple[TableSource, ...]:
    """Locate the tables of a version and of the versions that it changes.

    Args:
        find: returns the files of a version; None if it does not exist.
        resident: returns the tables of a version in this process, in order; empty if none.

    Returns:
        The source of each table, for `TableLoad` and `fingerprints_of`.

    Raises:
        ModelFileNotFoundError: the version, or one that it changes, does not exist.
        ModelFileError: the chain is a circle or too long, or its versions have different tables.
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
    for part in reversed(chain):
        of_none = [None] * len(part.sparse_files)
        parts = zip(
            *(
                part.sparse_files,
                part.checks or of_none,
                tables or of_none,
                resident(part.version) or of_none,
                part.updates or of_none,
            ),
            strict=True,
        )
        tables = tuple(
            TableSource(place, checks or {}, base, here, updates or (base.log_start if base else {}))
            for place, checks, base, here, updates in parts
        )
    return tables


def network_of(version: str, find: Callable[[str], VersionFiles | None]) -> NetworkFiles | None:
    """Return the network of a version, or of the one that it changes; `table_sources` has checked the chain."""
    wanted: str | None = version
    while wanted and (found := find(wanted)) is not None:
        if found.network is not None:
            return found.network
        wanted = found.delta_of
    return None


def _checked_entry(place: str, name: str, entry: dict[str, Any]) -> dict[str, Any]:
    if not _MODEL.fullmatch(name):
        raise ModelFileError(f"listing {place}: no model can be called {name!r}, expected 1 to 120 of a-z A-Z 0-9 _ -")
    if (got := entry.setdefault("model", name)) != name:
        raise ModelFileError(f"reading {within(place, MODEL_ENTRY)}: got model {got!r}, expected {name!r}, as its directory")
    return entry
