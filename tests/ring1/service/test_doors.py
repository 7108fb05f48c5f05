"""One look through each door of a server in process: the vectors of a key, of an absent one, and a score.

Ring 2 asks every wire everything (`tests/ring2/service/test_wires.py`), and has what may be behind a server: Redis in
`ring1/versions`, object stores in `ring2/models`, Kafka in `ring2/updates`.
"""

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import numpy as np
import pytest
import torch
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc import service_pb2_grpc as pb_grpc

import hps
import hps.torch
from tests.fakes import entry_points
from tests.servers.running_service import RunningService, document_of, model_of, running_service

DIM = 4
KEYS = np.array([3, 99, 10**12])
ROWS = np.arange(100), (np.arange(100)[:, None] + np.arange(DIM) / 8).astype(np.float32)
WANTED = np.vstack([ROWS[1][KEYS[:2]], np.full((1, DIM), 0.5, np.float32)])


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningService]:
    """Model `m` over a hash map and RocksDB, and `scored` with a network that halves the sum of its inputs."""
    place = tmp_path_factory.mktemp("doors")
    entry_points.install(place / "engine", "hps.networks", {"arrays": "tests.fakes.networks:ArrayNetwork"})
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(place / "engine")
        hps.write_sparse_model(place / "item", ROWS)
        said = {"format": "arrays", "file": "dense.json", "inputs": {"item": {"table": "item"}}, "outputs": ["score"]}
        hps.write_version(place / "scored" / "1", {"item": ROWS}, network=(said, b'{"factor": 0.5}'))
        more = {"default_value_for_each_table": [0.5], "hit_rate_threshold": 1.1}
        m = model_of("m", [place / "item"], {"item": DIM}, **more)
        scored = model_of("scored", ["item"], {"item": DIM}, version_path=str(place / "scored"), hit_rate_threshold=1.1)
        with running_service(document_of(m, scored, persistent=place / "rocksdb"), grpc=True) as service:
            yield service


def in_process(service: RunningService) -> Any:
    return service.app.lifecycle.serving.lookup(KEYS, "m", "item")


def by_json(service: RunningService) -> Any:
    answer = service.client.post("/v1/models/m/lookup", json={"tables": {"item": KEYS.tolist()}})
    return answer.json()["tables"]["item"]


def by_the_open_inference_protocol(service: RunningService) -> Any:
    tensor = {"name": "item", "datatype": "INT64", "shape": [3], "data": KEYS.tolist()}
    return np.reshape(
        service.client.post("/v2/models/m/infer", json={"inputs": [tensor]}).json()["outputs"][0]["data"], (3, DIM)
    )


def by_grpc(service: RunningService) -> Any:
    request = pb.ModelInferRequest(model_name="m", raw_input_contents=[KEYS.tobytes()])
    request.inputs.add(name="item", datatype="INT64", shape=[3])
    with grpc.insecure_channel(service.grpc) as channel:
        answer = pb_grpc.GRPCInferenceServiceStub(channel).ModelInfer(request)
    return np.frombuffer(answer.raw_output_contents[0], np.float32).reshape(3, DIM)


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


DOORS = [in_process, by_json, by_the_open_inference_protocol, by_grpc, by_the_asynchronous_client, by_a_layer]


@pytest.mark.parametrize("door", DOORS)
def test_a_door_leads_to_the_vectors(service: RunningService, door: Callable[[RunningService], Any]) -> None:
    for _ in range(2):
        np.testing.assert_array_equal(np.asarray(door(service), np.float32), WANTED)


def test_vectors_and_scores_and_pooled_vectors_and_writes_come_through_the_client(service: RunningService) -> None:
    with hps.connect(service.url) as client:
        np.testing.assert_array_equal(client.lookup(KEYS, "m", "item"), WANTED)
        np.testing.assert_array_equal(client.score("scored", {"item": KEYS[:2]})["score"], WANTED[:2].sum(1) / 2)
        pooled = client.lookup_pooled({"item": hps.Bags(KEYS, [0, 1, 3])}, "m")["item"]
        np.testing.assert_array_equal(pooled, [WANTED[0], WANTED[1] + WANTED[2]])
        for change in (1, 2):
            client.insert([500], np.full((1, DIM), change, np.float32), "m", "item")
            assert (client.lookup([500], "m", "item") == change).all()
        client.delete([500], "m", "item")
        assert client.lookup([500], "m", "item", return_found=True)[1].tolist() == [False]
