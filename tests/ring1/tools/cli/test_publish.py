"""`hps publish` and `hps updates replay`, over a log in memory: what they publish, print and refuse."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hps.ground.registry import IMPLEMENTATIONS, BuiltIn
from hps.models.writer import write_sparse_model, write_version
from hps.statistics.metrics import Metrics
from hps.updates import dead_letters
from hps.updates.base import Message, Partition
from hps.updates.dead_letters import DeadLetters
from hps.updates.framing import decode, encode
from tests.fakes.memory_log import MemoryBroker
from tests.ring1.tools.cli.test_cli import run, words
from tests.servers.running_service import document_of, model_of
from tests.tables.hugectr_messages import encode_hugectr
from tests.tables.trainer_dumps import save_delta

DIMS = {"user": 2, "item": 4}
KEYS = np.arange(100, dtype=np.int64) - 50


def vectors_of(keys: np.ndarray, dim: int, plus: float = 0.0) -> np.ndarray:
    return np.repeat(keys[:, None], dim, axis=1).astype(np.float32) + np.float32(plus)


def rows_of(keys: np.ndarray, dim: int, plus: float = 0.0) -> dict[int, bytes]:
    return dict(zip(keys.tolist(), map(bytes, vectors_of(keys, dim, plus)), strict=True))


@pytest.fixture
def broker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> MemoryBroker:
    for kind, name in (("update_log", "MemoryLog"), ("update_log_writer", "MemoryLogWriter")):
        ours = {**IMPLEMENTATIONS[kind], "kafka_message_queue": BuiltIn(f"tests.fakes.memory_log:{name}")}
        monkeypatch.setitem(IMPLEMENTATIONS, kind, ours)
    return MemoryBroker.by_name[f"{tmp_path.name.replace('_', '-')}:9092"]


@pytest.fixture
def config(tmp_path: Path, broker: MemoryBroker) -> Path:
    for name, dim in DIMS.items():
        write_sparse_model(tmp_path / "new" / name, (KEYS, vectors_of(KEYS, dim)))
    content = document_of(model_of("shop", [tmp_path / "new" / name for name in DIMS], DIMS))
    return saved(tmp_path, content)


def saved(tmp_path: Path, content: dict[str, Any]) -> Path:
    brokers = f"{tmp_path.name.replace('_', '-')}:9092"
    source = {"type": "kafka_message_queue", "brokers": brokers, "dead_letters": str(tmp_path / "dead")}
    (tmp_path / "ps.json").write_text(json.dumps({**content, "update_source": source}))
    return tmp_path / "ps.json"


def published(broker: MemoryBroker, table: str) -> tuple[dict[int, bytes], set[int]]:
    """The rows after all messages by sequence, and the keys that were deleted last."""
    rows: dict[int, bytes] = {}
    gone: set[int] = set()
    changes = [decode(message.value, DIMS[table]) for message in broker.messages(f"hps_et.shop.{table}")]
    for one in sorted(changes, key=lambda change: change.sequence):
        some = dict(zip(one.keys.tolist(), map(bytes, one.vectors), strict=True))
        rows, gone = {**rows, **some}, (gone - some.keys()) | set(one.deleted_keys.tolist())
    return {key: row for key, row in rows.items() if key not in gone}, gone


def test_a_model_is_published_whole(config: Path, broker: MemoryBroker) -> None:
    done = run("publish", config, "shop", "--create-partitions", 3, "--message-bytes", 200, "--rate", 1e6, code=0)
    for table, dim in DIMS.items():
        assert published(broker, table) == (rows_of(KEYS, dim), set())
        assert broker.partitions(f"hps_et.shop.{table}") == 3
    lines = [line for line in done.stdout.splitlines() if line.startswith("hps_et.shop.")]
    assert lines[1].startswith("hps_et.shop.item: published 100 changes; positions {")
    positions = json.loads(lines[1].partition("positions ")[2])
    assert positions == {str(message.partition): message.position for message in broker.messages("hps_et.shop.item")}


@pytest.mark.parametrize("table", ["item", None])
def test_a_delta_is_published(tmp_path: Path, config: Path, broker: MemoryBroker, table: str | None) -> None:
    older = np.concatenate([KEYS[5:], [70, 71]])
    for name, dim in DIMS.items():
        vectors = vectors_of(older, dim)
        vectors[10:12] += 1
        write_sparse_model(tmp_path / "old" / name, (older, vectors))
    places = [table, tmp_path / "new" / table] if table else []
    since = tmp_path / "old" / table if table else tmp_path / "old"
    run("publish", config, "shop", *places, "--since", since, "--create-partitions", 2, code=0)
    for name in [table] if table else DIMS:
        assert published(broker, name) == (rows_of(np.concatenate([KEYS[:5], older[10:12]]), DIMS[name]), {70, 71})


def test_versions_are_published(tmp_path: Path, broker: MemoryBroker) -> None:
    tables = {name: (KEYS, vectors_of(KEYS, dim)) for name, dim in DIMS.items()}
    write_version(tmp_path / "shop" / "1", tables)
    later = {name: (KEYS[:2], vectors_of(KEYS[:2], dim, 1.0)) for name, dim in DIMS.items()}
    write_version(tmp_path / "shop" / "2", later, delta_of="1", deleted={"item": KEYS[9:10]})
    model = model_of("shop", list(DIMS), DIMS, version_path=str(tmp_path / "shop"))
    config = saved(tmp_path, document_of(model))
    since = ("--since", tmp_path / "shop" / "1", "--create-partitions", 1)
    run("publish", config, "shop", *since, code=0)
    assert published(broker, "item") == (rows_of(KEYS[:2], 4, 1.0), {int(KEYS[9])})
    run("publish", config, "shop", "--version", 1, code=0)
    assert published(broker, "item") == (rows_of(KEYS, 4), set())


def test_other_formats_and_deletions_are_published(tmp_path: Path, config: Path, broker: MemoryBroker) -> None:
    np.savez(tmp_path / "rows.npz", ids=KEYS, embeddings=vectors_of(KEYS, 4))
    source = (config, "shop", "item", tmp_path / "rows.npz", "--keys", "ids", "--vectors", "embeddings")
    run("publish", *source, "--create-partitions", 2, "--delete", "-50,7", code=0)
    assert published(broker, "item") == (rows_of(KEYS[(KEYS != -50) & (KEYS != 7)], 4), {-50, 7})
    np.save(tmp_path / "gone.npy", KEYS[1:3])
    run("publish", config, "shop", "item", "--delete", tmp_path / "gone.npy", code=0)
    assert published(broker, "item")[1] == {-50, 7, -49, -48}


def test_evicted_keys_of_a_trainers_increment_are_deleted(tmp_path: Path, config: Path, broker: MemoryBroker) -> None:
    step = save_delta(tmp_path, 100, {"item": (KEYS[:9], vectors_of(KEYS[:9], 4), KEYS[20:22])})
    run("publish", config, "shop", "item", step, "--create-partitions", 2, code=0)
    assert published(broker, "item") == (rows_of(KEYS[:9], 4), set(KEYS[20:22].tolist()))


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["shop"], 1, "there is no such topic"),
        (["other"], 2, "'other': it is not configured"),
        (["shop", "price"], 2, "got table 'price', expected user, item"),
        (["shop", "--delete", "5"], 2, "--delete need TABLE"),
        (["shop", "item", "--delete", "five"], 2, "expected 5,7,9 or a .npy file"),
        (["shop", "item", "nowhere"], 2, "nowhere"),
        (["shop", "user", "new/item", "--create-partitions", "1"], 2, "expected"),
        (["shop", "--dtype", "float64"], 2, "'float32', 'float16', 'bfloat16'"),
    ],
)
def test_what_cannot_be_published_is_refused(
    tmp_path: Path, config: Path, broker, monkeypatch, arguments, code, message
) -> None:
    monkeypatch.chdir(tmp_path)
    done = run("publish", config, *arguments)
    assert (done.exit_code, message in words(done.output)) == (code, True), done.output
    assert broker.messages("hps_et.shop.user") == broker.messages("hps_et.shop.item") == []


def test_without_a_log_nothing_is_published(tmp_path: Path) -> None:
    content = document_of(model_of("shop", [tmp_path / name for name in DIMS], DIMS))
    (tmp_path / "ps.json").write_text(json.dumps(content))
    done = run("publish", tmp_path / "ps.json", "shop", code=2)
    assert "expected the log to publish to" in words(done.output)


def put_aside(tmp_path: Path, values: list[tuple[str, bytes, int]], partition: int = 1) -> None:
    letters = DeadLetters(str(tmp_path / "dead"), 1 << 20, Metrics())
    for reason, value, sequence in values:
        letters.add(Message(Partition("hps_et.shop.item", partition), "9", 77, b"", value), reason, reason, sequence)
    letters.close()


def test_dead_letters_are_published_with_their_own_sequence(tmp_path: Path, config: Path, broker) -> None:
    run("publish", config, "shop", "item", "--create-partitions", 2, code=0)
    newer, older = KEYS[:3], KEYS[3:5]
    own = encode(newer, vectors_of(newer, 4, 1.0), np.array([1000], np.int64), sequence=2**61)
    put_aside(tmp_path, [("width", own, 2**61), ("width", encode_hugectr(older, vectors_of(older, 4, 1.0)), 5)])
    before = len(broker.messages("hps_et.shop.item"))
    dry = run("updates", "replay", config, "--dry-run")
    assert (dry.exit_code, words(dry.stdout).strip()) == (0, "2 of 2 messages can be published")
    assert len(broker.messages("hps_et.shop.item")) == before
    for _ in range(2):
        done = run("updates", "replay", config, code=0)
        assert "2 of 2 messages published again (6 rows)" in done.output
    rows, gone = published(broker, "item")
    assert rows == {**rows_of(KEYS, 4), **rows_of(newer, 4, 1.0)}  # 5 is older than what was published
    assert gone == {1000}
    again_at = [
        one for one in (decode(message.value, 4) for message in broker.messages("hps_et.shop.item")) if one.sequence == 5
    ]
    assert {one.time_us for one in again_at} == {77}


def test_what_still_cannot_be_read_is_said(tmp_path: Path, config: Path, broker: MemoryBroker) -> None:
    broker.create("hps_et.shop.item")
    good = encode(KEYS, vectors_of(KEYS, 4), sequence=3)
    put_aside(tmp_path, [("width", good, 3), ("checksum", good[:-1] + b"\x01", 0), ("magic", b"junk", 0)])
    put_aside(tmp_path, [("size", encode(KEYS, vectors_of(KEYS, dim), sequence=4), 4) for dim in (3, 5)])  # of other widths
    (tmp_path / "dead" / "9.jsonl").write_text("half a line")
    done = run("updates", "replay", config, tmp_path / "dead", code=1)
    assert "1 of 6 messages published again (100 rows)" in done.output
    assert "5 still cannot be read (1 x checksum, 1 x dead_letter, 1 x magic, 2 x width)" in done.output
    assert published(broker, "item") == (rows_of(KEYS, 4), set())


def test_a_replay_that_is_interrupted_leaves_a_last_sequence_and_can_be_repeated(
    tmp_path: Path, config: Path, broker: MemoryBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    broker.create("hps_et.shop.item", 3)
    value = encode(KEYS[:1], vectors_of(KEYS[:1], 4), sequence=3)
    put_aside(tmp_path, [("width", value, 3)] * 3)
    read = dead_letters.DeadLetter.read
    left = [2]

    def interrupt(text: bytes, value: bytes | None = None) -> dead_letters.DeadLetter:
        if not left[0]:
            raise KeyboardInterrupt
        left[0] -= 1
        return read(text, value)

    with monkeypatch.context() as patched:
        patched.setattr(dead_letters.DeadLetter, "read", interrupt)
        assert run("updates", "replay", config).exit_code != 0
    assert [decode(message.value, 4).sequence for message in broker.messages("hps_et.shop.item")].count(3) == 2
    for number in range(3):
        last = broker.part(Partition("hps_et.shop.item", number))[-1]
        assert decode(last.value, 4).sequence > 1_000_000
    run("updates", "replay", config, code=0)
    assert published(broker, "item") == (rows_of(KEYS[:1], 4), set())


def test_a_directory_that_is_not_there_is_not_an_empty_one(tmp_path: Path, config: Path) -> None:
    assert run("updates", "replay", config).exit_code == 0  # no server has put a message aside yet
    done = run("updates", "replay", config, tmp_path / "nowhere")
    assert (done.exit_code, "there is no directory" in words(done.output)) == (2, True)


def test_dead_letters_of_topics_are_replayed(tmp_path: Path, config: Path, broker: MemoryBroker) -> None:
    content = json.loads(config.read_text())
    content["update_source"]["dead_letters"] = "topic"
    config.write_text(json.dumps(content))
    for topic in ("hps_et.shop.item", "hps_dead.shop.user"):  # a topic that is not there would be waited for
        broker.create(topic)
    from hps.configuration.load import load_configuration

    configuration = load_configuration(config)
    letters = DeadLetters.from_config(configuration.update_source, "", Metrics())
    value = encode(KEYS, vectors_of(KEYS, 4), sequence=3)
    letters.add(Message(Partition("hps_et.shop.item", 0), "9", 77, b"", value), "width", "", 3)
    letters.close()
    run("updates", "replay", config, code=0)
    assert published(broker, "item") == (rows_of(KEYS, 4), set())
