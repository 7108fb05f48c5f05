"""What a soak runs on: one Redis, the processes that share it, their clients; and what is done to them."""

import http.client
import json
import os
import select
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from prometheus_client.parser import text_string_to_metric_families

from hps.models.writer import write_sparse_model
from tests.servers.child_processes import ChildProcesses
from tests.servers.redis_server import RedisServer, free_ports
from tests.soak.ledger import DEFAULT, FRONT, OWNER, PROCESSES, ROWS, TABLES, Ledger, encode

LASTING = "b"  # is never restarted, so that a slow leak shows
MAX_BODY_BYTES, MAX_HELD_BYTES = 4 << 20, 64 << 20
_START_S, _EXIT_S, _REPLY_S, _SETTLE_S = 120.0, 40.0, 120.0, 1.0
_BASE_BYTES = 160 << 20  # allocators, threads, compiled kernels, RocksDB's buffers for these few rows, answers in flight
_FRONT_BYTES = 80 << 20  # of a front, for itself
_IDLE_S = 60.0
_IDLE = {"hps_http_lookups_pending": 0, "hps_http_held_bytes": 4096}  # the question itself is held
_MAIN_ACTOR = 63


class Stage:
    """The processes of one soak. *One per thread*; close it, whatever happens.

    Args:
        directory: for files of all kinds.
        eviction: give Redis room for four fifths of the rows only.
        fronts: front processes of each server; 0: each server is one process.
        faults: what the processes are to do wrong on purpose.
    """

    def __init__(self, directory: Path, eviction: bool, fronts: int, faults: dict[str, list[str]]) -> None:
        self.directory, self._eviction, self.fronts, self._faults = directory, eviction, fronts, faults
        self.ledger = Ledger(directory, _MAIN_ACTOR, "soak")
        self.redis = RedisServer(directory / "redis")
        a, b, self._echo_port = free_ports(3)
        self.ports = (a, b, 0)
        self.nodes: dict[int, subprocess.Popen[str]] = {}
        self.peak_bytes = dict.fromkeys(PROCESSES, 0)
        self.budget_bytes = dict.fromkeys(PROCESSES, 0)
        self.resident_bytes: list[int] = []  # of LASTING, twice a second
        self.front_bytes: list[int] = []  # of its fronts
        self.killed = dict.fromkeys(PROCESSES, 0)  # fronts and owners
        self._children = ChildProcesses()
        self._clients: list[subprocess.Popen[str]] = []

    @property
    def growth_bytes(self) -> float:
        """By how much `LASTING` grew from the middle third of the soak to the last."""
        third = len(self.resident_bytes) // 3
        middle, last = (np.median(self.resident_bytes[part : part + third]) for part in (third, 2 * third))
        return float(last - middle)

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
        self._clients.append(self._run("peers", "peers", self.directory, actor + 1))
        if bad:
            self._clients.append(self._run("bad", "bad_clients", self.directory, actor + 2, *ports, bad, *attacks))

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
        for process, port in enumerate(self.ports):
            deadline = time.monotonic() + _IDLE_S
            left: dict[str, float] = {"unknown": 0.0}
            while port and left and time.monotonic() < deadline:
                with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
                    families = text_string_to_metric_families(answer.read().decode())
                    left = {
                        one.name: one.value
                        for family in families
                        for one in family.samples
                        if one.value > _IDLE.get(one.name, np.inf)
                    }
                time.sleep(0.1)
            if port and left:
                self.ledger.violation("left over", process=PROCESSES[process], **left)

    def close(self) -> None:
        """Kill what still runs."""
        self._children.end()
        self.redis.kill()

    def start(self, process: int) -> None:
        """Start a process, and wait until it serves."""
        name = PROCESSES[process]
        arguments = (self.directory, process, self.ports[process], self.fronts, *self._faults.get(name, ()))
        self.nodes[process] = self._run(name, "server", *arguments, stdin=subprocess.PIPE)
        if self.ports[process]:
            self._wait(process, "/v2/health/ready")
            self.ledger.generation[process] += 1
        else:
            self.tell(process, "memory")
            self.ledger.generation[process] += 1

    def take_down(self, process: int) -> subprocess.Popen[str]:
        """From now on a process may be away; the caller ends it."""
        self.ledger.generation[process] += 1
        return self.nodes[process]

    def tell(self, process: int, command: str) -> dict[str, Any]:
        """Have a process do something, and return what it says."""
        node = self.nodes[process]
        if node.stdin is None or node.stdout is None:
            raise RuntimeError("a process without pipes")
        try:
            node.stdin.write(f"{command}\n")
            node.stdin.flush()
            ready, _, _ = select.select([node.stdout], [], [], _REPLY_S)
            line = node.stdout.readline() if ready else ""
            return dict(json.loads(line))
        except (OSError, ValueError) as error:
            self.ledger.violation("command", process=PROCESSES[process], command=command, error=repr(error))
            return {}

    def measure(self, process: int) -> None:
        """Compute how much memory a process may take, from what its tiers hold."""
        said = self.tell(process, "memory")
        name, budget = PROCESSES[process], said.get("base", 0) + said.get("caches", 0) + MAX_HELD_BYTES + _BASE_BYTES
        budget += _FRONT_BYTES * (self.fronts if self.ports[process] else 0)
        self.budget_bytes[name] = max(self.budget_bytes[name], budget)

    def watch(self) -> None:
        """Note the memory of all processes, and start again those that died."""
        for process, node in self.nodes.items():
            name = PROCESSES[process]
            if node.poll() is not None:
                self.ledger.violation("died", process=name, status=node.returncode)
                self.take_down(process)
                self.start(process)
                continue
            owner, fronts = self.processes(process)
            sizes = {pid: _proportional_bytes(pid) for pid in (node.pid, *([owner] if owner else []), *fronts)}
            resident = sum(sizes.values())
            self.peak_bytes[name] = max(self.peak_bytes[name], resident)
            if name == LASTING:
                self.resident_bytes.append(resident)
                self.front_bytes.append(sum(sizes[pid] for pid in fronts))

    def processes(self, process: int) -> tuple[int, list[int]]:
        """The owner and the fronts of a server; 0 and none if it is one process."""
        parent = self.nodes[process].pid
        try:
            children = [int(pid) for pid in Path(f"/proc/{parent}/task/{parent}/children").read_text().split()]
        except OSError:
            children = []
        if not self.fronts or not self.ports[process]:
            return 0, []
        fronts = [pid for pid in children if _is_front(pid)]
        return next((pid for pid in children if pid not in fronts), 0), fronts

    def whole(self, process: int) -> None:
        """Wait until a server has an owner and all its fronts again, and is ready."""
        deadline = time.monotonic() + _START_S
        while not self.processes(process)[0] or len(self.processes(process)[1]) < self.fronts:
            if time.monotonic() > deadline:
                self.ledger.violation("start", process=PROCESSES[process], problem=f"not whole within {_START_S} s")
                return
            time.sleep(0.05)
        self._wait(process, "/v2/health/ready")

    def end(self, process: int, number: int) -> int | str:
        """Send a signal to a server, and wait until it and its children have ended. Returns its status."""
        node = self.take_down(process)
        owner, fronts = self.processes(process)
        node.send_signal(number)
        try:
            status: int | str = node.wait(_EXIT_S)
        except subprocess.TimeoutExpired:
            node.kill()
            status = f"none within {_EXIT_S} s"
        deadline = time.monotonic() + _EXIT_S
        for pid in filter(None, (owner, *fronts)):
            while _lives(pid):
                if time.monotonic() > deadline:
                    self.ledger.violation("orphan", process=PROCESSES[process])
                    os.kill(pid, signal.SIGKILL)
                time.sleep(0.02)
        return status

    def _run(self, name: str, module: str, *arguments: object, **options: Any) -> subprocess.Popen[str]:
        """Start a module of this package as a process whose log has a name."""
        with (self.directory / f"{name}.log").open("a") as log:
            options = {"stdout": subprocess.PIPE if options else log, "stderr": log, **options}
            return self._children.start(sys.executable, "-m", f"tests.soak.{module}", *arguments, **options)

    def _wait(self, process: int, path: str) -> None:
        deadline = time.monotonic() + _START_S
        while self.nodes[process].poll() is None and time.monotonic() < deadline:
            connection = http.client.HTTPConnection("127.0.0.1", self.ports[process], timeout=10)
            try:
                connection.request("GET", path)
                if connection.getresponse().status == 200:
                    return
            except (OSError, http.client.HTTPException):
                pass
            finally:
                connection.close()
            time.sleep(0.05)
        self.ledger.violation("start", process=PROCESSES[process], problem=f"{path} was not 200 within {_START_S} s")

    def _model_files(self, number: int) -> Path:
        return self.directory / "models" / "-".join(TABLES[number][:2])

    def _configuration(self, name: str) -> dict[str, Any]:
        def model(model_name: str) -> dict[str, Any]:
            tables = [(number, table) for number, table in enumerate(TABLES) if table.model == model_name]
            return {
                "model": model_name,
                "sparse_files": [str(self._model_files(number)) for number, _ in tables],
                "embedding_table_names": [table.name for _, table in tables],
                "embedding_vecsize_per_table": [table.dim for _, table in tables],
                "maxnum_catfeature_query_per_table_per_sample": [1] * len(tables),
                "default_value_for_each_table": [DEFAULT] * len(tables),
                "deployed_device_list": [0],
                "max_batch_size": 5000,
                "gpucacheper": 0.1,
                "cache_refresh_percentage_per_iteration": 0.1,
                "hit_rate_threshold": 1.1,
                "num_of_worker_buffer_in_pool": 4,
            }

        return {
            "device": "cpu",
            "volatile_db": {
                "type": "redis_cluster",
                "address": self.redis.address,
                "num_partitions": 4,
                "overflow_margin": ROWS // 5 if self._eviction else ROWS,  # of a partition, which has a quarter of the rows
                "overflow_policy": "evict_random",
                "cache_missed_embeddings": True,
            },
            "persistent_db": {"type": "rocks_db", "path": str(self.directory / f"rocksdb-{name}"), "num_threads": 2},
            "service": {
                "max_body_bytes": MAX_BODY_BYTES,
                "max_held_bytes": MAX_HELD_BYTES,
                "max_keys_per_request": 8000,
                "lookup_threads": 4,
            },
            "models": [model(name) for name in dict.fromkeys(table.model for table in TABLES)],
        }


