"""Networks that were cut at their lookups: free sizes, guards, keys that are computed, and bags of all requests of a batch."""

import functools
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import hps
from hps.configuration.load import load_dense
from hps.scoring.batching import Batcher, ScoreCall
from hps.scoring.features import ScoreInputs, read_request
from hps.scoring.network_calls import NetworkCalls
from hps.scoring.packing import read_description
from hps.scoring.scorer import Scorer
from hps.scoring.signature import Output, Signature, signature_of
from hps.statistics.scores import ScoreCounters
from hps.testing.pooling_oracle import pooled
from hps.testing.waiting import PATIENCE_S, wait_until
from tests.fakes.networks import ArrayNetwork, Arrays, DeviceNetwork, FakeTables
from tests.ring1.scoring.test_packing import Region

MOST = 40
DIMS = (4, 2)
CUT: dict[str, Any] = {
    "inputs": {
        "user": {"dtype": "int32", "shape": [-1], "per_request": True},
        "hist": {"dtype": "int64", "shape": [-1, "n"]},
        "grid": {"dtype": "float64", "shape": [-1, 3]},
        "mask": {"dtype": "uint8", "shape": [-1, "n", "2*n + 1"]},
        "tags": {"dtype": "int64", "shape": ["m"]},
        "ends": {"dtype": "int64", "shape": ["samples + 1"], "offsets_of": "tags"},
        "words": {"dtype": "int32", "shape": ["w"]},
        "starts": {"dtype": "int32", "shape": [-1], "offsets_of": "words"},
        "weights": {"dtype": "float16", "shape": ["w"]},
    },
    "sizes": {"n": 4, "m": 9, "w": 5},
    "keys": [
        {"file": "0", "inputs": ["user"], "outputs": ["user_key", "pair"]},
        {"file": "1", "inputs": ["hist", "user"], "outputs": ["mixed"]},
    ],
    "lookups": {
        "plain": {"table": "t1", "keys": {"input": "hist"}},
        "clipped": {"table": "t1", "max_norm": 2.0, "keys": {"input": "hist"}},
        "column": {"table": "t0", "keys": {"input": "grid", "column": 1}},
        "bag": {"table": "t1", "pooling": "mean", "padding_key": 3, "keys": {"input": "hist"}},
        "tagged": {
            "table": "t0",
            "pooling": "sum",
            "keys": {"input": "tags"},
            "offsets": {"input": "ends"},
            "include_last_offset": True,
        },
        "said": {
            "table": "t1",
            "pooling": "sum",
            "keys": {"input": "words"},
            "offsets": {"input": "starts"},
            "weights": {"input": "weights"},
        },
        "owner": {"table": "t0", "keys": {"output": "user_key"}},
        "pairs": {"table": "t0", "pooling": "sum", "keys": {"output": "pair"}},
        "mixture": {"table": "t1", "keys": {"output": "mixed"}},
    },
    "network_inputs": [
        *("grid", "user", "plain", "clipped", "column", "bag", "tagged", "said", "owner", "pairs", "mixture", "hist"),
    ],
}


def of_user(given: Arrays) -> dict[str, np.ndarray]:
    return {"user_key": given["user"] + 1, "pair": np.stack([given["user"], given["user"] * 2], 1)}


def of_both(given: Arrays) -> dict[str, np.ndarray]:
    return {"mixed": (given["hist"] + given["user"][:, None].astype(np.int64)) % 7}


def everything(given: Arrays) -> dict[str, np.ndarray]:
    samples = len(next(iter(given.values())))
    return {"all": np.concatenate([one.reshape(samples, -1).astype(np.float32) for one in given.values()], 1)}


def signature(**changes: Any) -> Signature:
    said = {"format": "onnx", "file": "f", "outputs": ["all"], **CUT, **changes}
    return signature_of(load_dense(said), FakeTables(*DIMS).specs)


