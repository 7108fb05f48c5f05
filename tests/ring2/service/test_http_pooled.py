"""Bags of keys over HTTP: forms of requests that only Triton's client has, limits and memory. Answers: test_wires.py."""

from functools import partial

import numpy as np
import pytest
import tritonclient.http as triton
from tritonclient.utils import InferenceServerException

import hps
from hps.testing.waiting import wait_until
from tests.servers.running_service import document_of, model_of, running_service

ROWS, MOST = 400, 1000
DIMS = {"user": 4, "item": 7, "word": 128}
DEFAULTS = [0.5, -2.0, 0.0]
INFER = "/v2/models/ranker/infer"


def vectors_of(dim, version=1):
    return np.random.default_rng(dim + version).normal(size=(ROWS, dim)).astype(np.float32)


def document(directory, persistent):
    places = {str(version): [str(directory / str(version) / table) for table in DIMS] for version in (1, 2)}
    model = model_of(
        "ranker",
        places["1"],
        DIMS,
        default_value_for_each_table=DEFAULTS,
        maxnum_catfeature_query_per_table_per_sample=[5] * len(DIMS),
        gpucacheper=0.3,
        hit_rate_threshold=1.1,
        versions=[{"version": "2", "sparse_files": places["2"]}],
        version_policy={"specific": {"versions": [1]}},
    )
    return document_of(model, persistent=persistent, service={"max_keys_per_request": 3 * 5 * MOST, "max_held_bytes": 1 << 27})


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def configured(request, tmp_path_factory):
    directory = tmp_path_factory.mktemp("models")
    for version in (1, 2):
        for table, dim in DIMS.items():
            hps.write_sparse_model(directory / str(version) / table, (np.arange(ROWS), vectors_of(dim, version)))
    return document(directory, directory / "rocksdb") | {"device": request.param}


@pytest.fixture(scope="module")
def server(configured):
    with hps.HPS(configured) as server:
        yield server


@pytest.fixture(scope="module")
def service(configured, server):
    with running_service(configured, server) as service:
        yield service


@pytest.fixture
def client(service):
    with triton.InferenceServerClient(service.url.removeprefix("http://")) as client:
        yield client


def tensor(name, array, binary=True):
    datatype = {"i8": "INT64", "i4": "INT32", "f4": "FP32"}[array.dtype.str[1:]]
    infer_input = triton.InferInput(name, array.shape, datatype)
    infer_input.set_data_from_numpy(array, binary_data=binary)
    return infer_input


def random_bags(seed, weighted, count):
    """By table: keys, offsets and weights of bags, some of which are empty."""
    rng = np.random.default_rng(seed)
    bags = {}
    for table in DIMS:
        sizes = rng.integers(0, 6, count)
        keys = rng.integers(0, ROWS + 20, sizes.sum())
        weights = rng.normal(size=keys.size).astype(np.float32) if weighted else None
        bags[table] = (keys, np.concatenate([[0], np.cumsum(sizes)]), weights)
    return bags


def expected_of(server, bags, **options):
    tables = {table: hps.Bags(*given, **options) for table, given in bags.items()}
    return server.lookup_pooled(tables, "ranker")


close = partial(np.testing.assert_allclose, rtol=2e-6, atol=2e-6)  # the order of terms is unspecified


@pytest.mark.parametrize(("numkeys", "weighted", "binary"), [(True, False, True), (False, True, False), (True, True, True)])
def test_concatenated_bags_are_the_columns_of_one_output(server, client, numkeys, weighted, binary):
    bags = random_bags(2, weighted, 30)
    keys, offsets, weights = ([given[place] for given in bags.values()] for place in range(3))
    inputs = [tensor("KEYS", np.concatenate(keys), binary), tensor("OFFSETS", np.array(offsets), binary)]
    inputs += [tensor("WEIGHTS", np.concatenate(weights), binary)] if weighted else []
    inputs += [tensor("NUMKEYS", np.array([[part.size for part in keys]], np.int32), binary)] if numkeys else []
    outputs = [triton.InferRequestedOutput("OUTPUT0", binary_data=binary)]
    answer = client.infer("ranker", inputs, outputs=outputs, parameters={"combiner": "mean", "word.combiner": "sqrtn"})
    columns = expected_of(server, bags, combiner="mean") | {"word": expected_of(server, bags, combiner="sqrtn")["word"]}
    close(answer.as_numpy("OUTPUT0"), np.hstack([columns[table] for table in DIMS]))
    assert answer.get_response()["parameters"] == {"NumSample": 30, "DeviceID": 0}


