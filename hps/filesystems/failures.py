"""Tables of what the errors of S3, Google Cloud Storage, Azure and HDFS mean, and the function that reads them.

An error becomes a line: an HTTP answer as `HTTP 403 AccessDenied`, an exception as the names of its classes. So the tables need
no client library.
"""

import re
from collections.abc import Sequence
from typing import NamedTuple

from hps.errors import ModelFileError, ModelFileNotFoundError, ModelSourceError


class Meaning(NamedTuple):
    """The meaning of the errors whose line has a pattern.

    Attributes:
        error: `ModelSourceError` for a transient failure, which is retried.
        text: cause and cure, with the fields that `translated` fills.
    """

    pattern: str
    error: type[ModelFileError]
    text: str


def translated(what: str, line: str, meanings: Sequence[Meaning], **fields: object) -> ModelFileError:
    """Return the error of the first meaning whose pattern is in the line; `what` is the operation and the address."""
    meaning = next(meaning for meaning in meanings if re.search(meaning.pattern, line))
    return meaning.error(f"{what}: {meaning.text.format(**fields)}")


def class_names(error: BaseException) -> str:
    """Return the line of an exception: the names of its classes, its own first."""
    return " ".join(kind.__name__ for kind in type(error).__mro__)


_RENEW = "renew them (aws sso login, a new session token, or the role of this machine)"
_WRONG = "check AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_SESSION_TOKEN or the profile, and the endpoint"
_ALLOW = (
    "grant s3:GetObject on the objects and s3:ListBucket on the bucket (without the latter S3 gives the same answer for an "
    "object that is not there); to write also s3:PutObject, s3:AbortMultipartUpload and s3:DeleteObject"
)
_REACH = "check that it is right (model_source.s3_endpoint_url, AWS_ENDPOINT_URL), runs and can be reached from here"

S3_MEANINGS = (
    # ConditionalRequestConflict: another write of the object was under way.
    Meaning(
        r"^HTTP (5|408|429)| (InternalError|OperationAborted|RequestTimeout|ServiceUnavailable|SlowDown|Throttling"
        "|ConditionalRequestConflict)$",
        ModelSourceError,
        "{endpoint} failed ({answer}); check that it runs and is not overloaded",
    ),
    Meaning(
        " NoSuchBucket$",
        ModelFileNotFoundError,
        "there is no bucket {bucket!r} at {endpoint}; check name, endpoint and account",
    ),
    Meaning(
        r"^HTTP 30[127] | (AuthorizationHeaderMalformed|IllegalLocationConstraintException|PermanentRedirect"
        "|TemporaryRedirect)$",
        ModelFileError,
        "bucket {bucket!r} {region}",
    ),
    Meaning(" (NoSuchKey|404)$", ModelFileNotFoundError, "there is no such object in bucket {bucket!r}"),
    Meaning(" (AccessDenied|403)$", ModelFileError, f"not allowed ({{answer}}); {_ALLOW}"),
    Meaning(" ExpiredToken$", ModelFileError, f"the credentials have expired ({{answer}}); {_RENEW}"),
    Meaning(" InvalidAccessKeyId$", ModelFileError, f"S3 does not know the access key ({{answer}}); {_WRONG}"),
    Meaning(" InvalidToken$", ModelFileError, f"the session token is not valid ({{answer}}); {_WRONG}"),
    Meaning(" SignatureDoesNotMatch$", ModelFileError, f"the secret access key is wrong ({{answer}}); {_WRONG}"),
    Meaning(
        " RequestTimeTooSkewed$",
        ModelFileError,
        "this machine's clock differs too much from S3's ({answer}); set the clock",
    ),
    Meaning(" InvalidObjectState$", ModelFileError, "the object is archived ({answer}); restore it from Glacier first"),
    Meaning(
        " NoSuchUpload$",
        ModelFileError,
        "the upload has ended: by an attempt whose answer was lost, or by another process ({answer}); write the model again; "
        "check the bucket's lifecycle rules",
    ),
    Meaning("^HTTP ", ModelFileError, "refused ({answer}); see the answer of S3"),
    Meaning(
        "NoCredentialsError|PartialCredentialsError|CredentialRetrievalError|ProfileNotFound|SSOError|TokenRetrievalError",
        ModelFileError,
        "AWS credentials are missing or cannot be obtained ({name}); set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or "
        "AWS_PROFILE, or give this machine a role",
    ),
    Meaning(
        "SSLError",
        ModelSourceError,
        "no TLS connection to {endpoint} (its certificate is not trusted here, or it speaks no TLS); check the endpoint and "
        "AWS_CA_BUNDLE",
    ),
    Meaning("ReadTimeoutError|ConnectTimeoutError", ModelSourceError, f"{{endpoint}} did not answer in time; {_REACH}"),
    Meaning(
        "ConnectionError|HTTPClientError|IncompleteReadError|ResponseParserError|OSError",
        ModelSourceError,
        f"{{endpoint}} broke off or cannot be reached ({{name}}); {_REACH}",
    ),
    # The rest are configuration errors: an endpoint that is no URL, an impossible region.
    Meaning("", ModelFileError, "boto3 cannot send requests to {endpoint} ({name}); check endpoint, region and profile"),
)

