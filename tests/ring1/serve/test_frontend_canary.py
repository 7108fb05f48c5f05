"""A front during a canary or shadow, with an engine that the test plays: who answers, and what counts as an error."""

import json
from types import SimpleNamespace

import pytest

from hps.regions.exchange import H_DEPLOYMENT_ID
from hps.regions.layout import FAILED, RETIRED
from hps.serve.frontend import comparisons, exchange
from hps.testing.waiting import wait_until_async
from hps.types import TableSpec
from tests.fakes.clock import Clock
from tests.servers.front_service import DIM, vectors_of
from tests.servers.on_loop import beside
from tests.servers.played_front import LARGE, SETTINGS, json_request, playing, request

LIMIT_S = SETTINGS["request_timeout_s"]


def clock_of(monkeypatch):
    """The clock by which lookups wait, which the test moves."""
    clock = Clock(1000.0)
    times = SimpleNamespace(monotonic=clock, perf_counter=clock, perf_counter_ns=lambda: int(clock.now * 1e9))
    monkeypatch.setattr(exchange, "time", times)
    monkeypatch.setattr(comparisons, "time", times)
    return clock


def published(mode="canary", **more):
    """A rollout of version 2 for all requests, as the engine publishes it."""
    return {
        "id": "a", "mode": mode, "version": "2", "serving": "1", "share": 1.0, "header": "x-user-id", "compare": False,
        "queue_requests": 64, "queue_bytes": 1 << 20, **more,
    }  # fmt: skip


def failure(status):
    return json.dumps({"status": status, "message": "no", "reason": ""}).encode()


async def known(front):
    await wait_until_async(lambda: front.published.written[0] == front.published.version, "the front knows what was published")


async def begin(front, engine, mode="canary", new=None, versions="12", **more):
    """Try version 2 out; return the ids of the deployments."""
    deployed = {version: engine.deploy() for version in versions}
    if new is not None:
        deployed["2"] = new
    engine.publish(m=deployed, rollouts={"m": published(mode, **more)})
    await known(front)
    return {version: deployment_id for version, (deployment_id, _) in deployed.items()}


def counts_of(front):
    return front.published.rollout_counts["m"][1]


async def job_of(engine, deployment_id):
    job = await engine.job()
    assert int(job.header[H_DEPLOYMENT_ID]) == deployment_id
    return job


@pytest.mark.parametrize("binary", [True, False])
@beside(playing)
async def test_a_request_that_the_new_version_keeps_is_the_serving_ones_after_half_the_time(
    scene, front, engine, /, monkeypatch, binary
):
    clock = clock_of(monkeypatch)
    ids, client = await begin(front, engine), await scene.connect()
    client.send(*(request([5]) if binary else [json_request([5])]))
    kept = await job_of(engine, ids["2"])
    clock.now += LIMIT_S * 0.51
    again = await job_of(engine, ids["1"])
    assert again.slot != kept.slot, "the engine may still write there"
    engine.complete(again)
    assert await client.status() == 200
    assert (counts_of(front).new.errors, counts_of(front).old.answered) == (1, 1)
    assert front.exchange.slots.is_allocated(kept.slot)
    engine.complete(kept, of=lambda keys: vectors_of(keys) + 1)
    await wait_until_async(lambda: front.exchange.slots.used == 0, "the late answer frees its slot")
    assert counts_of(front).new.requests == 1


@beside(playing)
async def test_a_compared_answer_keeps_its_slot_until_the_other_version_has_answered(scene, front, engine, /):
    ids, client = await begin(front, engine, "shadow"), await scene.connect()
    client.send(*request([5]))
    first = await job_of(engine, ids["1"])
    engine.complete(first)
    await client.checked([5])
    second = await job_of(engine, ids["2"])
    client.send(*request([6]))
    third = await job_of(engine, ids["1"])
    assert len({first.slot, second.slot, third.slot}) == 3
    engine.complete(third)
    await client.checked([6])
    engine.complete(second)
    engine.complete(await job_of(engine, ids["2"]), of=lambda keys: vectors_of(keys) + 1)
    await wait_until_async(lambda: front.exchange.slots.used == 0, "its slots are free")
    compared = counts_of(front).compared
    assert (compared.identical, compared.different, compared.failed, compared.largest) == (1, 1, 0, 1.0)


