"""How many functions of the package a lookup of resident keys calls: most of the time of a small one is Python's.

On the device, a stand-in for CuPy runs what Python does; a count is no time, but the same on every machine.
"""

import json
import subprocess
import sys

import pytest

PROGRAM = """
import json, sys, tempfile
from pathlib import Path
import numpy as np

device = sys.argv[1]
if device == "cuda":
    from tests.fakes import host_cuda
    host_cuda.install()
    import cupy
import hps
from tests.servers.running_service import document_of, model_of

ROWS, DIM, TABLES = 100, 4, 26
directory = Path(tempfile.mkdtemp())
keys = np.arange(ROWS)
hps.write_sparse_model(directory / "t", (keys, np.repeat(keys.astype(np.float32)[:, None], DIM, axis=1)))
names = [f"t{number}" for number in range(TABLES)]
settings = {"gpucacheper": 1.0, "cache_refresh_percentage_per_iteration": 1.0, "hit_rate_threshold": 1.1}


def calls(call):
    call(), call()
    found = []

    def note(frame, event, _argument):
        if event == "call" and "/hps/" in frame.f_code.co_filename:
            found.append(frame.f_code.co_name)

    sys.setprofile(note)
    call()
    sys.setprofile(None)
    return len(found)


model = model_of("m", [directory / "t"] * TABLES, dict.fromkeys(names, DIM), **settings)
with hps.HPS(document_of(model, device=device)) as server:
    caches = server.model("m").caches[0]
    resident = [caches.dump(table)[:10] for table in range(TABLES)]
    place = cupy.asarray if device == "cuda" else np.array
    asked = {name: place(one) for name, one in zip(names, resident)}
    outs = {name: place(np.zeros((10, DIM), np.float32)) for name in names}
    run, whole = place(np.concatenate(resident)), place(np.zeros(TABLES * 10 * DIM, np.float32))
    one = server.prepare({"t0": asked["t0"]}, "m", out={"t0": outs["t0"]})
    all_of_them = server.prepare(asked, "m", out=outs)
    counted = {
        "lookup": calls(lambda: server.lookup(resident[0], "m", 0)),
        "lookup_fromdlpack": calls(lambda: server.lookup_fromdlpack(asked["t0"], outs["t0"], "m", 0)),
        "lookup_tables": calls(lambda: server.lookup_tables(asked, "m", out=outs)),
        "lookup_concatenated": calls(lambda: server.lookup_concatenated(run, [10] * TABLES, whole, "m")),
        "prepared, one table": calls(one.run),
        "prepared, 26 tables": calls(all_of_them.run),
    }
    misses = sum(server.metrics.table("m", name).misses[0] for name in names)
    for name, out in outs.items():
        found = out.get() if device == "cuda" else out
        assert (found == resident[names.index(name)][:, None]).all()
print(json.dumps([counted, misses]))
"""
CALLS = ["lookup", "lookup_fromdlpack", "lookup_tables", "lookup_concatenated", "prepared, one table", "prepared, 26 tables"]
MOST = {"cuda": [32, 22, 31, 31, 11, 11], "cpu": [14, 18, 94, 42, 8, 33]}
"""What they are: a change that adds one says so here."""


@pytest.mark.parametrize("device", MOST)
def test_a_lookup_of_resident_keys_calls_few_functions(device: str) -> None:
    child = subprocess.run([sys.executable, "-c", PROGRAM, device], capture_output=True, text=True, timeout=120, check=False)
    assert child.returncode == 0, child.stderr
    counted, misses = json.loads(child.stdout.splitlines()[-1])
    assert misses == 0
    most = dict(zip(CALLS, MOST[device], strict=True))
    assert {name: count for name, count in counted.items() if count > most[name]} == {}
