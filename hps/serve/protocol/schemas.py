"""The published HTTP interface: paths of lookups, and schemas of requests and answers."""

from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

INFER: Final = "/v2/models/{model}/infer"
INFER_VERSION: Final = "/v2/models/{model}/versions/{version}/infer"
LOOKUP: Final = "/v1/models/{model}/lookup"
SCORE: Final = "/v1/models/{model}/score"
ROWS: Final = "/v1/models/{model}/tables/{table}/rows"
ROW: Final = "/v1/models/{model}/tables/{table}/rows/{key}"

ModelState = Literal["waiting", "loading", "ready", "failed"]
TableState = Literal["waiting", "loading", "done", "failed"]
Datatype = Literal["INT64", "INT32", "INT16", "INT8", "UINT8", "FP64", "FP32", "FP16", "BOOL", "BYTES"]
Version = Annotated[str, BeforeValidator(lambda value: str(value) if type(value) is int else value)]


class ErrorAnswer(BaseModel):
    """Why a request was not served."""

    error: str = Field(description="What failed, what the server got, and what it expected.")
    request_id: str = Field(description="Same as in the answer's header `X-Request-Id` and in the log.")


class Live(BaseModel):
    """Whether the process answers, and needs no restart."""

    live: bool
    reason: str | None = Field(default=None, description="Why it must be restarted.")


class Ready(BaseModel):
    """Whether something answers lookups."""

    ready: bool
    reason: str | None = Field(default=None, description="Why it is not ready.")


class TableStatus(BaseModel):
    """Progress of loading a table. Only `name` and `state` if nothing had to be read."""

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
    percent: int = Field(description="Mean over its tables; 100 once it is ready.")
    reason: str | None = Field(default=None, description="Cause of its wait, its progress, or its failure; absent when ready.")
    retry_in_s: float | None = Field(
        default=None, description="Seconds until a failed model is retried; absent if it is not retried."
    )
    tables: list[TableStatus]


class ServerReady(Ready):
    """Whether lookups of every model are answered."""

    models: list[ModelStatus] | None = Field(default=None, description="All models; absent when all are ready.")
    degraded: str | None = Field(
        default=None,
        description="Lost devices: lookups are answered without them, or fail, until the service is restarted. A volatile "
        "database that is away, and its tables that lost rows: lookups are answered by the databases below.",
    )


class ModelReady(Ready):
    """Whether lookups of a model are answered."""

    name: str


class ServerMetadata(BaseModel):
    """The server and the protocol extensions that it speaks."""

    name: str
    version: str
    extensions: list[str]
    models: list[str] = Field(description="Models in service, without those that wait, load or failed.")


class TensorMetadata(BaseModel):
    """An input or output; -1 is a width that the request chooses. `config` names the optional inputs, as in Triton."""

    name: str
    datatype: Datatype
    shape: list[int]


class TableMetadata(BaseModel):
    """A table; its name may be an input."""

    name: str
    dim: int
    max_keys: int = Field(description="Maximum number of this table's keys in one request.")
    default_value: float | None = Field(
        description="Element of the default vector of absent keys; null if JSON cannot express it."
    )


class ShardMetadata(BaseModel):
    """The share of every table that the server holds: the keys with this number, by their hash."""

    index: int
    of: int


class ModelMetadata(BaseModel):
    """A model: its inputs and outputs as in Triton's HPS backend, and its tables."""

    name: str
    versions: list[str]
    platform: str
    inputs: list[TensorMetadata]
    outputs: list[TensorMetadata]
    tables: list[TableMetadata]
    shard: ShardMetadata | None = Field(default=None, description="Absent if the server holds all rows.")


class RequestInput(BaseModel):
    """Keys: `KEYS` and `NUMKEYS`, or one input per table. For keys in bags also `OFFSETS` and `WEIGHTS`, or
    `<table>.offsets` and `<table>.weights`.
    """

    name: str
    datatype: Datatype = Field(description="Of keys INT64 or INT32, of weights FP32; others for features of networks.")
    shape: list[int]
    parameters: dict[str, Any] | None = Field(
        default=None, description="`binary_data_size`: its size in the binary part, in bytes."
    )
    data: list[Any] | None = Field(
        default=None, description="Numbers, flat or nested as in the shape; absent with binary data."
    )


