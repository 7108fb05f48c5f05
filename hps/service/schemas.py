"""The HTTP interface as it is published: the paths and versions of lookups, and what requests and answers look like."""

from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

INFER: Final = "/v2/models/{model}/infer"
INFER_VERSION: Final = "/v2/models/{model}/versions/{version}/infer"
LOOKUP: Final = "/v1/models/{model}/lookup"
ROWS: Final = "/v1/models/{model}/tables/{table}/rows"
ROW: Final = "/v1/models/{model}/tables/{table}/rows/{key}"

ModelState = Literal["waiting", "loading", "ready", "failed"]
TableState = Literal["waiting", "loading", "done", "failed"]
Datatype = Literal["INT64", "INT32", "FP32", "BOOL"]
Version = Annotated[str, BeforeValidator(lambda value: str(value) if type(value) is int else value)]


class ErrorAnswer(BaseModel):
    """Why a request was not served."""

    error: str = Field(description="What was being done, what was got, what was expected.")
    request_id: str = Field(description="As in the header `X-Request-Id` of the answer, and in the log.")


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
    """An input or output; -1 is a width that the request chooses. `config` says which inputs are optional, as in Triton."""

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
    """Keys: `KEYS` and `NUMKEYS`, or one input a table. Of keys in bags also `OFFSETS` and `WEIGHTS`, or `<table>.offsets` and
    `<table>.weights`.
    """

    name: str
    datatype: Literal["INT64", "INT32", "FP32"] = Field(description="FP32 of weights alone.")
    shape: list[int]
    parameters: dict[str, Any] | None = Field(default=None, description="`binary_data_size`: its bytes in the binary part.")
    data: list[Any] | None = Field(
        default=None, description="Numbers, flat or nested as the shape says; absent with binary data."
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
        "the device that is to answer; by default the least busy one. `combiner` (`sum`, `mean` or `sqrtn`), `max_norm` and "
        "`padding_key`: of keys in bags, of all tables; `<table>.combiner` and the like: of one. "
        "`report`: the answer's parameters say which tiers answered, and how long the stages took.",
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
        description="For `KEYS`. `NumSample`: the keys of the request by the most keys of a sample, rounded down; or the bags "
        "of a table. `DeviceID`: the device that answered.",
    )
    outputs: list[ResponseOutput]


class LookupRequest(BaseModel):
    """Keys by table: one by one, or in bags."""

    model_config = ConfigDict(json_schema_extra={"example": {"tables": {"item": [1, 2]}, "found": True}}, extra="forbid")

    tables: dict[str, list[int]] | None = Field(default=None, description="Each key gets a vector.")
    bags: dict[str, list[list[int]]] | None = Field(default=None, description="In place of `tables`: each list gets a vector.")
    weights: dict[str, list[list[float]]] | None = Field(default=None, description="Of the keys in bags; 1 where absent.")
    combiner: str | dict[str, str] | None = Field(
        default=None, description="`sum` (the default), `mean` or `sqrtn`: of all bags, or by table."
    )
    max_norm: float | dict[str, float] | None = Field(
        default=None, description="Vectors in bags are scaled down to this L2 norm; of all bags, or by table."
    )
    padding_key: int | dict[str, int] | None = Field(
        default=None, description="Is left out of the bags wherever it stands; of all bags, or by table."
    )
    found: bool = Field(default=False, description="Also say which keys a tier had; not with bags.")
    device: int | str | None = Field(default=None, description="The device that is to answer; by default the least busy one.")
    report: bool = Field(default=False, description="Also say which tiers answered, and how long the stages took.")


class TableReport(BaseModel):
    """How the keys of one table were answered."""

    keys: int
    embedding_cache: int
    volatile_db: int
    persistent_db: int
    linked: int = Field(description="Read by the device from host memory.")
    defaults: int = Field(description="That no tier has.")
    deferred: int = Field(description="Answered by default vectors, and fetched afterwards.")


class LookupReport(BaseModel):
    """How one request was answered."""

    hit_rate: float | None = Field(description="The share of all keys that embedding caches answered; null without keys.")
    tables: dict[str, TableReport]
    us: dict[str, float] = Field(
        description="Microseconds of each stage; `queue`, the wait for a thread; and `lookup`, from its begin to its end."
    )


class LookupResponse(BaseModel):
    """Vectors by table, in the order of the keys or bags."""

    tables: dict[str, list[list[float | None]]] = Field(description="null is a value that JSON cannot express (NaN, infinity).")
    found: dict[str, list[bool]] | None = Field(
        default=None, description="Where requested: false for keys that got the default vector."
    )
    report: LookupReport | None = Field(default=None, description="Where requested.")


