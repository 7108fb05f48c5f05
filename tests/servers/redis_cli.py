"""Does what the compose file asks of redis-cli, where that is not installed: one command, or the creation of a cluster."""

import argparse
import os
import socket
import sys
import time
from typing import Any

import hiredis

_MEET_S = 60.0


def ask(host: str, port: int, *arguments: object) -> Any:
    """Send one command, after AUTH where REDISCLI_AUTH is set; returns hiredis' reply, which may be a ReplyError."""
    password = os.environ.get("REDISCLI_AUTH")
    commands = [("AUTH", password)] if password else []
    reader = hiredis.Reader(encoding="utf-8", errors="replace")
    with socket.create_connection((host, port), 10) as connection:
        for command in (*commands, arguments):
            connection.sendall(hiredis.pack_command(tuple(map(str, command))))
            while (reply := reader.gets()) is False:
                received = connection.recv(65536)
                if not received:
                    raise ConnectionError(f"{host}:{port} closed the connection")
                reader.feed(received)
    return reply


def create_cluster(nodes: list[tuple[str, int]], replicas: int) -> None:
    """Join nodes as `redis-cli --cluster create` does: the first are masters and share the slots, the others copy them."""
    masters = nodes[: len(nodes) // (replicas + 1)]
    for number, node in enumerate(masters):
        share = range(16384)[number * 16384 // len(masters) : (number + 1) * 16384 // len(masters)]
        _done(ask(*node, "CLUSTER", "ADDSLOTSRANGE", share[0], share[-1]))
    for number, node in enumerate(nodes):
        _done(ask(*node, "CLUSTER", "SET-CONFIG-EPOCH", number + 1))
        _done(ask(*node, "CLUSTER", "MEET", *nodes[0]))
    deadline = time.monotonic() + _MEET_S
    for number, node in enumerate(nodes[len(masters) :]):
        master = ask(*masters[number % len(masters)], "CLUSTER", "MYID")
        while isinstance(reply := ask(*node, "CLUSTER", "REPLICATE", master), hiredis.ReplyError):  # they have not met yet
            if time.monotonic() > deadline:
                raise reply
            time.sleep(0.1)


def _done(reply: Any) -> None:
    if isinstance(reply, hiredis.ReplyError):
        raise reply


def main() -> None:
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("-h", dest="host", default="127.0.0.1")
    parser.add_argument("-p", dest="port", type=int, default=6379)
    parser.add_argument("--cluster", action="store_true")
    parser.add_argument("--cluster-replicas", type=int, default=0)
    parser.add_argument("--cluster-yes", action="store_true")
    parser.add_argument("words", nargs="+")
    given = parser.parse_args()
    if given.cluster:
        nodes = [(host, int(port)) for host, _, port in (word.rpartition(":") for word in given.words[1:])]
        create_cluster(nodes, given.cluster_replicas)
        return
    print(ask(given.host, given.port, *given.words))  # noqa: T201 - like redis-cli, on standard output


if __name__ == "__main__":
    sys.exit(main())
