"""Whether a new version breaks a bound: decisions about counts, without any state."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from hps.configuration.canary import CanaryConfig, CanaryStep
from hps.versions.canary.counts import RolloutCounts, slower_than

_LEAST_ERRORS, _LEAST_SLOW, _LEAST_SLICES = 3, 5, 3
_DEVIATIONS: Final = 3.0  # of a binomial distribution, by which a count must exceed what is allowed
_SLOW_SHARE: Final = 0.01  # of requests may take longer than the 99th percentile, times the factor
_LEAST_SLOW_S: Final = 1e-3  # times below are noise of the machine


@dataclass(frozen=True)
class Window:
    """The counts of the last seconds of a rollout. *Immutable.*

    Attributes:
        slices: returns the counts of successive parts of it, of a second each.
    """

    seconds: float
    counts: RolloutCounts
    slices: Callable[[], Sequence[RolloutCounts]] = tuple


def broken_bound(windows: Sequence[Window], version: str, serving: str, config: CanaryConfig) -> str:
    """Describe the bound that the new version breaks in one of these windows; empty if none."""
    # Counts are compared with what chance gives, and not shares with a bound: three errors of three requests are enough to
    # roll back, and one slow request of ten is not. The shortest window sees a version that fails after an hour of good
    # answers, the longest one a version that fails rarely.
    for window in windows:
        if found := (
            _errors(window, version, serving, config)
            or _slowness(window, version, serving, config)
            or _differences(window, version, serving, config)
        ):
            return found
    return ""


def is_step_done(step: CanaryStep, seconds: float, counts: RolloutCounts) -> bool:
    """Return True if a step has lasted long enough, and the new version has answered enough requests, at least one."""
    if not (step.seconds or step.requests):
        return False
    return seconds >= step.seconds and counts.new.requests >= max(1, step.requests)


def _exceeds(count: int, of: int, allowed: float, least: int) -> bool:
    return count >= least and count > of * allowed + _DEVIATIONS * math.sqrt(of * allowed * max(0.0, 1.0 - allowed))


def _errors(window: Window, version: str, serving: str, config: CanaryConfig) -> str:
    old, new = window.counts.old, window.counts.new
    allowed = min(1.0, old.error_rate + config.max_error_rate)
    if _exceeds(new.errors, new.requests, allowed, _LEAST_ERRORS):
        return (
            f"error rate of version {version} is {new.error_rate:.1%} ({new.errors} of {new.requests} requests in "
            f"{window.seconds:.0f} s), that of {serving} is {old.error_rate:.1%}; allowed: {config.max_error_rate:.1%} more"
        )
    compared = window.counts.compared
    if _exceeds(compared.nonfinite, compared.requests, config.max_error_rate, _LEAST_ERRORS):
        return (
            f"error rate of version {version} is {compared.nonfinite / compared.requests:.1%}: that share of its answers has "
            f"an infinity or NaN where {serving} has a number; allowed: {config.max_error_rate:.1%}"
        )
    return ""


def _slowness(window: Window, version: str, serving: str, config: CanaryConfig) -> str:
    old, new = window.counts.old, window.counts.new
    if not old.answered or not new.answered:
        return ""
    # The time in the engine alone shows a slow version also when both wait for the threads that it occupies.
    for work in (False, True):
        before, after = (counts.work.latency() if work else counts.latency() for counts in (old, new))
        limit_s = max(_LEAST_SLOW_S, config.max_p99_factor * before.quantile_s(0.99))
        if not _exceeds(slower_than(new, limit_s, work=work), new.answered, _SLOW_SHARE, _LEAST_SLOW):
            continue
        # A machine that stalls makes the requests of one moment slow, and they may all be of one version.
        slow = [part for part in window.slices() if slower_than(part.new, limit_s, work=work)]
        if len(slow) >= _LEAST_SLICES:
            return (
                f"p99 of version {version} is {1e3 * after.quantile_s(0.99):.2f} ms, that of {serving} is "
                f"{1e3 * before.quantile_s(0.99):.2f} ms ({new.answered} requests in {window.seconds:.0f} s); allowed: "
                f"{config.max_p99_factor:g} times as long"
            )
    return ""


def _differences(window: Window, version: str, serving: str, config: CanaryConfig) -> str:
    compared = window.counts.compared
    if config.max_difference is None or compared.requests < config.least_requests:
        return ""
    difference = compared.difference
    if difference is not None and difference > config.max_difference:
        return (
            f"difference of version {version} from {serving} is {difference:.3g} of the mean, over {compared.requests} "
            f"requests; allowed: {config.max_difference:g}"
        )
    return ""