class Cut(Scorer):
    """A scorer of a network that was cut. `asked` has the number of rows of each run of a keys program."""

    def __init__(
        self,
        kind: type[ArrayNetwork] = ArrayNetwork,
        function: Callable[[Arrays], Mapping[str, np.ndarray]] = everything,
        programs: Sequence[Callable[[Arrays], Mapping[str, np.ndarray]]] = (of_user, of_both),
        **changes: Any,
    ) -> None:
        self.tables, self.network = FakeTables(*DIMS), kind(function)
        self.keys_programs = [kind(program) for program in programs]
        calls = NetworkCalls(self.network, self.keys_programs)
        super().__init__(
            "m",
            self.tables.specs,
            signature(**changes),
            calls,
            self.tables.look_up,
            on_device=kind is DeviceNetwork,
            max_samples=MOST,
        )

    def read(self, arrays: Arrays) -> ScoreInputs:
        return read_request(self.signature, arrays, MOST, "m")

    def answers(self, *arrays: Arrays) -> list[Any]:
        return [one["all"] if isinstance(one, dict) else one for one in self.score([self.read(array) for array in arrays])[0]]


def arrays_of(rng: np.random.Generator, samples: int, n: int = 2, once: bool = True, **changes: Any) -> dict[str, np.ndarray]:
    tags, words = rng.integers(0, 4, samples), rng.integers(0, 4, samples)
    return {
        "user": rng.integers(0, 50, 1 if once else samples, np.int32),
        "hist": rng.integers(0, 5, (samples, n)),
        "grid": rng.integers(0, 50, (samples, 3)) + 0.75,
        "mask": rng.integers(0, 2, (samples, n, 2 * n + 1), np.uint8),
        "tags": rng.integers(0, 50, tags.sum()),
        "ends": np.concatenate([[0], np.cumsum(tags)]),
        "words": rng.integers(0, 50, words.sum(), np.int32),
        "starts": np.concatenate([[0], np.cumsum(words)[:-1]]).astype(np.int32),
        "weights": rng.random(words.sum()).astype(np.float16),
        **changes,
    }


def expected(tables: FakeTables, arrays: Arrays) -> np.ndarray:
    """What a request gets, said in the plainest way."""
    hist, samples = arrays["hist"], len(arrays["hist"])
    user = np.broadcast_to(arrays["user"].astype(np.int64), samples)

    def bags(table: int, keys: np.ndarray, bounds: np.ndarray, *more: Any) -> np.ndarray:
        return pooled(tables.vectors(table, keys), keys, bounds, *more).vectors

    rows = tables.vectors(1, hist)
    norms = np.linalg.norm(rows, axis=-1, keepdims=True)
    words = np.append(arrays["starts"], len(arrays["words"]))
    columns = [
        *(arrays["grid"], user[:, None], rows, np.where(norms > 2, rows * (2 / (norms + 1e-7)), rows)),
        tables.vectors(0, arrays["grid"][:, 1].astype(np.int64)),
        bags(1, hist.reshape(-1), np.arange(samples + 1) * hist.shape[1], None, "mean", None, 3),
        bags(0, arrays["tags"], arrays["ends"], None, "sum"),
        bags(1, arrays["words"].astype(np.int64), words, arrays["weights"].astype(np.float32), "sum"),
        *(tables.vectors(0, user + 1), tables.vectors(0, user) + tables.vectors(0, 2 * user)),
        *(tables.vectors(1, (hist + user[:, None]) % 7), hist),
    ]
    return np.concatenate([column.reshape(samples, -1) for column in columns], 1)


each_kind = pytest.mark.parametrize("kind", [ArrayNetwork, DeviceNetwork], ids=["on the CPU", "on a device"])


@each_kind
@pytest.mark.parametrize("once", [True, False])
@pytest.mark.parametrize("samples", [1, 2, 7])
def test_each_lookup_gets_its_keys(kind: type[ArrayNetwork], once: bool, samples: int) -> None:
    ours, rng = Cut(kind), np.random.default_rng(samples)
    for n in (1, 3, 3, 2):
        arrays = arrays_of(rng, samples, n, once)
        np.testing.assert_allclose(ours.answers(arrays)[0], expected(ours.tables, arrays), rtol=1e-5, atol=1e-5)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 5), st.booleans()), min_size=2, max_size=5), st.booleans(), st.integers(0, 99))
