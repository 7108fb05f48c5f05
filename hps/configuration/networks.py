"""`models[].dense`: the network that makes scores of a model's vectors, and where each of its inputs comes from."""

from typing import Annotated, Any, Final, Literal, TypeAlias

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field, ValidationInfo, field_validator

from hps.configuration.fields import (
    Flag,
    ListOf,
    Name,
    NonEmptyListOf,
    NonNegative,
    Place,
    Positive,
    Real,
    Timeout,
    Whole,
    choice,
    expected,
    problem,
)
from hps.configuration.tiers import Section
from hps.registry import IMPLEMENTATIONS

DTYPES: Final = ("float32", "float16", "int64", "int32", "bool")
"""Of the features of a request."""

_FORMATS = IMPLEMENTATIONS["network"]
NetworkFormat: TypeAlias = Annotated[
    str, choice(*("|".join((name, *one.spellings)) for name, one in _FORMATS.items()), kind="network")
]
FeatureDtype: TypeAlias = Annotated[Literal["float32", "float16", "int64", "int32", "bool"], choice(*DTYPES)]
POOLINGS: Final = ("none", "sum", "mean", "sqrtn", "max")
Pooling: TypeAlias = Annotated[Literal["none", "sum", "mean", "sqrtn", "max"], choice(*POOLINGS)]


def _input_name(value: str) -> str:
    if not value or len(value) > 120 or not value.isprintable() or value.endswith((".offsets", ".weights")):
        raise expected("1 to 120 printable characters that do not end in .offsets or .weights")
    return value


InputName: TypeAlias = Annotated[str, AfterValidator(_input_name)]


def _free_first(value: tuple[int, ...]) -> tuple[int, ...]:
    if not value or value[0] != -1 or min(value[1:], default=1) < 1 or len(value) > 8:
        raise expected("[-1, ...]: the samples, then at most seven widths of at least 1")
    return value


class NetworkInputConfig(Section):
    """An entry of `models[].dense.inputs`: a lookup if it has a `table`, else a feature of the request.

    Only one of the forms is complete: a lookup (`table`, with `pooling`, `hotness`, `max_norm`, `padding_key`), a feature
    (`dtype`, `shape`), or `request_index`.
    """

    model_config = ConfigDict(title="models[].dense.inputs")

    table: Name | None = None
    pooling: Pooling = "none"
    hotness: Positive | None = None
    max_norm: Annotated[Real, Field(gt=0)] | None = None
    padding_key: Annotated[Whole, Field(ge=-(2**63), le=2**63 - 1)] | None = None
    dtype: FeatureDtype = "float32"
    shape: Annotated[ListOf[Whole], AfterValidator(_free_first)] = (-1,)
    per_request: Flag = False
    request_index: Flag = False

    @field_validator("pooling")
    @classmethod
    def _of_a_table(cls, value: str, info: ValidationInfo) -> str:
        if value != "none" and info.data.get("table", "") is None:
            raise problem(f"got {value} without a table, expected none; name the table whose vectors are pooled")
        return value

    @field_validator("hotness")
    @classmethod
    def _of_rows(cls, value: int | None, info: ValidationInfo) -> int | None:
        if value is not None and info.data.get("table", "") is None:
            raise problem("got hotness without a table, expected a shape")
        return value

    @field_validator("max_norm", "padding_key")
    @classmethod
    def _of_a_pooling(cls, value: Any, info: ValidationInfo) -> Any:
        if value is not None and info.data.get("pooling") == "none":
            raise problem("it has no effect without pooling, expected sum, mean, sqrtn or max")
        return value

    @field_validator("dtype", "shape")
    @classmethod
    def _of_a_feature(cls, value: Any, info: ValidationInfo) -> Any:
        if info.data.get("table") and value not in ("float32", (-1,)):
            raise problem("a lookup has the dtype and width of its table, expected neither dtype nor shape")
        return value

    @field_validator("request_index")
    @classmethod
    def _alone(cls, value: bool, info: ValidationInfo) -> bool:
        if value and (info.data.get("table") or info.data.get("per_request")):
            raise problem("it numbers the requests of a batch, expected no table and no per_request")
        return value


def _inputs(value: Any) -> Any:
    if isinstance(value, dict) and not value:
        raise problem("got none, expected at least one input")
    return value


class DenseConfig(Section):
    """`models[].dense`: the network of a model. HugeCTR's inference server had `dense_model_file`."""

    model_config = ConfigDict(title="models[].dense")

    format: NetworkFormat
    file: Place
    inputs: Annotated[dict[InputName, NetworkInputConfig], BeforeValidator(_inputs)]
    outputs: NonEmptyListOf[InputName]
    dynamic_batching: Flag = True
    max_queue_delay_us: Annotated[NonNegative, Field(le=1_000_000)] = 0
    refuse_nan: Flag = True
    open_timeout_s: Timeout = 120.0

    @field_validator("inputs")
    @classmethod
    def _with_samples(cls, value: dict[str, NetworkInputConfig]) -> dict[str, NetworkInputConfig]:
        if all(one.request_index for one in value.values()):
            raise problem("got no lookup and no feature, expected at least one")
        return value

    @field_validator("outputs")
    @classmethod
    def _different(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if len(set(value)) < len(value):
            raise problem("got an output twice, expected each name once")
        return value
