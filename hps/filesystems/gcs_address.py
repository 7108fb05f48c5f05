"""Addresses of objects in Google Cloud Storage."""

import re
from dataclasses import dataclass
from urllib.parse import quote, unquote, urlsplit

from hps.errors import ModelFileError

_FORMS = "gs://bucket/object or https://storage.googleapis.com/bucket/object"
_HOSTS = ("storage.googleapis.com", "storage.cloud.google.com")
# https://cloud.google.com/storage/docs/buckets#naming, without what only Google's own reserve.
_BUCKET = re.compile(r"[a-z0-9][a-z0-9._-]{1,220}[a-z0-9]")


@dataclass(frozen=True, slots=True)
class GcsAddress:
    """Where an object is, or objects that share a prefix. *Immutable.*

    Attributes:
        uri: as it was given, for messages.
        bucket: its name.
        name: of the object, without slashes at the end; empty where the whole bucket is meant.
    """

    uri: str
    bucket: str
    name: str

    @property
    def prefix(self) -> str:
        """What the names of the objects below it begin with."""
        return f"{self.name}/" if self.name else ""

    @property
    def objects_path(self) -> str:
        """Of the bucket's objects in the JSON API."""
        return f"b/{quote(self.bucket, safe='')}/o"

    @property
    def object_path(self) -> str:
        """Of this object in the JSON API, where a slash of a name is percent-encoded, too."""
        return f"{self.objects_path}/{quote(self.name, safe='')}"


def parse_address(uri: str) -> GcsAddress:
    """Take a URI apart. A `gs` URI is literal; percent signs of an `https` address are decoded.

    Raises:
        ModelFileError: it names no object of GCS.
    """
    if uri[:5].lower() == "gs://":
        bucket, _, name = uri[5:].partition("/")
    else:
        bucket, name = _https_parts(uri)
    name = name.rstrip("/")
    if not _BUCKET.fullmatch(bucket):
        raise ModelFileError(
            f"opening {uri}: got bucket {bucket!r}, wanted 3 or more of a-z, 0-9, '-', '_' and '.', as in {_FORMS}"
        )
    try:
        name.encode()
    except UnicodeEncodeError as error:
        raise ModelFileError(f"opening {uri!r}: got an object name that is not Unicode text; no object can have it") from error
    if name in (".", "..") or re.search(r"[\0\r\n]", name):
        raise ModelFileError(f"opening {uri!r}: got object name {name!r}, which no object can have")
    return GcsAddress(uri, bucket, name)


def _https_parts(uri: str) -> tuple[str, str]:
    try:
        parts = urlsplit(uri)
        host, port = (parts.hostname or "").lower(), parts.port
    except ValueError as error:
        raise ModelFileError(f"opening {uri}: it is no address ({error}), wanted {_FORMS}") from error
    if parts.query or parts.fragment:
        raise ModelFileError(
            f"opening {uri.partition('?')[0]}: got an address with a query or fragment, wanted {_FORMS}; "
            "signed links are not taken"
        )
    if parts.scheme.lower() != "https" or port not in (None, 443) or "@" in parts.netloc:
        raise ModelFileError(f"opening {uri}: wanted {_FORMS}; another endpoint is set as model_source.gcs_endpoint_url")
    path = unquote(parts.path.removeprefix("/"), errors="surrogateescape")
    if host in _HOSTS:
        bucket, _, name = path.partition("/")
        return bucket, name
    if host.endswith(f".{_HOSTS[0]}"):
        return host.removesuffix(f".{_HOSTS[0]}"), path
    raise ModelFileError(f"opening {uri}: got host {host!r}, wanted {_FORMS}")
