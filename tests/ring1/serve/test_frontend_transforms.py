"""Transforms of a front: a slow import delays no other model, and rows are those of the keys of their own version."""

import gc
import json
import sys

import pytest

from hps.regions.layout import FAILED, RETIRED
from hps.serve.frontend import transforming
from hps.testing.waiting import wait_until_async
from tests.fakes.transforms import IMPORTED, RELEASED, SEEN
from tests.ring1.serve.test_frontend_canary import LIMIT_S, clock_of, counts_of, job_of, known, published
from tests.servers.on_loop import beside
from tests.servers.played_front import playing, request

FAILURE = json.dumps({"status": 500, "message": "no", "reason": ""}).encode()


def transform(function, **more):
    return {"function": f"tests.fakes.{function}", "inputs": {"text": "bytes"}, "outputs": ["item"], "timeout_s": 60.0, **more}


FIRST, SECOND = transform("transforms:first"), transform("transforms:second")


def text_request(*texts):
    tensor = {"name": "text", "datatype": "BYTES", "shape": [len(texts)], "data": texts}
    document = {"inputs": [tensor], "outputs": [{"name": "item", "parameters": {"binary_data": True}}]}
    body = json.dumps(document).encode()
    return b"POST /v2/models/m/infer HTTP/1.1\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)


async def imported(front):
    await wait_until_async(lambda: not front.published.importing(), "the transforms are imported")


async def begin(front, engine, mode="canary", second=SECOND, **more):
    """Try version 2 out, whose transform takes the second number of each text; return the ids of the deployments."""
    deployed = {version: engine.deploy() for version in "12"}
    rollouts = {"m": published(mode, **more)}
    engine.publish(m=deployed, rollouts=rollouts, transforms={"1": FIRST, "2": second})
    await known(front)
    await imported(front)
    return {version: deployment_id for version, (deployment_id, _) in deployed.items()}


async def complete(engine, deployment_id, keys, *arguments):
    job = await job_of(engine, deployment_id)
    assert engine.keys(job).tolist() == keys
    engine.complete(job, *arguments)


@pytest.mark.parametrize("how", ["fails", "is late", "refuses the keys"])
@beside(playing)
async def test_what_the_new_version_fails_is_transformed_for_the_serving_one(scene, front, engine, /, monkeypatch, how):
    ids, client = await begin(front, engine), await scene.connect()
    client.send(text_request("57"))
    if how == "fails":
        await complete(engine, ids["2"], [7], FAILED, FAILURE)
    elif how == "is late":
        clock = clock_of(monkeypatch)
        kept = await job_of(engine, ids["2"])
        clock.now += LIMIT_S * 0.51
    else:
        refusal = json.dumps({"status": 400, "message": "no", "reason": ""}).encode()
        await complete(engine, ids["2"], [7], FAILED, refusal)
    await complete(engine, ids["1"], [5])
    await client.checked([5])
    assert (counts_of(front).new.errors, counts_of(front).old.answered) == (1, 1)
    if how == "is late":
        engine.complete(kept)
    await wait_until_async(lambda: front.exchange.slots.used == 0, "its slots are free")


@pytest.mark.parametrize("text", ["5x", "5bug", "5w"])
@beside(playing)
async def test_what_the_new_versions_transform_fails_is_answered_by_the_serving_one(scene, front, engine, /, text):
    RELEASED.clear()
    ids = await begin(front, engine, second=transform("transforms:second", timeout_s=0.1))
    client = await scene.connect()
    client.send(text_request(text))
    await complete(engine, ids["1"], [5])
    await client.checked([5])
    RELEASED.set()
    assert (counts_of(front).new.errors, counts_of(front).old.answered) == (1, 1)


