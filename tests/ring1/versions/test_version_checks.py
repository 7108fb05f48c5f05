"""What the default checks let serve, what they hold, and what a person accepts: versions of a repository, polled."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hps
from hps.testing.waiting import wait_until
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


def test_a_version_like_the_last_one_takes_over(document: Make, write: Write) -> None:
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
        with pytest.raises(hps.VersionHeldError, match="hps deploy ranker --version 2 --accept"):
            server.deploy("ranker")
        assert server.pin("ranker") is None
        server.deploy("ranker", accept=True)
        assert state(server) == [("2", "serving"), ("1", "kept")]
        assert server.check() == []


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


@pytest.mark.parametrize("content", [b"{", b'{"format": 2}', b"[]"])
def test_a_damaged_report_is_ignored(document: Make, write: Write, home: Path, content: bytes) -> None:
    configuration = document()
    (home / "checks-1.json").write_bytes(content)
    with hps.HPS(configuration) as server:
        assert state(server) == [("1", "serving")]


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
