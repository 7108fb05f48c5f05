"""HugeCTR's Python structs (`hugectr.inference`), keyword for keyword, and their translation to a `ps.json`.

Constructing a struct checks only its required arguments. `load_configuration` reports all problems of a
`ParameterServerConfig` at once, in the structs' own names.
"""

import os
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields
from enum import Enum
from pathlib import Path
from typing import Any, NamedTuple

from hps.configuration.document import Location, path_of, plain, shown
from hps.configuration.models import ModelConfig


class DatabaseType_t(Enum):
    disabled = "disabled"
    hash_map = "hash_map"
    parallel_hash_map = "parallel_hash_map"
    multi_process_hash_map = "multi_process_hash_map"
    redis_cluster = "redis_cluster"
    rocks_db = "rocks_db"


class DatabaseOverflowPolicy_t(Enum):
    evict_random = "evict_random"
    evict_least_used = "evict_least_used"
    evict_oldest = "evict_oldest"


class UpdateSourceType_t(Enum):
    null = "null"
    kafka_message_queue = "kafka_message_queue"


class EmbeddingCacheType_t(Enum):
    Dynamic = "dynamic"
    UVM = "uvm"
    Static = "static"
    stochastic = "stochastic"


def _filters() -> list[str]:
    return ["^hps_.+$"]


@dataclass
class VolatileDatabaseParams:
    """The tier in memory; `volatile_db` of a `ps.json`. The last three are HugeCTR's up to 4.2, by keyword alone."""

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
    max_get_batch_size: int | None = field(default=None, kw_only=True)
    max_set_batch_size: int | None = field(default=None, kw_only=True)
    refresh_time_after_fetch: bool | None = field(default=None, kw_only=True)


@dataclass
class PersistentDatabaseParams:
    """The tier on disk; `persistent_db` of a `ps.json`, whose `type` is `backend` here. The last two are as in the other."""

    backend: DatabaseType_t | str = DatabaseType_t.disabled
    path: str = field(default_factory=lambda: str(Path(tempfile.gettempdir(), "rocksdb")))
    num_threads: int = 16
    read_only: bool = False
    max_batch_size: int = 65536
    initialize_after_startup: bool = True
    update_filters: list[str] = field(default_factory=_filters)
    max_get_batch_size: int | None = field(default=None, kw_only=True)
    max_set_batch_size: int | None = field(default=None, kw_only=True)


@dataclass
class UpdateSourceParams:
    """The log of online updates; `update_source` of a `ps.json`."""

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
    """One model; an entry of `models` of a `ps.json`. As in HugeCTR, three required arguments follow an optional one."""

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
            raise TypeError(f"InferenceParams() lacks the required arguments {', '.join(missing)}")


@dataclass
class ParameterServerConfig:
    """All models and databases of a parameter server. The three dicts are by model name, with one value per table.

    They and these databases are used; an `InferenceParams` with other values is an error.
    """

    emb_table_name: dict[str, list[str]]
    embedding_vec_size: dict[str, list[int]]
    max_feature_num_per_sample_per_emb_table: dict[str, list[int]]
    inference_params_array: list[InferenceParams]
    volatile_db: VolatileDatabaseParams = field(default_factory=VolatileDatabaseParams)
    persistent_db: PersistentDatabaseParams = field(default_factory=PersistentDatabaseParams)
    update_source: UpdateSourceParams = field(default_factory=UpdateSourceParams)


PYTHON_NAMES = {
    "model_name": "model",
    "max_batchsize": "max_batch_size",
    "sparse_model_files": "sparse_files",
    "dense_model_file": "dense_file",
    "use_gpu_embedding_cache": "gpucache",
    "cache_size_percentage": "gpucacheper",
    "number_of_worker_buffers_in_pool": "num_of_worker_buffer_in_pool",
    "number_of_refresh_buffers_in_pool": "num_of_refresher_buffer_in_pool",
    "deployed_devices": "deployed_device_list",
}
"""Arguments of `InferenceParams` with another name in a `ps.json`."""

