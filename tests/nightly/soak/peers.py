"""Two servers whose only database is one Redis: deploys forced beside a peer, publishers with wrong clocks, judged lag.

python -m tests.nightly.soak.peers DIRECTORY ACTOR

Nothing is written over the API; all changes come from the log, which is a second Redis that nobody disturbs.
"""

import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import closing, suppress
from itertools import count
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from hps.configuration.load import load_configuration
from hps.models.writer import write_sparse_model
from hps.registry import implementation
from hps.updates.publisher import Publisher
from tests.nightly.soak.ledger import DEFAULT, TABLES, Ledger, encode
from tests.servers.child_processes import ChildProcesses
from tests.servers.redis_server import RedisServer, free_ports
from tests.servers.service_processes import children_of, left_over

NAMES = ("c", "d")
LAG_WITHIN_S = 1.0
_MODEL, _TABLE, _DIM = TABLES[0]
_ROWS = 4000
_MARKERS = 16  # keys that every message changes, of each publisher: some lie in every partition
_SKEWS_S = (0.0, 3600.0, -3600.0)
_PUBLISH_PAUSE_S, _ASK_PAUSE_S, _DISTURB_PAUSE_S = 0.3, 0.05, 6.0
_START_S, _TIMEOUT_S = 120.0, 30.0
_REACH_S = 20.0  # after a disturbance, updates must be visible again
_SETTLED_S = 3.0


