"""`models[].dense`: the network that computes scores from a model's vectors, and the source of each of its inputs.

    inputs of a request -> (keys programs) -> lookups -> network

An input with a `table` is both: a request has its keys, the network reads its vectors. A network that was cut out of a module
also reads `lookups`; their keys are inputs, columns of inputs, or outputs of keys programs.
"""

import json
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Final, Literal, Self, TypeAlias

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field, ValidationInfo, field_validator, model_validator

from hps.configuration.fields import (
    Flag,
    Integer,
    ListOf,
    Name,
    NonEmptyListOf,
    NonNegative,
    Place,
    Positive,
    Real,
    Timeout,
    choice,
    expected,
    problem,
)
from hps.configuration.tiers import Section
from hps.ground.registry import IMPLEMENTATIONS
from hps.ground.sizes import SizeCondition, SizeExpression, is_size_name

DTYPES: Final = ("float32", "float16", "float64", "int64", "int32", "int16", "int8", "uint8", "bool")
"""Of the features of a request, and of the scores."""
SAMPLES: Final = "samples"
"""Name of the number of samples in expressions of sizes."""

_FORMATS = IMPLEMENTATIONS["network"]
NetworkFormat: TypeAlias = Annotated[
    str, choice(*("|".join((name, *network_format.spellings)) for name, network_format in _FORMATS.items()), kind="network")
]
FeatureDtype: TypeAlias = Annotated[
    Literal["float32", "float16", "float64", "int64", "int32", "int16", "int8", "uint8", "bool"], choice(*DTYPES)
]
Pooling: TypeAlias = Annotated[Literal["none", "sum", "mean", "sqrtn", "max"], choice("none", "sum", "mean", "sqrtn", "max")]
_BAG_ENDS: Final = (".offsets", ".weights")


def _input_name(value: str) -> str:
    if not value or len(value) > 120 or not value.isprintable():
        raise expected("1 to 120 printable characters")
    return value


InputName: TypeAlias = Annotated[str, AfterValidator(_input_name)]


def _size_name(value: str) -> str:
    if not is_size_name(value) or value == SAMPLES:
        raise expected("a name of letters, digits and _, other than samples, min and max")
    return value


SizeName: TypeAlias = Annotated[str, AfterValidator(_size_name)]


def _shape(value: Any) -> tuple[int | str, ...]:
    """Read a shape: -1 or an expression of sizes, then widths or expressions."""
    if not isinstance(value, list | tuple):
        raise expected("a list")
    found: list[int | str] = []
    for index, step in enumerate(value):
        width = int(step) if isinstance(step, float) and step.is_integer() else step
        if isinstance(width, str):
            try:
                names = SizeExpression(width).names
            except ValueError as error:
                raise problem(f"got {json.dumps(width)[:80]}, expected the name of a size or an expression: {error}") from error
            width = width.strip() if names else int(width)
        if isinstance(width, bool) or not (isinstance(width, str) or (isinstance(width, int) and (width > 0 or not index))):
            break
        found.append(width)
    if not 0 < len(found) <= 8 or len(found) < len(value) or (isinstance(found[0], int) and found[0] < -1) or found[0] == 0:
        raise expected("[-1, ...]: the samples or a size by its name, then at most seven widths of at least 1, or sizes")
    return tuple(found)


def _guard(value: str) -> str:
    try:
        SizeCondition(value)
    except ValueError as error:
        raise problem(f"got {json.dumps(value)[:200]}: {error}; expected a condition on sizes, such as length >= 2") from error
    return value


