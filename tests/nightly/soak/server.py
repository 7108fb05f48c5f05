"""A process of the soak: a parameter server that is written to, checked from inside, told what to do, and served over HTTP.

python -m tests.nightly.soak.server DIRECTORY PROCESS PORT FRONTS [FAULT...]

PROCESS is the place in `PROCESSES`; with port 0 nothing is served. With FRONTS, this becomes the parent of front processes and
of an owner, which is the `Node`. Commands come over a unix socket (`command_socket`), where the next owner takes them, too. A
FAULT is made on purpose, so that a soak can be seen to fail.
"""

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Listener
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

import hps
from hps.cache.cpu import cache
from hps.configuration.load import load_configuration
from hps.serve.frontend.frontend import Frontend
from hps.serve.server import serve
from hps.types import BoolArray, FloatArray, KeyArray
from tests.nightly.soak.ledger import ABSENT, DEFAULT, PROCESSES, ROWS, TABLES, Bounds, Ledger, draw, encode

_OWNERS = len(PROCESSES) + 1  # the last share of the keys belongs to all
_WRITE_KEYS, _CHECK_KEYS, _AUDIT_KEYS = 32, 200, 4000
_WRITE_PAUSE_S, _CHECK_PAUSE_S = 0.1, 0.1
_LOOKUPS_OF_A_FORK, _FORK_S = 20, 30
_DEPLOY_S = 60.0
_MOST_LEAKED = 64


