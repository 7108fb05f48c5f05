"""The engine's side of the frontends: publishes models and settings, and answers requests that the loops hand over."""

import json
import logging
import math
import os
import secrets
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import asdict, replace
from functools import partial
from typing import Any, Final

import numpy as np

from hps.cache.base import BatchDriver
from hps.configuration.load import ServiceConfig
from hps.engine.session import CachedSession
from hps.errors import HPSError, InvalidInputError, NetworkError, NotReadyError, WorkspaceTimeoutError
from hps.ground.kernels.numba_kernels import compile_kernels
from hps.ground.threads.workers import new_thread
from hps.parameter_server import HPS
from hps.regions import layout
from hps.regions.exchange import H_DEPLOYMENT_ID, H_FLAGS, H_SCRATCH, H_SCRATCH_BYTES
from hps.regions.layout import ANSWERED, FAILED, MALFORMED, POOLED, RETIRED, SCORED, TRACED, FrontendDescriptors, Memory
from hps.regions.loop_state import ENGINE_KERNELS, HandedOverRequest, LoopState
from hps.scoring.batching import ScoreCall
from hps.scoring.packing import PackedRequest
from hps.scoring.scorer import Outputs, Request, ScoreTimes
from hps.serve.engine.lifecycle import Lifecycle
from hps.serve.http.http_answer import release_frames, status_of
from hps.serve.http.http_metrics import are_figures
from hps.serve.http.shared_memory import SharedMemoryRegistry
from hps.statistics.tracing import LookupTrace, current, traced
from hps.tensors.bags import Bags, pooling_of
from hps.tensors.batch import Batch
from hps.versions.deployment import Deployment
from hps.versions.tiers import batch_answers

_log = logging.getLogger(__name__)
_SETTLE_S: Final = 0.1
_PROGRESS_S: Final = 0.5  # between two snapshots that report progress
_MOST_MESSAGE = 1500


class _Served:
    """A deployment on one device, under the id that frontends use. *Thread-safe.*"""

    def __init__(
        self,
        deployment: Deployment,
        device: int,
        loop_states: Sequence[LoopState],
        drivers: Sequence[BatchDriver],
        changed: Callable[[], None],
    ) -> None:
        self.deployment = deployment
        self.device = device
        self.published = _published(deployment)
        self._loop_states = loop_states
        self._drivers = drivers
        self._changed = changed
        session = deployment.sessions[device]
        self._session = session if isinstance(session, CachedSession) else None
        self._ended = False
        self._settling = threading.Lock()
        self.deployment_id = 0
        if self._session is not None:
            self._session.before_close.append(self.end)
            self._session.on_loss.append(changed)
        cache = None if self._session is None else self._session.cache
        (self.deployment_id,) = {
            loop_state.add(deployment.tables, None if cache is None else driver.resident(cache))
            for loop_state, driver in zip(loop_states, drivers, strict=True)
        }
        with self._settling:
            ended, self._ended = self._ended, False
        if deployment.aging is not None:
            deployment.aging.watch(self._trust_until)
        if ended:  # the session has closed meanwhile, and its cache may be gone; no frontend knows the id yet
            self.end(0.0)
            raise NotReadyError(f"serving model {deployment.config.model!r}: it was undeployed")

    def _trust_until(self, valid_until_ns: int) -> None:
        """Answer without Python only until then, by `time.time_ns`; see `RowAging`."""
        until_ns = time.perf_counter_ns() + valid_until_ns - time.time_ns()
        for loop_state in self._loop_states:
            loop_state.trust_until(self.deployment_id, until_ns)

    def end(self, timeout_s: float) -> bool:
        """Remove the deployment from every loop. Return False if one is still using it."""
        if not self.deployment_id:
            self._ended = True
            return True
        # A loop counts itself in and then compares the id again. The id is cleared before the counts are read, so a loop that
        # is not counted finds no id and leaves the cache alone: once all are idle, the session may free it.
        deadline = time.monotonic() + timeout_s
        for loop_state in self._loop_states:
            loop_state.retire(self.deployment_id)
        while not all(loop_state.is_idle(self.deployment_id) for loop_state in self._loop_states):
            if time.monotonic() > deadline:
                return False
            time.sleep(0.0005)
        self.settle()
        with self._settling:
            ended, self._ended = self._ended, True
        if not ended:
            for driver in self._drivers:
                if self._session is not None:
                    driver.release(self._session.cache)
            for loop_state in self._loop_states:
                loop_state.release(self.deployment_id)
            self._changed()  # there is room for a deployment that was left out
        return True

    def settle(self) -> None:
        """Add the counts of the loops to the counters of the session."""
        if self._session is None:
            return
        with self._settling:
            if self._ended:
                return
            for loop_state in self._loop_states:
                tally = loop_state.tally(self.deployment_id)
                if any(tally.times) or any(map(any, tally.tables)):  # keys are counted before their request
                    self._session.count_answered(*tally)


