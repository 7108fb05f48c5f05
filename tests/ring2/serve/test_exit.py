"""Scripts that end without `close`: they end as Python scripts do, whatever runs in the background."""

import json
import sys

import numpy as np
import pytest

import hps
from hps.testing.waiting import PATIENCE_S
from tests.servers.running_service import document_of, model_of

ROWS, DIM = 20_000, 16

PROGRAM = """
import json, os, signal, sys, threading
import numpy as np
import hps, hps.parameter_server, hps.versions.deployment  # once, for all scripts


def script(document, threads, end):
    server, random = hps.HPS(document), np.random.default_rng()

    def look_up():
        while True:
            try:
                server.lookup(random.integers(0, 20_000, 20_000), "m", "a")
            except hps.NotReadyError:
                return

    for _ in range(threads):
        threading.Thread(target=look_up, daemon=True).start()
    for _ in range(5):
        server.lookup(random.integers(0, 20_000, 20_000), "m", "a")
    if end == "interrupt":
        os.kill(os.getpid(), signal.SIGINT)
        look_up()


statuses = []
for case in json.loads(sys.argv[1]):
    pid = os.fork()  # nothing is open yet
    if not pid:
        try:
            script(*case)
        except KeyboardInterrupt:
            sys.exit(130)
        sys.exit(0)
    statuses.append(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
print(json.dumps(statuses))
"""
CASES = [
    (True, 0, "return"),  # insertions are under way
    (False, 1, "return"),  # lookups of a daemon thread are
    (False, 1, "interrupt"),
]


@pytest.mark.parametrize("runs", [1])
def test_a_script_without_close_ends_as_it_says(runs, tmp_path, children):
    hps.write_sparse_model(tmp_path / "t", (np.arange(ROWS), np.ones((ROWS, DIM), np.float32)))
    more = {"gpucacheper": 0.5, "hit_rate_threshold": 0.0, "max_batch_size": 20_000, "num_of_worker_buffer_in_pool": 4}
    more |= {"refresh_interval": 0.001, "refresh_device_share": 1.0, "workspace_timeout_s": 60}
    scripts = []
    for gpucache, threads, end in CASES * runs:
        model = model_of("m", [tmp_path / "t"], {"a": DIM}, gpucache=gpucache, **more)
        document = document_of(model, persistent=tmp_path / f"db-{gpucache}", volatile_db={"type": "disabled"})
        scripts.append((document, threads, end))
    process = children.start(sys.executable, "-c", PROGRAM, json.dumps(scripts))
    output, errors = process.communicate(timeout=2 * PATIENCE_S)
    assert json.loads(output) == [130 if end == "interrupt" else 0 for *_, end in CASES * runs], errors


def test_an_hps_that_nobody_holds_is_collected_with_its_threads(tmp_path, children):
    keys = np.arange(1000)
    hps.write_sparse_model(tmp_path / "t", (keys, np.ones((1000, DIM), np.float32)))
    model = model_of("m", [tmp_path / "t"], {"a": DIM}, gpucacheper=0.5, hit_rate_threshold=0.0, refresh_interval=3600)
    volatile = {"type": "hash_map", "cache_missed_embeddings": True, "initial_cache_rate": 0.5}
    document = document_of(model, persistent=tmp_path / "db", volatile_db=volatile)
    program = """
import gc, json, sys, threading, weakref
import numpy as np
import hps
from hps.testing.waiting import wait_until
server = hps.HPS(json.loads(sys.argv[1]))
server.lookup(np.arange(1000), "m", "a")
assert any(thread.name.startswith("hps") for thread in threading.enumerate())
gone = [weakref.ref(server), weakref.ref(server.model("m")), *map(weakref.ref, server.model("m").chain.databases)]
del server


def none_is_left():
    gc.collect()
    return not [ref for ref in gone if ref()] and not [one for one in threading.enumerate() if one.name.startswith("hps")]


wait_until(none_is_left, "it is collected with its threads")
"""
    process = children.start(sys.executable, "-c", program, json.dumps(document))
    _, errors = process.communicate(timeout=2 * PATIENCE_S)
    assert process.returncode == 0, errors
