"""Batches in pieces, which are small in a thread that makes way for others."""

import threading
import time

import pytest

from hps.ground.threads.pacing import paced, pieces


@pytest.mark.parametrize("count", [0, 1, 63, 64, 65, 1000])
@pytest.mark.parametrize("rows", [1, 50, 4096])
def test_pieces_are_all_of_a_batch_in_order(count: int, rows: int) -> None:
    def whole() -> list[int]:
        return [i for piece in pieces(count, rows) for i in range(count)[piece]]

    assert whole() == list(range(count))
    with paced():
        assert whole() == list(range(count))


def test_a_paced_thread_pauses_between_small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    paused: list[float] = []
    monkeypatch.setattr(time, "sleep", paused.append)
    assert (len(list(pieces(1000, 4096))), len(paused)) == (1, 0)
    with paced():
        small = list(pieces(1000, 4096))
        assert len(paused) == len(small) - 1 > 10
        other: list[slice] = []
        thread = threading.Thread(target=lambda: other.extend(pieces(1000, 4096)))
        thread.start()
        thread.join(30)
        assert len(other) == 1, "the others are not"
    assert len(list(pieces(1000, 4096))) == 1
