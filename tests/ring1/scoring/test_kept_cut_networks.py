"""Networks that were cut, in memory that is kept: computed keys, columns and free sizes get what new memory gives them."""

from typing import Any

import numpy as np
import pytest

from hps.scoring import kept as kept_module
from hps.scoring.forms import kept_forms, lay_out
from tests.fakes.networks import ArrayNetwork, Arrays, DeviceNetwork
from tests.ring1.scoring.test_cut_networks import MOST, Cut, everything
from tests.ring1.scoring.test_kept_memory import kept as kept  # a fixture
from tests.ring1.scoring.test_packing import Region

CUT: dict[str, Any] = {
    "inputs": {
        "user": {"dtype": "int32", "shape": [-1], "per_request": True},
        "hist": {"dtype": "int64", "shape": [-1, "n"]},
        "item": {"dtype": "int64", "shape": [-1]},
        "owner": {"dtype": "int64", "shape": [-1], "per_request": True},
        "grid": {"dtype": "float32", "shape": [-1, 3]},
        "weights": {"dtype": "float32", "shape": [-1, "n"]},
        "halves": {"dtype": "float16", "shape": [-1, "n"]},
        "flat": {"table": "t0", "hotness": 2},
        "any": {"table": "t1", "pooling": "sum", "per_request": True},
    },
    "sizes": {"n": 3},
    "keys": [
        {"file": "0", "inputs": ["user"], "outputs": ["pair"]},
        {"file": "1", "inputs": ["hist", "user"], "outputs": ["mixed", "least"]},
    ],
    "lookups": {
        "items": {"table": "t0", "keys": {"input": "item"}},
        "owners": {"table": "t0", "keys": {"input": "owner"}},
        "plain": {"table": "t1", "keys": {"input": "hist"}},
        "clipped": {"table": "t1", "max_norm": 2.0, "keys": {"input": "hist"}},
        "column": {"table": "t0", "keys": {"input": "grid", "column": 2}},
        "users": {"table": "t0", "keys": {"input": "user"}},
        "weighed": {"table": "t1", "pooling": "sum", "keys": {"input": "hist"}, "weights": {"input": "weights"}},
        "halved": {"table": "t1", "pooling": "mean", "keys": {"output": "mixed"}, "weights": {"input": "halves"}},
        "pairs": {"table": "t0", "pooling": "sum", "padding_key": 3, "keys": {"output": "pair"}},
        "mixture": {"table": "t1", "keys": {"output": "mixed"}},
        "first": {"table": "t1", "pooling": "sum", "keys": {"output": "least"}},
    },
}


def of_user(given: Arrays) -> dict[str, np.ndarray]:
    return {"pair": np.stack([given["user"] % 5, given["user"] + 1], 1)}


def of_both(given: Arrays) -> dict[str, np.ndarray]:
    mixed = (given["hist"] + given["user"][:, None].astype(np.int64)) % 7
    return {"mixed": mixed.astype(np.int32), "least": mixed.min(1)}


def scorer(kind: type[ArrayNetwork] = ArrayNetwork, **changes: Any) -> Cut:
    return Cut(kind, everything, (of_user, of_both), **{**CUT, "network_inputs": None, **changes})


def arrays_of(rng: np.random.Generator, samples: int, n: int = 3, once: bool = True, **changes: Any) -> dict[str, np.ndarray]:
    rows = 1 if once else samples
    return {
        "user": rng.integers(0, 50, rows, np.int32),
        "hist": rng.integers(0, 5, (samples, n)),
        "item": rng.integers(0, 50, samples),
        "owner": rng.integers(0, 50, rows),
        "grid": (rng.integers(0, 50, (samples, 3)) + 0.75).astype(np.float32),
        "weights": rng.random((samples, n), np.float32),
        "halves": (rng.random((samples, n)) + 0.5).astype(np.float16),
        "flat": rng.integers(0, 50, (samples, 2)),
        "any": rng.integers(0, 50, (rows, 4)),
        **changes,
    }


each_kind = pytest.mark.parametrize("kind", [ArrayNetwork, DeviceNetwork], ids=["on the CPU", "on a device"])


def compare(ours: Cut, other: Cut, *given: Arrays) -> None:
    with other._in_use:  # it takes the general way
        wanted = other.answers(*given)
    for answer, expected in zip(ours.answers(*given), wanted, strict=True):
        np.testing.assert_array_equal(answer, expected)


@each_kind
@pytest.mark.parametrize("batch", [(1,), (16,), (17, 3), (1, 1, 1), (2, 3, 4), (40,)], ids=str)
def test_computed_keys_are_those_of_the_general_way(
    kind: type[ArrayNetwork], batch: tuple[int, ...], kept: list[int | None]
) -> None:
    ours, other, rng = scorer(kind), scorer(kind), np.random.default_rng(1)
    for n, once in ((3, True), (3, False), (1, True), (3, True), (2, False), (3, False)):
        compare(ours, other, *[arrays_of(rng, samples, n, once) for samples in batch])
    assert kept == [sum(batch)] * 6