class RequestOutput(BaseModel):
    """A requested output: `OUTPUT0`, `FOUND0`, `<table>` or `<table>.found`."""

    name: str
    parameters: dict[str, Any] | None = Field(
        default=None,
        description="`binary_data`: whether to send it as binary data. `datatype`: of vectors, `FP32`, `FP16` or `BF16`, which "
        "is binary data alone; by default that of the request.",
    )


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
        "the device to answer; by default the least busy one. `combiner` (`sum`, `mean`, `sqrtn` or `max`), `max_norm` and "
        "`padding_key`: for the bags of all tables; `<table>.combiner` and the like: of one table. "
        "`datatype`: of all vectors, by default `FP32`. "
        "`report`: add the answering tiers and the times of stages to the answer's parameters.",
    )
    inputs: list[RequestInput]
    outputs: list[RequestOutput] | None = Field(default=None, description="Outputs to send; by default all vectors.")


class ResponseOutput(BaseModel):
    """Vectors (FP32, or FP16 or BF16 if requested) or a found-mask (BOOL)."""

    name: str
    datatype: Literal["FP32", "FP16", "BF16", "BOOL"]
    shape: list[int]
    parameters: dict[str, Any] | None = Field(
        default=None, description="`binary_data_size`: its size in the binary part, in bytes."
    )
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
        description="For `KEYS`. `NumSample`: the request's keys divided by the maximum keys of a sample, rounded down; or the "
        "bags of a table. `DeviceID`: the device that answered.",
    )
    outputs: list[ResponseOutput]


class LookupRequest(BaseModel):
    """Keys by table: one by one, or in bags."""

    model_config = ConfigDict(json_schema_extra={"example": {"tables": {"item": [1, 2]}, "found": True}}, extra="forbid")

    tables: dict[str, list[int]] | None = Field(default=None, description="Each key gets a vector.")
    bags: dict[str, list[list[int]]] | None = Field(default=None, description="Instead of `tables`: each list gets a vector.")
    weights: dict[str, list[list[float]]] | None = Field(default=None, description="Weights of the keys in bags; 1 by default.")
    combiner: str | dict[str, str] | None = Field(
        default=None, description="`sum` (the default), `mean`, `sqrtn` or `max`: for all bags, or by table."
    )
    max_norm: float | dict[str, float] | None = Field(
        default=None, description="Maximum L2 norm; longer vectors in bags are scaled down. For all bags, or by table."
    )
    padding_key: int | dict[str, int] | None = Field(
        default=None, description="Key to skip in bags; for all bags, or by table."
    )
    found: bool = Field(default=False, description="Return which keys were found; not with bags.")
    device: int | str | None = Field(default=None, description="Device to answer; by default the least busy one.")
    report: bool = Field(default=False, description="Return the answering tiers and the times of stages.")


class TableReport(BaseModel):
    """How the keys of one table were answered."""

    keys: int
    embedding_cache: int
    volatile_db: int
    persistent_db: int
    linked: int = Field(description="Keys read by the device from host memory.")
    defaults: int = Field(description="Keys that no tier has.")
    deferred: int = Field(description="Keys answered with default vectors and fetched afterwards.")


class LookupReport(BaseModel):
    """How one request was answered."""

    hit_rate: float | None = Field(description="Share of all keys that embedding caches answered; null without keys.")
    tables: dict[str, TableReport]
    us: dict[str, float] = Field(
        description="Microseconds of each stage; also `queue`, the wait for a thread, and `lookup`, the complete lookup."
    )


class LookupResponse(BaseModel):
    """Vectors by table, in the order of the keys or bags."""

    tables: dict[str, list[list[float | None]]] = Field(description="null is a value that JSON cannot express (NaN, infinity).")
    found: dict[str, list[bool]] | None = Field(
        default=None, description="If requested: false for keys that got the default vector."
    )
    report: LookupReport | None = Field(default=None, description="If requested.")


class ScoreRequest(BaseModel):
    """Samples to score."""

    user: dict[str, Any] = Field(
        {}, description='Inputs that all samples share, by name; `{"x": {"id": 7}}` gives the input `x.id`.'
    )
    items: list[dict[str, Any]] = Field(description="For each sample, its own inputs by name.")
    timeout_us: int = Field(0, description="How long the scores are of use, in microseconds; 0: always.")
    device: int | None = Field(None, description="The device that shall answer.")


class ScoreAnswer(BaseModel):
    """The outputs of a network."""

    model: str
    version: str
    outputs: dict[str, list[Any]] = Field(description="By name, a value or list for each sample.")


