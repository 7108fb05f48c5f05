"""`version.json`: the content of a version of a model, with checks for a complete copy.

{"delta_of": "1", "note": "hourly", "step": 1300, "written_at_us": 1764590000000000,
 "files": {"item/key": {"size_bytes": 8000, "crc32": "0a1b2c3d"}, ...}, "updates": {"item": {"0": "8123", "1": "7990"}},
 "dense": {"format": "pt2", "file": "dense.pt2", ...}}
"""

import json
import posixpath
import re
from collections.abc import Mapping
from typing import Annotated, Any
from urllib.parse import unquote

import pydantic

from hps.configuration.networks import DenseConfig
from hps.errors import ModelFileError, ModelFileNotFoundError
from hps.filesystems.base import FileSystem
from hps.models.sources import ModelSources

MANIFEST = "version.json"
VERSION = re.compile(r"[1-9][0-9]{0,17}")

_MOST_JSON_BYTES = 16 << 20


class FileCheck(pydantic.BaseModel):
    """The expected size and checksum of a file. *Immutable.*

    Attributes:
        size_bytes: size of the file.
        crc32: zlib's CRC-32 of its content, eight hexadecimal digits; empty for no check.
    """

    model_config = pydantic.ConfigDict(frozen=True, extra="forbid", strict=True)

    size_bytes: int = pydantic.Field(ge=0)
    crc32: str = pydantic.Field(default="", pattern=r"^([0-9a-f]{8})?$")


_Partition = Annotated[str, pydantic.Field(pattern=r"^(.+/)?[0-9]{1,9}$")]
_Position = Annotated[str, pydantic.Field(min_length=1, max_length=200)]


class VersionManifest(pydantic.BaseModel):
    """The content of `version.json`. *Immutable.*

    Attributes:
        delta_of: the version that this one changes; empty for a complete version.
        note: any text.
        step: training step of the rows, if known; `hps import --delta-of` continues after it.
        written_at_us: time of the rows in microseconds since 1970, from which they age with `row_ttl_files`; None if unknown.
        files: checks by path relative to the version's directory.
        updates: by directory of a table relative to the version's, the position of the last message that the files contain in
            each partition of the log of updates. A partition is its number, or `<topic>/<number>`.
        dense: the version's network, instead of that of the model's entry; its files are relative to the version's directory.
    """

    model_config = pydantic.ConfigDict(frozen=True, extra="forbid", strict=True)

    delta_of: str = pydantic.Field(default="", pattern=rf"^({VERSION.pattern})?$")
    note: str = ""
    step: int | None = pydantic.Field(default=None, ge=0)
    written_at_us: int | None = pydantic.Field(default=None, ge=1, le=2**62)
    files: Mapping[str, FileCheck] = {}
    updates: Mapping[str, Mapping[_Partition, _Position]] = {}
    dense: DenseConfig | None = None

    def of_table(self, sparse_file: str) -> dict[str, FileCheck]:
        """Return the checks of a table's files by name; the table's directory is relative to the version's."""
        below = posixpath.normpath(sparse_file)
        names = ((posixpath.split(posixpath.normpath(path)), check) for path, check in self.files.items())
        return {name: check for (directory, name), check in names if (directory or ".") == below}

    def of_file(self, name: str) -> FileCheck | None:
        """Return the check of a file; its path is relative to the version's directory."""
        wanted = posixpath.normpath(name)
        return next((check for path, check in self.files.items() if posixpath.normpath(path) == wanted), None)

    def updates_of(self, sparse_file: str) -> Mapping[str, str]:
        """Return the positions of a table; its directory is relative to the version's."""
        below = posixpath.normpath(sparse_file)
        return next((positions for path, positions in self.updates.items() if posixpath.normpath(path) == below), {})

    def encoded(self) -> bytes:
        """Return the content of the file. Older servers know fewer keys, so those without a value are left out."""
        unknown = (name for name in ("step", "written_at_us") if getattr(self, name) is None)
        described = self.model_dump(mode="json", exclude={"dense", *unknown})
        if self.dense is not None:
            described["dense"] = self.dense.model_dump(mode="json", exclude_defaults=True)
        return json.dumps(described, indent=1).encode()


def read_manifest(place: str, sources: ModelSources) -> VersionManifest | None:
    """Read the `version.json` in a directory; None if there is none.

    Raises:
        ModelFileError: it is invalid or cannot be read.
    """
    filesystem, directory = sources.locate(place)
    path = within(directory, MANIFEST)
    if (content := read_json(filesystem, path)) is None:
        return None
    try:
        return VersionManifest.model_validate(content)
    except pydantic.ValidationError as error:
        problems = "; ".join(f"{'.'.join(map(str, detail['loc'])) or 'it'}: {detail['msg']}" for detail in error.errors())
        raise ModelFileError(
            f"reading {path}: {problems}; write delta_of, note, step, written_at_us, files, updates, dense"
        ) from error


def within(directory: str, name: str) -> str:
    """Join the path or URI of a directory and a name in it."""
    return f"{directory.rstrip('/')}/{name}"


def below(directory: str, name: str) -> str:
    """Join the path or URI of a directory and an untrusted path in it, such as of a `version.json`.

    Raises:
        ModelFileError: the path leads out of the directory.
    """
    path = posixpath.normpath(name)  # a bucket would take dots literally
    for read in (path, posixpath.normpath(unquote(name))):  # a URI may be unquoted later
        if posixpath.isabs(read) or read.partition("/")[0] == "..":
            raise ModelFileError(
                f"reading {directory}: got the path {name!r}, expected a file or directory below it: write a "
                "path without .. that is relative to the version's directory"
            )
    return directory if path == "." else within(directory, path)


def write_file(filesystem: FileSystem, path: str, content: bytes) -> None:
    """Write a small file, which appears only when complete."""
    writer = filesystem.create(path)
    try:
        writer.write(memoryview(content))
        writer.commit()
    finally:
        writer.abort()


def read_small_file(filesystem: FileSystem, path: str, most_bytes: int, *, known: str = "") -> tuple[bytes, str] | None:
    """Read a small file: its content and version; None if there is none.

    Args:
        known: a version whose content is not read, and returned empty.
    """
    try:
        status = filesystem.status(path)
    except ModelFileNotFoundError:
        return None
    if known and status.version == known:
        return b"", known
    if status.size_bytes > most_bytes:
        raise ModelFileError(f"reading {path}: got {status.size_bytes} bytes, expected at most {most_bytes}")
    content = bytearray(status.size_bytes)
    filesystem.read_into(path, 0, memoryview(content), status.version)
    return bytes(content), status.version


def read_json(filesystem: FileSystem, path: str) -> dict[str, Any] | None:
    """Read the object in a JSON file; None if there is no such file."""
    if (found := read_small_file(filesystem, path, _MOST_JSON_BYTES)) is None:
        return None
    try:
        read = json.loads(found[0].decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise ModelFileError(
            f"reading {path}: it is not JSON: {error}; write it completely, and rename it into place"
        ) from error
    if not isinstance(read, dict):
        raise ModelFileError(f"reading {path}: got {type(read).__name__}, expected a JSON object")
    return read
