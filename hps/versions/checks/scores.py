"""Compares the scores of two versions of a model for the same requests."""

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

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
from hps.versions.checks.report import Bounds, CheckOutcome, FailurePolicy
from hps.versions.deployment import Deployment

REQUESTS: Final = "requests.jsonl"
"""Name of the requests beside a version."""

_MOST_BYTES: Final = 64 << 20
_MOST_SAMPLES: Final = 64  # of a made-up request
_LEAST_SCORES: Final = 32  # of fewer, chance decides
_LEAST_REQUESTS: Final = 100  # of fewer, the p99 is the slowest one
_TOP_SHARE: Final = 0.1

Arrays = Mapping[str, npt.NDArray[Any]]


@dataclass(frozen=True, slots=True)
class CheckRequests:
    """Requests to score with two versions. *Immutable.*

    Attributes:
        arrays: inputs by name, of each request.
        made_up: nobody sent them: keys of the tables, and random features.
    """

    arrays: Sequence[Arrays]
    made_up: bool


class _Answers(NamedTuple):
    outputs: dict[str, npt.NDArray[np.float64]]  # by name, flat, of all requests
    shapes: list[dict[str, tuple[int, ...]]]
    seconds: list[float]


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


def read_requests(content: bytes, place: str, signature: Signature) -> CheckRequests:
    """Read requests: a line `{"inputs": {name: values}}` for each.

    Features that a line lacks, since keys alone were recorded, are made up.

    Args:
        place: of the file, for errors.

    Raises:
        ModelFileError: a line is not a request.
    """
    requests: list[Arrays] = []
    lacks = False
    random = np.random.default_rng(1)
    for number, line in enumerate(content.splitlines(), 1):
        try:
            if not line.strip():
                continue
            arrays = arrays_of(signature.features, json.loads(line)["inputs"])
            names = [feature.name for feature in signature.features if feature.is_lookup and feature.name in arrays]
            counts = [len(arrays[bag]) - 1 if (bag := name + OFFSETS) in arrays else len(arrays[name]) for name in names]
            missing = [feature for feature in signature.features if _can_be_made_up(feature) and feature.name not in arrays]
            if counts and missing:
                sizes = {**signature.sizes, SAMPLES: max(counts)}
                arrays |= {feature.name: _made_up(feature, sizes, random) for feature in missing}
                lacks = True
            requests.append(arrays)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError, InvalidInputError) as error:
            raise ModelFileError(f'reading {place}, line {number}: {error}; expected {{"inputs": {{name: values}}}}') from error
    return CheckRequests(requests, made_up=lacks)


def make_up_requests(signature: Signature, keys: Sequence[KeyArray], samples: int, max_samples: int) -> CheckRequests | str:
    """Make up requests, the same at each call; a text why it cannot be done.

    Args:
        keys: by table, (n,) int64 to choose from.
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
            return f"the versions have no key of input {feature.name!r} in common"
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
    return CheckRequests(requests, made_up=True)


def _can_be_made_up(feature: Feature) -> bool:
    return not (feature.is_lookup or feature.index or feature.offsets_of >= 0)


def _made_up(feature: Feature, sizes: Mapping[str, int], random: np.random.Generator) -> npt.NDArray[Any]:
    """Make up a feature: random numbers, or zeros where they may be anything, such as categories."""
    shape = feature.shape_with(sizes)
    if np.dtype(feature.dtype).kind != "f":
        return np.zeros(shape, feature.dtype)
    return random.standard_normal(shape).astype(feature.dtype)


def compare_scores(
    new: Deployment, old: Deployment | None, requests: CheckRequests, config: ChecksConfig, policy: FailurePolicy, pace: Pace
) -> CheckOutcome:
    """Score the same requests with two versions, and compare the scores within the configured bounds.

    Args:
        old: None if no version serves: only whether the scores are finite is checked.
    """

    def outcome(text: str, *, failed: bool) -> CheckOutcome:
        return CheckOutcome(check="scores", outcome="failed" if failed else "skipped", policy=policy, text=text)

    try:
        before = None if old is None or old.scores is None else _answers(old, requests, pace)
    except HPSError as error:
        return outcome(f"the serving version refuses the requests: {error}", failed=False)
    try:
        after = _answers(new, requests, pace)
    except HPSError as error:
        return outcome(str(error), failed=not requests.made_up or before is not None)
    bounds = Bounds()
    finite = min((float(np.isfinite(scores).mean()) for scores in after.outputs.values() if scores.size), default=1.0)
    bounds.at_least("finite", finite, 1.0)
    if before is not None and before.shapes != after.shapes:
        bounds.wrong.append(f"outputs {after.shapes[0]}, expected {before.shapes[0]}, as the serving version's")
    elif before is not None:
        _compare(before, after, requests, config, bounds)
        if not bounds.figures.get("scores"):
            return outcome(f"fewer than {_LEAST_SCORES} scores, or all alike, in the serving version", failed=False)
    return bounds.outcome("scores", policy)


def _compare(before: _Answers, after: _Answers, requests: CheckRequests, config: ChecksConfig, bounds: Bounds) -> None:
    judged = {
        name: (old, after.outputs[name])
        for name, old in before.outputs.items()
        if old.size >= _LEAST_SCORES and np.ptp(old) > 0
    }
    bounds.figures["scores"] = float(sum(old.size for old, _ in judged.values()))
    if judged:
        # Made-up requests are unlike those that networks learned from, and unlike scores are expected: half the bound.
        least = config.scores.least_correlation * (0.5 if requests.made_up else 1.0)
        bounds.at_least("correlation", min(_correlation(old, new) for old, new in judged.values()), least)
        bounds.at_least("overlap", min(_overlap(old, new) for old, new in judged.values()), config.scores.least_overlap)
    old_ms, new_ms = (1000 * float(np.quantile(answers.seconds, 0.99)) for answers in (before, after))
    bounds.figures["p99_ms"] = round(new_ms, 3)
    enough = len(requests.arrays) >= _LEAST_REQUESTS
    bounds.at_most("p99_factor", new_ms / max(old_ms, 1e-6), config.scores.most_p99_factor if enough else None)


def _answers(deployment: Deployment, requests: CheckRequests, pace: Pace) -> _Answers:
    scores = network_of_model(deployment.scores, deployment.config.model)
    outputs: dict[str, list[npt.NDArray[np.float64]]] = {}
    shapes, seconds = [], []
    for arrays in requests.arrays:
        request = scores.read(arrays)
        start = time.perf_counter()
        found = scores.score(request, deployment.device(None), counted=False)
        seconds.append(time.perf_counter() - start)
        shapes.append({name: values.shape[1:] for name, values in found.items()})
        for name, values in found.items():
            outputs.setdefault(name, []).append(np.asarray(values, np.float64).reshape(-1))
        pace.rest()
    return _Answers({name: np.concatenate(parts) for name, parts in outputs.items()}, shapes, seconds or [0.0])


def _correlation(old: npt.NDArray[np.float64], new: npt.NDArray[np.float64]) -> float:
    """Return Pearson's correlation of the scores; 0 if the new ones are all alike, or not finite."""
    if not np.isfinite(new).all() or np.ptp(new) == 0:
        return 0.0
    return float(np.corrcoef(old, new)[0, 1])


def _overlap(old: npt.NDArray[np.float64], new: npt.NDArray[np.float64]) -> float:
    """Return the share of the highest tenth of the old scores that is in the highest tenth of the new ones."""
    count = max(1, int(_TOP_SHARE * old.size))
    return float(np.isin(np.argsort(-old, kind="stable")[:count], np.argsort(-new, kind="stable")[:count]).mean())
