"""A client's lookup from its head to its answer, and the protocol of its requester."""

from dataclasses import dataclass
from typing import Any, Protocol

from hps.configuration.transforms import TransformConfig
from hps.errors import HPSError, UnknownModelError
from hps.serve.frontend.answers import EncodedAnswer, Plan
from hps.serve.frontend.lookups import Placed, read_cached, read_lookup
from hps.serve.frontend.published import FrontendVersion, LookupTarget
from hps.serve.frontend.scores import PlacedScores
from hps.serve.frontend.shared_memory import SharedTensors
from hps.serve.logs.requests import Served
from hps.serve.protocol.json_lookup import decode_lookup
from hps.serve.protocol.json_size import SMALL_JSON_BYTES, parsed_bytes
from hps.serve.protocol.open_inference import decode_inference, read_request
from hps.serve.protocol.schemas import LOOKUP, SCORE
from hps.serve.protocol.score_requests import ScoreBody, decode_scores
from hps.serve.protocol.score_rows import decode_rows


class Requester(Protocol):
    """The connection or call that sent a lookup. Exactly one of `answered`, `encoded` and `refuse` ends the lookup."""

    def retry_slot(self) -> None:
        """Call `EngineExchange.take_slot` again."""

    def reserve_bytes(self, size: int, what: str) -> None:
        """Reserve memory for the lookup, in place of its last reservation, or raise RequestError or OverloadedError."""

    def wait_with(self, body: bytes | bytearray) -> None:
        """Keep this body of a lookup that is retried once there is a slot."""

    def answered(self, lookup: "Lookup", slot: int, deferred: int) -> None:
        """Send the vectors of a planned lookup from this slot, and release it."""

    def encoded(self, lookup: "Lookup", slot: int, deferred: int, answer: EncodedAnswer) -> None:
        """Send this answer, whose binary data is in this slot, and release it."""

    def refuse(self, error: Exception) -> None:
        """Answer with an error."""


@dataclass(slots=True, eq=False)
class Lookup:
    """A lookup from its head to its answer. *One event loop.*"""

    requester: Requester | None  # None once it has disconnected
    target: LookupTarget
    served: Served
    version: FrontendVersion
    text: bytes  # JSON part of a planned lookup
    plan: Plan | None = None
    placed: Placed | PlacedScores | None = None
    body: bytes | bytearray = b""  # of any other lookup
    json_bytes: int | None = None  # of the JSON part of `body`; None if all of it is JSON
    traced: bool = False
    report: bool = False
    slot: int = -1
    device: int | None = None
    began_ns: int = 0
    posted_ns: int = 0
    due: float = 0.0
    slot_due: float = 0.0
    shared: SharedTensors | None = None
    transform: TransformConfig | None = None  # of which `body` is an output; `raw` is what the client sent
    raw: bytes | bytearray = b""
    raw_json_bytes: int | None = None


def decode(lookup: Lookup, most_keys: int) -> None:
    """Decode the body of a lookup, and lay it out for a slot."""
    version, body, header = lookup.version, lookup.body, lookup.json_bytes
    request: Any
    try:
        if (len(body) if header is None else header) > SMALL_JSON_BYTES and lookup.requester is not None:
            size = len(body) + parsed_bytes(memoryview(body)[:header], most_keys)
            lookup.requester.reserve_bytes(size, "parsing the request")
        scores = _scores(lookup, most_keys)
        if scores is not None:
            request = PlacedScores(scores, version.tables)
        elif lookup.target.route == LOOKUP:
            request = decode_lookup(body, version.tables, most_keys)
        else:
            # JSON that contains the keys differs in each request. It is not cached, since it would displace all other entries.
            request = decode_inference(body, header, version.tables, most_keys, read_lookup if header else read_request)
    except HPSError:
        version.counts.failed(lookup.began_ns)
        raise
    lookup.served.version = version.tables.version
    lookup.report = request.wants_report
    lookup.traced = scores is None and (lookup.served.traced or request.wants_report)
    lookup.device = request.device_id
    lookup.placed = Placed(request, lookup.traced) if scores is None else request
    if lookup.requester is not None:
        lookup.requester.reserve_bytes(len(lookup.raw) + len(body) + request.held_bytes, "answering the request")


def _scores(lookup: Lookup, most_keys: int) -> ScoreBody | None:
    """Decode a request for scores; return None if it is a lookup."""
    network, target = lookup.version.tables.network, lookup.target
    if target.route == SCORE:
        if network is None:
            raise UnknownModelError(
                f"scoring with model {target.model_name!r}: it has no network (`dense`); look its vectors up"
            )
        return decode_rows(lookup.body, network, most_keys)
    if network is None or target.route == LOOKUP:
        return None
    if (size := lookup.json_bytes) is None:
        return decode_scores(lookup.body, None, network, most_keys)
    header = read_cached(bytes(lookup.body[:size]), None, lookup.version.tables, most_keys).scores
    return None if header is None else decode_scores(lookup.body, size, network, most_keys, header)