class NetworkInputConfig(Section):
    """An entry of `models[].dense.inputs`: a lookup if it has a `table`, else a feature of the request.

    Only one of the forms is complete: a lookup (`table`, with `pooling`, `hotness`, `max_norm`, `padding_key`), a feature
    (`dtype`, `shape`, `offsets_of`), or `request_index`.
    """

    model_config = ConfigDict(title="models[].dense.inputs")

    table: Name | None = None
    pooling: Pooling = "none"
    hotness: Positive | None = None
    max_norm: Annotated[Real, Field(gt=0)] | None = None
    padding_key: Annotated[Integer, Field(ge=-(2**63), le=2**63 - 1)] | None = None
    dtype: FeatureDtype = "float32"
    shape: Annotated[tuple[int | str, ...], BeforeValidator(_shape)] = (-1,)
    offsets_of: InputName | None = None
    per_request: Flag = False
    request_index: Flag = False

    @field_validator("pooling")
    @classmethod
    def _check_pooling(cls, value: str, info: ValidationInfo) -> str:
        if value != "none" and info.data.get("table", "") is None:
            raise problem(f"got {value} without a table, expected none; name the table whose vectors are pooled")
        return value

    @field_validator("hotness")
    @classmethod
    def _check_hotness(cls, value: int | None, info: ValidationInfo) -> int | None:
        if value is not None and info.data.get("table", "") is None:
            raise problem("got hotness without a table, expected a shape")
        return value

    @field_validator("max_norm", "padding_key")
    @classmethod
    def _require_pooling(cls, value: Any, info: ValidationInfo) -> Any:
        if value is not None and info.data.get("pooling") == "none":
            raise problem("it has no effect without pooling, expected sum, mean, sqrtn or max")
        return value

    @field_validator("dtype", "shape")
    @classmethod
    def _refuse_for_lookup(cls, value: Any, info: ValidationInfo) -> Any:
        if info.data.get("table") and value not in ("float32", (-1,)):
            raise problem("a lookup has the dtype and width of its table, expected neither dtype nor shape")
        return value

    @field_validator("offsets_of")
    @classmethod
    def _check_offsets(cls, value: str | None, info: ValidationInfo) -> str | None:
        if value is not None and info.data.get("table"):
            raise problem("the offsets of a lookup are given beside its keys, expected no offsets_of")
        if value is not None and info.data.get("dtype", "int64") not in ("int64", "int32"):
            raise problem(f"got offsets of {info.data['dtype']}, expected dtype int64 or int32")
        return value

    @field_validator("per_request")
    @classmethod
    def _check_per_request(cls, value: bool, info: ValidationInfo) -> bool:
        if value and (info.data.get("shape", (-1,))[0] != -1 or info.data.get("offsets_of") is not None):
            raise problem("its first size is not the samples, expected a shape [-1, ...] and no offsets_of")
        return value

    @field_validator("request_index")
    @classmethod
    def _check_request_index(cls, value: bool, info: ValidationInfo) -> bool:
        if value and (info.data.get("table") or info.data.get("per_request")):
            raise problem("it numbers the requests of a batch, expected no table and no per_request")
        return value


class SourceConfig(Section):
    """Where keys, offsets or weights of a lookup come from: an `input`, a `column` of it, or an `output` of a keys program."""

    model_config = ConfigDict(title="models[].dense.lookups.keys")

    input: InputName | None = None
    column: NonNegative | None = None
    output: InputName | None = None

    @model_validator(mode="after")
    def _check_source(self) -> Self:
        if (self.input is None) == (self.output is None):
            raise problem("expected either an input, or an output of a keys program")
        if self.column is not None and self.input is None:
            raise problem("got a column of an output, expected one of an input")
        return self

    def __str__(self) -> str:
        of = f"input {json.dumps(self.input)}" if self.input is not None else f"output {json.dumps(self.output)}"
        return of if self.column is None else f"column {self.column} of {of}"


class LookupConfig(Section):
    """An entry of `models[].dense.lookups`: vectors that the network reads under its name."""

    model_config = ConfigDict(title="models[].dense.lookups")

    table: Name
    pooling: Pooling = "none"
    max_norm: Annotated[Real, Field(gt=0)] | None = None
    padding_key: Annotated[Integer, Field(ge=-(2**63), le=2**63 - 1)] | None = None
    keys: SourceConfig
    offsets: SourceConfig | None = None
    weights: SourceConfig | None = None
    include_last_offset: Flag = False

    @field_validator("padding_key", "offsets", "weights")
    @classmethod
    def _require_pooling(cls, value: Any, info: ValidationInfo) -> Any:
        if value is not None and info.data.get("pooling") == "none":
            raise problem("it has no effect without pooling, expected sum, mean, sqrtn or max")
        return value

    @field_validator("include_last_offset")
    @classmethod
    def _require_offsets(cls, value: bool, info: ValidationInfo) -> bool:
        if value and info.data.get("offsets", "") is None:
            raise problem("got true without offsets, expected false")
        return value

    def sources(self) -> Iterator[tuple[str, SourceConfig]]:
        """Yield the sources of keys, offsets and weights, by these names."""
        for name in ("keys", "offsets", "weights"):
            if (source := getattr(self, name)) is not None:
                yield name, source


