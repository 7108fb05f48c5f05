"""The HTTP interface as it is published: the paths and versions of lookups, and what requests and answers look like."""

from typing import Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field

INFER: Final = "/v2/models/{model}/infer"
INFER_VERSION: Final = "/v2/models/{model}/versions/{version}/infer"
LOOKUP: Final = "/v1/models/{model}/lookup"

ModelState = Literal["waiting", "loading", "ready", "failed"]
TableState = Literal["waiting", "loading", "done", "failed"]
Datatype = Literal["INT64", "INT32", "FP32", "BOOL"]


class ErrorAnswer(BaseModel):
    """Why a request was not served."""

    error: str = Field(description="What was being done, what was got, what was expected.")


class Live(BaseModel):
    """The process answers."""

    live: bool


class Ready(BaseModel):
    """Whether something answers lookups."""

    ready: bool
    reason: str | None = Field(default=None, description="Why not.")


class TableStatus(BaseModel):
    """Progress of loading a table. Only `name` and `state` where none of it had to be read."""

    name: str
    state: TableState
    rows: int | None = None
    rows_done: int | None = None
    size_bytes: int | None = None
    bytes_done: int | None = None
    rows_per_s: float | None = Field(default=None, description="Over the last seconds.")
    seconds_left: float | None = Field(default=None, description="At that rate; absent while no rows arrive.")


class ModelStatus(BaseModel):
    """Progress of loading a model."""

    name: str
    state: ModelState
    percent: int = Field(description="Of its tables, each of which counts the same; 100 once it is ready.")
    reason: str | None = Field(
        default=None, description="What it waits for, its progress, or why it failed; absent when it is ready."
    )
    retry_in_s: float | None = Field(
        default=None, description="Time until a failed model is tried again; absent when it is not."
    )
    tables: list[TableStatus]


class ServerReady(Ready):
    """Whether lookups of every model are answered."""

    models: list[ModelStatus] | None = Field(default=None, description="All models; absent when all are ready.")


class ModelReady(Ready):
    """Whether lookups of a model are answered."""

    name: str


class ServerMetadata(BaseModel):
    """The server and the protocol extensions that it speaks."""

    name: str
    version: str
    extensions: list[str]
    models: list[str] = Field(description="Names of the models in service, without those that wait, load or failed.")


class TensorMetadata(BaseModel):
    """An input or output; -1 is a width that the request chooses."""

    name: str
    datatype: Datatype
    shape: list[int]


class TableMetadata(BaseModel):
    """A table, which may be named as an input of its own."""

    name: str
    dim: int
    max_keys: int = Field(description="The most keys of this table in one request.")
    default_value: float | None = Field(
        description="Every element of the vector that an absent key gets; null where JSON cannot express it."
    )


class ModelMetadata(BaseModel):
    """A model: its inputs and outputs as Triton's HPS backend has them, and its tables."""

    name: str
    versions: list[str]
    platform: str
    inputs: list[TensorMetadata]
    outputs: list[TensorMetadata]
    tables: list[TableMetadata]


class RequestInput(BaseModel):
    """Keys: `KEYS` and `NUMKEYS`, or one input a table."""

    name: str
    datatype: Literal["INT64", "INT32"]
    shape: list[int]
    parameters: dict[str, Any] | None = Field(default=None, description="`binary_data_size`: its bytes in the binary part.")
    data: list[Any] | None = Field(
        default=None, description="Integers, flat or nested as the shape says; absent with binary data."
    )


class RequestOutput(BaseModel):
    """A requested output: `OUTPUT0`, `FOUND0`, `<table>` or `<table>.found`."""

    name: str
    parameters: dict[str, Any] | None = Field(default=None, description="`binary_data`: whether to send it as binary data.")


class InferenceRequest(BaseModel):
    """A request of the Open Inference Protocol v2."""

    model_config = ConfigDict(
        json_schema_extra={
            "example": {
                "inputs": [
                    {"name": "KEYS", "datatype": "INT64", "shape": [1, 3], "data": [17, 42, 7]},
                    {"name": "NUMKEYS", "datatype": "INT32", "shape": [1, 2], "data": [1, 2]},
                ]
            }
        }
    )

    id: str | None = Field(default=None, description="Returned with the answer.")
    parameters: dict[str, Any] | None = Field(
        default=None,
        description="`binary_data_output`: send all outputs as binary data. `found`: send the found-masks, too. `DeviceID`: "
        "the device that is to answer; by default the least busy one.",
    )
    inputs: list[RequestInput]
    outputs: list[RequestOutput] | None = Field(default=None, description="Which outputs to send; by default all vectors.")


class ResponseOutput(BaseModel):
    """Vectors (FP32) or a found-mask (BOOL)."""

    name: str
    datatype: Literal["FP32", "BOOL"]
    shape: list[int]
    parameters: dict[str, Any] | None = Field(default=None, description="`binary_data_size`: its bytes in the binary part.")
    data: list[float | bool | None] | None = Field(
        default=None, description="Flat, in row-major order; null is a value that JSON cannot express (NaN, infinity)."
    )


class InferenceResponse(BaseModel):
    """An answer of the Open Inference Protocol v2."""

    model_name: str
    model_version: str
    id: str | None = None
    parameters: dict[str, Any] | None = Field(
        default=None,
        description="For `KEYS` and `NUMKEYS`. `NumSample`: the keys of the request by the most keys of a sample, rounded "
        "down. `DeviceID`: the device that answered.",
    )
    outputs: list[ResponseOutput]


class LookupRequest(BaseModel):
    """Keys by table."""

    model_config = ConfigDict(json_schema_extra={"example": {"tables": {"item": [1, 2]}, "found": True}}, extra="forbid")

    tables: dict[str, list[int]]
    found: bool = Field(default=False, description="Also say which keys a tier had.")
    device: int | str | None = Field(default=None, description="The device that is to answer; by default the least busy one.")


class LookupResponse(BaseModel):
    """Vectors by table, in the order of the keys."""

    tables: dict[str, list[list[float | None]]] = Field(description="null is a value that JSON cannot express (NaN, infinity).")
    found: dict[str, list[bool]] | None = Field(
        default=None, description="Where requested: false for keys that got the default vector."
    )
