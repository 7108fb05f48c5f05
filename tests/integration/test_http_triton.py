"""NVIDIA's Triton client, unchanged, against the service."""

import numpy as np
import pytest
import tritonclient.http as triton
from tritonclient.utils import InferenceServerException

from tests.integration.test_http_lookups import configuration, vectors_of, write_tables
from tests.servers.running_service import running_service


@pytest.fixture(scope="module")
def service(tmp_path_factory):
    directory = tmp_path_factory.mktemp("models")
    write_tables(directory)
    with running_service(configuration(directory)) as service:
        yield service


@pytest.fixture
def client(service):
    with triton.InferenceServerClient(service.url.removeprefix("http://")) as client:
        yield client


def tensor(name, array, datatype, binary):
    infer_input = triton.InferInput(name, array.shape, datatype)
    infer_input.set_data_from_numpy(array, binary_data=binary)
    return infer_input


def test_health_and_metadata(client):
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.is_model_ready("ranker")
    assert client.is_model_ready("ranker", "1")
    assert not client.is_model_ready("nope")
    assert client.get_server_metadata()["extensions"] == ["binary_tensor_data"]
    metadata = client.get_model_metadata("ranker")
    assert [tensor["name"] for tensor in metadata["inputs"]] == ["KEYS", "NUMKEYS"]
    assert [tensor["name"] for tensor in metadata["outputs"]] == ["OUTPUT0"]


@pytest.mark.parametrize("binary_in", [True, False])
@pytest.mark.parametrize("binary_out", [True, False, None])
@pytest.mark.parametrize("compression", [None, "gzip", "deflate"])
def test_the_shape_of_tritons_hps_backend(client, binary_in, binary_out, compression):
    users, items = np.array([3, 1, 4]), np.array([15, 92, 65, 9999])
    keys = np.concatenate([users, items]).reshape(1, -1)
    inputs = [
        tensor("KEYS", keys, "INT64", binary_in),
        tensor("NUMKEYS", np.array([[3, 4]], np.int32), "INT32", binary_in),
    ]
    outputs = None if binary_out is None else [triton.InferRequestedOutput("OUTPUT0", binary_data=binary_out)]
    answer = client.infer(
        "ranker",
        inputs,
        outputs=outputs,
        request_id="7",
        request_compression_algorithm=compression,
        response_compression_algorithm=compression,
    )
    expected = np.concatenate([vectors_of(users, 4).ravel(), vectors_of(items[:3], 7).ravel(), np.full(7, -2, np.float32)])
    np.testing.assert_array_equal(answer.as_numpy("OUTPUT0"), expected)
    assert answer.get_response()["id"] == "7"
    assert answer.get_response()["model_name"] == "ranker"


@pytest.mark.parametrize("binary_in", [True, False])
@pytest.mark.parametrize("binary_out", [True, False])
def test_one_input_a_table_and_the_found_mask(client, binary_in, binary_out):
    users, items = np.array([3, 1, 4]), np.array([[15, 9999], [65, 35]])
    inputs = [tensor("user", users, "INT64", binary_in), tensor("item", items, "INT64", binary_in)]
    outputs = [triton.InferRequestedOutput(name, binary_data=binary_out) for name in ("item", "item.found", "user")]
    answer = client.infer("ranker", inputs, model_version="1", outputs=outputs)
    np.testing.assert_array_equal(answer.as_numpy("user"), vectors_of(users, 4))
    expected = vectors_of(items.ravel(), 7).reshape(2, 2, 7)
    expected[0, 1] = -2
    np.testing.assert_array_equal(answer.as_numpy("item"), expected)
    np.testing.assert_array_equal(answer.as_numpy("item.found"), [[True, False], [True, True]])


def test_found_as_a_request_parameter(client):
    answer = client.infer("ranker", [tensor("user", np.array([3, 9999]), "INT64", True)], parameters={"found": True})
    assert answer.as_numpy("user.found").tolist() == [True, False]


def test_asynchronous_requests(client):
    requests = [client.async_infer("ranker", [tensor("user", np.array([key]), "INT64", True)]) for key in range(20)]
    for key, request in enumerate(requests):
        np.testing.assert_array_equal(request.get_result().as_numpy("user"), vectors_of([key], 4))


def test_errors_arrive_as_the_client_expects_them(client):
    with pytest.raises(InferenceServerException, match="'nope'") as caught:
        client.infer("nope", [tensor("user", np.array([1]), "INT64", True)])
    assert caught.value.status() == "404"
    with pytest.raises(InferenceServerException, match="its sum is 5, expected 1, the number of KEYS") as caught:
        client.infer(
            "ranker",
            [tensor("KEYS", np.array([[1]]), "INT64", True), tensor("NUMKEYS", np.array([[2, 3]], np.int32), "INT32", True)],
        )
    assert caught.value.status() == "400"