class RowsRequest(BaseModel):
    """Rows to write."""

    model_config = ConfigDict(
        json_schema_extra={"example": {"keys": [17, 42], "vectors": [[0.1, 0.2], [0.3, 0.4]]}}, extra="forbid"
    )

    keys: list[int]
    vectors: list[list[float]] = Field(description="One vector per key, as wide as the table.")


class KeysRequest(BaseModel):
    """Keys of rows to delete."""

    model_config = ConfigDict(json_schema_extra={"example": {"keys": [17, 42]}}, extra="forbid")

    keys: list[int]


class RowsAnswer(BaseModel):
    """Lookups that start now see the change in every tier: the written rows, or default vectors for deleted ones."""

    model: str
    version: str = Field(description="Version that was changed: each version has its own rows.")
    table: str
    rows: int = Field(description="Number of rows in the request.")


class RowAnswer(BaseModel):
    """The row of a key."""

    model: str
    version: str
    table: str
    key: int
    found: bool
    tier: Literal["embedding_cache", "volatile_db", "persistent_db"] | None = Field(description="First tier that has the key.")
    written_at: str | None = Field(description="When the row was written or loaded (ISO 8601, UTC); null if unknown.")
    written_at_us: int | None = Field(description="`written_at` in microseconds since 1970.")
    vector: list[float | None] = Field(description="The default vector if no tier has the key. null is NaN or an infinity.")


class DeployRequest(BaseModel):
    """The version to deploy; all members are optional."""

    model_config = ConfigDict(json_schema_extra={"example": {"version": "2"}}, extra="forbid")

    version: Version | None = Field(default=None, description="By default as chosen by the model's `version_policy`.")
    force: bool = Field(default=False, description="Load the files even if the databases hold them. Online writes are lost.")
    accept: bool = Field(default=False, description="Let the version serve whatever its checks find, also if they hold it.")
    config: dict[str, Any] | None = Field(
        default=None, description="Entry of `models` as in a ps.json: replaces the configured one, or adds a model."
    )
    canary: float | None = Field(
        default=None, description="Share of the requests, in (0, 1], that the version answers beside the serving one."
    )
    shadow: float | None = Field(
        default=None, description="Share of the requests that both versions answer; clients get the serving one's answers."
    )
    steps: list[dict[str, float]] | None = Field(
        default=None, description="`share`, `seconds` and `requests` of each step; default: `models[].canary.steps`."
    )
    header: str | None = Field(default=None, description="Header that selects requests; default: `models[].canary.header`.")
    max_error_rate: float | None = Field(default=None, description="By how much its share of errors may be higher.")
    max_p99_factor: float | None = Field(default=None, description="How many times as long its 99th percentile may be.")
    max_difference: float | None = Field(default=None, description="Largest mean difference, as a share of the mean.")
    least_requests: int | None = Field(default=None, description="Compared requests before `max_difference` counts.")


class PromoteRequest(BaseModel):
    """How to promote the version of a canary or shadow; optional."""

    model_config = ConfigDict(json_schema_extra={"example": {}}, extra="forbid")

    accept: bool = Field(default=False, description="Also a version that its checks hold.")


class RolledOutVersion(BaseModel):
    """The requests of one version during a canary or shadow."""

    version: str
    requests: int
    errors: int = Field(description="Failed requests. Those of a canary's new version were then answered by the serving one.")
    error_rate: float
    p50_ms: float | None = Field(description="Median of the times; null before the first answer. Of a shadow: in the engine.")
    p99_ms: float | None


class ComparedAnswers(BaseModel):
    """Requests that both versions answered; clients got one of the answers."""

    requests: int
    identical: int
    failed: int = Field(description="Requests that the other version did not answer, or with other shapes.")
    dropped: int = Field(description="Requests that were not compared, since others needed the memory or the queue was full.")
    difference: float | None = Field(description="Mean of |new - old| over the mean of |old|; null before the first.")
    max_difference: float
    correlation: float | None = Field(description="Correlation of all numbers; null if it is undefined.")


class RolloutStep(BaseModel):
    """A share of the requests, and what ends the step."""

    model_config = ConfigDict(extra="forbid")

    share: float = Field(description="In (0, 1]; 1 promotes the version.")
    seconds: float = 0.0
    requests: int = Field(default=0, description="Requests that the new version shall have answered.")


class RolloutBounds(BaseModel):
    """Bounds that end a rollout when the new version breaks one."""

    error_rate: float
    p99_factor: float
    difference: float | None
    least_requests: int


