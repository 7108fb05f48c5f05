"""Redis streams behind the contract of a log of updates, against a real server; a cluster is in tests/nightly/updates."""

import threading

import pytest

from hps.errors import ConfigError, UpdateLogError
from hps.testing.update_logs import UpdateLogContract, polled, values, written
from hps.testing.waiting import wait_until
from hps.updates import redis_streams
from hps.updates.base import Partition
from hps.updates.redis_streams import RedisStreamLog, RedisStreamWriter
from tests.servers.certificates import Authority
from tests.servers.redis_proxy import Proxy
from tests.servers.redis_server import RedisServer

pytestmark = pytest.mark.redis


def key_of(partition):
    return f"{{{partition.topic}}}/{partition.number}"


class Server(RedisServer):
    def stop(self):
        self.kill()


class RedisStreams(UpdateLogContract):
    log_class = RedisStreamLog
    writer_class = RedisStreamWriter

    def settings(self, server):
        return {"type": "redis_stream", "address": server.address}

    def add_partitions(self, server, topic, count):
        server.client().set(topic, count)

    def committed(self, server, group, partition):
        for found in server.client().xinfo_groups(key_of(partition)):
            if found["name"] == group.encode():
                return found["last-delivered-id"].decode()
        return None

    def remove_until(self, server, partition, position):
        ms, number = position.split("-")
        server.client().xtrim(key_of(partition), minid=f"{ms}-{int(number) + 1}", approximate=False)


