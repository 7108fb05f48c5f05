"""Online writes of rows, and reads of single rows. Served without FastAPI, since there may be thousands of writes a second."""

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import NamedTuple
from urllib.parse import parse_qsl

import orjson
from starlette.types import Scope

from hps.configuration.load import ServiceConfig
from hps.errors import InvalidInputError
from hps.ground.threads.pacing import paced
from hps.parameter_server import HPS
from hps.serve.engine.call_threads import CallThreads
from hps.serve.engine.lifecycle import Lifecycle
from hps.serve.http.http_answer import JSON, HTTPAnswer, RequestError
from hps.serve.http.memory_budget import SMALL_BYTES, MemoryBudget
from hps.serve.http.targets import RowTarget
from hps.serve.logs.changes import WriteLog
from hps.serve.protocol.json_size import parsed_bytes
from hps.serve.protocol.open_inference import parse_header_length
from hps.serve.protocol.row_writes import MAX_JSON_BYTES, check_finite, decode_keys, decode_rows
from hps.serve.protocol.schemas import ROW
from hps.versions.deployment import StoredRow

_THREADS = 2  # for each of reads and writes
_MOST_WAITING = 64


class RowRequest(NamedTuple):
    """A request for rows. `who` sent it, if it changes any."""

    target: RowTarget
    method: str
    version: str | None
    who: str


class RowRoutes:
    """Serves the routes of rows. *One per event loop.*

    Args:
        settings: limits until `configure` changes them.
        memory: counts large bodies and their decoded rows.
    """

    def __init__(self, lifecycle: Lifecycle, settings: ServiceConfig, memory: MemoryBudget) -> None:
        self._lifecycle = lifecycle
        self._memory = memory
        self._reads, self._writes = (
            CallThreads(_THREADS, settings.request_timeout_s, memory, _MOST_WAITING, what) for what in ("read", "write")
        )
        self._log = WriteLog()
        self.configure(settings)

    def configure(self, settings: ServiceConfig) -> None:
        self._max_rows, self._refuse_nan = settings.max_rows_per_write, settings.refuse_nan
        for threads in (self._reads, self._writes):
            threads.limit_to(settings.request_timeout_s)

    def close(self, timeout_s: float) -> bool:
        """Finish what runs; False on timeout. Blocks."""
        return self._reads.close(timeout_s) and self._writes.close(timeout_s)

    def flush_log(self) -> None:
        self._log.flush()

    def read(self, target: RowTarget, scope: Scope, who: str) -> RowRequest:
        """Parse a request, except its body.

        Raises:
            RequestError: 405, the route has no such method.
            InvalidInputError: the query has parameters other than `version`.
        """
        methods = ("GET", "HEAD", "DELETE") if target.route == ROW else ("POST", "DELETE")
        if scope["method"] not in methods:
            got, allowed = f"got {scope['method']} {scope['path'][:300]}", ", ".join(methods)
            raise RequestError(405, f"{got}, expected {allowed}", (b"allow", allowed.encode()))
        query = dict(parse_qsl(scope["query_string"].decode("latin-1"), keep_blank_values=True))
        version = query.pop("version", None)
        if query:
            raise InvalidInputError(f"reading the query: got {next(iter(query))[:120]!r}, expected 'version' or nothing")
        method = "GET" if scope["method"] == "HEAD" else scope["method"]  # the server sends no body to HEAD
        return RowRequest(target, method, version, who)

    async def answer(self, request: RowRequest, headers: Mapping[bytes, bytes], body: bytes | bytearray) -> HTTPAnswer:
        """Read or write the requested rows.

        Raises:
            HPSError: as `HPS.row`, `HPS.insert` and `HPS.delete`, and for an invalid body; then nothing was written.
        """
        target = request.target
        server = self._lifecycle.server_of(target.model)
        if request.method == "GET":
            row = await self._reads.run(_row, server, request)
            return HTTPAnswer(200, [JSON], (_row_text(request, row),))
        table = f"{target.model}.{target.table}"
        server.model(target.model, request.version).table_index(target.table)  # names from clients are not logged
        try:
            length = parse_header_length(headers.get(b"inference-header-content-length"), len(body))
            held = self._reserve(length, body)
            version, rows = await self._writes.run(self._write, server, request, length, body, held=held)
        except BaseException:
            self._log.count(request.who, table, failed=True)
            raise
        deleted = rows if request.method == "DELETE" else 0
        self._log.count(request.who, table, written=rows - deleted, deleted=deleted)
        answer = {"model": target.model, "version": version, "table": target.table, "rows": rows}
        return HTTPAnswer(200, [JSON], (orjson.dumps(answer),))

    def _reserve(self, header_length: int | None, body: bytes | bytearray) -> int:
        size = len(body)
        if size <= SMALL_BYTES:
            return 0
        decoded = size
        if header_length is None and size <= MAX_JSON_BYTES:
            decoded = parsed_bytes(memoryview(body), size)  # each value takes at least a byte
        return self._memory.reserve(size + decoded, "reading the rows")

    def _write(self, server: HPS, request: RowRequest, length: int | None, body: bytes | bytearray) -> tuple[str, int]:
        """Check a complete body, then write it. Returns the version that has it, and the number of rows."""
        target = request.target
        deployment = server.model(target.model, request.version)
        table = deployment.tables[deployment.table_index(target.table)]
        if request.method == "DELETE":
            keys = [_key(target.key)] if target.key else decode_keys(body, length, self._max_rows)
            with paced():
                return server.delete(keys, target.model, target.table, version=request.version), len(keys)
        keys, vectors = decode_rows(body, length, table, self._max_rows)
        if self._refuse_nan:
            check_finite(keys, vectors)
        with paced():
            return server.insert(keys, vectors, target.model, target.table, version=request.version), len(keys)


def _row(server: HPS, request: RowRequest) -> StoredRow:
    target = request.target
    return server.row(_key(target.key), target.model, target.table, version=request.version)


def _key(text: str) -> int:
    digits = text.removeprefix("-")
    if not (digits.isascii() and digits.isdigit() and len(digits) < 20 and -(2**63) <= int(text) < 2**63):
        raise InvalidInputError(f"reading the key in the path: got {text[:40]!r}, expected a signed 64-bit integer")
    return int(text)


def _row_text(request: RowRequest, row: StoredRow) -> bytes:
    """Write the answer as readable JSON. NaN and infinities become null."""
    at = row.written_at_us
    answer = {
        "model": request.target.model,
        "version": row.version,
        "table": request.target.table,
        "key": row.key,
        "found": row.tier is not None,
        "tier": row.tier,
        "written_at": None if at is None else datetime.fromtimestamp(at / 1e6, UTC).isoformat(timespec="microseconds"),
        "written_at_us": at,
        "vector": row.vector,
    }
    return orjson.dumps(answer, option=orjson.OPT_SERIALIZE_NUMPY)
