"""Clients of servers that close, stall, lie or are overloaded: an error or the right vectors, never wrong ones."""

import asyncio
import gc
import inspect
import os
import socket
import ssl
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hps
from hps.testing.waiting import PATIENCE_S, wait_until, wait_until_async
from tests.servers import scripted_server as steps
from tests.servers.certificates import Authority
from tests.servers.scripted_server import DIM, ScriptedServer, Step, changed, refused, sent, vectors_of

KEYS = [3, 1, 2]
Ask = Callable[..., Any]


def ask_in_thread(address: Any, calls: Callable[[Any], list[Any]], **options: Any) -> list[Any]:
    with hps.connect(address, **options) as client:
        return [asyncio.run(_outcome(call)) for call in calls(client)]


async def _outcome(call: Callable[[], Any]) -> Any:
    try:
        made = call()
        return await made if inspect.isawaitable(made) else made
    except hps.HPSError as error:
        return error


def ask_in_loop(address: Any, calls: Callable[[Any], list[Any]], **options: Any) -> list[Any]:
    async def main() -> list[Any]:
        async with hps.connect_async(address, **options) as client:
            return [await _outcome(call) for call in calls(client)]

    return asyncio.run(main())


@pytest.fixture(params=[ask_in_thread, ask_in_loop], ids=["threads", "asyncio"])
def ask(request: pytest.FixtureRequest) -> Ask:
    return request.param


def lookups(count: int = 1, **options: Any) -> Callable[[Any], list[Any]]:
    return lambda client: [lambda: client.lookup(KEYS, "m", "item", **options)] * count


def is_right(*outcomes: Any) -> bool:
    return all(isinstance(outcome, np.ndarray) and bool((outcome == vectors_of(KEYS)).all()) for outcome in outcomes)


