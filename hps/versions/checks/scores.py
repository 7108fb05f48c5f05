"""Compares the scores of two versions of a model for the same requests."""

import io
import json
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from hps.configuration.checks import ChecksConfig
from hps.configuration.networks import SAMPLES
from hps.engine.refresh import Pace
from hps.errors import HPSError, InvalidInputError, ModelFileError
from hps.models.manifest import read_small_file
from hps.models.sources import ModelSources
from hps.scoring.deployed import network_of_model
from hps.scoring.features import OFFSETS, arrays_of
from hps.scoring.signature import Feature, Signature
from hps.statistics.key_traces import read_traces
from hps.types import KeyArray, TableSpec
from hps.versions.checks.report import CheckBounds, CheckOutcome, FailurePolicy
from hps.versions.deployment import Deployment

REQUESTS: Final = "requests.jsonl"
"""Name of the requests beside a version."""

_MOST_BYTES: Final = 64 << 20
_MOST_SAMPLES: Final = 64  # of a made-up request
_LEAST_SCORES: Final = 32  # of fewer, chance decides
_LEAST_REQUESTS: Final = 100  # of fewer, the p99 is the slowest one
_MOST_REQUESTS: Final = 4096
_LINES_AT_ONCE: Final = 64
_TOP_SHARE: Final = 0.1

Arrays = Mapping[str, npt.NDArray[Any]]


@dataclass(frozen=True, slots=True)
class CheckRequests:
    """Requests to score with two versions. *Immutable.*

    Attributes:
        arrays: inputs by name, of each request.
        made_up: nobody sent them: keys of the tables, or features, are made up.
        random_features: features are, so that a network may be right to answer nothing for some.
        unknown: why the serving version cannot be asked them; empty if it can.
    """

    arrays: Sequence[Arrays]
    made_up: bool = False
    random_features: bool = False
    unknown: str = ""


class _Replay:
    """The answers of a version to requests. *One thread.*

    Attributes:
        shapes: of the outputs of each request, without the samples, by name.
        seconds: duration of each request.
    """

    def __init__(self, deployment: Deployment) -> None:
        self._scores = network_of_model(deployment.scores, deployment.config.model)
        self._deployment = deployment
        self._parts: dict[str, list[npt.NDArray[np.float64]]] = {}
        self.shapes: list[dict[str, tuple[int, ...]]] = []
        self.seconds: list[float] = []

    def ask(self, arrays: Arrays) -> None:
        """Score a request."""
        request = self._scores.read(arrays)
        start = time.perf_counter()
        found = self._scores.score(request, self._deployment.device(None), counted=False)
        self.seconds.append(time.perf_counter() - start)
        self.shapes.append({name: values.shape[1:] for name, values in found.items()})
        for name, values in found.items():
            self._parts.setdefault(name, []).append(np.asarray(values, np.float64).reshape(-1))

    def outputs(self) -> dict[str, npt.NDArray[np.float64]]:
        """Return the outputs by name, flat, of all requests."""
        return {name: np.concatenate(parts) for name, parts in self._parts.items()}


def read_recording(place: str, sources: ModelSources) -> bytes | None:
    """Read a file of requests or of requested keys; None if there is no such file.

    Raises:
        ModelFileError: it cannot be read, or is larger than 64 MB.
    """
    filesystem, path = sources.locate(place)
    read = read_small_file(filesystem, path, _MOST_BYTES)
    return None if read is None else read[0]


def keys_of_trace(content: bytes, place: str, model: str, tables: Sequence[TableSpec]) -> list[KeyArray]:
    """Return the keys of a model in a recording of `hps serve --record-trace`, by table, each as often as it was requested.

    Raises:
        ModelFileError: it is damaged, has hashes in place of keys, or no keys of the model.
    """
    traces = [trace for trace in read_traces(place, content) if trace.model == model]
    if any(trace.hashed for trace in traces):
        raise ModelFileError(
            f"reading {place}: it has hashes of the keys of model {model!r}, which no table has; record keys, "
            f"or write requests with `hps record {model}`"
        )
    keys = [[trace.keys for trace in traces if trace.table == table.table_name] for table in tables]
    if not any(map(len, keys)):
        raise ModelFileError(f"reading {place}: it has no keys of model {model!r}; write requests with `hps record {model}`")
    return [np.concatenate(found) if found else np.empty(0, np.int64) for found in keys]


