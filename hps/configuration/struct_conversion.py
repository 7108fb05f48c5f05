"""Turn HugeCTR's Python structs into what a `ps.json` of the same meaning holds."""

from collections.abc import Callable, Iterator
from dataclasses import MISSING, Field, fields
from typing import Any

from hps.configuration.document import plain
from hps.configuration.hugectr_structs import (
    InferenceParams,
    ParameterServerConfig,
    PersistentDatabaseParams,
    UpdateSourceParams,
    VolatileDatabaseParams,
)
from hps.configuration.report import Location, path_of, shown

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
"""Arguments of `InferenceParams` that a `ps.json` calls otherwise."""

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
_DENSE = frozenset(
    {
        "dense_model_file",
        "network_file",
        "label_dim",
        "slot_num",
        "maxnum_des_feature_per_sample",
        "use_mixed_precision",
        "scaler",
        "use_algorithm_search",
        "use_cuda_graph",
        "non_trainable_params_file",
    }
)


def document_of(config: ParameterServerConfig) -> tuple[dict[str, Any], list[str]]:
    """The document of the same meaning, and what only structs can get wrong, one line a problem."""
    problems: list[str] = []
    tables = {key: plain(getattr(config, name), problems, (name,)) for key, name in _TABLE_DICTS.items()}
    models = _models(config, problems)
    problems.extend(_table_problems(tables, [model["model_name"] for model in models]))
    problems.extend(_model_problems(models, tables))
    document: dict[str, Any] = {"models": [_model_document(model, tables) for model in models]}
    if models:
        document["supportlonglong"] = models[0]["i64_input_key"]
    for key, struct in _DATABASES.items():
        given = getattr(config, key)
        if type(given) is not struct:
            problems.append(f"{key}: got {shown(given)}, wanted a {struct.__name__}")
            continue
        document[key] = _database_document(given, problems, key)
        problems.extend(
            f"inference_params_array[{i}].{key}: differs from the {key} of the ParameterServerConfig, which is the one that "
            "counts; give it there"
            for i, model in enumerate(config.inference_params_array if models else [])
            if getattr(model, key) not in (struct(), given)
        )
    return document, problems


def python_path(config: ParameterServerConfig) -> Callable[[Location], str]:
    """How to write a location of the document in the structs' names."""

    def path(location: Location) -> str:
        if location == ("supportlonglong",):
            return "inference_params_array[0].i64_input_key"
        if location == ("persistent_db", "type"):
            return "persistent_db.backend"
        if location[:1] != ("models",):
            return path_of(location)
        index, key, *rest = (*location[1:], None, None)[:2] + location[3:]
        if key in _TABLE_DICTS and isinstance(index, int):
            name = config.inference_params_array[index].model_name
            return f"{_TABLE_DICTS[str(key)]}[{shown(name)}]" + "".join(f"[{step}]" for step in rest)
        steps = (index, _JSON_NAMES.get(str(key), key), *rest)
        return path_of(("inference_params_array", *(step for step in steps if step is not None)))

    return path


def _models(config: ParameterServerConfig, problems: list[str]) -> list[dict[str, Any]]:
    """The arguments of every InferenceParams, databases left out; none where one is something else."""
    given: Any = config.inference_params_array
    if not isinstance(given, list | tuple):
        problems.append(f"inference_params_array: got {shown(given)}, wanted a list of InferenceParams")
        return []
    wrong = [(i, model) for i, model in enumerate(given) if type(model) is not InferenceParams]
    problems.extend(f"inference_params_array[{i}]: got {shown(model)}, wanted an InferenceParams" for i, model in wrong)
    return [_arguments(model, problems, ("inference_params_array", i)) for i, model in enumerate(given) if not wrong]


def _arguments(struct: Any, problems: list[str], location: Location) -> dict[str, Any]:
    return {
        argument.name: plain(getattr(struct, argument.name), problems, (*location, argument.name))
        for argument in fields(struct)
        if argument.name not in _DATABASES
    }


def _default(argument: Field[Any]) -> Any:
    return plain(argument.default if argument.default_factory is MISSING else argument.default_factory(), [])


_MODEL_DEFAULTS = {argument.name: _default(argument) for argument in fields(InferenceParams)}


def _table_problems(tables: dict[str, Any], names: list[Any]) -> Iterator[str]:
    for key, name in _TABLE_DICTS.items():
        by_model = tables[key]
        if not isinstance(by_model, dict):
            yield f"{name}: got {shown(by_model)}, wanted a dict of model names to lists"
            continue
        if key == "embedding_table_names":  # the others have no default in a ps.json, and are missed there
            for model_name in names:
                if isinstance(model_name, str) and model_name not in by_model:
                    yield f"{name}[{shown(model_name)}]: missing; wanted the names of this model's tables"
        for model_name in by_model:
            if model_name not in names:
                yield f"{name}[{shown(model_name)}]: no model of this name in inference_params_array"


def _model_problems(models: list[dict[str, Any]], tables: dict[str, Any]) -> Iterator[str]:
    for i, model in enumerate(models):
        place = f"inference_params_array[{i}]"
        device, devices, flag = model["device_id"], model["deployed_devices"], model["i64_input_key"]
        if isinstance(devices, list) and devices and device not in devices:
            yield f"{place}.device_id: got {shown(device)}, wanted one of the deployed_devices"
        if flag != models[0]["i64_input_key"]:
            yield f"{place}.i64_input_key: got {shown(flag)}, wanted the same value for every model"
        for key, name in _TABLE_DICTS.items():
            listed = _of_model(tables[key], model)
            if listed is not None and model[key] not in (_MODEL_DEFAULTS[key], listed):
                yield f"{place}.{key}: differs from {name}[{shown(model['model_name'])}], which is the one that counts"


def _of_model(by_model: Any, model: dict[str, Any]) -> Any:
    name = model["model_name"]
    return by_model.get(name) if isinstance(by_model, dict) and isinstance(name, str) else None


def _model_document(model: dict[str, Any], tables: dict[str, Any]) -> dict[str, Any]:
    document: dict[str, Any] = {}
    for name, value in model.items():
        if name in _TABLE_DICTS:
            if (listed := _of_model(tables[name], model)) is not None:
                document[name] = listed
        elif name not in ("device_id", "i64_input_key") and (name not in _DENSE or value not in ("", _MODEL_DEFAULTS[name])):
            document[PYTHON_NAMES.get(name, name)] = value
    values, files = model["default_value_for_each_table"], model["sparse_model_files"]
    if isinstance(values, list) and isinstance(files, list) and len(values) == 1:
        # HugeCTR's default is [0.0] for any number of tables: it fills up with the first value.
        document["default_value_for_each_table"] = values * len(files)
    return document


def _database_document(struct: Any, problems: list[str], key: str) -> dict[str, Any]:
    """What differs from the defaults, so that a default which follows from another value does so here, too."""
    defaults = {argument.name: _default(argument) for argument in fields(struct)}
    given = _arguments(struct, problems, (key,))
    document = {name: value for name, value in given.items() if value != defaults[name]}
    document.pop("backend", None)
    return {**document, "type": given["backend"] if "backend" in given else given["type"]}
