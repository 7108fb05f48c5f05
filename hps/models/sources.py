"""Finds the file system of a path or URI."""

import os
import re
import threading
from urllib.parse import urlsplit

from hps.configuration.tiers import ModelSourceConfig
from hps.errors import ModelFileError
from hps.filesystems.base import FileSystem, without_secrets
from hps.ground.registry import implementation, is_registered, names
from hps.models.peers import Peers
from hps.stores.base import FilePeers

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):")  # two letters at least: C:\models is a path

# HugeCTR accepts https addresses of these vendors.
_HTTPS_HOSTS = {
    "amazonaws.com": "s3",
    "amazonaws.com.cn": "s3",
    "storage.googleapis.com": "gs",
    "storage.cloud.google.com": "gs",
    "blob.core.windows.net": "az",
}

_STORES = {"s3": ("s3", "s3_endpoint_url"), "s3a": ("s3", "s3_endpoint_url"), "gs": ("gs", "gcs_endpoint_url")}
_SERVER = re.compile(r"(?:(\w+)://+)?(?:(https?)://+)?([^/@?#\s]+?)(:\d+)?(?:/+([^?#@]*))?", re.IGNORECASE)


class ModelSources:
    """Finds the file system of a path or URI by its scheme. *Thread-safe.* Each is made once, at first use.

    Args:
        settings: timeouts, attempts and addresses of remote file systems.

    Attributes:
        peers: servers that may have the same row files; None without any.
    """

    def __init__(self, settings: ModelSourceConfig | None = None) -> None:
        self._settings = settings or ModelSourceConfig()
        self._filesystems: dict[str, FileSystem] = {}
        self._making = threading.Lock()
        peers = self._settings.peers
        self.peers: FilePeers | None = Peers(peers) if peers is not None and peers.urls else None

    @property
    def trusted(self) -> bool:
        """True if files may contain machine code: `model_source.trust`."""
        return self._settings.trust

    def locate(self, source: str) -> tuple[FileSystem, str]:
        """Return the file system of a directory, and the directory in that file system's form.

        The text before the first colon is a scheme if it has two letters or more, unless a local path of this name exists.

        Raises:
            ModelFileError: the scheme is unknown; the message names the known ones.
            MissingDependencyError: the scheme's package is not installed.
        """
        match = _SCHEME.match(source)
        scheme = written = match[1].lower() if match else ""
        if scheme == "https":
            scheme = _vendor(source)
        elif (
            scheme
            and not (source[len(scheme) :].startswith("://") and is_registered("filesystem", scheme))
            and os.path.exists(source)
        ):
            scheme = ""
        is_known = is_registered("filesystem", scheme)
        advice = _endpoint_within(source) if written in _STORES or not is_known else ""
        if not is_known:
            schemes = ", ".join(f"{name}://" for name in sorted(names("filesystem")) if name)
            raise ModelFileError(
                f"opening sparse model {without_secrets(source)}: got scheme {scheme!r}, expected a local path or one of: "
                f"{schemes}, or the https address of an S3 or GCS object{advice}"
            )
        if advice:
            raise ModelFileError(f"opening sparse model {source}: got a server's address, expected an object's{advice}")
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


def _endpoint_within(source: str) -> str:
    """Return how to write an address that names a server, as Triton's do; empty if it names none, or may carry secrets.

    s3://host:port/bucket/key, s3://https://host:port/bucket/key, https://host:port/bucket/key
    """
    match = _SERVER.fullmatch(source)
    if match is None:
        return ""
    scheme, protocol, host, port, path = ((group or "") for group in match.groups())
    if scheme.lower() in ("http", "https"):
        scheme, protocol = "", scheme
    if not protocol and not port:
        return f"; write gs://{host}/{path}" if scheme.lower() == "gcs" else ""
    if scheme and protocol and (vendor := _vendor(inner := source[len(scheme) + 3 :])) in _STORES:
        return f"; write {inner}" if vendor == _STORES.get(scheme.lower(), ("",))[0] else ""
    if scheme and scheme.lower() not in (*_STORES, "gcs"):
        return ""
    stores = [_STORES[name] for name in ([{"gcs": "gs"}.get(scheme.lower(), scheme.lower())] if scheme else ["s3", "gs"])]
    endpoint = f"{(protocol or 'http').lower()}://{host}{port}"
    return "; set " + ", or ".join(
        f'model_source.{key} to "{endpoint}" and write {name}://{path or "bucket/key"}' for name, key in stores
    )
