"""Addresses of S3 objects: `s3://bucket/key` and the https forms of AWS."""

import re
from dataclasses import dataclass
from urllib.parse import unquote

from hps.errors import ModelFileError

_URI = re.compile(r"(s3a?|https)://([^/]*)/?(.*)", re.IGNORECASE | re.DOTALL)
_REGION = r"[a-z]{2}(?:-[a-z]+)+-\d+"
# Today's form, `s3-<region>` of old ones, dual-stack, and no region at all, which was us-east-1.
_HOST = re.compile(rf"(?:(.+)\.)?s3(?:[.-](?:dualstack\.)?({_REGION}))?\.amazonaws\.com(?:\.cn)?(?::443)?", re.IGNORECASE)
_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{1,254}")  # new ones have 63 characters and no capitals; old ones may
_FORMS = "s3://bucket/key, https://bucket.s3.region.amazonaws.com/key or https://s3.region.amazonaws.com/bucket/key"


@dataclass(frozen=True, slots=True)
class S3Address:
    """Where an object, or a prefix of objects, is. *Immutable.*

    Attributes:
        uri: as it was given; holds no secrets.
        bucket: its name.
        key: of the object, decoded, without a slash at its end; nothing for the bucket itself.
        region: that the address names; nothing where it names none.
    """

    uri: str
    bucket: str
    key: str
    region: str = ""


def s3_address(uri: str) -> S3Address:
    """Take an address apart.

    The key of `s3://` is taken as it stands, also `%`, `?` and `#` in it; an https address is percent-decoded.

    Raises:
        ModelFileError: it is none, has no bucket, or carries credentials, a query or a version; what may be secret in it is not
            repeated.
    """
    match = _URI.fullmatch(uri)
    if match is None:
        raise _refused(uri, "this is no address of an S3 object")
    scheme, host, key = match.groups()
    if "@" in host or (":" in host and "@" in key):  # a secret key may have slashes
        raise _refused(uri, "it carries credentials, which belong into AWS's configuration or environment")
    if scheme.lower() != "https":
        return _checked(S3Address(uri, host, key.rstrip("/")))
    if "?" in uri or "#" in uri:
        raise _refused(uri, "it has a query or a fragment; signed links and links to versions are not read (write ? as %3F)")
    if (parts := _HOST.fullmatch(host)) is None:
        raise _refused(uri, f"{host!r} is no host of S3 that is known here")
    try:
        key = unquote(key, errors="strict")
    except UnicodeDecodeError as error:
        raise _refused(uri, "its percent signs do not decode to UTF-8") from error
    bucket, region = parts[1], (parts[2] or "").lower()
    if not bucket:
        bucket, _, key = key.partition("/")
    return _checked(S3Address(uri, bucket, key.rstrip("/"), region))


def s3_object(uri: str, doing: str) -> S3Address:
    """Take the address of an object apart, which has a key.

    Raises:
        ModelFileError: as `s3_address`; or it names a bucket alone.
    """
    address = s3_address(uri)
    if not address.key:
        raise ModelFileError(f"{doing} {uri}: it names the bucket {address.bucket!r} alone, wanted an object: {_FORMS}")
    return address


def _checked(address: S3Address) -> S3Address:
    if not address.bucket:
        raise _refused(address.uri, "it names no bucket")
    if not _BUCKET.fullmatch(address.bucket):
        raise _refused(address.uri, f"no bucket can be called {address.bucket!r}")
    try:
        length = len(address.key.encode())
    except UnicodeEncodeError as error:
        raise _refused(ascii(address.uri), "a character of the key has no UTF-8 form") from error
    if length > 1024:
        raise _refused(address.uri, f"the key has {length} bytes, S3's have at most 1024")
    return address


def _refused(uri: str, why: str) -> ModelFileError:
    place = re.sub(r"//(?:[^/]*|[^/]*:.*)@", "//...@", uri, flags=re.DOTALL)
    if place[:5].lower() == "https":
        place = re.sub(r"[?#].*", "?...", place, flags=re.DOTALL)
    return ModelFileError(f"opening {place}: {why}; wanted {_FORMS}")
