"""The engine's side of the fronts: what it does with deployments that come and go, and with figures of fronts."""

from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import pytest

import hps
from hps.cache.cpu.batches import NumpyBatches
from hps.cache.cpu.cache import NumpyCache
from hps.configuration.load import load_configuration
from hps.engine.session import CachedSession
from hps.errors import NotReadyError
from hps.regions import layout
from hps.regions.exchange import D_ID, D_IN_FLIGHT, D_TIMES, MOST_DEPLOYMENTS, T_HITS, T_KEYS
from hps.regions.loop_state import LoopState
from hps.regions.sharing import share
from hps.serve.engine.app import Application
from hps.serve.engine.batches import _Served
from hps.serve.engine.lifecycle import Lifecycle
from hps.serve.frontend.connection import Connection
from hps.serve.frontend.frontend import Frontend
from hps.serve.http.http_metrics import HTTPMetrics, InferenceCounts, are_figures
from hps.serve.http.refusals import Refusals
from hps.statistics.times import LOOKUP_BOUNDS_NS
from hps.testing.waiting import wait_until
from tests.fakes.region_front import RegionFront, tables_of
from tests.servers.running_service import document_of, model_of, running_service

TABLES = tables_of(4, 8)


class Session(CachedSession):
    """A session of which only what the engine needs exists."""

    def __init__(self):
        self.cache = NumpyCache.create(TABLES, [100, 100], 0)
        self.before_close, self.on_loss = [], []
        self.counted = []

    def count_answered(self, tables, times, ns):
        self.counted.append((tables, times, ns))

    def close(self, timeout_s=0.0):
        if not all(end(timeout_s) for end in self.before_close):
            return False
        self.cache.close()
        return True


@pytest.fixture
def loop_state():
    front = RegionFront()
    yield LoopState([front.memory], [front.event], -1, -1, 0)
    front.close()


def serve(loop_state, session, driver=None):
    config = SimpleNamespace(model="m", transform=None)
    deployed = SimpleNamespace(tables=TABLES, sessions={0: session}, config=config, keys_per_sample=1, scores=None, aging=None)
    return _Served(deployed, 0, [loop_state], [driver or NumpyBatches(loop_state)], lambda: None)


def row_of(loop_state, served):
    return loop_state.deployments[served.deployment_id % MOST_DEPLOYMENTS]


def test_a_session_that_closes_ends_what_the_loop_answers_from_it_once_nothing_is_read(loop_state):
    session = Session()
    served = serve(loop_state, session)
    assert row_of(loop_state, served)[D_ID] == served.deployment_id
    row_of(loop_state, served)[D_IN_FLIGHT] = 1
    assert not session.close()
    assert row_of(loop_state, served)[D_ID] == 0  # no other request begins
    assert session.cache.open_tables()
    row_of(loop_state, served)[D_IN_FLIGHT] = 0
    assert session.close()
    assert serve(loop_state, Session()).deployment_id % MOST_DEPLOYMENTS == served.deployment_id % MOST_DEPLOYMENTS


def test_a_session_that_closes_while_it_is_made_known_is_not_served(loop_state):
    """The loop would read the memory of a cache that is gone."""
    session = Session()

    class Driver(NumpyBatches):
        def resident(self, cache):
            found = super().resident(cache)
            with ThreadPoolExecutor(1) as threads:
                threads.submit(session.close)
            return found

    with pytest.raises(NotReadyError):
        serve(loop_state, session, Driver(loop_state))
    assert not loop_state.deployments[:, D_ID].any()
    assert (
        len({serve(loop_state, Session()).deployment_id % MOST_DEPLOYMENTS for _ in range(MOST_DEPLOYMENTS)})
        == MOST_DEPLOYMENTS
    )


def test_a_service_that_closes_gives_back_what_its_loop_was_prepared_with(tmp_path, monkeypatch):
    closed = []
    monkeypatch.setattr(NumpyBatches, "close", lambda self: closed.append(self))
    hps.write_sparse_model(tmp_path / "t", (np.arange(3), np.zeros((3, 4), np.float32)))
    for served in (1, 2):
        with running_service(document_of(model_of("m", [tmp_path / "t"], {"t": 4}))):
            assert len(closed) == served - 1
        assert len(set(closed)) == served


def test_what_the_loop_has_counted_reaches_the_session_even_before_its_request_is(loop_state):
    session = Session()
    served = serve(loop_state, session)
    served.settle()
    assert session.counted == []
    loop_state.tables[0, [T_KEYS, T_HITS]] += 5
    served.settle()
    row_of(loop_state, served)[D_TIMES] += 1
    served.settle()
    assert sum(tables[0][0] for tables, _, _ in session.counted) == 5
    assert sum(sum(times) for _, times, _ in session.counted) == 1


def test_the_last_counts_of_a_deployment_are_not_lost(loop_state):
    session = Session()
    served = serve(loop_state, session)
    loop_state.tables[1, [T_KEYS, T_HITS]] += 7
    row_of(loop_state, served)[D_TIMES] += 1
    session.close()
    served.settle()
    assert session.counted == [([[0, 0, 0, 0], [7, 7, 0, 0]], [1] + [0] * len(LOOKUP_BOUNDS_NS), 0)]


def figures():
    metrics = HTTPMetrics(Refusals())
    metrics.count("/a", 200, 0.5)
    inference = {"m\0001": [1] * 8}
    gauges = {"connections": 1, "pending": 0, "held_bytes": 5, "cached_bytes": 6, "certificate_ends_s": 0}
    return {"http": metrics.figures(), "inference": inference, "rollouts": {}, "cpu_ns": 7, **gauges}


