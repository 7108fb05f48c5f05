"""Checks of a version of a real repository: how long they take, and what share of a core, beside lookups.

A version of `rows` rows serves from a hash map above RocksDB; the next one has the same keys, and vectors that were trained a
little more. It is polled in, so its checks are those of a server, then made again and timed. The figures to quote are `seconds`
(at most 60), `core_share`, the processor time of the checks against their duration (at most 0.2), and `lookup_ratio`, the
median of lookups beside checks to that of lookups alone.
"""

import json
import threading
import time

import numpy as np

import hps
from benchmarks.harness import Report, require, scratch

DIM = 128
KEYS = 4096
SETS = 32
LOOKUPS_S = 2.0
ROUNDS = 5


def run(report: Report, quick: bool) -> None:
    """Measure one table."""
    rows = 100_000 if quick else 1_000_000
    random = np.random.default_rng(1)
    keys, vectors = random.permutation(rows).astype(np.int64), random.standard_normal((rows, DIM), np.float32)
    entry = {
        "model": "ranker",
        "sparse_files": ["item"],
        "embedding_table_names": ["item"],
        "embedding_vecsize_per_table": [DIM],
        "maxnum_catfeature_query_per_table_per_sample": [KEYS],
        "default_value_for_each_table": [0.0],
        "deployed_device_list": [0],
        "max_batch_size": 1,
        "gpucache": False,
        "version_policy": {"latest": {"num_versions": 2}},
    }
    with scratch("checks") as directory:
        home = directory / "models" / "ranker"
        hps.write_version(home / "1", {"item": (keys, vectors)})
        (home / "model.json").write_text(json.dumps(entry))
        document = {
            "device": "cpu",
            "volatile_db": {"type": "parallel_hash_map"},
            "persistent_db": {"type": "rocks_db", "path": str(directory / "rocksdb")},
            "model_repository": str(home.parent),
        }
        with hps.HPS(document) as server:
            vectors += 0.3 * random.standard_normal(vectors.shape, np.float32)
            hps.write_version(home / "2", {"item": (keys, vectors)})
            start = time.perf_counter()
            require(server.poll() == {"ranker": None}, "the takeover")
            taken_over_s = time.perf_counter() - start
            polled = server.model("ranker").checks
            require(polled is not None and (polled.verdict, polled.against) == ("passed", "1"), "the report")
            figures = {"poll_s": taken_over_s, "seconds": polled.seconds if polled else 0.0}
            shares, took = [], []
            for _ in range(ROUNDS):
                begun, used = time.perf_counter(), time.process_time()
                require(server.check_version("ranker", "2", "1").verdict == "passed", "the report")
                took.append(time.perf_counter() - begun)
                shares.append((time.process_time() - used) / took[-1])
            figures |= {"again_s": float(np.median(took)), "core_share": float(np.median(shares))}
            figures |= _beside_lookups(server, random.choice(keys, (SETS, KEYS)))
            report.add({"rows": rows, "dim": DIM, "tier": "hash_map"}, figures)


def _beside_lookups(server: hps.HPS, keys: np.ndarray) -> dict[str, float]:
    """Time lookups alone and beside checks that follow one another, in turns."""
    seconds: dict[bool, list[float]] = {False: [], True: []}

    def look_up(beside: bool) -> None:
        end, number = time.perf_counter() + LOOKUPS_S, 0
        while (start := time.perf_counter()) < end:
            server.lookup(keys[number % len(keys)], "ranker", "item")
            seconds[beside].append(time.perf_counter() - start)
            number += 1

    for _ in range(2):
        look_up(False)
        ended = threading.Event()

        def check(ended: threading.Event = ended) -> None:
            while not ended.is_set():
                server.check_version("ranker", "2", "1")

        checking = threading.Thread(target=check)
        checking.start()
        look_up(True)
        ended.set()
        checking.join()
    alone, beside = (np.array(seconds[beside]) for beside in (False, True))
    return {
        "lookup_us": 1e6 * float(np.median(alone)),
        "lookup_ratio": float(np.median(beside) / np.median(alone)),
        "lookups_ratio": float(beside.size / alone.size),
    }
