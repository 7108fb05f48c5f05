"""How many files a reader has to open to follow a lookup over HTTP whose keys all hit."""

import threading
from pathlib import Path

import numpy as np
import orjson
import pytest

import hps
from tests.servers.running_service import document_of, model_of, running_service

PACKAGE = Path(hps.__file__).parent
MOST_FILES, MOST_FILES_OF_THE_SERVICE = 16, 6


@pytest.fixture
def called():
    """Collects the files of `hps` that run code, on every thread that starts meanwhile, while `called.on` is set."""

    class Called(set[str]):
        on = False

    called = Called()

    def note(frame, event, argument):
        if called.on and event == "call" and (path := Path(frame.f_code.co_filename)).is_relative_to(PACKAGE):
            called.add(path.relative_to(PACKAGE).as_posix())

    threading.setprofile(note)
    try:
        yield called
    finally:
        threading.setprofile(None)


def test_a_lookup_over_http_whose_keys_all_hit_crosses_few_files(called, tmp_path):
    keys = np.arange(100, dtype=np.int64)
    vectors = np.repeat(keys.astype(np.float32)[:, None], 4, axis=1)
    hps.write_sparse_model(tmp_path / "item.model", (keys, vectors))
    document = document_of(model_of("m", [tmp_path / "item.model"], {"item": 4}, gpucacheper=1.0, hit_rate_threshold=1.1))
    tensor = {"name": "item", "datatype": "INT64", "shape": [10], "parameters": {"binary_data_size": 80}}
    text = orjson.dumps({"inputs": [tensor], "parameters": {"binary_data_output": True}})
    length = {"Inference-Header-Content-Length": str(len(text))}
    with running_service(document) as service:
        for called.on in (False, False, True):
            response = service.client.post("/v2/models/m/infer", content=text + keys[:10].tobytes(), headers=length)
        called.on = False
    assert response.content.endswith(vectors[:10].tobytes())
    assert "parameter_server.py" in called  # the profile reaches the threads
    service_files = {path for path in called if path.startswith("service/")}
    assert len(service_files) <= MOST_FILES_OF_THE_SERVICE, sorted(service_files)
    assert len(called) <= MOST_FILES, sorted(called)