@each_kind
def test_requests_in_shared_memory_are_gathered(kind: type[ArrayNetwork], kept: list[int | None]) -> None:
    ours, other, rng = scorer(kind), scorer(kind), np.random.default_rng(3)
    region = Region(ours.signature)
    for batch in ((2,), (3, 1, 2), (1,)):
        plain = [arrays_of(rng, samples) for samples in batch]
        with other._in_use:
            wanted = other.answers(*plain)
        answers, _ = ours.score([region.pack(arrays, samples) for arrays, samples in zip(plain, batch, strict=True)])
        for answer, expected in zip(answers, wanted, strict=True):
            assert isinstance(answer, dict)
            np.testing.assert_array_equal(answer["all"], expected)
    assert kept == [2, 6, 1]


def test_a_program_of_what_is_given_once_runs_on_a_row_a_request(kept: list[int | None]) -> None:
    ours, rng = scorer(), np.random.default_rng(1)
    ours.answers(arrays_of(rng, 3), arrays_of(rng, 4))
    assert [program.calls[-1] for program in ours.keys_programs] == [2, 7]
    ours.answers(arrays_of(rng, 3, once=False), arrays_of(rng, 4, once=False))
    assert [program.calls[-1] for program in ours.keys_programs] == [7, 7]
    assert kept == [7, 7]


@each_kind
def test_what_the_guards_refuse_takes_the_general_way(kind: type[ArrayNetwork], kept: list[int | None]) -> None:
    guards = ["samples != 1", "samples != 16"]
    ours, other, rng = scorer(kind, guards=guards), scorer(kind, guards=guards), np.random.default_rng(1)
    for batch in ((2, 3), (17, 3), (4,), (16,)):
        compare(ours, other, *[arrays_of(rng, samples) for samples in batch])
    # one user is one row, and on a device there is room for 16 samples, with which neither runs
    assert kept == ([5, 20, None] if kind is ArrayNetwork else [None, None, None])


@each_kind
def test_keys_without_a_row_for_each_sample_take_the_general_way(kind: type[ArrayNetwork], kept: list[int | None]) -> None:
    def flat(given: Arrays) -> dict[str, np.ndarray]:
        return {"keys": given["x"].reshape(-1)[:-1], "starts": np.arange(len(given["x"])) * 2}

    lookup = {"table": "t1", "pooling": "sum", "keys": {"output": "keys"}}
    said: dict[str, Any] = {
        "inputs": {"x": {"dtype": "int64", "shape": [-1, 2]}},
        "keys": [{"file": "0", "inputs": ["x"], "outputs": ["keys", "starts"]}],
        "sizes": {},
        "network_inputs": ["bags"],
    }
    ours = Cut(kind, everything, (flat,), **said, lookups={"bags": {**lookup, "offsets": {"output": "starts"}}})
    for _ in range(2):
        np.testing.assert_array_equal(ours.answers({"x": np.array([[1, 2], [3, 4]])})[0], [[6, 7], [6, 6.5]])
    rows = {"table": "t1", "keys": {"output": "keys"}}
    ours = Cut(kind, lambda given: {"all": given["x"]}, (flat,), **{**said, "network_inputs": ["x"]}, lookups={"rows": rows})
    for _ in range(2):
        ours.answers({"x": np.array([[1, 2], [3, 4]])})
    assert kept == [None] * 4
    assert not ours._kept.memories


@each_kind
def test_lengths_of_any_size_take_no_more_memory_than_twice_that_of_known_ones(
    kind: type[ArrayNetwork], kept: list[int | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, other, rng = scorer(kind), scorer(kind), np.random.default_rng(1)
    ours.warm()
    layouts = [lay_out(ours.signature, form, MOST) for form in kept_forms(ours.signature, MOST)]
    most = 2 * sum(layout.size_bytes + layout.buffer_bytes for layout in layouts)
    before = len(ours._kept.memories)
    assert before == len(layouts) == 4  # 16 and 40 samples, given each and once
    for n in (2, 3, 9, 30, 3, 2):
        compare(ours, other, arrays_of(rng, 20, n, once=False))
        assert sum(memory.size_bytes for memory in ours._kept.memories) <= most
    assert kept == [20, 20, 20, None, 20, 20]
    monkeypatch.setattr(kept_module, "_UNUSED", 3)
    for _ in range(4):
        compare(ours, other, arrays_of(rng, 20, 2, once=False))
    compare(ours, other, arrays_of(rng, 20, 10, once=False))
    assert kept[-1] == 20  # in the memory of forms that are not used
    assert sum(memory.size_bytes for memory in ours._kept.memories) <= most


def test_small_batches_of_plain_requests_are_scored_in_new_memory(
    kept: list[int | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, rng = scorer(), np.random.default_rng(1)
    region, sample = Region(ours.signature), ours._kept._sample_bytes
    monkeypatch.setattr(kept_module, "_SMALL_BYTES", 4 * sample)
    for samples in (3, 4):
        ours.answers(arrays_of(rng, samples))
    ours.score([region.pack(arrays_of(rng, 1), 1)])
    ours.score([region.pack(arrays_of(rng, 1), 1) for _ in range(2)])
    assert kept == [None, 4, None, 2]
