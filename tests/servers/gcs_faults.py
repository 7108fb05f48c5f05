"""What the tests of a failing Google Cloud Storage share: requests told apart, refusals worded, patient and hasty clients."""

import json
from typing import Any
from urllib.parse import parse_qs, urlsplit

from hps.configuration.tiers import ModelSourceConfig
from hps.filesystems.gcs import GcsFileSystem
from tests.servers.misbehaving_proxy import Answer, Fault, Request, Reset, Truncate

SIZE = 100_000
"""Of the file that the tests read."""


def query(request: Request) -> dict[str, str]:
    """The parameters of a request."""
    return {name: values[0] for name, values in parse_qs(urlsplit(request.path).query).items()}


def refusal(status: int, reason: str, message: str) -> Answer:
    """An error as the JSON API words it: https://cloud.google.com/storage/docs/json_api/v1/status-codes"""
    causes = [{"domain": "global", "reason": reason, "message": message}]
    body = json.dumps({"error": {"code": status, "message": message, "errors": causes}})
    return Answer(status, body.encode(), {"Content-Type": "application/json; charset=UTF-8"})


def patient(url: str) -> GcsFileSystem:
    """For faults that pass."""
    return GcsFileSystem(ModelSourceConfig(gcs_endpoint_url=url, timeout_s=20, deadline_s=40))


def hasty(url: str, **settings: Any) -> GcsFileSystem:
    """For faults that stay."""
    given = {"timeout_s": 0.5, "deadline_s": 3, "max_attempts": 3} | settings
    return GcsFileSystem(ModelSourceConfig(gcs_endpoint_url=url, **given))


def is_media(request: Request) -> bool:
    return query(request).get("alt") == "media"


def name_of(given: object) -> str | None:
    """The id of a test: what goes wrong."""
    if isinstance(given, Answer):
        return str(given.status)
    if isinstance(given, Reset | Truncate):
        return f"{type(given).__name__} at {given.after_bytes}"
    return type(given).__name__ if isinstance(given, Fault) else None


def read(filesystem: GcsFileSystem, path: str, offset: int = 0, size: int = SIZE, version: str = "") -> bytearray:
    buffer = bytearray(size)
    filesystem.read_into(path, offset, memoryview(buffer), version)
    return buffer