class RolloutAnswer(BaseModel):
    """A canary or shadow of a model, under way or the last one."""

    mode: Literal["canary", "shadow"]
    state: Literal["loading", "running", "promoted", "rolled back", "ended"]
    version: str
    serving: str = Field(description="The version beside which it runs.")
    share: float = Field(description="Share of the requests now; 0 once it has ended.")
    header: str = Field(description="Header that selects; without it, the id of the request does.")
    since: str = Field(description="Time of its begin (ISO 8601, UTC).")
    seconds: float = Field(description="Duration, so far or in total.")
    step: int = Field(description="From 1.")
    step_seconds: float
    steps: list[RolloutStep]
    bounds: RolloutBounds
    versions: list[RolledOutVersion] = Field(description="The serving version, then the new one.")
    compared: ComparedAnswers
    by: str = Field(description="Who ended it: a client, or `itself`; empty before.")
    reason: str = Field(description="Why it ended; empty if somebody wanted it so.")


class UndeployRequest(BaseModel):
    """The version to take out of service; optional."""

    model_config = ConfigDict(json_schema_extra={"example": {"version": "1"}}, extra="forbid")

    version: Version | None = Field(default=None, description="By default all versions of the model.")


class IntegrityReport(BaseModel):
    """The outcome of a check of the invariants."""

    findings: list[str] = Field(description="A sentence for each invariant that is broken; empty if all hold.")


class PinStatus(BaseModel):
    """The version that somebody chose for a model in place of its `version_policy`."""

    version: str
    by: Literal["rollback", "deploy", "canary"] = Field(description="The change that chose it.")
    since: str = Field(description="Time of that change (ISO 8601, UTC).")
    text: str = Field(description="Description for people, such as `pinned by rollback, 2026-11-23`.")
    problem: str | None = Field(default=None, description="Why a restart ends the pin; absent if it outlasts one.")


class FleetRequest(BaseModel):
    """A change of what every replica serves."""

    model_config = ConfigDict(json_schema_extra={"example": {"change": "rollback"}}, extra="forbid")

    change: Literal["deploy", "rollback", "unpin", "canary", "promote"] = Field(
        description="`canary` tries a version out, `promote` lets it serve; `rollback` ends a canary that is under way."
    )
    version: Version | None = Field(
        default=None, description="Version to deploy; by default as chosen by the `version_policy`; of a canary, the newest."
    )
    canary: float | None = Field(default=None, description="As of a deployment, with the change `canary`; likewise below.")
    shadow: float | None = None
    steps: list[dict[str, float]] | None = None
    header: str | None = None
    max_error_rate: float | None = None
    max_p99_factor: float | None = None
    max_difference: float | None = None
    least_requests: int | None = None


class FleetAnswer(BaseModel):
    """What the `serving.json` of a model says, and whether this replica follows it."""

    wanted: str = Field(description="The version that every replica should serve; empty if the `version_policy` chooses.")
    previous: str = Field(description="The version to roll back to; empty if that is the next one below.")
    withdrawn: list[str] = Field(description="Versions that were rolled back from, and not deployed since.")
    by: Literal["deploy", "rollback", "unpin", "canary", "promote"] = Field(description="The change that wrote the document.")
    since: str = Field(description="Time of that change (ISO 8601, UTC).")
    number: int = Field(description="Increases with every change.")
    serving: str = Field(description="The version that this replica serves; empty if none.")
    follows: bool = Field(description="Whether this replica serves what the document says, and can read it.")
    pending: bool = Field(description="Whether this replica is about to follow, or to try.")
    reason: str | None = Field(default=None, description="Why it does not follow.")
    age_s: float | None = Field(default=None, description="Seconds since this replica last read the document.")


class ChangeAnswer(BaseModel):
    """A change of a model, under way or ended."""

    number: int = Field(description="Sequence number of the change in this server.")
    model: str
    what: str
    by: str = Field(description="Address of the client, and its authorization.")
    since: str = Field(description="Start time (ISO 8601, UTC).")
    seconds: float = Field(description="Duration in seconds, so far or in total.")
    status: int | None = Field(default=None, description="Outcome as an HTTP status; absent while under way.")
    version: str | None = Field(default=None, description="Serving version after a successful change.")
    error: str | None = Field(default=None, description="Why it failed.")
    table: TableStatus | None = Field(default=None, description="The table that is being loaded.")
    rows: int = Field(description="Rows read from model files into the databases, so far or in total.")
    pinned: PinStatus | None = Field(
        default=None, description="The pin that it made, until it is ended by `deploy` or `unpin`."
    )
    unpinned: PinStatus | None = Field(default=None, description="The pin that it ended; polling takes newer versions again.")
    degraded: str | None = Field(
        default=None, description="What lookups do without after the change, as in `/v2/health/ready`; absent if nothing."
    )


