"""HugeCTR's Python structs (`hugectr.inference`), keyword for keyword.

Nothing is checked at construction beyond Python's own rules: `load_configuration` reports all problems of a
`ParameterServerConfig` at once, in the structs' own names.
"""

import os
import tempfile
from dataclasses import dataclass, field, fields
from enum import Enum
from pathlib import Path
from typing import Any


class DatabaseType_t(Enum):
    """Kinds of databases."""

    disabled = "disabled"
    hash_map = "hash_map"
    parallel_hash_map = "parallel_hash_map"
    multi_process_hash_map = "multi_process_hash_map"
    redis_cluster = "redis_cluster"
    rocks_db = "rocks_db"


class DatabaseOverflowPolicy_t(Enum):
    """Which entries leave a full partition of the volatile database."""

    evict_random = "evict_random"
    evict_least_used = "evict_least_used"
    evict_oldest = "evict_oldest"


class UpdateSourceType_t(Enum):
    """Where online updates come from."""

    null = "null"
    kafka_message_queue = "kafka_message_queue"


class EmbeddingCacheType_t(Enum):
    """Kinds of embedding caches; the last one is spelled in lower case in HugeCTR."""

    Dynamic = "dynamic"
    UVM = "uvm"
    Static = "static"
    stochastic = "stochastic"


def _filters() -> list[str]:
    return ["^hps_.+$"]


@dataclass
class VolatileDatabaseParams:
    """The tier in memory; `volatile_db` of a `ps.json`."""

    type: DatabaseType_t | str = DatabaseType_t.parallel_hash_map
    address: str = "127.0.0.1:7000"
    user_name: str = "default"
    password: str = field(default="", repr=False)
    num_partitions: int = field(default_factory=lambda: min(16, os.cpu_count() or 1))
    allocation_rate: int = 268435456
    shared_memory_size: int = 17179869184
    shared_memory_name: str = "hctr_mp_hash_map_database"
    shared_memory_auto_remove: bool = True
    num_node_connections: int = 5
    max_batch_size: int = 65536
    enable_tls: bool = False
    tls_ca_certificate: str = "cacertbundle.crt"
    tls_client_certificate: str = "client_cert.pem"
    tls_client_key: str = "client_key.pem"
    tls_server_name_identification: str = "redis.localhost"
    overflow_margin: int = 2**64 - 1
    overflow_policy: DatabaseOverflowPolicy_t | str = DatabaseOverflowPolicy_t.evict_random
    overflow_resolution_target: float = 0.8
    initialize_after_startup: bool = True
    initial_cache_rate: float = 1.0
    cache_missed_embeddings: bool = False
    update_filters: list[str] = field(default_factory=_filters)


@dataclass
class PersistentDatabaseParams:
    """The tier on disk; `persistent_db` of a `ps.json`, whose `type` is `backend` here."""

    backend: DatabaseType_t | str = DatabaseType_t.disabled
    path: str = field(default_factory=lambda: str(Path(tempfile.gettempdir(), "rocksdb")))
    num_threads: int = 16
    read_only: bool = False
    max_batch_size: int = 65536
    initialize_after_startup: bool = True
    update_filters: list[str] = field(default_factory=_filters)


@dataclass
class UpdateSourceParams:
    """Where online updates come from; `update_source` of a `ps.json`."""

    type: UpdateSourceType_t | str = UpdateSourceType_t.null
    brokers: str = "127.0.0.1:9092"
    metadata_refresh_interval_ms: int = 30000
    receive_buffer_size: int = 262144
    poll_timeout_ms: int = 500
    max_batch_size: int = 8192
    failure_backoff_ms: int = 50
    max_commit_interval: int = 32


_REQUIRED: Any = object()


@dataclass
class InferenceParams:
    """One model; an entry of `models` of a `ps.json`. As in HugeCTR three required arguments follow an optional one."""

    model_name: str
    max_batchsize: int
    hit_rate_threshold: float
    dense_model_file: str
    sparse_model_files: list[str]
    device_id: int = 0
    use_gpu_embedding_cache: bool = _REQUIRED
    cache_size_percentage: float = _REQUIRED
    i64_input_key: bool = _REQUIRED
    use_mixed_precision: bool = False
    scaler: float = 1.0
    use_algorithm_search: bool = True
    use_cuda_graph: bool = True
    number_of_worker_buffers_in_pool: int = 2
    number_of_refresh_buffers_in_pool: int = 1
    thread_pool_size: int = 16
    cache_refresh_percentage_per_iteration: float = 0.0
    deployed_devices: list[int] = field(default_factory=lambda: [0])
    default_value_for_each_table: list[float] = field(default_factory=lambda: [0.0])
    volatile_db: VolatileDatabaseParams = field(default_factory=VolatileDatabaseParams)
    persistent_db: PersistentDatabaseParams = field(default_factory=PersistentDatabaseParams)
    update_source: UpdateSourceParams = field(default_factory=UpdateSourceParams)
    maxnum_des_feature_per_sample: int = 26
    refresh_delay: float = 0.0
    refresh_interval: float = 0.0
    maxnum_catfeature_query_per_table_per_sample: list[int] = field(default_factory=lambda: [26])
    embedding_vecsize_per_table: list[int] = field(default_factory=lambda: [128])
    embedding_table_names: list[str] = field(default_factory=lambda: [""])
    network_file: str = ""
    label_dim: int = 1
    slot_num: int = 10
    non_trainable_params_file: str = ""
    use_static_table: bool = False
    embedding_cache_type: EmbeddingCacheType_t | str = EmbeddingCacheType_t.Dynamic
    use_context_stream: bool = True
    fuse_embedding_table: bool = False
    use_hctr_cache_implementation: bool = True
    init_ec: bool = True
    enable_pagelock: bool = False
    fp8_quant: bool = False

    def __post_init__(self) -> None:
        missing = [argument.name for argument in fields(self) if getattr(self, argument.name) is _REQUIRED]
        if missing:
            raise TypeError(f"InferenceParams() misses the required arguments {', '.join(missing)}")


@dataclass
class ParameterServerConfig:
    """All models and databases of a parameter server. The three dicts are by model name, with one value a table.

    They and the databases given here are the ones that count; an `InferenceParams` that says otherwise is an error.
    """

    emb_table_name: dict[str, list[str]]
    embedding_vec_size: dict[str, list[int]]
    max_feature_num_per_sample_per_emb_table: dict[str, list[int]]
    inference_params_array: list[InferenceParams]
    volatile_db: VolatileDatabaseParams = field(default_factory=VolatileDatabaseParams)
    persistent_db: PersistentDatabaseParams = field(default_factory=PersistentDatabaseParams)
    update_source: UpdateSourceParams = field(default_factory=UpdateSourceParams)
