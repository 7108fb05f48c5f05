"""What the default checks let serve, what they hold, and what a person accepts: versions of a repository, polled."""

import io
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hps
from hps.engine.refresh import Pace
from hps.filesystems.base import FileWriter
from hps.filesystems.local import LocalFileSystem
from hps.statistics.key_traces import KeyRecorder
from hps.tensors.batch import Batch
from hps.testing.waiting import wait_until
from hps.types import TableSpec
from hps.versions.checks.run import VersionCheck
from tests.fakes import entry_points
from tests.servers.running_service import document_of, model_of

ROWS, DIM = 2000, 16
KEYS = np.arange(ROWS, dtype=np.int64) * 7
SAID = {
    "format": "arrays",
    "file": "dense.json",
    "inputs": {"item": {"table": "item"}, "age": {}},
    "outputs": ["score"],
}
RANDOM = np.random.default_rng(5)
FIRST = (RANDOM.standard_normal((ROWS, DIM)) * RANDOM.gamma(2.0, 1.0, (ROWS, 1))).astype(np.float32)


@pytest.fixture(scope="module", autouse=True)
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    directory = tmp_path_factory.mktemp("engine")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(directory))
        entry_points.install(directory, "hps.networks", {"arrays": "tests.fakes.networks:ArrayNetwork"})
        yield


def retrained(noise: float = 0.3) -> np.ndarray:
    """The vectors after another day of training: each a little elsewhere."""
    return FIRST + noise * np.random.default_rng(6).standard_normal(FIRST.shape).astype(np.float32)


Write = Callable[..., None]


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return tmp_path / "repository" / "ranker"


@pytest.fixture
def write(home: Path) -> Write:
    def write(version: int, vectors: np.ndarray, *, factor: float = 1.0, keys: np.ndarray = KEYS) -> None:
        content = json.dumps({"factor": factor}).encode()
        hps.write_version(home / str(version), {"item": (keys, vectors)}, network=(SAID, content))

    return write


@pytest.fixture
def document(tmp_path: Path, home: Path, write: Write) -> Callable[..., dict[str, Any]]:
    write(1, FIRST)

    def document(**more: Any) -> dict[str, Any]:
        entry = model_of("ranker", ["item"], {"item": DIM}, **more)
        (home / "model.json").write_text(json.dumps(entry))
        return document_of(persistent=tmp_path / "rocksdb", model_repository=str(home.parent))

    return document


Make = Callable[..., dict[str, Any]]


def polled(server: hps.HPS) -> Exception | None:
    return server.poll()["ranker"]


def state(server: hps.HPS) -> list[tuple[str, str]]:
    wait_until(lambda: "retiring" not in [version.state for version in server.versions("ranker")], "no version retires")
    return [(version.version, version.state) for version in server.versions("ranker")]


