"""The configuration of databases, `model_source` and `update_source`."""

import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, ClassVar, Final, Literal, Self, TypeAlias

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationInfo,
    field_validator,
    model_validator,
)

from hps.configuration.fields import (
    INT32_MAX,
    UINT64_MAX,
    Bytes,
    Endpoint,
    Expression,
    Flag,
    Integer,
    ListOf,
    NonNegative,
    Older,
    PeerUrl,
    Positive,
    Real,
    Secret,
    Share,
    Timeout,
    Token,
    check_addresses,
    check_place,
    check_redis_addresses,
    choice,
    notices_of,
    problem,
)
from hps.ground.registry import IMPLEMENTATIONS
from hps.types import ROW_DTYPES

_MULTI_PROCESS = "multi_process_hash_map|multi_process_hashmap|multi_process_hash|multi_process_map"
_NO_SHARED_MEMORY = "it is not implemented; use redis_cluster to share vectors between processes, otherwise hash_map"


def _spelling(section: str) -> BeforeValidator:
    """Accept any spelling of a database type that is registered for a section."""
    ours = IMPLEMENTATIONS["database"]
    spellings = ["|".join((name, *database.spellings)) for name, database in ours.items()]
    rows = ["disabled|disable|none", *spellings, _MULTI_PROCESS]
    usable = ", ".join(["disabled", *(name for name, database in ours.items() if database.section == section)])
    refused = {
        name: f"this type belongs in {database.section}; expected one of: {usable}"
        for name, database in ours.items()
        if database.section != section
    }
    refused["multi_process_hash_map"] = _NO_SHARED_MEMORY
    return choice(*rows, refused=refused, kind="database", section=section)


VolatileDbType: TypeAlias = Annotated[str, _spelling("volatile_db")]
PersistentDbType: TypeAlias = Annotated[str, _spelling("persistent_db")]


def _check_options(value: dict[str, Any], info: ValidationInfo) -> dict[str, Any]:
    chosen = info.data.get("type")
    if value and (chosen == "disabled" or chosen in IMPLEMENTATIONS["database"]):
        raise problem(f"got options for {chosen}, expected none; only databases of other packages take options")
    return value


Options: TypeAlias = Annotated[dict[str, Any], AfterValidator(_check_options), Field(repr=False)]
"""Settings of another package's database; its `from_config` checks them."""


def _used_when(key: str, values: tuple[str | bool, ...], check: Callable[[str], str]) -> AfterValidator:
    """Check a setting only if `key`, an earlier field, has one of the `values` that use the setting.

    HugeCTR's users have files in which unused settings are empty.
    """

    def check_if_used(setting: str, info: ValidationInfo) -> str:
        return check(setting) if info.data.get(key) in values else setting

    return AfterValidator(check_if_used)


TlsFile: TypeAlias = Annotated[str, _used_when("enable_tls", (True,), check_place)]
OverflowPolicy: TypeAlias = Annotated[
    Literal["evict_random", "evict_least_used", "evict_oldest"],
    choice("evict_random|random", "evict_least_used|least_used", "evict_oldest|oldest"),
]
ExactRows: TypeAlias = Annotated[
    Literal["float32"],
    choice(
        *ROW_DTYPES,
        refused=dict.fromkeys(
            ROW_DTYPES[1:],
            "a tier stores float32 or what models[].row_dtype says, since rows of any other format would be rounded twice",
        ),
    ),
]
UpdateSourceType: TypeAlias = Annotated[
    str,
    choice(
        "null|none",
        *("|".join((name, *log.spellings)) for name, log in IMPLEMENTATIONS["update_log"].items()),
        kind="update_log",
    ),
]


OLD_DATABASES: Final = {"db_type", "redis_ip", "rocksdb_path", "cache_size_percentage_redis"}
"""Keys by which HugeCTR up to 3.2 named databases."""


