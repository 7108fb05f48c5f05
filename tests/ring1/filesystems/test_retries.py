"""What may pass is tried again, within attempts and time."""

from types import SimpleNamespace

import pytest

from hps.configuration.tiers import ModelSourceConfig
from hps.errors import ModelFileError, ModelFileNotFoundError, ModelSourceError
from hps.filesystems import retries
from hps.filesystems.object_store import range_mismatch
from hps.filesystems.retries import ReadTarget, fill, retried, share
from tests.fakes.clock import Clock


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The pauses that were made, which take no time."""
    made, clock = [], Clock(100.0)

    def pause(seconds: float) -> None:
        made.append(seconds)
        clock.now += seconds

    monkeypatch.setattr(retries, "time", SimpleNamespace(monotonic=clock, sleep=pause))
    return made


def test_time_is_bounded(pauses: list[float]) -> None:
    def attempt(deadline: float) -> None:
        assert deadline == 130  # the clock began at 100
        raise ModelSourceError("no")

    with pytest.raises(ModelSourceError, match=r"tried \d+ times in"):
        retried(ModelSourceConfig(max_attempts=100, deadline_s=30), attempt)
    assert 20 < sum(pauses) <= 30
    assert max(pauses) <= 5


def test_what_passes_is_tried_again_and_what_cannot_pass_is_not(pauses: list[float]) -> None:
    for attempts in (1, 3, 5):
        told: list[float] = []

        def attempt(deadline: float, told: list[float] = told) -> str:
            told.append(deadline)
            if len(told) == 5:
                return "done"
            raise ModelSourceError(f"failure {len(told)}")

        settings = ModelSourceConfig(max_attempts=attempts, deadline_s=50)
        if attempts == 5:
            assert retried(settings, attempt) == "done"
        else:
            times = "once" if attempts == 1 else r"3 times in [\d.]+ s"
            with pytest.raises(ModelSourceError, match=rf"failure {attempts} \(tried {times}"):
                retried(settings, attempt)
        assert len(told) == attempts
        assert len(set(told)) == 1  # each attempt is given the same deadline
    assert len(pauses) == 0 + 2 + 4
    assert all(0.05 * 2**i <= pause <= 0.1 * 2**i for i, pause in enumerate(pauses[2:]))
    for error in (ModelFileError, ModelFileNotFoundError, ValueError):
        told.clear()

        def refused(deadline: float, error: type[Exception] = error) -> None:
            told.append(deadline)
            raise error("no")

        with pytest.raises(error, match="no"):
            retried(ModelSourceConfig(), refused)
        assert len(told) == 1


def test_an_attempt_that_has_ended_writes_no_more(pauses: list[float]) -> None:
    buffer, targets = bytearray(6), []

    def attempt(target: ReadTarget, seconds: float) -> None:
        targets.append(target)
        for piece in (b"old", b"new") if len(targets) == 3 else (b"bad",):
            target.write(piece)
        if target.missing:
            raise ModelSourceError("broken off")

    fill(ModelSourceConfig(), "s3://b/key", memoryview(buffer), attempt)
    assert [target.missing for target in targets] == [3, 3, 0]
    for target in targets:
        with pytest.raises(ModelSourceError, match="got more bytes than requested"):
            target.write(b"x")
    assert buffer == b"oldnew"


@pytest.mark.parametrize(("left", "seconds"), [(100, 50), (20, 10), (12, 10), (10, 10), (4, 4), (0, 0), (-3, 0)])
def test_an_attempt_leaves_time_for_another_and_ends_by_the_deadline(pauses: list[float], left: int, seconds: int) -> None:
    assert share(ModelSourceConfig(timeout_s=10), 100.0 + left) == seconds


@pytest.mark.parametrize(
    ("header", "length", "matches"),
    [
        *[("bytes 5-9/20", 5, True), ("bytes 5-9/20", 4, True), ("bytes 5-10/20", 6, False), ("bytes 4-8/20", 5, False)],
        *[("", 5, False), ("garbage", 5, False)],
    ],
)
def test_an_answer_of_other_bytes_than_were_asked_for_is_noticed(header: str, length: int, matches: bool) -> None:
    assert (range_mismatch(header, length, 5, 10) == "") == matches