def test_requests_of_one_batch_get_what_they_get_alone(sizes: list[tuple[int, bool]], on_device: bool, seed: int) -> None:
    ours, rng = Cut(DeviceNetwork if on_device else ArrayNetwork), np.random.default_rng(seed)
    every = [arrays_of(rng, samples, 2, once) for samples, once in sizes]
    ours.network.calls.clear()
    together = ours.answers(*every)
    assert ours.network.calls == [sum(samples for samples, _ in sizes)]
    for arrays, answer in zip(every, together, strict=True):
        np.testing.assert_allclose(answer, ours.answers(arrays)[0], rtol=1e-6)
        np.testing.assert_allclose(answer, expected(ours.tables, arrays), rtol=1e-5, atol=1e-5)


@each_kind
def test_what_is_given_once_is_computed_and_looked_up_once(kind: type[ArrayNetwork]) -> None:
    ours, rng = Cut(kind), np.random.default_rng(1)
    asked: list[tuple[int, int]] = []
    look_up = ours.tables.look_up
    ours._runner.lookup = lambda batch: (asked.extend(zip(batch.tables, batch.sizes, strict=True)), look_up(batch))[1]
    ours.answers(arrays_of(rng, 3), arrays_of(rng, 4))
    assert [program.calls for program in ours.keys_programs] == [[2], [7]]
    assert sorted(asked)[:2] == [(0, 2), (0, 4)]  # a key, and a pair, of each user
    ours.answers(arrays_of(rng, 3), arrays_of(rng, 4, once=False))
    assert [program.calls for program in ours.keys_programs] == [[2, 5], [7, 7]]


def test_a_program_is_not_run_on_a_number_of_rows_that_the_guards_refuse() -> None:
    """Programs are exported with sizes of at least 2, and answer wrongly with fewer where a guard says so."""
    ours, rng = Cut(guards=["samples >= 2"]), np.random.default_rng(1)
    every = [arrays_of(rng, 3), arrays_of(rng, 2)]
    for batch in ([every[0]], every):
        for arrays, answer in zip(batch, ours.answers(*batch), strict=True):
            np.testing.assert_allclose(answer, expected(ours.tables, arrays), rtol=1e-5, atol=1e-5)
    assert ours.keys_programs[0].calls == [3, 2]


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "missing": ({"mask": None}, "input 'mask' is missing; expected user, hist, grid, mask"),
    "rank": ({"hist": np.zeros(2, np.int64)}, "got input 'hist' of shape [2], expected [samples, n]"),
    "fixed": ({"grid": np.zeros((2, 4))}, "got input 'grid' of shape [2, 4], expected [samples, 3]"),
    "equal": ({"weights": np.zeros(3, np.float16)}, "'weights' of shape [3], expected [w] with w 2, as for another input"),
    "an expression": ({"mask": np.zeros((2, 2, 4), np.uint8)}, "expected [samples, n, 2*n + 1] with 2*n + 1 = 5"),
    "samples": ({"starts": np.zeros(3, np.int32)}, "got 3 samples of input 'starts', expected 2, as of 'hist'"),
    "ends": ({"ends": np.array([0, 2])}, "got input 'ends' of shape [2], expected [samples + 1] with samples + 1 = 3"),
    "ends begin late": ({"ends": np.array([1, 1, 2])}, "got offsets 'ends' that begin with 1 and end with 2, expected 0 to 2"),
    "ends end early": ({"ends": np.array([0, 1, 1])}, "expected 0 to 2, the number of values of 'tags', never falling"),
    "ends fall": ({"ends": np.array([0, 3, 2])}, "got offsets 'ends' that begin with 0 and end with 2"),
    "starts end late": ({"starts": np.array([0, 3], np.int32)}, "end with 3, expected 0 to at most 2, the number of values of"),
    "starts fall": ({"starts": np.array([0, -1], np.int32)}, "got offsets 'starts' that begin with 0 and end with -1"),
}  # fmt: skip