class Section(BaseModel):
    """An object of the configuration. *Immutable.* Its title is its path in notices."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    older_keys: ClassVar[frozenset[str]] = frozenset()
    """Keys of HugeCTR up to 4.1, each read as the key that replaced it."""

    @classmethod
    def ignored_keys(cls) -> frozenset[str]:
        """Return the keys that are accepted and have no effect."""
        return frozenset(key for key, field in cls.model_fields.items() if field.deprecated) - cls.older_keys

    @model_validator(mode="after")
    def _record_notices(self, info: ValidationInfo) -> Self:
        notices = notices_of(info)
        title = str(self.model_config["title"])
        ignored = {key: f"{title}.{key}".removeprefix(".") for key in self.model_fields_set & self.ignored_keys()}
        notices.databases.update(ignored[key] for key in ignored.keys() & OLD_DATABASES)
        notices.ignored.update(ignored[key] for key in ignored.keys() - OLD_DATABASES)
        notices.older.update(f"{title}.{key}" for key in self.model_fields_set & self.older_keys)
        if not self.model_fields_set & {"type", "backend"} and "type" in type(self).model_fields:
            notices.warnings.append(f"{title} has no type and is disabled; write a type, or leave {title} out")
        return self


def _batch_size(data: dict[str, Any]) -> int:
    """Take the smaller of HugeCTR 4.1's two sizes, for reading and for writing."""
    older = [data[key] for key in ("max_get_batch_size", "max_set_batch_size") if data[key] is not None]
    return min(older, default=65536)


class VolatileDbConfig(Section):
    """`volatile_db`: the tier in memory."""

    model_config = ConfigDict(title="volatile_db")
    older_keys = frozenset({"max_get_batch_size", "max_set_batch_size", "refresh_time_after_fetch"})

    type: VolatileDbType = "disabled"
    address: Annotated[str, _used_when("type", ("redis_cluster",), check_redis_addresses)] = "127.0.0.1:7000"
    user_name: str = "default"
    password: Secret = ""
    password_path: str = ""
    sentinel_service: str = ""
    sentinel_password: Secret = ""
    num_partitions: Annotated[Integer, Field(ge=1, le=65536)] = Field(default_factory=lambda: min(16, os.cpu_count() or 1))
    allocation_rate: Bytes = 256 << 20
    shared_memory_size: Bytes = 16 << 30
    shared_memory_name: str = "hctr_mp_hash_map_database"
    shared_memory_auto_remove: Flag = True
    # HugeCTR's default is always 5, and it aborts if num_partitions is less, as on any machine with four cores.
    num_node_connections: Positive = Field(default_factory=lambda data: min(5, data["num_partitions"]))
    max_get_batch_size: Older[Positive] = None
    max_set_batch_size: Older[Positive] = None
    max_batch_size: Positive = Field(default_factory=_batch_size)
    enable_tls: Flag = False
    tls_ca_certificate: TlsFile = "cacertbundle.crt"
    tls_client_certificate: TlsFile = "client_cert.pem"
    tls_client_key: TlsFile = "client_key.pem"
    tls_server_name_identification: str = "redis.localhost"
    refresh_time_after_fetch: Older[Flag] = None
    overflow_margin: Annotated[Integer, Field(ge=1, le=UINT64_MAX)] = UINT64_MAX
    overflow_policy: OverflowPolicy = "evict_random"
    overflow_resolution_target: Share = 0.8
    initialize_after_startup: Flag = True
    initial_cache_rate: Share = 1.0
    cache_missed_embeddings: Flag = False
    row_dtype: ExactRows | None = None
    update_filters: ListOf[Expression] = ("^hps_.+$",)
    options: Options = {}

    @field_validator("password_path")
    @classmethod
    def _refuse_two_passwords(cls, value: str, info: ValidationInfo) -> str:
        if value and info.data.get("password"):
            raise problem("got a password, too; write one of them, and leave HPS_REDIS_PASSWORD empty")
        return value

    @field_validator("num_node_connections")
    @classmethod
    def _check_connections(cls, value: int, info: ValidationInfo) -> int:
        partitions = info.data.get("num_partitions")
        if info.data.get("type") == "redis_cluster" and partitions is not None and value > partitions:
            raise problem(f"got {value} connections for {partitions} num_partitions, expected at most one a partition")
        return value


