"""The configuration as frozen models; `docs/configuration.md` explains each key.

Attribute names are the keys of HugeCTR's `ps.json`.
"""

# Every check belongs to one field and sees the fields before it; none checks an entire object, since pydantic runs such checks
# only if all fields are valid. So one load reports every problem.

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Final, Literal, Self, TypeAlias

from pydantic import (
    AfterValidator,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    PrivateAttr,
    SkipValidation,
    TypeAdapter,
    ValidationInfo,
    ValidatorFunctionWrapHandler,
    field_validator,
    model_validator,
)

from hps.configuration.canary import CanaryConfig
from hps.configuration.checks import Checks, ChecksConfig
from hps.configuration.fields import (
    INT32_MAX,
    UINT64_MAX,
    Bytes,
    Flag,
    Float32,
    Ignored,
    Integer,
    ListOf,
    Name,
    NonEmptyListOf,
    NonNegative,
    Place,
    Positive,
    Real,
    Seconds,
    Share,
    Timeout,
    Token,
    Version,
    check_host,
    choice,
    expected,
    notices_of,
    problem,
    validate_with,
)
from hps.configuration.networks import DenseConfig
from hps.configuration.tiers import ModelSourceConfig, PersistentDbConfig, Section, UpdateSourceConfig, VolatileDbConfig
from hps.configuration.transforms import TransformConfig
from hps.ground.registry import IMPLEMENTATIONS, has_capability
from hps.ground.shares import MOST_SHARES, TableShare
from hps.types import ROW_DTYPES, TableSpec

FIRST_VERSION: Final = "1"
"""The default version of a model."""

CacheType: TypeAlias = Annotated[
    Literal["dynamic", "static", "uvm", "stochastic"], choice("dynamic", "static", "uvm", "stochastic")
]
DeviceSharingChoice: TypeAlias = Annotated[Literal["replicate", "partition", "hot"], choice("replicate", "partition", "hot")]
MissPath: TypeAlias = Annotated[Literal["auto", "link", "copy"], choice("auto", "link", "copy")]
RowDtype: TypeAlias = Annotated[Literal["float32", "float16", "bfloat16", "int8"], choice(*ROW_DTYPES)]
ControlMode: TypeAlias = Annotated[Literal["none", "explicit", "poll"], choice("none", "explicit", "poll")]
DeviceChoice: TypeAlias = Annotated[str, choice("auto", *IMPLEMENTATIONS["cache"], kind="cache")]
LogLevel: TypeAlias = Annotated[
    Literal["critical", "error", "warning", "info", "debug"], choice("critical", "error", "warning", "info", "debug")
]
LogFormat: TypeAlias = Annotated[Literal["text", "json"], choice("text", "json")]


def _with_certificate(value: str, info: ValidationInfo) -> str:
    if value and not info.data.get("tls_certificate_path", "wrong"):
        raise problem("it has no effect alone, expected tls_certificate_path, too")
    return value