class TestServer(RedisStreams):
    @pytest.fixture
    def server(self, tmp_path):
        with Server(tmp_path, "--appendonly", "yes", "--appendfsync", "always") as server:
            yield server

    def test_a_lost_reply_neither_repeats_nor_reorders(self, opened, server, topic):
        with Proxy(server.port) as proxy:
            writer = opened(writer=True, address=proxy.address)
            writer.partitions(topic, 20, create=1)
            for lost in range(3):
                written(writer, Partition(topic, 0), b"before %d" % lost)
                left = [b"-"]  # an id, the reply to the script
                proxy.fault = lambda data, left=left: None if left and left.pop() in data else data
                positions = written(writer, Partition(topic, 0), b"%d" % lost, b"after %d" % lost)
                assert not left
                found = server.client().xrevrange(key_of(Partition(topic, 0)), count=3)
                assert [position.decode() for position, _ in found[1::-1]] == positions
                wanted = [b"%s%d" % (what, lost) for what in (b"before ", b"", b"after ")]
                assert [fields[b"value"] for _, fields in reversed(found)] == wanted

    def test_a_writer_waits_for_room_again_and_again_and_then_gives_up(self, opened, server, topic, monkeypatch):
        writer = opened(writer=True, read_ahead_bytes=1 << 20)
        writer.partitions(topic, 20, create=1)
        partition, sent = Partition(topic, 0), []

        def overfill() -> None:
            for _ in range(20):
                writer.send(partition, bytes(100_000))
                sent.append(partition)

        for _ in range(2):
            overfill()  # more than there is room for
            assert writer.flush(20) == 0
            server.pause()
            with monkeypatch.context() as patch:
                patch.setattr("hps.updates.redis_streams._FULL_S", 0.2)
                with pytest.raises(UpdateLogError, match="Redis accepted nothing"):
                    overfill()
            server.resume()
            assert writer.flush(20) == 0
            assert server.client().xlen(key_of(partition)) == len(sent)

    def test_messages_that_are_given_up_are_told_and_the_next_ones_are_sent(self, opened, server, topic, monkeypatch):
        writer = opened(writer=True)
        writer.partitions(topic, 20, create=3)
        partitions = [Partition(topic, number) for number in range(3)]
        for round_number in range(2):
            server.stop()
            answers: list[str | Exception] = []
            for partition in partitions * 2:
                writer.send(partition, b"lost", sent=answers.append)
            with monkeypatch.context() as patch:
                patch.setattr("hps.updates.redis_streams._GIVE_UP_S", 0.0)
                assert writer.flush(60) == 0
            assert [type(answer) for answer in answers] == [UpdateLogError] * 6
            server.start()
            for partition in partitions:
                written(writer, partition, b"a")
                assert server.client().xlen(key_of(partition)) == round_number + 1

    def test_a_batch_that_arrives_late_is_not_appended_again(self, opened, server, topic):
        released = threading.Event()
        with Proxy(server.port) as proxy:
            writer = opened(writer=True, address=proxy.address)
            writer.partitions(topic, 20, create=1)
            held = [b"held"]
            proxy.hold_if = (lambda data: bool(held) and held[0] in data and held.pop() != b"", released)
            written(writer, Partition(topic, 0), b"held")
            written(writer, Partition(topic, 0), b"later")
            before = proxy.delivered
            released.set()
            proxy.wait_delivered(before)
        assert server.client().xlen(key_of(Partition(topic, 0))) == 2
        assert values(polled(self.reader(opened, [topic]), 2)) == [b"held", b"later"]

    @pytest.mark.parametrize(("moment", "made"), [("while it is read", "1-1"), ("before it is read", "*")])
    def test_a_stream_that_was_made_anew_is_read_whole(self, opened, server, writer, topic, moment, made):
        writer.partitions(topic, 20, create=1)
        partition = Partition(topic, 0)
        positions = written(writer, partition, b"a", b"b", b"c")
        log = self.reader(opened, [topic])
        polled(log, 3)
        wait_until(lambda: log.behind() == {partition: 0})
        log.pause([partition])
        server.client().delete(key_of(partition))
        server.client().xadd(key_of(partition), {"value": b"new"}, id=made)
        if moment == "before it is read":
            log.close()
            log = self.reader(opened, [topic], {partition: positions[2]})
        else:
            log.resume([partition])
        assert values(polled(log, 1)) == [b"new"]
        wait_until(lambda: partition in log.lost())

    def test_lag_shows_in_the_groups_of_a_stream(self, opened, server, writer, topic):
        writer.partitions(topic, 20, create=1)
        log = self.reader(opened, [topic])
        written(writer, Partition(topic, 0), *[b"x"] * 10)
        wait_until(lambda: log.behind() == {Partition(topic, 0): 10})
        messages = [message for _ in range(4) for message in log.poll(20, 1)]
        log.commit({Partition(topic, 0): messages[-1].position})
        key = key_of(Partition(topic, 0))
        wait_until(lambda: [group["lag"] for group in server.client().xinfo_groups(key)] == [6])

    def test_few_rights_suffice_and_missing_ones_are_named(self, opened, server, topic):
        partition = Partition(topic, 0)
        server.client().set(topic, 1)
        looking = "+info +get +exists +xread +xinfo|stream +eval_ro"
        rights = {"reader": looking + " +xgroup", "looker": looking, "writer": "+info +get +set +eval +xadd +xrevrange"}
        for name, commands in (rights | {"no_adder": "+info +get +set +eval"}).items():
            also = ("on", ">secret", "~hps_et.*", "~{hps_et.*", *commands.split())
            server.client().execute_command("ACL", "SETUSER", name, *also)
        writer, refused = (opened(writer=True, user_name=name, password="secret") for name in ("writer", "no_adder"))
        log, looker = (
            self.reader(opened, [topic], user_name=name, password="secret", group=name) for name in ("reader", "looker")
        )
        assert writer.partitions(topic, 20) == 1
        (position,) = written(writer, partition, b"x")
        assert writer.last(partition, 20).value == b"x"
        for one in (log, looker):
            assert values(polled(one, 1)) == [b"x"]
            one.commit({partition: position})
        wait_until(lambda: self.committed(server, "reader", partition) == position)
        wait_until(lambda: "xgroup" in looker.problem)
        assert log.problem == ""
        answers = []
        refused.send(partition, b"x", sent=answers.append)
        assert refused.flush(20) == 0
        assert "what the user may do" in str(answers[0])
        stranger = self.reader(opened, [topic], user_name="reader", password="wrong")
        wait_until(lambda: "password" in stranger.problem)

    @pytest.mark.parametrize("count", [b"1025", b"\xff" * (1 << 20), [b"1"]], ids=["too many", "large", "a list"])
    def test_a_count_that_is_none_stops_its_topic_alone(self, opened, server, writer, topic, count):
        good, bad = f"{topic}.good", f"{topic}.bad"
        client = server.client()
        writer.partitions(good, 20, create=1)
        client.rpush(bad, *count) if isinstance(count, list) else client.set(bad, count)
        written(writer, Partition(good, 0), b"x")
        log = self.reader(opened, [bad, good])
        assert values(polled(log, 1)) == [b"x"]
        wait_until(lambda: bad in log.problem_of(bad) and "1 to 1024" in log.problem_of(bad))
        assert len(log.problem_of(bad)) < 500
        assert (log.lacks(bad), log.problem_of(good)) == (False, "")
        with pytest.raises(UpdateLogError, match="1 to 1024"):
            writer.partitions(bad, 20)
        client.delete(bad)
        client.set(bad, 1)
        written(writer, Partition(bad, 0), b"repaired")
        assert values(polled(log, 1)) == [b"repaired"]
        wait_until(lambda: (log.problem, set(log.behind().values())) == ("", {0}))

    def test_no_more_partitions_are_made_than_are_read(self, opened, server, writer, topic):
        log = self.reader(opened, [topic])
        with pytest.raises(UpdateLogError, match="at most 1024"):
            writer.partitions(topic, 20, create=1025)
        assert not server.client().exists(topic)
        wait_until(lambda: log.lacks(topic))
        assert writer.partitions(topic, 20, create=1024) == 1024
        wait_until(lambda: len(log.behind()) == 1024)

    def test_a_key_that_is_no_stream_stops_its_partition_alone(self, opened, server, writer, topic):
        client = server.client()
        writer.partitions(topic, 20, create=3)
        first, second, third = (Partition(topic, number) for number in range(3))
        client.set(key_of(second), "no stream")
        log = self.reader(opened, [topic])
        for round_number in range(2):  # as the reader starts, and while it reads
            for partition in (first, third):
                written(writer, partition, b"%d" % round_number)
            assert values(polled(log, 2)) == [b"%d" % round_number] * 2
            wait_until(lambda: key_of(second) in log.problem_of(topic) and "WRONGTYPE" in log.problem_of(topic))
            wait_until(lambda: log.behind() == {first: 0, second: None, third: 0})
            client.delete(key_of(second))
            written(writer, second, b"repaired")
            assert values(polled(log, 1)) == [b"repaired"]
            wait_until(lambda: log.problem == "")
            client.delete(key_of(second))
            client.sadd(key_of(second), "no stream")

    def test_a_position_that_cannot_be_committed_is_a_problem_of_its_topic(self, opened, server, writer, topic):
        topics = [f"{topic}.a", f"{topic}.b"]
        for one in topics:
            writer.partitions(one, 20, create=1)
        (gone, gone_at), (kept, kept_at) = (
            (one, written(writer, one, b"x")[0]) for one in (Partition(topic, 0) for topic in topics)
        )
        log = self.reader(opened, topics)
        polled(log, 2)
        server.client().delete(key_of(gone))
        log.commit({gone: gone_at, kept: kept_at})
        wait_until(lambda: "committing" in log.problem_of(gone.topic))
        wait_until(lambda: self.committed(server, "hps.test", kept) == kept_at)
        assert log.problem_of(kept.topic) == ""
        written(writer, gone, b"y")
        log.commit({gone: gone_at})
        wait_until(lambda: log.problem == "")

    def test_a_reader_with_a_bug_says_so_and_reads_on(self, opened, writer, topic, monkeypatch, caplog):
        writer.partitions(topic, 20, create=1)
        written(writer, Partition(topic, 0), b"x")
        failed = []

        def fail_once(partition, entry):
            if not failed:
                failed.append(entry)
                raise ValueError("a bug")
            return message(partition, entry)

        message = redis_streams._message
        monkeypatch.setattr(redis_streams, "_message", fail_once)
        assert values(polled(self.reader(opened, [topic]), 1)) == [b"x"]
        (record,) = (record for record in caplog.records if record.exc_info)
        assert topic in record.message

    def test_a_name_for_certificates_is_refused(self, opened):
        with pytest.raises(ConfigError, match="tls_server_name_identification"):
            opened(tls_server_name_identification="redis.example")

    @pytest.mark.openssl
    def test_messages_go_through_tls(self, opened, tmp_path, topic):
        authority = Authority(tmp_path)
        (made, key), ca = map(str, authority.sign("redis.example", "server")[:2]), str(authority.path)
        arguments = ("--tls-ca-cert-file", ca, "--tls-cert-file", made, "--tls-key-file", key, "--tls-auth-clients", "no")
        with RedisServer(tmp_path / "redis", *arguments, tls={"ssl": True, "ssl_ca_certs": ca}) as server:
            settings = {"enable_tls": True, "tls_ca_certificate": ca, "address": f"127.0.0.1:{server.port}"}
            writer = opened(writer=True, **settings)
            writer.partitions(topic, 20, create=1)
            written(writer, Partition(topic, 0), b"x")
            assert values(polled(self.reader(opened, [topic], **settings), 1)) == [b"x"]
            stranger = self.reader(opened, [topic], **settings | {"address": f"localhost:{server.port}"})
            wait_until(lambda: "ertificate" in stranger.problem)
