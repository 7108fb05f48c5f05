"""Converts errors of hdfs-native into errors that name the URI, the cause and the cure.

hdfs-native 0.14 raises FileNotFoundError and FileExistsError, OSError for the network, and RuntimeError for everything else.
The text of the last is the Rust value, `RPCError("org.apache.hadoop.security.AccessControlException", "Permission ...")`, so
the classes of Hadoop's exceptions are found in the text; later versions change the wording but keep the class.
"""

import re

from hps.errors import ModelFileError, ModelFileNotFoundError, ModelSourceError

_ADDRESS = "check that host and port are those of the NameNode's RPC (8020 by default, not its web page), and that it runs"
_AUTHENTICATE = (
    "for Kerberos set hadoop.security.authentication in core-site.xml, set HADOOP_CONF_DIR to where it lies, install "
    "libgssapi-krb5-2 and get a ticket (kinit)"
)
_DATANODES = "check that the DataNodes run and can be reached from here (dfs.client.use.datanode.hostname)"

# Pattern in the text, error class, cause and cure; {said} is the first line of the HDFS message. The first match wins.
# Sources: exceptions of org.apache.hadoop (2.7 to 3.4) as the client protocol carries them, `HdfsError` of
# hdfs-native 0.14, the texts of getaddrinfo and of Linux's errno.
_MEANINGS: tuple[tuple[str, type[ModelFileError], str, str], ...] = (
    ("Path is not a file|IsADirectoryError", ModelFileError, "it is a directory, expected a file", "name the file"),
    (
        "ParentNotDirectoryException|[( ]is not a directory",
        ModelFileNotFoundError,
        "there is no such file ({said})",
        "check the path",
    ),
    (
        "SIMPLE authentication is not enabled|SASLError|GSSAPIError|NoSASLMechanism|SaslException|InvalidToken|libgssapi",
        ModelFileError,
        "authentication failed ({said})",
        _AUTHENTICATE,
    ),
    (
        "AccessControlException|AuthorizationException",
        ModelFileError,
        "{said}",
        "let this user, whom HADOOP_USER_NAME or the Kerberos ticket names, read (to write models: write) it",
    ),
    (
        "SafeModeException",
        ModelSourceError,
        "the NameNode is in safe mode, in which nothing can be written",
        "wait until enough DataNodes have reported, or end it (hdfs dfsadmin -safemode leave)",
    ),
    (
        "StandbyException|ObserverRetryOnActiveException",
        ModelSourceError,
        "the NameNode is a standby, and none that is configured is active",
        "name the nameservice instead of one of its NameNodes (hdfs://nameservice/path with HADOOP_CONF_DIR)",
    ),
    ("RetriableException|ServerTooBusy", ModelSourceError, "the NameNode is not ready ({said})", "wait until it is"),
    # A full block whose predecessor is not reported yet. Hadoop's client waits, hdfs-native 0.14 gives up: its writer is lost.
    ("NotReplicatedYet", ModelSourceError, "the DataNodes report blocks too slowly", "check their load"),
    ("QuotaExceeded", ModelFileError, "a quota is used up ({said})", "raise it, or remove files"),
    ("InvalidPath", ModelFileError, "HDFS has no such names ({said})", "leave out `:`, `.` and `..`"),
    ("PathIsNotEmptyDirectory", ModelFileError, "it is a directory that is not empty", "name a file"),
    ("must both be directories|already exists as a directory", ModelFileError, "a directory has this name", "choose another"),
    (
        "could only be (replicated|written) to",
        ModelSourceError,
        "no DataNode takes it ({said})",
        f"{_DATANODES} and have space",
    ),
    (
        "DataTransferError|BlocksNotFound|ChecksumError|checksums didn't match|data transfer error|blocks not found"
        "|to DataNode|Datanode connection|DataNode read|All DataNodes|datanode",
        ModelSourceError,
        "its blocks cannot be read or written ({said})",
        _DATANODES,
    ),
    ("No NameNode hosts found", ModelFileError, "no NameNode is configured for it", _ADDRESS),
    (
        "fs.defaultFS|must contain a host",
        ModelFileError,
        "the URI names no host, and fs.defaultFS of Hadoop's configuration no HDFS",
        "write hdfs://host:port/path, or set HADOOP_CONF_DIR to the directory of core-site.xml and hdfs-site.xml",
    ),
    ("UrlParseError", ModelFileError, "host or port is not valid ({said})", "write hdfs://host:port/path"),
    ("XmlParseError", ModelFileError, "Hadoop's configuration cannot be read ({said})", "check HADOOP_CONF_DIR"),
    (
        "Name or service not known|No address associated",
        ModelFileError,
        "no name server knows the host",
        "check that it is right; if it is a nameservice, set HADOOP_CONF_DIR",
    ),
    ("Connection refused", ModelSourceError, "nothing listens there", _ADDRESS),
    (
        "RPC listener disconnected|unexpected end of file|Connection reset|Broken pipe|InvalidRPCResponse|FatalRPCError",
        ModelSourceError,
        "the connection broke off ({said})",
        _ADDRESS,
    ),
)


def hdfs_failure(doing: str, uri: str, error: BaseException) -> ModelFileError:
    """Convert an error to one with cause and cure.

    Args:
        doing: e.g. `reading`.
        error: raised by hdfs-native.

    Returns:
        A `ModelSourceError` for a transient failure, which is retried.
    """
    line, said = _first_line(error), _said(error)
    for pattern, kind, cause, cure in _MEANINGS:
        if re.search(pattern, line):
            return kind(f"{doing} {uri}: {cause.format(said=said)}; {cure}")
    if isinstance(error, FileNotFoundError):
        return ModelFileNotFoundError(f"{doing} {uri}: there is no such file or directory")
    if isinstance(error, OSError) and not isinstance(error, FileExistsError):
        return ModelSourceError(f"{doing} {uri}: {said}; {_ADDRESS}")
    return ModelFileError(f"{doing} {uri}: hdfs-native refused ({said}); check the log of the NameNode")


def _first_line(error: BaseException) -> str:
    return re.split(r"\\n|\n", str(error), maxsplit=1)[0]


def _said(error: BaseException) -> str:
    """Return the first line without its Rust wrapper and the class."""
    text = re.sub(r'^\w+\("(?:[\w.$]+", ")?', "", _first_line(error)).replace('\\"', '"')
    return re.sub(r'"?\)$', "", text)[:300] or type(error).__name__
