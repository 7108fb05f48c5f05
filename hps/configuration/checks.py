"""`models[].checks`: what a version is compared with before it takes over, and what follows if it differs too much.

The bounds are wide enough for a daily retraining, warm or from scratch, and far from what a mistake gives; `docs/checks.md`
has the reasons.
"""

from typing import Annotated, Any, Literal, TypeAlias

from pydantic import BeforeValidator, ConfigDict, Field

from hps.configuration.fields import Flag, Positive, Real, Share, Timeout, choice, expected
from hps.configuration.tiers import Section

Policy: TypeAlias = Annotated[Literal["refuse", "hold", "warn", "off"], choice("refuse", "hold", "warn", "off")]
Recording: TypeAlias = Annotated[Literal["off", "keys", "features"], choice("off", "keys", "features")]
_Correlation: TypeAlias = Annotated[Real, Field(ge=-1, le=1)]
_Factor: TypeAlias = Annotated[Real, Field(ge=1)]


class FiniteCheck(Section):
    """`models[].checks.finite`: rows with an infinity or NaN, in all files of a version; `max_nonfinite_rows` is the bound."""

    model_config = ConfigDict(title="models[].checks.finite")

    policy: Policy = "refuse"


class KeysCheck(Section):
    """`models[].checks.keys`: rows that are new, and rows of the serving version that are gone."""

    model_config = ConfigDict(title="models[].checks.keys")

    policy: Policy = "hold"
    most_new: Share = 1.0
    most_gone: Share = 0.5


class NormsCheck(Section):
    """`models[].checks.norms`: the quartiles of the vectors' norms."""

    model_config = ConfigDict(title="models[].checks.norms")

    policy: Policy = "hold"
    most_factor: _Factor = 4.0


class VectorsCheck(Section):
    """`models[].checks.vectors`: the vectors of keys that both versions have."""

    model_config = ConfigDict(title="models[].checks.vectors")

    policy: Policy = "hold"
    least_alignment: Share = 0.1
    least_cosine: _Correlation = -1.0
    most_changed: Share = 1.0


class ScoresCheck(Section):
    """`models[].checks.scores`: the outputs of the network for the same requests."""

    model_config = ConfigDict(title="models[].checks.scores")

    policy: Policy = "hold"
    least_correlation: _Correlation = 0.5
    least_overlap: Share = 0.0
    most_p99_factor: _Factor | None = None
    samples: Positive = 1024


class ExpectedCheck(Section):
    """`models[].checks.expected`: the author's answers, `expected.npz` beside the version."""

    model_config = ConfigDict(title="models[].checks.expected")

    policy: Policy = "hold"
    tolerance: Annotated[Real, Field(ge=0)] = 0.01


class ChecksConfig(Section):
    """`models[].checks`: the checks of a version between its load and its takeover."""

    model_config = ConfigDict(title="models[].checks")

    enabled: Flag = True
    timeout_s: Timeout = 60.0
    sample_rows: Positive = 4096
    requests: str = ""
    record: Recording = "off"
    record_requests: Positive = 1000
    finite: FiniteCheck = Field(default_factory=FiniteCheck)
    keys: KeysCheck = Field(default_factory=KeysCheck)
    norms: NormsCheck = Field(default_factory=NormsCheck)
    vectors: VectorsCheck = Field(default_factory=VectorsCheck)
    scores: ScoresCheck = Field(default_factory=ScoresCheck)
    expected: ExpectedCheck = Field(default_factory=ExpectedCheck)


def _switch(value: Any) -> Any:
    if isinstance(value, bool):
        return {"enabled": value}
    if not isinstance(value, dict | ChecksConfig):
        raise expected("an object, or false for no checks")
    return value


Checks: TypeAlias = Annotated[ChecksConfig, BeforeValidator(_switch)]
