"""The file of a version's network."""

import hashlib
import json
import zlib
from dataclasses import dataclass

from hps.configuration.networks import DenseConfig
from hps.errors import ModelFileError
from hps.models.files import open_file
from hps.models.manifest import FileCheck
from hps.models.sources import ModelSources

_NOT_OF_CONTENT = {"dynamic_batching", "max_queue_delay_us", "refuse_nan", "open_timeout_s"}


@dataclass(frozen=True)
class NetworkFile:
    """Where the network of a version is. *Immutable.*

    Attributes:
        config: what it is.
        place: path or URI of the file.
        check: from `version.json`.
    """

    config: DenseConfig
    place: str
    check: FileCheck | None = None

    def fingerprint(self, sources: ModelSources) -> str:
        """Identify the state of the file and of what is said about it; reads no content.

        Raises:
            ModelFileError: it is missing, or has another size than `version.json` says.
        """
        filesystem, path = sources.locate(self.place)
        file = open_file(filesystem, path, self._checks(path))
        said = self.config.model_dump(mode="json", exclude=_NOT_OF_CONTENT | {"file"})
        content = json.dumps([path, file.version, file.size_bytes, said], sort_keys=True)
        return hashlib.blake2b(content.encode(errors="surrogatepass"), digest_size=16).hexdigest()

    def size_bytes(self, sources: ModelSources) -> int:
        """Return the size of the file.

        Raises:
            ModelFileError: it is missing, or has another size than `version.json` says.
        """
        filesystem, path = sources.locate(self.place)
        return open_file(filesystem, path, self._checks(path)).size_bytes

    def read(self, sources: ModelSources) -> bytes:
        """Read the file.

        Raises:
            ModelFileError: it is missing, changes meanwhile, or has another content than `version.json` says.
        """
        filesystem, path = sources.locate(self.place)
        file = open_file(filesystem, path, self._checks(path))
        if not file.size_bytes:
            raise ModelFileError(f"reading the network {path}: got an empty file")
        content = bytearray(file.size_bytes)
        view, step = memoryview(content), filesystem.part_bytes
        for start in range(0, file.size_bytes, step):
            file.read(start, view[start : start + step])
        file.check_content(f"{zlib.crc32(content):08x}")
        return bytes(content)

    def _checks(self, path: str) -> dict[str, FileCheck]:
        return {} if self.check is None else {path.rpartition("/")[2]: self.check}
