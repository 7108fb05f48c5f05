"""The states of versions: what the machine in tests/ring1/versions/test_live_models_machine.py does not reach."""

import random
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest

import hps
from hps.errors import DatabaseLockedError
from hps.ground.threads.workers import THREADS
from hps.statistics.series import Models
from hps.testing.waiting import wait_until
from hps.versions.live_models import FIRST_RETRY_S, LONGEST_RETRY_S, LiveModels, is_transient
from tests.fakes.clock import Clock
from tests.fakes.fake_deployment import ENTRY, FakeDeployment, fake


def serve(live: LiveModels, deployment: Any) -> None:
    with live.changing("m", "deploying"):
        live.serve(deployment, lambda versions: [], "keep")


def test_a_closed_server_takes_no_version_that_was_being_loaded() -> None:
    live = LiveModels()
    with live.changing("m", "deploying"):
        live.close(0.0)
        with pytest.raises(hps.NotReadyError, match="closed"):
            live.serve(fake("1"), list, "keep")
    with pytest.raises(hps.NotReadyError, match="closed"), live.changing("m", "deploying"):
        pass


def test_lost_devices_and_refusals_are_those_of_all_models() -> None:
    given = ("a", {"0": None}, ""), ("b", {"0": None, "1": "lost"}, "no rows"), ("c", {"2": "gone"}, "")
    models: dict[str, Any] = {
        model: SimpleNamespace(
            version="1",
            config=SimpleNamespace(model=model),
            device_caches=[SimpleNamespace(device_name=name, failure=failure) for name, failure in caches.items()],
            refuses=refuses,
        )
        for model, caches, refuses in given
    }
    live = LiveModels(models)
    assert live.lost_devices() == {"1": "lost", "2": "gone"}
    assert live.refused() == "model 'b': no rows"


@pytest.mark.parametrize("error", [hps.DeviceError("the device failed"), ZeroDivisionError()], ids=["device", "defect"])
def test_a_version_that_cannot_be_freed_is_in_nobodys_way(error: Exception, caplog: pytest.LogCaptureFixture) -> None:
    class Broken(FakeDeployment):
        def close(self, tables: str) -> bool:
            raise error

    live = LiveModels()
    for deployment in (Broken("1"), fake("2")):
        serve(live, deployment)
    if isinstance(error, hps.DeviceError):
        wait_until(lambda: "retiring" not in [state for _, state in live.versions("m")], "nothing retires")
        serve(live, fake("3"))
        assert live.find("m", None).version == "3"
    else:
        wait_until(lambda: "thread hps-retire-m-1 ended unexpectedly" in caplog.text, "it is logged")
        assert THREADS.ended() == {"hps-retire-m-1": 1}
        THREADS.clear()
        assert "ZeroDivisionError" in caplog.text


def test_closing_has_one_deadline_for_changes_and_for_versions_that_retire() -> None:
    class Draining(FakeDeployment):
        def close(self, tables: str) -> bool:
            return self.released.wait(90)

    clock = Clock(0.0)
    live, busy = LiveModels(clock=clock), Draining("1")
    busy.released.clear()
    serve(live, busy)
    serve(live, fake("2"))
    change = live.start_change("other", "deploying")
    with ThreadPoolExecutor(1) as pool:
        closing = pool.submit(live.close, 60.0)
        wait_until(lambda: live.closed, "it is being closed")
        clock.now += 61
        live.finish_change(change)
        try:
            assert [one.version for one in closing.result(30)] == ["2"]
        finally:
            busy.released.set()


@pytest.mark.parametrize(
    ("error", "of_files", "of_versions"),
    [
        (hps.ConfigError("ps.json", ["wrong"]), False, False),
        (hps.MissingDependencyError("no torch"), False, False),
        (ZeroDivisionError("a bug"), False, False),
        (hps.CapacityError("does not fit"), False, False),
        (hps.DeviceError("no such device"), False, False),
        (hps.DatabaseError("Redis does not answer"), True, True),
        (hps.DatabaseTimeoutError("Redis is slow"), True, True),
        (DatabaseLockedError("the replica before this one still stops"), True, True),
        (hps.DatabaseCorruptError("damaged"), False, False),
        (hps.TableWidthError("another width"), False, False),
        (hps.UpdateLogError("Kafka does not answer"), True, True),
        (hps.ModelSourceError("the object store does not answer"), True, True),
        (hps.ModelFileChangedError("replaced while it was read"), True, True),
        (hps.NotReadyError("another change"), True, True),
        (hps.ModelFileNotFoundError("a path that nobody corrects, or a version that is away for a moment"), False, True),
        (hps.ModelFileError("other sizes, or a version that is being copied"), False, True),
        (hps.UnknownVersionError("no version"), False, True),
        (hps.UnknownModelError("no such model"), False, False),
    ],
)
def test_what_may_pass_by_itself(error: Exception, of_files: bool, of_versions: bool) -> None:
    assert (is_transient(error), is_transient(error, versioned=True)) == (of_files, of_versions)
    for versioned in (False, True):
        live = LiveModels()
        live.expect(ENTRY.model_copy(update={"version_path": "/shop" if versioned else ""}))
        live.record_failure("m", error)
        assert (live.due() != {}) == is_transient(error, versioned=versioned)


