"""Finds the file system of a path or URI."""

import os
import re
import threading
from urllib.parse import urlsplit

from hps.configuration.tiers import ModelSourceConfig
from hps.errors import ModelFileError
from hps.filesystems.base import FileSystem
from hps.registry import implementation, is_registered, names

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):")  # two letters at least: C:\models is a path

# HugeCTR accepts https addresses of these vendors.
_HTTPS_HOSTS = {
    "amazonaws.com": "s3",
    "amazonaws.com.cn": "s3",
    "storage.googleapis.com": "gs",
    "storage.cloud.google.com": "gs",
}


class ModelSources:
    """Finds the file system of a path or URI by its scheme. *Thread-safe.* Each is made once, at first use.

    Args:
        settings: timeouts, attempts and addresses of remote file systems.
    """

    def __init__(self, settings: ModelSourceConfig | None = None) -> None:
        self._settings = settings or ModelSourceConfig()
        self._filesystems: dict[str, FileSystem] = {}
        self._making = threading.Lock()

    @property
    def trusted(self) -> bool:
        """Whether files may hold machine code: `model_source.trust`."""
        return self._settings.trust

    def locate(self, source: str) -> tuple[FileSystem, str]:
        """Return the file system of a directory, and the directory in that file system's form.

        The text before the first colon is a scheme if it has two letters or more, unless a local path of this name exists.

        Raises:
            ModelFileError: the scheme is unknown; the message names the known ones.
            MissingDependencyError: the scheme's package is not installed.
        """
        match = _SCHEME.match(source)
        scheme = match[1].lower() if match else ""
        if scheme == "https":
            scheme = _vendor(source)
        elif (
            scheme
            and not (source[len(scheme) :].startswith("://") and is_registered("filesystem", scheme))
            and os.path.exists(source)
        ):
            scheme = ""
        if not is_registered("filesystem", scheme):
            schemes = ", ".join(f"{name}://" for name in sorted(names("filesystem")) if name)
            raise ModelFileError(
                f"opening sparse model {source}: got scheme {scheme!r}, expected a local path or one of: {schemes}, or the "
                "https address of an S3 or GCS object"
            )
        filesystem = self._filesystem(scheme)
        if filesystem.is_local:
            return filesystem, source if scheme else os.path.abspath(source)
        return filesystem, source.rstrip("/")

    def _filesystem(self, scheme: str) -> FileSystem:
        with self._making:
            if scheme not in self._filesystems:
                self._filesystems[scheme] = implementation("filesystem", scheme)(self._settings)
            return self._filesystems[scheme]


def _vendor(source: str) -> str:
    """Return the scheme for the vendor of an https address; `https` if unknown."""
    host = (urlsplit(source).hostname or "").lower()
    return next((scheme for end, scheme in _HTTPS_HOSTS.items() if host == end or host.endswith(f".{end}")), "https")
