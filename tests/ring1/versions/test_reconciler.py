"""Deployments, roll-backs and undeployments: what serves after the second one, and what is given back."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hps
from hps.configuration.load import ModelConfig, load_configuration
from hps.ground.progress import NoProgress
from hps.testing.waiting import wait_until
from hps.types import split_tag
from hps.versions.reconciler import _other_tables, _same_settings
from tests.ring1.versions.test_pins import Make, served, write
from tests.ring1.versions.test_pins import document as document  # fixtures
from tests.ring1.versions.test_pins import home as home
from tests.servers.running_service import document_of, model_of
from tests.tables.held_tables import held_tags


def states(server: hps.HPS) -> list[tuple[str, str]]:
    """The versions and their states, once none retires."""
    wait_until(lambda: "retiring" not in [state for _, state in server.live.versions("ranker")], "no version retires")
    return [(one.version, state) for one, state in server.live.versions("ranker")]


def held(server: hps.HPS) -> set[str]:
    """Slots of which the database has tables."""
    return {names[1] or "1" for tag in held_tags(server._chain.databases[-1]) if (names := split_tag(tag))}


@pytest.mark.parametrize("keep_versions", [0, 1, 2])
def test_a_model_that_is_undeployed_gives_back_what_it_kept_each_time(document: Make, keep_versions: int) -> None:
    with hps.HPS(document(False, gpucache=False, keep_versions=keep_versions), deploy_models=False) as server:
        for _ in range(2):
            for version in ("1", "2", "3"):
                server.deploy("ranker", version)
            kept = [(str(3 - number), "kept") for number in range(keep_versions, 0, -1)]
            assert states(server) == [("3", "serving"), *kept]
            assert held(server) == {"3", *(version for version, _ in kept)}
            server.undeploy("ranker")
            assert (states(server), held(server), server.models) == ([], set(), ())
        with pytest.raises(hps.UnknownModelError):
            server.undeploy("ranker")


def test_roll_backs_take_the_next_version_below_where_none_is_kept(document: Make) -> None:
    with hps.HPS(document(False, gpucache=False, keep_versions=0)) as server:
        for expected in (2, 1):
            server.rollback("ranker")
            assert (served(server), states(server)) == (expected, [(str(expected), "serving")])
        with pytest.raises(hps.ConflictError, match="no version to go back to; version 1 serves, none was replaced"):
            server.rollback("ranker")
        with pytest.raises(hps.UnknownVersionError, match="deployed: 1"):
            server.model("ranker", "2")


def test_of_a_version_that_is_undeployed_alone_the_kept_ones_stay_and_its_pin_ends(document: Make) -> None:
    with hps.HPS(
        document(False, gpucache=False, version_policy={"latest": {"num_versions": 2}}), deploy_models=False
    ) as server:
        server.deploy("ranker", "1")
        server.deploy("ranker")
        assert states(server) == [("2", "available"), ("3", "serving"), ("1", "kept")]
        server.deploy("ranker", "3")
        server.undeploy("ranker", "2")
        assert (states(server), held(server)) == ([("3", "serving"), ("1", "kept")], {"1", "3"})
        assert server.pin("ranker") is not None, "of version 3"
        server.deploy("ranker", "2")
        server.undeploy("ranker", "3")
        with pytest.raises(hps.ConflictError, match="it is the only one"):
            server.undeploy("ranker", "2")
        assert server.pin("ranker") is not None, "of version 2"


def test_a_kept_version_that_is_undeployed_gives_its_rows_back(document: Make) -> None:
    with hps.HPS(document(gpucache=False, keep_versions=2), deploy_models=False) as server:
        for version in ("1", "2", "3"):
            server.deploy("ranker", version)
        assert held(server) == {"1", "2", "3"}
        server.undeploy("ranker", "1")
        assert (states(server), held(server)) == ([("3", "serving"), ("2", "kept")], {"2", "3"})
        assert served(server) == 3
        with pytest.raises(hps.UnknownVersionError):
            server.undeploy("ranker", "1")
        server.rollback("ranker")
        assert served(server) == 2


def test_the_version_that_serves_is_deployed_again_without_another_load_unless_forced(document: Make) -> None:
    class Counting(NoProgress):
        loads = 0

        def start(self, tag: str, rows: int, size_bytes: int) -> None:
            self.loads += 1

    progress = Counting()
    with hps.HPS(document(False, gpucache=False)) as server:
        for _ in range(2):
            assert server.deploy("ranker", "3", progress=progress) is server.model("ranker")
        assert progress.loads == 0
        entry = server.config.models[0].model_copy(update={"num_of_worker_buffer_in_pool": 5})
        before = server.model("ranker")
        for _ in range(2):
            assert server.deploy(entry, "3", progress=progress).config.num_of_worker_buffer_in_pool == 5
        assert server.model("ranker") is not before
        assert progress.loads == 0
        for loads in (1, 2):
            server.deploy("ranker", "3", progress=progress, force=True)
            assert (served(server), progress.loads) == (3, loads)
        server.deploy("ranker", "2", progress=progress)
        server.deploy("ranker", "3", progress=progress)
        assert (served(server), progress.loads) == (3, 3), "version 3 was kept"


def test_a_deployment_that_fails_leaves_entry_versions_and_pin_as_they_were(document: Make) -> None:
    class Stopped(NoProgress):
        def advance(self, tag: str, rows: int) -> None:
            raise InterruptedError

    with hps.HPS(document(False, gpucache=False)) as server:
        server.rollback("ranker")
        known = server.catalog.model("ranker")
        for count in (1, 2):
            with pytest.raises(InterruptedError):
                server.deploy(known.model_copy(update={"max_batch_size": 5}), "1", progress=Stopped())
            assert server.catalog.model("ranker") is known
            assert (served(server), states(server)) == (2, [("2", "serving"), ("3", "kept")])
            pin, failure = server.pin("ranker"), server.live.failure("ranker")
            assert pin is not None
            assert failure is not None
            assert (pin.version, pin.by, failure.count) == ("2", "rollback", count)
        server.deploy("ranker", "1")
        assert server.live.failure("ranker") is None
        with pytest.raises(hps.UnknownModelError):
            server.deploy("other")
        assert server.live.failure("other") is None, "of a model that is not known none is remembered"


def test_a_request_for_a_version_that_does_not_exist_is_no_failed_deployment(document: Make) -> None:
    with hps.HPS(document(False, gpucache=False)) as server:
        for version in ("99", "0"):
            with pytest.raises(hps.UnknownVersionError, match=f"got version '{version}', expected one of 1, 2, 3"):
                server.deploy("ranker", version)
        assert (server.live.failure("ranker"), server.pin("ranker"), served(server)) == (None, None, 3)
        server.live.record_failure("ranker", hps.CapacityError("no room"))
        with pytest.raises(hps.UnknownVersionError):
            server.deploy("ranker", "99")
        failure = server.live.failure("ranker")
        assert failure is not None
        assert (failure.cause, failure.count) == ("no room", 1), "what is wrong is still known"


def test_polling_deploys_what_is_new_undeploys_what_is_gone_and_leaves_what_fails(
    tmp_path: Path, home: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = tmp_path / "repository" / "ranker"
    model.parent.mkdir()
    home.rename(model)
    (model / "model.json").write_text(json.dumps(model_of("ranker", ["item"], {"item": 4}, gpucache=False)))
    with hps.HPS({**document_of(), "model_repository": str(model.parent)}) as server:
        for content in (4, 5):
            assert server.poll() == {}
            write(model, content)
            assert (server.poll(), served(server)) == ({"ranker": None}, content)
        for warnings in (1, 2):
            (model / "6" / "item").mkdir(parents=True)
            for _ in range(2):
                assert (server.poll(), served(server)) == ({}, 5), "files that cannot be examined leave the model as it is"
            assert caplog.text.count("polling model ranker") == warnings, "one each time that they cannot"
            shutil.rmtree(model / "6")
            assert server.poll() == {}
        model.rename(tmp_path / "away")
        assert server.poll() == {"ranker": None}
        assert (server.models, held(server)) == ((), set())
        (tmp_path / "away").rename(model)
        assert (server.poll(), served(server)) == ({"ranker": None}, 5)


# -- decisions -----------------------------------------------------------------------------------------------------------


def entry(**settings: Any) -> ModelConfig:
    return load_configuration(document_of(model_of("m", ["a", "b"], {"a": 4, "b": 8}, **settings))).models[0]


SAME: list[dict[str, Any]] = [{"sparse_files": ["c", "d"]}, {"keep_versions": 5}, {"version_policy": {"all": {}}}]
SAME += [{}, {"version_path": "somewhere"}]


@pytest.mark.parametrize("persistent", [True, False])
def test_a_version_that_is_not_finite_is_not_served_and_the_one_before_goes_on(
    document: Make, home: Path, persistent: bool
) -> None:
    with hps.HPS(document(persistent, gpucache=False)) as server:
        write(home, 4, content=np.nan)
        for _ in range(2):
            with pytest.raises(hps.ModelFileError, match="100 of 100 rows have an infinity or NaN"):
                server.deploy("ranker", "4")
            assert (served(server), states(server)) == (3, [("3", "serving")])
            assert held(server) == {"3"}
        write(home, 4)
        server.deploy("ranker", "4")
        assert served(server) == 4
        server.unpin("ranker")
    write(home, 5, content=np.inf)
    for version in (4, 3):
        with hps.HPS(document(persistent, gpucache=False)) as server:
            assert (served(server), states(server)) == (version, [(str(version), "serving")])
            failure = server.live.failure("ranker")
            assert failure is not None
            assert "max_nonfinite_rows" in failure.cause
            assert server.poll() == {}, "it is not due"
            with pytest.raises(hps.ModelFileError, match="max_nonfinite_rows"):
                server.deploy("ranker")
        write(home, 4, content=np.nan)
    with hps.HPS(document(persistent, gpucache=False, max_nonfinite_rows=100)) as server:
        assert server.model("ranker").version == "5"
    for version in (1, 2, 3):
        write(home, version, content=np.nan)
    with pytest.raises(hps.ModelFileError, match="max_nonfinite_rows"):
        hps.HPS(document(persistent, gpucache=False))


@pytest.mark.parametrize("settings", [*SAME, {"gpucacheper": 0.25}, {"max_batch_size": 7}, {"row_dtype": "int8"}])
def test_entries_that_choose_versions_otherwise_have_the_same_settings(settings: dict[str, Any]) -> None:
    assert _same_settings(entry(), entry(**settings)) is (settings in SAME)


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({}, ""),
        ({"gpucacheper": 0.25, "row_dtype": "int8"}, ""),
        ({"embedding_table_names": ["b", "a"]}, "got tables ['b', 'a'], but version 1 serves with ['a', 'b']"),
        ({"embedding_vecsize_per_table": [4, 4]}, "got widths [4, 4], but version 1 serves with [4, 8]"),
        ({"embedding_cache_type": "static"}, "got embedding_cache_type static, but version 1 serves with dynamic"),
    ],
)
def test_other_tables_of_the_same_version_are_named(settings: dict[str, Any], text: str) -> None:
    assert _other_tables(entry(), entry(**settings)).replace("(", "[").replace(")", "]") == text
