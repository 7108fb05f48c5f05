"""Once an update is acknowledged no lookup that begins gets an older vector, on any public path, and no lookup gets a mixture.

HPS_VISIBLE_VECTORS=100000000 python -m pytest tests/ring2/updates/test_update_visibility.py     checks so many in all
"""

import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from itertools import count, cycle
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

import hps
from hps.configuration.tiers import UpdateSourceConfig
from hps.registry import implementation
from hps.types import FloatArray, KeyArray
from hps.updates.base import TOPIC_PREFIX
from tests.servers.kafka_broker import KafkaBroker
from tests.servers.redis_server import RedisServer
from tests.servers.running_service import document_of, model_of, running_service
from tests.tables.numbered_updates import DEFAULT, NumberedPublisher, NumberedRows

TIERS = (
    "rocks_db",
    "cache+rocks_db",
    "hash_map+rocks_db",
    "cache+hash_map+rocks_db",
    "redis_cluster+rocks_db",
    "cache+redis_cluster+rocks_db",
    "redis_cluster",
    "cache+redis_cluster",
    "hash_map",
    "cache+hash_map",
)
ROWS = NumberedRows(key_bits=12, dim=8)
VECTORS = int(os.environ.get("HPS_VISIBLE_VECTORS", "0")) // len(TIERS)
SECONDS, LIMIT_S = 1.5, 120.0
PARTITIONS, BATCH, LOOKED_UP, BY_HTTP = 4, 128, 8192, 512
BURST = 16  # messages
Lookup = Callable[[KeyArray], FloatArray]


@pytest.mark.parametrize("row_dtype", ["float32", "int8"])
def test_the_judge_names_what_is_wrong(row_dtype: str) -> None:
    """Change 7 deletes, so after it a row may lack; change 9 has been acknowledged, and 12 has begun."""
    keys, floor, ceiling = np.full(8, 5), np.full(8, 9), np.full(8, 12)
    numbered = replace(ROWS, row_dtype=row_dtype)
    published = numbered.vectors(np.array([5, 5, 5, 6, 5, 5, 5, 5]), np.array([9, 12, 8, 10, 13, 7, 10, 10]))
    vectors = numbered.stored(published)
    vectors[6, 3], vectors[7] = vectors[0, 3], DEFAULT
    wrong = {what: np.flatnonzero(rows).tolist() for what, rows in numbered.judge(keys, vectors, floor, ceiling).items()}
    assert wrong == {"stale": [2, 5], "foreign": [3], "invented": [4], "deleted": [5], "mixture": [6], "lost": [7]}
    for first, last in ((7, 7), (5, 8), (9, 15), (15, 20)):
        assert not numbered.judge(keys[:1], vectors[7:], np.array([first]), np.array([last])), "it may have been deleted"
    if row_dtype == "int8":
        assert numbered.judge(keys[:3], published[:3], np.zeros(3, np.int64)).keys() == {"mixture"}, "no row stands for these"


def lookups(server: hps.HPS, client: httpx.Client) -> dict[str, tuple[int, Lookup]]:
    """The public paths: how many keys each looks up, and how."""
    header = {
        "inputs": [{"name": "item", "datatype": "INT64", "shape": [BY_HTTP], "parameters": {"binary_data_size": 8 * BY_HTTP}}],
        "parameters": {"binary_data_output": True},
    }
    text = json.dumps(header).encode()
    headers = {"Inference-Header-Content-Length": str(len(text))}

    def into(look_up: Callable[[KeyArray, FloatArray], object]) -> Lookup:
        def call(keys: KeyArray) -> FloatArray:
            out = np.empty((keys.size, ROWS.dim), np.float32)
            look_up(keys, out)
            return out

        return call

    def by_http(keys: KeyArray) -> FloatArray:
        answer = client.post("/v2/models/shop/infer", content=text + keys.tobytes(), headers=headers).raise_for_status()
        values = answer.content[int(answer.headers["Inference-Header-Content-Length"]) :]
        return np.frombuffer(values, np.float32).reshape(keys.size, ROWS.dim)

    def as_json(keys: KeyArray) -> FloatArray:
        answer = client.post("/v1/models/shop/lookup", json={"tables": {"item": keys.tolist()}}).raise_for_status()
        return np.array(answer.json()["tables"]["item"], np.float32)

    def row_by_http(keys: KeyArray) -> FloatArray:
        answer = client.get(f"/v1/models/shop/tables/item/rows/{keys[0]}").raise_for_status()
        return np.array([answer.json()["vector"]], np.float32)

    return {
        "lookup": (LOOKED_UP, lambda keys: server.lookup(keys, "shop", "item")),
        "lookup_tables": (LOOKED_UP, lambda keys: server.lookup_tables({"item": keys}, "shop")["item"]),
        "lookup_concatenated": (
            LOOKED_UP,
            into(lambda keys, out: server.lookup_concatenated(keys, [keys.size], out, "shop")),
        ),
        "lookup_fromdlpack": (LOOKED_UP, into(lambda keys, out: server.lookup_fromdlpack(keys, out, "shop", 0))),
        "row": (1, lambda keys: server.row(int(keys[0]), "shop", "item").vector[None]),
        "HTTP, binary": (BY_HTTP, by_http),
        "HTTP, JSON": (BY_HTTP, as_json),
        "HTTP, row": (1, row_by_http),
    }