@beside(playing)
async def test_a_late_transform_does_not_end_the_one_of_the_repeated_request(scene, front, engine, /):
    RELEASED.clear()
    IMPORTED.clear()
    ids = await begin(front, engine, second=transform("transforms:second", timeout_s=0.1))
    client = await scene.connect()
    client.send(text_request("57wv"))
    queues = front.exchange.transforms._queues
    await wait_until_async(lambda: [queue._jobs.unfinished_tasks for queue in queues.values()] == [1, 1], "both run")
    RELEASED.set()
    await wait_until_async(lambda: [queue._jobs.unfinished_tasks for queue in queues.values()] == [0, 1], "the late one ends")
    IMPORTED.set()
    await complete(engine, ids["1"], [5])
    await client.checked([5])


@beside(playing)
async def test_a_request_whose_client_has_left_is_not_transformed_and_nothing_is_left_of_it(scene, front, engine, /):
    RELEASED.clear()
    SEEN.clear()
    ids = await begin(front, engine)
    runs = front.exchange.transforms
    clients = []
    for text in ("57w", "57w", "5", "57"):
        clients.append(await scene.connect())
        clients[-1].send(text_request(text))
        await wait_until_async(lambda: len(runs._under_way) == len(clients), "two run and two wait")
    for client in clients[1:3]:
        client.reset()
    await wait_until_async(lambda: len(front.connections.order) == 2, "they have left")
    RELEASED.set()
    for job in [await job_of(engine, ids["2"]) for _ in range(2)]:
        assert engine.keys(job).tolist() == [7]
        engine.complete(job)
    for client in (clients[0], clients[3]):
        await client.checked([7])
    [queue] = runs._queues.values()
    await wait_until_async(lambda: not queue._jobs.unfinished_tasks, "the threads wait")
    await wait_until_async(lambda: not runs._under_way, "all are forgotten")
    assert (counts_of(front).new.errors, front.exchange.slots.used) == (0, 0)
    assert SEEN == [["57w"], ["57w"], ["57"]]


@beside(playing)
async def test_more_requests_than_may_wait_for_their_transforms_are_refused_and_forgotten(scene, front, engine, /, monkeypatch):
    monkeypatch.setattr(transforming, "_MOST_WAITING", 1)
    RELEASED.clear()
    SEEN.clear()
    deployed, runs = engine.deploy(), front.exchange.transforms
    engine.publish(m=deployed, transforms={"1": SECOND})
    await known(front)
    await imported(front)
    clients = []
    for number in range(2):
        clients.append(await scene.connect())
        clients[-1].send(text_request("57w"))
        await wait_until_async(lambda number=number: len(SEEN) > number, "it runs")
    waiting, refused = await scene.connect(), await scene.connect()
    waiting.send(text_request("57"))
    await wait_until_async(lambda: len(runs._under_way) == 3, "it waits")
    refused.send(text_request("57"))
    assert await refused.status() == 503
    assert len(runs._under_way) == 3
    RELEASED.set()
    for _ in range(3):
        await complete(engine, deployed[0], [7])
    for client in (*clients, waiting):
        await client.checked([7])
    assert not runs._under_way


@beside(playing)
async def test_the_threads_of_a_version_end_with_it(scene, front, engine, /):
    await begin(front, engine)
    client = await scene.connect()
    client.send(text_request("57"))
    engine.complete(await engine.job())
    await client.checked([7])
    [queue] = front.exchange.transforms._queues.values()
    engine.publish(m=engine.deploy())
    await known(front)
    client.send(*request([5]))
    engine.complete(await engine.job())
    await client.checked([5])
    gc.collect()  # a rollout and its versions refer to each other
    await wait_until_async(lambda: not queue.alive, "its threads end")


@beside(playing)
async def test_a_request_of_a_retired_version_is_transformed_for_the_one_that_serves_now(scene, front, engine, /):
    deployed = {version: engine.deploy() for version in "12"}
    engine.publish(m=deployed, transforms={"1": FIRST, "2": SECOND})
    await known(front)
    await imported(front)
    client = await scene.connect()
    client.send(text_request("57"))
    job = await job_of(engine, deployed["1"][0])
    engine.publish(m={"2": deployed["2"]}, transforms={"2": SECOND}, serving="2")
    engine.complete(job, RETIRED)
    await complete(engine, deployed["2"][0], [7])
    await client.checked([7])


