"""Profiles a running service through the Open Inference Protocol with binary tensors."""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from threading import BrokenBarrierError
from typing import Any
from urllib.parse import quote

import numpy as np

from hps import errors
from hps.client.addresses import Address, read_addresses
from hps.client.client import connect
from hps.client.requests import Encoder, Input
from hps.ground.memory.capacity import available_processors
from hps.tensors.bags import Bags
from hps.tools.profiling.counters import Counters
from hps.tools.profiling.http_load import HttpLoad, LoadResult, Parts, number_of
from hps.tools.profiling.keys import KeyPool
from hps.tools.profiling.profile import Row, compare
from hps.types import KeyArray

_START_S = 60.0
_ANSWER_S = 30.0
_UNAVAILABLE = (errors.NotReadyError, errors.RemoteConnectionError, errors.RemoteTimeoutError)
_REFUSED = (errors.InvalidInputError, errors.UnknownModelError, errors.UnknownTableError, errors.UnauthorizedError)
_STATS_KEPT_S = 0.3  # a server may repeat an answer of GET /v1/stats for so long
_barrier: Any = None  # in a client process


@dataclass(frozen=True, slots=True)
class Target:
    """A server, and how to connect to it. *Immutable*, and picklable."""

    url: str
    certificate: Path | None = None  # PEM file with the certificate and key of this client

    def address(self) -> Address:
        """Read the URL, and for TLS the files of authorities and the certificate."""
        (address,) = read_addresses(self.url, certificate=self.certificate)
        return address


@dataclass(frozen=True, slots=True)
class Requests:
    """The requests of one batch size. *Immutable*, and picklable."""

    target: Target
    start: bytes  # HTTP head and JSON part, the same in all requests
    keys: dict[str, KeyArray]  # (n,) int64 by table
    batch: int  # keys of each table
    answer_bytes: int  # length of an answer's binary part

    def pool(self) -> Callable[[int], Parts]:
        """Return a function that makes a request from its number."""
        pool, start = KeyPool(self.keys, self.batch), self.start
        return lambda number: (start, *(memoryview(part.data).cast("B") for part in pool.take(number).values()))

    def check(self, number: int, head: bytes, body: memoryview) -> str:
        """Describe a wrong answer size; empty if it is right."""
        got = len(body) - number_of(head, b"inference-header-content-length")
        return "" if got == self.answer_bytes else f"{got} bytes of vectors"


