"""What may pass is tried again, within attempts and time."""

from collections.abc import Callable
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


def failing(times: int, error: type[Exception] = ModelSourceError) -> Callable[[float], str]:
    left = [times]

    def attempt(deadline: float) -> str:
        left[0] -= 1
        if left[0] >= 0:
            raise error(f"failure, {left[0]} to come")
        return "done"

    return attempt


def test_what_passes_is_tried_again(pauses: list[float]) -> None:
    assert retried(ModelSourceConfig(max_attempts=5), failing(4)) == "done"
    assert len(pauses) == 4
    assert all(0.05 * 2**i <= pause <= 0.1 * 2**i for i, pause in enumerate(pauses))


def test_attempts_are_bounded_have_one_deadline_and_the_error_says_how_many(pauses: list[float]) -> None:
    for attempts, said in ((1, r"failure, 9 to come \(tried once"), (3, r"7 to come \(tried 3 times in [\d.]+ s")):
        told, fail = [], failing(10)
        with pytest.raises(ModelSourceError, match=said):
            retried(
                ModelSourceConfig(max_attempts=attempts, deadline_s=50),
                lambda one, told=told, fail=fail: (told.append(one), fail(one)),
            )
        assert len(told) == attempts
        assert len(set(told)) == 1
    assert len(pauses) == 2
    assert told[0] == pytest.approx(150)  # the clock began at 100


def test_time_is_bounded(pauses: list[float]) -> None:
    with pytest.raises(ModelSourceError, match=r"tried \d+ times in"):
        retried(ModelSourceConfig(max_attempts=100, deadline_s=30), failing(1000))
    assert 20 < sum(pauses) <= 30
    assert max(pauses) <= 5


@pytest.mark.parametrize("error", [ModelFileError, ModelFileNotFoundError, ValueError])
def test_what_cannot_pass_is_not_tried_again(pauses: list[float], error: type[Exception]) -> None:
    with pytest.raises(error, match="failure, 8 to come"):
        retried(ModelSourceConfig(), failing(9, error))
    assert pauses == []


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
        with pytest.raises(ModelSourceError, match="got more bytes than were asked for"):
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