def test_a_combiner_makes_bags_of_rows_of_keys(server, client):
    keys = np.random.default_rng(4).integers(0, ROWS, (50, 20))
    rows = client.infer("ranker", [tensor("item", keys)])
    assert rows.as_numpy("item").shape == (50, 20, 7)
    bags = client.infer("ranker", [tensor("item", keys)], parameters={"combiner": "sum"})
    close(bags.as_numpy("item"), server.lookup_pooled({"item": hps.Bags(keys)}, "ranker")["item"])


@pytest.mark.parametrize("binary", [True, False])
def test_no_bags_and_empty_bags_are_answered(client, binary):
    none = np.empty(0, np.int64)
    for count in (0, 3):
        inputs = [tensor("KEYS", none, binary), tensor("OFFSETS", np.zeros((3, count + 1), np.int64), binary)]
        outputs = [triton.InferRequestedOutput("OUTPUT0", binary_data=binary)]
        answer = client.infer("ranker", inputs, outputs=outputs).get_output("OUTPUT0")
        assert answer["shape"] == [count, sum(DIMS.values())]
        assert binary or answer["data"] == [0.0] * count * sum(DIMS.values())


def test_answers_are_those_of_the_version_that_serves(server, client):
    """The layout of an answer is kept from one request to the next; its vectors must not be."""
    inputs = [tensor("item", np.array([1, 2, 3])), tensor("item.offsets", np.array([0, 2, 3]))]
    for version in (1, 2, 1):
        server.deploy("ranker", str(version))
        rows = vectors_of(7, version)
        answer = client.infer("ranker", inputs, parameters={"combiner": "sum"})
        close(answer.as_numpy("item"), [rows[1] + rows[2], rows[3]])
        assert answer.get_response()["model_version"] == str(version)


@pytest.mark.parametrize(
    ("inputs", "parameters", "status", "says"),
    [
        ({"item": np.arange(3), "item.offsets": np.array([0, 2, 1, 3])}, {}, "400", "never to fall"),
        ({"item": np.arange(3), "item.offsets": np.array([0, 3])}, {"combiner": "max"}, "400", "got combiner 'max'"),
        ({"item": np.arange(3), "item.offsets": np.array([0, 3], np.float32)}, {}, "400", "got datatype 'FP32'"),
        ({"nope": np.arange(3), "nope.offsets": np.array([0, 3])}, {}, "404", "'nope'"),
        ({"item": np.arange(3), "item.offsets": np.array([0, 3])}, {"nope.combiner": "sum"}, "404", "'nope'"),
        ({"item": np.arange(1), "item.offsets": np.r_[np.zeros(5 * MOST + 1, int), 1]}, {}, "413", "got 5001 bags"),
        ({"item": np.zeros((1, 5 * MOST + 1), int)}, {"combiner": "sum"}, "413", "got 5001 keys"),
        ({"item": np.arange(0), "item.offsets": np.zeros(2_000_000, np.int32)}, {}, "413", "got 1999999 bags"),
        ({"item": np.arange(0), "item.offsets": np.zeros(10_000_000, np.int64)}, {}, "413", "service.max_body_bytes"),
    ],
)
def test_wrong_bags_are_refused_and_the_service_goes_on(service, client, inputs, parameters, status, says):
    with pytest.raises(InferenceServerException, match=says) as caught:
        client.infer("ranker", [tensor(name, array) for name, array in inputs.items()], parameters=parameters)
    assert caught.value.status() == status
    assert client.infer("ranker", [tensor("item", np.array([[1]]))], parameters={"combiner": "sum"}).as_numpy("item").shape == (
        1,
        7,
    )
    # The rest of a body that is too large may still arrive, and is thrown away.
    wait_until(lambda: service.held == 0, "nothing is held any more")


@pytest.mark.parametrize("empty", [{"shape": [10**15, 0], "data": []}, {"shape": [1, 10**15], "data": [1]}])
def test_numbers_in_a_shape_reserve_no_memory(service, empty):
    inputs = [{"name": "item", "datatype": "INT64", **empty}]
    response = service.client.post(INFER, json={"inputs": inputs, "parameters": {"combiner": "sum"}})
    assert response.status_code in (400, 413)
    assert service.held == 0


def test_the_vectors_of_all_keys_are_held_while_bags_are_looked_up(service, client, monkeypatch):
    """A fourth of the limit is for small requests; keys whose rows do not fit are refused before they are looked up."""
    keys = np.zeros((1, 5 * MOST), np.int64)
    assert client.infer("ranker", [tensor("word", keys)], parameters={"combiner": "sum"}).as_numpy("word").shape == (1, 128)
    monkeypatch.setattr(service.front.memory, "large_limit", 4 * 128 * keys.size)
    with pytest.raises(InferenceServerException, match="answering the request: it takes up to") as caught:
        client.infer("ranker", [tensor("word", keys)], parameters={"combiner": "sum"})
    assert caught.value.status() == "413"
    assert service.held == 0
