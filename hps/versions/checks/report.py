"""The results of the checks of a version, and their form as a document."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Final, Literal, TypeAlias

import pydantic

CheckName: TypeAlias = Literal["finite", "keys", "norms", "vectors", "scores", "expected"]
CHECKS: Final[tuple[CheckName, ...]] = ("finite", "keys", "norms", "vectors", "scores", "expected")
Outcome: TypeAlias = Literal["passed", "failed", "skipped"]
OUTCOMES: Final[tuple[Outcome, ...]] = ("passed", "failed", "skipped")
FailurePolicy: TypeAlias = Literal["refuse", "hold", "warn"]
Verdict: TypeAlias = Literal["passed", "held", "refused", "accepted"]

FORMAT: Final = 1
_MOST_SHOWN: Final = 10


class CheckOutcome(pydantic.BaseModel):
    """The result of one check, of one table or of the network. *Immutable.*

    Attributes:
        table: empty for a check of the network.
        policy: what follows if it fails.
        text: what was got and expected, for people; of a skipped check, the reason.
        figures: what was measured; see `docs/checks.md`.
    """

    model_config = pydantic.ConfigDict(frozen=True, extra="forbid", strict=True)

    check: CheckName
    outcome: Outcome
    policy: FailurePolicy
    table: str = ""
    text: str = ""
    figures: Annotated[Mapping[str, float], pydantic.Field(max_length=100)] = {}

    def __str__(self) -> str:
        return f"{self.check}{f' of {self.table}' if self.table else ''}: {self.text or self.outcome}"


class CheckReport(pydantic.BaseModel):
    """The results of all checks of a version. *Immutable.*

    Attributes:
        fingerprint: of the version's files.
        against: the version that served, and that it was compared with; empty if none did.
        at: start, in seconds since the epoch.
        accepted_at: when a person let the version serve nevertheless; None if nobody did.
    """

    model_config = pydantic.ConfigDict(frozen=True, extra="forbid", strict=True)

    format: Literal[1] = FORMAT
    model: str
    version: str
    fingerprint: str
    against: str = ""
    at: float
    seconds: float = 0.0
    checks: tuple[CheckOutcome, ...] = ()
    accepted_at: float | None = None

    @property
    def failed(self) -> list[CheckOutcome]:
        return [found for found in self.checks if found.outcome == "failed"]

    @property
    def verdict(self) -> Verdict:
        policies = {found.policy for found in self.failed}
        if not policies & {"refuse", "hold"}:
            return "passed"
        if self.accepted_at is not None:
            return "accepted"
        return "refused" if "refuse" in policies else "held"

    @property
    def reason(self) -> str:
        """The first ten failed checks, those that count first."""
        order: dict[str, int] = {"refuse": 0, "hold": 1, "warn": 2}
        texts = [*map(str, sorted(self.failed, key=lambda found: order[found.policy]))]
        more = [f"and {len(texts) - _MOST_SHOWN} more"] if len(texts) > _MOST_SHOWN else []
        return "; ".join(texts[:_MOST_SHOWN] + more)

    def accepted(self, now: float) -> "CheckReport":
        return self.model_copy(update={"accepted_at": now})


@dataclass(slots=True)
class CheckBounds:
    """Collects what one check found out of bounds, and its figures."""

    wrong: list[str] = field(default_factory=list)
    figures: dict[str, float] = field(default_factory=dict)

    @property
    def text(self) -> str:
        return "; ".join(self.wrong)

    def at_least(self, name: str, got: float, least: float) -> None:
        self._bound(name, got, got >= least, f"expected at least {least:.4g}")

    def at_most(self, name: str, got: float, most: float | None) -> None:
        self._bound(name, got, most is None or got <= most, f"expected at most {most or 0.0:.4g}")

    def _bound(self, name: str, got: float, holds: bool, expected: str) -> None:
        if math.isfinite(got):  # JSON has no infinity
            self.figures[name] = round(got, 6)
        if not holds:
            self.wrong.append(f"{name.replace('_', ' ')} {got:.4g}, {expected}")

    def outcome(self, check: CheckName, policy: FailurePolicy, table: str = "") -> CheckOutcome:
        return CheckOutcome(
            check=check,
            outcome="failed" if self.wrong else "passed",
            policy=policy,
            table=table,
            text=self.text,
            figures=self.figures,
        )
