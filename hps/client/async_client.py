"""The client for asyncio."""

import asyncio
import os
import ssl
from collections.abc import Sequence
from functools import partial
from types import TracebackType
from typing import Any, Self, cast

from hps.client.addresses import Address, read_addresses
from hps.client.answers import Answer
from hps.client.calls import Calls, Joined
from hps.client.requests import RemoteCall
from hps.client.retries import Attempts
from hps.client.routing import Routed, RoutedWrite
from hps.errors import HPSError, RemoteConnectionError


def connect_async(
    address: str | Sequence[str],
    *,
    token: str = "",
    tls: ssl.SSLContext | None = None,
    ca_file: str | os.PathLike[str] | None = None,
    certificate: str | os.PathLike[str] | None = None,
    timeout_s: float = 10.0,
    connections: int = 16,
    route: str = "",
) -> "AsyncClient":
    """Make a client for asyncio. As `connect`; its calls are awaited.

        async with hps.connect_async("http://127.0.0.1:8000") as client:
            vectors = await client.lookup([17, 42], "sample", "item")  # (2, dim) float32

    Raises:
        InvalidInputError: as `connect`.
    """
    return AsyncClient(read_addresses(address, tls, ca_file, certificate), token, timeout_s, connections, route)


class AsyncClient(Calls):
    """A client of a remote server for asyncio, made by `connect_async`. *One per event loop.* An async context manager.

    Its calls are those of `Client`, and return awaitables. A cancelled call closes its connection.
    """

    def __init__(self, addresses: Sequence[Address], token: str, timeout_s: float, connections: int, route: str = "") -> None:
        super().__init__(addresses, token, timeout_s, connections, route)
        self._of_servers = [AsyncClient([address], token, timeout_s, connections) for address in addresses] if route else []
        self._idle: list[_AsyncConnection] = []
        self._free = asyncio.Semaphore(connections)

    async def _request(self, call: RemoteCall, timeout_s: float | None) -> Any:
        attempts = Attempts(call, self.timeout_s if timeout_s is None else timeout_s)
        try:
            async with asyncio.timeout(attempts.remaining_s()), self._free:
                while True:
                    connection = await self._connection(attempts)
                    try:
                        answer = await self._exchange(connection, call)
                    except RemoteConnectionError as error:
                        pause = attempts.pause_after_loss(error)
                    else:
                        refusal = answer.error()
                        if refusal is None or call.takes_errors:
                            return call.result(answer)
                        pause = attempts.pause_after(answer, refusal)
                    await asyncio.sleep(pause)
        except TimeoutError as error:
            # RemoteTimeoutError and an error of a socket are TimeoutErrors, too: only asyncio.timeout raises the class itself.
            if type(error) is TimeoutError:
                raise attempts.timeout() from None
            raise

    async def _request_in_parts(
        self,
        routed: Routed[RemoteCall] | RoutedWrite[RemoteCall],
        timeout_s: float | None,
        merge: Joined,
        complete: RemoteCall,
    ) -> Any:
        attempts = Attempts(complete, self.timeout_s if timeout_s is None else timeout_s)
        outcomes: Any = None  # starts it
        while True:
            try:
                parts_to_request = routed.send(outcomes)
            except StopIteration as end:
                return await self._request(complete, attempts.remaining_s()) if end.value is None else merge(end.value)
            timeout_s = attempts.remaining_s() / 2  # others have the rest
            calls = [self._of_servers[index]._request(call, timeout_s) for index, call in parts_to_request]
            outcomes = await asyncio.gather(*calls, return_exceptions=True)
            for outcome in outcomes:
                if isinstance(outcome, BaseException) and not isinstance(outcome, HPSError):
                    raise outcome

    async def _exchange(self, connection: "_AsyncConnection", call: RemoteCall) -> Answer:
        answer = call.answer()
        try:
            await connection.exchange(self._encoder.parts(call, connection.address), answer)
        except BaseException:
            connection.close()
            raise
        if answer.keeps_alive and not self._closed:
            self._idle.append(connection)
        else:
            connection.close()
        return answer

    async def _connection(self, attempts: Attempts) -> "_AsyncConnection":
        self._check_open()
        while self._idle:
            connection = self._idle.pop()
            if connection.is_open:
                return connection
        loop, errors = asyncio.get_running_loop(), []
        for index, address, timeout_s in self._to_try(attempts):
            connection = _AsyncConnection(address)
            factory = partial(_same, connection)
            try:
                async with asyncio.timeout(timeout_s):
                    if address.path:
                        await loop.create_unix_connection(factory, address.path)
                    else:
                        await loop.create_connection(factory, address.host, address.port, ssl=address.tls)
            except OSError as error:
                errors.append(f"{address.text}: {error}")
            else:
                self._current = index
                return connection
        raise self._unreachable(attempts, errors)

    async def close(self) -> None:
        """Close the connections; running calls finish."""
        self._closed = True
        self._remove_memories()
        closing: list[Any] = [connection.closed() for connection in self._idle]
        closing += [server.close() for server in self._of_servers]
        self._idle.clear()
        await asyncio.gather(*closing)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()


class _AsyncConnection(asyncio.BufferedProtocol):
    """An open connection with at most one pending request. *Used only by its event loop.*"""

    def __init__(self, address: Address) -> None:
        self.address = address
        self._transport: asyncio.Transport | None = None
        self._answer: Answer | None = None
        self._done: asyncio.Future[None] | None = None
        self._discarded = memoryview(bytearray(1))
        self._lost = asyncio.Event()

    @property
    def is_open(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    async def exchange(self, parts: list[Any], answer: Answer) -> None:
        """Send a request and receive the answer.

        Raises:
            RemoteConnectionError: the connection was lost.
        """
        if self._transport is None or self._transport.is_closing():
            raise self._loss("it closed the connection")
        self._answer = answer
        self._done = asyncio.get_running_loop().create_future()
        self._transport.writelines(parts)
        try:
            await self._done
        finally:
            self._answer = self._done = None

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    async def closed(self) -> None:
        """Close the connection, and wait until it is closed."""
        self.close()
        await self._lost.wait()

    # -- the protocol -----------------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def get_buffer(self, hint: int) -> memoryview:
        return self._discarded if self._answer is None else self._answer.buffer()

    def buffer_updated(self, count: int) -> None:
        answer, done = self._answer, self._done
        if answer is None or done is None:  # bytes without a request
            self.close()
            return
        try:
            complete = answer.received(count)
        except Exception as error:  # noqa: BLE001 - raised by the call
            self._answer = None
            if not done.done():
                done.set_exception(error)
            return
        if complete:
            self._answer = None
            if not done.done():
                done.set_result(None)

    def connection_lost(self, error: Exception | None) -> None:
        self._transport = None
        self._lost.set()
        if self._done is not None and not self._done.done():
            self._done.set_exception(self._loss(error or "it closed the connection"))

    def _loss(self, why: object) -> RemoteConnectionError:
        return RemoteConnectionError(f"calling {self.address.text}: the connection was lost: {why}")


def _same(connection: _AsyncConnection) -> _AsyncConnection:
    return connection
