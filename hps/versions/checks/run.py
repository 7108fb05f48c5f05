"""Runs the checks of a version between its load and its takeover, at a fifth of a core and within a limit."""

import io
import logging
import time
import zipfile
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import wait
from dataclasses import dataclass, field
from typing import Final, cast

import numpy as np

from hps.engine.refresh import Pace
from hps.errors import HPSError, ModelFileError
from hps.ground.threads.pacing import paced
from hps.ground.threads.workers import Stop, call_in_thread
from hps.models.manifest import read_small_file, within
from hps.models.sources import ModelSources
from hps.statistics.key_traces import TRACE_MAGIC
from hps.types import KeyArray, TableSpec
from hps.versions.checks.report import CHECKS, CheckBounds, CheckName, CheckOutcome, CheckReport, FailurePolicy
from hps.versions.checks.rows import CachedRows, SampledRows, StoredRows, compare_rows, first_rows_of, sample_rows
from hps.versions.checks.scores import (
    REQUESTS,
    CheckRequests,
    compare_scores,
    keys_of_trace,
    make_up_requests,
    read_recording,
    read_requests,
)
from hps.versions.deployment import DRAIN_S, Deployment

_log = logging.getLogger(__name__)

EXPECTED: Final = "expected.npz"
"""Name of the author's answers beside a version."""

_SHARE: Final = 0.15  # of a core, so that it is at most a fifth with what sleeping costs
_MOST_ROWS: Final = 1 << 17  # sampled of all tables
_LEAST_ROWS: Final = 512  # sampled of each
_MOST_BYTES: Final = 64 << 20
_MOST_INFLATED_BYTES: Final = 256 << 20
_OF_ROWS: Final[tuple[CheckName, ...]] = ("keys", "norms", "vectors")
_OF_TABLES: Final[tuple[CheckName, ...]] = ("finite", *_OF_ROWS)
_NO_KEYS: Final = np.empty(0, np.int64)
_STEP_S: Final = 0.05


class _LateError(Exception):
    """The time for the checks is over. No `HPSError`: the checks catch those."""


