"""The files of a version's network: its own, and those of its keys programs."""

import hashlib
import json
import zlib
from collections.abc import Iterator
from dataclasses import dataclass

from hps.configuration.networks import DenseConfig
from hps.errors import ModelFileError
from hps.ground.registry import implementation
from hps.models.files import OpenedFile, open_file
from hps.models.manifest import FileCheck
from hps.models.sources import ModelSources
from hps.networks.base import Network

_NOT_OF_CONTENT = {
    "dynamic_batching",
    "instances",
    "max_queue_delay_us",
    "refuse_nan",
    "open_timeout_s",
    "stale_copies",
    "allow_stale_copy",
}


@dataclass(frozen=True)
class NetworkFiles:
    """The location of a version's network. *Immutable.*

    Attributes:
        places: path or URI of each of its files, in the order of `config.files`.
        checks: of each file, from `version.json`; empty without it.
    """

    config: DenseConfig
    places: tuple[str, ...]
    checks: tuple[FileCheck | None, ...] = ()

    def fingerprint(self, sources: ModelSources) -> str:
        """Identify the state of the files and of their configuration; reads no content.

        Raises:
            ModelFileError: one is missing, or has another size than `version.json` says.
        """
        files = [[file.path, file.version, file.size_bytes] for file in self._opened(sources)]
        settings = self.config.model_dump(mode="json", exclude=_NOT_OF_CONTENT | {"file"}, exclude_defaults=True)
        for program in settings.get("keys", ()):
            del program["file"]
        content = json.dumps([files, settings], sort_keys=True)
        return hashlib.blake2b(content.encode(errors="surrogatepass"), digest_size=16).hexdigest()

    def size_bytes(self, sources: ModelSources) -> int:
        """Return the size of all files.

        Raises:
            ModelFileError: one is missing, or has another size than `version.json` says.
        """
        return sum(file.size_bytes for file in self._opened(sources))

    def read(self, sources: ModelSources) -> dict[str, bytes]:
        """Read the files; by their names in `config.files`.

        Raises:
            ModelFileError: one is missing, changes meanwhile, has another content than `version.json` says, or is machine code,
                and `model_source.trust` is not set.
        """
        engine: type[Network] = implementation("network", self.config.format)
        contents = {name: _read(file) for name, file in zip(self.config.files, self._opened(sources), strict=True)}
        code = None if sources.trusted else next((name for name in contents if engine.runs_code(name, contents[name])), None)
        if code is not None:
            raise ModelFileError(
                f"opening the network {code}: got machine code (a package of AOTInductor), which may do whatever the server "
                "may; expected a program of torch.export, or, if you trust whoever writes the files, model_source.trust: true "
                "in the configuration"
            )
        return contents

    def _opened(self, sources: ModelSources) -> Iterator[OpenedFile]:
        for place, check in zip(self.places, self.checks or [None] * len(self.places), strict=True):
            filesystem, path = sources.locate(place)
            yield open_file(filesystem, path, {} if check is None else {path.rpartition("/")[2]: check})


def _read(file: OpenedFile) -> bytes:
    if not file.size_bytes:
        raise ModelFileError(f"reading the network {file.path}: got an empty file")
    content = bytearray(file.size_bytes)
    view, step = memoryview(content), file.filesystem.part_bytes
    for start in range(0, file.size_bytes, step):
        file.read(start, view[start : start + step])
    file.check_content(f"{zlib.crc32(content):08x}")
    return bytes(content)