@pytest.mark.parametrize("mode", ["canary", "shadow"])
@pytest.mark.parametrize("binary", [True, False])
@beside(playing)
async def test_a_difference_is_of_the_new_versions_numbers_from_the_serving_ones(scene, front, engine, /, mode, binary):
    ids, client = await begin(front, engine, mode, compare=True), await scene.connect()
    client.send(*(request([5]) if binary else [json_request([5])]))
    for version in "21" if mode == "canary" else "12":
        job = await job_of(engine, ids[version])
        engine.complete(job, of=lambda keys, version=version: vectors_of(keys) * int(version))
    assert await client.status() == 200
    await wait_until_async(lambda: counts_of(front).compared.requests == 1, "it is compared")
    assert counts_of(front).compared.difference == 1.0
    assert sum(counts.successes for counts in front.published.counts.values()) == 1, "one client has got an answer"
    assert (counts_of(front).new.answered, counts_of(front).old.answered) == ((1, 0) if mode == "canary" else (1, 1))


@beside(playing)
async def test_a_request_for_a_version_by_its_number_is_neither_counted_nor_compared(scene, front, engine, /):
    ids, client = await begin(front, engine, "shadow"), await scene.connect()
    for version in "12":
        head, body = request([5])
        client.send(head.replace(b"/infer", b"/versions/%s/infer" % version.encode()), body)
        engine.complete(await job_of(engine, ids[version]))
        await client.checked([5])
    assert engine.loop_state.next_request() is None
    assert counts_of(front).old.requests == counts_of(front).new.requests == 0


@beside(playing)
async def test_a_version_that_a_request_names_fails_for_itself_and_counts_nothing(scene, front, engine, /):
    ids, client = await begin(front, engine), await scene.connect()
    head, body = request([5])
    client.send(head.replace(b"/infer", b"/versions/2/infer"), body)
    engine.complete(await job_of(engine, ids["2"]), FAILED, failure(500))
    assert await client.status() == 500
    assert counts_of(front).new.requests == counts_of(front).old.requests == 0


@beside(playing)
async def test_a_request_that_the_serving_version_keeps_is_its_error(scene, front, engine, /, monkeypatch):
    clock = clock_of(monkeypatch)
    ids, client = await begin(front, engine, "shadow"), await scene.connect()
    client.send(*request([5]))
    kept = await job_of(engine, ids["1"])
    clock.now += LIMIT_S * 1.01
    assert await client.status() == 504
    assert (counts_of(front).old.errors, counts_of(front).new.errors) == (1, 0)
    engine.complete(kept)
    await wait_until_async(lambda: front.exchange.slots.used == 0, "its slot is free")


@beside(playing)
async def test_a_request_that_finds_no_slot_takes_that_of_what_waits_to_be_compared(scene, front, engine, /, monkeypatch):
    clock_of(monkeypatch)  # it stands: the comparison under way is not given up
    ids, client = await begin(front, engine, "shadow"), await scene.connect()
    client.send(*request([0]))
    engine.complete(await job_of(engine, ids["1"]))
    await client.checked([0])
    compared = await job_of(engine, ids["2"])
    while not counts_of(front).compared.dropped:  # half of the slab is taken
        client.send(*request([5]))
        engine.complete(await job_of(engine, ids["1"]))
        await client.checked([5])
    assert front.exchange.comparisons._queue
    keys, clients = list(range(2 * LARGE)), [await scene.connect() for _ in range(3)]
    jobs = []
    for large in clients:  # a quarter each
        large.send(*request(keys))
        jobs.append(await job_of(engine, ids["1"]))
    for large, job in zip(clients, jobs, strict=True):
        engine.complete(job)
        await large.checked(keys)
    engine.complete(compared)
    while front.exchange.comparisons._current or front.exchange.comparisons._queue:
        engine.complete(await job_of(engine, ids["2"]))
        await wait_until_async(lambda: not front.exchange.pending, "it is compared")
    assert (front.exchange.slots.used, front.exchange.comparisons._bytes) == (0, 0)


