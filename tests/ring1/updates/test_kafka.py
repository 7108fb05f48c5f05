"""Settings and conversions of Kafka's clients, without a broker."""

from types import SimpleNamespace
from typing import Any

import pytest
from confluent_kafka import KafkaError

import hps.updates.kafka
from hps.configuration.tiers import UpdateSourceConfig
from hps.updates.base import Message, Partition
from hps.updates.kafka import KafkaLog, KafkaWriter, _failed, _message, _offset, _record_cause

FIRST = Partition("hps_et.shop.items", 0)


class Given:
    """A client that only notes its settings."""

    settings: Any = None

    def __init__(self, settings: dict[str, Any]) -> None:
        Given.settings = settings

    def __len__(self) -> int:
        return 0

    def close(self) -> None: ...
    def purge(self) -> None: ...
    def poll(self, timeout_s: float) -> None: ...


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch) -> type[Given]:
    monkeypatch.setattr(hps.updates.kafka, "Consumer", Given)
    monkeypatch.setattr(hps.updates.kafka, "Producer", Given)
    monkeypatch.setattr(hps.updates.kafka, "AdminClient", lambda settings: None)
    return Given


def source(**settings: Any) -> UpdateSourceConfig:
    return UpdateSourceConfig.model_validate({"type": "kafka", "brokers": "one:9092,two:9092", **settings})


def read_with(given: type[Given], **settings: Any) -> Any:
    KafkaLog.from_config(source(**settings), "group").close()
    return given.settings


@pytest.mark.parametrize(
    ("read_ahead", "largest", "queued", "answer", "fetch"),
    [
        (64 << 20, 1 << 20, 32 << 10, 8 << 20, 1 << 20),
        (64 << 20, 16 << 20, 32 << 10, 8 << 20, 8 << 20),
        (1 << 20, 1 << 19, 512, 128 << 10, 128 << 10),
        (1 << 20, 1 << 16, 512, 128 << 10, 1 << 16),
        (8 << 30, 1 << 20, 2_097_151, 1 << 30, 1 << 20),
        (32 << 30, 2 << 30, 2_097_151, 2**31 - 1 - 512, 1_000_000_000),
    ],
)
def test_what_is_read_ahead_is_bounded_by_half_in_the_queue_and_an_eighth_an_answer(
    given: type[Given], read_ahead: int, largest: int, queued: int, answer: int, fetch: int
) -> None:
    settings = read_with(given, read_ahead_bytes=read_ahead, max_message_bytes=largest)
    names = ("queued.max.messages.kbytes", "fetch.max.bytes", "fetch.message.max.bytes")
    assert tuple(settings[name] for name in names) == (queued, answer, fetch)


def test_a_reader_commits_and_starts_by_itself_and_the_users_settings_win(given: type[Given]) -> None:
    settings = read_with(given, metadata_refresh_interval_ms=250, config={"reconnect.backoff.max.ms": 7, "client.id": "me"})
    expected = {
        "bootstrap.servers": "one:9092,two:9092",
        "group.id": "group",
        "enable.auto.commit": False,
        "enable.auto.offset.store": False,
        "auto.offset.reset": "error",
        "enable.partition.eof": True,
        "allow.auto.create.topics": False,
        "check.crcs": True,
        "topic.metadata.refresh.interval.ms": 250,
        "reconnect.backoff.max.ms": 7,
        "client.id": "me",
    }
    assert {name: settings[name] for name in expected} == expected
    assert "sasl.password" not in settings


@pytest.mark.parametrize(
    ("position", "offset"),
    [("0", 0), ("17", 17), ("-1", -1), ("9" * 18, 10**18 - 1), ("9" * 19, -1), ("1700000000000-0", -1), ("", -1), ("x", -1)],
)
def test_positions_are_offsets_and_those_of_other_logs_are_before_all(position: str, offset: int) -> None:
    assert _offset(position) == offset


@pytest.mark.parametrize(
    ("stamp", "key", "time_us", "expected"), [(17, None, 17_000, b""), (-1, b"k", 0, b"k"), (0, b"", 0, b"")]
)
def test_a_message_has_a_time_in_microseconds_or_none(stamp: int, key: bytes | None, time_us: int, expected: bytes) -> None:
    answers = {"timestamp": (1, stamp), "offset": 5, "key": key, "value": b"value"}
    got: Any = SimpleNamespace(**{name: lambda answer=answer: answer for name, answer in answers.items()})
    assert _message(FIRST, got) == Message(FIRST, "5", time_us, expected, b"value")


def test_a_password_that_is_not_in_config_is_that_of_sasl(given: type[Given]) -> None:
    both = {"password": "s3cret", "config": {"sasl.password": "above"}}
    for settings, password in (({"password": "s3cret"}, "s3cret"), (both, "above")):
        assert read_with(given, **settings)["sasl.password"] == password
        KafkaWriter.from_config(source(**settings)).close()
        assert given.settings["sasl.password"] == password
        assert "s3cret" not in repr(source(**settings))


def test_the_cause_of_a_failure_stands_beside_that_all_brokers_are_down() -> None:
    refused, down = KafkaError(KafkaError._TRANSPORT), KafkaError(KafkaError._ALL_BROKERS_DOWN)
    for errors, kept in (([down], [down]), ([refused, down], [refused]), ([down, refused], [down, refused])):
        found: Any = []
        for error in errors:
            _record_cause(found, error)
        assert [one.code() for one in found] == [one.code() for one in kept]
    assert str(_failed("asking", refused, [down])) == f"asking failed: {refused.str()}; {down.str()}"
