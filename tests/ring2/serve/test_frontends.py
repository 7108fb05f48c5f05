"""`hps serve` with front processes: which requests a death costs, that no answer is wrong, and how everything ends."""

import http.client
import os
import signal
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import numpy as np
import pytest

from hps.regions import layout
from hps.testing.waiting import PATIENCE_S, wait_until
from tests.servers.child_processes import ChildProcesses
from tests.servers.front_service import DIM, ROWS, FrontService, Load, binary_request, binary_vectors, has_ipv6, vectors_of
from tests.servers.service_processes import is_gone, state_of

KEYS = [3, 500, ROWS - 1, 3, ROWS + 7]


@pytest.fixture(scope="module")
def running(tmp_path_factory):
    children = ChildProcesses()
    try:
        running = FrontService(tmp_path_factory.mktemp("fronts"), children)
        yield running
        running.close()
    finally:
        children.end()


@pytest.fixture
def service(running):
    """A service that all tests share: each leaves it with all of its processes."""
    yield running.wait_ready()
    running.close_connections()


@pytest.fixture
def start(tmp_path, children):
    """Start a service of this test's own."""
    started = []

    def begin(**options):
        started.append(FrontService(tmp_path, children, **options))
        return started[-1].wait_ready()

    yield begin
    for one in started:
        one.close()


@contextmanager
def load(service, threads=4):
    clients = [Load(service, seed) for seed in range(threads)]
    with ExitStack() as stack:
        for client in clients:
            client.start()
            stack.callback(client.end)
        for client in clients:
            client.answers_again()
        yield clients
        for client in clients:
            client.answers_again()


@contextmanager
def stopped(pid):
    os.kill(pid, signal.SIGSTOP)
    try:
        wait_until(lambda: state_of(pid) == "T", "the process stands")
        yield
    finally:
        with suppress(ProcessLookupError):  # it may have been killed meanwhile
            os.kill(pid, signal.SIGCONT)


def test_a_front_can_write_to_its_own_region_alone(service):
    for number, pid in service.all_processes().items():
        shared = [line.split() for line in Path(f"/proc/{pid}/maps").read_text().splitlines() if "memfd:hps-" in line]
        writable = {words[5].partition(":")[2] for words in shared if "w" in words[1]}
        assert writable == ({f"hps-frontend-{number}"} if number >= 0 else {"hps-frontend-0", "hps-frontend-1", "hps-snapshot"})


def raw_request(keys, *headers):
    more, body = binary_request(keys)
    lines = [b"POST /v2/models/m/infer HTTP/1.1", b"Host: h", b"Content-Length: %d" % len(body), *headers]
    lines += [f"{name}: {value}".encode() for name, value in more.items()]
    return b"\r\n".join([*lines, b"", body])


def take_raw(file):
    """Read one answer; return its status, and its vectors if it has any."""
    status = int(file.readline().split()[1])
    headers = http.client.parse_headers(file)
    body = file.read(int(headers["content-length"]))
    return status, binary_vectors(headers, body) if status == 200 else None


def test_a_head_has_at_most_so_many_bytes(service):
    empty = raw_request([5], b"X: ").partition(b"\r\n\r\n")[0]
    for size, status in ((65_536, 200), (65_537, 400)):
        with service.connect().sock as connection, connection.makefile("rb") as file:
            connection.sendall(raw_request([5], b"X: " + b"a" * (size - len(empty) - 4)))
            assert take_raw(file)[0] == status


def test_pipelined_requests_are_answered_in_their_order_also_after_refusals(service):
    """What is refused by its head is skipped when it has arrived."""
    requests = [list(range(nth, nth + nth % 5)) for nth in range(40)]
    sent = [raw_request(keys) if nth % 7 else raw_request([5]).replace(b"/m/", b"/x/") for nth, keys in enumerate(requests)]
    with service.connect().sock as connection, connection.makefile("rb") as file:
        connection.sendall(b"".join(sent))
        for nth, keys in enumerate(requests):
            status, vectors = take_raw(file)
            assert status == (200 if nth % 7 else 404)
            assert vectors is None or np.array_equal(vectors, vectors_of(keys) if keys else np.empty((0, DIM)))