def two_samples(**changes: Any) -> dict[str, np.ndarray]:
    given = arrays_of(
        np.random.default_rng(0), 2, tags=np.arange(2), ends=np.array([0, 0, 2]), words=np.arange(2, dtype=np.int32)
    )
    given |= {"starts": np.array([0, 2], np.int32), "weights": np.zeros(2, np.float16), **changes}
    return {name: array for name, array in given.items() if array is not None}


@pytest.mark.parametrize("name", REFUSED)
def test_an_input_is_refused_and_named(name: str) -> None:
    changes, message = REFUSED[name]
    ours = signature()
    read_request(ours, two_samples(), MOST, "m")
    with pytest.raises(hps.InvalidInputError, match=re.escape(message)) as caught:
        read_request(ours, two_samples(**changes), MOST, "m")
    assert str(caught.value).startswith("scoring with model 'm': ")


@pytest.mark.parametrize(("name", "dtype"), [("grid", np.float32), ("hist", np.int32), ("words", np.int64), ("mask", np.int8)])
def test_another_dtype_is_refused(name: str, dtype: Any) -> None:
    given = two_samples()
    expected = f"got input '{name}' of {np.dtype(dtype)}, expected {given[name].dtype}"
    with pytest.raises(hps.InvalidDtypeError, match=expected):
        read_request(signature(), {**given, name: given[name].astype(dtype)}, MOST, "m")


@pytest.mark.parametrize("names", [("hist", "codes"), ("codes", "hist")])
def test_no_samples_leave_the_sizes_to_what_is_given_once(names: tuple[str, str]) -> None:
    said = {"hist": {"dtype": "int64", "shape": [-1, "n"]}, "codes": {"shape": [-1, "n"], "per_request": True}}
    network = {"format": "onnx", "file": "f", "outputs": ["all"], "sizes": {"n": 2}, "guards": ["n == 2", "samples >= 2"]}
    ours = signature_of(load_dense({**network, "inputs": {name: said[name] for name in names}}), FakeTables(*DIMS).specs)
    given = {"hist": np.empty((0, 0), np.int64), "codes": np.ones((1, 7), np.float32)}
    request = read_request(ours, given, MOST, "m")
    assert (request.samples, request.sizes) == (0, {"n": 7})
    with pytest.raises(hps.InvalidInputError, match=r"with n [37], as for another input"):
        read_request(ours, {**given, "hist": np.empty((2, 3), np.int64), "codes": np.ones((2, 7), np.float32)}, MOST, "m")


def test_more_keys_than_the_table_allows_are_refused() -> None:
    ours = signature()
    most = ours.limits[0]
    given = two_samples(tags=np.zeros(most, np.int64), ends=np.array([0, 0, most]))
    read_request(ours, given, MOST, "m")
    given = two_samples(tags=np.zeros(most + 1, np.int64), ends=np.array([0, 0, most + 1]))
    with pytest.raises(hps.TooManyKeysError, match=f"got {most + 1} keys of input 'tags', expected at most {most}"):
        read_request(ours, given, MOST, "m")


# -- guards ------------------------------------------------------------------------------------------------------------

ROWS: dict[str, Any] = {
    "inputs": {"hist": {"dtype": "int64", "shape": [-1, "n"]}, "age": {"per_request": True}},
    "sizes": {"n": 4},
    "keys": [],
    "lookups": {"vectors": {"table": "t1", "keys": {"input": "hist"}}},
    "network_inputs": ["vectors", "age"],
}


def rows(samples: int, n: int = 4, once: bool = True) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(samples)
    return {"hist": rng.integers(0, 9, (samples, n)), "age": rng.random(1 if once else samples, np.float32)}