def _each_once(value: tuple[str, ...]) -> tuple[str, ...]:
    if repeated := [name for index, name in enumerate(value) if name in value[:index]]:
        raise problem(f"got {json.dumps(repeated[0])} twice, expected each name once")
    return value


Names: TypeAlias = Annotated[NonEmptyListOf[InputName], AfterValidator(_each_once)]


class KeysProgramConfig(Section):
    """An entry of `models[].dense.keys`: a program, of the network's format, that computes keys of lookups from inputs."""

    model_config = ConfigDict(title="models[].dense.keys")

    file: Place
    inputs: Names
    outputs: Names


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
    outputs: Names
    dynamic_batching: Flag = True
    instances: Annotated[Positive, Field(le=64)] = 1
    max_queue_delay_us: Annotated[NonNegative, Field(le=1_000_000)] = 0
    refuse_nan: Flag = True
    open_timeout_s: Timeout = 120.0
    sizes: Annotated[dict[SizeName, NonNegative], Field(default_factory=dict, validate_default=True)]
    guards: ListOf[Annotated[str, AfterValidator(_guard)]] = ()
    request_guards: ListOf[Annotated[str, AfterValidator(_guard)]] = ()
    keys: ListOf[KeysProgramConfig] = ()
    lookups: Annotated[dict[InputName, LookupConfig], Field(default_factory=dict)]
    network_inputs: Names | None = None
    stale_copies: ListOf[Name] = ()
    allow_stale_copy: Flag = False

    @property
    def files(self) -> tuple[str, ...]:
        return self.file, *(program.file for program in self.keys)

    @field_validator("inputs")
    @classmethod
    def _check_inputs(cls, value: dict[str, NetworkInputConfig]) -> dict[str, NetworkInputConfig]:
        if all(declared.request_index for declared in value.values()):
            raise problem("got no lookup and no feature, expected at least one")
        if not any(_has_samples(declared) for declared in value.values()):
            raise problem("got no input whose shape has the samples, expected one with -1 or samples")
        for name, given in value.items():
            if name.endswith(_BAG_ENDS) and (lookup := value.get(name.rpartition(".")[0])) is not None and lookup.table:
                raise problem(f"got {json.dumps(name)}, which is the name of bags of another input; rename it")
            if given.offsets_of is not None and (
                (keys := value.get(given.offsets_of)) is None or keys.table is not None or not isinstance(keys.shape[0], str)
            ):
                offsets = f"input {json.dumps(name)} has offsets of {json.dumps(given.offsets_of)}"
                raise problem(f"{offsets}, expected an input whose first size has a name")
        return value

    @field_validator("sizes")
    @classmethod
    def _check_sizes(cls, value: dict[str, int], info: ValidationInfo) -> dict[str, int]:
        inputs: Mapping[str, NetworkInputConfig] = info.data.get("inputs", {})
        widths = [width for declared in inputs.values() for width in declared.shape if isinstance(width, str)]
        named = {name: None for width in widths for name in SizeExpression(width).names if name != SAMPLES}
        for name in named:
            if name not in widths:
                raise problem(f"no input tells the size {json.dumps(name)}, expected one with the size alone in its shape")
            if name not in value:
                raise problem(f"got no value of {json.dumps(name)}; write one with which the network runs")
        if inputs and (unknown := [name for name in value if name not in named]):
            raise problem(f"got a value of {json.dumps(unknown[0])}, which no input has in its shape")
        return value

    @field_validator("guards", "request_guards")
    @classmethod
    def _check_guards(cls, value: tuple[str, ...], info: ValidationInfo) -> tuple[str, ...]:
        if (sizes := info.data.get("sizes")) is None:
            return value
        for text in value:
            guard = SizeCondition(text)
            if unknown := set(guard.names) - {SAMPLES, *sizes}:
                raise problem(f"got {json.dumps(text)}: no input has a size {min(unknown)!r} (dense.sizes)")
            if SAMPLES not in guard.names and not guard.is_met(sizes):
                raise problem(f"got {json.dumps(text)}, which the values of dense.sizes do not fulfil")
        return value

    @field_validator("keys")
    @classmethod
    def _check_keys(cls, value: tuple[KeysProgramConfig, ...], info: ValidationInfo) -> tuple[KeysProgramConfig, ...]:
        inputs: Mapping[str, NetworkInputConfig] = info.data.get("inputs", {})
        files, outputs = [info.data.get("file")], list(inputs)
        for index, program in enumerate(value):
            for name in program.inputs if inputs else ():
                if (declared := inputs.get(name)) is None or declared.table is not None or declared.request_index:
                    known = ", ".join(key for key, other in inputs.items() if not (other.table or other.request_index))
                    raise problem(f"entry {index} reads {json.dumps(name)}, expected features of dense.inputs: {known}")
            for name in (output for output in program.outputs if output in outputs):
                raise problem(f"entry {index} has output {json.dumps(name)}, which is the name of another; rename it")
            if program.file in files:
                raise problem(f"entry {index} has file {json.dumps(program.file)}, which another program has; write its own")
            files.append(program.file)
            outputs += program.outputs
        return value

    @field_validator("lookups")
    @classmethod
    def _check_lookups(cls, value: dict[str, LookupConfig], info: ValidationInfo) -> dict[str, LookupConfig]:
        if "inputs" not in info.data or "keys" not in info.data:
            return value
        inputs: Mapping[str, NetworkInputConfig] = info.data["inputs"]
        outputs = [name for program in info.data["keys"] for name in program.outputs]
        for name, lookup in value.items():
            if name in inputs or name in outputs:
                raise problem(f"lookup {json.dumps(name)} has the name of an input or output; rename it")
            for what, source in lookup.sources():
                if text := _unusable(source, inputs, outputs):
                    raise problem(f"{what} of lookup {json.dumps(name)} are {source}, expected {text}")
        return value

    @field_validator("network_inputs")
    @classmethod
    def _check_network_inputs(cls, value: tuple[str, ...] | None, info: ValidationInfo) -> tuple[str, ...] | None:
        if value is None or "inputs" not in info.data or "lookups" not in info.data:
            return value
        known = [*info.data["inputs"], *info.data["lookups"]]
        if unknown := [name for name in value if name not in known]:
            raise problem(f"got {json.dumps(unknown[0])}, expected inputs and lookups: {', '.join(known)}")
        return value

    @model_validator(mode="after")
    def _complete(self) -> Self:
        for name, declared in self.inputs.items():
            if isinstance(declared.shape[0], int) and declared.shape[0] > 0 and not self.lookups:
                raise problem(f"input {json.dumps(name)} has {declared.shape[0]} samples, expected a shape [-1, ...]")
        return self


def _has_samples(declared: NetworkInputConfig) -> bool:
    first = declared.shape[0]
    named = isinstance(first, str) and SAMPLES in SizeExpression(first).names
    return not declared.request_index and (first == -1 or named)


def _unusable(source: SourceConfig, inputs: Mapping[str, NetworkInputConfig], outputs: list[str]) -> str:
    """Return the expected source; empty if this one is usable."""
    if source.output is not None:
        return "" if source.output in outputs else f"outputs of dense.keys: {', '.join(outputs) or 'it has none'}"
    declared = inputs.get(str(source.input))
    if declared is None or declared.table is not None or declared.request_index:
        return "an input with dtype and shape" if declared is not None else f"inputs: {', '.join(inputs)}"
    if source.column is not None:
        width = declared.shape[1] if len(declared.shape) == 2 and declared.shape[0] == -1 else 0
        if isinstance(width, int) and source.column >= width:
            return f"an input of shape [-1, n] with at least {source.column + 1} columns"
    return ""