class Witness:
    """Looks keys up on every path in turn, and judges what it gets. *One thread* reads."""

    def __init__(self, paths: dict[str, tuple[int, Lookup]], publisher: NumberedPublisher) -> None:
        self._paths, self._publisher = paths, publisher
        self.checked = dict.fromkeys(paths, 0)
        self.wrong: list[str] = []

    def read(self, done: threading.Event, seed: int) -> None:
        """Look up until it is enough, or something is wrong."""
        rng = np.random.default_rng(seed)
        for turn, path in ((turn, path) for turn in count(seed) for path in self._paths):
            if done.is_set() or self.wrong:
                return
            size, look_up = self._paths[path]
            if size < LOOKED_UP and turn % 8:
                continue  # the others judge many more vectors in that time
            keys = rng.integers(0, ROWS.keys, size)
            floor = self._publisher.acknowledged[keys]
            vectors = look_up(keys)
            ceiling = self._publisher.begun[keys]
            for what, rows in ROWS.judge(keys, vectors, floor, ceiling).items():
                row = int(np.flatnonzero(rows)[0])
                got = ROWS.changes_of(vectors[row : row + 1])[0]
                self.wrong.append(f"{path}: {what}: key {keys[row]}: change {got} of {floor[row]} to {ceiling[row]}")
            self.checked[path] += size


@contextmanager
def log_of(kind: str, directory: Path) -> Iterator[dict[str, Any]]:
    """A log of updates; its settings."""
    if kind == "kafka":
        with KafkaBroker(directory / "log") as broker:
            yield {"type": "kafka_message_queue", "brokers": broker.address, "config": broker.config}
    else:
        with RedisServer(directory / "log") as server:
            yield {"type": "redis_stream", "address": server.address}


@pytest.mark.kafka
@pytest.mark.redis
@pytest.mark.parametrize(
    ("kind", "tiers"),
    [
        pytest.param(kind, tiers, marks=[] if place in (1, 2, 5, 9) else [pytest.mark.slow])
        for place, (kind, tiers) in enumerate(zip(cycle(("kafka", "redis_stream")), TIERS, strict=False))
    ],
)
def test_no_lookup_after_the_acknowledgement_gets_an_older_vector(kind: str, tiers: str, tmp_path: Path) -> None:
    names = tiers.split("+")
    keys = np.arange(ROWS.keys)
    hps.write_sparse_model(tmp_path / "item", (keys, ROWS.vectors(keys, 0)))
    with ExitStack() as stack:
        source = stack.enter_context(log_of(kind, tmp_path))
        volatile: dict[str, Any] = {"type": next((name for name in names if name in ("hash_map", "redis_cluster")), "disabled")}
        if "redis_cluster" in names:
            volatile["address"] = stack.enter_context(RedisServer(tmp_path / "rows")).address
        cached = {"gpucache": "cache" in names, "gpucacheper": 0.5, "hit_rate_threshold": 1.1}
        model = model_of(
            "shop",
            [tmp_path / "item"],
            {"item": ROWS.dim},
            default_value_for_each_table=[DEFAULT],
            max_batch_size=8192,
            num_of_worker_buffer_in_pool=4,
            workspace_timeout_s=60.0,
            **cached,
        )
        settings = {"volatile_db": volatile, "update_source": source}
        document = document_of(model, persistent=tmp_path / "rocksdb" if "rocks_db" in names else None, **settings)
        writer_class = implementation("update_log_writer", source["type"])
        writer = writer_class.from_config(UpdateSourceConfig(**source))
        stack.callback(writer.close)
        publisher = NumberedPublisher(writer, f"{TOPIC_PREFIX}shop.item", ROWS)
        writer.partitions(publisher.topic, 60, create=PARTITIONS)
        server = stack.enter_context(hps.HPS(document))
        client = stack.enter_context(running_service(document, server)).client
        witness = Witness(lookups(server, client), publisher)
        done = threading.Event()

        def publish() -> None:
            """Send bursts, and wait a moment after each, in which lookups may fill the caches."""
            rng = np.random.default_rng(1)
            while not done.is_set():
                publisher.publish(rng, BURST * BATCH, BATCH, PARTITIONS)
                while publisher.under_way and not done.is_set():
                    time.sleep(0.001)
                time.sleep(float(rng.uniform(0, 0.02)))

        def acknowledge() -> None:
            """Hear of positions by HTTP and from the parameter server, in turn."""
            for turn in count():
                if done.is_set():
                    return
                if turn % 2:
                    (status,) = server.updates()
                    publisher.acknowledge(status.positions)
                else:
                    (table,) = client.get("/v1/updates").raise_for_status().json()["tables"]
                    publisher.acknowledge(table["positions"])

        with ThreadPoolExecutor(4) as pool:
            jobs = [pool.submit(publish), pool.submit(acknowledge), *(pool.submit(witness.read, done, seed) for seed in (1, 2))]
            started = time.monotonic()
            while time.monotonic() - started < LIMIT_S + VECTORS / 100_000 and not any(job.done() for job in jobs):
                time.sleep(0.05)
                enough = sum(witness.checked.values()) >= VECTORS and all(witness.checked.values())
                if enough and time.monotonic() - started > SECONDS and publisher.acknowledged.min() > 0:
                    break
            done.set()
            for job in jobs:
                job.result(LIMIT_S)
        assert witness.wrong == []
        assert publisher.failures == []
        assert publisher.acknowledged.min() > 0, "every key was changed, and acknowledged"
        sys.stdout.write(f"{sum(witness.checked.values())} vectors, {int(publisher.acknowledged.sum())} changes: {tiers}\n")
