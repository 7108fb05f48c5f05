"""`hps profile`: its figures are those of the server that it measured, and every failure has its exit code."""

import json
import os
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from itertools import count

import numpy as np
import pytest

import hps
from hps.errors import DatabaseTimeoutError, HPSError
from hps.ground.registry import install_hint
from hps.models.writer import write_sparse_model
from hps.parameter_server import HPS
from hps.testing.waiting import wait_until
from hps.tools.cli.tables.sample import sample_vectors
from hps.tools.profiling import service as profiling
from tests.ring1.tools.cli.test_cli import run
from tests.servers.certificates import Authority
from tests.servers.running_service import document_of, model_of, running_service, samples
from tests.servers.served_process import ServedProcess
from tests.servers.timed_server import Answer, timed_server

ROWS = 2000
TABLES = {"user": 4, "item": 8}
QUICK = ("--seconds", "0.3", "--warmup", "0", "--batch", "50", "--concurrency", "2")
INFER = "/v2/models/{model}/infer"


@pytest.fixture(scope="module")
def document(tmp_path_factory):
    """A model of two tables whose keys are not 0 to n - 1, half of them in the cache."""
    directory = tmp_path_factory.mktemp("profile")
    keys = np.arange(ROWS, dtype=np.int64) * 3 - 7
    for table, dim in TABLES.items():
        write_sparse_model(directory / table, (keys, sample_vectors(keys, dim)))
    sources = [directory / table for table in TABLES]
    return document_of(model_of("m", sources, TABLES, gpucacheper=0.5, hit_rate_threshold=1.1))


@pytest.fixture
def config(document, tmp_path):
    (tmp_path / "ps.json").write_text(json.dumps(document))
    return tmp_path / "ps.json"


@pytest.fixture(scope="module")
def service(document):
    with running_service({**document, "service": {"bearer_token": "secret"}}) as service:
        service.client.headers["Authorization"] = "Bearer secret"
        yield service


def profiled(tmp_path, *arguments, code=0):
    """Run it; returns what it wrote."""
    result = run("profile", *arguments, "--json", tmp_path / "out.json")
    assert result.exit_code == code, result.output
    return json.loads((tmp_path / "out.json").read_text())


def test_in_process_asks_the_keys_of_the_model_and_says_where_the_time_goes(config, tmp_path):
    found = profiled(tmp_path, config, *QUICK, "--batch", "20", "--check", "--picture", tmp_path / "a.svg")
    assert (found["about"]["model"], found["about"]["tables"]) == ("m", list(TABLES))
    assert [(row["batch"], row["tables"]) for row in found["rows"]] == [(50, 2), (20, 2)]
    for row in found["rows"]:
        assert row["lookups"] > 0
        assert (row["failures"], row["default_keys"]) == ({}, 0)  # ids that the model has
        cache, stages = row["tiers"]["embedding_cache"], row["stages"]
        assert cache["asked"] == row["lookups"] * row["batch"] * len(TABLES)
        assert 0.5 < cache["hit_rate"] < 1
        assert {"lookup", "adopt", "query", "unique", "volatile_db", "scatter", "outside"} <= set(stages)
        assert 0 < stages["lookup"]["count"] <= row["lookups"] / 8 + 1
        assert stages["lookup"]["share"] == 1.0
    assert (tmp_path / "a.svg").stat().st_size > 1000


def test_over_http_it_counts_what_the_server_counts(service, tmp_path):
    before = samples(service)
    found = profiled(tmp_path, service.url, "--token", "secret", *QUICK, "--rows", "100", "--table", "item", "--seed", "3")
    after = samples(service)
    (row,) = found["rows"]
    requests = after["hps_http_requests_total", INFER, "200"] - before.get(("hps_http_requests_total", INFER, "200"), 0)
    assert requests == row["lookups"] + 1  # and one before, which tells what is wrong with all of them
    assert row["stages"]["http"]["count"] == row["stages"]["lookup"]["count"] == row["lookups"]
    assert row["tiers"]["embedding_cache"]["asked"] == row["lookups"] * 50
    assert row["default_keys"] > 0  # 0 to 99 are not the ids of this model


