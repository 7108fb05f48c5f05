"""`HPS.lookup_pooled` on the CPU: what it takes, what it refuses, and what it counts. The arithmetic has property tests."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import hps
from hps.engine import session as sessions
from hps.errors import InvalidDtypeError, InvalidInputError, TooManyKeysError, UnknownTableError
from hps.testing.pooling_oracle import pooled
from hps.testing.waiting import wait_until
from tests.servers.running_service import document_of, model_of

ROWS, DIMS, DEFAULT = 100, {"a": 3, "b": 5}, 0.5
KEYS = np.array([4, 2, 2, 7, 1, 9])
OFFSETS = np.array([0, 3, 3, 6])
VECTORS = {table: np.arange(ROWS * dim, dtype=np.float32).reshape(ROWS, dim) for table, dim in DIMS.items()}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    places = [tmp_path_factory.mktemp("models") / table for table in DIMS]
    for place, vectors in zip(places, VECTORS.values(), strict=True):
        hps.write_sparse_model(place, (np.arange(ROWS), vectors))
    return places


def open_server(files: list[Path], **changes: Any) -> hps.HPS:
    model = model_of("m", files, DIMS, **{"default_value_for_each_table": [DEFAULT] * 2, "hit_rate_threshold": 1.1, **changes})
    return hps.HPS(document_of(model))


@pytest.fixture(scope="module", params=[{"gpucache": False}, {"gpucacheper": 0.5}], ids=["direct", "cached"])
def server(request: pytest.FixtureRequest, files: list[Path]) -> Iterator[hps.HPS]:
    with open_server(files, **request.param) as server:
        yield server


def sums(table: str, keys: np.ndarray = KEYS, offsets: np.ndarray = OFFSETS) -> np.ndarray:
    return np.stack([VECTORS[table][part].sum(0) for part in np.split(keys, offsets[1:-1])])


def capsule(array: np.ndarray) -> Any:
    return torch.from_numpy(array).__dlpack__()


def read_only(array: np.ndarray) -> np.ndarray:
    array = array.copy()
    array.flags.writeable = False
    return array


def unaligned(array: np.ndarray) -> np.ndarray:
    memory = np.empty(array.nbytes + 1, np.uint8)[1:].view(array.dtype)
    memory[:] = array
    return memory


@pytest.mark.parametrize(
    "given",
    [np.copy, np.ndarray.tolist, capsule, read_only, unaligned, torch.from_numpy, lambda array: np.repeat(array, 2)[::2]],
    ids=["array", "list", "capsule", "read-only", "unaligned", "torch", "strided"],
)
def test_keys_offsets_and_weights_come_in_any_form(server: hps.HPS, given: Any) -> None:
    weights = given(np.ones(6, np.float32))
    got = server.lookup_pooled({"a": hps.Bags(given(KEYS), given(OFFSETS), weights)}, "m")
    np.testing.assert_array_equal(got["a"], sums("a"))
    assert got["a"].dtype == np.float32


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
@pytest.mark.parametrize("form", [np.asarray, torch.from_numpy, np.ndarray.tolist])
def test_without_offsets_every_row_of_keys_is_a_bag(server: hps.HPS, form: Any, dtype: type) -> None:
    got = server.lookup_pooled({1: hps.Bags(form(KEYS.reshape(2, 3).astype(dtype)), combiner="mean")}, "m")
    np.testing.assert_allclose(got[1], sums("b", KEYS, np.array([0, 3, 6])) / 3, rtol=1e-6)


@pytest.mark.parametrize("wide", [np.empty((3, 8), np.float32), torch.empty((3, 8)), np.empty(30, np.float32)])
def test_one_tensor_takes_the_vectors_of_all_tables(server: hps.HPS, wide: Any) -> None:
    tables = {"b": hps.Bags(KEYS, OFFSETS[:-1], include_last_offset=False), "a": hps.Bags(KEYS, OFFSETS.astype(np.int32))}
    assert server.lookup_pooled(tables, "m", out=wide) is wide
    got = np.asarray(wide).reshape(-1)[:24].reshape(3, 8)
    np.testing.assert_array_equal(got, np.concatenate([sums("b"), sums("a")], axis=1))
    out = {"a": np.empty((3, 3), np.float32), "b": torch.empty(15)}
    assert server.lookup_pooled(tables, "m", out=out) is out
    np.testing.assert_array_equal(out["a"], sums("a"))
    np.testing.assert_array_equal(out["b"].reshape(3, 5).numpy(), sums("b"))


@pytest.mark.parametrize(
    ("bags", "shape"),
    [
        *[(hps.Bags([], [0]), (0, 3)), (hps.Bags([], [], include_last_offset=False), (0, 3))],
        (hps.Bags([], [0, 0, 0], [], combiner="mean"), (2, 3)),
        (hps.Bags(np.empty((4, 0), np.int64), combiner="sqrtn"), (4, 3)),
        (hps.Bags(np.empty((0, 4), np.int64)), (0, 3)),
        (hps.Bags([5, 5], [0, 2], combiner="mean", padding_key=5), (1, 3)),
    ],
)
def test_no_keys_give_zeros(server: hps.HPS, bags: hps.Bags, shape: tuple[int, ...]) -> None:
    np.testing.assert_array_equal(server.lookup_pooled({"a": bags}, "m")["a"], np.zeros(shape))


OF = partial(partial, hps.Bags)  # bags that a test makes
WRONG: dict[str, Any] = {
    "got ndarray, expected hps.Bags": lambda: KEYS,
    r"shape \(6,\) without offsets, expected \(bags, hotness\)": OF(KEYS),
    "float32, expected int64": OF(KEYS.astype(np.float32), OFFSETS),
    "reading keys": OF([[1, 2], [3]]),
    r"offsets \[0, 4, 3, 6\] for 6 keys, .* never to fall": OF(KEYS, [0, 4, 3, 6]),
    **{"begin with 0": OF(KEYS, [1, 3, 6]), "end with 6": OF(KEYS, [0, 3, 7]), "and to end with 6": OF(KEYS, [0, 3, 5])},
    "at most 6": OF(KEYS, [0, 7], include_last_offset=False),
    **{"got 0 offsets for 6 keys": OF(KEYS, []), "got 1 offsets for 6 keys": OF(KEYS, [0])},
    "offsets of dtype float64, expected int64 or int32": OF(KEYS, [0.0, 6.0]),
    "int16, expected int64 or int32": OF(KEYS, torch.tensor([0, 6], dtype=torch.int16)),
    "C-contiguous": OF(KEYS, torch.arange(4)[::2]),
    "weights of dtype float64, expected float32": OF(KEYS, [0, 6], np.ones(6)),
    "5 weights for 6 keys": OF(KEYS, [0, 6], np.ones(5, np.float32)),
    "got weights with combiner 'max'": OF(KEYS, [0, 6], np.ones(6, np.float32), combiner="max"),
    **{"combiner 'min', expected one of": OF(KEYS, [0, 6], combiner="min"), "combiner 1": OF(KEYS, [0, 6], combiner=1)},
    "max_norm 0.0, expected a number above 0": OF(KEYS, [0, 6], max_norm=0.0),
    **{"max_norm nan": OF(KEYS, [0, 6], max_norm=float("nan")), "max_norm '1 m'": OF(KEYS, [0, 6], max_norm="1 m")},
    "padding_key 9223372036854775808": OF(KEYS, [0, 6], padding_key=1 << 63),
    "padding_key 'x'": OF(KEYS, [0, 6], padding_key="x"),
    "got 100000 keys": OF(np.zeros(100_000, np.int64), [0, 100_000]),
}


@pytest.mark.parametrize(("message", "bags"), WRONG.items())
def test_bad_bags_are_refused(server: hps.HPS, message: str, bags: Any) -> None:
    kinds = {"dtype": InvalidDtypeError, "expected int64": InvalidDtypeError, "100000": TooManyKeysError}
    error = next((kind for word, kind in kinds.items() if word in message), InvalidInputError)
    with pytest.raises(error, match=message) as refused:
        server.lookup_pooled({"a": bags()}, "m")
    assert refused.type is error


def test_bad_outputs_and_tables_are_refused(server: hps.HPS) -> None:
    a, b, room = hps.Bags(KEYS, OFFSETS), hps.Bags(KEYS, [0, 6]), np.empty((3, 3), np.float32)
    for tables, out, message in (
        ({"a": a, "b": b}, np.empty((3, 8), np.float32), "got 1 bags of table 'b' and 3 of 'a'"),
        ({"a": a, "b": b}, {"a": room}, "out has no entry for 'b'"),
        ({"a": a}, np.empty((2, 3), np.float32), "expected at least 9"),
        ({"a": a}, read_only(room), "read-only"),
        ({"a": a, 0: a}, None, "named twice"),
    ):
        with pytest.raises(InvalidInputError, match=message):
            server.lookup_pooled(tables, "m", out=out)
    with pytest.raises(UnknownTableError):
        server.lookup_pooled({"c": a}, "m")
    with pytest.raises(InvalidInputError, match="without waiting"):
        server.lookup_pooled({"a": a}, "m", out={"a": room}, wait=False)


def test_vectors_of_long_bags_are_fetched_some_at_a_time(files: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions, "_POOLED_BYTES", 100)  # 8 vectors
    rng = np.random.default_rng(1)
    keys, offsets = rng.integers(-2, ROWS, 500), np.array([0, 3, 250, 250, 258, 500])
    with open_server(files, gpucache=False) as server:
        got = server.lookup_pooled({"a": hps.Bags(keys, offsets, combiner="mean", padding_key=-1)}, "m")["a"]
        counters = server.metrics.table("m", "a")
    vectors = np.where(keys[:, None] < 0, np.float32(DEFAULT), VECTORS["a"][keys])
    pooled(vectors, keys, offsets, combiner="mean", padding_key=-1).check(got)
    assert (counters.keys, counters.defaults) == (np.count_nonzero(keys != -1), np.count_nonzero(keys == -2))


def test_above_the_threshold_missing_keys_count_with_the_default_and_are_fetched_later(files: list[Path]) -> None:
    bags = {"a": hps.Bags(KEYS, OFFSETS)}
    with open_server(files, gpucacheper=1.0, hit_rate_threshold=0.0) as server:
        expected = np.array([[3], [0], [3]]) * np.full(3, DEFAULT)
        for _ in range(2):
            np.testing.assert_array_equal(server.lookup_pooled(bags, "m")["a"], expected)
            wait_until(lambda: np.array_equal(server.lookup_pooled(bags, "m")["a"], sums("a")), "the keys to be resident")
            server.model("m").sessions[0].cache.erase(0, KEYS[:1])
            expected = sums("a")
            expected[0] += DEFAULT - VECTORS["a"][4]


def test_padding_makes_no_hits_that_would_leave_missing_keys_for_later(files: list[Path]) -> None:
    keys = np.full((1, 10), -1)
    keys[0, 0] = 4
    with open_server(files, hit_rate_threshold=0.5) as server:
        server.model("m").sessions[0].cache.erase(0, keys[0, :1])
        counters = server.metrics.table("m", "a")
        before = counters.keys, counters.hits[0], counters.misses[0]
        got = server.lookup_pooled({"a": hps.Bags(keys, padding_key=-1)}, "m")["a"]
        np.testing.assert_array_equal(got, VECTORS["a"][[4]])
        assert (counters.keys - before[0], counters.hits[0] - before[1], counters.misses[0] - before[2]) == (1, 0, 1)
