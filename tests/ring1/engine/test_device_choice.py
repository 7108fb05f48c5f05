"""Which device answers a lookup that names none. Two sessions on the CPU stand for two devices."""

import threading
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import pytest

from hps.cache.cpu.cache import NumpyCache
from hps.configuration.models import ModelConfig
from hps.engine.chain import DatabaseChain
from hps.engine.coalescing import FetchCoalescer
from hps.engine.session import CachedSession, SessionSettings
from hps.errors import DatabaseError, TooManyKeysError, UnknownDeviceError
from hps.statistics.metrics import Metrics
from hps.tensors.batch import Batch
from hps.testing.waiting import PATIENCE_S, wait_until
from hps.versions.deployment import Deployment
from tests.fakes.faulty_database import FaultyDatabase
from tests.fakes.memory_database import MemoryDatabase
from tests.servers.running_service import model_of

CONFIG = ModelConfig.model_validate(model_of("m", ["a.model"], {"a": 2}, deployed_device_list=[3, 5]))
TABLES = CONFIG.tables


class Deployed:
    """A model on several devices whose caches hold nothing, so that lookups wait for the database while that is shut."""

    def __init__(self, devices=(3, 5), *, shared=False):
        metrics = Metrics()
        self.database = FaultyDatabase(MemoryDatabase())
        chain = DatabaseChain(None, self.database, metrics=metrics)
        chain.open_table(TABLES[0])
        coalescer = FetchCoalescer(chain.fetch, metrics)
        settings = SessionSettings(hit_rate_threshold=1.1, workspace_timeout_s=PATIENCE_S, one_of_several=not shared)
        sessions = {
            device: CachedSession(TABLES, NumpyCache.create(TABLES, [0], device), chain, coalescer, settings, metrics)
            for device in (devices[:1] if shared else devices)
        }
        self.deployment = Deployment(CONFIG, TABLES, dict.fromkeys(devices, sessions[devices[0]]) | sessions, chain)
        self.session, self.pool = self.deployment.session, ThreadPoolExecutor(8)
        self.database.gate = threading.Event()
        self.open = self.database.gate.set

    @property
    def busy(self):
        return [session.busy for session in self.deployment.sessions.values()]

    def lookup(self, device, keys) -> None:
        self.session(device).run(Batch.of(0, np.arange(keys), np.empty((keys, 2), np.float32)))

    def start(self, device, keys) -> "Future[None]":
        """A lookup that runs, or waits for a workspace, until the database opens."""
        busy = self.session(device).busy
        future = self.pool.submit(self.lookup, device, keys)
        wait_until(lambda: self.session(device).busy == busy + keys, "the lookup is under way")
        return future

    def chosen(self, times, *tensors):
        return [self.deployment.choose_device(*tensors) for _ in range(times)]


@pytest.fixture
def deployed():
    deployed = Deployed()
    yield deployed
    deployed.open()
    deployed.pool.shutdown()


class OnDevice:
    """A tensor, as far as it says where it is."""

    def __init__(self, kind, device):
        self.device = (kind, device)

    def __dlpack_device__(self):
        return self.device


@pytest.mark.parametrize("devices", [(3, 5), (4, 0, 9)])
def test_idle_devices_take_turns(devices):
    assert Deployed(devices).chosen(2 * len(devices)) == [*devices, *devices]


def test_the_device_with_fewer_keys_under_way_is_chosen_and_those_that_wait_for_a_workspace_count(deployed):
    running = [deployed.start(3, 10)]
    assert deployed.chosen(3) == [5, 5, 5]
    running.append(deployed.start(5, 6))
    assert deployed.chosen(2) == [5, 5]
    running.append(deployed.start(5, 5))  # waits: there is one workspace
    assert deployed.chosen(2) == [3, 3]
    running.append(deployed.start(3, 1))
    assert sorted(deployed.chosen(2)) == [3, 5]
    deployed.open()
    for lookup in running:
        lookup.result(PATIENCE_S)
    assert sorted(deployed.chosen(2)) == [3, 5]


def test_a_busy_device_is_chosen_before_a_lost_one(deployed):
    deployed.session(5).lost = True
    deployed.start(3, 10)
    assert deployed.chosen(3) == [3, 3, 3]


def test_lookups_that_fail_or_are_refused_are_under_way_no_longer_and_no_count_drifts(deployed):
    deployed.database.failing.add("fetch")
    running = deployed.start(3, 10)
    deployed.open()
    with pytest.raises(DatabaseError):
        running.result(PATIENCE_S)
    with pytest.raises(TooManyKeysError):
        deployed.lookup(5, 1001)
    assert deployed.busy == [0, 0]
    deployed.database.failing.clear()
    for lookup in [deployed.pool.submit(deployed.lookup, None, 1 + nth % 7) for nth in range(2000)]:
        lookup.result(PATIENCE_S)
    assert deployed.busy == [0, 0]


def test_devices_that_share_a_session_are_not_chosen_between_and_nothing_is_counted():
    deployed = Deployed(shared=True)
    assert deployed.deployment.one_device == 3
    assert deployed.session(5) is deployed.session(None)
    running = deployed.pool.submit(deployed.lookup, None, 10)
    assert deployed.database.entered.acquire(timeout=PATIENCE_S)
    assert deployed.session(None).busy == 0
    deployed.open()
    running.result(PATIENCE_S)


@pytest.mark.parametrize(
    ("tensors", "device"),
    [
        *[((OnDevice(2, 5),), 5), ((np.zeros(1), OnDevice(13, 5)), 5), (({"a": np.zeros(1), "b": OnDevice(2, 5)}, None), 5)],
        *[((None, {"a": OnDevice(2, 3)}), 3), ((OnDevice(2, 0), OnDevice(2, 5)), 5)],
        *[((elsewhere,), None) for elsewhere in (OnDevice(1, 5), OnDevice(3, 5), OnDevice(2, 0), [1, 2], np.zeros(1))],
        ((np.zeros(1).__dlpack__(),), None),
    ],
)
def test_a_tensor_on_a_device_of_the_model_chooses_it_and_one_elsewhere_nothing(tensors, device):
    deployed = Deployed()
    assert deployed.deployment.one_device is None
    assert deployed.chosen(2, *tensors) == ([device] * 2 if device else [3, 5])
    if device:
        assert deployed.session(None, *tensors) is deployed.deployment.sessions[device]


def test_a_device_that_is_named_is_the_one_or_unknown(deployed):
    deployed.start(5, 10)
    assert deployed.session(5) is deployed.deployment.sessions[5]
    with pytest.raises(UnknownDeviceError, match=r"got device 4, expected one of its deployed_device_list \[3, 5\]"):
        deployed.session(4)