class Node:
    """One process of the soak, and the threads that write to it and check it.

    Args:
        ledger: what all share.
        process: which of `PROCESSES` this is.
        server: its parameter server.
    """

    def __init__(self, ledger: Ledger, process: int, server: hps.HPS) -> None:
        self._ledger, self._process, self._server = ledger, process, server
        seed = time.monotonic_ns()  # a restarted process goes other ways than before
        loops: tuple[Callable[[np.random.Generator], None], ...] = (self._write, self._check)
        self._threads = [
            threading.Thread(target=self._repeat, args=(loop, np.random.default_rng([seed, number])), daemon=True)
            for number, loop in enumerate(loops)
        ]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def audit(self) -> None:
        """Check every key of every table once."""
        for table in range(len(TABLES)):
            for keys in np.array_split(np.arange(ROWS + ABSENT), (ROWS + ABSENT) // _AUDIT_KEYS + 1):
                self._ask("audit", table, keys)
        self._ledger.count(audits=1)

    def redeploy(self) -> None:
        """Take a model out of service and put it back."""
        model = next(model for model in self._server.config.models if model.model == "reloaded")
        self._server.undeploy(model.model)
        deadline = time.monotonic() + _DEPLOY_S
        while True:
            try:
                self._server.deploy(model)
                return
            except hps.HPSError as error:  # a database that does not answer yet
                if time.monotonic() > deadline:
                    self._ledger.violation("redeploy", process=PROCESSES[self._process], error=str(error))
                    return
                time.sleep(1)

    def refresh(self) -> None:
        """Read all resident keys again."""
        for model in self._server.models:
            try:
                self._server.refresh(model)
            except hps.DatabaseError:  # a database that does not answer
                self._ledger.count(refused=1)

    def fork(self) -> None:
        """Look up in a forked child, which may be refused, while this process goes on; neither may get anything wrong."""
        reader, writer = os.pipe()
        known = self._ledger.acknowledged[self._process, 0].copy()  # the child cannot know what is written later
        child = os.fork()
        if not child:
            try:
                signal.alarm(_FORK_S)
                os.write(writer, json.dumps(self._of_child(known)).encode())
            finally:
                os._exit(0)
        os.close(writer)
        with open(reader, "rb") as pipe:
            said = pipe.read()
        os.waitpid(child, 0)
        if not said:
            self._ledger.violation("fork", problem=f"the child died, or hung for {_FORK_S} s")
        for problem in json.loads(said or b"[]"):
            self._ledger.violation("fork", problem=problem)
        self._ledger.count(forks=1)

    def memory(self) -> dict[str, int]:
        """Bytes that the embedding caches hold."""
        deployed = [self._server.model(name) for name in self._server.models]
        caches = [(cache, len(model.tables)) for model in deployed for cache in model.device_caches]
        return {"caches": sum(cache.stats(table).size_bytes for cache, tables in caches for table in range(tables))}

    def _of_child(self, known: npt.NDArray[np.int64]) -> list[str]:
        """What is wrong in a forked child. Takes no lock that a thread of the parent's may have held."""
        rng = np.random.default_rng(os.getpid())
        problems = []
        for _ in range(_LOOKUPS_OF_A_FORK):
            keys = draw(rng, _CHECK_KEYS)
            bounds = Bounds(0, keys, known[keys])
            try:
                vectors = self._server.lookup(keys, *TABLES[0][:2])
            except hps.HPSError:
                continue
            except Exception as error:  # noqa: BLE001 - whatever else comes is what we look for
                problems.append(repr(error)[:200])
                continue
            problems += [f"the child got a vector that is {kind}" for kind in self._ledger.judge(bounds, vectors)]
        return sorted(set(problems))

    def _repeat(self, loop: Callable[[np.random.Generator], None], rng: np.random.Generator) -> None:
        while True:
            try:
                loop(rng)
            except Exception as error:  # noqa: BLE001 - an untyped error of the product is a finding
                self._ledger.violation("untyped error", process=PROCESSES[self._process], error=repr(error)[:500])
                time.sleep(1)

    def _write(self, rng: np.random.Generator) -> None:
        table = int(rng.integers(len(TABLES)))
        contested = rng.random() < 0.25
        owner = _OWNERS - 1 if contested else self._process
        keys = np.unique(draw(rng, _WRITE_KEYS, absent=False) // _OWNERS * _OWNERS + owner)
        if delete := rng.random() < 0.1:
            keys = keys[keys // _OWNERS % 16 == 0]  # the others are always there
        model, name, _ = TABLES[table]
        with self._ledger.writing(table, keys, delete=delete, contested=contested) as number:
            try:
                if delete:
                    self._server.delete(keys, model, name)
                else:
                    self._server.insert(keys, encode(table, keys, number), model, name)
            except hps.HPSError:
                self._ledger.count(failed_writes=1)
            else:
                self._ledger.acknowledged[self._process, table, keys] = number
                self._ledger.count(acknowledged=1, deletes=int(delete))
        time.sleep(rng.random() * 2 * _WRITE_PAUSE_S)

    def _check(self, rng: np.random.Generator) -> None:
        how = ("lookup", "lookup_tables", "lookup_fromdlpack")[rng.integers(3)]
        self._ask(how, int(rng.integers(len(TABLES))), draw(rng, _CHECK_KEYS))
        time.sleep(rng.random() * 2 * _CHECK_PAUSE_S)

    def _ask(self, how: str, table: int, keys: Any) -> None:
        model, name, dim = TABLES[table]
        bounds = self._ledger.bounds(self._process, table, keys)
        out = np.full((keys.size, dim), np.nan, np.float32)
        try:
            if how == "lookup_tables":
                (out,), (found,) = (
                    table.values() for table in self._server.lookup_tables({name: keys}, model, return_found=True)
                )
            elif how == "lookup_fromdlpack":
                found = self._server.lookup_fromdlpack(keys, out, model, name, return_found=True)
            else:
                out, found = self._server.lookup(keys, model, name, return_found=True)
        except hps.UnknownModelError:
            self._ledger.count(refused_reloading=1)
        except hps.HPSError:
            self._ledger.count(refused=1)
        else:
            self._ledger.check(self._process, how, bounds, out, found)


def make_faulty(faults: list[str]) -> None:
    """Make faults on purpose, in this process and those that it forks.

    Wrong vectors go to the embedding cache, where both the loop and lookups read them. Writes are lost; fronts leak
    and drop connections.
    """
    spoiling = [fault for fault in faults if fault in ("default", "torn", "foreign", "invented", "stale")]
    rng = np.random.default_rng(1)

    def spoiled(keys: KeyArray, vectors: FloatArray, chosen: BoolArray) -> FloatArray:
        vectors = vectors[: keys.size].copy()
        there = np.flatnonzero((keys < ROWS) & (chosen if chosen.size else True))
        if not there.size:
            return vectors
        first, table = there[0], int(vectors[there[0], 1])
        match spoiling[rng.integers(len(spoiling))]:
            case "default":
                vectors[first] = DEFAULT
            case "torn":
                vectors[first, -1] += 1
            case "foreign":
                vectors[first] = encode(table, keys[there[:1]] + 1, 0)[0]
            case "invented":
                vectors[first] = encode(table, keys[there[:1]], 1 << 23)[0]
            case "stale":  # few have been updated when the soak is short
                vectors[there] = encode(table, keys[there], 0)
        return vectors

    insert, update, publish = cache._insert, cache.NumpyCache.update, Frontend.publish

    def insert_spoiled(table: Any, keys: KeyArray, vectors: FloatArray, chosen: BoolArray, replace: bool) -> None:
        insert(table, keys, spoiled(keys, vectors, chosen), chosen, replace)

    def update_spoiled(self: cache.NumpyCache, table: int, keys: KeyArray, vectors: FloatArray) -> None:
        update(self, table, keys, spoiled(keys, vectors, np.empty(0, np.bool_)))

    leaked = []

    def publish_badly(self: Frontend) -> None:
        if "front-leak" in faults and len(leaked) < _MOST_LEAKED:
            leaked.append(np.ones(1 << 20))  # 8 MB
        if "drop" in faults and self.connections.order and rng.random() < 0.1:
            next(iter(self.connections.order)).transport.abort()
        publish(self)

    if spoiling:
        cache._insert, cache.NumpyCache.update = insert_spoiled, update_spoiled  # type: ignore[method-assign]
    if "lost" in faults:
        hps.HPS.insert = lambda *_: None  # type: ignore[method-assign]
    Frontend.publish = publish_badly  # type: ignore[method-assign]


def misbehave(faults: list[str]) -> None:
    """Leak, and hold the interpreter lock, for as long as the process lives."""
    leaked = []
    while True:
        if "leak" in faults and len(leaked) < _MOST_LEAKED:
            leaked.append(np.ones(1 << 20))  # 8 MB
        if "stall" in faults:
            sum(range(60_000_000))
        time.sleep(0.2)


def command_socket(directory: Path, process: int) -> str:
    """Where a process, or its present owner, takes commands."""
    return str(directory / f"{PROCESSES[process]}.sock")


def _live(directory: Path, process: int, base: int, server: hps.HPS) -> None:
    """Be a node once all models are there, and do what the stage says."""
    while not all(model.model in server.models for model in server.config.models):
        time.sleep(0.01)
    node = Node(Ledger(directory, process, PROCESSES[process]), process, server)
    node.audit()
    node.start()
    place = command_socket(directory, process)
    Path(place).unlink(missing_ok=True)  # of an owner that was killed
    with Listener(place, "AF_UNIX") as listener:
        while True:
            with listener.accept() as stage:
                command = stage.recv()
                stage.send({"did": command, "base": base, **(getattr(node, command)() or {})})


def main(directory: Path, process: int, port: int, fronts: int, faults: list[str]) -> None:
    """Run until a signal."""
    base = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    make_faulty(faults)
    configuration = load_configuration(directory / f"{PROCESSES[process]}.json")

    def begin(server: hps.HPS) -> None:
        for action in (partial(_live, directory, process, base, server), partial(misbehave, faults)):
            threading.Thread(target=action, daemon=True).start()

    if port:
        sys.exit(0 if serve(configuration, "127.0.0.1", port, on_open=begin, fronts=fronts) else 1)
    with hps.HPS(configuration) as alone:
        begin(alone)
        signal.pause()


if __name__ == "__main__":
    import logging

    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    main(Path(sys.argv[1]), *map(int, sys.argv[2:5]), sys.argv[5:])