@pytest.mark.parametrize(
    ("guard", "message"),
    [
        ("n >= 2", "input 'hist' of shape [2, 1]: the network needs n >= 2, got 1"),
        ("n % 4 == 0", "input 'hist' of shape [2, 1]: the network needs n % 4 == 0, got 1"),
        ("n > samples", "input 'hist' of shape [2, 1]: the network needs n > samples, got n = 1, samples = 2"),
        ("samples > 9", "2 samples: the network needs samples > 9, got 2"),
    ],
)
def test_a_request_that_a_guard_refuses_is_refused_by_its_sizes(guard: str, message: str) -> None:
    ours = Cut(**ROWS, guards=[guard], programs=())
    for _ in range(2):
        with pytest.raises(hps.InvalidInputError, match=re.escape(f"scoring with model 'm': {message}")):
            ours.read(rows(2, 1))


@each_kind
@pytest.mark.parametrize("once", [True, False])
def test_the_last_sample_is_repeated_where_the_network_refuses_a_number_of_samples(
    kind: type[ArrayNetwork], once: bool
) -> None:
    ours, other = Cut(kind, **ROWS, guards=["samples != 3", "samples >= 2"], programs=()), Cut(kind, **ROWS, programs=())
    for batch, runs in (((1,), 2), ((3,), 4), ((1, 2), 4), ((2, 2), 4), ((1, 1), 2)):
        every = [rows(samples, once=once) for samples in batch]
        for answer, wanted in zip(ours.answers(*every), other.answers(*every), strict=True):
            np.testing.assert_array_equal(answer, wanted)
        assert ours.network.calls[-1] in (runs, 16)  # on a device, memory for 16 samples is kept


def test_a_request_is_refused_by_the_size_that_no_repeated_sample_would_change() -> None:
    ours = Cut(**ROWS, guards=["samples != 1", "n >= 2"], programs=())
    with pytest.raises(hps.InvalidInputError, match=re.escape("input 'hist' of shape [1, 1]: the network needs n >= 2, got 1")):
        ours.read(rows(1, 1))
    alone = Cut(**ROWS, guards=["samples != 1"], programs=(), dynamic_batching=False)
    with pytest.raises(hps.InvalidInputError, match="1 sample: the network needs samples != 1, got 1"):
        alone.read(rows(1, 1))


def test_what_cannot_be_repeated_is_refused_by_its_number_of_samples() -> None:
    arrays = rows(3)
    refused = "scoring with model 'm': 3 samples: the network needs samples != 3, got 3"
    for changes in ({"dynamic_batching": False}, {"guards": ["samples != 3", "samples != 4", "samples != 5"]}):
        ours = Cut(**{**ROWS, "guards": ["samples != 3"], **changes}, programs=())
        ours.answers(rows(2))
        with pytest.raises(hps.InvalidInputError, match=refused):
            ours.read(arrays)


def test_an_empty_bag_is_added_where_the_network_refuses_a_number_of_samples() -> None:
    ours, other = Cut(guards=["samples != 2"]), Cut()
    np.testing.assert_array_equal(ours.answers(two_samples())[0], other.answers(two_samples())[0])
    assert ours.network.calls[-1] == 3


def test_a_batch_that_the_guards_refuse_is_no_batch() -> None:
    ours = Cut(guards=["m <= 9"])
    given = two_samples(tags=np.arange(5), ends=np.array([0, 0, 5]))
    assert len(ours.answers(given)) == 1
    with pytest.raises(hps.NetworkError, match=r"got 2 requests of 4 samples and sizes .*'m': 10.*, expected m <= 9"):
        ours.answers(given, given)


