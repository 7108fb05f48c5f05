"""The network of a deployment, on each of its devices."""

import logging
import math
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from hps.configuration.load import ModelConfig
from hps.configuration.networks import DenseConfig
from hps.engine.session import Session
from hps.errors import ConfigError, HPSError, NetworkError, NotReadyError, UnknownModelError
from hps.ground.memory.bounded_cache import BoundedCache
from hps.ground.registry import implementation
from hps.ground.threads.open_calls import OpenCalls
from hps.networks.base import Network
from hps.scoring.batching import Batcher, ScoreCall
from hps.scoring.features import ScoreInputs, read_request
from hps.scoring.network_calls import NetworkCalls, bounded
from hps.scoring.packing import Description, PackedRequest, read_description
from hps.scoring.recording import RequestRecorder
from hps.scoring.scorer import Outputs, Request, Scorer
from hps.scoring.signature import Feature, Output, Signature, signature_of
from hps.statistics.scores import ScoreCounters
from hps.statistics.tracing import current
from hps.tensors.batch import Batch
from hps.types import TableSpec

_log = logging.getLogger(__name__)
_DESCRIBED_BYTES = 42  # at most, of what is read of a description, for each of its characters


class OpenedNetwork:
    """A version's network on its devices. *Thread-safe.* Reused by successive deployments of the version.

    Args:
        contents: of its files, by their names in `dense`.
        fingerprint: of its files.
        devices: CUDA devices that answer lookups; empty: the CPU does.

    Attributes:
        signature: its inputs.
        outputs: its outputs.
        on_device: whether it runs on the devices that look up.

    Raises:
        ModelFileError: as of `Network.open`. NetworkError: it does not run, its outputs are wrong, or it has not ended a trial
            on each device within `dense.open_timeout_s`.
        DeviceMemoryError, DeviceError: as of `Network.open`.
    """

    def __init__(
        self, config: ModelConfig, dense: DenseConfig, contents: Mapping[str, bytes], fingerprint: str, devices: Sequence[int]
    ) -> None:
        engine: type[Network] = implementation("network", dense.format)
        self.fingerprint = fingerprint
        self.signature: Signature = signature_of(dense, config.tables)
        if devices and engine.on_cuda and dense.instances > 1:
            raise ConfigError(
                f"the network of model {config.model!r}",
                [f"dense.instances: got {dense.instances}, expected 1: a device runs one batch of a network after another"],
            )
        self.on_device = bool(devices) and engine.on_cuda
        self.networks: dict[int | None, NetworkCalls] = {}
        self.outputs: tuple[Output, ...] = ()
        self._changing = threading.Lock()
        self._closed = False

        def open_all() -> None:
            programs = [(dense.file, self.signature.tensors(), dense.outputs)]
            for keys_config, program in zip(dense.keys, self.signature.programs, strict=True):
                programs.append((keys_config.file, self.signature.inputs_of(program), keys_config.outputs))
            for device in devices if self.on_device else [None]:
                opened: list[Network] = []
                try:
                    for name, tensors, outputs in programs:
                        opened.append(engine.open(name, contents[name], tensors, outputs, device))
                except BaseException:
                    for part in opened:
                        part.close()
                    raise
                network = self._add(device, NetworkCalls(opened[0], opened[1:]))
                scorer = Scorer(config.model, config.tables, self.signature, network, no_lookup, on_device=self.on_device)
                self.outputs = scorer.try_out()

        try:
            doing = f"opening the network {dense.file} of model {config.model!r}, and trying it on zeros"
            bounded(dense.open_timeout_s, doing, open_all)
        except BaseException:
            self.close()
            raise

    @property
    def features(self) -> tuple[Feature, ...]:
        return self.signature.features

    def _add(self, device: int | None, calls: NetworkCalls) -> NetworkCalls:
        with self._changing:
            if not self._closed:
                self.networks[device] = calls
                return calls
        calls.close()
        raise NotReadyError(f"opening the network {self.fingerprint}: its deployment was aborted")

    def close(self) -> None:
        """Free the networks, those in use after their last calls. No deployment may use them any more. Idempotent."""
        with self._changing:
            self._closed = True
            networks = list(self.networks.values())
            self.networks.clear()
        for network in networks:
            network.close()


def no_lookup(batch: Batch) -> None:
    """Replace the lookups of a network that runs on zeros."""
    raise NotImplementedError


