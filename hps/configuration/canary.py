"""`models[].canary`: how a new version of a model is tried out on a share of its requests, unless a request says otherwise."""

from typing import Annotated, TypeAlias

from pydantic import AfterValidator, ConfigDict, Field

from hps.configuration.fields import Flag, ListOf, NonNegative, Positive, Real, Seconds, expected
from hps.configuration.tiers import Section

_MOST_STEPS, _MOST_HEADER = 50, 100  # a rollout is a small file, here and beside the versions


def _check_header(name: str) -> str:
    if not 0 < len(name) <= _MOST_HEADER or not all(
        letter.isascii() and (letter.isalnum() or letter in "-_.") for letter in name
    ):
        raise expected("the name of a header")
    return name.lower()


class CanaryStep(Section):
    """`models[].canary.steps`: a share of the requests, and what ends the step. The share 1 promotes the version."""

    model_config = ConfigDict(title="models[].canary.steps")

    share: Annotated[Real, Field(gt=0, le=1)]
    seconds: Seconds = 0.0
    requests: NonNegative = 0


def _check_steps(steps: tuple[CanaryStep, ...]) -> tuple[CanaryStep, ...]:
    shares = [step.share for step in steps]
    if shares != sorted(set(shares)):
        raise expected("shares that rise from step to step")
    return steps


Steps: TypeAlias = Annotated[ListOf[CanaryStep], Field(max_length=_MOST_STEPS), AfterValidator(_check_steps)]


class CanaryConfig(Section):
    """`models[].canary`: the defaults of canaries and shadows of a model."""

    model_config = ConfigDict(title="models[].canary")

    header: Annotated[str, AfterValidator(_check_header)] = "x-user-id"
    steps: Steps = ()
    max_error_rate: Annotated[Real, Field(ge=0, le=1)] = 0.01
    max_p99_factor: Annotated[Real, Field(ge=1)] = 2.0
    max_difference: Annotated[Real, Field(ge=0)] | None = None
    least_requests: Positive = 50
    compare: Flag = True
    queue_requests: Positive = 64
    queue_bytes: Positive = 16 << 20
