"""Reading a model from each source, as a load reads it, beside the source's own client.

Ours is `read_ahead` over the whole model with nothing behind it: status, parts side by side, versions checked, retries in
place. Theirs is the client alone, in the ways that its documentation gives for large files: each of them is measured, and the
fastest is what we are compared with. Both sides read both files into memory, turn and turn about, with as many parts at a time;
the ratio is of the medians. Every byte of both sides is checked in the first round.

The servers are real and on this machine (HDFS: NameNode and DataNode; S3: moto, and nginx where it is installed; GCS:
fake-gcs-server) and share its cores with the clients: what is compared is what one client costs beside another, not a network.
moto copies the whole object for every range, so that no client's parts are as fast there as one stream; nginx has no such cost.
"""

import io
import os
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.harness import Report
from hps.configuration.tiers import ModelSourceConfig
from hps.filesystems.base import FileSystem
from hps.models.files import CHUNK_BYTES, open_sparse_model
from hps.models.loading.read_ahead import read_ahead
from hps.models.sources import ModelSources
from hps.models.writer import write_sparse_model
from hps.tools.cli.tables.sample import sample_chunks, sample_vectors

_DIM, _SEED, _THREADS = 32, 1, 8
_PART = FileSystem.part_bytes  # of the peers that read parts, too
_FILES = ("emb_vector", "key")


@dataclass(frozen=True)
class Source:
    """A place for a model, and its own client's ways of bringing one of its files into memory."""

    root: str
    settings: ModelSourceConfig
    theirs: dict[str, Callable[[str], bytes | memoryview]]  # by name; each takes the file's path or URI
    written_at: str = ""  # where its model is written, if not at the root


def run(report: Report, quick: bool) -> None:
    rows = 50_000 if quick else 1_000_000
    rounds = 2 if quick else 5
    sources = [("local", local), ("hdfs", hdfs), ("s3 (moto)", s3), ("gcs", gcs)]
    if shutil.which("nginx"):
        sources.insert(3, ("s3 (nginx)", s3_of_nginx))
    for name, start in sources:
        with tempfile.TemporaryDirectory(prefix="hps-sources-") as place, start(Path(place)) as source:
            _measure(report, name, source, rows, rounds)


def _measure(report: Report, name: str, source: Source, rows: int, rounds: int) -> None:
    sources = ModelSources(source.settings)
    uri = f"{source.root}/item"
    write_sparse_model(f"{source.written_at or source.root}/item", sample_chunks(rows, _DIM, _SEED), sources=sources)
    size = rows * (8 + 4 * _DIM)
    _check_ours(uri, sources, rows)
    for way, fetch in source.theirs.items():
        _check_theirs(name, way, fetch, uri, rows)

    def ours() -> None:
        model = open_sparse_model(uri, _DIM, sources=sources)
        for _ in read_ahead(model, _ranges(model.rows, model.chunk_rows)):
            pass

    def theirs(fetch: Callable[[str], bytes | memoryview]) -> None:
        with ThreadPoolExecutor(len(_FILES)) as pool:
            for content in pool.map(fetch, [f"{uri}/{file}" for file in _FILES]):
                del content

    seconds: dict[str, list[float]] = {"": [], **{way: [] for way in source.theirs}}
    for _ in range(rounds):
        for way in seconds:
            started = time.perf_counter()
            theirs(source.theirs[way]) if way else ours()
            seconds[way].append(time.perf_counter() - started)
    rates = {way: size / statistics.median(times) / 1e6 for way, times in seconds.items()}
    best = max(source.theirs, key=lambda way: rates[way])
    for way in source.theirs:
        figures = {"mb_per_s": rates[""], "peer_mb_per_s": rates[way], "of_peer": rates[""] / rates[way]}
        figures |= {"fastest_peer": way == best, "target_of_fastest": 0.8}
        report.add({"source": name, "rows": rows, "dim": _DIM, "megabytes": round(size / 1e6), "peer": way}, figures)


def _ranges(rows: int, step: int) -> Iterator[tuple[int, int]]:
    return ((start, min(start + step, rows)) for start in range(0, rows, step))


def _check_ours(uri: str, sources: ModelSources, rows: int) -> None:
    model = open_sparse_model(uri, _DIM, sources=sources)
    seen = 0
    for start, keys, vectors in read_ahead(model, _ranges(rows, model.chunk_rows)):
        seen += keys.size
        right = np.array_equal(keys, np.arange(start, start + keys.size))
        if not right or not np.array_equal(vectors, sample_vectors(keys, _DIM, _SEED)):
            raise SystemExit(f"{uri}: wrong rows; nothing is measured")
    if seen != rows:
        raise SystemExit(f"{uri}: {seen} rows, wanted {rows}; nothing is measured")


def _check_theirs(name: str, way: str, fetch: Callable[[str], bytes | memoryview], uri: str, rows: int) -> None:
    keys = np.frombuffer(fetch(f"{uri}/key"), np.int64)
    vectors = np.frombuffer(fetch(f"{uri}/emb_vector"), np.float32).reshape(-1, _DIM)
    if not np.array_equal(keys, np.arange(rows)) or not np.array_equal(vectors, sample_vectors(keys, _DIM, _SEED)):
        raise SystemExit(f"{name}: {way} gave wrong bytes; nothing is measured")


# -- the sources ------------------------------------------------------------------------------------------------------


