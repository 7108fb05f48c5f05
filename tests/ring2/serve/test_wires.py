"""Every way to ask a server has the answers of the server in process: vectors, found-masks, bags, 16 bits, scores and errors.

What a wire alone has is tested in a module of its own; what all have is a row of a table here, and a wire is a class.
"""

from collections.abc import Callable, Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import tritonclient.grpc as triton_grpc
import tritonclient.http as triton_http
from tritonclient.utils import InferenceServerException

import hps
from tests.fakes import entry_points
from tests.servers import wires
from tests.servers.running_service import document_of, model_of
from tests.servers.served_process import ServedProcess
from tests.servers.wires import DIMS, WIRES, Answer, InProcess, Wire, bits_of, narrowed

ROWS, MOST, MOST_OF_REQUEST = 300, 10_000, 12_000


def rows_of(table: str) -> np.ndarray:
    """Multiples of 1/8, so that sums are the same in any order."""
    return np.random.default_rng(DIMS[table]).integers(-800, 800, (ROWS, DIMS[table])).astype(np.float32) / 8


@pytest.fixture(scope="module")
def document(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """Model `m` with rows in bytes, half floats and floats; `scored` and `cut` with networks of another package's engine."""
    place = tmp_path_factory.mktemp("wires")
    entry_points.install(place / "engine", "hps.networks", {"arrays": "tests.fakes.networks:ArrayNetwork"})
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(place / "engine")
        patch.setenv("PYTHONPATH", f"{place / 'engine'}:{Path(hps.__file__).parents[1]}")
        tables = {name: (np.arange(ROWS), rows_of(name)) for name in DIMS}
        for name, rows in tables.items():
            hps.write_sparse_model(place / name, rows)
        said = {"format": "arrays", "file": "dense.json", "outputs": ["score"]}
        network = ({**said, "inputs": {"item": {"table": "item"}, "age": {}}}, b'{"factor": 0.5}')
        hps.write_version(place / "scored" / "1", {"item": tables["item"]}, network=network)
        more = {"row_dtype": ["float32", "int8", "float16"], "default_value_for_each_table": [0.1, 6e4, -0.3]}
        more |= {"maxnum_catfeature_query_per_table_per_sample": [MOST // 1000] * 3, "gpucacheper": 0.3}
        model = model_of("m", [place / name for name in DIMS], DIMS, hit_rate_threshold=1.1, **more)
        files = {"dense.json": b'{"factor": 0.5, "keeps": {"seen": "hist"}}', "offsets.json": b'{"adds": [0, 40]}'}
        rows = {name: tables[name] for name in ("item", "word")}
        hps.write_version(place / "cut" / "1", rows, network=({**said, **CUT, "outputs": ["score", "seen"]}, files))
        [scored, cut] = [
            model_of(name, list(used), used, hit_rate_threshold=1.1, version_path=str(place / name))
            for name, used in (("scored", {"item": DIMS["item"]}), ("cut", {one: DIMS[one] for one in ("item", "word")}))
        ]
        service = {"max_keys_per_request": MOST_OF_REQUEST, "shared_memory_bytes": 1 << 24, "access_log_per_s": 0}
        yield document_of(model, scored, cut, service=service)


@pytest.fixture(scope="module")
def reference(document: dict[str, Any]) -> Iterator[InProcess]:
    with hps.HPS(document) as server:
        yield InProcess(server)


@pytest.fixture(scope="module", params=[0, 2], ids=["without fronts", "with fronts"])
def served(
    request: pytest.FixtureRequest, document: dict[str, Any], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServedProcess]:
    with ServedProcess(document, tmp_path_factory.mktemp("served"), request.param, "--grpc-port", 0) as served:
        yield served


@pytest.fixture(params=WIRES, ids=lambda one: one.__name__)
def wire(request: pytest.FixtureRequest, served: ServedProcess) -> Iterator[Any]:
    made = request.param(served)
    yield made
    made.close()


# -- what all of them answer ------------------------------------------------------------------------------------------

LOOKUPS: dict[str, dict[str, Any]] = {
    "tables with absent and repeated keys": {"user": [0, 299, 10**12, 7, 7], "item": np.arange(280, 320), "word": [3]},
    "one of three tables without keys": {"user": [], "item": [1, 1], "word": [2, 3]},
    "another one": {"word": [], "user": [5], "item": [8]},
    "no keys at all": {"user": [], "item": [], "word": []},
    "one key": {"word": [5]},
    "the ends of 64 bits": {"item": [-1, -(2**63), 2**63 - 1, 4]},
    "as many keys as one table may have": {"word": np.arange(MOST) % 310},
    "many keys of two tables": {"user": np.arange(3000)[::-1] % 310, "item": np.arange(3000) % 310},
    "keys of 32 bits": {"user": np.array([1, 2, 3], np.int32), "word": np.array([4], np.int32)},
}


def arrays(tables: Mapping[str, Any]) -> dict[str, np.ndarray]:
    return {
        name: np.ascontiguousarray(one if isinstance(one, np.ndarray) else np.array(one, np.int64))
        for name, one in tables.items()
    }


def check(got: Answer, expected: Answer, what: str) -> None:
    assert got.vectors.keys() == expected.vectors.keys(), what
    for name, bits in expected.vectors.items():
        assert got.vectors[name].dtype == bits.dtype, (what, name)
        np.testing.assert_array_equal(got.vectors[name], bits, f"{what}: {name}")
    for name, mask in got.found.items():
        np.testing.assert_array_equal(mask, expected.found[name], f"{what}: {name}")


def test_lookups_have_vectors_and_masks_of_the_server_in_process(wire: Any, reference: InProcess) -> None:
    """Each twice, since a front keeps the layout of an answer for the next one."""
    for what, tables in LOOKUPS.items():
        for datatype in wire.datatypes:
            datatypes = dict.fromkeys(DIMS, datatype)
            expected = reference.lookup(arrays(tables), datatypes)
            for _ in range(2):
                check(wire.lookup(arrays(tables), datatypes), expected, f"{what} in {datatype}")


def test_each_output_may_have_a_datatype_of_its_own(wire: Any, reference: InProcess) -> None:
    if not wire.mixes:
        pytest.skip("it asks for one datatype")
    tables = arrays(LOOKUPS["tables with absent and repeated keys"])
    for turn in range(3):
        chosen = {name: wire.datatypes[(nth + turn) % len(wire.datatypes)] for nth, name in enumerate(DIMS)}
        check(wire.lookup(tables, chosen), reference.lookup(tables, chosen), str(chosen))


def each_combiner(*weights: np.ndarray) -> dict[str, hps.Bags]:
    combiners = zip(DIMS, ("sum", "mean", "sqrtn"), strict=True)
    return {name: hps.Bags(np.arange(9), [0, 1, 5, 9], *weights, combiner=combiner) for name, combiner in combiners}


BAGS: dict[str, Callable[[], dict[str, hps.Bags]]] = {
    "empty bags, an absent key": lambda: {"user": hps.Bags([1, 2, 10**12, 7], [0, 2, 2, 4]), "word": hps.Bags([3], [0, 0, 1])},
    "each combiner": each_combiner,
    "each combiner with weights": lambda: each_combiner(np.arange(9, dtype=np.float32) / 4 - 1),
    "a maximum": lambda: {"word": hps.Bags([3, 1, 3, 2], [0, 3, 3, 4], combiner="max", padding_key=2)},
    "a padding key and a largest norm": lambda: {
        "user": hps.Bags([3, 1, 3, 2], [0, 3, 4], padding_key=3),
        "item": hps.Bags([3, 1, 3, 2], [0, 3, 4], max_norm=1.5, combiner="mean"),
    },
    "as many keys in each bag": lambda: {
        "user": hps.Bags(np.array([[1, 2], [3, 4], [5, 5]])), "word": hps.Bags(np.array([[9]])),
    },
    "no bags": lambda: {"user": hps.Bags([], [0])},
    "one empty bag": lambda: {"item": hps.Bags([], [0, 0])},
    "thousands of bags": lambda: {"user": hps.Bags(np.arange(9000) % 300, np.arange(3001) * 3)},
}  # fmt: skip


def test_bags_are_pooled_as_in_process(wire: Any, reference: InProcess) -> None:
    for what, bags in BAGS.items():
        expected = reference.pooled(bags())
        for _ in range(2):
            got = wire.pooled(bags())
            assert got.keys() == expected.keys(), what
            for name, bits in expected.items():  # of int8 rows the order of terms shows
                np.testing.assert_allclose(got[name].view(np.float32), bits.view(np.float32), 2e-6, 1e-5, err_msg=what)
        for datatype in wire.datatypes[1:]:
            got = wire.pooled(bags(), datatype)
            for name, bits in reference.pooled(bags(), datatype).items():
                if name != "item":
                    np.testing.assert_array_equal(got[name], bits, f"{what}: {name} in {datatype}")


def test_scores_are_those_of_the_server_in_process(wire: Any, reference: InProcess) -> None:
    if not wire.scores:
        pytest.skip("it does not score")
    for samples in (1, 2, 0, 17):
        given = {"item": np.arange(samples) * 19 % 320, "age": np.arange(samples, dtype=np.float32) / 4}
        for _ in range(2):
            np.testing.assert_array_equal(wire.score(given), reference.score(given))


CUT: dict[str, Any] = {
    "inputs": {
        "age": {"dtype": "float64"},
        "hist": {"dtype": "int64", "shape": [-1, "n"]},
        "pair": {"dtype": "int32", "shape": [-1, 2]},
        "grid": {"shape": [-1, 3]},
        "half": {"dtype": "float16"},
        "codes": {"dtype": "int16", "shape": [-1, "n"]},
        "sign": {"dtype": "int8"},
        "byte": {"dtype": "uint8"},
        "known": {"dtype": "bool"},
        "user.id": {"dtype": "int64", "per_request": True},
        "of_bags": {"dtype": "int64", "shape": ["m"]},
        "of_bags.by": {"shape": ["m"]},
        "ends": {"dtype": "int64", "shape": ["samples + 1"], "offsets_of": "of_bags"},
    },
    "sizes": {"n": 2, "m": 5},
    "guards": ["n >= 2", "m <= 40", "samples != 3", "samples != 13", "samples != 14", "samples != 15"],
    "keys": [{"file": "offsets.json", "inputs": ["pair"], "outputs": ["shifted"]}],
    "lookups": {
        "rows": {"table": "item", "keys": {"input": "hist"}},
        "column": {"table": "item", "keys": {"input": "grid", "column": 1}},
        "pairs": {"table": "word", "pooling": "sum", "keys": {"output": "shifted"}},
        "user": {"table": "word", "keys": {"input": "user.id"}},
        "bags": {
            "table": "item",
            "pooling": "sum",
            "keys": {"input": "of_bags"},
            "offsets": {"input": "ends"},
            "weights": {"input": "of_bags.by"},
            "include_last_offset": True,
        },
    },
    "network_inputs": [*("hist", "age", "half", "codes", "sign", "byte", "known", "rows", "column", "pairs", "user", "bags")],
}


def cut_inputs(samples: int, n: int = 2, m: int | None = None, seed: int = 0) -> dict[str, np.ndarray]:
    """Inputs of model `cut`, whose sums are the same in any order."""
    rng = np.random.default_rng(seed)
    ends = np.concatenate([[0], np.cumsum(rng.integers(0, 4, samples))])
    ends[-1] = ends[-1] if m is None else m
    return {
        "age": rng.integers(0, 800, samples) / 8,
        "hist": rng.integers(0, ROWS + 9, (samples, n)),
        "pair": rng.integers(0, 250, (samples, 2), np.int32),
        "grid": rng.integers(0, ROWS, (samples, 3)).astype(np.float32),
        "half": rng.integers(-9, 9, samples).astype(np.float16) / 8,
        "codes": rng.integers(-(2**15), 2**15, (samples, n), np.int16),
        "sign": rng.integers(-128, 128, samples, np.int8),
        "byte": rng.integers(0, 256, samples, np.uint8),
        "known": rng.random(samples) < 0.5,
        "user.id": rng.integers(0, ROWS, 1),
        "of_bags": rng.integers(0, ROWS, ends[-1]),
        "of_bags.by": rng.integers(0, 9, ends[-1]).astype(np.float32) / 8,
        "ends": ends,
    }


def cut_scores(given: Mapping[str, np.ndarray]) -> np.ndarray:
    """What model `cut` answers, said in the plainest way."""
    item, word = (np.append(rows_of(name), np.zeros((1000, DIMS[name])), 0).astype(np.float64) for name in ("item", "word"))
    weighted = item[given["of_bags"]] * given["of_bags.by"][:, None]
    bags = np.array([weighted[start:end].sum() for start, end in pairwise(given["ends"])])
    each = [given[name].astype(np.float64) for name in CUT["network_inputs"] if name in given]
    sums = [one.sum(tuple(range(1, one.ndim))) for one in each]
    sums += [item[given["hist"]].sum((1, 2)), item[given["grid"][:, 1].astype(int)].sum(1), bags]
    sums += [word[given["pair"] + [0, 40]].sum((1, 2)), word[given["user.id"]].sum(1)]
    scores: np.ndarray = (0.5 * sum(sums)).astype(np.float32)
    return scores


def test_scores_of_a_network_that_was_cut_are_those_of_the_server_in_process(wire: Any, reference: InProcess) -> None:
    if not wire.scores:
        pytest.skip("it does not score")
    for samples, n in ((1, 2), (2, 5), (0, 2), (17, 2), (0, 1), (3, 2), (2, 5)):  # three are scored as four
        given = cut_inputs(samples, n)
        expected = cut_scores(given)
        np.testing.assert_array_equal(reference.score(given, "cut"), expected)
        for _ in range(2):
            np.testing.assert_array_equal(wire.score(given, "cut"), expected)


def test_outputs_have_the_sizes_of_the_request(served: ServedProcess) -> None:
    raw, curl = wires.RawHTTP(served), wires.Curl(served)
    for n in (2, 5, 3):
        given = cut_inputs(4, n)
        for binary in (True, True, False):
            asked = [{"name": name, "parameters": {"binary_data": True}} for name in ("seen", "score")][: 1 + binary]
            np.testing.assert_array_equal(raw.ask(given, asked, "cut")["seen"], given["hist"])
        assert curl.outputs(given, "cut")["seen"] == given["hist"].tolist()
    raw.close()
    curl.close()


def test_requests_of_equal_and_of_other_sizes_at_once_have_their_own_scores(served: ServedProcess) -> None:
    clients = [wires.RawHTTP(served) for _ in range(16)]
    for turn in range(4):
        asked = [cut_inputs(1 + nth % 2 + 4 * (nth % 3), 2 + nth % 3 // 2, seed=nth + turn) for nth in range(len(clients))]
        for wire, given in zip(clients, asked, strict=True):
            wire.send_scores(given, "cut")
        for wire, given in zip(clients, asked, strict=True):
            np.testing.assert_array_equal(wire.take()["score"], cut_scores(given))
    for wire in clients:
        wire.close()


REFUSED_SIZES = {
    "a short history": (cut_inputs(2, 1), "input 'hist' of shape [2, 1]: the network needs n >= 2, got 1"),
    "many keys in bags": (cut_inputs(2, m=41), "input 'of_bags' of shape [41]: the network needs m <= 40, got 41"),
    "a number of samples": (cut_inputs(13, m=30), "13 samples: the network needs samples != 13, got 13"),
    "offsets that fall": (
        cut_inputs(2, m=5) | {"ends": np.array([0, 7, 5])},
        "got offsets 'ends' that begin with 0 and end with 5, expected 0 to 5, the number of values of 'of_bags', never "
        "falling",
    ),
}


@pytest.mark.parametrize("what", REFUSED_SIZES)
def test_sizes_are_refused_in_the_same_words(wire: Any, reference: InProcess, what: str) -> None:
    if not wire.scores or (what.startswith("offsets") and not wire.ragged):
        pytest.skip("it does not score, or says no offsets")
    given, says = REFUSED_SIZES[what]
    good = cut_inputs(2)
    assert refusal(lambda: reference.score(given, "cut")) == ("InvalidInputError", f"scoring with model 'cut': {says}")
    for _ in range(2):
        error, message = refusal(lambda: wire.score(given, "cut"))
        assert error in ("InvalidInputError", "400", "INVALID_ARGUMENT")
        assert message.removesuffix(" (status 400)") == f"scoring with model 'cut': {says}"
        np.testing.assert_array_equal(wire.score(good, "cut"), cut_scores(good))


def test_metadata_has_the_inputs_of_requests_alone(served: ServedProcess) -> None:
    with triton_http.InferenceServerClient(served.url.removeprefix("http://")) as client:
        described, config = client.get_model_metadata("cut"), client.get_model_config("cut")
    shapes = {one["name"]: (one["datatype"], one["shape"]) for one in described["inputs"]}
    assert shapes.keys() == CUT["inputs"].keys()
    assert (shapes["hist"], shapes["of_bags"], shapes["ends"]) == (("INT64", [-1, -1]), ("INT64", [-1]), ("INT64", [-1]))
    assert (shapes["pair"], shapes["age"], shapes["byte"]) == (("INT32", [-1, 2]), ("FP64", [-1, 1]), ("UINT8", [-1, 1]))
    assert config["max_batch_size"] == 0
    assert {one["name"]: one["dims"] for one in config["input"]} == {name: shape for name, (_, shape) in shapes.items()}
    with triton_grpc.InferenceServerClient(served.grpc) as grpc:
        same = grpc.get_model_metadata("cut")
        assert {output.name: list(output.shape) for output in same.outputs} == {"score": [-1, 1], "seen": [-1, -1]}
        assert {input_.name: (input_.datatype, list(input_.shape)) for input_ in same.inputs} == shapes
        assert {one.name: one.data_type for one in grpc.get_model_config("cut").config.input}["codes"] == 7  # TYPE_INT16


# -- what all of them refuse ------------------------------------------------------------------------------------------


class Refused(NamedTuple):
    """Attributes:
    ask: the wrong call.
    error: of the server in process, and of the clients and layers of this package.
    codes: over HTTP and gRPC.
    says: part of the message.
    scores: whether scores are asked.
    """

    ask: Callable[[Wire], Any]
    error: type[hps.HPSError]
    codes: tuple[str, str]
    says: str = ""
    scores: bool = False


PLAIN = dict.fromkeys((*DIMS, "x"), "FP32")
NOT_FOUND, INVALID, TOO_MUCH = ("404", "NOT_FOUND"), ("400", "INVALID_ARGUMENT"), ("413", "RESOURCE_EXHAUSTED")
FLOATS, ZEROS = np.array([1.5], np.float32), np.zeros(MOST + 1, np.int64)
REFUSED = {
    "a model": Refused(lambda wire: wire.lookup(arrays({"user": [1]}), PLAIN, "x"), hps.UnknownModelError, NOT_FOUND, "'x'"),
    "a table": Refused(lambda wire: wire.lookup(arrays({"x": [1]}), PLAIN), hps.UnknownTableError, NOT_FOUND, "'x'"),
    "a dtype": Refused(lambda wire: wire.lookup({"user": FLOATS}, PLAIN), hps.InvalidDtypeError, INVALID),
    "keys": Refused(lambda wire: wire.lookup({"user": ZEROS}, PLAIN), hps.TooManyKeysError, TOO_MUCH, str(MOST + 1)),
    "an input": Refused(
        lambda wire: wire.score({"itme": np.array([1]), "age": FLOATS}),
        hps.InvalidInputError,
        INVALID,
        "did you mean 'item'?",
        scores=True,
    ),
    "a table beside inputs": Refused(
        lambda wire: wire.score({"word": ZEROS[:1], "age": np.ones(1)}, "cut"), hps.InvalidInputError, INVALID, "'word'", True
    ),
    "bags": Refused(
        lambda wire: wire.pooled({"user": hps.Bags(ZEROS[:, None])}), hps.TooManyKeysError, TOO_MUCH, str(MOST + 1)
    ),
    "offsets": Refused(lambda wire: wire.pooled({"user": hps.Bags([1, 2], [0, 3])}), hps.InvalidInputError, INVALID),
}


def refusal(ask: Callable[[], Any]) -> tuple[str, str]:
    """What a wire raises: the name of a class of this package, the status of HTTP, or the code of gRPC; and its message."""
    try:
        ask()
    except hps.HPSError as error:
        return type(error).__name__, str(error)
    except InferenceServerException as error:
        return error.status().removeprefix("StatusCode."), error.message()
    except wires.Refusal as error:
        return error.args[0].removeprefix("StatusCode."), error.args[1]
    raise AssertionError("it was answered")


def test_wrong_requests_end_in_the_same_error_and_the_next_one_is_answered(wire: Any, reference: InProcess) -> None:
    good = arrays({"user": [1, 10**12]})
    for what, wrong in REFUSED.items():
        if (what.startswith("offsets") and not wire.ragged) or (wrong.scores and not wire.scores):
            continue
        assert refusal(lambda wrong=wrong: wrong.ask(reference))[0] == wrong.error.__name__, what
        for _ in range(2):
            error, message = refusal(lambda wrong=wrong: wrong.ask(wire))
            assert error in (wrong.error.__name__, *wrong.codes), (what, error, message)
            assert wrong.says in message, (what, message)
            check(wire.lookup(good, PLAIN), reference.lookup(good, PLAIN), f"after {what}")


def test_a_request_has_at_most_so_many_keys_in_all_its_tables(wire: Any, reference: InProcess) -> None:
    if isinstance(wire, wires.TorchLayers):
        pytest.skip("a layer asks for one table")
    half = MOST_OF_REQUEST // 2
    for keys in (half, half + 1, half):  # as many as may be, and one more
        tables = {"user": np.zeros(half, np.int64), "word": np.zeros(keys, np.int64)}
        if keys == half:
            check(wire.lookup(tables, PLAIN), reference.lookup(tables, PLAIN), "as many as may be")
        else:
            error, message = refusal(lambda tables=tables: wire.lookup(tables, PLAIN))
            assert error in ("TooManyKeysError", "413", "RESOURCE_EXHAUSTED")
            assert "max_keys_per_request" in message


def test_datatypes_that_a_wire_does_not_have_are_refused(wire: Any, reference: InProcess) -> None:
    if not isinstance(wire, wires.RawHTTP | wires.Stubs | wires.TritonHTTP):
        pytest.skip("its outputs have no names of datatypes")
    tables = arrays({"user": [1, 2]})
    for datatype in ("FP64", *(("BF16",) if isinstance(wire, wires.TritonJSON) else ())):
        for _ in range(2):
            error, message = refusal(lambda datatype=datatype: wire.lookup(tables, dict.fromkeys(DIMS, datatype)))
            assert error in ("400", "INVALID_ARGUMENT")
            assert f"'{datatype}'" in message
            check(wire.lookup(tables, PLAIN), reference.lookup(tables, PLAIN), "afterwards")


# -- answers in 16 bits, which are rounded into memory of their own ---------------------------------------------------


def test_answers_in_16_bits_side_by_side_have_their_own_memory(served: ServedProcess) -> None:
    clients = [wires.RawHTTP(served) for _ in range(16)]
    for turn in range(3):
        datatype, kind = ("FP32", np.float32) if turn == 1 else ("FP16", np.float16)
        asked = [(np.arange(2000) * 7 + nth + turn) % ROWS for nth in range(len(clients))]
        outputs = [{"name": "user", "parameters": {"binary_data": True, "datatype": datatype}}]
        for wire, keys in zip(clients, asked, strict=True):
            wire.send({"user": keys}, outputs)
        for wire, keys in zip(clients, asked, strict=True):
            np.testing.assert_array_equal(wire.take()["user"].view(kind), rows_of("user")[keys].astype(kind))
    for wire in clients:
        wire.close()


@pytest.mark.parametrize("library", [triton_http, triton_grpc])
def test_columns_of_one_output_are_rounded_once_too(served: ServedProcess, library: Any) -> None:
    arrays = {"KEYS": np.array([1, 2, 3] * 3), "OFFSETS": np.array([[0, 2, 3]] * 3)}
    tensors = [library.InferInput(name, list(array.shape), "INT64") for name, array in arrays.items()]
    for tensor, array in zip(tensors, arrays.values(), strict=True):
        tensor.set_data_from_numpy(array)
    address = served.grpc if library is triton_grpc else served.url.removeprefix("http://")
    with library.InferenceServerClient(address) as client:
        for datatype in ("FP16", "FP32", "BF16", "FP16"):
            sums = client.infer("m", tensors).as_numpy("OUTPUT0")
            found = client.infer("m", tensors, parameters={"datatype": datatype}).as_numpy("OUTPUT0")
            assert sums.shape == (2, sum(DIMS.values()))
            np.testing.assert_array_equal(bits_of(found, datatype), narrowed(sums, datatype))