GIVE_CREDENTIALS = (
    "let GOOGLE_APPLICATION_CREDENTIALS name a key file, run `gcloud auth application-default login`, "
    "or run on Google Cloud with a service account"
)
_NOT_GCS = "check model_source.gcs_endpoint_url"

# https://cloud.google.com/storage/docs/json_api/v1/status-codes. A missing object is not an error there: 404 is of the bucket.
GCS_MEANINGS = (
    Meaning("DataCorruption", ModelFileError, "the checksum differs: the content was damaged in transfer; write it again"),
    Meaning("JSONDecodeError", ModelSourceError, f"got an answer that is not one of Google Cloud Storage; {_NOT_GCS}"),
    Meaning(
        r"HTTP (408|429|500|502|503|504)\b|rateLimitExceeded|userRateLimitExceeded|backendError|internalError",
        ModelSourceError,
        "{answer}; GCS is overloaded or limits the rate of requests",
    ),
    Meaning(
        r"HTTP (404|410)\b.* upload\b",
        ModelFileError,
        "{answer}; the service dropped the upload: write it again from the start",
    ),
    Meaning(r"HTTP 404\b", ModelFileNotFoundError, "there is no bucket {bucket!r}; create it, or correct the address"),
    Meaning(
        r"HTTP (401|403)\b.* anonymous\b",
        ModelFileError,
        f"{{answer}}; no Google credentials were found, and the object is not public: {GIVE_CREDENTIALS}",
    ),
    Meaning(
        r"HTTP 401\b",
        ModelFileError,
        f"{{answer}}; the Google credentials are expired or revoked: renew them, or {GIVE_CREDENTIALS}",
    ),
    Meaning(
        r"HTTP 403\b",
        ModelFileError,
        "{answer}; the account may not do this: grant it roles/storage.objectViewer on the bucket to read, "
        "roles/storage.objectUser to write",
    ),
    Meaning(r"HTTP \d", ModelFileError, f"{{answer}}; expected an answer of Google Cloud Storage: {_NOT_GCS}"),
    Meaning(
        "SSLError",
        ModelSourceError,
        "{cause}; check that the host's certificate is valid and that its issuer is known here",
    ),
    Meaning("", ModelSourceError, "{cause}; check that the host is right, runs and can be reached from here"),
)

_AZURE_CREDENTIALS = (
    "set model_source.azure_connection_string (HPS_AZURE_CONNECTION_STRING), or install azure-identity and run `az login`, or "
    "give this machine a managed identity"
)

# https://learn.microsoft.com/rest/api/storageservices/blob-service-error-codes
AZURE_MEANINGS = (
    Meaning(
        r"^HTTP (408|429|5\d\d) ",
        ModelSourceError,
        "{endpoint} failed ({answer}); check that it runs and is not overloaded",
    ),
    Meaning(
        r" Container(NotFound|BeingDeleted)",
        ModelFileNotFoundError,
        "there is no bucket {bucket!r} (a container) at {endpoint}; check name and account",
    ),
    Meaning(r"^HTTP 404 ", ModelFileNotFoundError, "there is no such object in bucket {bucket!r}"),
    Meaning(
        r"^HTTP 403 AuthorizationPermissionMismatch",
        ModelFileError,
        "not allowed ({answer}); give the identity the role Storage Blob Data Reader, to write Storage Blob Data Contributor",
    ),
    Meaning(r"^HTTP (401|403) ", ModelFileError, f"not allowed ({{answer}}); {_AZURE_CREDENTIALS}"),
    Meaning(r" BlobArchived", ModelFileError, "the blob is archived ({answer}); rehydrate it first"),
    Meaning(r"^HTTP ", ModelFileError, "refused ({answer}); see the error codes of Azure Blob Storage"),
    Meaning("ClientAuthenticationError|CredentialUnavailable", ModelFileError, f"no token ({{cause}}); {_AZURE_CREDENTIALS}"),
    Meaning("ValueError", ModelFileError, "the client cannot send the request ({cause}); check the connection string"),
    Meaning("", ModelSourceError, "{endpoint} cannot be reached, or broke off ({cause}); check the account and the network"),
)

_ADDRESS = "check that host and port are those of the NameNode's RPC (8020 by default, not its web page), and that it runs"
_AUTHENTICATE = (
    "for Kerberos set hadoop.security.authentication in core-site.xml, set HADOOP_CONF_DIR to where it lies, install "
    "libgssapi-krb5-2 and get a ticket (kinit)"
)
_DATANODES = "check that the DataNodes run and can be reached from here (dfs.client.use.datanode.hostname)"