class RowsRequest(BaseModel):
    """Rows to be written."""

    model_config = ConfigDict(
        json_schema_extra={"example": {"keys": [17, 42], "vectors": [[0.1, 0.2], [0.3, 0.4]]}}, extra="forbid"
    )

    keys: list[int]
    vectors: list[list[float]] = Field(description="One for each key, as wide as the table.")


class KeysRequest(BaseModel):
    """Rows to be deleted."""

    model_config = ConfigDict(json_schema_extra={"example": {"keys": [17, 42]}}, extra="forbid")

    keys: list[int]


class RowsAnswer(BaseModel):
    """Every lookup that starts now gets what was written, or the default vector of what was deleted, from every tier."""

    model: str
    version: str = Field(description="Whose rows these are: each version has rows of its own.")
    table: str
    rows: int = Field(description="How many the request had.")


class RowAnswer(BaseModel):
    """What a model has for a key."""

    model: str
    version: str
    table: str
    key: int
    found: bool
    tier: Literal["embedding_cache", "volatile_db", "persistent_db"] | None = Field(description="The first that has the key.")
    written_at: str | None = Field(description="When the row was written or loaded (ISO 8601, UTC); null if nobody knows.")
    written_at_us: int | None = Field(description="The same in microseconds since 1970.")
    vector: list[float | None] = Field(description="The default vector where no tier has the key. null is NaN or an infinity.")


class DeployRequest(BaseModel):
    """What to deploy; all of it may be left out."""

    model_config = ConfigDict(json_schema_extra={"example": {"version": "2"}}, extra="forbid")

    version: Version | None = Field(default=None, description="By default what the `version_policy` of the model chooses.")
    force: bool = Field(default=False, description="Load the files again, whatever the databases hold. Online writes are lost.")
    config: dict[str, Any] | None = Field(
        default=None, description="An entry of `models` of a ps.json, in place of the configured one, or of a new model."
    )


class UndeployRequest(BaseModel):
    """What to take out of service; may be left out."""

    model_config = ConfigDict(json_schema_extra={"example": {"version": "1"}}, extra="forbid")

    version: Version | None = Field(default=None, description="Only this one; by default the whole model.")


class ChangeAnswer(BaseModel):
    """A change of a model, under way or ended."""

    number: int = Field(description="The changes of a server are numbered.")
    model: str
    what: str
    by: str = Field(description="The address that asked for it, and by what right.")
    since: str = Field(description="When it began (ISO 8601, UTC).")
    seconds: float = Field(description="That it has taken so far, or took.")
    status: int | None = Field(default=None, description="How it ended, as an HTTP status; absent while it is under way.")
    version: str | None = Field(default=None, description="That serves after the change, where it has succeeded.")
    error: str | None = Field(default=None, description="Why it failed.")
    table: TableStatus | None = Field(default=None, description="The table that is being loaded.")


class VersionStatus(BaseModel):
    """A version of a model, and what it holds."""

    version: str
    state: Literal["serving", "available", "kept", "retiring"] = Field(
        description="`serving` answers those who name no version, `available` those who name it, `kept` waits for a roll-back, "
        "`retiring` for its last lookups."
    )
    since: str = Field(description="When it was put into service (ISO 8601, UTC).")
    rows: int = Field(description="In its model files.")
    size_bytes: dict[str, int] = Field(description="Of its vectors, by tier.")


class ModelDetails(BaseModel):
    """A model and its versions."""

    name: str
    state: ModelState
    reason: str | None = Field(default=None, description="Why it is not ready.")
    devices: list[int]
    hit_rates: dict[str, float] = Field(
        description="By tier: the share of the keys that it was asked for and had, of all versions."
    )
    versions: list[VersionStatus]


class ModelList(BaseModel):
    """All models, and the changes of them."""

    models: list[ModelDetails]
    changes: list[ChangeAnswer] = Field(description="Of each model, the one under way or the last one.")


class FollowedTable(BaseModel):
    """How far a table of one version has followed the log of its updates."""

    model: str
    version: str
    table: str
    topic: str
    positions: dict[str, str] = Field(
        description="By partition, that of the last message that is applied: every lookup that starts now sees it."
    )
    behind: int | None = Field(description="Messages in the log that are not applied; null if that is not known.")
    lag_s: float | None = Field(
        description="For how long the table has not had what is in the log; null if nothing is known yet."
    )
    rows_per_s: float = Field(description="Over the last ten seconds.")
    rows: int = Field(description="That were applied since the start.")
    stale_rows: int = Field(description="Those among them that were older than what was there, and changed nothing.")
    dead_letters: dict[str, int] = Field(description="Messages that could not be applied, by reason.")
    connected: bool = Field(description="Whether the log can be reached.")
    problem: str = Field(description="What keeps updates from being applied, or what was lost; empty if nothing.")


class UpdateList(BaseModel):
    """All tables that follow a log."""

    tables: list[FollowedTable]