def together(*calls: Callable[[], Any]) -> None:
    """Make calls in threads, and wait for them."""
    threads = [threading.Thread(target=call) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


@pytest.mark.parametrize(
    "script",
    [
        [steps.right, steps.right],
        [steps.last, steps.last],
        [steps.closed, steps.right, steps.closed, steps.closed, steps.right],
        [steps.half, steps.right, steps.half, steps.right],
        [steps.in_pieces, steps.in_pieces],
        [refused(503, "busy", "Retry-After: 0"), steps.right, refused(429, "slow down", "Retry-After: 0"), steps.right],
    ],
    ids=["well", "closed-after", "closed-before", "half", "pieces", "overloaded"],
)
def test_lookups_are_repeated_until_a_whole_answer(ask: Ask, script: list[Step]) -> None:
    with ScriptedServer(script) as server:
        for _ in range(2):
            outcomes = ask(server.url, lookups(2))
            assert is_right(*outcomes), outcomes
            server.then(*script)


def output(**changes: Any) -> Step:
    """An answer whose output is described in another way."""
    return changed(lambda text: text["outputs"][0].update(changes))


def plain(*lines: bytes, status: bytes = b"200 OK") -> Step:
    """An answer of these lines; the last one is its body."""
    return sent(b"HTTP/1.1 " + b"\r\n".join([status, *lines]))


@pytest.mark.parametrize(
    ("step", "error", "message"),
    [
        (output(shape=[2, DIM]), hps.RemoteError, "one for each"),
        (output(shape=[3, DIM - 1]), hps.RemoteError, "48 bytes"),
        (output(datatype="FP64"), hps.RemoteError, "FP64"),
        (output(name="user"), hps.RemoteError, "outputs of this request"),
        (output(parameters={}), hps.RemoteError, "outputs of this request"),
        (changed(lambda text: text.update(outputs=[])), hps.RemoteError, "got outputs"),
        (changed(lambda text: text["outputs"].append(text["outputs"][0])), hps.RemoteError, "got outputs"),
        (changed(lambda text: text.clear()), hps.RemoteError, "outputs of this request"),
        (changed(cut=4), hps.RemoteError, "44 bytes of tensors, expected 48"),
        (changed(more=b"\0\0\0\0"), hps.RemoteError, "52 bytes of tensors, expected 48"),
        (plain(b"Content-Length: -4", b"", b""), hps.RemoteError, "Content-Length"),
        (plain(b"Content-Length: 2", b"Inference-Header-Content-Length: 9", b"", b"{}"), hps.RemoteError, "JSON"),
        (plain(b"Content-Length: 2", b"", b"{}"), hps.RemoteError, "outputs of this request"),
        (sent(b"SSH-2.0-OpenSSH\r\n\r\n"), hps.RemoteError, "is it hps"),
        (sent(b"x" * 200_000), hps.RemoteError, "head is too long"),
        (refused(400, "wrong"), hps.InvalidInputError, "wrong"),
        (refused(401, "who?"), hps.UnauthorizedError, "who"),
        (refused(404, "no model"), hps.UnknownModelError, "no model"),
        (refused(404, "got table 'x'"), hps.UnknownTableError, "table"),
        (refused(404, "got version 'x'"), hps.UnknownVersionError, "version"),
        (refused(404, "got device 3"), hps.UnknownDeviceError, "device"),
        (refused(413, "many"), hps.TooManyKeysError, "many"),
        (refused(429, "slow down"), hps.NotReadyError, "slow"),
        (refused(503, "loading"), hps.NotReadyError, "loading"),
        (refused(504, "late"), hps.RemoteTimeoutError, "late"),
        (refused(500, "bug"), hps.RemoteError, "bug"),
        (plain(b"Content-Length: 6", b"", b"<html>", status=b"502 Bad Gateway"), hps.RemoteConnectionError, "<html>"),
    ],
)
def test_no_answer_is_an_error_and_the_next_call_is_answered(ask: Ask, step: Step, error: type, message: str) -> None:
    out = np.zeros((3, DIM), np.float32)
    with ScriptedServer([steps.right, step, steps.right, step, steps.right]) as server:
        outcomes = ask(server.url, lambda client: [*lookups(3)(client), *lookups(2, out=out)(client)])
    assert [is_right(outcome) for outcome in outcomes] == [True, False, True, False, True], outcomes
    for one in (outcomes[1], outcomes[3]):
        assert type(one) is error
        assert message in str(one)


def test_bytes_after_an_answer_are_not_taken_for_the_next_one(ask: Ask) -> None:
    def two(connection: socket.socket, request: bytes) -> bool:
        keys = steps.parts_of(request)[1]["item"]
        other = request.replace(keys.tobytes(), (keys + 1).tobytes())
        return sent(steps.answer_to(request) + steps.answer_to(other))(connection, request)

    with ScriptedServer([two, steps.right]) as server:
        outcomes = ask(server.url, lookups(2))
        assert is_right(*outcomes), outcomes
        assert server.connections == 2


def test_a_lost_connection_is_an_error_after_some_attempts(ask: Ask) -> None:
    with ScriptedServer([steps.half] * 3 + [steps.closed] * 3) as server:
        first, second, third = ask(server.url, lookups(3))
        assert type(first) is type(second) is hps.RemoteConnectionError
        assert is_right(third)
        assert len(server.requests) == 7


def trickle(connection: socket.socket, request: bytes) -> bool:
    connection.sendall(b"HTTP/1.1 200 OK\r\nX: ")
    connection.settimeout(0.02)
    while True:
        try:
            return bool(connection.recv(1))  # the client has gone
        except TimeoutError:
            connection.sendall(b"x")


@pytest.mark.parametrize(("step", "times"), [(steps.silent, 1), (trickle, 1), (refused(503, "busy", "Retry-After: 0"), 100)])
def test_a_call_ends_at_its_deadline(ask: Ask, step: Step, times: int) -> None:
    with ScriptedServer([step] * times) as server:
        outcomes = ask(server.url, lambda client: lookups(timeout_s=0.3)(client) + lookups(times == 1)(client))
        ends = (hps.RemoteTimeoutError,) if times == 1 else (hps.NotReadyError, hps.RemoteTimeoutError)  # within a refusal
        assert type(outcomes[0]) in ends
        assert is_right(*outcomes[1:])


def test_a_server_that_is_busy_for_longer_than_the_deadline_is_an_error_at_once(ask: Ask) -> None:
    with ScriptedServer([refused(503, "busy", "Retry-After: 3600")]) as server:
        assert [type(one) for one in ask(server.url, lookups())] == [hps.NotReadyError]
        assert len(server.requests) == 1


@pytest.mark.parametrize("step", [steps.closed, refused(503, "busy", "Retry-After: 0"), refused(507, "full")])
def test_a_write_is_sent_once(ask: Ask, step: Step) -> None:
    with ScriptedServer([step] * 5) as server:
        insert, delete = lambda one: one.insert([1], [[1.0] * DIM], "m", "item"), lambda one: one.delete([1], "m", "item")
        outcomes = ask(server.url, lambda client: [lambda: insert(client), lambda: delete(client)])
        assert all(isinstance(outcome, hps.HPSError) for outcome in outcomes)
        assert [request.split(b" ", 1)[0] for request in server.requests] == [b"POST", b"DELETE"]


def test_an_unreachable_server_is_an_error_and_another_address_is_tried(ask: Ask) -> None:
    with socket.socket() as held:  # bound, so that nobody else listens there
        held.bind(("127.0.0.1", 0))
        gone = f"http://127.0.0.1:{held.getsockname()[1]}"
        (outcome,) = ask(gone, lookups())
        assert type(outcome) is hps.RemoteConnectionError
        assert gone in str(outcome)
        with ScriptedServer() as server:
            outcomes = ask([gone, server.url], lookups(2))
            assert is_right(*outcomes)


def test_the_pool_is_bounded_and_opens_others_for_those_that_were_closed() -> None:
    with ScriptedServer() as server, hps.connect(server.url, connections=3) as client:
        for turn in (1, 2):
            outcomes: list[bool] = []
            work = lambda: outcomes.extend(is_right(client.lookup(KEYS, "m", "item")) for _ in range(50))  # noqa: B023, E731
            together(*[work] * 8)
            assert outcomes == [True] * 400
            assert 1 <= server.connections <= 3 * turn
            server.close_connections()
            assert is_right(client.lookup(KEYS, "m", "item"))


def test_calls_wait_for_a_connection_no_longer_than_their_deadline() -> None:
    may_answer, outcomes = threading.Event(), []

    def held(connection: socket.socket, request: bytes) -> bool:
        return may_answer.wait(PATIENCE_S) and steps.right(connection, request)

    with ScriptedServer([held]) as server, hps.connect(server.url, connections=1, timeout_s=PATIENCE_S) as client:
        first = threading.Thread(target=lambda: outcomes.append(client.lookup(KEYS, "m", "item")))
        first.start()
        wait_until(lambda: server.requests, "it is asked")
        for _ in range(2):
            with pytest.raises(hps.RemoteTimeoutError):
                client.lookup(KEYS, "m", "item", timeout_s=0.1)
        may_answer.set()
        first.join()
        assert is_right(outcomes[0])
        assert is_right(client.lookup(KEYS, "m", "item"))


def test_a_cancelled_call_does_not_disturb_the_next() -> None:
    async def main() -> bool:
        async with hps.connect_async(server.url, connections=1) as client:
            call = asyncio.create_task(client.lookup([7], "m", "item"))
            await wait_until_async(lambda: server.requests, "it is asked")
            call.cancel()
            await asyncio.gather(call, return_exceptions=True)
            return is_right(await client.lookup(KEYS, "m", "item"))

    with ScriptedServer([steps.silent]) as server:
        assert asyncio.run(main())


def test_a_forked_child_opens_its_own_connections_and_a_closed_client_none() -> None:
    with ScriptedServer() as server:
        client = hps.connect(server.url, connections=2)
        assert is_right(client.lookup(KEYS, "m", "item"))
        child = os.fork()
        if not child:
            os._exit(0 if is_right(client.lookup(KEYS, "m", "item")) else 1)
        assert os.waitpid(child, 0)[1] == 0
        assert is_right(client.lookup(KEYS, "m", "item"))
        assert server.connections == 2
        client.close()
        with pytest.raises(hps.NotReadyError, match="closed"):
            client.lookup(KEYS, "m", "item")
    gc.collect()


def test_vectors_are_received_where_out_lies(ask: Ask) -> None:
    out = np.full((5, DIM), 9, np.float32)
    wrong = [np.zeros((2, DIM), np.float32), np.zeros((3, DIM)), np.zeros((DIM, 3), np.float32).T[:2]]
    with ScriptedServer() as server:
        calls = lambda client: [call for one in (out, *wrong, None) for call in lookups(out=one)(client)]  # noqa: E731
        found, *refusals, after = ask(server.url, calls)
    assert found is out
    assert (out[:3] == vectors_of(KEYS)).all()
    assert (out[3:] == 9).all()
    assert [isinstance(refusal, hps.InvalidInputError) for refusal in refusals] == [True] * 3
    assert is_right(after)


def test_requests_carry_the_token_and_nothing_else_shows_it(ask: Ask) -> None:
    secret = "s3cret-token"
    with ScriptedServer([refused(401, "no"), steps.closed, steps.closed, steps.closed]) as server:
        outcomes = ask(server.url, lookups(2), token=secret)
        assert all(b"Authorization: Bearer s3cret-token\r\n" in request for request in server.requests)
        shown = [
            repr(hps.connect(server.url, token=secret)),
            *(f"{outcome!r} {outcome} {outcome.__cause__!r}" for outcome in outcomes),
        ]
        assert secret not in " ".join(shown)
    with pytest.raises(hps.InvalidInputError) as caught:
        hps.connect("http://x", token=f"{secret}\r\nX: y")
    assert secret not in str(caught.value)


ADDRESSES = ["x", "ftp://x", "http://", "http://x:0", "http://x:99999", "unix://host/x", "http://x/?a=1", "http://[::1"]


@pytest.mark.parametrize("address", [*ADDRESSES, "", "http://x y", [], "http://me:s3cret@x"])
def test_a_wrong_address_is_an_error_that_shows_no_password(address: Any) -> None:
    with pytest.raises(hps.InvalidInputError, match="connecting to a server") as caught:
        hps.connect(address)
    assert "s3cret" not in str(caught.value)


def test_unix_sockets_and_ipv6_are_addresses_and_a_prefix_of_a_proxy_is_kept(ask: Ask, tmp_path: Path) -> None:
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(tmp_path / "hps.sock"))
    listener.listen()
    with ScriptedServer(listener=listener) as server:
        assert is_right(*ask(server.url, lookups(2)))
    with ScriptedServer(listener=socket.create_server(("::1", 0), family=socket.AF_INET6)) as server:
        assert is_right(*ask(f"http://[::1]:{server.port}/embeddings/", lookups(2, version="1")))
        assert f"Host: [::1]:{server.port}".encode() in server.requests[0]
        assert server.requests[0].startswith(b"POST /embeddings/v2/models/m/versions/1/infer HTTP/1.1\r\n")