class Service:
    """Profiles one model of a running server. *One thread.*

    Args:
        token: bearer or admin token; empty: none.
        model: empty: the only one.
        tables: tables to look up; empty: all.
        hotness: keys per bag; 0: every key gets a vector.
        processes: client processes, at most one per connection; 1: only this one; None: half the processors, since the server
            may need the others.
        certificate: PEM file with the certificate and key of this client.

    Attributes:
        most_keys: maximum number of keys of each table in a request.

    Raises:
        InvalidInputError: the URL or the token is wrong, or the model has no such table.
        UnknownModelError: the server has no such model, or several and none was named.
        RemoteConnectionError, RemoteTimeoutError: the server does not answer.
    """

    def __init__(
        self,
        url: str,
        token: str = "",
        model: str = "",
        tables: Sequence[str] = (),
        hotness: int = 0,
        processes: int | None = None,
        certificate: Path | None = None,
    ) -> None:
        self._target = Target(url, certificate)
        self._address = self._target.address()
        self._server = connect(url, token=token, certificate=certificate, timeout_s=_ANSWER_S)
        self._encoder = Encoder(token)
        self._hotness, self._processes = hotness, processes or max(1, available_processors() // 2)
        self.model = model or self._only_model()
        tables_info = self._server.ask(f"/v2/models/{quote(self.model, safe='')}")["tables"]
        dims = {table["name"]: table["dim"] for table in tables_info}
        if unknown := [name for name in tables if name not in dims]:
            raise errors.InvalidInputError(f"profiling model {self.model!r}: got tables {unknown}, expected of {list(dims)}")
        self.tables = list(tables or dims)
        self._dims = dims
        self.most_keys = min(table["max_keys"] for table in tables_info if table["name"] in self.tables)

    def known_keys(self) -> dict[str, tuple[int, None]]:
        """Return the number of keys in each table's model files, 0 if the server does not say. It never lists the keys."""
        stats = self._stats()
        models = stats["server"]["models"] if stats.get("server") else []
        rows = {table["name"]: table["rows"] for entry in models if entry["name"] == self.model for table in entry["tables"]}
        return {table: (rows.get(table, 0), None) for table in self.tables}

    def measure(
        self, keys: dict[str, KeyArray], batch: int, connections: int, seconds: float, rate: float | None, warm_up_s: float
    ) -> Row:
        """Load the server for a while.

        Args:
            keys: (n,) int64 by table.
            batch: keys of each table per lookup.
            connections: total over all processes.
            rate: lookups per second, total over all processes.

        Raises:
            InvalidInputError: the server rejects these lookups.
            RemoteConnectionError, RemoteTimeoutError: the server stopped answering before the load began.
        """
        requests = self._requests(keys, batch)
        try:
            self._lookup(KeyPool(keys, batch).take(0))
        except (*_REFUSED, errors.RemoteConnectionError):
            raise
        except errors.HPSError:
            pass  # the failures of the load show it
        if warm_up_s:
            self._run(requests, connections, warm_up_s, rate)
        after = before = self._counters()
        result = self._run(requests, connections, seconds, rate)
        with suppress(*_UNAVAILABLE):  # the failures show it
            after = self._counters()
        return Row.of(
            result,
            batch=batch,
            tables=len(self.tables),
            concurrency=connections,
            rate=rate,
            stages=after.stages_since(before),
            tiers=after.tiers_since(before),
            default_keys=after.defaults_since(before),
        )

    def check(self, keys: dict[str, KeyArray], batch: int) -> None:
        """Compare vectors of the same keys, as `compare`."""
        compare(self._lookup, KeyPool(keys, batch), self._hotness)

    def _requests(self, keys: dict[str, KeyArray], batch: int) -> Requests:
        shape = (batch // self._hotness, self._hotness) if self._hotness else (batch,)
        inputs = [Input(table, np.empty(shape, np.int64)) for table in self.tables]
        rows = dict.fromkeys(self.tables, shape[:1])
        parameters = {"combiner": "sum"} if self._hotness else {}
        call = self._encoder.lookup(self.model, None, inputs, rows, None, lambda answer: None, parameters=parameters)
        start, *_ = self._encoder.parts(call, self._address)
        answer_bytes = 4 * shape[0] * sum(self._dims[table] for table in self.tables)
        pools = {table: keys[table] for table in self.tables}
        return Requests(self._target, start, pools, batch, answer_bytes)

    def _lookup(self, keys_by_table: dict[str, KeyArray]) -> dict[str, Any]:
        """Look up once; returns the vectors, (rows, dim) float32 by table."""
        if self._hotness:
            bags = {table: Bags(keys.reshape(-1, self._hotness)) for table, keys in keys_by_table.items()}
            return dict(self._server.lookup_pooled(bags, self.model))
        return dict(self._server.lookup_tables(keys_by_table, self.model))

    def _run(self, requests: Requests, connections: int, seconds: float, rate: float | None) -> LoadResult:
        processes = min(self._processes, connections)
        if processes == 1:
            return _load(requests, connections, seconds, rate, 0)
        connections_each, remainder = divmod(connections, processes)
        shares = [connections_each + (index < remainder) for index in range(processes)]
        context = get_context("spawn")
        barrier = context.Barrier(len(shares))
        with ProcessPoolExecutor(len(shares), context, initializer=_share, initargs=(barrier,)) as clients:
            # The pool watches a process only from the task on that follows its start.
            for started in [clients.submit(_meet) for _ in shares]:
                started.result(2 * _START_S)
            rates = [rate * share / sum(shares) if rate else None for share in shares]
            waiting = [
                clients.submit(_load, requests, share, seconds, process_rate, index << 32)
                for index, (share, process_rate) in enumerate(zip(shares, rates, strict=True))
            ]
            try:
                results = [future.result(seconds + 2 * _START_S) for future in waiting]
            except BrokenProcessPool as error:
                raise errors.HPSError("loading a server: one of the client processes was killed") from error
        return results[0].merge(results[1:])

    def _only_model(self) -> str:
        models = self._server.ask("/v2").get("models", [])
        if len(models) != 1:
            raise errors.UnknownModelError(f"profiling a server: it serves {models or 'no model'}; --model chooses one")
        return str(models[0])

    def _counters(self) -> Counters:
        time.sleep(_STATS_KEPT_S)
        return Counters(self._stats(), self.model, self.tables)

    def _stats(self) -> dict[str, Any]:
        try:
            return dict(self._server.ask("/v1/stats"))
        except _UNAVAILABLE:
            raise
        except errors.HPSError:  # other servers of the same protocol may lack them
            return {}


def _share(barrier: Any) -> None:
    global _barrier
    _barrier = barrier


def _load(requests: Requests, connections: int, seconds: float, rate: float | None, first: int) -> LoadResult:
    """Load the server from this process; one of several waits until all are ready."""
    load = HttpLoad(requests.target.address(), connections, requests.pool(), requests.check)
    _meet()
    return load.run(seconds, rate, first)


def _meet() -> None:
    """Wait for the other processes, if there are some."""
    if _barrier is not None:
        try:
            _barrier.wait(_START_S)
        except BrokenBarrierError as error:
            raise errors.HPSError(f"loading a server: not all processes were ready within {_START_S:g} s") from error