# hdfs-native 0.14 raises FileNotFoundError and FileExistsError, OSError for the network, and RuntimeError for everything else.
# The text of the last is the Rust value, `RPCError("org.apache.hadoop.security.AccessControlException", "Permission ...")`:
# the classes of Hadoop's exceptions (2.7 to 3.4) are searched in it, since later versions change the wording and keep the
# class. Other patterns are names of its `HdfsError`, and texts of getaddrinfo and of Linux's errno.
HDFS_MEANINGS = (
    Meaning("Path is not a file|IsADirectoryError", ModelFileError, "it is a directory, expected a file; name the file"),
    Meaning(
        "ParentNotDirectoryException|[( ]is not a directory",
        ModelFileNotFoundError,
        "there is no such file ({message}); check the path",
    ),
    Meaning(
        "SIMPLE authentication is not enabled|SASLError|GSSAPIError|NoSASLMechanism|SaslException|InvalidToken|libgssapi",
        ModelFileError,
        f"authentication failed ({{message}}); {_AUTHENTICATE}",
    ),
    Meaning(
        "AccessControlException|AuthorizationException",
        ModelFileError,
        "{message}; let this user, whom HADOOP_USER_NAME or the Kerberos ticket names, read (to write models: write) it",
    ),
    Meaning(
        "SafeModeException",
        ModelSourceError,
        "the NameNode is in safe mode, in which nothing can be written; wait until enough DataNodes have reported, or end it "
        "(hdfs dfsadmin -safemode leave)",
    ),
    Meaning(
        "StandbyException|ObserverRetryOnActiveException",
        ModelSourceError,
        "the NameNode is a standby, and none that is configured is active; name the nameservice instead of one of its "
        "NameNodes (hdfs://nameservice/path with HADOOP_CONF_DIR)",
    ),
    Meaning("RetriableException|ServerTooBusy", ModelSourceError, "the NameNode is not ready ({message}); wait until it is"),
    # A full block whose predecessor is not reported yet. Hadoop's client waits, hdfs-native 0.14 gives up: its writer is lost.
    Meaning("NotReplicatedYet", ModelSourceError, "the DataNodes report blocks too slowly; check their load"),
    Meaning("QuotaExceeded", ModelFileError, "a quota is used up ({message}); raise it, or remove files"),
    Meaning("InvalidPath", ModelFileError, "HDFS has no such names ({message}); leave out `:`, `.` and `..`"),
    Meaning("PathIsNotEmptyDirectory", ModelFileError, "it is a directory that is not empty; name a file"),
    Meaning(
        "must both be directories|already exists as a directory", ModelFileError, "a directory has this name; choose another"
    ),
    Meaning(
        "could only be (replicated|written) to",
        ModelSourceError,
        f"no DataNode takes it ({{message}}); {_DATANODES} and have space",
    ),
    Meaning(
        "DataTransferError|BlocksNotFound|ChecksumError|checksums didn't match|data transfer error|blocks not found"
        "|to DataNode|Datanode connection|DataNode read|All DataNodes|datanode",
        ModelSourceError,
        f"its blocks cannot be read or written ({{message}}); {_DATANODES}",
    ),
    Meaning("No NameNode hosts found", ModelFileError, f"no NameNode is configured for it; {_ADDRESS}"),
    Meaning(
        "fs.defaultFS|must contain a host",
        ModelFileError,
        "the URI names no host, and fs.defaultFS of Hadoop's configuration no HDFS; write hdfs://host:port/path, or set "
        "HADOOP_CONF_DIR to the directory of core-site.xml and hdfs-site.xml",
    ),
    Meaning("UrlParseError", ModelFileError, "host or port is not valid ({message}); write hdfs://host:port/path"),
    Meaning("XmlParseError", ModelFileError, "Hadoop's configuration cannot be read ({message}); check HADOOP_CONF_DIR"),
    Meaning(
        "Name or service not known|No address associated",
        ModelFileError,
        "no name server knows the host; check that it is right; if it is a nameservice, set HADOOP_CONF_DIR",
    ),
    Meaning("Connection refused", ModelSourceError, f"nothing listens there; {_ADDRESS}"),
    Meaning(
        "RPC listener disconnected|unexpected end of file|Connection reset|Broken pipe|InvalidRPCResponse|FatalRPCError",
        ModelSourceError,
        f"the connection broke off ({{message}}); {_ADDRESS}",
    ),
    Meaning("\nFileNotFoundError", ModelFileNotFoundError, "there is no such file or directory"),
    Meaning("\n(?!FileExistsError).*OSError", ModelSourceError, f"{{message}}; {_ADDRESS}"),
    Meaning("", ModelFileError, "hdfs-native refused ({message}); check the log of the NameNode"),
)


def hdfs_failure(doing: str, uri: str, error: BaseException) -> ModelFileError:
    """Translate an error of hdfs-native; `doing` is a participle such as `reading`."""
    line = re.split(r"\\n|\n", str(error), maxsplit=1)[0]
    text = re.sub(r'^\w+\("(?:[\w.$]+", ")?', "", line).replace('\\"', '"')  # without the Rust wrapper and the class
    message = re.sub(r'"?\)$', "", text)[:300] or type(error).__name__
    return translated(f"{doing} {uri}", f"{line}\n{class_names(error)}", HDFS_MEANINGS, message=message)