def test_shapes_of_outputs_follow_from_named_sizes() -> None:
    def shapes(given: Arrays) -> dict[str, np.ndarray]:
        samples, n, _ = given["vectors"].shape
        m = len(given["tags"])
        sizes: dict[str, tuple[int, ...]] = {"same": (n,), "sum": (2 * n + 3 * m - 1, 5), "less": (90 - n,), "none": ()}
        return {name: np.zeros((samples, *shape), np.float32) for name, shape in sizes.items()}

    inputs = {**ROWS["inputs"], "tags": {"dtype": "int64", "shape": ["m"]}}
    said = {**ROWS, "inputs": inputs, "sizes": {"n": 4, "m": 2}, "network_inputs": ["vectors", "tags"]}
    said["outputs"] = ["same", "sum", "less", "none"]
    for guards in ([], ["n % 4 == 0"], ["n <= 4", "m != 3"], ["n != 5", "samples >= 2"]):
        ours = Cut(function=shapes, **{**said, "guards": guards}, programs=())
        for n, m in ((8, 2), (12, 6), (4, 1)):
            given = {one.name: (4, *one.shape_with({"n": n, "m": m})) for one in ours.try_out()}
            wanted = {"same": (4, n), "sum": (4, 2 * n + 3 * m - 1, 5), "less": (4, 90 - n), "none": (4,)}
            assert given == wanted
    fixed = Cut(function=shapes, **{**said, "guards": ["n == 4", "m == 2"]}, programs=())
    assert [one.shape for one in fixed.try_out()] == [(4,), (13, 5), (86,), ()]


# -- what can be merged --------------------------------------------------------------------------------------------------

ENDS = {"shape": ["samples + 1"], "dtype": "int64"}


@pytest.mark.parametrize(
    ("inputs", "sizes", "merges", "inner"),
    [
        ({"x": {"shape": [-1, "n"]}}, {"n": 2}, True, ("n",)),
        ({"x": {"shape": ["samples", 2]}}, {}, True, ()),
        ({"x": {"shape": ["samples", 2]}, "y": {"shape": ["2*samples"]}}, {}, False, ()),
        ({"x": {"shape": [-1, "n"]}, "y": {"shape": ["n"]}}, {"n": 2}, False, ()),
        ({"x": {"shape": [-1, "samples"]}}, {}, False, ()),
        ({"x": {}, "y": {"shape": ["samples + 1"]}}, {}, False, ()),
        ({"x": {}, "y": {"shape": ["samples*samples"]}}, {}, False, ()),
        ({"x": {}, "y": {"shape": [26, "k"]}}, {"k": 2}, False, ()),
        ({"x": {}, "v": {"shape": ["m"]}, "y": {"offsets_of": "v", **ENDS}}, {"m": 2}, True, ()),
        ({"x": {}, "v": {"shape": ["m"]}, "y": {"shape": ["m + samples"]}}, {"m": 2}, False, ()),
        ({"x": {}, "v": {"shape": ["m"]}, "y": {"offsets_of": "v", **ENDS, "shape": ["2*samples"]}}, {"m": 2}, False, ()),
        ({"x": {"shape": [-1, "n"]}, "v": {"shape": ["m"]}, "y": {"shape": ["m", 4]}}, {"m": 2, "n": 3}, True, ("n",)),
    ],
)  # fmt: skip
def test_requests_are_merged_where_their_rows_can_be_told_apart(
    inputs: dict[str, Any], sizes: dict[str, int], merges: bool, inner: tuple[str, ...]
) -> None:
    lookups = {"vectors": {"table": "t1", "keys": {"input": "x"}}}
    found = signature(inputs=inputs, sizes=sizes, keys=[], lookups=lookups, network_inputs=None)
    assert (found.merges, found.inner) == (merges, inner)


@pytest.mark.parametrize(
    ("guard", "merges"), [("m == 3*samples", False), ("m % 3 == 0", False), ("m != samples", True), ("n % 2 == 0", True)]
)
def test_rows_that_are_tied_to_the_samples_by_a_guard_are_not_merged(guard: str, merges: bool) -> None:
    inputs = {"x": {"shape": [-1, "n"]}, "y": {"shape": ["m"]}}
    lookups = {"vectors": {"table": "t1", "keys": {"input": "x"}}}
    sizes = {"n": 2, "m": 3}
    said = {"inputs": inputs, "sizes": sizes, "keys": [], "lookups": lookups, "network_inputs": None, "guards": [guard]}
    assert signature(**said).merges is merges


