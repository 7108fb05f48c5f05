"""Processes that are forked after an HPS was made, as prefork servers, `multiprocessing` and data loaders fork them."""

import json
import sys
from contextlib import nullcontext

import numpy as np
import pytest

import hps
from hps.testing.waiting import PATIENCE_S
from tests.servers.redis_server import RedisServer, rows_of
from tests.servers.running_service import document_of, model_of

DIM, ROWS, TAG = 8, 2000, "hps_et.m.a"

PROGRAM = """
import gc, json, os, sys, threading, time
import numpy as np
import hps

ROWS, DIM = 2000, 8
server = hps.HPS(json.loads(sys.argv[1]))


def vectors_of(keys):
    return np.repeat(np.asarray(keys, np.float32)[:, None], DIM, axis=1)


def wrong(server, lookups):
    random, count = np.random.default_rng(os.getpid()), 0
    for _ in range(lookups):
        keys = random.integers(0, ROWS, 500)
        count += int((server.lookup(keys, "m", "a") != vectors_of(keys)).any())
    return count


def refused(call):
    try:
        call()
    except hps.ForkedProcessError as error:
        return "fork" in str(error)
    return False


def ended(children):
    return [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
"""

REFUSALS = """
def child():
    keys = np.arange(10)
    calls = [
        *[lambda: server.lookup(keys, "m", "a"), lambda: server.lookup_tables({"a": keys}, "m"), lambda: prepared.run()],
        *[lambda: server.prepare({"a": 3}, "m"), lambda: server.insert(keys, vectors_of(keys), "m", "a")],
        *[lambda: server.delete(keys, "m", "a"), lambda: server.refresh("m"), lambda: server.undeploy("m")],
        lambda: server.deploy(server.config.models[0]),
        lambda: deployment.chain.fetch(deployment.tables[0], keys, vectors_of(keys), keys < 0),
    ]
    return [refused(call) for call in calls]


inserted = 0


def insert(count):
    global inserted
    for _ in range(count):
        keys = ROWS + inserted + np.arange(10)
        server.insert(keys, vectors_of(keys), "m", "a")
        inserted += 10


deployment = server.model("m")
prepared = server.prepare({"a": 3}, "m")
insert(5)
writer = threading.Thread(target=insert, args=(50,))
writer.start()
children = []
for way in ("exit", "close", "drop", "_exit", "idle"):
    if not (pid := os.fork()):
        if way != "idle" and not all(child()):
            os._exit(9)
        if way == "close":
            server.close()
        if way == "drop":
            del server, deployment
            gc.collect()
        if way == "_exit":
            os._exit(7)
        sys.exit(7)
    children.append(pid)
writer.join()
statuses = ended(children)
insert(5)
print(json.dumps([statuses, inserted, wrong(server, 5)]))
server.close()
"""

SHARED = """
def link_of(name):
    try:
        return os.readlink(f"/proc/self/fd/{name}")
    except OSError:  # of the directory that was listed
        return ""


def sockets():
    return [link for name in os.listdir("/proc/self/fd") if "socket" in (link := link_of(name))]


assert sockets()
children = []
for _ in range(3):
    if not (pid := os.fork()):
        if sockets():
            os._exit(8)  # the parent's connections
        key = ROWS + np.arange(10) * os.getpid()
        server.insert(key, vectors_of(key), "m", "a")
        failures = wrong(server, 100) + int((server.lookup(key, "m", "a") != vectors_of(key)).any())
        grandchild = os.fork()
        failures += wrong(server, 20)
        if grandchild:
            failures += ended([grandchild])[0]
        server.close()
        sys.exit(failures)
    children.append(pid)
failures = wrong(server, 100)
print(json.dumps([ended(children), failures + wrong(server, 5)]))
"""

AFRESH = """
import tempfile
from multiprocessing import get_context

document = json.loads(sys.argv[1])
document["persistent_db"]["path"] = tempfile.mkdtemp(dir=document["persistent_db"]["path"])


def anew(results):
    results.put(refused(lambda: hps.HPS(document)))


if sys.argv[2] == "closed":
    server.close()
context = get_context("fork")
results = context.Queue()
process = context.Process(target=anew, args=(results,))
process.start()
print(json.dumps([results.get(timeout=60), process.join(60), process.exitcode]))
"""


@pytest.fixture
def model(tmp_path):
    keys = np.arange(ROWS)
    hps.write_sparse_model(tmp_path / "t", (keys, np.repeat(keys.astype(np.float32)[:, None], DIM, axis=1)))
    return model_of("m", [tmp_path / "t"], {"a": DIM}, gpucacheper=0.5, hit_rate_threshold=1.1, refresh_interval=0.001)


def run(children, program, document, *arguments):
    process = children.start(sys.executable, "-c", PROGRAM + program, json.dumps(document), *arguments)
    output, errors = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0, errors
    return json.loads(output)


@pytest.mark.parametrize(
    ("kind", "gpucache"),
    [("rocks_db", True), ("row_files", True), ("hash_map", False), pytest.param("redis", False, marks=pytest.mark.redis)],
)
def test_a_forked_child_is_refused_and_the_parent_unharmed(kind, gpucache, model, tmp_path, children):
    with RedisServer(tmp_path / "redis") if kind == "redis" else nullcontext() as server:
        stored = {"persistent": tmp_path / "db", "kind": "row_files" if kind == "row_files" else "rocks_db"}
        document = document_of(model | {"gpucache": gpucache}, **({} if kind == "hash_map" else stored))
        if kind == "redis":
            document["volatile_db"] = {"type": "redis_cluster", "address": server.address}
        statuses, inserted, wrong = run(children, REFUSALS, document)
    assert (statuses, wrong) == ([7] * 5, 0)
    if kind != "hash_map":  # everything that the parent acknowledged is there
        document = document_of(model, **stored, volatile_db={"type": "disabled"})
        document["persistent_db"]["initialize_after_startup"] = False
        keys = np.arange(ROWS + inserted)
        with hps.HPS(document) as server:
            for some in np.array_split(keys, 10):
                np.testing.assert_array_equal(server.lookup(some, "m", "a")[:, 0], some)


@pytest.mark.redis
def test_forked_children_open_connections_of_their_own_to_redis(model, tmp_path, children):
    with RedisServer(tmp_path / "redis") as server:
        document = document_of(model | {"gpucache": False}, volatile_db={"type": "redis_cluster", "address": server.address})
        assert run(children, SHARED, document) == [[0] * 3, 0]
        for row in rows_of([server.client()], TAG, 16).items():
            np.testing.assert_array_equal(np.frombuffer(row[1], np.float32), np.full(DIM, row[0], np.float32))


@pytest.mark.parametrize("parent", ["open", "closed"])
def test_a_child_cannot_use_rocks_db_anew_where_its_parent_used_it(parent, model, tmp_path, children):
    assert run(children, AFRESH, document_of(model, persistent=tmp_path / "db"), parent) == [True, None, 0]