@pytest.mark.parametrize("options", ["--bags 10", "--keys keys.npy", "--rate 100", "--distribution hot-keys --rows 50"])
@pytest.mark.parametrize("over_http", [True, False])
def test_ways_of_asking(service, config, tmp_path, monkeypatch, options, over_http):
    monkeypatch.chdir(tmp_path)
    np.save("keys.npy", np.arange(60) * 3 - 7)
    target = (service.url, "--token", "secret", "--check") if over_http else (config,)
    (row,) = profiled(tmp_path, *target, *QUICK, *options.split())["rows"]
    assert row["failures"] == {}
    assert row["lookups"] == 30 or "--rate" not in options
    assert row["default_keys"] == 0 or "--keys" not in options


def test_failed_lookups_in_process_are_counted_apart(config, tmp_path, monkeypatch):
    answer, numbers = HPS.lookup_tables, count()

    def sometimes(self, *arguments, **options):
        if next(numbers) % 4 == 3:
            raise DatabaseTimeoutError("fetching: the database did not answer in time")
        return answer(self, *arguments, **options)

    monkeypatch.setattr(HPS, "lookup_tables", sometimes)
    (row,) = profiled(tmp_path, config, *QUICK, "--max-failures", "0.5")["rows"]
    assert row["failures"] == {"DatabaseTimeoutError": (row["lookups"] + 1 + row["failures"]["DatabaseTimeoutError"]) // 4}


@pytest.mark.gpu
@pytest.mark.parametrize("options", [(), ("--bags", "10"), ("--on-device",), ("--on-device", "--bags", "10")])
def test_on_a_gpu(config, tmp_path, options):
    config.write_text(config.read_text().replace('"device": "cpu"', '"device": "cuda"'))
    (row,) = profiled(tmp_path, config, *QUICK, "--check", *options)["rows"]
    assert row["failures"] == {}
    assert row["tiers"]["embedding_cache"]["asked"] == row["lookups"] * 50 * len(TABLES)


def test_a_missed_bound_and_a_rate_that_cannot_be_held_are_exit_code_1(config, tmp_path, monkeypatch):
    bounds = ("--p99-ms", "0.000001", "--p50-ms", "0.000001", "--min-keys-per-s", "1e15", "--min-hit-rate", "1")
    result = run("profile", config, *QUICK, *bounds)
    assert result.exit_code == 1
    for missed in ("p99 is", "p50 is", "the throughput is", "the hit rate is"):
        assert f"missed: batch 50: {missed}" in result.output
    monkeypatch.setattr("hps.tools.profiling.http_load.DRAIN_S", 0.1)
    found = profiled(tmp_path, config, *QUICK, "--rate", "300000", code=1)
    (row,) = found["rows"]
    assert found["missed"]
    assert row["lookups"] + row["failures"]["no answer"] == 90_000
    assert row["latency"]["max_ms"] >= 100  # what waited until the end, and longer


WRONG = [
    ("--model n", 2, "n"),
    ("--table n", 2, "n"),
    ("--batch 100000", 2, "100000"),
    ("--batch 0", 2, "expected at least 1"),
    ("--batch 50 --bags 7", 2, "multiples of --bags 7"),
    ("--rate 0", 2, "lookups a second"),
    ("--keys /nowhere.npy", 2, "nowhere"),
    ("--picture a.jpg", 2, ".svg or .png"),
    ("--json /nowhere/a.json", 2, "its directory does not exist"),
]
ASKED_WRONGLY = [
    ("SERVICE", "--token wrong", 2, "401"),
    ("SERVICE", "--token secret --device 0", 2, "--device"),
    ("http://127.0.0.1:9", "", 1, "is the server running there?"),
    ("https://127.0.0.1:9", "--cert /nowhere.pem", 2, "nowhere.pem"),
    ("TIMED", "", 2, "give --rows, or recorded --keys"),
    *(("CONFIG", *one) for one in WRONG),
    *(("SERVICE", f"--token secret {options}", *more) for options, *more in WRONG[:3]),  # the others are looked at before
]


def test_wrong_input_has_its_exit_code(config, service):
    with timed_server() as timed:
        targets = {"SERVICE": service.url, "CONFIG": config, "TIMED": timed.url}
        for target, options, code, problem in ASKED_WRONGLY:
            result = run("profile", targets.get(target, target), *QUICK, *options.split())
            assert (result.exit_code, problem in result.output) == (code, True), (target, options, result.output)
    if find_spec("cupy") is None:
        result = run("profile", config, *QUICK, "--on-device")
        assert (result.exit_code, install_hint("cuda12") in result.output) == (2, True)


def test_a_server_of_small_batches_is_profiled_without_a_size(document, tmp_path):
    [model] = document["models"]
    with running_service({**document, "models": [{**model, "max_batch_size": 8}]}) as service:
        found = profiled(tmp_path, service.url, "--seconds", "0.05", "--warmup", "0", "--concurrency", "1")
    assert [(row["batch"], row["failures"]) for row in found["rows"]] == [(8, {})]


def test_several_processes_profile_a_server_with_tls_and_their_results_are_added(document, tmp_path, monkeypatch):
    authority = Authority(tmp_path)
    pair, own = authority.sign("localhost"), authority.sign("someone")
    paths = {"tls_certificate_path": pair.certificate, "tls_key_path": pair.key, "tls_client_ca_path": authority.path}
    monkeypatch.setenv("SSL_CERT_FILE", str(authority.path))
    monkeypatch.setenv("HPS_CLIENT_CERTIFICATE", str(own.both))
    with ServedProcess({**document, "service": {name: str(path) for name, path in paths.items()}}, tmp_path) as served:
        options = ("--processes", "3", "--concurrency", "5", "--batch", "1000")  # answers of several TLS records
        (_, large) = profiled(tmp_path, served.url, *QUICK, *options, "--rate", "100")["rows"]
        monkeypatch.delenv("HPS_CLIENT_CERTIFICATE")
        assert run("profile", served.url, *QUICK).exit_code == 1
    assert (large["failures"], large["lookups"]) == ({}, 30)  # each process sends its share, and no other
    assert large["tiers"]["embedding_cache"]["asked"] == 2 * 1000 * 30


def test_a_server_that_goes_away_is_a_failure_of_each_process(document, tmp_path):
    with ServedProcess(document, tmp_path) as served, hps.connect(served.url) as client, ThreadPoolExecutor(1) as pool:

        def looked_up():
            return client.ask("/v1/stats")["server"]["models"][0]["lookups"]["count"]

        def stop_it():
            wait_until(lambda: looked_up() > 20, "it is loaded")
            served.stop()

        stopping = pool.submit(stop_it)
        options = ("--seconds", "2", "--processes", "2", "--max-failures", "1")
        (row,) = profiled(tmp_path, served.url, *QUICK, *options)["rows"]
        stopping.result(60)
    assert row["lookups"] > 20
    assert row["failures"]["no connection"] >= 2
    assert set(row["failures"]) <= {"no connection", "connection lost", "status 503"}


class Killed(profiling.Requests):
    """Requests whose second process ends before it sends one."""

    def pool(self):
        try:
            os.close(os.open(self.start.decode(), os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            os._exit(9)
        return super().pool()


def test_a_client_process_that_is_killed_ends_the_profile(service, tmp_path):
    asked = profiling.Service(service.url, "secret", processes=2)
    keys = {"item": np.arange(100)}
    requests = Killed(profiling.Target(service.url), str(tmp_path / "first").encode(), keys, 10, 0)
    with pytest.raises(HPSError, match="one of the client processes was killed"):
        asked._run(requests, 2, 0.1, None)


def test_it_uses_half_of_the_processors_and_no_more_processes_than_connections(service, monkeypatch):
    monkeypatch.setattr(profiling, "available_processors", lambda: 16)
    loads = []
    monkeypatch.setattr(profiling, "_load", lambda *load: loads.append(load) or profiling.LoadResult(seconds=1.0))
    asked = profiling.Service(service.url, "secret")
    assert asked._processes == 8
    asked._run(None, 1, 0.1, None)
    assert len(loads) == 1  # in this process
    monkeypatch.setattr(profiling, "available_processors", lambda: 1)
    assert profiling.Service(service.url, "secret")._processes == 1


def test_against_a_server_that_does_nothing_it_measures_itself(tmp_path):
    answer = Answer(body=b"{}" + bytes(50 * 4 * 4))
    with timed_server(lambda number: answer) as server:
        (row,) = profiled(tmp_path, server.url, *QUICK, "--rows", "100")["rows"]
        assert len(server.lookups) == row["lookups"] + 1
    assert row["stages"] == row["tiers"] == {}
    assert 0 < row["generator_busy"] < 1.5  # processor time of one process, which also begins and ends
    assert len(set(server.lookups)) == 1  # as many bytes each time
