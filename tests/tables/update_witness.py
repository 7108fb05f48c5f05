"""Lookups on every public path while updates come: none that begins after an acknowledgement may get an older vector."""

import json
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import httpx
import numpy as np

import hps
from hps.configuration.tiers import UpdateSourceConfig
from hps.ground.registry import implementation
from hps.testing.waiting import PATIENCE_S, wait_until
from hps.types import FloatArray, KeyArray
from hps.updates.base import TOPIC_PREFIX
from tests.servers.kafka_broker import KafkaBroker
from tests.servers.redis_server import RedisServer
from tests.servers.running_service import document_of, model_of, running_service
from tests.tables.numbered_updates import DEFAULT, NumberedPublisher, NumberedRows

ROWS = NumberedRows(key_bits=12, dim=8)
PARTITIONS, BATCH, LOOKED_UP, BY_HTTP = 4, 128, 8192, 512
BURST = 16  # messages
Lookup = Callable[[KeyArray], FloatArray]


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
        "lookup_concatenated": (LOOKED_UP, into(lambda keys, out: server.lookup_concatenated(keys, [keys.size], out, "shop"))),
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


def look_up_while_updates_come(kind: str, tiers: str, directory: Path, vectors: int) -> None:
    """Serve a model from these tiers, publish to a log, and judge at least so many vectors, some of each path.

    Every key is changed, and acknowledged, meanwhile.
    """
    names = tiers.split("+")
    keys = np.arange(ROWS.keys)
    hps.write_sparse_model(directory / "item", (keys, ROWS.vectors(keys, 0)))
    with ExitStack() as stack:
        source = stack.enter_context(log_of(kind, directory))
        volatile: dict[str, Any] = {"type": next((name for name in names if name in ("hash_map", "redis_cluster")), "disabled")}
        if "redis_cluster" in names:
            volatile["address"] = stack.enter_context(RedisServer(directory / "rows")).address
        limits = {"max_batch_size": 8192, "num_of_worker_buffer_in_pool": 4, "workspace_timeout_s": 60.0}
        limits |= {"gpucache": "cache" in names, "gpucacheper": 0.5, "hit_rate_threshold": 1.1}
        model = model_of("shop", [directory / "item"], {"item": ROWS.dim}, default_value_for_each_table=[DEFAULT], **limits)
        settings = {"volatile_db": volatile, "update_source": source}
        kind = next((name for name in names if name in ("rocks_db", "row_files")), "")
        document = document_of(model, persistent=directory / kind if kind else None, kind=kind, **settings)
        writer = implementation("update_log_writer", source["type"]).from_config(UpdateSourceConfig(**source))
        stack.callback(writer.close)
        publisher = NumberedPublisher(writer, f"{TOPIC_PREFIX}shop.item", ROWS)
        writer.partitions(publisher.topic, 60, create=PARTITIONS)
        server = stack.enter_context(hps.HPS(document))
        client = stack.enter_context(running_service(document, server)).client
        witness = Witness(lookups(server, client), publisher)
        done = threading.Event()

        def publish() -> None:
            """Send bursts, and let some lookups fill the caches after each."""
            rng = np.random.default_rng(1)
            while not done.is_set():
                publisher.publish(rng, BURST * BATCH, BATCH, PARTITIONS)
                wait_until(lambda: done.is_set() or not publisher.under_way, "what was sent is acknowledged")
                enough = sum(witness.checked.values()) + int(rng.integers(8)) * LOOKED_UP
                wait_until(lambda enough=enough: done.is_set() or sum(witness.checked.values()) >= enough, "lookups go on")

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
            checked = publisher.acknowledged.copy()
            while not (sum(witness.checked.values()) >= vectors and all(witness.checked.values()) and checked.min() > 0):
                before = sum(witness.checked.values()), int(checked.sum())

                def goes_on(before: tuple[int, int] = before) -> bool:
                    now = sum(witness.checked.values()), int(publisher.acknowledged.sum())
                    return any(job.done() for job in jobs) or all(one > other for one, other in zip(now, before, strict=True))

                wait_until(goes_on, "vectors are judged and changes acknowledged")
                if any(job.done() for job in jobs):
                    break
                checked = publisher.acknowledged.copy()
            done.set()
            for job in jobs:
                job.result(PATIENCE_S)
        assert witness.wrong == []
        assert publisher.failures == []
        assert publisher.acknowledged.min() > 0, "every key was changed, and acknowledged"
        sys.stdout.write(f"{sum(witness.checked.values())} vectors, {int(publisher.acknowledged.sum())} changes: {tiers}\n")
