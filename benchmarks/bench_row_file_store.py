"""A sealed version of 2 GB from object storage: nginx serves the objects by path, as S3 does, beside one that is in service.

Seconds from `deploy` to the first right answer of 100 keys, every later answer compared while the rest arrives; then the same
again, killed when 40 % are here, and gone on with by another process. `store_mb_per_s_a_connection` is what nginx gives one
connection. On a busy machine the seconds of processors say more.
"""

import json
import os
import select
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness import Report, require, scratch
from hps.stores.row_files.layout import RowFacts
from hps.stores.row_files.writer import sorted_run, write_row_file

DIM, RATE_MB = 128, 60
_LIMIT_S = 300.0
_NGINX = """
{user}daemon off; pid nginx.pid; error_log stderr crit; worker_processes 2; events {{ worker_connections 512; }}
http {{ access_log off; sendfile on; keepalive_requests 100000; server {{ listen 127.0.0.1:{port}; root objects;
  limit_rate {rate}m; error_page 404 = @absent;
  location @absent {{ return 404; }}
  location = /models {{ return 200 "<ListBucketResult><IsTruncated>false</IsTruncated></ListBucketResult>"; }}
}} }}
"""
_SERVER = """
import json, sys, time
import numpy as np
import hps
rows, document = int(sys.argv[1]), json.loads(sys.argv[2])
draw = np.random.default_rng(int(sys.argv[3]))
def ask(server, version):
    keys = draw.integers(0, 2 * rows if version == "2" else 2000, 100)
    got = server.lookup(keys, "m", "t")
    last = rows if version == "2" else 1000
    assert (got == np.where(keys < last, keys + int(version), 0).astype(np.float32)[:, None]).all(), "a wrong answer"
with hps.HPS(document) as server:
    ask(server, server.model("m").version)
    print("open", flush=True)
    sys.stdin.readline()
    began, used = time.monotonic(), time.process_time()
    server.deploy("m", "2")
    deployed = time.monotonic() - began
    ask(server, "2")
    print("first", time.monotonic() - began, deployed, time.process_time() - used, flush=True)
    answers = 0
    database = server._chain.databases[-1]
    while there := list(database.downloads().values()):
        ask(server, "2")
        answers += 1
        print("there", there[0][0] / there[0][1], flush=True)
    ask(server, "2")
    print("complete", time.monotonic() - began, answers, flush=True)
"""


def run(report: Report, quick: bool) -> None:
    """Measure deployments, and some that are killed."""
    rows = 100_000 if quick else 4_000_000
    report.about["load_average"] = os.getloadavg()[0]
    with scratch("row-file-store") as directory:
        for version, count in ("1", 1000), ("2", rows):
            _write(directory / "objects/models" / version / "rows", count, int(version))
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        user = "" if os.geteuid() else "user root; "
        (directory / "nginx.conf").write_text(_NGINX.format(port=port, rate=RATE_MB, user=user))
        nginx = subprocess.Popen(
            [shutil.which("nginx") or "/usr/sbin/nginx", "-p", directory, "-c", "nginx.conf", "-e", "stderr"]
        )
        try:
            axes = {"table_rows": rows, "dim": DIM, "file_bytes": (directory / "objects/models/2/rows").stat().st_size}
            for seed in range(1 if quick else 2):
                for killed in (False, True):
                    figures = _deployed(directory / f"{seed}-{killed}", rows, port, seed, killed=killed)
                    report.add({"what": "killed and resumed" if killed else "deployed", **axes}, figures)
        finally:
            nginx.terminate()
            nginx.wait(20)


def _write(path: Path, rows: int, version: int) -> None:
    path.parent.mkdir(parents=True)
    keys = np.random.default_rng(1).permutation(np.arange(rows, dtype=np.int64))
    vectors = np.broadcast_to((keys + version).astype(np.float32)[:, None], (rows, DIM))
    facts = RowFacts("float32", DIM, 0, 0, rows - 1)
    write_row_file(path, "", DIM, [sorted_run(keys, np.ascontiguousarray(vectors))], facts=facts)


def _deployed(directory: Path, rows: int, port: int, seed: int, *, killed: bool) -> dict[str, Any]:
    model = {
        "model": "m", "sparse_files": ["s3://models/1"], "embedding_table_names": ["t"], "embedding_vecsize_per_table": [DIM],
        "maxnum_catfeature_query_per_table_per_sample": [1], "max_batch_size": 1000, "default_value_for_each_table": [0.0],
        "deployed_device_list": [0], "gpucache": False, "version_policy": {"specific": {"versions": [1]}},
        "versions": [{"version": "2", "sparse_files": ["s3://models/2"]}],
    }  # fmt: skip
    document = {
        "supportlonglong": True, "device": "cpu", "models": [model], "volatile_db": {"type": "disabled"},
        "model_source": {"s3_endpoint_url": f"http://127.0.0.1:{port}"},
        "persistent_db": {"type": "row_files", "path": str(directory)},
    }  # fmt: skip
    environment = os.environ | {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b"}
    figures: dict[str, Any] = {"store_mb_per_s_a_connection": RATE_MB}
    for last in (False, True) if killed else (True,):
        process = subprocess.Popen(
            [sys.executable, "-c", _SERVER, str(rows), json.dumps(document), str(seed)], text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment,
        )  # fmt: skip
        prefix = "resumed_" if killed and last else ""
        for word, *numbers in map(str.split, _lines(process)):
            if word == "open":
                process.stdin.write("deploy\n")  # type: ignore[union-attr]
                process.stdin.flush()  # type: ignore[union-attr]
            elif word == "first":
                names = "first_answer_s", "deployed_s", "first_answer_processor_s"
                figures |= {prefix + name: float(number) for name, number in zip(names, numbers, strict=True)}
            elif word == "there" and not last and float(numbers[0]) > 0.4:
                process.kill()
                break
            elif word == "complete":
                figures |= {f"{prefix}complete_s": float(numbers[0]), f"{prefix}answers_meanwhile": int(numbers[1])}
        require(process.wait(60) == (0 if last else -9), "the server's end")
    [local] = directory.glob("tables/*2*.rows")
    require(subprocess.run(["cmp", local, directory.parent / "objects/models/2/rows"]).returncode == 0, "the same bytes")
    shutil.rmtree(directory)
    return figures


def _lines(process: "subprocess.Popen[str]") -> Any:
    deadline = time.monotonic() + _LIMIT_S
    while select.select([process.stdout], [], [], max(0.0, deadline - time.monotonic()))[0]:
        if not (line := process.stdout.readline()):  # type: ignore[union-attr]
            return
        yield line
    process.kill()
