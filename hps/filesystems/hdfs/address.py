"""Takes an HDFS URI apart, as Hadoop does."""

import re
from dataclasses import dataclass

from hps.errors import ModelFileError

_URI = re.compile(r"hdfs:(?://([^/]*))?(/.*)?", re.IGNORECASE | re.DOTALL)
_AUTHORITY = re.compile(r"(?:[^\s/?#@:\[\]%]+|\[[0-9A-Fa-f:.]+\])(?::[0-9]{1,5})?")


@dataclass(frozen=True, slots=True)
class HdfsAddress:
    """A file or directory. *Immutable.*

    Attributes:
        uri: as it was given, for messages.
        authority: `host:port`, `host`, a nameservice, or nothing for fs.defaultFS.
        path: absolute, without a slash at its end unless it is the root.
    """

    uri: str
    authority: str
    path: str


def parse(uri: str, doing: str) -> HdfsAddress:
    """Take a URI apart. Its path is taken as it stands: percent signs are not decoded, `?` and `#` begin nothing.

    Raises:
        ModelFileError: it is none of HDFS, or no file can have this name.
    """
    match = _URI.fullmatch(uri)
    if match is None or (match[1] and not _AUTHORITY.fullmatch(match[1])):
        raise ModelFileError(
            f"{doing} {uri!r}: wanted hdfs://host:port/path, hdfs://nameservice/path or hdfs:///path; "
            "the user is named by HADOOP_USER_NAME or a Kerberos ticket"
        )
    try:
        path = match[2] or "/"
        path.encode()
    except UnicodeEncodeError as error:
        raise ModelFileError(f"{doing} {uri!r}: an undecodable character is in the path; no file can have this name") from error
    if "\0" in path:
        raise ModelFileError(f"{doing} {uri!r}: a NUL is in the path; no file can have this name")
    if {".", ".."} & set(path.split("/")):
        raise ModelFileError(f"{doing} {uri!r}: HDFS has no such names; leave out `.` and `..`")
    return HdfsAddress(uri, match[1] or "", re.sub("/+", "/", path).rstrip("/") or "/")