@pytest.mark.parametrize("retires", [True, False])
@beside(playing)
async def test_an_engine_that_was_away_is_no_error_of_the_new_version(scene, front, engine, /, monkeypatch, retires):
    clock = clock_of(monkeypatch)
    ids, client = await begin(front, engine), await scene.connect()
    client.send(*request([5]))
    await job_of(engine, ids["2"])
    successor = scene.another_engine(first=100 * retires)
    await wait_until_async(lambda: not front.exchange.connected, "the front misses the engine")
    clock.now += LIMIT_S * 0.8
    successor.deploy()
    ids = await begin(front, successor)
    successor.start()
    job = await job_of(successor, ids["2"])
    polled = front._ticks["poll"]
    await wait_until_async(lambda: front._ticks["poll"] is not polled, "the front looks for late requests")
    successor.complete(job)
    await client.checked([5])
    assert (counts_of(front).new.errors, counts_of(front).new.answered) == (0, 1)


@beside(playing)
async def test_a_comparison_that_outlives_the_engine_is_no_error_of_the_new_version(scene, front, engine, /, monkeypatch):
    clock = clock_of(monkeypatch)
    ids, client = await begin(front, engine, "shadow"), await scene.connect()
    client.send(*request([5]))
    engine.complete(await job_of(engine, ids["1"]))
    await client.checked([5])
    await job_of(engine, ids["2"])
    successor = scene.another_engine(first=100)
    await wait_until_async(lambda: not front.exchange.connected, "the front misses the engine")
    clock.now += LIMIT_S
    await wait_until_async(lambda: counts_of(front).compared.failed, "it is given up")
    ids = await begin(front, successor, "shadow")
    successor.start()
    await wait_until_async(lambda: front.exchange.slots.used == 0, "its slots are free")
    assert counts_of(front).new.errors == 0


@beside(playing)
async def test_a_comparison_that_the_new_version_keeps_is_its_error_after_a_quarter_of_it(scene, front, engine, /, monkeypatch):
    clock = clock_of(monkeypatch)
    ids, client = await begin(front, engine, "shadow"), await scene.connect()
    client.send(*request([5]))
    engine.complete(await job_of(engine, ids["1"]))
    await client.checked([5])
    kept = await job_of(engine, ids["2"])
    clock.now += LIMIT_S * 0.26
    await wait_until_async(lambda: counts_of(front).new.errors == 1, "it is given up")
    engine.complete(kept)
    await wait_until_async(lambda: front.exchange.slots.used == 0, "its slots are free")


@pytest.mark.parametrize(("how", "errors"), [("cannot read it", 1), (400, 1), (500, 1), ("is retired", 0)])
@beside(playing)
async def test_a_request_that_only_the_serving_version_answers_is_an_error_of_the_shadow(scene, front, engine, /, how, errors):
    other = [TableSpec("m", "other", DIM, 0.0, 10_000)]
    new = (engine.loop_state.add(other, None), other) if how == "cannot read it" else None
    ids, client = await begin(front, engine, "shadow", new), await scene.connect()
    client.send(*request([5]))
    engine.complete(await job_of(engine, ids["1"]))
    await client.checked([5])
    if how == "is retired":
        engine.complete(await job_of(engine, ids["2"]), RETIRED)
    if isinstance(how, int):
        engine.complete(await job_of(engine, ids["2"]), FAILED, failure(how))
    await wait_until_async(lambda: counts_of(front).compared.failed, "it was tried")
    assert (counts_of(front).new.errors, counts_of(front).old.answered, counts_of(front).old.errors) == (errors, 1, 0)
    assert not any(counts.failures for counts in front.published.counts.values()), "no client's request has failed"
    await wait_until_async(lambda: front.exchange.slots.used == 0, "its slots are free")


@beside(playing)
async def test_a_front_that_lacks_the_new_version_serves_on(scene, front, engine, /):
    ids, client = await begin(front, engine, versions="1"), await scene.connect()
    client.send(*request([5]))
    engine.complete(await job_of(engine, ids["1"]))
    await client.checked([5])
    assert front.published.rollout_counts == {}