class ServiceConfig(Section):
    """`service`: the HTTP server. HugeCTR has no such object."""

    model_config = ConfigDict(title="service")

    host: Annotated[str, Field(min_length=1), AfterValidator(check_host)] = "127.0.0.1"
    port: Annotated[Integer, Field(ge=0, le=65535)] = 8000
    fronts: Annotated[Integer, Field(ge=0, le=256)] | None = None
    grpc_port: Annotated[Integer, Field(ge=0, le=65535)] | None = None
    bearer_token: Token = ""
    admin_token: Token = ""
    tokens_path: str = ""
    tls_certificate_path: str = ""
    tls_key_path: Annotated[str, AfterValidator(_with_certificate)] = ""
    tls_client_ca_path: Annotated[str, AfterValidator(_with_certificate)] = ""
    max_body_bytes: Bytes = 64 << 20
    max_keys_per_request: Positive = 1_000_000
    max_rows_per_write: Positive = 1_000_000
    refuse_nan: Flag = True
    lookup_threads: Annotated[Integer, Field(ge=1, le=1024)] = 8
    request_timeout_s: Timeout = 10.0
    answer_timeout_s: Timeout = 10.0
    max_connections: Positive = 4096
    max_held_bytes: Bytes = Field(default_factory=lambda data: max(1 << 30, 8 * data.get("max_body_bytes", 0)))
    keep_alive_s: Timeout = 75.0
    drain_s: Seconds = 5.0
    log_level: LogLevel = "info"
    log_format: LogFormat = "text"
    access_log_per_s: Annotated[Integer, Field(ge=0)] = 10
    slow_lookup_ms: Annotated[Real, Field(ge=0)] = 0.0
    otlp_endpoint: str = ""
    model_control_mode: ControlMode = "none"
    load_models: ListOf[Annotated[str, Field(min_length=1)]] = ()
    allow_empty: Flag = False
    repository_poll_s: Timeout = 15.0
    triton_metrics: Flag = False
    shared_memory_bytes: Annotated[Integer, Field(ge=0)] = 0

    @property
    def scheme(self) -> str:
        return "https" if self.tls_certificate_path else "http"

    @field_validator("admin_token")
    @classmethod
    def _check_admin(cls, value: str, info: ValidationInfo) -> str:
        if value and value == info.data.get("bearer_token"):
            raise problem("it equals bearer_token, expected another token: the bearer token must not allow changes")
        return value

    @field_validator("max_held_bytes")
    @classmethod
    def _check_held_bytes(cls, value: int, info: ValidationInfo) -> int:
        least = 2 * info.data.get("max_body_bytes", 0)
        if value < least:
            raise problem(f"got {value}, expected at least {least}, twice max_body_bytes")
        return value

    @field_validator("load_models")
    @classmethod
    def _check_load_models(cls, value: tuple[str, ...], info: ValidationInfo) -> tuple[str, ...]:
        if value and info.data.get("model_control_mode", "explicit") != "explicit":
            raise problem("got models to load at the start, expected none unless model_control_mode is explicit")
        return value

    @field_validator("otlp_endpoint")
    @classmethod
    def _check_endpoint(cls, value: str) -> str:
        if value and not value.startswith(("http://", "https://")):
            raise problem(f"got {value!r}, expected the URL of an OTLP/HTTP receiver, such as http://127.0.0.1:4318")
        return value


@dataclass(frozen=True)
class VersionPolicy:
    """Chooses the served versions of a model, as Triton's `version_policy`. *Immutable.*

    Attributes:
        latest: number of highest versions to serve.
        specific: versions to serve instead, if not empty.
    """

    latest: int = 1
    specific: tuple[str, ...] = ()

    def chosen(self, versions: Iterable[str], also: str | None = None) -> list[str]:
        """Select the served versions, ascending.

        Args:
            also: a version that is served in any case; it counts as one of the latest.
        """
        ascending = sorted(set(versions), key=int)
        if self.specific:
            return [version for version in ascending if version in (*self.specific, also)]
        others = [version for version in ascending if version != also]
        latest = others[max(0, len(others) - self.latest + (also in ascending)) :]
        return [version for version in ascending if version in (*latest, also)]

    def as_written(self) -> dict[str, Any]:
        """Return the value of `version_policy` in a `ps.json` and in Triton's model configuration."""
        if self.specific:
            return {"specific": {"versions": [int(version) for version in self.specific]}}
        return {"all": {}} if self.latest == INT32_MAX else {"latest": {"num_versions": self.latest}}


def _policy(value: Any) -> Any:
    example = '{"latest": {"num_versions": 1}}, {"all": {}} or {"specific": {"versions": [1, 3]}}'
    match value:
        case VersionPolicy():
            return value
        case {"latest": {"num_versions": int(count), **none}, **nothing} if count >= 1 and not none and not nothing:
            return VersionPolicy(count)
        case {"all": {**none}, **nothing} if not none and not nothing:
            return VersionPolicy(INT32_MAX)
        case {"specific": {"versions": [_, *_] as listed, **none}, **nothing} if not none and not nothing:
            return VersionPolicy(0, TypeAdapter(ListOf[Version]).validate_python(listed))
    raise expected(example)