def read_requests(content: bytes, place: str, signature: Signature, pace: Pace) -> CheckRequests:
    """Read requests: a line `{"inputs": {name: values}}` for each; of more than 4,096 lines as many, evenly spread.

    Features that a line lacks, since keys alone were recorded, are made up.

    Args:
        place: of the file, for errors.

    Raises:
        ModelFileError: a line is not a request.
    """
    requests: list[Arrays] = []
    lacks = False
    random = np.random.default_rng(1)
    step = 1 + content.count(b"\n") // _MOST_REQUESTS
    for number, line in enumerate(io.BytesIO(content)):
        if not number % _LINES_AT_ONCE:
            pace.rest()
        if number % step or not line.strip():
            continue
        try:
            arrays = arrays_of(signature.features, json.loads(line)["inputs"])
            names = [feature.name for feature in signature.features if feature.is_lookup and feature.name in arrays]
            counts = [len(arrays[bag]) - 1 if (bag := name + OFFSETS) in arrays else len(arrays[name]) for name in names]
            missing = [feature for feature in signature.features if _can_be_made_up(feature) and feature.name not in arrays]
            if counts and missing:
                sizes = {**signature.sizes, SAMPLES: max(counts)}
                arrays |= {feature.name: _made_up(feature, sizes, random) for feature in missing}
                lacks = True
            requests.append(arrays)
        except (AttributeError, InvalidInputError, KeyError, RecursionError, TypeError, ValueError) as error:
            raise ModelFileError(
                f'reading {place}, line {number + 1}: {error}; expected {{"inputs": {{name: values}}}}'
            ) from error
    return CheckRequests(requests, made_up=lacks, random_features=lacks)