@pytest.mark.parametrize(
    ("line", "version"),
    [
        ("X-User-Id: user-4", "2"),
        ("X-User-Id:  user-4 ", "2"),
        ("x-user-id: user-5", "1"),
        ("x-user-id:", None),
        ("x: y", None),
    ],
)
@beside(playing)
async def test_an_empty_header_names_nobody_and_spaces_around_a_name_do_not_count(scene, front, engine, /, line, version):
    ids, client = await begin(front, engine), await scene.connect()
    [rollout] = front.published._rollouts.values()
    rollout._selection = SimpleNamespace(takes=lambda sender: sender == b"user-4")
    client.send(*request([5], line, *(["X-Request-Id: user-4"] if version is None else [])))
    engine.complete(await job_of(engine, ids[version or "2"]))
    await client.checked([5])


@beside(playing)
async def test_requests_of_one_connection_that_begin_alike_are_selected_by_an_id_of_each(scene, front, engine, /):
    """Ids are consecutive: a connection that kept the side of its last request, or drew a second id, would show."""
    ids, client = await begin(front, engine), await scene.connect()
    [rollout] = front.published._rollouts.values()
    rollout._selection = SimpleNamespace(takes=lambda sender: int(sender[-1:], 16) % 2 == 1)
    seen = []
    for number in range(6):
        client.send(*request([number]))
        job = await engine.job()
        [version] = [version for version, deployed in ids.items() if deployed == int(job.header[H_DEPLOYMENT_ID])]
        engine.complete(job)
        status, headers, _ = await client.answer()
        assert (status, int(headers["x-request-id"], 16) % 2) == (200, version == "2")
        seen.append(version)
    assert seen in ([*"121212"], [*"212121"])


@beside(playing)
async def test_a_rollout_that_has_ended_counts_and_compares_nothing(scene, front, engine, /):
    deployed = {version: engine.deploy() for version in "12"}
    engine.publish(m=deployed, rollouts={"m": published("shadow")})
    await known(front)
    engine.publish(m=deployed)
    await known(front)
    client = await scene.connect()
    client.send(*request([5]))
    engine.complete(await job_of(engine, deployed["1"][0]))
    await client.checked([5])
    assert engine.loop_state.next_request() is None
    assert counts_of(front).old.requests == 0


@pytest.mark.parametrize("how", ["fails", "hangs"])
@pytest.mark.parametrize("versions", ["12", "1"])
@beside(playing)
async def test_a_request_that_the_new_version_fails_after_its_canary_has_ended_is_the_serving_ones(
    scene, front, engine, /, monkeypatch, how, versions
):
    """Those under way when a canary ends are the ones that a version fails that has ended it."""
    clock = clock_of(monkeypatch)
    deployed = {version: engine.deploy() for version in "12"}
    engine.publish(m=deployed, rollouts={"m": published(compare=True)})
    await known(front)
    counts, client, other = counts_of(front), await scene.connect(), await scene.connect()
    client.send(*request([5]))
    job = await job_of(engine, deployed["2"][0])
    other.send(*request([6]))
    answered = await job_of(engine, deployed["2"][0])
    for _ in range(2):
        engine.publish(m={version: deployed[version] for version in versions})
        await known(front)
    engine.complete(answered)
    await other.checked([6])
    if how == "fails":
        engine.complete(job, FAILED, failure(500))
    else:
        clock.now += LIMIT_S * 0.51
    engine.complete(await job_of(engine, deployed["1"][0]))
    await client.checked([5])
    assert engine.loop_state.next_request() is None, "nothing is compared"
    assert (counts.new.requests, counts.old.requests) == (0, 0)


@beside(playing)
async def test_a_promoted_version_answers_for_itself(scene, front, engine, /):
    deployed = {version: engine.deploy() for version in "12"}
    engine.publish(m=deployed, rollouts={"m": published()})
    await known(front)
    client = await scene.connect()
    client.send(*request([5]))
    job = await job_of(engine, deployed["2"][0])
    engine.publish(m=deployed, serving="2")
    await known(front)
    engine.complete(job, FAILED, failure(500))
    assert await client.status() == 500


@beside(playing)
async def test_a_front_that_replaces_another_one_counts_on(scene, front, engine, /):
    ids, client = await begin(front, engine), await scene.connect()
    client.send(*request([5]))
    engine.complete(await job_of(engine, ids["2"]))
    await client.checked([5])
    scene.fronts.remove(front)
    await front.stop(0)
    front.close()
    successor = await scene.start_front()
    assert counts_of(successor).new.answered == 1
    await scene.connected(successor)
