"""Translates an entry of `models` to and from Triton's `ModelConfig`, as JSON.

Source: https://github.com/triton-inference-server/common/blob/main/protobuf/model_config.proto.
"""

from collections.abc import Sequence
from typing import Any

import orjson

from hps.configuration.load import ModelConfig
from hps.errors import InvalidInputError
from hps.serve.protocol.score_requests import DescribedTensor

_ELSEWHERE = {
    "model",  # name
    "max_batch_size",
    "version_policy",
    "deployed_device_list",  # instance_group
    "num_of_worker_buffer_in_pool",
    "version",  # the serving version may differ from the configured first one
    "versions",
    "sparse_files",  # paths are of no use to clients
    "version_path",
}
_OURS = ("hps", "")


def triton_config(
    model: ModelConfig, network: tuple[Sequence[DescribedTensor], Sequence[DescribedTensor]] | None, *, on_cuda: bool
) -> dict[str, Any]:
    """Describe a model to Triton's clients. network: its inputs and outputs, if it has a network."""
    entry = model.model_dump(exclude=_ELSEWHERE)
    group = {
        "name": f"{model.model}_0",
        "kind": "KIND_GPU" if on_cuda else "KIND_CPU",
        "count": model.num_of_worker_buffer_in_pool,
        "gpus": list(model.deployed_device_list) if on_cuda else [],
    }
    inputs = [
        _tensor("KEYS", "TYPE_INT64", -1) | {"format": "FORMAT_NONE"},
        _tensor("NUMKEYS", "TYPE_INT32", len(model.sparse_files)) | {"format": "FORMAT_NONE"},
        _tensor("OFFSETS", "TYPE_INT64", -1) | {"format": "FORMAT_NONE", "optional": True},  # of keys in bags
        _tensor("WEIGHTS", "TYPE_FP32", -1) | {"format": "FORMAT_NONE", "optional": True},
    ]
    outputs = [_tensor("OUTPUT0", "TYPE_FP32", -1)]
    batching: dict[str, Any] = {}
    most = model.max_batch_size
    if network is not None and model.dense is not None:
        if not all(tensor.sampled for tensor in network[0]):
            most = 0  # then Triton's clients read sizes as they are, without the samples in front
        inputs = [_network_tensor(tensor, most) | ({"optional": True} if tensor.optional else {}) for tensor in network[0]]
        outputs = [_network_tensor(tensor, most) for tensor in network[1]]
        if model.dense.dynamic_batching:
            batching = {"dynamic_batching": {"max_queue_delay_microseconds": model.dense.max_queue_delay_us}}
    return {
        "name": model.model,
        "platform": "hps",
        "backend": "hps",
        "version_policy": model.version_policy.as_written(),
        "max_batch_size": most,
        "input": inputs,
        "output": outputs,
        **batching,
        "instance_group": [group],
        "parameters": {key: {"string_value": _text(value)} for key, value in entry.items()},
    }


def entry_changes(name: str, config: dict[str, Any]) -> dict[str, Any]:
    """Return the changes of a model's entry that a client requests.

    Args:
        config: keys of Triton's description, or of an entry of `models`.

    Raises:
        InvalidInputError: it is for another model or backend, or differs from Triton's layout of this model.
    """
    changes = dict(config)
    for key, accepted in (("name", (name, "")), ("model", (name,)), ("platform", _OURS), ("backend", _OURS)):
        got = changes.pop(key, accepted[0])
        if got not in accepted:
            raise InvalidInputError(f"{key}: got {got!r}, expected {accepted[0]!r}")
    if changes.get("max_batch_size") == 0:
        del changes["max_batch_size"]  # as `triton_config` describes some networks
    changes.pop("input", None)  # they follow from the tables
    changes.pop("output", None)
    changes.pop("dynamic_batching", None)
    try:
        for group in changes.pop("instance_group", []):
            changes.update({"deployed_device_list": group["gpus"]} if group.get("gpus") else {})
            changes.update({"num_of_worker_buffer_in_pool": group["count"]} if group.get("count") else {})
        for key, value in changes.pop("parameters", {}).items():
            changes[key] = _value(value["string_value"])
    except (AttributeError, KeyError, TypeError) as error:
        expected = '{"instance_group": [{"gpus": [0]}], "parameters": {"gpucacheper": {"string_value": "0.5"}}}'
        raise InvalidInputError(f"instance_group, parameters: got something else, expected as in {expected}") from error
    return changes


def tensors_of(model: ModelConfig, *, pooled: bool) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Describe the inputs and outputs of a model within Triton: those of all its tables, or one of each; all are optional.

    Args:
        pooled: the keys of a row are answered with one vector.
    """
    concatenated = [_tensor("KEYS", "TYPE_INT64", -1), _tensor("NUMKEYS", "TYPE_INT32", -1)]
    named = [_tensor(name, "TYPE_INT64", -1) for name in model.embedding_table_names]
    outputs = [
        _tensor(name, "TYPE_FP32", *([] if pooled else [-1]), dim)
        for name, dim in zip(model.embedding_table_names, model.embedding_vecsize_per_table, strict=True)
    ]
    return [tensor | {"optional": True} for tensor in (*concatenated, *named)], [_tensor("OUTPUT0", "TYPE_FP32", -1), *outputs]


def _tensor(name: str, datatype: str, *dims: int) -> dict[str, Any]:
    return {"name": name, "data_type": datatype, "dims": list(dims)}  # after the batch dimension


def _network_tensor(tensor: DescribedTensor, most: int) -> dict[str, Any]:
    kind = "STRING" if tensor.datatype == "BYTES" else tensor.datatype
    return _tensor(tensor.name, f"TYPE_{kind}", *(tensor.shape if most else tensor.full_shape))


def _text(value: Any) -> str:
    return value if isinstance(value, str) else orjson.dumps(value).decode()


def _value(text: str) -> Any:
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError:
        return text
