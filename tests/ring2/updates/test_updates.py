"""Models that follow a real log of online updates, above databases in other processes; the rest is in tests/ring1/versions."""

import os
import re
from contextlib import closing
from typing import Any

import numpy as np
import pytest

import hps
from hps.configuration.load import load_configuration
from hps.ground.registry import implementation
from hps.statistics.metrics import Metrics
from hps.testing.waiting import wait_until
from hps.tools.cli.app import app as commands
from hps.updates.base import Message, Partition
from hps.updates.dead_letters import DeadLetters, read_topics
from tests.ring1.versions import test_live_updates as followed
from tests.ring1.versions.test_live_updates import DIMS, KEYS, Log, Make, caught_up, check, vectors_of
from tests.ring1.versions.test_live_updates import document as document  # fixtures
from tests.ring1.versions.test_live_updates import log as log
from tests.servers.running_service import running_service


@pytest.mark.parametrize(
    ("log", "host"),
    [
        pytest.param("kafka", "rocks_db", marks=pytest.mark.kafka),
        pytest.param("kafka", "redis", marks=[pytest.mark.kafka, pytest.mark.redis]),
        pytest.param("redis_stream", "hash_map", marks=pytest.mark.redis),
        pytest.param("redis_stream", "rocks_db, redis", marks=pytest.mark.redis),
        pytest.param("memory", "redis", marks=pytest.mark.redis),
    ],
    indirect=["log"],
)
def test_a_restart_goes_on_where_it_stopped(host: str, document: Make, log: Log) -> None:
    followed.test_a_restart_goes_on_where_it_stopped(host, document, log)


@pytest.mark.redis
def test_replicas_of_a_shared_database_commit_under_one_name(document: Make, log: Log) -> None:
    followed.test_positions_are_committed_under_hugectrs_names("redis", "", "hps.volatile", document, log)


@pytest.mark.kafka
@pytest.mark.redis
@pytest.mark.parametrize("log", ["kafka", "redis_stream"], indirect=True)
def test_dead_letters_lie_in_a_topic(document: Make, log: Log) -> None:
    settings = load_configuration(document(dead_letters="topic")).update_source
    topic, name = "hps_et.ranker.item", "hps_dead.ranker.item"
    aside = [Message(Partition(topic, 0), str(number), 5, b"", bytes([10, number]) * 1000) for number in range(5)]
    letters = DeadLetters.from_config(settings, "", Metrics())
    for message in aside:
        letters.add(message, "magic", "junk", 3)
    assert letters.flush(30.0)
    letters.close()
    with closing(implementation("update_log", settings.type).from_config(settings, "test")) as reader:
        assert [topic.message for topic in read_topics(reader, [name], 5.0)] == aside


@pytest.mark.parametrize("end", ["the broker comes", "the time is over"])
def test_a_version_takes_over_once_it_has_caught_up_or_has_waited_long_enough(
    end: str, document: Make, log: Log, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    positions = log.publish(1)
    assert log.memory is not None
    log.memory.away = True
    lag_s, wait_s = (0.5, 0.01) if end == "the time is over" else (1e-6, 600.0)
    with running_service(document(ready_lag_s=lag_s, ready_wait_s=wait_s), ready=end == "the time is over") as service:
        if end == "the time is over":
            assert "takes over although its updates are not within ready_lag_s (0.5 s) after 0.01 s: " in caplog.text
            assert service.client.get("/v2/health/ready").status_code == 200
        else:
            wait_until(lambda: service.client.get("/v1/updates").status_code == 200, "the databases to be open")
            wait_until(lambda: service.client.get("/v1/updates").json()["tables"], "the feed to start")
            waits = rf"waiting for the update log {log.settings['brokers']} \(the broker is away\), at most \d+ s more"
            wait_until(lambda: re.match(waits, service.client.get("/v2/health/ready").json()["reason"]), "the reason")
            assert service.client.get("/v2/health/ready").status_code == 503
            (status,) = service.client.get("/v1/models").json()["models"]
            assert (status["state"], bool(re.fullmatch(waits, status["reason"]))) == ("loading", True)
            assert re.search(f"model 'ranker': version 1: {waits}", caplog.text)
        log.memory.away = False
        wait_until(lambda: service.client.get("/v2/health/ready").status_code == 200, "the model to be ready")
        server = service.app.lifecycle.server
        if end == "the time is over":
            caught_up(server, positions)
        check(server, lambda keys: keys % 2)


def test_the_status_is_served_and_printed(document: Make, log: Log, capsys: pytest.CaptureFixture[str]) -> None:
    with running_service(document()) as service:
        positions = log.publish(1)
        assert log.memory is not None
        log.memory.append(Partition("hps_et.ranker.user", 0), b"what is this")
        wait_until(
            lambda: service.client.get("/v1/updates").json()["tables"][1]["dead_letters"] == {"magic": 1}, "the dead letter"
        )
        caught_up(service.app.lifecycle.server, {**positions, "user": {**positions["user"], "hps_et.ranker.user/0": "1"}})
        item, user = service.client.get("/v1/updates").json()["tables"]
        assert (item["table"], item["positions"], item["behind"], item["lag_s"]) == ("item", positions["item"], 0, 0)
        assert (user["rows"], user["stale_rows"], user["connected"]) == (KEYS[::2].size, 0, True)
        with pytest.raises(SystemExit) as ended:
            commands(["updates", "status", service.url])
        assert ended.value.code == 0
        lines = capsys.readouterr().out.splitlines()
        found = [line.split() for line in lines if " user " in line]
        assert [(line[:4], line[-2:]) for line in found] == [(["ranker", "1", "user", "0.0"], ["1", "magic"])]


@pytest.mark.redis
def test_what_another_replica_applies_to_a_shared_redis_while_caches_are_filled_reaches_them(document: Make, log: Log) -> None:
    whole = document("redis")
    with hps.HPS(whole) as first, hps.HPS(whole, deploy_models=False) as second:
        caught_up(first, log.publish(1))
        follow, positions = second._updates.start_and_wait, {}

        def late(*arguments: Any) -> None:
            positions.update(log.publish(2, KEYS[::3]))
            caught_up(first, positions)
            follow(*arguments)

        second._updates.start_and_wait = late  # type: ignore[method-assign]
        second.deploy("ranker")
        caught_up(second, positions)
        check(second, lambda keys: np.where(keys % 3 == 1, 2, keys % 2))


@pytest.mark.redis
def test_a_forked_process_leaves_the_feed_to_its_parent(document: Make, log: Log) -> None:
    whole = document("redis")
    whole["models"][0]["gpucache"] = False
    with hps.HPS(whole) as server:
        caught_up(server, log.publish(1))
        child = os.fork()
        if child == 0:
            vectors = server.lookup(KEYS[:1], "ranker", "user")
            same = (vectors == vectors_of(KEYS[:1], DIMS["user"], 1)).all() and server.updates() == []
            os._exit(0 if same else 1)
        assert os.waitpid(child, 0)[1] == 0
        caught_up(server, log.publish(2))
