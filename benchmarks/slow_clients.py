"""Clients that are slow, all in one process, a quarter of each of four kinds; run by `bench_fronts --slow`.

    python -m benchmarks.slow_clients PORT CLIENTS

The kinds: half a head; a head of which a byte comes each second; half a body; several lookups whose answers are not read. One
that the service closes connects again within half a second. Prints a line once all are connected, and at the end of its input a
JSON object: how many connections were made, and how many the service has closed.
"""

import json
import select
import socket
import sys
import time
from contextlib import suppress
from dataclasses import dataclass

import numpy as np

from benchmarks.served import head

KINDS = ("head", "drip", "body", "unread")
_KEYS = 1000
_LOOKUPS = 16  # of a client that does not read
_WINDOW_BYTES = 4096
_CONNECT_S = 5.0
_PAUSE_S = 0.5
_DRIP_S = 1.0


@dataclass(eq=False, slots=True)
class _Client:
    kind: str
    socket: socket.socket
    sent: int


class SlowClients:
    """Keeps slow clients connected to a port. *One thread.*"""

    def __init__(self, port: int) -> None:
        self._port, self._epoll = port, select.epoll()
        keys = np.arange(_KEYS)
        tensor = {"name": "t0", "shape": [_KEYS], "datatype": "INT64", "parameters": {"binary_data_size": keys.nbytes}}
        text = json.dumps({"inputs": [tensor], "parameters": {"binary_data_output": True}}).encode()
        body = text + keys.tobytes()
        start = head("/v2/models/m/infer", len(body), len(text))
        self._request = start + body
        self._first = {"head": len(start) // 2, "drip": 1, "body": len(start) + len(body) // 2}
        self._clients: dict[int, _Client] = {}
        self._gone: list[str] = []
        self._dripped = 0.0
        self.made = self.closed = 0

    def add(self, kind: str) -> None:
        """Connect a client of a kind, and send what it sends at first."""
        connection = socket.socket()
        if kind == "unread":
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _WINDOW_BYTES)
        connection.settimeout(_CONNECT_S)
        try:
            connection.connect(("127.0.0.1", self._port))
        except OSError:
            connection.close()
            self._gone.append(kind)
            return
        connection.setblocking(False)
        client = self._clients[connection.fileno()] = _Client(kind, connection, self._first.get(kind, 0))
        with suppress(OSError):
            connection.send(self._request[: client.sent] or _LOOKUPS * self._request)
        self._epoll.register(connection, 0 if kind == "unread" else select.EPOLLIN)  # 0: only the end of the connection
        self.made += 1

    def stay(self, seconds: float) -> None:
        """Be slow for a while."""
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            for number, _ in self._epoll.poll(left):
                self._follow(self._clients[number], select.EPOLLIN)
            if time.monotonic() - self._dripped >= _DRIP_S:
                self._dripped = time.monotonic()
                for client in [one for one in self._clients.values() if one.kind == "drip"]:
                    self._follow(client, select.EPOLLOUT)
        gone, self._gone = self._gone, []
        for kind in gone:
            self.add(kind)

    def _follow(self, client: _Client, event: int) -> None:
        try:
            if event == select.EPOLLOUT:
                client.sent += client.socket.send(self._request[client.sent : client.sent + 1])
                return
            if client.kind != "unread" and client.socket.recv(4096):
                return  # a refusal; its end follows
        except BlockingIOError:
            return
        except OSError:
            pass
        del self._clients[client.socket.fileno()]
        client.socket.close()
        self.closed += 1
        self._gone.append(client.kind)


def main(port: int, count: int) -> None:
    """Be slow until the end of the input."""
    clients = SlowClients(port)
    for number in range(count):
        clients.add(KINDS[number % len(KINDS)])
        if number % 100 == 99:
            clients.stay(0.01)
    print("connected", flush=True)
    while not select.select([sys.stdin], [], [], 0)[0]:
        clients.stay(_PAUSE_S)
    print(json.dumps({"slow_connections": clients.made, "slow_closed": clients.closed}), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