class Peers:
    """The servers, those who publish to them, ask them and disturb them.

    Args:
        ledger: of the soak, for counts and violations.
    """

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._directory = ledger.directory / "peers"
        (self._directory / "written").mkdir(parents=True)
        self._written = Ledger(self._directory / "written", 0, "peers")  # what was published, by key
        self._rows, self._log = (RedisServer(self._directory / name) for name in ("rows", "log"))
        self._ports = free_ports(len(NAMES))
        self._children = ChildProcesses()
        self._servers: dict[int, subprocess.Popen[str]] = {}
        self._up = [threading.Event() for _ in NAMES]
        self._disturbed = [0.0] * len(NAMES)  # when a server, or the Redis of its rows, was last away
        self._published: list[list[float]] = [[] for _ in _SKEWS_S]  # when the log had each message, by publisher

    def run(self) -> None:
        """Run until the soak ends."""
        self._rows.start()
        self._log.start()
        keys = np.arange(_ROWS)
        write_sparse_model(self._directory / "model", (keys, encode(0, keys, 0)))
        (self._directory / "ps.json").write_text(json.dumps(self._configuration()))
        try:
            jobs: list[tuple[Callable[..., None], tuple[Any, ...]]] = [
                *((self._publish, (number, skew_s)) for number, skew_s in enumerate(_SKEWS_S)),
                *((self._ask, (place,)) for place in range(len(NAMES))),
                *((self._compare_lag, (place,)) for place in range(len(NAMES))),
            ]
            threads = [threading.Thread(target=self._guarded, args=job) for job in jobs]
            for thread in threads:
                thread.start()
            for place in range(len(NAMES)):  # on this thread, with which they end
                self._start(place)
            self._disturb()
            for thread in threads:
                thread.join()
        finally:
            self._children.end()
            self._rows.kill()
            self._log.kill()

    def _guarded(self, job: Callable[..., None], arguments: tuple[Any, ...]) -> None:
        try:
            job(*arguments)
        except Exception as error:  # noqa: BLE001 - a watcher that ends would see nothing more
            self._ledger.violation("client", problem=f"{job.__name__}{arguments}: {error!r}"[:500])

    def _configuration(self) -> dict[str, Any]:
        return {
            "device": "cpu",
            "volatile_db": {"type": "redis_cluster", "address": self._rows.address, "num_partitions": 4},
            "update_source": {"type": "redis_stream", "address": self._log.address, "begin": "earliest", "ready_lag_s": 2},
            "service": {"lookup_threads": 2},
            "models": [
                {
                    "model": _MODEL,
                    "sparse_files": [str(self._directory / "model")],
                    "embedding_table_names": [_TABLE],
                    "embedding_vecsize_per_table": [_DIM],
                    "maxnum_catfeature_query_per_table_per_sample": [1],
                    "default_value_for_each_table": [DEFAULT],
                    "deployed_device_list": [0],
                    "max_batch_size": 2000,
                    "gpucacheper": 0.2,
                    "hit_rate_threshold": 1.1,
                }
            ],
        }

    def _start(self, place: int) -> None:
        """Start a server, and wait until it serves."""
        with (self._ledger.directory / f"{NAMES[place]}.log").open("a") as log:
            options = {"stdout": log, "stderr": log}
            server = self._children.hps("serve", self._directory / "ps.json", "--port", self._ports[place], **options)
        self._servers[place] = server
        deadline = time.monotonic() + _START_S
        with self._client(place) as client:
            while server.poll() is None and time.monotonic() < deadline:
                with suppress(httpx.TransportError):
                    if client.get("/v2/health/ready").status_code == 200:
                        self._disturbed[place] = time.monotonic()
                        self._up[place].set()
                        return
                time.sleep(0.05)
        self._ledger.violation("start", process=NAMES[place], status=server.poll())

    def _client(self, place: int) -> httpx.Client:
        return httpx.Client(base_url=f"http://127.0.0.1:{self._ports[place]}", timeout=_TIMEOUT_S)

    def _publish(self, number: int, skew_s: float) -> None:
        """Change rows of its own, by a clock that is wrong; note when the log had each message."""
        rng = np.random.default_rng(number)
        own = np.arange(number, _ROWS, len(_SKEWS_S))
        source = load_configuration(self._directory / "ps.json").update_source
        with closing(implementation("update_log_writer", source.type).from_config(source)) as writer:
            topic = f"hps_et.{_MODEL}.{_TABLE}"
            skewed = Publisher(writer, topic, dim=_DIM, create_partitions=2, now_us=lambda: int((time.time() + skew_s) * 1e6))
            with skewed as publisher:
                for version in count(1):
                    if self._ledger.stopped:
                        return
                    keys = np.union1d(own[:_MARKERS], rng.choice(own, 32))
                    self._written.begun[0, keys] = version
                    publisher.insert(keys, encode(0, keys, version))
                    publisher.flush()
                    self._published[number].append(time.monotonic())
                    time.sleep(_PUBLISH_PAUSE_S)

    def _ask(self, place: int) -> None:
        """Judge answers about random keys; nothing that is done to the other server may keep this one from answering."""
        rng = np.random.default_rng(100 + place)
        with self._client(place) as client:
            while not self._ledger.stopped:
                if not self._up[place].wait(0.5):
                    continue
                disturbed, began = self._disturbed[place], time.monotonic()
                keys = rng.integers(0, _ROWS, int(rng.integers(1, 200)))
                try:
                    answer = client.post(f"/v1/models/{_MODEL}/lookup", json={"tables": {_TABLE: keys.tolist()}})
                except httpx.TransportError as error:
                    if self._up[place].is_set() and self._disturbed[place] == disturbed:
                        self._ledger.violation("dropped", process=NAMES[place], error=repr(error)[:200])
                    continue
                if answer.status_code == 200:
                    vectors = np.array(answer.json()["tables"][_TABLE], np.float32)
                    wrong = self._written.judge(self._written.bounds(0, 0, keys), vectors)
                    self._ledger.count(answers=1, vectors=keys.size)
                    for kind in wrong:
                        self._ledger.violation(kind, process=NAMES[place], keys=keys[wrong[kind]][:5].tolist())
                elif began - disturbed > _SETTLED_S and self._disturbed[place] == disturbed and self._up[place].is_set():
                    details = {"status": answer.status_code, "body": answer.text[:300]}
                    self._ledger.violation("refused beside a peer", process=NAMES[place], **details)
                else:
                    self._ledger.count(refused=1)
                time.sleep(_ASK_PAUSE_S)

    def _compare_lag(self, place: int) -> None:
        """Compare a server's lag with the age of the oldest message whose rows cannot be looked up yet."""
        markers = [np.arange(number, _ROWS, len(_SKEWS_S))[:_MARKERS] for number in range(len(_SKEWS_S))]
        with self._client(place) as client:
            while not self._ledger.stopped:
                time.sleep(_PUBLISH_PAUSE_S)
                disturbed = self._disturbed[place]
                if not self._up[place].is_set():
                    continue
                with suppress(httpx.TransportError, KeyError):  # the server, or its database, is away
                    before = self._age(client, markers)
                    tables = client.get("/v1/updates").json()["tables"]
                    after = self._age(client, markers)
                    lags = [table["lag_s"] for table in tables]
                    if self._disturbed[place] != disturbed or None in lags:  # unknown until the log has answered
                        continue
                    self._ledger.count(lags=1)
                    details = {"process": NAMES[place], "lags_s": lags, "before_s": before, "after_s": after}
                    # Beside the one that serves there may be one that is loaded, or one that it replaced.
                    if not any(after - LAG_WITHIN_S <= lag_s <= before + LAG_WITHIN_S for lag_s in lags):
                        self._ledger.violation("lag", **details)
                    if time.monotonic() - disturbed > _REACH_S and after > _REACH_S:
                        self._ledger.violation("behind", **details)

    def _age(self, client: httpx.Client, markers: list[Any]) -> float:
        """Age in seconds of the oldest message that is not visible; 0 if there is none."""
        published = [list(times) for times in self._published]  # before the question
        tables = client.post(f"/v1/models/{_MODEL}/lookup", json={"tables": {_TABLE: np.concatenate(markers).tolist()}}).json()
        applied = np.array(tables["tables"][_TABLE])[:, 2].reshape(len(markers), _MARKERS).min(axis=1).astype(int)
        now = time.monotonic()
        waiting = [times[last] for times, last in zip(published, applied, strict=True) if last < len(times)]
        return max((now - one for one in waiting), default=0.0)

    def _disturb(self) -> None:
        """Force deploys, kill a server while its peer deploys, stop the Redis of the rows: each as often as the others."""
        rng = np.random.default_rng(7)
        turn: list[Callable[[int, np.random.Generator], None]] = []
        while not self._ledger.stopped:
            due = time.monotonic() + _DISTURB_PAUSE_S
            while time.monotonic() < due and not self._ledger.stopped:
                time.sleep(0.2)
            kinds = (self._force, self._kill_beside_force, self._stop_rows)
            turn = turn or [kinds[number] for number in rng.permutation(len(kinds))]
            kind = turn.pop()
            self._ledger.note(event=f"peers: {kind.__name__[1:]}")
            kind(int(rng.integers(len(NAMES))), rng)

    def _force(self, place: int, _: np.random.Generator) -> None:
        try:
            with self._client(place) as client:
                answer = client.post(f"/v1/models/{_MODEL}/deploy", json={"force": True}, timeout=_START_S)
        except httpx.TransportError as error:
            self._ledger.violation("force", process=NAMES[place], error=repr(error)[:300])
            return
        self._ledger.count(forced=1)
        if answer.status_code != 200:
            self._ledger.violation("force", process=NAMES[place], status=answer.status_code, body=answer.text[:300])

    def _kill_beside_force(self, place: int, rng: np.random.Generator) -> None:
        """Kill a server, early or late in a forced deploy of its peer, and start it again."""
        other = 1 - place
        forcing = threading.Thread(target=self._force, args=(other, rng))
        forcing.start()
        time.sleep(rng.uniform(0, 1))
        self._up[place].clear()
        server = self._servers[place]
        children = children_of(server.pid)
        server.kill()
        server.wait()
        if left := left_over(children):
            self._ledger.violation("orphan", process=NAMES[place], count=len(left))
        self._start(place)
        forcing.join()

    def _stop_rows(self, _: int, rng: np.random.Generator) -> None:
        """The database does not answer for some seconds; the log does."""
        self._disturbed = [np.inf] * len(NAMES)
        self._rows.pause()
        time.sleep(rng.uniform(1, 5))
        self._rows.resume()
        self._disturbed = [time.monotonic()] * len(NAMES)


if __name__ == "__main__":
    Peers(Ledger(Path(sys.argv[1]), int(sys.argv[2]), "peers")).run()