class FrontendLink:
    """Connects a parameter server to the frontends. *Thread-safe.*

    Attributes:
        shared_memory: regions that clients have registered.
        tokens: entries of the file of tokens, for the snapshot.
    """

    def __init__(self, lifecycle: Lifecycle) -> None:
        self._lifecycle = lifecycle
        self.tokens: list[dict[str, Any]] = []
        self._memories: list[Memory] = []
        self._loop_states: list[LoopState] = []
        self._drivers: list[BatchDriver] = []
        self._served: dict[tuple[int, int], _Served] = {}  # by identity of the deployment, and device
        self._left_out: set[tuple[int, int]] = set()  # without room in a loop
        self._by_id: dict[int, _Served] = {}
        self._changing = threading.Lock()
        self._published: dict[str, Any] = {}
        self._settings: tuple[ServiceConfig | None, dict[str, Any]] = (None, {})
        self._figures: dict[int, dict[str, Any]] = {}
        self._closing, self._changed = threading.Event(), threading.Event()
        self._threads: list[threading.Thread] = []
        self._loops: list[threading.Thread] = []
        self._scored_events: list[int] = []  # by loop
        self._follower = new_thread("snapshot", self._follow)
        self.shared_memory = SharedMemoryRegistry(
            lambda: lifecycle.configuration.service.shared_memory_bytes, changed=self.publish
        )
        lifecycle.on_open.append(self._open)
        lifecycle.on_change.append(self.publish)
        lifecycle.unpublished = self._unpublished

    def connect(self, descriptors: FrontendDescriptors) -> None:
        """Map the memory shared with the frontends, and publish that nothing is answered yet."""
        compile_kernels(*ENGINE_KERNELS)
        self._memories = [layout.map_region(region) for region in descriptors.regions]
        self._snapshot = Memory(descriptors.snapshot)
        self._handed_over_event = os.eventfd(0, os.EFD_SEMAPHORE | os.EFD_CLOEXEC)
        loops, last_id = len(descriptors.loop_events), secrets.randbits(40)
        self._loop_states = [
            LoopState(
                self._memories[nth::loops],
                descriptors.events[nth::loops],
                event,
                self._handed_over_event,
                descriptors.spin_ns,
                last_id,
            )
            for nth, event in enumerate(descriptors.loop_events)
        ]
        threads = self._lifecycle.configuration.service.lookup_threads
        self._threads = [new_thread(f"lookup-{nth}", self._work) for nth in range(threads)]
        for memory in self._memories:
            memory[layout.ENGINE_EPOCH] = 0
        self.publish()
        self._follower.start()

    def _open(self, server: HPS) -> None:
        """Start to answer lookups of a parameter server. Its models are added later."""
        self._server = server
        self._drivers = [batch_answers(server.cache_class).batches(loop_state) for loop_state in self._loop_states]
        for nth, (driver, loop_state) in enumerate(zip(self._drivers, self._loop_states, strict=True)):
            driver.prepare()
            self._loops.append(new_thread(f"batches-{nth}", driver.run))
            event = os.eventfd(0, os.EFD_CLOEXEC)
            loop_state.take_scored(event)
            self._scored_events.append(event)
            self._threads.append(new_thread(f"scored-{nth}", partial(self._take_scored, loop_state, event)))
        for thread in [*self._loops, *self._threads]:
            thread.start()
        server.live.watchers.append(self.publish)
        server.metrics.settling.add(self.settle)
        server.rollouts.figures.add(self.rollout_figures)
        server.checked["regions of the frontends"] = self
        self.publish()

    def deployment_ids(self, deployment: Deployment) -> dict[int, int]:
        """Return the ids of a deployment, by device."""
        return dict(self._deployment_ids_of(deployment, self._served_on_devices(deployment)))

    def _served_on_devices(self, deployment: Deployment) -> list[_Served]:
        found = [self._served.get((id(deployment), device)) for device in self._devices(deployment)]
        return [served for served in found if served is not None]

    def _unpublished(self, *version: str) -> str:
        for nth, memory in enumerate(self._memories):
            if memory[layout.FRONTEND_EPOCH] != memory[layout.ENGINE_EPOCH]:
                return f"frontend {nth} is being connected"
        server, models, serving = self._lifecycle.opened, self._published.get("models", {}), self._published.get("serving", {})
        for deployment in server.live.all() if server is not None else ():
            name = deployment.config.model
            if version and version != (name, deployment.version):
                continue
            known, latest = models.get(name, {}).get(deployment.version), server.live.serving.get(name)  # type: ignore[union-attr]
            if known is None or (latest is not None and serving.get(name) != latest.version):
                return f"model {name!r} is being published to the frontends"
            if not known["deployment_ids"]:
                return f"model {name!r}: too many deployments are served"
        return ""

    def settle(self) -> None:
        for served in list(self._by_id.values()):
            served.settle()

    def figures(self) -> list[dict[str, Any]]:
        """Return the counts of each frontend, in order."""
        for nth, memory in enumerate(self._memories):
            found = layout.read_text(memory, layout.FIGURES, layout.FIGURES_BYTES - layout.TEXT_AT)
            if found is not None and are_figures(found[1]):  # else it is being written, or invalid
                self._figures[nth] = found[1]
        return [self._figures[nth] for nth in sorted(self._figures)]

    def rollout_figures(self) -> list[tuple[str, Sequence[float]]]:
        """Return the counts of rollouts of each frontend, with the id of their rollout."""
        return [counted for figures in self.figures() for counted in figures["rollouts"].items()]

    @property
    def answers_clients(self) -> bool:
        """Whether a frontend listens: it publishes counts from then on."""
        return bool(self.figures())

    def loop_figures(self) -> dict[str, int]:
        """Return the sums of `LoopState.figures`."""
        total: Counter[str] = Counter()
        for loop_state in self._loop_states:
            total.update(loop_state.figures)
        return total

    def check_integrity(self) -> list[str]:
        """Return a sentence for each broken invariant of the regions and of what loops work on."""
        return [finding for loop_state in self._loop_states for finding in loop_state.check_integrity()]

    def publish(self) -> None:
        """Write the snapshot: the models that frontends may name, and the settings."""
        with self._changing:
            server = self._lifecycle.opened
            deployments = server.live.all() if server is not None and self._loops else []
            for loop_state in self._loop_states:
                loop_state.hand_over_all(server is not None and server.records)
            left_out: set[tuple[int, int]] = set()
            present = {(id(deployment), device) for deployment in deployments for device in self._devices(deployment)}
            for deployment in deployments:
                for device in self._devices(deployment):
                    if (id(deployment), device) not in self._served:
                        try:
                            served = _Served(deployment, device, self._loop_states, self._drivers, self._changed.set)
                        except HPSError as error:
                            if (id(deployment), device) not in self._left_out:
                                _log.error("%s", error)
                            left_out.add((id(deployment), device))
                            continue
                        self._served[id(deployment), device] = served
                        self._by_id[served.deployment_id] = served
            self._left_out = left_out
            models: dict[str, dict[str, Any]] = {}
            for deployment in deployments:
                served_here = self._served_on_devices(deployment)
                models.setdefault(deployment.config.model, {})[deployment.version] = {
                    **(served_here[0].published if served_here else _published(deployment)),
                    "deployment_ids": self._deployment_ids_of(deployment, served_here),
                    "lost": [device for device, session in deployment.sessions.items() if session.lost],
                }
            latest = {} if server is None else server.live.serving
            loading = {} if server is None else {name: server.rollouts.loading(name) for name in latest}
            serving = {
                name: deployment.version for name, deployment in latest.items() if name in models and not loading.get(name)
            }
            rollouts = {} if server is None else server.rollouts.published()
            snapshot = {
                "models": models,
                "serving": serving,
                "rollouts": {
                    name: rollout
                    for name, rollout in rollouts.items()
                    if name in models and {rollout["version"], rollout["serving"]} <= models[name].keys()
                },
                "reasons": {
                    status.name: self._lifecycle.states.reason(status.name)
                    for status in self._lifecycle.states.models()
                    if status.name not in serving
                }
                | {name: reason for name, reason in loading.items() if reason},
                "blocked": self._lifecycle.blocked,
                "tokens": self.tokens,
                "settings": self._settings_of(self._lifecycle.configuration.service),
                "shared_memory": self.shared_memory.published(),
            }
            if snapshot != self._published and self._memories:
                layout.write_text(self._snapshot, 0, snapshot, self._snapshot.size - layout.TEXT_AT)
                self._published = snapshot
            # Only now: a frontend that read the previous snapshot may name a removed deployment until this one is written.
            for served in [self._served.pop(key) for key in list(self._served) if key not in present]:
                if served._session is None:  # a session with a cache ends it when it closes
                    served.end(0.0)
                self._by_id.pop(served.deployment_id, None)

    def _settings_of(self, service: ServiceConfig) -> dict[str, Any]:
        if self._settings[0] is not service:
            self._settings = service, service.model_dump(mode="json")
        return self._settings[1]

    @staticmethod
    def _devices(deployment: Deployment) -> list[int]:
        """Return one device of each session."""
        if deployment.one_device is not None:
            return [deployment.one_device]
        return list(deployment.sessions)

    @staticmethod
    def _deployment_ids_of(deployment: Deployment, served: Sequence[_Served]) -> list[tuple[int, int]]:
        """Return the id for each device that lookups may name."""
        if deployment.one_device is None or not served:
            return [(entry.device, entry.deployment_id) for entry in served]
        return [(device, served[0].deployment_id) for device in deployment.devices]

    def _follow(self) -> None:
        """Settle the counts, and write the snapshot for threads that cannot: those of a lookup or of a closing session."""
        # Everything that changes the snapshot pushes: deployments, blocks, models to load, recording, settings, tokens and
        # shared memory call `publish`; lost devices and freed ids set `_changed`, since their threads may hold locks that
        # `publish` needs. Only progress, which a reason reports while something is not ready, is a matter of time.
        refresh_at = 0.0
        while not self._closing.is_set():
            if changed := self._changed.wait(_SETTLE_S):
                self._changed.clear()
            now, known = time.monotonic(), self._published
            if changed or (now >= refresh_at and (known.get("blocked") or known.get("reasons"))):
                refresh_at = now + _PROGRESS_S
                self.publish()
            self.settle()

    def close(self, timeout_s: float) -> bool:
        """Stop the loops and threads. Return False if a lookup still runs."""
        self._closing.set()
        self._changed.set()
        for loop_state in self._loop_states:
            loop_state.stop()
        if self._threads:
            os.eventfd_write(self._handed_over_event, len(self._threads))
        for event in self._scored_events:
            os.eventfd_write(event, 1)
        deadline = time.monotonic() + timeout_s
        started = [thread for thread in (*self._threads, *self._loops, self._follower) if thread.ident is not None]
        for thread in started:
            thread.join(max(0.0, deadline - time.monotonic()))
        self.settle()
        if ended := not any(thread.is_alive() for thread in started):
            for driver in self._drivers:
                driver.close()
            self._memories = []
            for event in (self._handed_over_event, *self._scored_events):
                os.close(event)
        return ended

    # -- handed-over requests -----------------------------------------------------------------------------------------------

    def _work(self) -> None:
        while True:
            os.read(self._handed_over_event, 8)  # is retried after a signal, unlike os.eventfd_read
            for loop_state in self._loop_states:
                if (request := loop_state.next_request()) is not None:
                    self._answer(loop_state, request)
                    break
            else:
                if self._closing.is_set():
                    return

    def _take_scored(self, loop_state: LoopState, event: int) -> None:
        """Queue the requests for scores of one loop. None of them waits here."""
        while True:
            while (request := loop_state.next_scored()) is not None:
                if request.status == 0 and not int(request.header[H_FLAGS]) & SCORED:  # the frontend has changed it since
                    self._complete(loop_state, request, MALFORMED, 0)
                else:
                    self._answer(loop_state, request)
            if self._closing.is_set():
                return
            os.read(event, 8)

    def _answer(self, loop_state: LoopState, request: HandedOverRequest) -> None:
        memory, began = loop_state.memories[request.place], time.perf_counter_ns()
        status, deferred, scratch = request.status, 0, b""
        try:
            if status == 0:
                served = self._by_id.get(int(request.header[H_DEPLOYMENT_ID]))
                if served is None:
                    status = RETIRED
                elif int(request.header[H_FLAGS]) & SCORED:
                    self._score(served, loop_state, request, began)
                    return
                else:
                    status, deferred, scratch = self._lookup(served, memory, request)
        except Exception as error:  # noqa: BLE001 - the client gets an answer
            status, scratch = self._failure(error, int(request.header[H_DEPLOYMENT_ID]))
            release_frames(error)
        self._complete(loop_state, request, status, began, scratch, deferred)

    def _complete(
        self,
        loop_state: LoopState,
        request: HandedOverRequest,
        status: int,
        began: int,
        scratch: bytes = b"",
        deferred: int = 0,
    ) -> None:
        memory, at = loop_state.memories[request.place], request.slot >> 3
        words = memory.words
        if status != MALFORMED:
            room = int(request.header[H_SCRATCH_BYTES])
            if len(scratch) > room:
                scratch = b""
            start = int(request.header[H_SCRATCH])
            if scratch:
                memory.view[start : start + len(scratch)] = scratch
            words[at + layout.SCRATCH_USED // 8] = len(scratch)
            words[at + layout.DEFERRED // 8] = deferred
            words[at + layout.BEGAN_NS // 8] = began
            words[at + layout.ENDED_NS // 8] = time.perf_counter_ns()
        words[at + layout.STATUS // 8] = status
        loop_state.complete(request)

    def _score(self, served: _Served, loop_state: LoopState, request: HandedOverRequest, began: int) -> None:
        """Start to score a request. It is completed in this thread or another one."""
        memory, scores = loop_state.memories[request.place], served.deployment.scores
        if scores is None:
            raise InvalidInputError("scoring: got a model without a network")
        scratch = int(request.header[H_SCRATCH])
        described = scores.describe(bytes(memory.view[request.slot + layout.HEADER_BYTES : scratch]))
        start = layout.tensors_at(scratch + int(request.header[H_SCRATCH_BYTES]))
        if start + described.end > memory.size:
            raise InvalidInputError("scoring: a tensor does not fit in the memory of the frontend")
        packed = PackedRequest(described, memory.view, start, memory.address + start)
        score_request: Request = packed if described.samples else scores.unpack(packed)
        outputs = [(output.name, output.array(memory.view, start)) for output in described.outputs]
        if any(place.shape[:1] != (score_request.samples,) for _, place in outputs):
            raise InvalidInputError(f"scoring: got no room for {score_request.samples} samples")
        most_s = self._lifecycle.configuration.service.request_timeout_s
        due = began + min(1000 * described.timeout_us or math.inf, int(1e9 * most_s))  # the frontend answers 504 after that

        def done(answer: Outputs | Exception, times: ScoreTimes | None) -> None:
            try:
                if isinstance(answer, Exception):
                    raise answer
                for name, place in outputs:
                    if answer[name].shape != place.shape:  # NumPy would repeat one value
                        got = f"got output {name!r} of shape {list(answer[name].shape)}, expected {list(place.shape)}"
                        raise NetworkError(f"scoring: {got}, which follows from the sizes of the request")
                    place[...] = answer[name]
                self._complete(loop_state, request, ANSWERED, began if times is None else times.began_ns)
            except Exception as error:  # noqa: BLE001 - the client gets an answer
                status, scratch = self._failure(error, int(request.header[H_DEPLOYMENT_ID]))
                release_frames(error)
                self._complete(loop_state, request, status, began, scratch)

        scores.submit(ScoreCall(score_request, done, int(due)), served.device, most_s)

    def _lookup(self, served: _Served, memory: Memory, request: HandedOverRequest) -> tuple[int, int, bytes]:
        deployment, flags = served.deployment, int(request.header[H_FLAGS])
        bags: list[Any] = [None] * len(request.segments)
        if flags & POOLED:
            start, size = int(request.header[H_SCRATCH]), int(request.header[H_SCRATCH_BYTES])
            text = bytes(memory.view[start : start + size]).partition(b"\0")[0]
            bags = json.loads(text)
            if not isinstance(bags, list) or len(bags) != len(request.segments):
                raise InvalidInputError("reading bags: got another number of them than of tables")
        each = zip(request.segments.tolist(), bags, strict=True)
        batch = Batch.merged([_batch_of(deployment, memory, request.slot, words, pooled) for words, pooled in each])
        before = current.deferred
        trace: LookupTrace | None
        with traced() if flags & TRACED else nullcontext() as trace:
            self._server.lookup_batch(deployment, batch, served.device)
        scratch = b""
        if trace is not None:
            spans = [(span.stage, span.table, span.began_ns, span.ended_ns, span.keys) for span in trace.spans]
            scratch = json.dumps(
                {"tables": {name: asdict(table) for name, table in trace.tables.items()}, "spans": spans}
            ).encode()
        return ANSWERED, current.deferred - before, scratch

    def _failure(self, error: Exception, deployment_id: int) -> tuple[int, bytes]:
        if isinstance(error, NotReadyError):
            served = self._by_id.get(deployment_id)
            server = self._lifecycle.opened
            if served is None or server is None or served.deployment not in server.live.all():
                return RETIRED, b""
        if isinstance(error, HPSError):
            message = str(error)
        elif isinstance(error, MemoryError):
            message = "not enough memory for the answer; send fewer keys at once"
        else:
            message = "internal error; the log of the service has the details"
            _log.error("answering a lookup failed unexpectedly", exc_info=error)
        reason = "workspaces" if isinstance(error, WorkspaceTimeoutError) else ""
        found = {"status": status_of(error), "message": message[:_MOST_MESSAGE], "reason": reason}
        return FAILED, json.dumps(found).encode()


def _published(deployment: Deployment) -> dict[str, Any]:
    """Return what a snapshot has of a deployment; it does not change."""
    network = None
    if (scores := deployment.scores) is not None and (dense := deployment.config.dense) is not None:
        network = {
            "dense": dense.model_dump(mode="json", exclude_defaults=True),
            "outputs": [asdict(output) for output in scores.opened.outputs],
            "max_samples": scores.max_samples,
        }
    tables = [asdict(replace(table, share=None)) for table in deployment.tables]  # frontends know no shares
    transform = None if (of := deployment.config.transform) is None else of.model_dump(mode="json")
    return {
        "tables": tables,
        "keys_per_sample": deployment.keys_per_sample,
        "network": network,
        "transform": transform,
    }


def _batch_of(deployment: Deployment, memory: Memory, slot: int, words: list[int], bags: dict[str, Any] | None) -> Batch:
    """Make a batch of one table in a region. Its descriptor was checked, its bags were not."""
    table, n, keys_at, out_at, found_at = words
    dim = deployment.dims[table]
    keys = (
        memory.bytes[keys_at : keys_at + 8 * n].view(np.int64).copy()
    )  # a lookup reads them more than once, and the frontend may write to them meanwhile
    found = memory.bytes[found_at : found_at + n].view(np.bool_) if found_at else None
    if bags is None:
        out = memory.bytes[out_at : out_at + 4 * dim * n].view(np.float32).reshape(n, dim)
        return Batch.of(table, keys, out, found)
    count = bags["count"]
    arrays = {name: _array(memory, slot, *bags[name]) for name in ("offsets", "weights") if name in bags}
    shaped = keys if "offsets" in arrays else keys.reshape(count, bags["hotness"])
    last = "offsets" not in arrays or arrays["offsets"].size == count + 1
    options = {"combiner": bags["combiner"], "max_norm": bags["max_norm"], "padding_key": bags["padding_key"]}
    described = Bags(shaped, arrays.get("offsets"), arrays.get("weights"), include_last_offset=last, **options)
    pooling = pooling_of(deployment.tables[table].table_name, described, n, shaped.shape, on_cuda=False)
    strides = bags["strides"] or [4 * dim, 4]
    if not (0 < strides[0] <= 1 << 20 and strides[0] % 4 == 0 and strides[1] == 4 and strides[0] >= 4 * dim):
        raise InvalidInputError(f"reading bags: got strides {strides}")
    size = strides[0] * (pooling.count - 1) + 4 * dim if pooling.count else 0
    if out_at + size > memory.size:
        raise InvalidInputError("reading bags: their vectors do not fit")
    pooled = np.ndarray((pooling.count, dim), np.float32, memory.view, out_at, strides)
    return Batch.of(table, keys, pooled, pooling=pooling)


def _array(memory: Memory, slot: int, at: int, size: int, dtype: str) -> Any:
    """Copy an array that a frontend describes."""
    kind = np.dtype(dtype)
    start = slot + at
    if kind.kind not in "if" or not (start >= 0 and 0 <= size <= memory.size and start + size * kind.itemsize <= memory.size):
        raise InvalidInputError("reading bags: an array does not fit")
    return memory.bytes[start : start + size * kind.itemsize].view(kind).copy()
