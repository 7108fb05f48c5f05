"""The deployment, run as local processes: what docker-compose.yml and the Dockerfile say, in their order."""

import os
import shutil
import subprocess
import sys
from contextlib import contextmanager

import httpx
import numpy as np
import pytest

from hps.testing.waiting import wait_until
from hps.tools.cli.tables.sample import sample_vectors
from tests import ROOT
from tests.fakes.installation import Installation
from tests.servers.compose_file import compose_of
from tests.servers.compose_runner import Stack, isolated

pytestmark = pytest.mark.redis
REPLICAS = ("hps-1", "hps-2", "hps-3")
TOKEN = {"authorization": "Bearer token4tests"}
TABLES = {"user": (16, 1, 10_000), "item": (32, 2, 50_000)}  # dim, seed, rows: as in docker-compose.yml
HAPROXY = shutil.which("haproxy")
_COMPILE = (
    "import hps.cache.cpu.cache, hps.stores.redis.database, hps.stores.rocks_db.database, hps.models.loading.table_load;"
    "from hps.ground.kernels.numba_kernels import compile_kernels; compile_kernels()"
)


@pytest.fixture(scope="module")
def kernels(tmp_path_factory):
    """What a replica has in its volume after its first start: compiled kernels, made under the image's environment."""
    volume = tmp_path_factory.mktemp("kernels")
    environment = compose_of(("cpu",)).stage("hps-1").environment
    assert environment["NUMBA_CACHE_DIR"] == "/var/lib/hps/numba"
    environment |= {key: value.replace("/var/lib/hps", str(volume)) for key, value in environment.items()}
    without_kernels = Installation(tmp_path_factory.mktemp("installation")).package.parent
    done = run_python(_COMPILE, volume, environment, without_kernels)
    assert done.returncode == 0, done.stderr
    return volume


@pytest.fixture(scope="module")
def stack(tmp_path_factory, kernels):
    with running("cpu", tmp_path_factory.mktemp("cpu"), kernels) as stack:
        yield stack


@pytest.fixture(autouse=True)
def _whole_again(request):
    """Start what the test before has ended."""
    if "stack" in request.fixturenames:
        stack = request.getfixturevalue("stack")
        for name in stack.compose.services:
            if not stack.running(name) and name != "sample-model":
                stack.start(name)
        for name in (*REPLICAS, "redis"):
            stack.wait_healthy(name)


@contextmanager
def running(profile, directory, kernels):
    compose = compose_of((profile,))
    if HAPROXY is None:
        del compose.services["balancer"]
    with Stack(compose, directory, kernels) as stack:
        stack.up()
        yield stack


def run_python(code, writable, environment, code_of=ROOT):
    """Run Python with everything but a directory read-only, where that can be done."""
    environment |= {"PATH": os.environ["PATH"], "PYTHONPATH": str(code_of)}
    command = isolated([sys.executable, "-c", code], writable)
    return subprocess.run(command, env=environment, cwd="/", capture_output=True, text=True, timeout=240, check=False)


def assert_answers(stack, name, keys, table="item", timeout_s=20):
    """Look keys up through one service, and compare every bit."""
    dim, seed, rows = TABLES[table]
    url = f"{stack.url(name)}/v1/models/sample/lookup"
    body = {"tables": {table: [int(key) for key in keys]}}
    answer = httpx.post(url, json=body, headers=TOKEN, timeout=timeout_s)
    assert answer.status_code == 200, answer.text
    wanted = sample_vectors(np.asarray(keys, np.int64), dim, seed)
    wanted[np.asarray(keys) >= rows] = 0
    got = np.array(answer.json()["tables"][table], np.float32)
    assert got.tobytes() == wanted.tobytes()


def metric(stack, name, *parts):
    """The sum of a replica's series whose line has all these parts."""
    lines = httpx.get(f"{stack.url(name)}/metrics", headers=TOKEN).text.splitlines()
    return sum(
        float(line.rpartition(" ")[2]) for line in lines if not line.startswith("#") and all(part in line for part in parts)
    )