def make_up_requests(
    signature: Signature, keys: Sequence[KeyArray], samples: int, max_samples: int, unknown: str = ""
) -> CheckRequests | str:
    """Make up requests, the same at each call; a text why it cannot be done.

    Args:
        keys: by table, (n,) int64 to choose from.
        unknown: see `CheckRequests`.
        samples: number of samples of all requests.
        max_samples: most samples of a request.
    """
    random = np.random.default_rng(2)
    tables = {feature.name: feature.table for feature in signature.features if feature.is_lookup}
    tables |= {lookup.keys.name: lookup.table for lookup in signature.lookups}
    for feature in signature.features:
        if feature.offsets_of >= 0:
            return f"input {feature.name!r} has offsets, which cannot be made up"
        if (table := tables.get(feature.name)) is not None and not keys[table].size:
            return f"there is no key for input {feature.name!r}"
    count = min(samples, max_samples, _MOST_SAMPLES)
    sizes = {**signature.sizes, SAMPLES: count}
    requests: list[Arrays] = []
    for _ in range(-(-samples // count)):
        arrays = {}
        for feature in signature.features:
            if (table := tables.get(feature.name)) is not None:
                arrays[feature.name] = random.choice(keys[table], feature.shape_with(sizes))
            elif not feature.index:
                arrays[feature.name] = _made_up(feature, sizes, random)
        requests.append(arrays)
    random_features = any(_can_be_made_up(feature) and feature.name not in tables for feature in signature.features)
    return CheckRequests(requests, made_up=True, random_features=random_features, unknown=unknown)


def _can_be_made_up(feature: Feature) -> bool:
    return not (feature.is_lookup or feature.index or feature.offsets_of >= 0)


def _made_up(feature: Feature, sizes: Mapping[str, int], random: np.random.Generator) -> npt.NDArray[Any]:
    """Make up a feature: random numbers, or zeros where they may be anything, such as categories."""
    shape = feature.shape_with(sizes)
    if np.dtype(feature.dtype).kind != "f":
        return np.zeros(shape, feature.dtype)
    return random.standard_normal(shape).astype(feature.dtype)


def compare_scores(
    new: Deployment,
    old: Deployment | None,
    requests: CheckRequests,
    config: ChecksConfig,
    policy: FailurePolicy,
    pace: Pace,
    until: float = math.inf,
) -> CheckOutcome:
    """Score the same requests with two versions, and compare the scores within the configured bounds.

    Args:
        old: None if no version serves: only whether the scores are finite is checked.
        until: time, by `time.monotonic`, after which the rest of more than a hundred requests is left out.
    """

    def outcome(text: str, *, failed: bool) -> CheckOutcome:
        return CheckOutcome(check="scores", outcome="failed" if failed else "skipped", policy=policy, text=text)

    if not requests.arrays:
        return outcome("there are no requests", failed=False)
    after, before = _Replay(new), None if old is None or old.scores is None or requests.unknown else _Replay(old)
    uncompared = "" if old is None else requests.unknown
    for number, arrays in enumerate(requests.arrays):
        if number >= _LEAST_REQUESTS and time.monotonic() > until:
            break
        try:
            if before is not None:
                before.ask(arrays)
        except HPSError as error:
            before, uncompared = None, f"the serving version refuses the requests: {error}"
        try:
            after.ask(arrays)
        except HPSError as error:
            fits = not uncompared or not isinstance(error, InvalidInputError)
            failed = before is not None or (fits and not requests.made_up)
            return outcome(str(error) if failed else uncompared or str(error), failed=failed)
        pace.rest()
    bounds = CheckBounds()
    finite = _finite(before, after)
    bounds.at_least("finite", finite, 1.0)
    if before is None:
        if finite and requests.random_features:
            uncompared = uncompared or bounds.text
            bounds.wrong.clear()
    elif before.shapes != after.shapes:
        bounds.wrong.append(f"outputs {after.shapes[0]}, expected {before.shapes[0]}, as the serving version's")
    else:
        _compare(before, after, requests, config, bounds)
        if not bounds.figures["scores"]:
            uncompared = f"fewer than {_LEAST_SCORES} scores, or all alike, in the serving version"
    found = bounds.outcome("scores", policy)
    return found.model_copy(update={"outcome": "skipped", "text": uncompared}) if uncompared and not bounds.wrong else found


def _finite(before: _Replay | None, after: _Replay) -> float:
    """Return the smallest share of finite scores of an output, of those that are finite in the serving version."""
    known = {} if before is None else before.outputs()
    shares = [1.0]
    for name, scores in after.outputs().items():
        old = known.get(name)
        expected = np.isfinite(old) if old is not None and old.shape == scores.shape else np.ones(scores.shape, np.bool_)
        if expected.any():
            shares.append(float(np.isfinite(scores[expected]).mean()))
    return min(shares)


def _compare(before: _Replay, after: _Replay, requests: CheckRequests, config: ChecksConfig, bounds: CheckBounds) -> None:
    new_outputs = after.outputs()
    judged = []
    for name, old in before.outputs().items():
        finite = np.isfinite(old)
        if np.count_nonzero(finite) >= _LEAST_SCORES and np.ptp(old[finite]) > 0:
            judged.append((old[finite], new_outputs[name][finite]))
    bounds.figures["scores"] = float(sum(old.size for old, _ in judged))
    if judged:
        # Made-up requests are unlike those that networks learned from, and unlike scores are expected: half the bound.
        least = config.scores.least_correlation * (0.5 if requests.made_up else 1.0)
        bounds.at_least("correlation", min(_correlation(old, new) for old, new in judged), least)
        bounds.at_least("overlap", min(_overlap(old, new) for old, new in judged), config.scores.least_overlap)
    old_ms, new_ms = (1000 * float(np.quantile(replay.seconds or [0.0], 0.99)) for replay in (before, after))
    bounds.figures["p99_ms"] = round(new_ms, 3)
    enough = len(after.seconds) >= _LEAST_REQUESTS
    bounds.at_most("p99_factor", new_ms / max(old_ms, 1e-6), config.scores.most_p99_factor if enough else None)


def _correlation(old: npt.NDArray[np.float64], new: npt.NDArray[np.float64]) -> float:
    """Return Pearson's correlation of the scores; 0 if the new ones are all alike, or not finite."""
    if not np.isfinite(new).all() or np.ptp(new) == 0:
        return 0.0
    return float(np.corrcoef(old, new)[0, 1])


def _overlap(old: npt.NDArray[np.float64], new: npt.NDArray[np.float64]) -> float:
    """Return the share of the highest tenth of the old scores that is in the highest tenth of the new ones."""
    count = max(1, int(_TOP_SHARE * old.size))
    return float(np.isin(np.argsort(-old, kind="stable")[:count], np.argsort(-new, kind="stable")[:count]).mean())
