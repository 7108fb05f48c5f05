"""Files in Google Cloud Storage."""

import re
from collections.abc import Sequence

from hps.configuration.tiers import ModelSourceConfig
from hps.errors import ModelFileError, ModelFileNotFoundError, ModelSourceError
from hps.filesystems.base import FileStatus, FileSystem, FileWriter, changed
from hps.filesystems.gcs_access import GcsAccessFinder
from hps.filesystems.gcs_address import GcsAddress, parse_address
from hps.filesystems.gcs_http import Answer, GcsHttp
from hps.filesystems.gcs_upload import GcsWriter
from hps.filesystems.retries import retried

_PAGE_NAMES = 1000  # the service's own limit
_MOST_PAGES = 100


class GcsFileSystem(FileSystem):
    """Reads and writes objects by `gs://bucket/object`, or by the https addresses of the same. *Thread-safe.*

    A directory is what the names of objects have in common up to a slash. The version of a file is its generation. Who asks is
    found out at first use, by Google's Application Default Credentials; without any, objects that everybody may read are read.

    Args:
        settings: timeouts, attempts, and an endpoint that is not Google's.
    """

    def __init__(self, settings: ModelSourceConfig | None = None) -> None:
        super().__init__(settings)
        self._http = GcsHttp(self.settings, GcsAccessFinder(self.settings))

    def exists(self, path: str) -> bool:
        """Tell whether an object, or one below it, is there. A bucket that is not there is an error: nothing can be in it."""
        address = parse_address(path)
        return (bool(address.name) and self._find(address) is not None) or self._holds_some(address)

    def status(self, path: str) -> FileStatus:
        """Size and generation of an object."""
        address = parse_address(path)
        found = self._find(address) if address.name else None
        if found is not None:
            return found
        if self._holds_some(address) or not address.name:
            raise ModelFileError(f"opening {path}: it is a directory, wanted a file")
        raise ModelFileNotFoundError(f"opening {path}: there is no such object in bucket {address.bucket}")

    def read_into(self, path: str, offset: int, buffer: memoryview, version: str = "") -> None:
        """Fill `buffer` from byte `offset`, in one request."""
        address = parse_address(path)
        if not address.name:
            raise ModelFileError(f"reading {path}: it is a bucket, wanted a file")
        if len(buffer) == 0:
            return
        retried(self.settings, lambda seconds: self._read_part(address, offset, buffer, version, seconds))

    def list(self, path: str) -> list[str]:
        """Names of what a directory holds, sorted."""
        address = parse_address(path)
        names: set[str] = set()
        found, token = False, ""
        for _ in range(_MOST_PAGES):
            page, token = self._page(address, _PAGE_NAMES, token)
            found = found or bool(page)
            names.update(name for name in page if name)
            if not token:
                break
        else:
            raise ModelFileError(f"listing {path}: it holds more than {len(names)} names, wanted the directory of a model")
        if found or not address.name:
            return sorted(names)
        if self._find(address) is not None:
            raise ModelFileError(f"listing {path}: it is a file, wanted a directory")
        raise ModelFileNotFoundError(f"listing {path}: there is no such directory in bucket {address.bucket}")

    def create(self, path: str) -> FileWriter:
        """Begin to upload an object."""
        address = parse_address(path)
        if not address.name:
            raise ModelFileError(f"writing {path}: it is a bucket, wanted a file in it")
        return GcsWriter(self._http, self.settings, address)

    def delete(self, path: str) -> None:
        """Remove an object."""
        address = parse_address(path)
        if not address.name:
            raise ModelFileError(f"removing {path}: it is a bucket, wanted a file in it")

        def attempt(seconds: float) -> None:
            doing = f"removing {path}"
            with self._http.ask(
                doing, seconds, "DELETE", f"storage/v1/{address.object_path}", expected=(200, 204, 404)
            ) as answer:
                answer.json()

        retried(self.settings, attempt)

    def _find(self, address: GcsAddress) -> FileStatus | None:
        """An object's status, None where there is none."""
        return retried(self.settings, lambda seconds: self._find_once(address, seconds))

    def _find_once(self, address: GcsAddress, seconds: float) -> FileStatus | None:
        doing = f"opening {address.uri}"
        with self._http.ask(
            doing,
            seconds,
            "GET",
            f"storage/v1/{address.object_path}",
            parameters={"fields": "size,generation,contentEncoding"},
            expected=(200, 404),
        ) as answer:
            found = answer.json()
        if answer.status == 404:
            return None
        if found.get("contentEncoding", "") not in ("", "identity"):
            raise ModelFileError(
                f"{doing}: it is stored with Content-Encoding {found['contentEncoding']}, of which no range can be read; "
                "upload it without compression (gsutil cp without -z and -Z)"
            )
        try:
            return FileStatus(int(found["size"]), str(found["generation"]))
        except (KeyError, ValueError) as error:
            raise ModelSourceError(f"{doing}: the answer is not that of Google Cloud Storage: {str(found)[:100]}") from error

    def _holds_some(self, address: GcsAddress) -> bool:
        return bool(self._page(address, 1)[0]) or not address.name

    def _page(self, address: GcsAddress, most: int, token: str = "") -> tuple[Sequence[str], str]:
        """Names below an address, at most so many, with "" for the address itself; and a token if there are more.

        Raises:
            ModelFileNotFoundError: there is no such bucket.
        """
        doing = f"listing {address.uri}"
        parameters = {
            "prefix": address.prefix,
            "delimiter": "/",
            "maxResults": str(most),
            "fields": "items(name),prefixes,nextPageToken",
        }
        if token:
            parameters["pageToken"] = token

        def attempt(seconds: float) -> tuple[Sequence[str], str]:
            path = f"storage/v1/{address.objects_path}"
            with self._http.ask(doing, seconds, "GET", path, parameters=parameters, expected=(200, 404)) as answer:
                page = answer.json()
            if answer.status == 404:
                raise ModelFileNotFoundError(
                    f"opening {address.uri}: there is no bucket {address.bucket}; create it, or correct the address"
                )
            names = [item["name"] for item in page.get("items", [])] + page.get("prefixes", [])
            return [name[len(address.prefix) :].rstrip("/") for name in names], page.get("nextPageToken", "")

        return retried(self.settings, attempt)

    def _read_part(self, address: GcsAddress, offset: int, buffer: memoryview, version: str, seconds: float) -> None:
        doing, last = f"reading {address.uri}", offset + len(buffer) - 1
        parameters = {"alt": "media"} | ({"ifGenerationMatch": version} if version else {})
        with self._http.ask(
            doing,
            seconds,
            "GET",
            f"download/storage/v1/{address.object_path}",
            parameters=parameters,
            headers={"Range": f"bytes={offset}-{last}"},
            expected=(200, 206, 404, 412, 416),
        ) as answer:
            if answer.status in (200, 206):
                generation = answer.headers.get("x-goog-generation", "")
                if version and generation not in ("", version):  # an emulator or a cache may not heed the condition
                    raise changed(address.uri, version, generation)
                _check_range(doing, answer, offset, last)
                answer.read_into(buffer)
                return
            answer.json()
            end = re.search(r"/(\d+)$", answer.headers.get("Content-Range", ""))
        now = self.status(address.uri)  # says by itself what is there in place of the file, if it is gone
        if version and now.version != version:
            raise changed(address.uri, version, now.version)
        if answer.status == 416:
            raise _too_short(doing, int(end[1]) if end else now.size_bytes, offset, last)
        raise ModelSourceError(f"{doing}: got HTTP {answer.status} for generation {now.version}, which is there")


def _check_range(doing: str, answer: Answer, offset: int, last: int) -> None:
    """See that the answer is the range that was asked for, or else the whole file where that is the same."""
    match = re.fullmatch(r"bytes (\d+)-(\d+)/(\d+|\*)", answer.headers.get("Content-Range", ""))
    if match is None:
        length = answer.headers.get("Content-Length", "")
        if offset == 0 and length == str(last + 1):
            return
        raise ModelSourceError(f"{doing}: got HTTP {answer.status} with {length} bytes, wanted bytes {offset} to {last} of it")
    if match[3] != "*" and int(match[3]) <= last:
        raise _too_short(doing, int(match[3]), offset, last)
    if (int(match[1]), int(match[2])) != (offset, last):
        raise ModelSourceError(f"{doing}: got bytes {match[1]} to {match[2]}, wanted {offset} to {last}")


def _too_short(doing: str, size: int, offset: int, last: int) -> ModelFileError:
    return ModelFileError(f"{doing}: it ends at byte {size}, wanted bytes {offset} to {last + 1}; it was cut short")
