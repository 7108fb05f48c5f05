"""A start that compiles: the service says how far it is, and once it is ready no request waits for a compiler."""

import json
import re
import shutil
import subprocess
import sys

import httpx
import numpy as np
import pytest

import hps
from hps.ground.kernels import machine_code
from hps.ground.kernels.numba_kernels import compile_kernels
from hps.ground.registry import implementation
from hps.testing.waiting import wait_until
from hps.versions.tiers import served_kernels
from tests.fakes.installation import Installation
from tests.servers.running_service import document_of, model_of

COMPILED = re.compile(r"^hps_compiled_kernels_total.* (\S+)$", re.MULTILINE)
LOOKUP, ROWS = "/v1/models/m/lookup", "/v1/models/m/tables/item/rows"
BAGS = {"bags": {"item": [[1, 2], [], [3, 3, 90]]}, "max_norm": 1.0, "padding_key": 3}
REQUESTS = [
    ("POST", LOOKUP, {"tables": {"item": [1, 2, 99, 1000]}}),
    *(("POST", LOOKUP, {**BAGS, "combiner": combiner}) for combiner in ("sum", "mean", "sqrtn", "max")),
    ("POST", LOOKUP, {"bags": {"item": [[1, 2], [3, 4]]}, "combiner": "mean"}),
    ("POST", ROWS, {"keys": [7, 2000], "vectors": [[1.0, 2.0], [3.0, 4.0]]}),
    ("POST", LOOKUP, {"tables": {"item": [7, 2000]}}),
    ("DELETE", f"{ROWS}/2000", None),
    *(
        (
            "POST",
            "/v2/models/m/infer",
            {
                "inputs": [
                    {"name": "KEYS", "datatype": "INT64", "shape": [1, 2], "data": [1, 2]},
                    {"name": "NUMKEYS", "datatype": "INT32", "shape": [1, 1], "data": [2]},
                ],
                "parameters": {"datatype": kind},
            },
        )
        for kind in ("FP32", "FP16")
    ),
]


MISSING = "cache.cpu.pooling.pool-", "tensors.pooling.pool_rows-", "cache.cpu.batches.run-"
"""Files of machine code of the kernels that the service compiles. All would take minutes on a busy machine."""


@pytest.fixture
def cold(tmp_path):
    """A service in processes of its own, of a package without some of its compiled kernels."""
    keys = np.arange(100)
    hps.write_sparse_model(tmp_path / "t", (keys, np.repeat(keys[:, None].astype(np.float32), 2, axis=1)))
    model = model_of("m", [tmp_path / "t"], {"item": 2}, gpucacheper=0.5, row_dtype="int8", hit_rate_threshold=1.1)
    model["maxnum_catfeature_query_per_table_per_sample"] = [100]
    document = document_of(model, service={"drain_s": 0, "access_log_per_s": 100})
    compile_kernels(*served_kernels(hps.load_configuration(document), implementation("cache", "cpu")))
    installation = Installation(tmp_path)
    there = machine_code.directory()
    assert there is not None
    copied = installation.package / "__pycache__" / there.name
    shutil.copytree(there, copied, ignore=lambda _, names: [name for name in names if name.startswith(MISSING)])
    (tmp_path / "ps.json").write_text(json.dumps(document))
    command = [sys.executable, "-m", "hps", "serve", "ps.json", "--port", "0", "--fronts", "1"]
    log = tmp_path / "log"
    with log.open("w") as output:
        process = subprocess.Popen(command, env=installation.environment, cwd=tmp_path, stdout=output, stderr=output)
    try:
        yield log
    finally:
        process.terminate()
        assert process.wait(60) == 0, log.read_text()


def test_a_cold_start_says_how_far_it_is_and_then_no_request_waits_for_a_compiler(cold):
    url = wait_until(lambda: re.search(r"listening on (http\S+);", cold.read_text()), "it listens")[1]
    said, shares = set(), ([], [])
    with httpx.Client(base_url=url, timeout=30) as client:

        def is_ready():
            try:
                answers = client.get("/v2/health/ready"), client.post(LOOKUP, json={"tables": {"item": [1]}})
            except httpx.ConnectError:
                return False
            for nth, answer in enumerate(answers):
                text = answer.json().get("reason") or answer.json().get("error", "")
                said.add(re.sub(r"\d+", "N", text.removeprefix("the parameter server is not ready: ")))
                shares[nth].extend(map(int, re.findall(r"compiling kernels, (\d+) %", text)))
            return [answer.status_code for answer in answers] == [200, 200]

        wait_until(is_ready, "it is ready")
        assert "compiling kernels, N %" in said, said
        assert not [text for text in said if "started again" in text]
        for one in shares:
            assert one == sorted(one)
            assert max(one) > min(one)
        refused = cold.read_text().count("status=503")
        assert 0 < refused < len(shares[1]) / 2, "one access line a second"
        compiled = COMPILED.findall(client.get("/metrics").text)
        for method, path, body in REQUESTS:
            answer = client.request(method, path, json=body)
            assert answer.status_code == 200, (path, body, answer.text)
        assert COMPILED.findall(client.get("/metrics").text) == compiled