@dataclass
class VersionCheck:
    """The checks of one version. *One use.*

    Args:
        new: loaded, and not in service yet.
        old: the version that serves; None if none does, so that there is nothing to compare with.
        place: the version's directory; empty if it has none.
        proceed: called meanwhile; raises to end the checks.
    """

    new: Deployment
    old: Deployment | None
    sources: ModelSources
    place: str = ""
    proceed: Callable[[], None] = lambda: None
    outcomes: list[CheckOutcome] = field(init=False, default_factory=list)

    def run(self) -> CheckReport:
        """Run the enabled checks, one after another.

        A check that cannot be made, or is not done in time, has failed: nothing then says that the version is good.

        Raises:
            Exception: that of `proceed`.
        """
        config, new = self.new.config.checks, self.new
        at, start = time.time(), time.monotonic()
        self._deadline = start + config.timeout_s
        self._stop = Stop()
        self._unknown = ""
        done = call_in_thread(f"check-{new.config.model}", self._run)
        try:
            while not wait([done], _STEP_S).done and time.monotonic() < self._deadline + _STEP_S:
                self.proceed()
        finally:
            # The thread reads tables that are dropped when the version is refused: it ends at its next pause.
            self._stop.set()
            wait([done], DRAIN_S)
        outcomes = list(self.outcomes)
        error = done.exception() if done.done() else _LateError()
        if isinstance(error, _LateError):
            outcomes += self._not_made(outcomes, f"not made within {config.timeout_s:g} s")
        elif error is not None:
            _log.error("checking version %s of model %r", new.version, new.config.model, exc_info=error)
            outcomes += self._not_made(outcomes, f"not made: {type(error).__name__}; the log has the details")
        return CheckReport(
            model=new.config.model,
            version=new.version,
            fingerprint=new.fingerprint,
            against="" if self.old is None else self.old.version,
            at=at,
            seconds=round(time.monotonic() - start, 3),
            checks=tuple(outcomes),
        )

    def _not_made(self, outcomes: Sequence[CheckOutcome], why: str) -> list[CheckOutcome]:
        """Return the outcomes of the checks that are missing: failed, unless no version would then serve."""
        made = Counter(found.check for found in outcomes)
        return [
            self._outcome(check, why, failed=self.old is not None)
            for check in CHECKS
            if self._applies(check) and made[check] < (len(self.new.tables) if check in _OF_TABLES else 1)
        ]

    def _run(self) -> None:
        # Where no version serves, there are no lookups to spare.
        pace = Pace(1.0 if self.old is None else _SHARE, self._rest)
        with paced():
            self._finite()
            keys = self._rows(pace)
            self._scores(keys, pace)
            self._expected(pace)

    def _rest(self, seconds: float) -> bool:
        if self._stop.wait(min(seconds, self._deadline - time.monotonic())) or time.monotonic() >= self._deadline:
            raise _LateError
        return False

    def _policy(self, check: CheckName) -> str:
        return str(getattr(self.new.config.checks, check).policy)

    def _applies(self, check: CheckName) -> bool:
        if self._policy(check) == "off":
            return False
        if check in _OF_ROWS:
            return self.old is not None
        if check == "expected":
            return bool(self.place)
        return check != "scores" or self.new.scores is not None

    def _outcome(self, check: CheckName, text: str, *, failed: bool, table: str = "") -> CheckOutcome:
        policy = cast("FailurePolicy", self._policy(check))
        return CheckOutcome(check=check, outcome="failed" if failed else "skipped", policy=policy, table=table, text=text)

    def _finite(self) -> None:
        if not self._applies("finite"):
            return
        config = self.new.config
        for table, rows, nonfinite in zip(self.new.tables, self.new.rows, self.new.nonfinite_rows, strict=False):
            bounds = CheckBounds()
            bounds.at_most("nonfinite_rows", nonfinite, config.max_nonfinite_rows)
            bounds.figures["share"] = nonfinite / max(1, rows)
            policy = cast("FailurePolicy", self._policy("finite"))
            self.outcomes.append(bounds.outcome("finite", policy, table.table_name))

    def _rows(self, pace: Pace) -> list[KeyArray]:
        """Compare the rows of all tables; return keys for requests, by table: those of both versions, or of the new one."""
        new, old = self.new, self.old
        serving = {} if old is None else {table.table_name: table for table in old.tables}
        count = max(_LEAST_ROWS, min(new.config.checks.sample_rows, _MOST_ROWS // max(1, len(new.tables))))
        keys: list[KeyArray] = []
        for table in new.tables:
            before, both, alone = serving.get(table.table_name), _NO_KEYS, _NO_KEYS
            try:
                own, known = _rows_of(new, table), None if old is None or before is None else _rows_of(old, before)
                if own is not None and known is not None and before is not None:
                    sample = sample_rows(own, known, count, pace)
                    both, alone = sample.keys[sample.found], sample.keys
                    complete = table.share == before.share and own.complete and known.complete
                    self.outcomes += compare_rows(table.table_name, sample, new.config.checks, pace, complete=complete)
                elif own is not None and self._applies("scores"):
                    alone, _ = first_rows_of(own, count, pace)
                if old is not None and (own is None or known is None):
                    why = "the serving version has no such table" if before is None else "no database or cache has rows of it"
                    self._add_of_rows(why, table.table_name, failed=False)
            except HPSError as error:
                self._add_of_rows(str(error), table.table_name, failed=True)
            if old is not None and not both.size:
                self._unknown = f"the versions have no key of table {table.table_name!r} in common"
            keys.append(both if both.size else alone)
        return keys

    def _add_of_rows(self, why: str, table: str, *, failed: bool) -> None:
        applied = [check for check in _OF_ROWS if self._applies(check)]
        self.outcomes += [self._outcome(check, why, failed=failed, table=table) for check in applied]

    def _scores(self, keys: Sequence[KeyArray], pace: Pace) -> None:
        if not self._applies("scores") or self.new.scores is None:
            return
        config, scores = self.new.config.checks, self.new.scores
        requests: CheckRequests | str | None = None
        try:
            place = config.requests or (within(self.place, REQUESTS) if self.place else "")
            content = read_recording(place, self.sources) if place else None
            if content is None and config.requests:
                raise ModelFileError(f"reading {config.requests}: there is no such file; write it, or remove checks.requests")
            if content is not None and content.startswith(TRACE_MAGIC):
                keys = keys_of_trace(content, place, self.new.config.model, self.new.tables)
            elif content is not None:
                requests = read_requests(content, place, scores.opened.signature, pace)
        except HPSError as error:
            self.outcomes.append(self._outcome("scores", str(error), failed=self.old is not None))  # else none would serve
            return
        if requests is None:
            unknown = self._unknown if content is None else ""
            requests = make_up_requests(scores.opened.signature, keys, config.scores.samples, scores.max_samples, unknown)
        if isinstance(requests, str):
            self.outcomes.append(self._outcome("scores", requests, failed=False))
            return
        policy = cast("FailurePolicy", self._policy("scores"))
        now = time.monotonic()
        until = now + (self._deadline - now) / 2
        self.outcomes.append(compare_scores(self.new, self.old, requests, config, policy, pace, until))

    def _expected(self, pace: Pace) -> None:
        """Compare the author's answers: `inputs/<name>` and `scores/<output>`, `keys/<table>` and `vectors/<table>`."""
        if not self._applies("expected"):
            return
        filesystem, path = self.sources.locate(within(self.place, EXPECTED))
        bounds, tolerance = CheckBounds(), self.new.config.checks.expected.tolerance
        try:
            if (read := read_small_file(filesystem, path, _MOST_BYTES)) is None:
                return
            differences: dict[str, float] = {}
            for name, got, expected in self._answers(_arrays_of(read[0])):
                differences[name] = max(_difference(got, expected), differences.get(name, 0.0))
                pace.rest()
            worst = max(differences, key=differences.__getitem__)
            bounds.at_most(f"difference of {worst}", differences[worst], tolerance)
        except (HPSError, KeyError, TypeError, ValueError) as error:
            bounds.wrong.append(f"reading {path}: {error}")
        policy = cast("FailurePolicy", self._policy("expected"))
        self.outcomes.append(bounds.outcome("expected", policy))

    def _answers(self, arrays: Mapping[str, np.ndarray]) -> Iterator[tuple[str, np.ndarray, np.ndarray]]:
        """Yield the name of each table and output that has expected answers, the answers of the version, and the expected ones.

        Raises:
            HPSError, KeyError, ValueError: arrays are missing or wrong.
        """
        kinds = {name: name.partition("/")[0] for name in arrays}
        if not {"vectors", "scores"} & {*kinds.values()} or not {*kinds.values()} <= {"keys", "vectors", "inputs", "scores"}:
            raise ModelFileError(
                f"got {', '.join(arrays) or 'no arrays'}, expected keys/<table> and vectors/<table>, or inputs/<name> and "
                "scores/<output>"
            )
        for name in (name for name, kind in kinds.items() if kind == "vectors"):
            table = name.partition("/")[2]
            if (keys := arrays.get(f"keys/{table}")) is None:
                raise ModelFileError(f"got {name} without keys/{table}")
            yield table, *self._vectors(table, keys, arrays[name])
        if "scores" in kinds.values():
            scores = self._expected_scores(arrays)
            for name in (name for name, kind in kinds.items() if kind == "scores"):
                output = name.partition("/")[2]
                if output not in scores:
                    raise ModelFileError(f"got {name}, expected one of scores/{', scores/'.join(scores)}")
                yield output, scores[output], arrays[name]

    def _vectors(self, table: str, keys: np.ndarray, expected: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the vectors of keys, and the expected ones; of a share of a table those that it has."""
        spec = self.new.tables[self.new.table_index(table)]
        if (rows := _rows_of(self.new, spec)) is None:
            raise ModelFileError(f"no database or cache has rows of table {table!r}")
        if keys.ndim != 1 or keys.dtype.kind not in "iu" or expected.shape != (keys.size, spec.dim):
            raise ModelFileError(
                f"got keys/{table} {list(keys.shape)} of {keys.dtype} and vectors/{table} {list(expected.shape)}, expected "
                f"[n] of int64 and [n, {spec.dim}]"
            )
        wanted = keys.astype(np.int64)
        if spec.share is not None:
            owned = spec.share.owns(wanted)
            wanted, expected = wanted[owned], expected[owned]
        vectors = np.full((wanted.size, spec.dim), spec.default_value, np.float32)
        got, read = rows.read(wanted, "float32")
        vectors[np.isin(wanted, got)] = read
        return vectors, expected

    def _expected_scores(self, arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        scores = self.new.scores
        if scores is None:
            raise ModelFileError("got scores, and the version has no network")
        inputs = {name.partition("/")[2]: values for name, values in arrays.items() if name.startswith("inputs/")}
        return dict(scores.score(scores.read(inputs), self.new.device(None), counted=False))


def _rows_of(deployment: Deployment, table: TableSpec) -> SampledRows | None:
    """Return the rows of a table where the deployment has most of them; None if it has none."""
    if databases := deployment.chain.databases:
        return StoredRows(databases[-1], table)
    session = deployment.sessions[deployment.devices[0]]
    index = deployment.table_index(table.table_name)
    if session.cache is None or not session.cache.stats(index).resident_rows:
        return None
    return CachedRows(session, index, table, deployment.rows[index])


def _arrays_of(content: bytes) -> dict[str, np.ndarray]:
    """Read the arrays of an `.npz` file.

    Raises:
        ModelFileError: it is none, is damaged, has pickled objects, or inflates to more than 256 MB.
    """
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as file:
            size = sum(member.file_size for member in file.infolist())
        if size <= _MOST_INFLATED_BYTES:
            with np.load(io.BytesIO(content), allow_pickle=False) as arrays:
                return {name: arrays[name] for name in arrays.files}
    except (EOFError, NotImplementedError, OSError, RuntimeError, ValueError, zipfile.BadZipFile, zlib.error) as error:
        raise ModelFileError(f"it is no .npz file of NumPy: {error}") from error
    raise ModelFileError(f"its arrays have {size} bytes, expected at most {_MOST_INFLATED_BYTES}")


def _difference(got: np.ndarray, expected: np.ndarray) -> float:
    """Return the largest difference, relative to the expected value or to 1 if that is more."""
    if got.shape != expected.shape:
        raise ModelFileError(f"got {list(got.shape)}, expected {list(expected.shape)}")
    if not got.size:
        return 0.0
    wanted = expected.astype(np.float64)
    with np.errstate(invalid="ignore"):
        difference = np.abs(got.astype(np.float64) - wanted) / np.maximum(1.0, np.abs(wanted))
    return float(np.where(np.isnan(difference), np.inf, difference).max())