@pytest.mark.parametrize("table", TABLES)
@pytest.mark.parametrize("name", REPLICAS)
def test_every_replica_answers_bit_for_bit(stack, name, table):
    rows = TABLES[table][2]
    assert_answers(stack, name, np.random.default_rng(7).integers(0, rows + 100, 1000), table)


def test_requests_without_the_token_are_refused(stack):
    url = stack.url("hps-1")
    for answer in (httpx.get(f"{url}/metrics"), httpx.post(f"{url}/v1/models/sample/lookup", json={"tables": {"user": [1]}})):
        assert answer.status_code == 401
    assert httpx.get(f"{url}/v2/health/ready").status_code == 200


def test_model_is_in_redis_and_loaded_once(stack):
    # Each replica says how many rows Redis holds; three loads of their own would have been three times the rows.
    for name in REPLICAS:
        assert "cached 50000 / 50000 embeddings in volatile database (redis_cluster); load: 50000 /" in stack.full_log(name)


@pytest.mark.haproxy
def test_balancer_answers_and_keeps_the_metrics_of_replicas_to_itself(stack):
    assert_answers(stack, "balancer", range(100))
    assert httpx.get(f"{stack.url('balancer')}/metrics", headers=TOKEN).status_code == 404
    assert "haproxy_server_status" in httpx.get(f"{stack.url('balancer', 8404)}/metrics").text


def test_others_go_on_when_a_replica_is_killed(stack):
    stack.kill("hps-2")
    for turn in range(10):
        for name in ("hps-1", "hps-3"):
            assert_answers(stack, name, range(turn * 100, turn * 100 + 100))
    stack.bring_back("hps-2")
    assert "embeddings in persistent database (row_files); all were there" in stack.log("hps-2")
    assert_answers(stack, "hps-2", range(1000))


def test_lookups_go_on_while_redis_is_gone_and_fill_it_when_it_is_back(stack):
    stack.kill("redis")
    for turn in range(4):
        for name in REPLICAS:
            assert_answers(stack, name, range(30_000 + turn * 200, 30_200 + turn * 200))
    assert metric(stack, "hps-1", "hps_tier_errors_total", 'operation="read",tier="volatile_db"') > 0
    stack.bring_back("redis")
    promoted = metric(stack, "hps-1", "hps_promoted_keys_total{")
    asked = iter(range(40_000, 50_000, 50))

    def filled():
        first = next(asked)
        assert_answers(stack, "hps-1", range(first, first + 50))
        return metric(stack, "hps-1", "hps_promoted_keys_total{") > promoted

    wait_until(filled, "vectors are promoted into the new Redis")
    wait_until(
        lambda: metric(stack, "hps-1", "hps_tier_available", 'operation="read",tier="volatile_db"') == 1, "Redis is asked again"
    )


def test_service_ends_within_its_grace_period(stack):
    assert stack.stop("hps-3") == 0
    assert stack.stop("redis") == 0


def test_cluster_profile_serves_and_survives_the_loss_of_a_master(tmp_path_factory, kernels):
    with running("cluster", tmp_path_factory.mktemp("cluster"), kernels) as stack:
        assert "cluster_known_nodes:6" in stack.full_log("redis-cluster")
        for name in REPLICAS:
            assert_answers(stack, name, range(2000))
        stack.kill("redis-1")
        for turn in range(5):
            for name in REPLICAS:
                assert_answers(stack, name, range(20_000 + turn * 300, 20_300 + turn * 300))
        stack.bring_back("redis-1")
        stack.start("redis-cluster")  # as `up` does: it finds the cluster and leaves it alone
        stack.wait_completed("redis-cluster")
        for name in REPLICAS:
            assert_answers(stack, name, range(30_000, 31_000))
