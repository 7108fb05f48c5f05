"""`models[].transform`: a function that turns inputs of requests, such as text, into keys and features."""

import re
from typing import Annotated, Any, Final, Literal, TypeAlias

from pydantic import AfterValidator, ConfigDict, Field, ValidationInfo, field_validator

from hps.configuration.fields import Timeout, choice, problem
from hps.configuration.networks import DTYPES, InputName, Names
from hps.configuration.tiers import Section
from hps.ground import registry

BYTES: Final = "bytes"

_CODE: Final = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*", re.ASCII)
TransformDtype: TypeAlias = Annotated[
    Literal["bytes", "float32", "float16", "float64", "int64", "int32", "int16", "int8", "uint8", "bool"],
    choice(BYTES, *DTYPES),
]


def _function(value: str) -> str:
    if ":" in value:
        if _CODE.fullmatch(value) is None:
            raise problem(f"got {value[:120]!r}, expected module:function, such as shop.features:ids")
    elif not registry.is_registered("transform", value):
        known = ", ".join(registry.names("transform"))
        raise problem(f"got {value[:120]!r}, expected module:function, or one of: {known}")
    return value


class TransformConfig(Section):
    """`models[].transform`: what happens to the inputs of a request before their keys are looked up."""

    model_config = ConfigDict(title="models[].transform")

    function: Annotated[str, AfterValidator(_function)]
    inputs: Annotated[dict[InputName, TransformDtype], Field(min_length=1)]
    outputs: Names = Field(default_factory=lambda data: tuple(data.get("inputs", ("",))))
    timeout_s: Timeout = 1.0

    @property
    def runs_code(self) -> bool:
        """Whether it names a function of any module, instead of one that an installed package offers for this."""
        return ":" in self.function

    @field_validator("inputs")
    @classmethod
    def _check_inputs(cls, value: dict[str, Any], info: ValidationInfo) -> dict[str, Any]:
        if wrong := next((name for name in value if name in ("KEYS", "NUMKEYS", "OFFSETS", "WEIGHTS")), ""):
            raise problem(f"got {wrong}, which has the keys of all tables, expected names of other inputs")
        return value