def test_a_killed_front_costs_its_own_connections_and_is_replaced(service):
    connections = service.connections(4)
    pid = service.kill(0)
    for connection in connections[0]:
        with pytest.raises((OSError, http.client.HTTPException)):
            connection.look_up(KEYS)
    for connection in connections[1]:
        assert connection.look_up(KEYS) == 200
    service.wait_replaced(0, pid)
    for connection in service.connections(2)[0]:
        wait_until(lambda one=connection: one.look_up(KEYS) == 200, "the new front answers")
    for connection in connections[1]:
        assert connection.look_up(KEYS) == 200


def test_a_killed_engine_costs_no_connection_and_no_answer_is_wrong(service):
    connections = [one for ones in service.connections(3).values() for one in ones]
    with load(service) as clients:
        pid = service.kill(-1)
        for connection in connections:
            assert connection.look_up(KEYS) in (200, 503)
        service.wait_replaced(-1, pid)
        service.wait_ready()
        for connection in connections:
            assert connection.look_up(KEYS) == 200
    assert [client.lost for client in clients] == [0] * len(clients)


def test_a_front_that_stands_delays_its_own_clients_alone(service):
    connections = service.connections(20)
    keys = {one: [nth, 2 * nth, ROWS - nth] for nth, one in enumerate(connections[0])}
    for connection in connections[0]:
        connection.send_lookup(keys[connection])
    with stopped(service.all_processes()[0]):
        for connection in connections[1]:
            assert connection.look_up(KEYS) == 200
    for connection in connections[0]:
        assert connection.checked(keys[connection]) == 200


def test_sighup_changes_settings_of_the_fronts(start):
    service = start(access_log_per_s=1000)
    connections = [ones[0] for ones in service.connections(1).values()]
    service.configure(access_log_per_s=1000, log_level="debug", max_keys_per_request=3)
    service.process.send_signal(signal.SIGHUP)

    def refused(one):
        one.send_lookup(KEYS)
        return one.take_answer()[0] == 413

    def logs_tiers(one):
        end = len(service.log)
        assert one.look_up(KEYS[:3]) == 200
        return "item.embedding_cache" in service.log[end:]

    for one in connections:
        wait_until(lambda one=one: refused(one), "the front knows the new limit")
        wait_until(lambda one=one: logs_tiers(one), "the front logs details")


def test_sigterm_answers_what_is_under_way_and_ends(start):
    service = start()
    connections = [one for ones in service.connections(10).values() for one in ones]
    pids = service.all_processes()
    regions = [service.region(number) for number in range(service.fronts)]
    with stopped(pids[-1]):
        before = sum(region[layout.SUBMITTED] for region in regions)
        for nth, one in enumerate(connections):
            one.send_lookup([nth, nth])
        wait_until(lambda: sum(region[layout.SUBMITTED] for region in regions) == before + len(connections), "all are posted")
        service.process.send_signal(signal.SIGTERM)
    for nth, one in enumerate(connections):
        assert one.checked([nth, nth]) == 200
        assert one.sock is None or one.sock.recv(1) == b""  # closed, and nothing else
    assert service.process.wait(PATIENCE_S) == 0
    assert all(map(is_gone, pids.values()))


@pytest.mark.parametrize("drains", [True, False])
def test_an_interrupt_ends_a_long_drain_and_does_not_begin_one(start, drains):
    service = start(drain_s=86_400)
    pids = service.all_processes()
    if drains:
        service.process.send_signal(signal.SIGTERM)
        wait_until(lambda: "requests are answered for 86400 s more" in service.log, "it drains")
        assert service.connect().look_up(KEYS) == 200
    service.process.send_signal(signal.SIGINT)
    assert service.process.wait(PATIENCE_S) == 0
    assert ("requests are answered for" in service.log) == drains
    assert all(map(is_gone, pids.values()))


def test_children_end_with_a_killed_parent(start):
    service = start()
    pids = service.all_processes()
    service.process.kill()
    wait_until(lambda: all(map(is_gone, pids.values())), "the children end")


@pytest.mark.skipif(not has_ipv6(), reason="this machine has no IPv6")
def test_fronts_listen_on_ipv6(start):
    service = start(host="::1")
    for ones in service.connections(1).values():
        assert ones[0].look_up(KEYS) == 200
    assert "listening on http://[::1]:" in service.log
