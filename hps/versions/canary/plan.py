"""What a rollout shall do: one new version of a model, beside the serving one, for a share of its requests."""

from hashlib import blake2b
from typing import Final, Literal, TypeAlias

import pydantic

from hps.configuration.canary import CanaryConfig, CanaryStep
from hps.models.manifest import VERSION

RolloutMode: TypeAlias = Literal["canary", "shadow"]
_HASH_BYTES: Final = 8
_HASHES: Final = 1 << 8 * _HASH_BYTES


class SenderSelection:
    """Selects a share of the requests by a hash of who sent them. *Immutable.*

    The same for the same model and version in every process, on every replica and after a restart: a client stays on its side.
    A larger share keeps everybody whom a smaller one had selected; another version selects others.
    """

    __slots__ = ("_hash", "_limit")

    def __init__(self, model: str, version: str, share: float) -> None:
        self._hash = blake2b(f"{model}\0{version}\0".encode(), digest_size=_HASH_BYTES)
        self._limit = round(share * _HASHES)

    def takes(self, sender: bytes) -> bool:
        """Return True if the new version answers a request of this sender: a value of the header, or a request's id."""
        hashed = self._hash.copy()
        hashed.update(sender)
        return int.from_bytes(hashed.digest()) < self._limit


class RolloutPlan(pydantic.BaseModel):
    """A canary or a shadow, as it was asked for. *Immutable.*

    Attributes:
        version: the new version.
        steps: at least one, with rising shares.
        config: header, bounds and queue; its steps are those above.
        accepted: a person lets a version answer that its checks hold.
    """

    model_config = pydantic.ConfigDict(frozen=True, extra="forbid")

    mode: RolloutMode
    version: str = pydantic.Field(pattern=rf"^{VERSION.pattern}$")
    steps: tuple[CanaryStep, ...] = pydantic.Field(min_length=1)
    config: CanaryConfig
    accepted: bool = False

    def share(self, step: int) -> float:
        return self.steps[step].share

    def is_last(self, step: int) -> bool:
        return step == len(self.steps) - 1
