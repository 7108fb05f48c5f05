"""Finds the versions of models in directories: numbered ones of a model, and those of all models of a repository.

    <repository>/<model>/model.json         an entry of `models` without its place; `sparse_files` are relative to a version
    <repository>/<model>/<version>/         a positive decimal number that does not begin with 0, as Triton has it
    <repository>/<model>/<version>/version.json     what it consists of (`VersionManifest`); optional
    <repository>/<model>/<version>/<sparse file>/key, emb_vector

**What is being written must not pass for whole.** A directory counts as a version by its name alone. So a publisher writes
under any other name (`.2.tmp`) and renames the directory, where that is one step (a local disk, HDFS). Object stores cannot
rename: there `version.json` is written last, and `manifest_required` hides versions that have none. Its sizes and checksums are
checked as far as it names them: against a copy that stalled in a file of full length, or files of two versions in one
directory. Without it a version that is not all there fails where its sizes do not fit, and can be tried again later.
"""

import json
import posixpath
import re
from collections.abc import Mapping
from typing import Any

import pydantic

from hps.errors import HPSError, ModelFileError, ModelFileNotFoundError
from hps.filesystems.base import FileSystem
from hps.models.sources import ModelSources

MANIFEST = "version.json"
MODEL_ENTRY = "model.json"

_VERSION = re.compile(r"[1-9][0-9]{0,17}")
_MODEL = re.compile(r"[a-zA-Z0-9_-]{1,120}")
_MOST_JSON_BYTES = 16 << 20


class FileCheck(pydantic.BaseModel):
    """What a file of a version must be. *Immutable.*

    Attributes:
        size_bytes: how long it is.
        crc32: CRC-32 of its content (zlib's), eight hexadecimal digits; empty if it is not to be checked.
    """

    model_config = pydantic.ConfigDict(frozen=True, extra="forbid", strict=True)

    size_bytes: int = pydantic.Field(ge=0)
    crc32: str = pydantic.Field(default="", pattern=r"^([0-9a-f]{8})?$")


class VersionManifest(pydantic.BaseModel):
    """`version.json`: what a version consists of. *Immutable.*

    Attributes:
        delta_of: the version whose rows it changes; empty if it has all its rows itself.
        note: text for people.
        files: by path relative to the version's directory.
    """

    model_config = pydantic.ConfigDict(frozen=True, extra="forbid", strict=True)

    delta_of: str = pydantic.Field(default="", pattern=rf"^({_VERSION.pattern})?$")
    note: str = ""
    files: Mapping[str, FileCheck] = {}

    def of_table(self, sparse_file: str) -> dict[str, FileCheck]:
        """The checks of one table's files, by their names, for its directory relative to the version's."""
        below = posixpath.normpath(sparse_file)
        names = ((posixpath.split(posixpath.normpath(path)), check) for path, check in self.files.items())
        return {name: check for (directory, name), check in names if (directory or ".") == below}


def list_versions(place: str, sources: ModelSources, *, manifest_required: bool = False) -> dict[str, str]:
    """Find the versions of a model: one request for its directory, and with `manifest_required` one or two for each version.

    Args:
        place: path or URI of the model's directory.
        sources: the file systems.
        manifest_required: leave out versions without `version.json`.

    Returns:
        The directory of each version, ascending by number. Other names, and files, are ignored.

    Raises:
        ModelFileNotFoundError: there is no such directory.
        ModelFileError, ModelSourceError: it cannot be listed.
    """
    filesystem, directory = sources.locate(place)
    versions = sorted(filter(_VERSION.fullmatch, filesystem.directories(directory)), key=int)
    places = {version: within(directory, version) for version in versions}
    if manifest_required:
        places = {version: at for version, at in places.items() if filesystem.exists(within(at, MANIFEST))}
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
            entry = _read_json(filesystem, within(within(repository, name), MODEL_ENTRY))
            if entry is not None:
                found[name] = _checked_entry(within(repository, name), name, entry)
        except HPSError as error:
            found[name] = error
    return found


def read_manifest(place: str, sources: ModelSources) -> VersionManifest | None:
    """What `version.json` says of the version in this directory; None if there is none.

    Raises:
        ModelFileError: it is not as it should be, or cannot be read.
    """
    filesystem, directory = sources.locate(place)
    path = within(directory, MANIFEST)
    if (content := _read_json(filesystem, path)) is None:
        return None
    try:
        return VersionManifest.model_validate(content)
    except pydantic.ValidationError as error:
        problems = "; ".join(f"{'.'.join(map(str, one['loc'])) or 'it'}: {one['msg']}" for one in error.errors())
        raise ModelFileError(f"reading {path}: {problems}; write delta_of, note and files") from error


def within(directory: str, name: str) -> str:
    """The path or URI of what lies in a directory under this name."""
    return f"{directory.rstrip('/')}/{name}"


def _checked_entry(place: str, name: str, entry: dict[str, Any]) -> dict[str, Any]:
    if not _MODEL.fullmatch(name):
        raise ModelFileError(f"listing {place}: no model can be called {name!r}, expected 1 to 120 of a-z A-Z 0-9 _ -")
    if (got := entry.setdefault("model", name)) != name:
        raise ModelFileError(f"reading {within(place, MODEL_ENTRY)}: got model {got!r}, expected {name!r}, as its directory")
    return entry


def _read_json(filesystem: FileSystem, path: str) -> dict[str, Any] | None:
    """The object that a JSON file holds; None if there is no such file."""
    try:
        status = filesystem.status(path)
    except ModelFileNotFoundError:
        return None
    if status.size_bytes > _MOST_JSON_BYTES:
        raise ModelFileError(f"reading {path}: got {status.size_bytes} bytes, expected at most {_MOST_JSON_BYTES}")
    content = bytearray(status.size_bytes)
    filesystem.read_into(path, 0, memoryview(content), status.version)
    try:
        read = json.loads(content.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise ModelFileError(f"reading {path}: it is not JSON: {error}; write it whole, and rename it into place") from error
    if not isinstance(read, dict):
        raise ModelFileError(f"reading {path}: got {type(read).__name__}, expected a JSON object")
    return read