class PersistentDbConfig(Section):
    """`persistent_db`: the tier on disk, which holds every row."""

    model_config = ConfigDict(title="persistent_db")
    older_keys = frozenset({"max_get_batch_size", "max_set_batch_size"})

    backend: Older[PersistentDbType] = None
    type: PersistentDbType = Field(default_factory=lambda data: data["backend"] or "disabled")
    path: Annotated[str, _used_when("type", ("rocks_db", "row_files"), check_place)] = Field(
        default_factory=lambda data: str(Path(tempfile.gettempdir(), "rows" if data["type"] == "row_files" else "rocksdb"))
    )
    num_threads: Annotated[Integer, Field(ge=1, le=1024)] = 16
    read_only: Flag = False
    max_get_batch_size: Older[Positive] = None
    max_set_batch_size: Older[Positive] = None
    max_batch_size: Positive = Field(default_factory=_batch_size)
    initialize_after_startup: Flag = Field(default_factory=lambda data: not data["read_only"])
    seal_share: Annotated[Real, Field(gt=0, le=1)] = 0.1
    ready: Annotated[Literal["at_once", "complete"], choice("at_once", "complete")] = "at_once"
    verify: Flag = False
    resident: ListOf[Expression] = ()
    row_dtype: ExactRows | None = None
    update_filters: ListOf[Expression] = ("^hps_.+$",)
    options: Options = {}

    @field_validator("type")
    @classmethod
    def _check_backend(cls, value: str, info: ValidationInfo) -> str:
        backend = info.data.get("backend")
        if backend is not None and backend != value:
            raise problem(f'got "{value}" here and "{backend}" as backend, another name of this key; write one of them')
        return value

    @field_validator("initialize_after_startup")
    @classmethod
    def _check_read_only(cls, value: bool, info: ValidationInfo) -> bool:
        if value and info.data.get("read_only"):
            raise problem("a read_only database cannot be filled at startup; set this to false, or read_only to false")
        return value


class PeersConfig(Section):
    """`model_source.peers`: servers that fill from each other."""

    model_config = ConfigDict(title="model_source.peers")

    urls: ListOf[PeerUrl] = ()
    token: Token = ""
    tls_ca_path: str = ""
    timeout_s: Timeout = 2.0
    least_bytes: NonNegative = 16 << 20
    serve_bytes_per_s: Bytes = 256 << 20


class ModelSourceConfig(Section):
    """`model_source`: how model files are read, and whether they may hold machine code. HugeCTR has no such object."""

    model_config = ConfigDict(title="model_source")

    timeout_s: Timeout = 10.0
    deadline_s: Timeout = 60.0
    max_attempts: Annotated[Integer, Field(ge=1, le=100)] = 5
    parallel_reads: Annotated[Integer, Field(ge=1, le=64)] = 8
    s3_endpoint_url: Endpoint = ""
    gcs_endpoint_url: Endpoint = ""
    azure_connection_string: Secret = ""
    trust: Flag = False
    peers: PeersConfig | None = None


class UpdateSourceConfig(Section):
    """`update_source`: the log of online updates."""

    model_config = ConfigDict(title="update_source")

    type: UpdateSourceType = "null"
    brokers: Annotated[str, _used_when("type", ("kafka_message_queue",), check_addresses)] = "127.0.0.1:9092"
    metadata_refresh_interval_ms: Annotated[Integer, Field(ge=10, le=INT32_MAX)] = 30_000
    receive_buffer_size: Annotated[Integer, Field(ge=1024, le=INT32_MAX)] = 262_144
    poll_timeout_ms: Positive = 500
    max_batch_size: Positive = 65_536
    failure_backoff_ms: NonNegative = 50
    max_commit_interval: Positive = 32

    config: Annotated[dict[str, str | int | float | bool], Field(repr=False)] = {}
    address: Annotated[str, _used_when("type", ("redis_stream",), check_addresses)] = "127.0.0.1:6379"
    user_name: str = "default"
    password: Secret = ""
    enable_tls: Flag = False
    tls_ca_certificate: TlsFile = "cacertbundle.crt"
    tls_client_certificate: TlsFile = ""
    tls_client_key: TlsFile = ""
    tls_server_name_identification: str = ""
    group: str = ""
    begin: Annotated[Literal["earliest", "latest"], choice("earliest", "latest")] = "earliest"
    read_ahead_bytes: Bytes = 64 << 20
    max_message_bytes: Bytes = 64 << 20
    device_share: Annotated[Real, Field(gt=0, le=1)] = 1.0
    dead_letters: str = ""
    dead_letter_bytes: Bytes = 1 << 30
    ready_lag_s: Annotated[Real, Field(ge=0)] | None = None
    ready_wait_s: Timeout = 300.0
