"""Files in Azure Blob Storage, through azure-storage-blob."""

import base64
import logging
import re
import secrets
import uuid
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any, Final, TypeVar
from urllib.parse import unquote

from azure.core import MatchConditions
from azure.core.credentials import TokenCredential
from azure.core.exceptions import (
    AzureError,
    HttpResponseError,
    ResourceExistsError,
    ResourceModifiedError,
    ResourceNotFoundError,
)
from azure.storage.blob import BlobBlock, BlobServiceClient, ContentSettings

from hps.configuration.tiers import ModelSourceConfig
from hps.errors import ModelFileError
from hps.filesystems.base import FileStatus, FileWriter, replaced, without_secrets
from hps.filesystems.failures import AZURE_MEANINGS, class_names, translated
from hps.filesystems.object_store import ObjectAddress, ObjectStore, ObjectWriter, RangeRefusedError
from hps.filesystems.retries import ReadTarget

_log = logging.getLogger(__name__)
T = TypeVar("T")

_PART_BYTES: Final = 8 << 20
_RECEIVE_BYTES: Final = 1 << 20
_AS_BYTES: Final = ContentSettings(content_type="application/octet-stream")
_NO_SUCH_RANGE: Final = (404, 412, 416)
_FORMS: Final = (
    "abfs://container@account.dfs.core.windows.net/path, az://container/path with model_source.azure_connection_string, or "
    "https://account.blob.core.windows.net/container/path"
)
_TOKEN: Final = (
    "model_source.azure_connection_string, as BlobEndpoint=https://account.blob.core.windows.net;SharedAccessSignature=..."
)
# https://learn.microsoft.com/rest/api/storageservices/naming-and-referencing-containers--blobs--and-metadata
_CONTAINER: Final = r"\$root|\$logs|[a-z0-9](?:-?[a-z0-9]){2,62}"
_HOST: Final = r"([a-z0-9]{3,24})\.(?:blob|dfs)\.core\.windows\.net"
_URI: Final = re.compile(
    rf"(?i:abfss?|wasbs?|az)://(?:({_CONTAINER})(?:@{_HOST})?)(?:/(.*))?|(?i:https)://{_HOST}(?::443)?/({_CONTAINER})(?:/(.*))?",
    re.DOTALL,
)


def azure_address(uri: str) -> ObjectAddress:
    """Parse a URI, whose account becomes the `region`. Percent signs of an `https` address are decoded, others are literal.

    Raises:
        ModelFileError: it is not the address of a blob. The message does not repeat possible secrets.
    """
    match = _URI.fullmatch(uri)
    shown = without_secrets(uri) if uri[:5].lower() == "https" else uri
    if match is None:
        raise ModelFileError(f"opening {shown!r}: it is no address of a blob in Azure, expected {_FORMS}")
    if match[1]:
        container, account, name = match[1], match[2] or "", match[3] or ""
    elif re.search("[?#]", uri):
        raise ModelFileError(f"opening {shown!r}: got a query, expected an address without one; a token is given by {_TOKEN}")
    else:
        account, container, name = match[4], match[5], unquote(match[6] or "")
    name = name.rstrip("/")
    try:
        length = len(name.encode())
    except UnicodeEncodeError as error:
        raise ModelFileError(f"opening {shown!r}: the name of the blob has no UTF-8 form") from error
    if length > 1024 or re.search(r"[\0\r\n]|(^|/)\.\.?(/|$)", name):  # HTTP clients resolve dots
        raise ModelFileError(
            f"opening {shown!r}: got a name of {length} bytes, expected at most 1,024, without control characters, . and .."
        )
    return ObjectAddress(shown, container, name, account)