def _is_front(pid: int) -> bool:
    """Whether a child of a server is a front: it has one thread only. An owner that begins has, too, but not for long."""
    try:
        return len(os.listdir(f"/proc/{pid}/task")) == 1
    except OSError:
        return False


def _lives(pid: int) -> bool:
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


def _proportional_bytes(pid: int) -> int:
    """Memory of a process, in which what is shared counts in parts; 0 if it has ended."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) << 10 for line in lines if line.startswith("Pss:")), 0)


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
    stage.end(process, signal.SIGKILL)
    stage.start(process)


def _terminate(stage: Stage, _: np.random.Generator) -> None:
    process = PROCESSES.index("a")
    if status := stage.end(process, signal.SIGTERM):
        stage.ledger.violation("exit", process=PROCESSES[process], status=status)
    stage.start(process)


def _front_kill(stage: Stage, rng: np.random.Generator) -> None:
    """Its own connections break, and no other."""
    process = PROCESSES.index("a")
    _, fronts = stage.processes(process)
    with stage.ledger.disturbing(process, FRONT):
        os.kill(fronts[rng.integers(len(fronts))], signal.SIGKILL)
        stage.killed[PROCESSES[process]] += 1
        time.sleep(_SETTLE_S)
        stage.whole(process)


def _front_stop(stage: Stage, rng: np.random.Generator) -> None:
    """Its clients wait, and no other."""
    process = int(rng.integers(2))
    _, fronts = stage.processes(process)
    front = fronts[rng.integers(len(fronts))]
    with stage.ledger.disturbing(process, FRONT):
        os.kill(front, signal.SIGSTOP)
        time.sleep(rng.uniform(0.5, 4))
        os.kill(front, signal.SIGCONT)
        time.sleep(_SETTLE_S)


def _owner_kill(stage: Stage, rng: np.random.Generator) -> None:
    """Every connection stays open, and is answered by 503 until there is another owner."""
    process = PROCESSES.index("a")
    owner, _ = stage.processes(process)
    with stage.ledger.disturbing(process, OWNER):
        os.kill(owner, signal.SIGKILL)
        stage.killed[PROCESSES[process]] += 1
        time.sleep(_SETTLE_S)
        stage.whole(process)
        stage.tell(process, "memory")  # its writers and checkers are there again


def _redeploy(stage: Stage, rng: np.random.Generator) -> None:
    stage.tell(int(rng.integers(len(PROCESSES))), "redeploy")


def _refresh(stage: Stage, rng: np.random.Generator) -> None:
    stage.tell(int(rng.integers(len(PROCESSES))), "refresh")


def _fork(stage: Stage, _: np.random.Generator) -> None:
    stage.tell(PROCESSES.index("user"), "fork")


OF_FRONTS = ("front_kill", "front_stop", "owner_kill")
CHAOS: dict[str, Callable[[Stage, np.random.Generator], None]] = {
    "flushall": _flushall,
    "client_pause": _client_pause,
    "sigstop": _sigstop,
    "redis_restart": _redis_restart,
    "kill": _kill,
    "terminate": _terminate,
    "front_kill": _front_kill,
    "front_stop": _front_stop,
    "owner_kill": _owner_kill,
    "redeploy": _redeploy,
    "refresh": _refresh,
    "fork": _fork,
}
"""What can be done to a stage. Each blocks until the stage is whole again."""
