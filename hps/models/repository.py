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

import re
from collections.abc import Container
from typing import Any

from hps.errors import HPSError, ModelFileError
from hps.models.manifest import MANIFEST, VERSION, read_json, within
from hps.models.sources import ModelSources

MODEL_ENTRY = "model.json"

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


def _checked_entry(place: str, name: str, entry: dict[str, Any]) -> dict[str, Any]:
    if not _MODEL.fullmatch(name):
        raise ModelFileError(f"listing {place}: no model can be called {name!r}, expected 1 to 120 of a-z A-Z 0-9 _ -")
    if (got := entry.setdefault("model", name)) != name:
        raise ModelFileError(f"reading {within(place, MODEL_ENTRY)}: got model {got!r}, expected {name!r}, as its directory")
    return entry