class VersionConfig(Section):
    """An entry of `models[].versions`: the files of one version."""

    model_config = ConfigDict(title="models[].versions[]")

    version: Version
    sparse_files: NonEmptyListOf[Place]
    delta_of: Version | None = None
    dense: DenseConfig | None = None


class ShardConfig(Section):
    """`models[].shard`: the share of every table that a server holds."""

    model_config = ConfigDict(title="models[].shard")

    index: NonNegative
    of: Annotated[Integer, Field(ge=1, le=MOST_SHARES)]

    @field_validator("of")
    @classmethod
    def _check_index(cls, value: int, info: ValidationInfo) -> int:
        if (index := info.data.get("index", 0)) >= value:
            raise problem(f"got index {index} of {value} shares, expected an index from 0 to {value - 1}")
        return value


def _read_shard(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    try:
        share = TableShare.parse(value)
    except ValueError:
        raise expected('{"index": 1, "of": 4} or "1/4"') from None
    return {"index": share.index, "of": share.of}


def _float32_rows(tables: int) -> tuple[RowDtype, ...]:
    row_dtype: RowDtype = "float32"
    return (row_dtype,) * tables


_COUNTED = {  # lists with an element per table: noun of an element
    "embedding_table_names": "name",
    "embedding_vecsize_per_table": "width",
    "maxnum_catfeature_query_per_table_per_sample": "maximum",
    "row_dtype": "row format",
    "row_ttl_s": "lifetime",
}
_OF_ALL_TABLES = ("row_dtype", "row_ttl_s")  # a single value is every table's


def _fit_default_values(value: Any, info: ValidationInfo) -> Any:
    """Read a list of another length as HugeCTR's core does since 23.06: missing values are 0, further ones have no effect."""
    files = info.data.get("sparse_files")
    if not isinstance(value, list | tuple) or files is None or len(value) == len(files):
        return value
    if any(value):
        got = f"{len(value)} values" if len(value) != 1 else "1 value"
        others = "the other tables have 0" if len(value) < len(files) else "the last ones have no effect"
        notices_of(info).warnings.append(
            f"model {info.data.get('model')}: default_value_for_each_table has {got} for {len(files)} sparse_files; {others}, "
            "as in HugeCTR; write one for each"
        )
    return [*value[: len(files)], *[0.0] * (len(files) - len(value))]


class ModelConfig(Section):
    """An entry of `models`: the tables of one model and how they are cached."""

    model_config = ConfigDict(title="models[]")

    model: Name
    sparse_files: NonEmptyListOf[Place]
    embedding_table_names: ListOf[Name] = Field(
        default_factory=lambda data: tuple(f"sparse_embedding{i}" for i in range(len(data["sparse_files"])))
    )
    embedding_vecsize_per_table: ListOf[Positive]
    max_batch_size: Positive = 64
    maxnum_catfeature_query_per_table_per_sample: ListOf[Positive]
    default_value_for_each_table: Annotated[ListOf[Float32], BeforeValidator(_fit_default_values)]
    deployed_device_list: NonEmptyListOf[NonNegative]

    row_dtype: ListOf[RowDtype] = Field(default_factory=lambda data: _float32_rows(len(data["sparse_files"])))
    gpucache: Flag = True
    gpucacheper: Annotated[Real, Field(ge=0, le=4)] = 0.2
    hit_rate_threshold: Real = 1.1
    use_static_table: Flag = False
    embedding_cache_type: CacheType = Field(default="dynamic", validate_default=True)
    init_ec: Flag = True
    cache_refresh_percentage_per_iteration: Share = 0.0
    num_of_worker_buffer_in_pool: Annotated[Integer, Field(ge=1, le=256)] = 1
    num_of_refresher_buffer_in_pool: NonNegative = 1
    thread_pool_size: NonNegative = 16
    refresh_delay: Seconds = 0.0
    refresh_interval: Seconds = 0.0
    refresh_jitter: Share = 0.1
    refresh_device_share: Annotated[Real, Field(gt=0, le=1)] = 0.1
    use_context_stream: Flag = True
    use_hctr_cache_implementation: Flag = True
    enable_pagelock: Flag = False
    fp8_quant: Flag = False
    fuse_embedding_table: Flag = True

    version: Version = "1"
    versions: ListOf[VersionConfig] = ()
    version_path: str = ""
    version_policy: Annotated[
        VersionPolicy, SkipValidation, BeforeValidator(_policy), PlainSerializer(VersionPolicy.as_written)
    ] = Field(default_factory=VersionPolicy)
    keep_versions: NonNegative = 1
    max_nonfinite_rows: NonNegative = 0
    checks: Checks = Field(default_factory=ChecksConfig)
    canary: CanaryConfig = Field(default_factory=CanaryConfig)
    row_ttl_s: ListOf[Seconds] = Field(default_factory=lambda data: (0.0,) * len(data["sparse_files"]))
    row_ttl_files: Flag = False
    shard: Annotated[ShardConfig | None, BeforeValidator(_read_shard)] = None

    workspace_timeout_s: Timeout = 1.0
    insert_queue_length: Annotated[Integer, Field(ge=1, le=65536)] = 64
    miss_path: MissPath = "auto"
    index_on_device: Flag = False
    device_sharing: DeviceSharingChoice = "replicate"
    dense: DenseConfig | None = None
    transform: TransformConfig | None = None

    dense_file: Ignored = None
    network_file: Ignored = None
    label_dim: Ignored = None
    slot_num: Ignored = None
    maxnum_des_feature_per_sample: Ignored = None
    use_mixed_precision: Ignored = None
    mixed_precision: Ignored = None
    scaler: Ignored = None
    use_algorithm_search: Ignored = None
    use_cuda_graph: Ignored = None
    non_trainable_params_file: Ignored = None
    db_type: Ignored = None
    redis_ip: Ignored = None
    rocksdb_path: Ignored = None
    cache_size_percentage_redis: Ignored = None

    @property
    def share(self) -> TableShare | None:
        """The share of every table that this server holds; None for all rows."""
        return None if self.shard is None or self.shard.of == 1 else TableShare(self.shard.index, self.shard.of)

    @property
    def tables(self) -> tuple[TableSpec, ...]:
        """The tables of this version, in the order of their ids."""
        slot = "" if self.version == FIRST_VERSION else self.version
        columns = zip(
            self.embedding_table_names,
            self.embedding_vecsize_per_table,
            self.default_value_for_each_table,
            self.maxnum_catfeature_query_per_table_per_sample,
            self.row_dtype,
            strict=True,
        )
        return tuple(
            TableSpec(self.model, name, dim, default, self.max_batch_size * maxnum, slot, row_dtype, self.share)
            for name, dim, default, maxnum, row_dtype in columns
        )

    @property
    def reason_against_sharing(self) -> str:
        """The reason why devices share no rows on any machine; empty if GPUs share them."""
        if self.device_sharing == "replicate":
            return "device_sharing is replicate"
        if not self.gpucache:
            return "gpucache is false"
        return "deployed_device_list names one device" if len(self.deployed_device_list) == 1 else ""

    @field_validator(*_COUNTED, mode="wrap")
    @classmethod
    def _check_count(cls, value: Any, handler: ValidatorFunctionWrapHandler, info: ValidationInfo) -> Any:
        files = info.data.get("sparse_files")
        text = None
        if info.field_name in _OF_ALL_TABLES and isinstance(value, str | int | float):
            value = [value]
        if info.field_name in _OF_ALL_TABLES and files is not None and type(value) is list and len(value) == 1:
            value = value * len(files)
        if files is not None and isinstance(value, list | tuple) and len(value) != len(files):
            what = _COUNTED[str(info.field_name)]
            text = f"{len(value)} {what}{'' if len(value) == 1 else 's'} for {len(files)} sparse_files"
        return validate_with(handler, value, text)

    @field_validator("embedding_table_names", "deployed_device_list", mode="wrap")
    @classmethod
    def _refuse_repetition(cls, value: Any, handler: ValidatorFunctionWrapHandler) -> Any:
        return validate_with(handler, value, _repeated(value) if isinstance(value, list | tuple) else None)

    @field_validator("maxnum_catfeature_query_per_table_per_sample")
    @classmethod
    def _check_lookup_keys(cls, value: tuple[int, ...], info: ValidationInfo) -> tuple[int, ...]:
        batch = info.data.get("max_batch_size", 1)
        if batch * max(value, default=0) > INT32_MAX:
            keys = batch * max(value)
            raise problem(
                f"got {max(value)} keys a sample and {batch} samples (max_batch_size), {keys} keys in one lookup; "
                f"expected at most {INT32_MAX}"
            )
        return value

    @field_validator("row_ttl_files")
    @classmethod
    def _check_row_ttl_files(cls, value: bool, info: ValidationInfo) -> bool:
        if value and info.data.get("embedding_cache_type") == "static":
            raise problem("got true with embedding_cache_type static, whose cache holds every row; expected another type")
        return value

    @field_validator("device_sharing")
    @classmethod
    def _check_sharing(cls, value: str, info: ValidationInfo) -> str:
        if value == "hot" and info.data.get("embedding_cache_type") == "static":
            raise problem(
                "got hot with embedding_cache_type static, whose cache holds every row; expected partition or another type"
            )
        return value

    @field_validator("dense")
    @classmethod
    def _check_dense(cls, value: DenseConfig | None, info: ValidationInfo) -> DenseConfig | None:
        names = info.data.get("embedding_table_names", ())
        most = info.data.get("maxnum_catfeature_query_per_table_per_sample", ())
        if value is not None and len(names) == len(most):
            check_tables(value, dict(zip(names, most, strict=True)))
        return value

    @field_validator("versions")
    @classmethod
    def _check_versions(cls, value: tuple[VersionConfig, ...], info: ValidationInfo) -> tuple[VersionConfig, ...]:
        tables, numbers = len(info.data.get("sparse_files", ())), [info.data.get("version", FIRST_VERSION)]
        for index, entry in enumerate(value):
            if tables and len(entry.sparse_files) != tables:
                raise problem(f"{len(entry.sparse_files)} sparse_files in entry {index} for {tables} tables")
            numbers.append(entry.version)
        if text := _repeated(numbers):
            raise problem(f"the version {text}, counted from the entry's own `version`")
        return value

    @field_validator("embedding_cache_type")
    @classmethod
    def _apply_use_static_table(cls, value: str, info: ValidationInfo) -> str:
        return "static" if info.data.get("use_static_table") else value

    @model_validator(mode="after")
    def _warn_of_unimplemented(self, info: ValidationInfo) -> Self:
        warnings = notices_of(info).warnings
        if self.embedding_cache_type == "stochastic":
            warnings.append(f"model {self.model}: a stochastic cache fills no database, as in HugeCTR; dynamic does")
        warnings.extend(
            f"model {self.model}: {key} is not implemented; it is read as false"
            for key in ("enable_pagelock", "fp8_quant")
            if getattr(self, key)
        )
        return self


def check_tables(dense: DenseConfig, tables: Mapping[str, int]) -> None:
    """Check that the lookups of a network are of a model's tables.

    Args:
        tables: by name, the most keys of a sample.

    Raises:
        PydanticCustomError: they are not.
    """
    for name, given in dense.inputs.items():
        if given.table is not None and given.table not in tables:
            raise problem(
                f"input {json.dumps(name)} is of table {json.dumps(given.table)}, expected one of {', '.join(tables)}"
            )
        if given.table is not None and (given.hotness or 1) > tables[given.table]:
            raise problem(
                f"input {json.dumps(name)} has {given.hotness} keys a sample, expected at most {tables[given.table]} "
                f"(maxnum_catfeature_query_per_table_per_sample of table {given.table})"
            )
    for name, lookup in dense.lookups.items():
        if lookup.table not in tables:
            raise problem(
                f"lookup {json.dumps(name)} is of table {json.dumps(lookup.table)}, expected one of {', '.join(tables)}"
            )
    if unknown := [name for name in dense.stale_copies if name not in tables]:
        raise problem(f"stale_copies has table {json.dumps(unknown[0])}, expected some of {', '.join(tables)}")


def _unlinkable(model: ModelConfig, others: dict[str, Any]) -> str:
    """Return why devices cannot read the model's rows in host memory; empty if they can."""
    volatile, resident = others.get("volatile_db"), model.embedding_cache_type in ("static", "uvm")
    if others.get("device") == "cpu":
        return "device is cpu"
    if not model.gpucache:
        return "gpucache is false"
    if volatile is None or resident:  # these have their own hash map
        return ""
    if volatile.type == "redis_cluster":
        return "volatile_db is redis_cluster, which other servers write to"
    if volatile.type == "disabled":
        persistent = others.get("persistent_db")
        return (
            ""
            if persistent is None or persistent.type == "row_files"
            else "volatile_db is disabled, and persistent_db not row_files"
        )
    if volatile.overflow_margin < UINT64_MAX and volatile.overflow_policy != "evict_random":
        return f"overflow_policy {volatile.overflow_policy} must record every read of a row"
    return ""


def _without_misses_by_link(model: ModelConfig) -> str:
    """Return why devices read no misses in host memory, with any database; empty if they may."""
    if model.embedding_cache_type == "static":
        return "embedding_cache_type is static, whose cache holds every row"
    return "miss_path is copy" if model.miss_path == "copy" else ""


def _unshareable(model: ModelConfig, others: dict[str, Any]) -> str:
    """Return why a server cannot hold a share of a model; empty if it can."""
    volatile = others.get("volatile_db")
    if model.share is None or volatile is None or volatile.type != "redis_cluster":
        return ""
    return (
        f"model {model.model}: shard {model.share} with volatile_db redis_cluster, which servers of all shares would use; "
        "expected a volatile_db in this process or none, or no shard, since Redis holds the rows of all servers"
    )


def _unwritable(tiers: list[Any], capability: Literal["OrderedWrites", "AgingRows"]) -> str:
    """Return why no database has a capability of online changes; empty if one has.

    Args:
        tiers: `persistent_db`, then `volatile_db`.
    """
    authority = next((tier for tier in tiers if tier.type != "disabled"), None)
    if authority is None:
        return "there is no database to keep online changes; configure volatile_db or persistent_db"
    title = authority.model_config["title"]
    if getattr(authority, "read_only", False):
        return f"{title}.read_only does not allow online changes; set it to false"
    if not has_capability(authority.type, capability):
        what = "order of updates" if capability == "OrderedWrites" else "times of rows"
        return f"databases of type {authority.type} keep no {what} ({title}); configure another type"
    return ""


def _unageable(model: ModelConfig, others: dict[str, Any]) -> str:
    """Return why the rows of a model cannot age; empty if they can."""
    tiers = [others[key] for key in ("persistent_db", "volatile_db") if key in others]
    if not any(model.row_ttl_s) or len(tiers) < 2:  # one is wrong
        return ""
    if tiers[0].type == "disabled" and model.embedding_cache_type in ("static", "uvm"):  # has its own hash map
        return ""
    text = _unwritable(tiers, "AgingRows")
    return f"model {model.model}: got row_ttl_s, but {text}" if text else ""


def _repeated(values: Sequence[Any]) -> str | None:
    """Name a value that is repeated in a list; None if all differ. Values need not be hashable."""
    seen: dict[str | int, int] = {}
    for i, value in enumerate(values):
        if isinstance(value, str | int) and seen.setdefault(value, i) != i:
            return f"{json.dumps(value)} is at positions {seen[value]} and {i}; expected it once"
    return None


class _UnloggedNotices(list[tuple[int, str]]):
    """Notices that are not logged yet. Ignored when configurations are compared."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _UnloggedNotices)

    __hash__ = None


class Configuration(Section):
    """A complete configuration, checked. *Immutable.* Made by `load_configuration`."""

    model_config = ConfigDict(title="")

    device: DeviceChoice = "auto"
    supportlonglong: Flag = True
    fuse_embedding_table: Flag = False
    fetch_threads: Annotated[Integer, Field(ge=0, le=64)] = 0
    volatile_db: VolatileDbConfig = Field(default_factory=lambda: VolatileDbConfig(type="parallel_hash_map"))
    persistent_db: PersistentDbConfig = Field(default_factory=PersistentDbConfig)
    model_source: ModelSourceConfig = Field(default_factory=ModelSourceConfig)
    update_source: UpdateSourceConfig = Field(default_factory=UpdateSourceConfig)
    service: ServiceConfig = Field(default_factory=ServiceConfig)
    model_repository: str = ""
    models: Annotated[ListOf[ModelConfig], Field(validate_default=True)] = ()
    db_type: Ignored = None
    redis_ip: Ignored = None
    rocksdb_path: Ignored = None
    cache_size_percentage_redis: Ignored = None
    _unlogged: _UnloggedNotices = PrivateAttr(default_factory=_UnloggedNotices)

    @property
    def unlogged(self) -> list[tuple[int, str]]:
        """Level and text of each notice that is not logged yet."""
        return self._unlogged

    @model_validator(mode="before")
    @classmethod
    def _omit_hash_map(cls, value: Any) -> Any:
        """Disable the default volatile database above row files, whose page cache takes its place."""
        if not isinstance(value, dict) or "volatile_db" in value or not isinstance(below := value.get("persistent_db"), dict):
            return value
        return {**value, "volatile_db": {"type": "disabled"}} if below.get("type") == "row_files" else value

    @field_validator("update_source")
    @classmethod
    def _require_ordered_database(cls, value: UpdateSourceConfig, info: ValidationInfo) -> UpdateSourceConfig:
        tiers = [info.data[key] for key in ("persistent_db", "volatile_db") if key in info.data]  # without those that are wrong
        if value.type != "null" and len(tiers) == 2 and (text := _unwritable(tiers, "OrderedWrites")):
            raise problem(f"got {value.type}, but {text}; set update_source.type to null if there are no updates")
        return value

    @field_validator("models")
    @classmethod
    def _require_models(cls, value: tuple[ModelConfig, ...], info: ValidationInfo) -> tuple[ModelConfig, ...]:
        if not value and not info.data.get("model_repository"):
            raise problem("got none, expected at least one model, or a model_repository")
        for model in value:
            if text := _unshareable(model, info.data) or _unageable(model, info.data):
                raise problem(text)
        names = {"*", *(model.model for model in value)}
        service = info.data.get("service")
        if service and not info.data.get("model_repository") and (others := set(service.load_models) - names):
            raise problem(f"got no model {min(others)!r}, which service.load_models names")
        notices_of(info).warnings.extend(
            f"model {model.model}: miss_path link is impossible: {reason}; its deployment will fail"
            for model in value
            if model.miss_path == "link" and (reason := _unlinkable(model, info.data))
        )
        notices_of(info).warnings.extend(
            f"model {model.model}: device_sharing {model.device_sharing} has no effect: {reason}"
            for model in value
            if model.device_sharing != "replicate"
            and (reason := "device is cpu" if info.data.get("device") == "cpu" else model.reason_against_sharing)
        )
        notices_of(info).warnings.extend(
            f"model {model.model}: index_on_device has no effect: {reason}"
            for model in value
            if model.index_on_device and (reason := _without_misses_by_link(model) or _unlinkable(model, info.data))
        )
        return value

    @field_validator("models", mode="wrap")
    @classmethod
    def _require_different_names(cls, value: Any, handler: ValidatorFunctionWrapHandler) -> Any:
        text = None
        if isinstance(value, list | tuple):
            names = (entry.get("model") if isinstance(entry, dict) else getattr(entry, "model", None) for entry in value)
            text = _repeated(list(names))
        return validate_with(handler, value, text and f"the name {text}")