_JSON_NAMES = {json: python for python, json in PYTHON_NAMES.items()}
_TABLE_DICTS = {
    "embedding_table_names": "emb_table_name",
    "embedding_vecsize_per_table": "embedding_vec_size",
    "maxnum_catfeature_query_per_table_per_sample": "max_feature_num_per_sample_per_emb_table",
}
_DATABASES: dict[str, Callable[[], Any]] = {
    "volatile_db": VolatileDatabaseParams,
    "persistent_db": PersistentDatabaseParams,
    "update_source": UpdateSourceParams,
}


class StructDocument(NamedTuple):
    """A document made of structs.

    Attributes:
        problems: those that only structs can have, one line each.
        warnings: a sentence for each value that was read in another way than it is written.
    """

    content: dict[str, Any]
    problems: list[str]
    warnings: list[str]


def document_of(config: ParameterServerConfig) -> StructDocument:
    """Translate structs to a document."""
    problems: list[str] = []
    warnings: list[str] = []
    tables = {key: plain(getattr(config, name), problems, (name,)) for key, name in _TABLE_DICTS.items()}
    models = _models(config, problems)
    problems.extend(_table_problems(tables, [model["model_name"] for model in models]))
    problems.extend(_model_problems(models, tables))
    warnings.extend(filter(None, map(_fill_default_values, models)))
    document: dict[str, Any] = {"models": [_model_document(model, tables) for model in models]}
    if models:
        document["supportlonglong"] = models[0]["i64_input_key"]
    for key, struct in _DATABASES.items():
        given = getattr(config, key)
        if type(given) is not struct:
            problems.append(f"{key}: got {shown(given)}, expected a {struct.__name__}")
            continue
        document[key] = _database_document(given, problems, key)
        problems.extend(
            f"inference_params_array[{i}].{key}: differs from the {key} of the ParameterServerConfig, which takes precedence; "
            "set it there"
            for i, model in enumerate(config.inference_params_array if models else [])
            if getattr(model, key) not in (struct(), given)
        )
    return StructDocument(document, problems, warnings)


def python_path(config: ParameterServerConfig) -> Callable[[Location], str]:
    """Make a function that writes a location of the document in the structs' names."""

    def path(location: Location) -> str:
        match location:
            case ("supportlonglong",):
                return "inference_params_array[0].i64_input_key"
            case ("persistent_db", "type"):
                return "persistent_db.backend"
            case ("models", int(index), str(key), *rest) if key in _TABLE_DICTS:
                name = config.inference_params_array[index].model_name
                return f"{_TABLE_DICTS[key]}[{shown(name)}]" + "".join(f"[{step}]" for step in rest)
            case ("models", int(index), str(key), *rest):
                return path_of(("inference_params_array", index, _JSON_NAMES.get(key, key), *rest))
            case ("models", *rest):
                return path_of(("inference_params_array", *rest))
        return path_of(location)

    return path


def _models(config: ParameterServerConfig, problems: list[str]) -> list[dict[str, Any]]:
    """Return the arguments of every InferenceParams without its databases; none if an element has another type."""
    given: Any = config.inference_params_array
    if not isinstance(given, list | tuple):
        problems.append(f"inference_params_array: got {shown(given)}, expected a list of InferenceParams")
        return []
    wrong = [(i, model) for i, model in enumerate(given) if type(model) is not InferenceParams]
    problems.extend(f"inference_params_array[{i}]: got {shown(model)}, expected an InferenceParams" for i, model in wrong)
    return [_arguments(model, problems, ("inference_params_array", i)) for i, model in enumerate(given) if not wrong]


def _arguments(struct: Any, problems: list[str], location: Location) -> dict[str, Any]:
    return {
        argument.name: plain(getattr(struct, argument.name), problems, (*location, argument.name))
        for argument in fields(struct)
        if argument.name not in _DATABASES
    }