def test_requests_that_share_no_inner_sizes_have_other_forms() -> None:
    ours = Cut()
    assert [ours.read(arrays_of(np.random.default_rng(0), 2, n)).form for n in (2, 3)] == [(2,), (3,)]


def test_the_number_of_samples_may_be_in_an_expression_alone() -> None:
    """A KeyedJaggedTensor of three features: values, and lengths of all samples of all features."""
    inputs = {"lengths": {"dtype": "int64", "shape": ["3*samples"]}, "values": {"dtype": "int64", "shape": ["m"]}}
    lookups = {"vectors": {"table": "t1", "keys": {"input": "values"}}}
    ours = signature(inputs=inputs, sizes={"m": 2}, keys=[], lookups=lookups, network_inputs=["lengths", "vectors"])
    given = {"lengths": np.zeros(6, np.int64), "values": np.arange(5)}
    assert read_request(ours, given, MOST, "m").samples == 2
    with pytest.raises(hps.InvalidInputError, match=re.escape("got input 'lengths' of shape [7], expected [3*samples]")):
        read_request(ours, {**given, "lengths": np.zeros(7, np.int64)}, MOST, "m")


# -- trials --------------------------------------------------------------------------------------------------------------


@each_kind
def test_the_trial_runs_all_programs_without_lookups(kind: type[ArrayNetwork]) -> None:
    ours = Cut(kind)
    assert ours.try_out() == (Output("all", "float32", (f"7*n + {3 + 1 + 4 + 2 + 4 + 2 + 4 + 4}",)),)
    assert (ours.tables.lookups, ours.network.calls[:2]) == ([], [1, 3])
    assert [program.calls for program in ours.keys_programs] == [ours.network.calls] * 2
    assert {*ours.network.calls[2:]} == {1}  # with other sizes


@pytest.mark.parametrize(
    ("guards", "tried"),
    [(["samples != 1"], [2, 3]), (["samples >= 5"], [5, 6]), (["samples != 3"], [1, 4]), (["samples == 2"], [2])],
)
def test_the_trial_takes_numbers_of_samples_that_the_guards_allow(guards: list[str], tried: list[int]) -> None:
    ours = Cut(**ROWS, guards=guards, programs=())
    ours.try_out()
    assert ours.network.calls[: len(tried)] == tried
    assert {*ours.network.calls} == {*tried}


def test_a_network_that_runs_with_no_number_of_samples_is_refused() -> None:
    ours = Cut(**ROWS, guards=["samples < 1"], programs=())
    with pytest.raises(hps.NetworkError, match=r"its guards refuse any number of samples with dense\.sizes: samples < 1"):
        ours.try_out()


def test_a_keys_program_that_fails_is_named() -> None:
    def fails(given: Arrays) -> dict[str, np.ndarray]:
        raise ValueError("no keys")

    ours = Cut(programs=(fails, of_both))
    with pytest.raises(hps.NetworkError, match=r"^running a keys program of model 'm': ValueError: no keys$"):
        ours.answers(arrays_of(np.random.default_rng(0), 2))


# -- batches -------------------------------------------------------------------------------------------------------------


class Waiting:
    """Requests that wait behind one whose lookup does not end; then all are answered."""

    def __init__(self, scorer: Cut) -> None:
        self.scorer, self.told = scorer, dict[int, Any]()
        self._told = threading.Semaphore(0)

    def answers(self, *every: Arrays) -> list[Any]:
        batcher = Batcher("model 'm'", [self.scorer], ScoreCounters(), MOST)
        self.scorer.tables.may_answer.clear()
        for number, arrays in enumerate((every[0], *every), -1):
            batcher.submit(ScoreCall(self.scorer.read(arrays), functools.partial(self._tell, number)))
            if number < 0:
                wait_until(lambda: not batcher.waiting, "the batcher is busy")
        self.scorer.tables.may_answer.set()
        for _ in range(len(every) + 1):
            assert self._told.acquire(timeout=PATIENCE_S)
        assert batcher.close(PATIENCE_S)
        return [self.told[number] for number in range(len(every))]

    def _tell(self, number: int, answer: Any, times: Any) -> None:
        self.told[number] = answer["all"] if isinstance(answer, dict) else answer
        self._told.release()