class RecordedRequests(BaseModel):
    """A sample of the requests of a model."""

    requests: list[str] = Field(description="Lines of a `requests.jsonl`, the oldest first.")


class CheckStatus(BaseModel):
    """The result of one check of a version."""

    check: Literal["finite", "keys", "norms", "vectors", "scores", "expected"]
    table: str | None = Field(default=None, description="Absent for checks of the network.")
    outcome: Literal["passed", "failed", "skipped"]
    policy: Literal["refuse", "hold", "warn"] = Field(description="What follows if it fails.")
    text: str | None = Field(default=None, description="What was got and expected, or why it was skipped.")
    figures: dict[str, float] = Field(description="What was measured.")


class ChecksStatus(BaseModel):
    """The results of the checks of a version before it took over."""

    verdict: Literal["passed", "held", "refused", "accepted"] = Field(
        description="`held`: it answers only those who name it, until it is accepted; `accepted`: by a person."
    )
    against: str | None = Field(default=None, description="The version that served, and that it was compared with.")
    at: str = Field(description="Start (ISO 8601, UTC).")
    seconds: float
    reason: str | None = Field(default=None, description="The failed checks.")
    checks: list[CheckStatus]


class VersionStatus(BaseModel):
    """A version of a model, and its sizes."""

    version: str
    state: Literal["serving", "available", "held", "kept", "retiring"] = Field(
        description="`serving` answers requests without a version, `available` those with it, `held` likewise, since its "
        "checks failed; `kept` waits for a roll-back, `retiring` for its last lookups."
    )
    since: str = Field(description="Time it was put into service (ISO 8601, UTC).")
    rows: int = Field(description="Rows in its model files.")
    size_bytes: dict[str, int] = Field(description="Size of its vectors by tier.")
    stale_copies: list[str] = Field(description="Tables that take no online writes, since its network has a copy of them.")
    checks: ChecksStatus | None = Field(default=None, description="Its checks; absent if it was not checked.")


class ModelDetails(BaseModel):
    """A model and its versions."""

    name: str
    state: ModelState
    reason: str | None = Field(default=None, description="Why it is not ready.")
    devices: list[int]
    hit_rates: dict[str, float] = Field(description="By tier: share of the requested keys that it had, over all versions.")
    versions: list[VersionStatus]
    pinned: PinStatus | None = Field(default=None, description="The pin to a version, if there is one.")
    shard: ShardMetadata | None = Field(default=None, description="Share of its tables in the server; absent for all rows.")
    fleet: FleetAnswer | None = Field(default=None, description="What the `serving.json` of the model says, if there is one.")
    rollout: RolloutAnswer | None = Field(default=None, description="Its canary or shadow, under way or the last one.")


class ModelList(BaseModel):
    """All models and their changes."""

    models: list[ModelDetails]
    changes: list[ChangeAnswer] = Field(description="Current or last change of each model.")


class FollowedTable(BaseModel):
    """How far a table of one version has followed the log of its updates."""

    model: str
    version: str
    table: str
    topic: str
    positions: dict[str, str] = Field(
        description="By partition, position of the last applied message: lookups that start now see it."
    )
    behind: int | None = Field(description="Messages in the log that are not applied; null if unknown.")
    lag_s: float | None = Field(
        description="Age of the oldest message that is not applied, by the log; 0 if there is none, null if unknown yet."
    )
    rows_per_s: float = Field(description="Rate over the last ten seconds.")
    rows: int = Field(description="Rows applied since the start.")
    stale_rows: int = Field(description="Those that were older than the stored row, and changed nothing.")
    future_times: int = Field(description="Messages that claimed a time more than a second ahead of the server's clock.")
    dead_letters: dict[str, int] = Field(description="Messages that could not be applied, by reason.")
    connected: bool = Field(description="Whether the log brings the messages of the table.")
    problem: str = Field(description="Obstacle to applying updates, or a loss of messages; empty if none.")


class UpdateList(BaseModel):
    """All tables that follow a log."""

    tables: list[FollowedTable]
