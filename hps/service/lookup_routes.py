"""The lookups: from the bytes of a request to an answer, with the lookup itself on another thread.

These routes are plain ASGI: FastAPI's routing alone would halve their rate on small bodies.
"""

from collections.abc import Mapping
from functools import lru_cache
from typing import Final, NamedTuple

from hps.errors import UnknownModelError
from hps.parameter_server import HPS
from hps.service.answers import BINARY, JSON, Answer
from hps.service.lookup_threads import LookupThreads
from hps.service.protocol.inference import decode_request, parse_header_length
from hps.service.protocol.json_lookup import decode_lookup, encode_lookup
from hps.service.protocol.model_tables import ServedModel

VERSION = "1"
"""The version that every model has: a parameter server serves one."""

INFER: Final = "/v2/models/{model}/infer"
INFER_VERSION: Final = "/v2/models/{model}/versions/{version}/infer"
LOOKUP: Final = "/v1/models/{model}/lookup"


class Target(NamedTuple):
    """The route that a path belongs to, and what the path says."""

    route: str
    model_name: str
    version: str = VERSION


@lru_cache(256)
def target_of(path: str) -> Target | None:
    """The lookup route that serves a path, if one does."""
    match path.split("/"):
        case ["", "v2", "models", model, "infer"]:
            return Target(INFER, model)
        case ["", "v1", "models", model, "lookup"]:
            return Target(LOOKUP, model)
        case ["", "v2", "models", model, "versions", version, "infer"]:
            return Target(INFER_VERSION, model, version)
    return None


class LookupRoutes:
    """Answers lookups. *One per event loop.*

    The lookup alone runs on another thread: orjson never lets go of the interpreter lock, so that writing JSON elsewhere
    would hold up the event loop just as long, and cost a fight for the lock.

    Args:
        threads: where lookups run.
        max_keys: of one request.
    """

    def __init__(self, threads: LookupThreads, max_keys: int) -> None:
        self._threads = threads
        self._max_keys = max_keys
        self._models: dict[str, ServedModel] = {}

    async def answer(self, server: HPS, target: Target, headers: Mapping[bytes, bytes], body: bytes) -> Answer:
        """Look up what the body asks for.

        Raises:
            HPSError: the request is wrong, or the lookup failed; `app.STATUS_OF_ERROR` has the status.
        """
        model = self._model(server, target)
        if target.route == LOOKUP:
            segments = decode_lookup(body, model, self._max_keys)
            await self._threads.run(server.lookup_segments, model.name, segments)
            return Answer(200, [JSON], (encode_lookup(segments, model),))
        header_length = parse_header_length(headers.get(b"inference-header-content-length"), len(body))
        inference = decode_request(body, header_length, model, self._max_keys)
        await self._threads.run(server.lookup_segments, model.name, inference.segments)
        chunks, length = inference.encode()
        if length is None:
            return Answer(200, [JSON], chunks)
        return Answer(200, [BINARY, (b"inference-header-content-length", str(length).encode())], chunks)

    def _model(self, server: HPS, target: Target) -> ServedModel:
        tables = server.model(target.model_name).tables
        check_version(target.model_name, target.version)
        known = self._models.get(target.model_name)
        if known is None or known.tables is not tables:  # not known, or deployed anew
            known = self._models[target.model_name] = ServedModel(target.model_name, tables)
        return known


def check_version(model_name: str, version: str) -> None:
    """Refuse versions that do not exist.

    Raises:
        UnknownModelError: the model has no such version.
    """
    if version != VERSION:
        raise UnknownModelError(f"model {model_name!r}: got version {version[:40]!r}, wanted {VERSION!r}, the only one")