def test_a_version_like_the_last_one_takes_over(document: Make, write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    shares: list[float] = []

    def paced(share: float, wait: Callable[[float], bool]) -> Pace:
        shares.append(share)
        return Pace(share, wait)

    monkeypatch.setattr("hps.versions.checks.run.Pace", paced)
    with hps.HPS(document()) as server:
        write(2, retrained())
        assert polled(server) is None
        assert state(server) == [("2", "serving"), ("1", "kept")]
        report = server.model("ranker").checks
        assert report is not None
        assert (report.verdict, report.against) == ("passed", "1")
        assert {found.check: found.outcome for found in report.checks} == dict.fromkeys(
            ["finite", "keys", "norms", "vectors", "scores"], "passed"
        )
    assert shares[0] == 1.0, "no lookups to spare"
    assert shares[1] <= 0.2


SHUFFLED = FIRST[np.random.default_rng(7).permutation(ROWS)]
WIDER = np.random.default_rng(8).standard_normal((ROWS // 2, 2 * DIM)).astype(np.float32).reshape(ROWS, DIM)


@pytest.mark.parametrize(
    ("vectors", "factor", "check"),
    [(SHUFFLED, 1.0, "vectors"), (WIDER, 1.0, "vectors"), (retrained(), -1.0, "scores"), (8 * FIRST, 1.0, "norms")],
    ids=["shuffled rows", "rows of twice the width", "scores of the other sign", "vectors times 8"],
)
def test_a_version_unlike_the_last_one_is_held_and_serves_under_its_number_until_it_is_accepted(
    document: Make, write: Write, vectors: np.ndarray, factor: float, check: str
) -> None:
    with hps.HPS(document()) as server:
        write(2, vectors, factor=factor)
        error = polled(server)
        assert isinstance(error, hps.VersionHeldError)
        assert f"version 2 is held, and 1 serves: {check}" in str(error)
        assert state(server) == [("1", "serving"), ("2", "held")]
        assert server.poll() == {}, "it is not loaded a second time"
        np.testing.assert_array_equal(server.lookup([7], "ranker", "item")[0], FIRST[1])
        inputs = {"item": [7], "age": [0.0]}
        assert server.score("ranker", inputs)["score"][0] == pytest.approx(FIRST[1].sum(), rel=1e-4)
        assert server.score("ranker", inputs, version="2")["score"][0] == pytest.approx(factor * vectors[1].sum(), rel=1e-4)
        with pytest.raises(hps.VersionHeldError, match="`hps deploy ranker --accept`"):
            server.deploy("ranker")
        assert server.pin("ranker") is None
        server.deploy("ranker", accept=True)
        assert state(server) == [("2", "serving"), ("1", "kept")]
        assert (server.poll(), server.check()) == ({}, [])
        server.deploy("ranker", force=True)
        assert server.model("ranker").version == "2", "accepted once for these files"


@pytest.mark.parametrize(
    ("volatile", "entry"),
    [
        ("disabled", {"gpucacheper": 4.0, "cache_refresh_percentage_per_iteration": 1.0}),
        ("disabled", {"embedding_cache_type": "static"}),
        ("row_files", {"gpucache": False}),
    ],
    ids=["a cache alone", "static tables alone", "row files"],
)
def test_rows_are_compared_wherever_they_are(
    document: Make, write: Write, tmp_path: Path, volatile: str, entry: dict[str, Any]
) -> None:
    persistent = {"type": "row_files", "path": str(tmp_path / "rows")} if volatile == "row_files" else {"type": "disabled"}
    configuration = {**document(**entry), "volatile_db": {"type": "disabled"}, "persistent_db": persistent}
    with hps.HPS(configuration) as server:
        write(2, SHUFFLED)
        polled(server)
        assert outcome(server, "vectors")[1].startswith("alignment")
        assert state(server) == [("1", "serving"), ("2", "held")]
        for check in ("keys", "norms"):
            assert outcome(server, check)[0] == "passed"
        write(3, retrained())
        assert polled(server) is None
        assert {outcome(server, check, "3")[0] for check in ("keys", "norms", "vectors")} == {"passed"}


def nonfinite(share: float = 0.001) -> np.ndarray:
    vectors = retrained()
    vectors[:: int(1 / share), 3] = np.nan
    return vectors


def test_a_version_with_rows_that_are_not_finite_is_refused(document: Make, write: Write) -> None:
    with hps.HPS(document()) as server:
        write(2, nonfinite())
        assert "2 of 2000 rows have an infinity or NaN" in str(polled(server))
        assert state(server) == [("1", "serving")]


def test_a_version_with_rows_that_are_not_finite_is_held_if_so_configured(document: Make, write: Write) -> None:
    with hps.HPS(document(checks={"finite": {"policy": "hold"}})) as server:
        write(2, nonfinite())
        assert "version 2 is held, and 1 serves: finite of item: nonfinite rows 2, expected at most 0" in str(polled(server))
        assert state(server) == [("1", "serving"), ("2", "held")]


def test_files_of_another_width_are_not_loaded(document: Make, write: Write) -> None:
    with hps.HPS(document()) as server:
        write(2, np.zeros((ROWS, 2 * DIM), np.float32))
        server.poll()
        assert state(server) == [("1", "serving")]


@pytest.mark.parametrize("checks", [False, {"vectors": {"policy": "warn"}, "scores": {"policy": "off"}}])
def test_checks_that_are_off_or_warn_let_a_version_serve(document: Make, write: Write, checks: Any) -> None:
    with hps.HPS(document(checks=checks)) as server:
        write(2, SHUFFLED)
        assert polled(server) is None
        assert state(server)[0] == ("2", "serving")


def test_a_version_that_is_refused_is_not_kept(document: Make, write: Write) -> None:
    with hps.HPS(document(checks={"vectors": {"policy": "refuse"}})) as server:
        write(2, SHUFFLED)
        assert "version 2 is refused: vectors" in str(polled(server))
        assert state(server) == [("1", "serving")]


def test_a_better_version_takes_over_from_before_a_held_one_which_is_dropped(document: Make, write: Write) -> None:
    with hps.HPS(document()) as server:
        write(2, SHUFFLED)
        polled(server)
        write(3, retrained())
        assert polled(server) is None
        assert state(server) == [("3", "serving"), ("1", "kept")]
        write(4, SHUFFLED)
        polled(server)
        assert server.rollback("ranker").version == "1"
        assert state(server) == [("1", "serving"), ("4", "held"), ("3", "kept")]
        assert server.check() == []


def test_a_version_below_the_serving_one_is_a_way_back_and_not_checked(document: Make, write: Write) -> None:
    with hps.HPS(document(keep_versions=0)) as server:
        write(2, SHUFFLED)
        server.deploy("ranker", accept=True)
        assert server.deploy("ranker", "1").version == "1"


def test_a_held_version_is_not_served_by_the_next_start_and_accepted_by_any_replica(
    document: Make, write: Write, home: Path, tmp_path: Path
) -> None:
    with hps.HPS(document()) as server:
        write(2, SHUFFLED)
        polled(server)
        kept = json.loads((home / "checks-2.json").read_text())
        assert (kept["version"], kept["against"], kept["accepted_at"]) == ("2", "1", None)
    with hps.HPS(document()) as server, hps.HPS({**document(), "persistent_db": {"type": "disabled"}}) as other:
        assert (state(server), state(other)) == ([("1", "serving")], [("1", "serving")])
        for replica in (server, other):
            with pytest.raises(hps.VersionHeldError):
                replica.deploy("ranker")
        assert (state(server), state(other)) == ([("1", "serving"), ("2", "held")], [("1", "serving"), ("2", "held")])
        other.deploy("ranker", accept=True)
        assert polled(server) is None
        assert state(server) == [("2", "serving"), ("1", "kept")]
    with hps.HPS(document()) as server:
        assert state(server) == [("2", "serving")]


def test_a_fleet_holds_a_version_until_one_replica_is_told_to_accept_it(document: Make, write: Write, home: Path) -> None:
    alone = {"persistent_db": {"type": "disabled"}}
    with hps.HPS(document()) as server, hps.HPS({**document(), **alone}) as other:
        write(2, SHUFFLED)
        server.change_fleet("ranker", "deploy", "2")
        for replica in (server, other):
            replica.read_documents()
            assert isinstance(replica.follow()["ranker"], hps.VersionHeldError)
            assert replica.follow() == {}, "it is not tried again"
            status = replica.fleet("ranker")
            assert status is not None
            assert (status.follows, status.pending, "version 2 is held" in status.reason) == (False, False, True)
        with pytest.raises(hps.ConflictError, match="--fleet"):
            server.deploy("ranker", "1", accept=True)
        server.deploy("ranker", accept=True)
        assert other.follow() == {"ranker": None}
        for replica in (server, other):
            assert replica.model("ranker").version == "2"
            status = replica.fleet("ranker")
            assert status is not None
            assert status.follows
        assert server.pin("ranker") is None


@pytest.mark.parametrize("content", [b"{", b'{"format": 2}', b"[]"])
def test_a_damaged_report_is_ignored(document: Make, write: Write, home: Path, content: bytes) -> None:
    configuration = document()
    (home / "checks-1.json").write_bytes(content)
    with hps.HPS(configuration) as server:
        assert state(server) == [("1", "serving")]


def test_the_reports_of_versions_that_are_removed_go_with_the_next_one(
    document: Make, write: Write, home: Path, tmp_path: Path
) -> None:
    with hps.HPS(document()) as server:
        for version in (2, 3):
            write(version, retrained(0.1 * version))
            assert polled(server) is None
        (home / "2").rename(tmp_path / "2")
        (home / "checks-mine.json").write_text("{}")
        write(4, retrained(0.4))
        assert polled(server) is None
        assert sorted(path.name for path in home.glob("checks-*")) == [f"checks-{of}.json" for of in ("1", "3", "4", "mine")]


def test_a_report_that_cannot_lie_beside_the_versions_is_kept_beside_the_persistent_database(
    document: Make, write: Write, home: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    create = LocalFileSystem.create

    def refuse(self: LocalFileSystem, path: str) -> FileWriter:
        if path.startswith(str(home)):
            raise hps.ModelFileError(f"writing {path}: read-only file system")
        return create(self, path)

    configuration = document()
    monkeypatch.setattr(LocalFileSystem, "create", refuse)
    with hps.HPS(configuration) as server:
        monkeypatch.undo()
        write(2, SHUFFLED)
        monkeypatch.setattr(LocalFileSystem, "create", refuse)
        polled(server)
        assert state(server) == [("1", "serving"), ("2", "held")]
    assert not list(home.glob("checks-*"))
    assert "a restart forgets" not in caplog.text
    with hps.HPS(configuration) as server:
        assert state(server) == [("1", "serving")]
    with hps.HPS({**configuration, "persistent_db": {"type": "disabled"}}) as server:
        assert state(server) == [("2", "serving")], "nothing says that it was held"
        monkeypatch.undo()
        write(3, FIRST)
        monkeypatch.setattr(LocalFileSystem, "create", refuse)
        polled(server)
    assert "a restart forgets that version 3 is held: writing" in caplog.text


@pytest.mark.parametrize(("shuffled", "expected"), [(False, "passed"), (True, "held")])
def test_a_table_of_another_width_is_compared_by_how_its_rows_lie(
    document: Make, write: Write, home: Path, shuffled: bool, expected: str
) -> None:
    with hps.HPS(document()) as server:
        entry = server.catalog.model("ranker")
        wider = np.hstack([FIRST, 0.1 * retrained()])
        write(2, wider[np.random.default_rng(9).permutation(ROWS)] if shuffled else wider)
        wide = hps.load_configuration(
            {"models": [{**model_of("ranker", ["item"], {"item": 2 * DIM}), "version_path": str(home)}]}
        )
        assert entry.version_path == str(home)
        if shuffled:
            with pytest.raises(hps.VersionHeldError, match="vectors of item: alignment"):
                server.deploy(wide.models[0])
        else:
            server.deploy(wide.models[0])
        report = next(version.checks for version in server.versions("ranker") if version.version == "2")
        assert report is not None
        assert report.verdict == expected


def outcome(server: hps.HPS, check: str, version: str = "2") -> tuple[str, str]:
    report = next(found.checks for found in server.versions("ranker") if found.version == version)
    assert report is not None
    [found] = [found for found in report.checks if found.check == check]
    return found.outcome, found.text


def requests_of(count: int, samples: int = 4) -> str:
    random = np.random.default_rng(3)
    return "".join(
        json.dumps({"inputs": {"item": random.choice(KEYS, samples).tolist(), "age": random.random(samples).tolist()}}) + "\n"
        for _ in range(count)
    )


@pytest.mark.parametrize("beside", [True, False], ids=["beside the version", "configured"])
def test_recorded_requests_are_replayed_against_both_versions(
    document: Make, write: Write, home: Path, tmp_path: Path, beside: bool
) -> None:
    place = home / "2" / "requests.jsonl" if beside else tmp_path / "requests.jsonl"
    with hps.HPS(document(checks={"requests": "" if beside else str(place)})) as server:
        write(2, retrained(), factor=-1.0)
        place.write_text(requests_of(20))
        polled(server)
        assert outcome(server, "scores")[1].startswith("correlation -0.9")
        report = server.check_version("ranker", "2")
        [scores] = [found for found in report.checks if found.check == "scores"]
        assert scores.figures["scores"] == 80
        assert server.check_version("ranker", "1").verdict == "passed", "with itself"


@pytest.mark.parametrize(
    ("text", "expected", "reason"),
    [
        ("{", "failed", "line 1"),
        ('{"inputs": 3}', "failed", "line 1"),
        ('{"inputs": {"age": [1.0]}}', "skipped", "'item' is missing"),
        ('{"inputs": {"item": [7], "age": [NaN]}}', "skipped", "fewer than 32 scores"),
        ("\n", "skipped", "there are no requests"),
    ],
)
def test_requests_that_cannot_be_read_hold_a_version_and_those_that_the_serving_one_refuses_do_not(
    document: Make, write: Write, home: Path, text: str, expected: str, reason: str
) -> None:
    with hps.HPS(document()) as server:
        write(2, retrained())
        (home / "2" / "requests.jsonl").write_text(text)
        server.poll()
        found, said = outcome(server, "scores")
        assert (found, reason in said) == (expected, True), said


@pytest.mark.parametrize(
    ("model", "hashed", "reason"),
    [
        ("ranker", False, ""),
        ("ranker", True, "it has hashes of the keys"),
        ("other", False, "it has no keys of model 'ranker'"),
    ],
)
def test_recorded_keys_are_requests_of_a_check(
    document: Make, write: Write, tmp_path: Path, model: str, hashed: bool, reason: str
) -> None:
    trace = tmp_path / "keys.trace"
    with KeyRecorder(trace, rate=1.0, hash_keys=hashed) as recorder:
        keys = np.repeat(KEYS[:40], 3)
        recorder.record([TableSpec(model, "item", DIM, 0.0, 1000)], Batch.of(0, keys, np.empty((keys.size, DIM), np.float32)))
    with hps.HPS(document(checks={"requests": str(trace)})) as server:
        vectors = retrained()
        vectors[:40] = -FIRST[:40]
        write(2, vectors)
        polled(server)
        assert outcome(server, "scores")[1].startswith(f"reading {trace}: {reason}" if reason else "correlation -0.9")


def test_configured_requests_that_are_gone_hold_a_version(document: Make, write: Write, tmp_path: Path) -> None:
    with hps.HPS(document(checks={"requests": str(tmp_path / "gone.jsonl")})) as server:
        write(2, retrained())
        polled(server)
        assert "there is no such file" in outcome(server, "scores")[1]


def zipped(size: int) -> bytes:
    found = io.BytesIO()
    np.savez_compressed(found, **{"keys/item": np.zeros(size, np.int64), "vectors/item": np.zeros((1, DIM), np.float32)})
    return found.getvalue()


ANSWERS: list[tuple[dict[str, Any] | bytes, str]] = [
    ({"keys/item": KEYS[:5], "vectors/item": retrained()[:5]}, ""),
    ({"keys/item": KEYS[:50], "vectors/item": retrained()[:50] * np.float32(1.005)}, ""),
    ({"keys/item": np.array([1]), "vectors/item": np.zeros((1, DIM))}, ""),
    ({"inputs/item": KEYS[:5], "inputs/age": np.zeros(5, np.float32), "scores/score": retrained()[:5].sum(axis=1)}, ""),
    ({"keys/item": KEYS[:5], "vectors/item": retrained()[:5] + 1}, "difference of item 1, expected at most 0.01"),
    (
        {"keys/item": KEYS[:5], "vectors/item": retrained()[:5, :2]},
        "vectors/item [5, 2], expected [n] of int64 and [n, 16]",
    ),
    ({"keys/item": KEYS[:5], "vectors/item": retrained()[:5] * np.nan}, "expected at most 0.01"),
    ({"keys/item": KEYS[:5, None], "vectors/item": retrained()[:5]}, "got keys/item [5, 1] of int64"),
    ({"keys/item": KEYS[:5] + 0.5, "vectors/item": retrained()[:5]}, "got keys/item [5] of float64"),
    ({"keys/item": KEYS[:1], "vectors/item": np.full((1, DIM), "a")}, "could not convert string"),
    ({"keys/item": KEYS[:1], "vectors/item": np.full((1, DIM), object())}, "Object arrays cannot be loaded"),
    ({"vectors/item": retrained()[:5]}, "got vectors/item without keys/item"),
    ({"keys/other": KEYS, "vectors/other": FIRST}, "got table 'other'"),
    ({"scores/score": np.zeros(1)}, "input 'item' is missing"),
    (
        {"inputs/item": KEYS[:1], "inputs/age": np.zeros(1, np.float32), "scores/s": np.zeros(1)},
        "expected one of scores/score",
    ),
    ({"keys/item": KEYS[:5], "vector/item": FIRST[:5]}, "got keys/item, vector/item, expected keys/<table>"),
    ({"item": KEYS}, "got item, expected keys/<table>"),
    (b"", "it is no .npz file of NumPy"),
    (b"PK" + bytes(100), "it is no .npz file of NumPy"),
    (zipped(9)[:-30], "it is no .npz file of NumPy"),
    (zipped(9)[:60] + bytes(20) + zipped(9)[80:], "it is no .npz file of NumPy"),
    (zipped(200_000), "its arrays have 1600320 bytes, expected at most 1000000"),
]


def test_the_authors_answers_are_expected(document: Make, write: Write, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hps.versions.checks.run._MOST_INFLATED_BYTES", 1_000_000)
    others = {check: {"policy": "off"} for check in ("keys", "norms", "vectors", "scores")}
    with hps.HPS(document(checks=others)) as server:
        write(2, retrained())
        polled(server)
        for answers, expected in ANSWERS:
            if isinstance(answers, bytes):
                (home / "2" / "expected.npz").write_bytes(answers)
            else:
                np.savez(home / "2" / "expected.npz", **answers)
            *_, found = server.check_version("ranker", "2").checks
            assert (found.check, found.outcome) == ("expected", "failed" if expected else "passed"), found
            assert expected in found.text


def test_expected_answers_that_are_wrong_are_found_at_the_first_start_too(document: Make, write: Write, home: Path) -> None:
    np.savez(home / "expected.npz", **{"keys/item": KEYS[:5], "vectors/item": FIRST[:5]})
    configuration = document()
    for version in (2, 3):
        write(version, retrained())
        (home / "expected.npz").replace(home / str(version) / "expected.npz") if version == 3 else None
    with hps.HPS(configuration, deploy_models=False) as server:
        server.deploy("ranker", pin=False)
        assert state(server) == [("2", "serving")], "version 3 is refused, and the one below serves"


def test_a_check_that_is_late_has_failed(document: Make, write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    with hps.HPS(document(checks={"timeout_s": 1e-6})) as server:
        write(2, retrained())
        assert "vectors: not made within 1e-06 s" in str(polled(server))
        assert state(server) == [("1", "serving"), ("2", "held")]


def test_checks_end_when_the_fleet_wants_another_version(document: Make, write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    with hps.HPS(document()) as server:
        for version in (2, 3):
            write(version, retrained())
        server.change_fleet("ranker", "deploy", "2")

        def superseded(table: str, sample: Any, config: Any, pace: Pace, *, complete: bool) -> None:
            server.change_fleet("ranker", "deploy", "3")
            server.read_documents()
            while True:
                pace.rest()

        with monkeypatch.context() as patch:
            patch.delattr(VersionCheck, "_not_made")  # of late checks
            patch.setattr("hps.versions.checks.run.compare_rows", superseded)
            server.read_documents()
            assert server.follow() == {}, "tried again with version 3"
        counts = server.metrics.model_changes
        assert [counts.labels("ranker", "deploy", outcome).value for outcome in ("superseded", "failed")] == [1, 0]
        assert state(server) == [("1", "serving")]
        server.follow()
        assert state(server) == [("3", "serving"), ("1", "kept")]
        assert server.check() == []


def test_requests_are_recorded_only_with_the_consent_of_the_configuration(document: Make, write: Write, home: Path) -> None:
    inputs = {"item": KEYS[:3], "age": np.ones(3, np.float32)}
    with hps.HPS(document()) as server:
        server.score("ranker", inputs)
        with pytest.raises(hps.InvalidInputError, match=r"set models\[\].checks.record"):
            server.recorded_requests("ranker")
    with hps.HPS(document(checks={"record": "keys"})) as server:
        server.score("ranker", inputs)
        assert server.recorded_requests("ranker") == [json.dumps({"inputs": {"item": KEYS[:3].tolist()}})]
        write(2, retrained())
        (home / "2" / "requests.jsonl").write_text("\n".join(64 * server.recorded_requests("ranker")))
        assert polled(server) is None
        assert outcome(server, "scores")[0] == "passed"
        assert server.recorded_requests("ranker") == [], "requests of checks are not recorded"


def test_a_held_version_does_not_take_over_from_one_that_is_undeployed_and_is_undeployed_itself(
    document: Make, write: Write
) -> None:
    with hps.HPS(document()) as server:
        write(2, SHUFFLED)
        polled(server)
        with pytest.raises(hps.ConflictError, match="it is the only one"):
            server.undeploy("ranker", "1")
        server.undeploy("ranker", "2")
        assert state(server) == [("1", "serving")]
        assert server.poll() == {}


OTHERS = """
import time
import numpy as np
from hps.engine.refresh import Pace
from hps.versions.checks.rows import RowPairs, alignment

rows = np.random.default_rng(1).standard_normal((2, 4096, {dim}), np.float32)
pace = Pace(0.5, lambda seconds: False)
alignment(RowPairs(*rows), pace)
whole, own = time.process_time(), time.thread_time()
alignment(RowPairs(*rows), pace)
print(time.process_time() - whole - (time.thread_time() - own), time.thread_time() - own)
"""


@pytest.mark.parametrize("dim", [16, 128, 1500])
def test_the_comparison_of_rows_occupies_one_thread(dim: int) -> None:
    """The threads of BLAS would spin for as long as the comparison lasts, and take a core from lookups."""
    found = subprocess.run(
        [sys.executable, "-c", OTHERS.format(dim=dim)],
        env={**os.environ, "OPENBLAS_NUM_THREADS": "4"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert found.returncode == 0, found.stderr
    others, own = map(float, found.stdout.split())
    assert others < 0.1 * own
