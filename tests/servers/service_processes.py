"""The processes of an `hps serve` as Linux sees them: who is who, how much memory each has, whose a connection is."""

import os
import re
import signal
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from hps.regions.layout import Memory

_GONE_S = 40.0  # a stopping front waits 10 s for its requests, and the engine for its threads
ENGINE = -1
"""Stands for the engine where fronts have numbers."""


class TCPSocket(NamedTuple):
    """A TCP socket of this machine; its inode is 0 until it is accepted."""

    port: int
    remote_port: int
    state: str
    inode: str

    @property
    def listens(self) -> bool:
        return self.state == "0A"


def tcp_sockets() -> Iterator[TCPSocket]:
    """Yield each TCP socket of this machine (proc(5), /proc/net/tcp)."""
    for name in ("tcp", "tcp6"):
        path = Path(f"/proc/net/{name}")
        for line in path.read_text().splitlines()[1:] if path.exists() else ():
            words = line.split()
            yield TCPSocket(*(int(words[nth].rpartition(":")[2], 16) for nth in (1, 2)), words[3], words[9])


def socket_inodes(pid: int) -> set[str]:
    """Return the inodes of the sockets that a process has open."""
    found = set()
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):
            if match := re.fullmatch(r"socket:\[(\d+)\]", os.readlink(descriptor)):
                found.add(match[1])
    return found


def children_of(pid: int) -> list[int]:
    """Return the children of a process that has one thread."""
    return [*map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())]


def service_processes(parent: int, fronts: int, port: int) -> dict[int, int]:
    """Return the pids of the fronts by number, and of the ENGINE, as far as they have begun.

    The engine maps the regions of all fronts, and a front its own; fronts listen.
    """
    listening = {socket.inode for socket in tcp_sockets() if socket.port == port and socket.listens}
    found = {}
    for child in children_of(parent):
        try:
            regions = set(re.findall(r"memfd:hps-frontend-(\d+)", Path(f"/proc/{child}/maps").read_text()))
            listens = bool(listening & socket_inodes(child))
        except OSError:  # it ends
            continue
        if listens and len(regions) == 1:
            found[int(regions.pop())] = child
        elif not listens and len(regions) == fronts:
            found[ENGINE] = child
    return found


def region_of(pid: int, number: int) -> Memory:
    """Map the region that a front shares with the engine, as only a process that broke into the front can.

    Args:
        number: of the front.
    """
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        if f"memfd:hps-frontend-{number}" in os.readlink(descriptor):
            opened = os.open(descriptor, os.O_RDWR)
            try:
                return Memory(opened)
            finally:
                os.close(opened)
    raise AssertionError("the front has no region")


def state_of(pid: int) -> str:
    """Return the state of a process by its letter in /proc/PID/stat, e.g. T: stopped; Z if it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return "Z"


def is_gone(pid: int) -> bool:
    return state_of(pid) == "Z"


def left_over(pids: Iterable[int]) -> list[int]:
    """Wait until processes are gone. Returns those that are not within 40 s, which are killed."""
    deadline, left = time.monotonic() + _GONE_S, list(pids)
    while left and time.monotonic() < deadline:
        time.sleep(0.02)
        left = [pid for pid in left if not is_gone(pid)]
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    return left
