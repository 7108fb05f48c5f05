"""One look through each door of the product, with a real server behind it: the vectors of a key, of an absent one, and a score.

Ring 2 asks every wire everything (`tests/ring2/serve/test_wires.py`). `hps lookup` has its own in
`ring1/tools/cli/test_cli.py`.
"""

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import torch
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc import service_pb2_grpc as pb_grpc

import hps
import hps.torch
from hps.testing.waiting import wait_until
from tests.fakes import entry_points
from tests.servers.gcs_server import GcsServer
from tests.servers.redis_server import RedisServer
from tests.servers.running_service import RunningService, document_of, model_of, running_service

ROWS, DIM = 100, 4
KEYS = np.array([3, 99, 10**12])


def rows(change: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Keys, and vectors that say of which key and change they are."""
    keys = np.arange(ROWS)
    return keys, (keys[:, None] + np.arange(DIM) / 8 + 1000 * change).astype(np.float32)


def wanted(change: int = 0) -> np.ndarray:
    return np.vstack([rows(change)[1][KEYS[:2]], np.full((1, DIM), 0.5, np.float32)])


def model(source: object, **more: Any) -> dict[str, Any]:
    return model_of("m", [source], {"item": DIM}, default_value_for_each_table=[0.5], hit_rate_threshold=1.1, **more)


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningService]:
    """Model `m` over a hash map and RocksDB, and `scored` with a network that halves the sum of its inputs."""
    place = tmp_path_factory.mktemp("doors")
    entry_points.install(place / "engine", "hps.networks", {"arrays": "tests.fakes.networks:ArrayNetwork"})
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(place / "engine")
        hps.write_sparse_model(place / "item", rows())
        said = {"format": "arrays", "file": "dense.json", "inputs": {"item": {"table": "item"}}, "outputs": ["score"]}
        said["stale_copies"] = ["item"]
        hps.write_version(place / "scored" / "1", {"item": rows()}, network=(said, b'{"factor": 0.5}'))
        scored = model_of("scored", ["item"], {"item": DIM}, version_path=str(place / "scored"), hit_rate_threshold=1.1)
        document = document_of(model(place / "item"), scored, persistent=place / "rocksdb")
        with running_service(document, grpc=True) as service:
            yield service


def in_process(service: RunningService) -> Any:
    return service.app.lifecycle.serving.lookup(KEYS, "m", "item")


def by_json(service: RunningService) -> Any:
    answer = service.client.post("/v1/models/m/lookup", json={"tables": {"item": KEYS.tolist()}})
    return answer.raise_for_status().json()["tables"]["item"]


def by_the_open_inference_protocol(service: RunningService) -> Any:
    tensor = {"name": "item", "datatype": "INT64", "shape": [3], "data": KEYS.tolist()}
    answer = service.client.post("/v2/models/m/infer", json={"inputs": [tensor]}).raise_for_status().json()
    return np.reshape(answer["outputs"][0]["data"], (3, DIM))


def by_grpc(service: RunningService) -> Any:
    request = pb.ModelInferRequest(model_name="m", raw_input_contents=[KEYS.tobytes()])
    request.inputs.add(name="item", datatype="INT64", shape=[3])
    with grpc.insecure_channel(service.grpc) as channel:
        answer = pb_grpc.GRPCInferenceServiceStub(channel).ModelInfer(request)
    return np.frombuffer(answer.raw_output_contents[0], np.float32).reshape(3, DIM)


def by_the_client(service: RunningService) -> Any:
    """Which sends and receives binary tensors."""
    with hps.connect(service.url) as client:
        return client.lookup(KEYS, "m", "item")


def by_the_asynchronous_client(service: RunningService) -> Any:
    async def ask() -> Any:
        async with hps.connect_async(service.url) as client:
            return await client.lookup(KEYS, "m", "item")

    return asyncio.run(ask())


def by_a_layer(service: RunningService) -> Any:
    try:
        return hps.torch.LookupLayer(service.url, "m", "item", DIM)(torch.from_numpy(KEYS)).numpy()
    finally:
        hps.torch.close()


DOORS = [
    in_process,
    by_json,
    by_the_open_inference_protocol,
    by_grpc,
    by_the_client,
    by_the_asynchronous_client,
    by_a_layer,
]


@pytest.mark.parametrize("door", DOORS)
def test_a_door_leads_to_the_vectors(service: RunningService, door: Callable[[RunningService], Any]) -> None:
    for _ in range(2):
        np.testing.assert_array_equal(np.asarray(door(service), np.float32), wanted())


def test_scores_and_pooled_vectors_and_writes_come_through_the_client(service: RunningService) -> None:
    with hps.connect(service.url) as client:
        score = client.score("scored", {"item": KEYS[:2]})
        np.testing.assert_array_equal(score["score"], wanted()[:2].sum(1) / 2)
        pooled = client.lookup_pooled({"item": hps.Bags(KEYS, [0, 1, 3])}, "m")["item"]
        np.testing.assert_array_equal(pooled, [wanted()[0], wanted()[1] + wanted()[2]])
        for change in (1, 2):
            client.insert([500], np.full((1, DIM), change, np.float32), "m", "item")
            assert (client.lookup([500], "m", "item") == change).all()
        client.delete([500], "m", "item")
        assert client.lookup([500], "m", "item", return_found=True)[1].tolist() == [False]


def test_writes_to_a_table_of_which_the_network_has_a_copy_are_refused(service: RunningService) -> None:
    row = {"keys": [1], "vectors": [[0.0] * DIM]}
    for method, body in (("POST", row), ("DELETE", {"keys": [1]})):
        answer = service.client.request(method, "/v1/models/scored/tables/item/rows", json=body)
        assert (answer.status_code, "allow_stale_copy" in answer.json()["error"]) == (409, True)
    with hps.connect(service.url) as client, pytest.raises(hps.ConflictError, match="allow_stale_copy"):
        client.insert([1], np.zeros((1, DIM), np.float32), "scored", "item")
    listed = {one["name"]: one["versions"] for one in service.client.get("/v1/models").json()["models"]}
    assert {name: versions[0]["stale_copies"] for name, versions in listed.items()} == {"m": [], "scored": ["item"]}


# -- what is behind the server ----------------------------------------------------------------------------------------


def check(server: hps.HPS, change: int = 0) -> None:
    np.testing.assert_array_equal(server.lookup(KEYS, "m", "item"), wanted(change))


@pytest.mark.redis
def test_redis_and_rocksdb_keep_a_model(tmp_path: Path) -> None:
    hps.write_sparse_model(tmp_path / "item", rows())
    with RedisServer(tmp_path) as redis:
        document = document_of(model(tmp_path / "item", gpucache=False), persistent=tmp_path / "rocksdb")
        document["volatile_db"] = {"type": "redis_cluster", "address": redis.address, "num_partitions": 4}
        for _ in range(2):  # loaded, and found again
            with hps.HPS(document) as server:
                check(server)
                assert server.row(3, "m", "item").tier == "volatile_db"
        document["volatile_db"] = {"type": "disabled"}
        with hps.HPS(document) as server:
            check(server)
            assert server.row(3, "m", "item").tier == "persistent_db"


@pytest.mark.gcs
def test_a_model_is_loaded_from_an_object_store(tmp_path: Path, gcs_server: GcsServer) -> None:
    hps.write_sparse_model(tmp_path / "item", rows())
    place = f"gs://{gcs_server.new_bucket()}/item"
    for file in (tmp_path / "item").iterdir():
        gcs_server.put(f"{place}/{file.name}", file.read_bytes())
    with hps.HPS(document_of(model(place), model_source={"gcs_endpoint_url": gcs_server.url})) as server:
        check(server)


@pytest.mark.kafka
def test_updates_of_kafka_reach_lookups(tmp_path: Path) -> None:
    from tests.servers.kafka_mock import KafkaMock

    hps.write_sparse_model(tmp_path / "item", rows())
    with KafkaMock(1) as kafka:
        kafka.create("hps_et.m.item", 1)
        source = {"type": "kafka_message_queue", "brokers": kafka.address}
        document = document_of(model(tmp_path / "item"), update_source=source)
        with hps.HPS(document) as server, hps.open_publisher(document, "m", "item") as publisher:
            check(server)
            for change in (1, 2):
                publisher.insert(*rows(change))
                publisher.flush()
                wait_until(
                    lambda change=change: server.lookup([3], "m", "item")[0, 0] == 1000 * change + 3, "it has the update"
                )
                check(server, change)