def test_figures_of_a_front_are_recognised():
    assert are_figures(figures())
    assert InferenceCounts(*figures()["inference"]["m\0001"]).successes == 1
    assert not are_figures({})


OF_HTTP = {
    "counts": [{"x": 1}, {"200 /a": "x"}, [1]],
    "times": [{"/a": [1]}, {"/a": []}],
    "refused": [{"nonsense": 1}],
}
WRONG = {
    "http": [3, {}, *(figures()["http"] | {key: value} for key, values in OF_HTTP.items() for value in values)],
    "inference": [[1], {"m\0001": [1] * 9}, {"m\0001": ["x"] * 8}],
    "rollouts": [[1], {"a": [1]}, {"a": ["x"] * 10}],
    "connections": ["x"],
    "cpu_ns": [None],
    "pending": [None],
    "held_bytes": [[1]],
    "cached_bytes": [1.5],
}


@pytest.mark.parametrize("key", WRONG)
def test_what_is_no_figures_is_left_out(key):
    for value in WRONG[key]:
        assert not are_figures(figures() | {key: value})


def test_a_version_that_fronts_cannot_name_is_not_ready(tmp_path, monkeypatch):
    hps.write_sparse_model(tmp_path / "t", (np.arange(3), np.ones((3, 4), np.float32)))

    def full(*_):
        raise hps.HPSError("serving model 'm': frontends know at most 256 deployments")

    with running_service(document_of(model_of("m", [tmp_path / "t"], {"t": 4}))) as service:
        server, paths = (
            service.app.lifecycle.opened,
            ("/v2/health/ready", "/v2/models/m/ready", "/v2/models/m/versions/1/ready"),
        )
        for _ in range(2):
            with monkeypatch.context() as patch:
                patch.setattr(LoopState, "add", full)
                server.deploy("m", force=True)
                for path in paths:
                    answer = service.client.get(path)
                    assert (answer.status_code, "too many deployments" in answer.text) == (503, True)
                assert not service.app.lifecycle.settled
            service.app.link.publish()
            assert [service.client.get(path).status_code for path in paths] == [200] * 3
            assert service.client.post("/v1/models/m/lookup", json={"tables": {"t": [1]}}).status_code == 200


def test_a_service_is_not_ready_while_its_loops_do_not_know_a_front(tmp_path):
    hps.write_sparse_model(tmp_path / "t", (np.arange(3), np.ones((3, 4), np.float32)))
    with running_service(document_of(model_of("m", [tmp_path / "t"], {"t": 4}))) as service:
        lifecycle, memory = service.app.lifecycle, service.frontend.exchange.region
        epoch = memory[layout.ENGINE_EPOCH]
        memory[layout.ENGINE_EPOCH] = epoch + 1
        assert lifecycle.not_ready_reason == "frontend 0 is being connected"
        memory[layout.ENGINE_EPOCH] = epoch
        wait_until(lambda: not lifecycle.not_ready_reason, "it is ready again")


def test_the_snapshot_is_written_when_something_changes_and_not_meanwhile(tmp_path, monkeypatch):
    hps.write_sparse_model(tmp_path / "t", (np.arange(3), np.ones((3, 4), np.float32)))
    with running_service(document_of(model_of("m", [tmp_path / "t"], {"t": 4}))) as service:
        server, link = service.app.lifecycle.opened, service.app.link
        published, settled = [], []
        publish, settle = link.publish, link.settle
        monkeypatch.setattr(link, "publish", lambda: (published.append(None), publish()))
        monkeypatch.setattr(link, "settle", lambda: (settled.append(len(published)), settle()))
        # Loading may still push a last change. Snapshots written by time, even twice a second, never spare ten rounds.
        wait_until(lambda: len(settled) > 10 and settled[-10] == settled[-1], "nothing is published while nothing changes")

        (session,) = server.model("m").sessions.values()
        session.lost = True
        for notify in session.on_loss:
            notify()
        wait_until(lambda: link._published["models"]["m"]["1"]["lost"] == [0], "the lost device is published")

        with server.record_trace(tmp_path / "recording"):
            assert all(loop_state._hands_over_all for loop_state in link._loop_states), "lookups to record are handed to Python"


def test_a_frontend_and_an_engine_refuse_shared_memory_of_another_build(tmp_path):
    hps.write_sparse_model(tmp_path / "t", (np.arange(3), np.ones((3, 4), np.float32)))
    configuration = load_configuration(document_of(model_of("m", [tmp_path / "t"], {"t": 4})))
    shared = share(configuration.service, 1, str(tmp_path / "engine.sock"), 0)
    layout.Memory(shared.regions[0])[layout.FORMAT_AT] ^= 1
    for connect in (
        lambda: Frontend(0, shared, configuration, connect=Connection, spins=False, loopback=True),
        lambda: Application(Lifecycle(configuration)).link.connect(shared),
    ):
        with pytest.raises(hps.HPSError, match="of another build of hps"):
            connect()
    shared.close()


def test_a_check_of_the_parameter_server_covers_the_regions(tmp_path):
    hps.write_sparse_model(tmp_path / "t", (np.arange(3), np.ones((3, 4), np.float32)))
    with running_service(document_of(model_of("m", [tmp_path / "t"], {"t": 4}))) as service:
        region = service.frontend.exchange.region
        assert service.app.lifecycle.opened.check() == []
        region[layout.TAKEN] += 1
        [finding] = service.app.lifecycle.opened.check()
        assert finding.startswith("regions of the frontends: region 0: ")
