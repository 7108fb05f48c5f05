"""What a soak runs on: one Redis, the processes that share it, their clients; and what is done to them."""

import json
import os
import re
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Client
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from prometheus_client.parser import text_string_to_metric_families

from hps.configuration.load import ServiceConfig
from hps.models.writer import write_sparse_model
from hps.regions.sharing import body_bytes, slab_bytes
from tests.nightly.soak.clients import LIVE
from tests.nightly.soak.ledger import DEFAULT, ENGINELESS, KILLED, PROCESSES, ROWS, STOPPED, TABLES, Ledger, encode
from tests.nightly.soak.server import command_socket
from tests.servers.child_processes import ChildProcesses
from tests.servers.redis_server import RedisServer, free_ports
from tests.servers.running_service import document_of, model_of
from tests.servers.service_processes import ENGINE, is_gone, left_over, service_processes, socket_inodes, state_of, tcp_sockets

LASTING = "b"  # is never restarted, so that a slow leak shows
_START_S, _EXIT_S, _REPLY_S = 120.0, 40.0, 120.0
_BASE_BYTES = 160 << 20  # allocators, threads, compiled kernels, RocksDB's buffers for these few rows, answers in flight
_FRONT_BYTES = 24 << 20  # of a front alone: its event loop, answers in flight, garbage
_IDLE_S = 60.0
_IDLE = {"hps_http_lookups_pending": 0, "hps_http_held_bytes": 4096}  # the question itself is held
_MOST_STOPPED_S = 3.0  # less than clients wait
_ASKED_MEANWHILE = 16  # connections to a server of which a front stands still: they reach the others, too
_MAIN_ACTOR = 63
_SERVICE: dict[str, Any] = {
    "max_body_bytes": 4 << 20,
    "max_held_bytes": 64 << 20,
    "max_keys_per_request": 8000,
    "lookup_threads": 4,
    "drain_s": 1,
}


@dataclass(slots=True)
class Memory:
    """Memory of a process, or of all processes of a server together."""

    budget_bytes: float = 0.0
    peak_bytes: int = 0
    own_bytes: list[int] = field(default_factory=list)  # of `LASTING`, twice a second; no files, and its part of what is shared

    @property
    def growth_bytes(self) -> float:
        """By how much it grew from the middle third of the soak to the last."""
        third = len(self.own_bytes) // 3
        middle, last = (np.median(self.own_bytes[part : part + third]) for part in (third, 2 * third))
        return float(last - middle)


