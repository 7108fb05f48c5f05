"""`hps check-config --connect`, with servers that are there."""

import re
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hps.testing.waiting import wait_until
from tests.ring1.tools.cli.test_check_config import content, findings, written
from tests.servers.child_processes import ChildProcesses
from tests.servers.redis_server import RedisClusterServers, RedisServer
from tests.servers.running_service import model_of
from tests.servers.s3_server import S3Server, know_only_moto

__all__ = ["content"]
RIGHTS = (
    "+@connection +info +cluster|slots +scan +get +set +del +watch +multi +exec +hget +hset +hsetnx +hmget +hgetall "
    "+hlen +hscan +hdel +hrandfield +hincrby +unlink +eval +pexpire +time +memory|usage"
)  # as docs/redis.md says


def test_what_a_running_server_holds_cannot_be_used(tmp_path: Path, content: dict[str, Any], children: ChildProcesses) -> None:
    content["persistent_db"] = {"type": "rocks_db", "path": str(tmp_path / "rocksdb")}
    path = written(tmp_path, content)
    process = children.hps("serve", path)
    assert process.stderr
    assert any("curl" in line for line in process.stderr)
    code, found = findings(path, "--connect")
    assert code == 1
    assert found["service.port"][0][0] == found["persistent_db.path"][0][0] == "unreachable"
    owner = re.search(r"holds 2 of 2 tables; process (\d+) has it open", found["persistent_db.path"][0][1])
    assert owner
    assert owner[1] in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()


def test_topics_are_looked_for(tmp_path: Path, content: dict[str, Any]) -> None:
    pytest.importorskip("confluent_kafka")
    from tests.servers.kafka_mock import KafkaMock

    with KafkaMock() as kafka:
        kafka.create("hps_et.shop.item", 1)
        content["update_source"] = {"type": "kafka", "brokers": kafka.address}
        code, found = findings(written(tmp_path, content), "--connect")
    assert code == 0
    (_, brokers), (level, topics) = found["update_source.brokers"]
    assert (level, "3 brokers answer" in brokers) == ("warning", True)
    assert topics.startswith("no topic hps_et.shop.user yet")


@pytest.mark.redis
def test_redis_is_asked_for_rights_and_layout_and_holds_nothing_afterwards(tmp_path: Path, content: dict[str, Any]) -> None:
    (tmp_path / "redis").mkdir()
    with RedisServer(tmp_path / "redis") as server, server.client() as client:
        client.execute_command("ACL", "SETUSER", "full", "on", ">pw", "~hps_et{*", *RIGHTS.split())
        client.execute_command("ACL", "SETUSER", "reader", "on", ">pw", "~hps_et{*", *RIGHTS.replace("+hset ", "").split())
        client.execute_command("ACL", "SETUSER", "nobody", "on", ">pw", "~hps_et{*", *RIGHTS.replace("+multi", "").split())
        client.execute_command("ACL", "SETUSER", "elsewhere", "on", ">pw", "~other*", *RIGHTS.split())

        def checked(user: str, password: str = "pw") -> tuple[int, dict[str, list[tuple[str, str]]]]:
            source = {"type": "redis_stream", "address": server.address}
            tier = {"type": "redis", "address": server.address, "user_name": user, "password": password, "num_partitions": 2}
            return findings(written(tmp_path, content | {"volatile_db": tier, "update_source": source}), "--connect")

        code, found = checked("full")
        assert (code, found["volatile_db.user_name"][0][0]) == (0, "good")
        assert [level for level, _ in found["update_source.address"]] == ["good", "warning"]
        client.set("hps_et.shop.user", 1)
        client.set("hps_et.shop.item", 1)
        assert [level for level, _ in checked("full")[1]["update_source.address"]] == ["good", "good"]
        assert set(client.keys()) == {b"hps_et.shop.user", b"hps_et.shop.item"}
        for user, password, where, text in (
            ("reader", "pw", "user_name", "may not HSET keys of hps_et.shop.user; grant ~hps_et{* +hset"),
            ("nobody", "pw", "user_name", "may not MULTI"),
            ("elsewhere", "pw", "user_name", "may not GET, HMGET"),
            ("full", "no", "address", "user_name or password is wrong"),
        ):
            code, found = checked(user, password)
            assert (code, found[f"volatile_db.{where}"][-1][0]) == (2, "wrong")
            assert text in found[f"volatile_db.{where}"][-1][1]
        assert set(client.keys()) == {b"hps_et.shop.user", b"hps_et.shop.item"}
        client.hset("hps_et{hps_et.shop.item}m", mapping={"dim": 8, "num_partitions": 7})
        code, found = checked("full")
        assert code == 2
        assert "hps_et.shop.item: got num_partitions 2, expected 7" in found["volatile_db.address"][-1][1]


@pytest.mark.redis
def test_a_cluster_that_is_not_whole_cannot_be_used(tmp_path: Path, content: dict[str, Any]) -> None:
    (tmp_path / "redis").mkdir()
    with RedisClusterServers(tmp_path / "redis") as cluster:
        content["volatile_db"] = {"type": "redis", "address": cluster.address, "num_partitions": 2}
        path = written(tmp_path, content)
        code, found = findings(path, "--connect")
        assert code == 0
        assert found["volatile_db.address"][0][1].endswith("a complete cluster")
        server = cluster.owner(0)
        with server.client() as client:
            client.execute_command("CLUSTER", "DELSLOTS", 0)
        content["volatile_db"]["address"] = server.address
        path = written(tmp_path, content)
        wait_until(lambda: findings(path, "--connect")[0] == 1, "the slot to be missed")


@pytest.mark.s3
def test_an_object_store_that_refuses_the_listing_is_reported(
    tmp_path: Path, content: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    store = S3Server()
    with ExitStack() as stack:
        stack.callback(store.start().kill)
        know_only_moto(monkeypatch)
        place = f"s3://{store.new_bucket()}/shop/user"
        store.put(f"{place}/key", np.arange(3).tobytes())
        store.put(f"{place}/emb_vector", np.ones((3, 4), np.float32).tobytes())
        content["models"] = [model_of("shop", [place], {"user": 4})]
        content["model_source"] = {"s3_endpoint_url": store.url, "max_attempts": 1}
        code, found = findings(written(tmp_path, content), "--connect")
        assert (code, found[place.rpartition("/")[0]]) == (0, [("good", "can be listed; it has 1 entries")])
        store.kill()
        code, found = findings(written(tmp_path, content), "--connect", "--no-files")
        assert (code, found[place.rpartition("/")[0]][0][0]) == (1, "unreachable")


@pytest.mark.gpu
def test_a_device_that_is_not_there_is_wrong(tmp_path: Path, content: dict[str, Any]) -> None:
    content["device"] = "cuda"
    content["models"][0]["deployed_device_list"] = [0, 99]
    code, found = findings(written(tmp_path, content), "--connect", "--timeout", 60)
    assert code == 2
    [(level, text)] = found["models[0].deployed_device_list"]
    assert (level, "got CUDA device 99" in text) == ("wrong", True)