def test_an_address_and_the_same_with_a_slash_are_one_server_to_routing() -> None:
    with pytest.raises(hps.InvalidInputError, match="expected each once"):
        hps.connect(["http://a:8000", "http://a:8000/"], route="keys")
    with pytest.raises(hps.InvalidInputError, match="got route 'rows'"):
        hps.connect(["http://a:8000"], route="rows")
    with hps.connect(["http://a:8000//", "http://b:8000/rows/"], route="keys") as client:
        assert client.addresses == ("http://a:8000", "http://b:8000/rows")


def test_tls_is_spoken_and_certificates_are_checked(ask: Ask, tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    server_pair, client_pair = authority.sign("localhost"), authority.sign("someone")
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=str(authority.path))
    tls.load_cert_chain(server_pair.both)
    with ScriptedServer([steps.right, steps.half, steps.right, steps.right], tls=tls) as server:
        url = f"https://localhost:{server.port}"
        assert is_right(*ask(url, lookups(3), ca_file=authority.path))
        assert is_right(*ask(url, lookups(1), tls=ssl.create_default_context(cafile=str(authority.path))))
        (stranger,) = ask(url, lookups())
        assert type(stranger) is hps.RemoteConnectionError
        assert "certificate" in str(stranger).lower()
        tls.verify_mode = ssl.CERT_REQUIRED
        assert is_right(*ask(url, lookups(2), ca_file=authority.path, certificate=client_pair.both))
        (nobody,) = ask(url, lookups(), ca_file=authority.path)
        assert type(nobody) is hps.RemoteConnectionError
    for name in ("ca_file", "certificate"):
        with pytest.raises(hps.InvalidInputError, match="nowhere"):
            hps.connect(url, **{name: "nowhere.pem"})


@pytest.mark.parametrize("step", [steps.half, steps.closed, refused(503, "busy", "Retry-After: 3600"), refused(504, "late")])
def test_keys_of_a_server_that_fails_are_answered_by_another(ask: Ask, step: Step) -> None:
    keys = np.arange(100)
    with ScriptedServer([step] * 100) as failing, ScriptedServer() as good:
        lookup = lambda client: [lambda: client.lookup(keys, "m", "item")] * 2  # noqa: E731
        for one in ask([failing.url, good.url], lookup, route="keys"):
            np.testing.assert_array_equal(one, vectors_of(keys))
        assert failing.requests


def test_routed_lookups_end_at_their_deadline(ask: Ask) -> None:
    with ScriptedServer([steps.silent] * 100) as one, ScriptedServer([steps.silent] * 100) as other:
        lookup = lambda client: [lambda: client.lookup(np.arange(100), "m", "item", timeout_s=0.4)]  # noqa: E731
        (outcome,) = ask([one.url, other.url], lookup, route="keys")
        assert type(outcome) is hps.RemoteTimeoutError