_MODEL_DEFAULTS = vars(
    InferenceParams("", 0, 0.0, "", [], 0, use_gpu_embedding_cache=True, cache_size_percentage=0.0, i64_input_key=True)
)


def _table_problems(tables: dict[str, Any], names: list[Any]) -> Iterator[str]:
    for key, name in _TABLE_DICTS.items():
        by_model = tables[key]
        if not isinstance(by_model, dict):
            yield f"{name}: got {shown(by_model)}, expected a dict of model names to lists"
            continue
        if key == "embedding_table_names":  # the others have no default in a ps.json: its own check reports them
            for model_name in names:
                if isinstance(model_name, str) and model_name not in by_model:
                    yield f"{name}[{shown(model_name)}]: missing; expected the names of this model's tables"
        for model_name in by_model:
            if model_name not in names:
                yield f"{name}[{shown(model_name)}]: no model of this name in inference_params_array"


def _model_problems(models: list[dict[str, Any]], tables: dict[str, Any]) -> Iterator[str]:
    for i, model in enumerate(models):
        place = f"inference_params_array[{i}]"
        device, devices, flag = model["device_id"], model["deployed_devices"], model["i64_input_key"]
        if isinstance(devices, list) and devices and device not in devices:
            yield f"{place}.device_id: got {shown(device)}, expected one of the deployed_devices"
        if flag != models[0]["i64_input_key"]:
            yield f"{place}.i64_input_key: got {shown(flag)}, expected the same value for every model"
        for key, name in _TABLE_DICTS.items():
            listed = _of_model(tables[key], model)
            if listed is not None and model[key] not in (_MODEL_DEFAULTS[key], listed):
                yield f"{place}.{key}: differs from {name}[{shown(model['model_name'])}], which takes precedence"


def _of_model(by_model: Any, model: dict[str, Any]) -> Any:
    name = model["model_name"]
    return by_model.get(name) if isinstance(by_model, dict) and isinstance(name, str) else None


def _model_document(model: dict[str, Any], tables: dict[str, Any]) -> dict[str, Any]:
    document: dict[str, Any] = {}
    dense = ModelConfig.ignored_keys()
    for name, value in model.items():
        key = PYTHON_NAMES.get(name, name)
        if name in _TABLE_DICTS:
            if (listed := _of_model(tables[name], model)) is not None:
                document[name] = listed
        elif name not in ("device_id", "i64_input_key") and (key not in dense or value not in ("", _MODEL_DEFAULTS[name])):
            document[key] = value
    return document


def _fill_default_values(model: dict[str, Any]) -> str:
    """Give each table the first default value where there are not as many as tables, as HugeCTR's struct does.

    Returns:
        The warning, if a value is not as it is written; else empty.
    """
    given, files = model["default_value_for_each_table"], model["sparse_model_files"]
    if not (isinstance(given, list) and isinstance(files, list)) or len(given) == len(files):
        return ""
    first = given[0] if given else 0.0
    model["default_value_for_each_table"] = [first] * len(files)
    if not any(given):
        return ""
    got = f"{len(given)} values" if len(given) != 1 else "1 value"
    return (
        f"model {model['model_name']}: default_value_for_each_table has {got} for {len(files)} sparse_model_files; every "
        f"table has the first, {shown(first)}, as in HugeCTR; write one for each"
    )


def _database_document(struct: Any, problems: list[str], key: str) -> dict[str, Any]:
    """Keep only what differs from the defaults, so that defaults that depend on other values still do."""
    defaults, given = _arguments(_DATABASES[key](), [], (key,)), _arguments(struct, problems, (key,))
    document = {name: value for name, value in given.items() if value != defaults[name]}
    document.pop("backend", None)
    return {**document, "type": given["backend"] if "backend" in given else given["type"]}