PASSING = (hps.ModelSourceError, hps.ModelFileChangedError, hps.DatabaseTimeoutError, hps.UnknownTableError, hps.NotReadyError)
STAYING = (hps.ModelFileError, hps.DatabaseCorruptError, hps.TableWidthError, hps.DeviceMemoryError)


@pytest.mark.parametrize("error", PASSING)
def test_a_failure_that_may_pass_is_tried_again(error: type[hps.HPSError]) -> None:
    live = LiveModels(clock=Clock(0.0))
    live.expect(ENTRY)
    live.record_failure("m", error("no answer"))
    assert 0 < live.due()["m"] <= FIRST_RETRY_S


@pytest.mark.parametrize(
    ("error", "cause"),
    [
        *((error("damaged"), "damaged") for error in STAYING),
        (MemoryError(), "not enough memory"),
        (MemoryError("8 GB"), "8 GB"),
        (ZeroDivisionError("secret detail"), "internal error; the log has the details"),
    ],
)
def test_a_failure_that_stays_is_not_tried_again(error: Exception, cause: str) -> None:
    live = LiveModels()
    live.expect(ENTRY)
    live.record_failure("m", error)
    [life] = live.models()
    assert (life.state, life.failure and life.failure.cause, life.retry_in_s, live.due()) == ("failed", cause, None, {})


def test_polling_pauses_longer_after_each_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(random, "uniform", lambda low, high: high)
    clock, pauses = Clock(0.0), []
    live = LiveModels(clock=clock)
    wanted = (ENTRY, (("1", "files"),))
    for _ in range(8):
        live.record_failure("m", hps.DeviceMemoryError("no room"))
        started = clock.now
        while not live.needs_deployment("m", wanted):
            clock.now += FIRST_RETRY_S / 2
        pauses.append(clock.now - started)
    assert pauses == [5, 10, 20, 40, 80, 160, LONGEST_RETRY_S, LONGEST_RETRY_S]
    live.record_failure("m", hps.DeviceMemoryError("no room"))
    assert not live.needs_deployment("m", wanted)
    assert live.needs_deployment("m", (ENTRY, (("1", "other files"),))), "a change of the files is not delayed"


def test_metrics_of_a_model_end_when_nothing_of_it_is_left() -> None:
    counted = Models()
    live = LiveModels(counted=counted)
    last = fake("2")
    last.released.clear()
    for deployment in (fake("1"), last):
        serve(live, deployment)
    live.expect(ENTRY.model_copy(update={"model": "waits"}))
    with live.changing("fails", "deploying"):
        live.record_failure("fails", hps.ModelFileError("damaged"))
    with live.changing("unknown", "deploying"):
        live.record_failure("unknown", hps.ModelFileError("damaged"), known=False)
        assert counted.has("unknown")
    assert [counted.has(name) for name in ("m", "waits", "fails", "unknown")] == [True, True, True, False]
    with live.changing("m", "undeploying"):
        for deployment in live.withdraw("m", None):
            live.retire("m", deployment, "release")
        live.drop_kept("m", live.kept("m"), "release")
    assert counted.has("m")  # the last lookups of version 2 still run
    last.released.set()
    wait_until(lambda: not counted.has("m"), "its metrics end")
    live.stop_expecting("waits")
    assert not counted.has("waits")
    with live.changing("fails", "undeploying"):
        pass
    assert not counted.has("fails")


def test_the_highest_number_of_those_left_serves_after_the_serving_version_is_undeployed() -> None:
    live = LiveModels()
    with live.changing("m", "deploying"):
        for version in ("9", "10", "2", "1", "11"):
            live.serve(fake(version), list, "keep")
    assert [one.version for one, _ in live.versions("m")] == ["1", "2", "9", "10", "11"]
    for undeployed, serves in (("1", "11"), ("11", "10"), ("9", "10"), ("10", "2")):
        with live.changing("m", "undeploying"):
            for one in live.withdraw("m", undeployed):
                live.retire("m", one, "release")
        assert live.find("m", None).version == serves
    assert [(one.version, state) for one, state in live.versions("m")] == [("2", "serving")]