class AzureFileSystem(ObjectStore):
    """Reads and writes blobs by `abfs`, `wasb`, `az` and https addresses. *Thread-safe.*

    The version of a blob is its ETag. The account of `model_source.azure_connection_string` is asked with what that says; any
    other with the credentials of azure-identity, if it is installed and finds some, else without.
    """

    client_errors = (AzureError, OSError, ValueError)

    def __init__(self, settings: ModelSourceConfig | None = None) -> None:
        super().__init__(settings)
        self._clients: dict[str, Any] = {}  # by account
        self._options: dict[str, Any] = {
            "retry_total": 0,
            "connection_timeout": self.settings.timeout_s,
            "read_timeout": self.settings.timeout_s,
            "max_single_get_size": self.part_bytes,
            "max_chunk_get_size": _RECEIVE_BYTES,
        }

    def create(self, path: str) -> FileWriter:
        return _AzureWriter(self, self._object(path, "writing"))

    def client(self, address: ObjectAddress) -> Any:
        """Return the library's client for the account of an address, made on first use.

        Raises:
            ModelFileError: neither the address nor the configuration names an account.
        """
        client = self._clients.get(address.region)
        if client is not None:
            return client
        given = self.settings.azure_connection_string
        # A key must never reach another account than its own.
        client = None if not given else BlobServiceClient.from_connection_string(given, **self._options)
        if address.region and (client is None or client.account_name != address.region):
            url, credential = f"https://{address.region}.blob.core.windows.net", _found_credential()
            client = BlobServiceClient(url, credential=credential, **self._options)
        if client is None:
            raise ModelFileError(f"opening {address.uri}: it names no account, expected {_FORMS}")
        return self._clients.setdefault(address.region, client)

    def blob(self, address: ObjectAddress) -> Any:
        """Return the library's client for a blob."""
        return self.client(address).get_blob_client(address.bucket, address.key)

    def request_once(self, doing: str, address: ObjectAddress, seconds: float, call: Callable[[], T]) -> T:
        """Call a function on a thread that is abandoned after `seconds`; an invalid connection string is said to be one."""
        try:
            self.client(address)
        except ValueError as error:
            if isinstance(error, ModelFileError):
                raise
            raise ModelFileError(f"{doing} {address.uri}: model_source.azure_connection_string cannot be used") from error
        return super().request_once(doing, address, seconds, call)

    def _address(self, uri: str) -> ObjectAddress:
        return azure_address(uri)

    def _failure(self, doing: str, address: ObjectAddress, error: Exception) -> ModelFileError:
        line, answer = class_names(error), ""
        if isinstance(error, HttpResponseError) and error.status_code is not None:
            line = f"HTTP {error.status_code} {_code(error)}"
            answer = line.strip()
        host = str(self.client(address).primary_hostname)
        text = str(getattr(error, "message", "") or error).split("\n")[0]
        fields = {"answer": answer, "bucket": address.bucket, "endpoint": host, "cause": text[:200] or type(error).__name__}
        return translated(f"{doing} {address.uri}", line, AZURE_MEANINGS, **fields)

    def _find(self, address: ObjectAddress) -> FileStatus | None:
        try:
            found = self.blob(address).get_blob_properties(**_named())
        except ResourceNotFoundError as error:
            if _code(error) == "ContainerNotFound":
                raise
            return None
        if (found.metadata or {}).get("hdi_isfolder", "").lower() == "true":  # a directory of a hierarchical namespace
            return None
        if (encoding := found.content_settings.content_encoding) not in (None, "", "identity"):
            raise ModelFileError(
                f"opening {address.uri}: it is stored with Content-Encoding {encoding}, of which no range can be read; "
                "upload it without compression"
            )
        return FileStatus(found.size, str(found.etag))

    def _pages(self, address: ObjectAddress, most: int) -> Iterator[list[str]]:
        container = self.client(address).get_container_client(address.bucket)
        found = container.walk_blobs(name_starts_with=address.prefix or None, delimiter="/", results_per_page=most, **_named())
        for page in found.by_page():
            yield [entry.name for entry in page]

    def _range(self, address: ObjectAddress, offset: int, end: int, version: str, target: ReadTarget) -> str:
        condition: dict[str, Any] = {"etag": version, "match_condition": MatchConditions.IfNotModified} if version else {}
        try:
            found = self.blob(address).download_blob(offset, end - offset, max_concurrency=1, **condition, **_named())
            for piece in found.chunks():
                target.write(piece)
        except HttpResponseError as error:
            if error.status_code in _NO_SUCH_RANGE and _code(error) != "ContainerNotFound":
                raise RangeRefusedError(f"HTTP {error.status_code}") from error
            raise
        return str(found.properties.etag)

    def _put(self, address: ObjectAddress, content: bytes, version: str) -> str:
        condition: dict[str, Any] = {"overwrite": False}
        if version:
            condition = {"overwrite": True, "etag": version, "match_condition": MatchConditions.IfNotModified}
        try:
            written = self.blob(address).upload_blob(
                content, validate_content=True, content_settings=_AS_BYTES, **condition, **_named()
            )
        except (ResourceExistsError, ResourceModifiedError) as error:
            raise replaced(address.uri, version) from error
        return str(written["etag"])

    def _remove(self, address: ObjectAddress) -> None:
        with suppress(ResourceNotFoundError):
            self.blob(address).delete_blob(**_named())


def _named() -> dict[str, Any]:
    """Return the name of a request. The library's own, a UUID of the time, leaves a file of libuuid open in each thread."""
    return {"client_request_id": str(uuid.uuid4())}


def _code(error: HttpResponseError) -> str:
    """Return the service's word for an error; empty without one."""
    code = getattr(error, "error_code", None)  # an enumeration where the library knows it
    return str(getattr(code, "value", code) or "")


def _found_credential() -> TokenCredential | None:
    """Return the credential of azure-identity; None without the package."""
    try:
        from azure.identity import DefaultAzureCredential
    except ImportError:
        _log.info("azure-identity is not installed: reading Azure without credentials, which public containers allow")
        return None
    return DefaultAzureCredential()


class _AzureWriter(ObjectWriter):
    """A blob that is being uploaded in blocks. *One thread.*

    Blocks that are never committed are invisible, and the service drops them after a week.
    """

    def __init__(self, store: AzureFileSystem, address: ObjectAddress) -> None:
        super().__init__(address)
        self._store = store
        self._blocks: list[str] = []
        # A blob's uncommitted blocks are shared: two writers that gave theirs the same names would mix their contents.
        self._name = secrets.token_bytes(16)

    def part_bytes(self) -> int:
        return _PART_BYTES

    def commit(self) -> None:
        part = self.take_pending()
        if not self._blocks:
            self._store.request("writing", self._address, lambda: self._upload(part))
            return
        self._send(part)
        blocks = [BlobBlock(block) for block in self._blocks]
        self._store.request(
            "writing",
            self._address,
            lambda: self._store.blob(self._address).commit_block_list(blocks, content_settings=_AS_BYTES, **_named()),
        )

    def abort(self) -> None:
        self.take_pending()

    def _upload(self, content: bytes) -> None:
        self._store.blob(self._address).upload_blob(
            content, overwrite=True, validate_content=True, content_settings=_AS_BYTES, **_named()
        )

    def _send(self, part: bytes) -> None:
        block = base64.b64encode(b"%b%08d" % (self._name, len(self._blocks))).decode()
        self._store.request(
            "writing",
            self._address,
            lambda: self._store.blob(self._address).stage_block(block, part, validate_content=True, **_named()),
        )
        self._blocks.append(block)