@contextmanager
def local(place: Path) -> Iterator[Source]:
    def plain(path: str) -> memoryview:
        content = np.empty(os.path.getsize(path), np.uint8)
        with open(path, "rb", buffering=0) as file:
            view, done = content.data, 0
            while count := file.readinto(view[done : done + CHUNK_BYTES]):
                done += count
        return content.data

    yield Source(str(place), ModelSourceConfig(), {"readinto": plain})


@contextmanager
def hdfs(place: Path) -> Iterator[Source]:
    import hdfs_native

    from tests.servers.hdfs_cluster import HdfsCluster

    with HdfsCluster(place / "hdfs", block_bytes=128 << 20) as cluster:
        client = hdfs_native.Client(cluster.uri)

        def whole(uri: str) -> bytes:
            with client.read(uri.removeprefix(cluster.uri)) as file:
                content: bytes = file.read()
            return content

        def ranges(uri: str) -> memoryview:
            path = uri.removeprefix(cluster.uri)
            content = np.empty(client.get_file_info(path).length, np.uint8)

            def part(start: int) -> None:
                with client.read(path) as file:
                    piece = file.read_range(start, min(_PART, content.size - start))
                content[start : start + len(piece)] = np.frombuffer(piece, np.uint8)

            with ThreadPoolExecutor(_THREADS) as pool:
                list(pool.map(part, range(0, content.size, _PART)))
            return content.data

        yield Source(f"{cluster.uri}/bench", ModelSourceConfig(), {"read": whole, "read_range, 8 threads": ranges})


@contextmanager
def s3(place: Path) -> Iterator[Source]:
    from tests.servers.s3_server import know_only_moto, s3_server

    with pytest.MonkeyPatch.context() as environment:
        know_only_moto(environment)
        server = s3_server()
        bucket = server.new_bucket()

        try:
            settings = ModelSourceConfig(s3_endpoint_url=server.url)
            yield Source(f"s3://{bucket}", settings, _boto3_alone(server.client, bucket))
        finally:
            server.kill()
            s3_server.cache_clear()


@contextmanager
def s3_of_nginx(place: Path) -> Iterator[Source]:
    """Objects as nginx's static files: it answers HEAD, ranges and If-Match as S3 does, and costs next to nothing."""
    import boto3.session

    from tests.servers.redis_server import free_ports
    from tests.servers.s3_server import know_only_moto

    (port,) = free_ports(1)
    (place / "www" / "bench").mkdir(parents=True)
    paths = "".join(f"{name}_temp_path {place}; " for name in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi"))
    server = f"server {{ listen 127.0.0.1:{port}; root {place}/www; }}"
    (place / "nginx.conf").write_text(
        f"daemon off; user root; worker_processes 1; pid {place}/pid; error_log {place}/log; events {{}}\n"
        f"http {{ access_log off; sendfile on; {paths} {server} }}\n"
    )
    process = subprocess.Popen(["nginx", "-e", f"{place}/log", "-c", f"{place}/nginx.conf"])
    url = f"http://127.0.0.1:{port}"
    try:
        with pytest.MonkeyPatch.context() as environment:
            know_only_moto(environment)
            client = boto3.session.Session("testing", "testing", region_name="us-east-1").client("s3", endpoint_url=url)
            yield Source(
                "s3://bench", ModelSourceConfig(s3_endpoint_url=url), _boto3_alone(client, "bench"), f"{place}/www/bench"
            )
    finally:
        process.terminate()
        process.wait(20)


def _boto3_alone(client: Any, bucket: str) -> dict[str, Callable[[str], bytes | memoryview]]:
    from boto3.s3.transfer import TransferConfig

    def one_stream(uri: str) -> bytes:
        content: bytes = client.get_object(Bucket=bucket, Key=_name(uri))["Body"].read()
        return content

    def transfer(uri: str) -> memoryview:
        content = io.BytesIO()
        config = TransferConfig(multipart_chunksize=_PART, max_concurrency=_THREADS)
        client.download_fileobj(bucket, _name(uri), content, Config=config)
        return content.getbuffer()

    return {"get_object().read()": one_stream, "download_fileobj, 8 threads": transfer}


@contextmanager
def gcs(place: Path) -> Iterator[Source]:
    from google.auth.credentials import AnonymousCredentials
    from google.cloud import storage

    from tests.servers.gcs_server import GcsServer

    with ExitStack() as stack:
        server = stack.enter_context(GcsServer())
        bucket = server.new_bucket()
        client = storage.Client("test", AnonymousCredentials(), client_options={"api_endpoint": server.url})
        stack.callback(client.close)

        def one_stream(uri: str) -> bytes:
            content: bytes = client.bucket(bucket).blob(_name(uri)).download_as_bytes(checksum=None)
            return content

        def ranges(uri: str) -> memoryview:
            blob = client.bucket(bucket).get_blob(_name(uri))
            content = np.empty(blob.size, np.uint8)

            def part(start: int) -> None:
                end = min(start + _PART, content.size)
                piece = blob.download_as_bytes(start=start, end=end - 1, checksum=None, single_shot_download=True)
                content[start:end] = np.frombuffer(piece, np.uint8)

            with ThreadPoolExecutor(_THREADS) as pool:
                list(pool.map(part, range(0, content.size, _PART)))
            return content.data

        peers = {"download_as_bytes": one_stream, "download_as_bytes of ranges, 8 threads": ranges}
        yield Source(f"gs://{bucket}", ModelSourceConfig(gcs_endpoint_url=server.url), peers)


def _name(uri: str) -> str:
    return uri.split("/", 3)[3]