class DeploymentScores:
    """Scores of one deployment. *Thread-safe.*

    Args:
        sessions: by device; on the CPU all devices have the same.

    Attributes:
        recorder: keeps a sample of the requests; None if the configuration does not allow it.
    """

    def __init__(
        self,
        opened: OpenedNetwork,
        config: ModelConfig,
        dense: DenseConfig,
        tables: Sequence[TableSpec],
        sessions: Mapping[int, Session],
        counters: ScoreCounters,
    ) -> None:
        self.opened = opened
        self._name = f"model {config.model!r}, version {config.version}"
        self._model = config.model
        self.max_samples = config.max_batch_size
        self._counters = counters
        self._calls = OpenCalls(f"scoring with {self._name}")
        made: dict[int, list[Scorer]] = {}
        self._scorers: dict[int, Scorer] = {}
        for device, session in sessions.items():
            network = opened.networks[device if opened.on_device else None]
            if id(session) not in made:
                made[id(session)] = [
                    Scorer(
                        config.model,
                        tables,
                        opened.signature,
                        network,
                        session.run,
                        session.graph_lookups,
                        on_device=opened.on_device,
                        refuse_nan=dense.refuse_nan,
                        max_samples=config.max_batch_size,
                        outputs=opened.outputs,
                    )
                    for _ in range(dense.instances)
                ]
                for scorer in made[id(session)]:
                    bounded(dense.open_timeout_s, f"warming up the network of {self._name}", scorer.warm)
            self._scorers[device] = made[id(session)][0]
        self._instances = [scorer for scorers in made.values() for scorer in scorers]
        self._described = BoundedCache(
            partial(read_description, signature=opened.signature, max_samples=config.max_batch_size, model=config.model),
            lambda _, text: 4000 + _DESCRIBED_BYTES * len(text),
        )
        alone = not (dense.dynamic_batching and opened.signature.merges)
        delay_us = 0 if alone else dense.max_queue_delay_us
        self._joins = opened.on_device and not alone
        batchers = {
            id(scorers[0]): Batcher(self._name, scorers, counters, config.max_batch_size, delay_us, alone=alone)
            for scorers in made.values()
        }
        self._batchers = {device: batchers[id(scorer)] for device, scorer in self._scorers.items()}
        self.recorder: RequestRecorder | None = None
        if (checks := config.checks).record != "off":
            self.recorder = RequestRecorder(
                opened.signature,
                config.max_batch_size,
                config.model,
                checks.record_requests,
                features=checks.record == "features",
            )

    def read(self, arrays: Mapping[str, npt.NDArray[Any]]) -> ScoreInputs:
        """Check the inputs of a request; see `read_request`."""
        return read_request(self.opened.signature, arrays, self.max_samples, self._model)

    def describe(self, text: bytes) -> Description:
        """Read the description of a request in shared memory; see `read_description`."""
        return self._described(text)

    def unpack(self, request: PackedRequest) -> ScoreInputs:
        """Copy the values of a request in shared memory, and check them; see `read_request`."""
        return request.unpacked(self.opened.signature, self.max_samples, self._model)

    def score(self, request: Request, device: int, *, counted: bool = True) -> Outputs:
        """Score one request: by itself, or on a device that is in use with others that wait for it.

        Args:
            counted: count it in the metrics, and record it if so configured; not for the requests of checks, each by itself,
                which get scores that are not numbers, too.

        Raises:
            NotReadyError: the deployment is closed. NetworkError: the network failed. HPSError: a tier failed.
        """
        with self._calls:
            if not request.samples:
                return self._of_no_samples(request)
            if counted and self.recorder is not None:
                self.recorder.see(request)
            scorer, batcher = self._scorers[device], self._batchers[device]
            # A trace belongs to the thread that looks up.
            if counted and self._joins and (scorer.is_busy or batcher.is_busy) and current.trace is None:
                with suppress(NotReadyError):  # the batcher closes before these calls have ended
                    return batcher.score(request)
            try:
                (answer,), times = scorer.score([request], refuse_nan=counted)
            except NetworkError:
                if counted:
                    self._counters.count_failure("network")
                raise
            if counted:
                looked_up_ns, ran_ns = times.looked_up_ns - times.began_ns, times.ended_ns - times.looked_up_ns
                self._counters.count(1, request.samples, looked_up_ns, ran_ns)
            if isinstance(answer, HPSError):
                if counted:
                    self._counters.count_failure("nan")
                raise answer
            return answer

    def submit(self, call: ScoreCall, device: int, most_s: float = math.inf) -> None:
        """Score a request with others, or by itself where batches are off; `call.done` gets the scores.

        Args:
            most_s: as for `Batcher.submit`.

        Raises:
            NotReadyError: the deployment is closed, or too many requests wait. NetworkBusyError: see `Batcher.submit`.
        """
        if not call.request.samples:
            call.done(self._of_no_samples(call.request), None)
            return
        if self.recorder is not None:
            self.recorder.see(call.request)
        self._batchers[device].submit(call, most_s)

    def _of_no_samples(self, request: Request) -> Outputs:
        """Answer a request without samples; the network may not run with none."""
        return {output.name: np.empty((0, *output.shape_with(request.sizes)), output.dtype) for output in self.opened.outputs}

    def refuse_if_busy(self, most_s: float) -> None:
        """Check that no device's batch has been in the network for longer than `most_s`.

        Raises:
            NetworkBusyError: one has.
        """
        for batcher in dict.fromkeys(self._batchers.values()):
            batcher.refuse_if_busy(most_s)

    def close(self, timeout_s: float) -> bool:
        """Refuse further requests, and wait for running ones. Return False if they take longer and may still look up.

        Calls that spent the entire timeout in the network are abandoned: they need no tier any more.
        """
        until = time.monotonic() + timeout_s
        ended = [batcher.close(max(0.0, until - time.monotonic())) for batcher in dict.fromkeys(self._batchers.values())]
        if not (self._calls.close(max(0.0, until - time.monotonic())) and all(ended)):
            seconds = [second for scorer in self._instances for second in scorer.network_seconds().values()]
            if not seconds or min(seconds) < timeout_s:
                return False
            _log.warning("scoring with %s: its network has not returned for %.1f s; it is abandoned", self._name, min(seconds))
        for scorer in self._instances:
            scorer.release()
        return True


def network_of_model(scores: DeploymentScores | None, model: str) -> DeploymentScores:
    """Return the scores of a deployment.

    Raises:
        UnknownModelError: its model has no network.
    """
    if scores is None:
        raise UnknownModelError(f"scoring with model {model!r}: it has no network; configure `dense`, or look its vectors up")
    return scores