def test_requests_of_one_length_are_one_batch_whatever_waits_between_them() -> None:
    ours, other = Cut(**ROWS, programs=()), Cut(**ROWS, programs=())
    every = [rows(samples, n) for samples, n in ((2, 3), (1, 4), (3, 3), (4, 4), (1, 5), (5, 3))]
    for answer, arrays in zip(Waiting(ours).answers(*every), every, strict=True):
        np.testing.assert_array_equal(answer, other.answers(arrays)[0])
    assert ours.network.calls == [2, 2 + 3 + 5, 1 + 4, 1]


def test_a_batch_that_the_guards_refuse_is_answered_request_by_request() -> None:
    guards = ["samples != 5", "samples != 6", "samples != 7"]
    ours, other = Cut(**ROWS, guards=guards, programs=()), Cut(**ROWS, programs=())
    every = [rows(2), rows(3)]
    for answer, arrays in zip(Waiting(ours).answers(*every), every, strict=True):
        np.testing.assert_array_equal(answer, other.answers(arrays)[0])
    assert ours.network.calls == [2, 2, 3]


def test_a_request_with_too_many_computed_keys_harms_no_other() -> None:
    """How many keys a program computes is known when it has run: they are refused by the lookup."""

    def repeated(given: Arrays) -> dict[str, np.ndarray]:
        return {"many": np.repeat(given["x"], given["x"].max())}

    inputs = {"x": {"dtype": "int64", "shape": [-1]}}
    programs = [{"file": "0", "inputs": ["x"], "outputs": ["many"]}]
    lookup = {"table": "t1", "keys": {"output": "many"}}
    said: dict[str, Any] = {"inputs": inputs, "keys": programs, "sizes": {}, "network_inputs": ["x"]}
    ours = Cut(function=lambda given: {"all": given["x"]}, programs=(repeated,), **said, lookups={"rows": lookup})
    look_up = ours.tables.look_up

    def bounded(batch: Any) -> None:
        if batch.sizes[0] > 20:
            raise hps.TooManyKeysError(f"got {batch.sizes[0]} keys")
        look_up(batch)

    ours._runner.lookup = bounded
    answers = Waiting(ours).answers(*[{"x": np.array([number])} for number in (1, 30, 9)])
    assert isinstance(answers[1], hps.TooManyKeysError)
    assert [answers[0].tolist(), answers[2].tolist()] == [[1], [9]]


# -- shared memory -------------------------------------------------------------------------------------------------------


def test_requests_in_shared_memory_are_read_by_their_shapes() -> None:
    ours = Cut(**ROWS, guards=["n >= 2"], programs=())
    region = Region(ours.signature)
    packed = [region.pack(rows(samples, n), samples) for samples, n in ((2, 4), (3, 4), (3, 5))]
    assert [(one.samples, one.form, dict(one.sizes)) for one in packed] == [
        (2, (4,), {"n": 4}),
        (3, (4,), {"n": 4}),
        (3, (5,), {"n": 5}),
    ]
    answers, _ = ours.score(packed[:2])
    for answer, samples in zip(answers, (2, 3), strict=True):
        assert isinstance(answer, dict)
        np.testing.assert_array_equal(answer["all"], ours.answers(rows(samples))[0])
    with pytest.raises(hps.InvalidInputError, match="the network needs n >= 2, got 1"):
        region.pack(rows(2, 1), 2)


def test_offsets_in_shared_memory_are_checked_by_their_values() -> None:
    ours = Cut()
    region = Region(ours.signature)
    packed = region.pack(two_samples(ends=np.array([0, 1, 1])), 2)
    assert packed.samples == 0
    with pytest.raises(hps.InvalidInputError, match="got offsets 'ends'"):
        packed.unpacked(ours.signature, MOST, "m")
    assert read_description(b'{"inputs": [], "outputs": [], "timeout_us": 0}', ours.signature, MOST, "m").samples == 0