@pytest.mark.parametrize("mode", ["canary", "shadow"])
@beside(playing)
async def test_a_compared_request_is_transformed_for_either_version(scene, front, engine, /, mode):
    ids = await begin(front, engine, mode, compare=True)
    client = await scene.connect()
    keys = {"1": [5], "2": [7]}
    for text in ("57", "57"):
        client.send(text_request(text))
        for version in "21" if mode == "canary" else "12":
            await complete(engine, ids[version], keys[version])
        assert await client.status() == 200
    compared = counts_of(front).compared
    await wait_until_async(lambda: front.exchange.slots.used == 0, "its slots are free")
    assert (compared.different, compared.failed, compared.largest) == (2, 0, 2.0)


@beside(playing)
async def test_a_shadow_whose_transform_fails_has_an_error_and_delays_nobody(scene, front, engine, /):
    ids = await begin(front, engine, "shadow")
    client = await scene.connect()
    for _ in range(2):
        client.send(text_request("5x"))
        await complete(engine, ids["1"], [5])
        await client.checked([5])
    await wait_until_async(lambda: counts_of(front).compared.failed == 2, "both are compared")
    assert (counts_of(front).new.errors, counts_of(front).new.answered) == (2, 0)
    await wait_until_async(lambda: front.exchange.slots.used == 0, "its slots are free")


@beside(playing)
async def test_a_version_whose_transform_is_being_imported_gets_no_request_of_a_canary(scene, front, engine, /, monkeypatch):
    monkeypatch.delitem(sys.modules, "tests.fakes.slow_module", raising=False)
    IMPORTED.clear()
    deployed = {version: engine.deploy() for version in "12"}
    slow = transform("slow_module:first")
    engine.publish(m=deployed, rollouts={"m": published(compare=True)}, transforms={"1": FIRST, "2": slow})
    await known(front)
    client = await scene.connect()
    client.send(text_request("57"))
    await complete(engine, deployed["1"][0], [5])
    await client.checked([5])
    IMPORTED.set()
    await imported(front)
    client.send(text_request("57"))
    await complete(engine, deployed["2"][0], [5])
    await client.checked([5])
    assert (counts_of(front).old.answered, counts_of(front).new.answered) == (1, 1)


@beside(playing)
async def test_a_request_that_both_versions_refuse_is_refused_once_and_no_error(scene, front, engine, /):
    await begin(front, engine, second=FIRST)
    client = await scene.connect()
    client.send(text_request("x"))
    assert await client.status() == 500
    client.send(text_request())
    assert await client.status() == 400
    assert counts_of(front).new.errors == 1
    assert [counts.failures for counts in front.published.counts.values()] == [2, 2], "of either version"


@beside(playing)
async def test_an_import_that_waits_delays_no_other_model_and_its_own_requests_wait(scene, front, engine, /, monkeypatch):
    monkeypatch.delitem(sys.modules, "tests.fakes.slow_module", raising=False)
    IMPORTED.clear()
    other, deployed = engine.deploy("other"), engine.deploy()
    engine.publish(m=deployed, other=other, transforms={"1": transform("slow_module:first")})
    client, waiting = await scene.connect(), await scene.connect()
    waiting.send(text_request("5"))
    client.send(*request([5], model="other"))
    engine.complete(await job_of(engine, other[0]))
    await client.checked([5])
    client.send(*request([6]))
    engine.complete(await job_of(engine, deployed[0]))
    await client.checked([6])
    assert "of model 'm' is being imported" in front.published.unready_reason()
    IMPORTED.set()
    await imported(front)
    await complete(engine, deployed[0], [5])
    await waiting.checked([5])
    assert front.published.unready_reason() == ""