class Stage:
    """The processes of one soak. *One per thread*; close it, whatever happens.

    Args:
        directory: for files of all kinds.
        fronts: number of front processes of each server; 0: each is one process.
        eviction: give Redis room for four fifths of the rows only.
        faults: what the processes are to do wrong on purpose.
    """

    def __init__(self, directory: Path, fronts: int, eviction: bool, faults: dict[str, list[str]]) -> None:
        self.directory, self.fronts, self._eviction, self._faults = directory, fronts, eviction, faults
        self.ledger = Ledger(directory, _MAIN_ACTOR, "soak")
        self.redis = RedisServer(directory / "redis")
        a, b, self._echo_port = free_ports(3)
        self.ports = (a, b, 0)
        self.nodes: dict[int, subprocess.Popen[str]] = {}
        self.members: dict[int, dict[int, int]] = {}  # of each process: pids of its fronts by number, and of its ENGINE
        self.memory: dict[str, Memory] = {}
        self._children = ChildProcesses()
        self._clients: list[subprocess.Popen[str]] = []

    def open(self) -> None:
        """Write the model files, and start Redis and the processes."""
        self.ledger.begin()
        for number in range(len(TABLES)):
            keys = np.arange(ROWS)
            write_sparse_model(self._model_files(number), (keys, encode(number, keys, 0)))
        self.redis.start()
        for process, name in enumerate(PROCESSES):
            (self.directory / f"{name}.json").write_text(json.dumps(self._configuration(name)))
            self.start(process)
        for process in range(len(PROCESSES)):
            self.measure(process)

    def start_clients(self, good: int, bad: int, attacks: Sequence[str], limit_s: float) -> None:
        """Start the clients and the probes, which take longer answers than the limit for a violation."""
        ports = self.ports[:2]
        echo = self._run("echo", "clients", "echo", self._echo_port, stdin=subprocess.PIPE)
        if echo.stdout is not None:
            echo.stdout.readline()
        actor = len(PROCESSES)
        probe = ("probe", self.directory, actor, limit_s, *ports, self._echo_port)
        self._clients.append(self._run("probe", "clients", *probe))
        for count in (good // 2, good - good // 2):
            actor += 1
            self._clients.append(self._run("good", "clients", "good", self.directory, actor, *ports, count))
        if bad:
            self._clients.append(self._run("bad", "bad_clients", self.directory, actor + 1, *ports, bad, *attacks))

    def end_clients(self) -> None:
        """Let clients and probes end by themselves."""
        self.ledger.stop()
        for client in self._clients:
            try:
                client.wait(90)
            except subprocess.TimeoutExpired:
                self.ledger.violation("client", problem=f"{client.args} did not end")

    def check_idle(self) -> None:
        """Without clients, nothing of any request may stay in a server."""
        for process in range(len(PROCESSES) - 1):
            deadline, left = time.monotonic() + _IDLE_S, {"unknown": 0.0}
            while left and time.monotonic() < deadline:
                with suppress(httpx.TransportError):
                    families = text_string_to_metric_families(httpx.get(f"{self._url(process)}/metrics", timeout=10).text)
                    samples = [sample for family in families for sample in family.samples]
                    left = {sample.name: sample.value for sample in samples if sample.value > _IDLE.get(sample.name, np.inf)}
                time.sleep(0.1)
            if left:
                self.ledger.violation("left over", process=PROCESSES[process], **left)

    def check_integrity(self) -> None:
        """Let each server check its invariants, once nothing changes them any more."""
        for process in range(len(PROCESSES) - 1):
            answer = httpx.get(f"{self._url(process)}/v1/debug/check", timeout=60)
            if answer.status_code != 200 or answer.json()["findings"]:
                self.ledger.violation("integrity", process=PROCESSES[process], answer=answer.text)

    def close(self) -> None:
        """Kill what still runs."""
        self._children.end()
        self.redis.kill()

    def start(self, process: int) -> None:
        """Start a process, and wait until it serves."""
        name, port = PROCESSES[process], self.ports[process]
        fronts = self.fronts if port else 0
        arguments = (self.directory, process, port, fronts, *self._faults.get(name, ()))
        self.nodes[process] = self._run(name, "server", *arguments)
        self.settle(process)
        self.ledger.generation[process] += 1

    def settle(self, process: int, gone: int = 0) -> None:
        """Wait until all processes of a server run and serve, none of which is the one that is gone."""
        deadline = time.monotonic() + _START_S
        while self.nodes[process].poll() is None:
            members = self._find(process)
            whole = len(members) == (self.fronts + 1 if self._has_fronts(process) else 0)
            if whole and gone not in members.values() and self._is_ready(process):
                break
            if time.monotonic() > deadline:
                self.ledger.violation("start", process=PROCESSES[process], problem=f"not ready within {_START_S} s")
                break
            time.sleep(0.05)
        self.members[process] = self._find(process)
        self.tell(process, "memory")

    def take_down(self, process: int) -> subprocess.Popen[str]:
        """From now on a process may be away; the caller ends it, and calls `check_gone`."""
        self.ledger.generation[process] += 1
        return self.nodes[process]

    def check_gone(self, process: int) -> None:
        """No process of a server that has ended may be left."""
        names = {pid: _member(process, number) for number, pid in self.members.pop(process).items()}
        for pid in left_over(names):
            self.ledger.violation("orphan", process=names[pid])

    def tell(self, process: int, command: str) -> dict[str, Any]:
        """Have a process do something, and return what it says. Waits for one that has just begun."""
        deadline = time.monotonic() + _REPLY_S
        while True:
            try:
                with Client(command_socket(self.directory, process)) as node:
                    node.send(command)
                    if not node.poll(max(0.0, deadline - time.monotonic())):
                        raise TimeoutError(f"no reply within {_REPLY_S} s")
                    return dict(node.recv())
            except (OSError, EOFError) as error:
                if time.monotonic() > deadline or self.nodes[process].poll() is not None:
                    self.ledger.violation("command", process=PROCESSES[process], command=command, error=repr(error))
                    return {}
            time.sleep(0.05)

    def measure(self, process: int) -> None:
        """Compute how much memory a process may take, from what its tiers hold."""
        said = self.tell(process, "memory")
        base, owned = said.get("base", 0), said.get("base", 0) + said.get("caches", 0) + _BASE_BYTES
        settings = ServiceConfig(**_SERVICE)
        slab, bodies = (size(settings, max(self.fronts, 1)) for size in (slab_bytes, body_bytes))
        count = self.fronts if self._has_fronts(process) else 0
        budgets = {PROCESSES[process]: owned + max(count, 1) * (slab + bodies) + count * _FRONT_BYTES}
        for number in self.members[process]:
            budgets[_member(process, number)] = (
                owned + count * slab if number == ENGINE else base + slab + bodies + _FRONT_BYTES
            )
        for name, budget in budgets.items():
            memory = self.memory.setdefault(name, Memory())
            memory.budget_bytes = max(memory.budget_bytes, budget)

    def watch(self) -> None:
        """Note the memory of all processes, and find those that died or were replaced; start again what ended."""
        for process, node in self.nodes.items():
            members = self.members[process]
            if node.poll() is not None:
                self.ledger.violation("died", process=PROCESSES[process], status=node.returncode)
                self.take_down(process)
                self.check_gone(process)
                self.start(process)
                continue
            for number in [number for number, pid in members.items() if is_gone(pid)]:
                self.ledger.violation("died", process=_member(process, number))
                self.settle(process, members[number])
            names = {PROCESSES[process]: node.pid, **{_member(process, one): pid for one, pid in members.items()}}
            self._note_memory(names)

    def _note_memory(self, names: dict[str, int]) -> None:
        """Note the memory of a process by its name, and of all of them under the first name."""
        whole, *_ = names
        rollups = {name: _kilobytes(pid, "smaps_rollup") for name, pid in names.items()}
        peaks = {name: _kilobytes(pid, "status").get("VmHWM", 0) for name, pid in names.items()}
        if len(names) > 1:  # peaks of processes count twice what they share, and were not at the same time
            peaks[whole] = sum(rollup.get("Pss", 0) for rollup in rollups.values())
        grown = {name: one.get("Pss_Anon", 0) + one.get("Pss_Shmem", 0) for name, one in rollups.items()}
        grown[whole] = sum(grown.values())
        for name in names:
            memory = self.memory.setdefault(name, Memory())
            memory.peak_bytes = max(memory.peak_bytes, peaks[name])
            if name.startswith(LASTING):
                memory.own_bytes.append(grown[name])

    def _has_fronts(self, process: int) -> bool:
        return bool(self.fronts and self.ports[process])

    def _find(self, process: int) -> dict[int, int]:
        if not self._has_fronts(process):
            return {}
        return service_processes(self.nodes[process].pid, self.fronts, self.ports[process])

    def _run(self, name: str, module: str, *arguments: object, **options: Any) -> subprocess.Popen[str]:
        """Start a module of this package as a process whose log has a name."""
        with (self.directory / f"{name}.log").open("a") as log:
            options = {"stdout": subprocess.PIPE if options else log, "stderr": log, **options}
            return self._children.start(sys.executable, "-m", f"tests.nightly.soak.{module}", *arguments, **options)

    def _is_ready(self, process: int) -> bool:
        try:
            return not self.ports[process] or httpx.get(f"{self._url(process)}/v2/health/ready", timeout=10).status_code == 200
        except httpx.TransportError:
            return False

    def _url(self, process: int) -> str:
        return f"http://127.0.0.1:{self.ports[process]}"

    def _model_files(self, number: int) -> Path:
        return self.directory / "models" / "-".join(TABLES[number][:2])

    def _configuration(self, name: str) -> dict[str, Any]:
        def model(model_name: str) -> dict[str, Any]:
            tables = {number: table for number, table in enumerate(TABLES) if table.model == model_name}
            return model_of(
                model_name,
                [self._model_files(number) for number in tables],
                {table.name: table.dim for table in tables.values()},
                default_value_for_each_table=[DEFAULT] * len(tables),
                max_batch_size=5000,
                gpucacheper=0.1,
                cache_refresh_percentage_per_iteration=0.1,
                hit_rate_threshold=1.1,
                num_of_worker_buffer_in_pool=4,
            )

        volatile = {
            "type": "redis_cluster",
            "address": self.redis.address,
            "num_partitions": 4,
            "overflow_margin": ROWS // 5 if self._eviction else ROWS,  # of a partition, which has a quarter of the rows
            "overflow_policy": "evict_random",
            "cache_missed_embeddings": True,
        }
        persistent = {"type": "rocks_db", "path": str(self.directory / f"rocksdb-{name}"), "num_threads": 2}
        models = [model(name) for name in dict.fromkeys(table.model for table in TABLES)]
        return document_of(*models, volatile_db=volatile, persistent_db=persistent, service=_SERVICE)


def _flushall(stage: Stage, _: np.random.Generator) -> None:
    stage.redis.client().flushall()


def _client_pause(stage: Stage, rng: np.random.Generator) -> None:
    stage.redis.client().client_pause(int(rng.integers(500, 3000)))


def _sigstop(stage: Stage, rng: np.random.Generator) -> None:
    stage.redis.pause()
    time.sleep(rng.uniform(0.5, 4))
    stage.redis.resume()


def _redis_restart(stage: Stage, rng: np.random.Generator) -> None:
    """It comes back empty."""
    stage.redis.kill()
    time.sleep(rng.uniform(0, 2))
    stage.redis.start()


def _kill(stage: Stage, rng: np.random.Generator) -> None:
    process = PROCESSES.index(("a", "user")[rng.integers(2)])
    node = stage.take_down(process)
    node.kill()
    node.wait(_EXIT_S)
    stage.check_gone(process)
    stage.start(process)


def _terminate(stage: Stage, _: np.random.Generator) -> None:
    process = PROCESSES.index("a")
    node = stage.take_down(process)
    node.send_signal(signal.SIGTERM)
    try:
        status: int | str = node.wait(_EXIT_S)
    except subprocess.TimeoutExpired:
        node.kill()
        status = f"none within {_EXIT_S} s"
    if status:
        stage.ledger.violation("exit", process=PROCESSES[process], status=status)
    stage.check_gone(process)
    stage.start(process)


def _front_kill(stage: Stage, rng: np.random.Generator) -> None:
    """It stands still before it dies, so that it is known which connections are its own: they alone may be lost."""
    process, port = PROCESSES.index("a"), stage.ports[PROCESSES.index("a")]
    pid = stage.members[process][int(rng.integers(stage.fronts))]
    with stage.ledger.during(process, KILLED):
        _signal(pid, signal.SIGSTOP, "T")
        own = {*socket_inodes(pid), "0"}  # 0: not accepted yet, perhaps by this front
        stage.ledger.lose(process, [one.remote_port for one in tcp_sockets() if one.port == port and one.inode in own])
        _signal(pid, signal.SIGKILL, "Z")
    stage.settle(process, pid)


def _front_stop(stage: Stage, rng: np.random.Generator) -> None:
    """Its clients wait; those of the others do not, and nobody loses a connection."""
    process = int(rng.integers(2))
    pid = stage.members[process][int(rng.integers(stage.fronts))]
    end = time.monotonic() + rng.uniform(1, _MOST_STOPPED_S)
    with ExitStack() as stack:
        with stage.ledger.during(process, STOPPED):
            try:
                _signal(pid, signal.SIGSTOP, "T")
                asked = [socket.create_connection(("127.0.0.1", stage.ports[process]), 10) for _ in range(_ASKED_MEANWHILE)]
                for one in asked:
                    stack.enter_context(one).sendall(LIVE)
                time.sleep(max(0.0, end - time.monotonic()))
                answered, _, _ = select.select(asked, [], [], 0)
            finally:
                os.kill(pid, signal.SIGCONT)
        right = sum(one.recv(65536).startswith(b"HTTP/1.1 200") for one in asked)
    if not answered or right < len(asked):
        counts = {"answered_meanwhile": len(answered), "answered": right, "asked": len(asked)}
        stage.ledger.violation("front stop", process=PROCESSES[process], **counts)


def _owner_kill(stage: Stage, _: np.random.Generator) -> None:
    """Connections stay open, and get their answers, or 503, until another engine serves and is a node."""
    process = PROCESSES.index("a")
    pid = stage.members[process][ENGINE]
    with stage.ledger.during(process, ENGINELESS):
        _signal(pid, signal.SIGKILL, "Z")
        stage.settle(process, pid)


def _redeploy(stage: Stage, rng: np.random.Generator) -> None:
    stage.tell(int(rng.integers(len(PROCESSES))), "redeploy")


def _refresh(stage: Stage, rng: np.random.Generator) -> None:
    stage.tell(int(rng.integers(len(PROCESSES))), "refresh")


def _fork(stage: Stage, _: np.random.Generator) -> None:
    stage.tell(PROCESSES.index("user"), "fork")


_KINDS = (_flushall, _client_pause, _sigstop, _redis_restart, _kill, _terminate, _redeploy, _refresh, _fork)
_KINDS_OF_FRONTS = (_front_kill, _front_stop, _owner_kill)
CHAOS: dict[str, Callable[[Stage, np.random.Generator], None]] = {
    kind.__name__.removeprefix("_"): kind for kind in (*_KINDS, *_KINDS_OF_FRONTS)
}
"""What can be done to a stage. Each blocks until the stage is whole again."""

OF_FRONTS = tuple(kind.__name__.removeprefix("_") for kind in _KINDS_OF_FRONTS)


def _member(process: int, number: int) -> str:
    return f"{PROCESSES[process]} {'engine' if number == ENGINE else f'front {number}'}"


def _signal(pid: int, number: signal.Signals, state: str) -> None:
    """Send a signal, and wait until the process is in this state."""
    os.kill(pid, number)
    deadline = time.monotonic() + _EXIT_S
    while state_of(pid) != state and time.monotonic() < deadline:
        time.sleep(0.001)


def _kilobytes(pid: int, file: str) -> dict[str, int]:
    """Return the amounts of memory in a file of a process, in bytes; empty if the process is gone."""
    with suppress(OSError):
        lines = re.findall(r"^(\w+):\s+(\d+) kB", Path(f"/proc/{pid}/{file}").read_text(), re.MULTILINE)
        return {name: int(size) << 10 for name, size in lines}
    return {}
