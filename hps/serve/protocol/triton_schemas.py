"""Schemas of Triton's model repository, statistics and system shared memory extensions.

Source: docs/protocol/extension_model_repository.md, extension_statistics.md and extension_shared_memory.md of
triton-inference-server/server.
"""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, StrictBool, StrictInt, StrictStr

IndexState = Literal["READY", "LOADING", "UNLOADING", "UNAVAILABLE"]
MemoryType = Literal["CPU", "GPU"]


class IndexRequest(BaseModel):
    """Which models to list."""

    model_config = ConfigDict(json_schema_extra={"example": {"ready": True}})

    ready: StrictBool = Field(default=False, description="Only versions that answer lookups.")


class IndexedVersion(BaseModel):
    """A known version of a model."""

    name: str
    version: str | None = Field(default=None, description="Absent if the model's versions cannot be listed.")
    state: IndexState
    reason: str | None = Field(default=None, description="Why it does not answer.")


class LoadParameters(BaseModel):
    """How a model is to be loaded."""

    model_config = ConfigDict(extra="forbid")

    config: StrictStr | None = Field(
        default=None,
        description="JSON: changes to the model's configuration, by keys of Triton's ModelConfig or of its entry.",
    )
    version: StrictStr | None = Field(default=None, description="Of a canary or shadow; by default the newest.")
    canary: StrictStr | None = Field(
        default=None, description="Share of the requests, such as `0.05`, that the version answers beside the serving one."
    )
    shadow: StrictStr | None = Field(default=None, description="Share of the requests that both versions answer.")
    accept: StrictBool = Field(default=False, description="Also a version that its checks hold.")
    promote: StrictBool = Field(default=False, description="Let the version of the canary or shadow serve all requests.")
    rollback: StrictBool = Field(default=False, description="End the canary or shadow, or roll back to the previous version.")


class LoadRequest(BaseModel):
    """A request to load a model."""

    model_config = ConfigDict(json_schema_extra={"example": {"parameters": {"config": '{"max_batch_size": 16}'}}})

    parameters: LoadParameters = LoadParameters()


class UnloadParameters(BaseModel):
    """How a model is to be unloaded."""

    unload_dependents: StrictBool = Field(default=False, description="Ignored: models have no dependents.")


class UnloadRequest(BaseModel):
    """A request to unload a model."""

    parameters: UnloadParameters = UnloadParameters()


class Duration(BaseModel):
    """Count and total duration."""

    count: int
    ns: int


class InferenceDurations(BaseModel):
    """Times of requests."""

    success: Duration = Field(description="Answered requests, from the complete body to the body of the answer.")
    fail: Duration = Field(description="Failed requests.")
    queue: Duration = Field(description="Wait for a thread, then for the event loop.")
    compute_input: Duration = Field(description="Reading the request.")
    compute_infer: Duration = Field(description="The lookup.")
    compute_output: Duration = Field(description="Writing the answer.")
    cache_hit: Duration = Field(description="Always 0, like `cache_miss`: Triton's response cache is not used.")
    cache_miss: Duration


class BatchDurations(BaseModel):
    """Times of requests by batch size; here always 1."""

    batch_size: int
    compute_input: Duration
    compute_infer: Duration
    compute_output: Duration


class MemoryUsage(BaseModel):
    """Memory of a version's vectors."""

    type: MemoryType
    id: int = Field(description="Id of the GPU.")
    byte_size: int


class VersionStatistics(BaseModel):
    """Requests to a version since it was put into service."""

    name: str
    version: str
    last_inference: int = Field(description="Milliseconds since the epoch; 0 if there was none.")
    inference_count: int = Field(description="Answered requests.")
    execution_count: int = Field(description="Same as `inference_count`: requests are not batched.")
    inference_stats: InferenceDurations
    batch_stats: list[BatchDurations]
    memory_usage: list[MemoryUsage]


class StatisticsAnswer(BaseModel):
    """Statistics of versions in service."""

    model_stats: list[VersionStatistics]


class RegisterRequest(BaseModel):
    """A part of a segment of /dev/shm."""

    model_config = ConfigDict(json_schema_extra={"example": {"key": "/input", "offset": 0, "byte_size": 8192}})

    key: StrictStr = Field(description="Name of the segment, as for shm_open.")
    offset: StrictInt = 0
    byte_size: StrictInt


class RegionStatus(BaseModel):
    """A registered region."""

    name: str
    key: str
    offset: int
    byte_size: int
