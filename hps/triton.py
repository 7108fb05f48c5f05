"""A model of Triton's Python backend that answers from an `HPS` in its own process.

The `model.py` of a model repository is one line, `from hps.triton import TritonPythonModel`; `config.pbtxt` names the
`ps.json`. Inputs and outputs are named as in `serve/protocol/open_inference.py`. Tensors come and go by DLPack: Triton's own
conversion from NumPy gives empty tensors where its backend is older than NumPy 2.
Source: https://github.com/triton-inference-server/python_backend (README.md, src/pb_tensor.cc).
"""

import json
import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import triton_python_backend_utils as triton

from hps.configuration.load import Configuration, ModelConfig, load_configuration, override_model
from hps.errors import ConfigError, HPSError, InvalidDtypeError, InvalidInputError
from hps.ground.threads.workers import Stop, new_thread
from hps.models.sources import ModelSources
from hps.parameter_server import HPS
from hps.serve.http.http_answer import message_of, status_of
from hps.serve.protocol.request_checks import BAG_OPTIONS, ModelTables, check_counts, check_numkeys
from hps.serve.protocol.triton_config import entry_changes, tensors_of
from hps.tensors.array_checks import as_host_keys
from hps.tensors.bags import Bags
from hps.tensors.dlpack import INT, TensorView, adopt, mark_consumed
from hps.types import DeviceArray
from hps.versions.catalog import ModelCatalog
from hps.versions.deployment import Deployment

_log = logging.getLogger(__name__)
_OWN_PARAMETERS: Final = ("ps", "model", "output_memory")
_MEMORY: Final = {"": None, "cpu": False, "gpu": True}
_CODES: Final = {
    400: "INVALID_ARG",
    404: "NOT_FOUND",
    413: "INVALID_ARG",
    421: "INVALID_ARG",
    503: "UNAVAILABLE",
}  # of HTTP's status


@dataclass(frozen=True)
class _Settings:
    """The settings of a model in `config.pbtxt` and the `ps.json` that it names. *Immutable.*"""

    configuration: Configuration
    entry: ModelConfig  # with the parameters of `config.pbtxt`
    bags: Mapping[str, Mapping[str, Any]]  # options of `hps.Bags` by table; empty: a vector for each key
    on_gpu: bool | None  # whether vectors are in GPU memory; None: on the device of the keys


class TritonPythonModel:
    """Answers Triton's requests for one model. *One thread*: Triton starts a process for each instance.

    Triton calls its methods, in the order `auto_complete_config` (in another process), `initialize`, `execute`..., `finalize`.
    """

    @staticmethod
    def auto_complete_config(config: Any) -> Any:
        """Add the inputs and outputs of the model's tables to a `config.pbtxt` that names none.

        Raises:
            HPSError: the configuration is wrong, or has no such model; Triton does not load the model.
        """
        document = config.as_dict()
        if not document["input"] and not document["output"]:
            settings = _read_settings(document)
            if not document["max_batch_size"]:
                config.set_max_batch_size(settings.entry.max_batch_size)
            inputs, outputs = tensors_of(settings.entry, pooled=bool(settings.bags))
            for tensor in inputs:
                config.add_input(tensor)
            for tensor in outputs:
                config.add_output(tensor)
            config.set_dynamic_batching()
        return config

    def initialize(self, arguments: Mapping[str, str]) -> None:
        """Open the parameter server, and deploy the model.

        Args:
            arguments: `model_config` as JSON, `model_instance_kind` and `model_instance_device_id`, among others.

        Raises:
            HPSError: it cannot be opened or deployed; Triton does not load the model.
        """
        logging.basicConfig(level=logging.INFO)  # the process has no logging of its own; Triton prints standard error
        self._settings = _read_settings(json.loads(arguments["model_config"]))
        entry, self._device = self._settings.entry, None
        if arguments["model_instance_kind"] == "GPU":
            self._device = int(arguments["model_instance_device_id"])
            if self._device not in entry.deployed_device_list:
                got = f"got GPU {self._device}, expected one of deployed_device_list {list(entry.deployed_device_list)}"
                raise ConfigError("config.pbtxt", [f"instance_group: {got}; name these in 'gpus', or set KIND_CPU"])
            entry = entry.model_copy(update={"deployed_device_list": (self._device,)})
        self._name = entry.model
        self._max_keys = self._settings.configuration.service.max_keys_per_request
        self._stop = Stop()
        self._server = HPS(self._settings.configuration, deploy_models=False)
        try:
            self._server.deploy(entry, pin=False)
        except BaseException:
            self._server.close()
            raise
        if self._settings.configuration.service.model_control_mode == "poll":
            new_thread("follow-files", self._follow).start()

    def execute(self, requests: Sequence[Any]) -> list[Any]:
        """Answer requests; a failed one with a `TritonError`, without effect on the others."""
        return [self._respond(request) for request in requests]

    def finalize(self) -> None:
        """Close the parameter server."""
        self._stop.set()
        self._server.close()

    def _follow(self) -> None:
        """Deploy the version that the `version_policy` selects, at every interval, until the model is unloaded."""
        while not self._stop.wait(self._settings.configuration.service.repository_poll_s):
            try:
                self._server.catalog.scan()
                self._server.deploy(self._name, pin=False)
            except HPSError as error:
                if not self._stop.is_set():
                    _log.error("checking the files of model %s: %s", self._name, error)

    def _respond(self, request: Any) -> Any:
        try:
            return triton.InferenceResponse(self._lookup({input_.name(): input_.to_dlpack() for input_ in request.inputs()}))
        except Exception as error:  # noqa: BLE001 - the other requests of the batch are answered
            if not isinstance(error, HPSError):
                _log.exception("a request of model %s failed", self._name)
            code = getattr(triton.TritonError, _CODES.get(status_of(error), "INTERNAL"))
            return triton.InferenceResponse(error=triton.TritonError(message_of(error), code))

    def _lookup(self, inputs: Mapping[str, Any]) -> list[Any]:
        """Look up DLPack capsules by name; return Triton's output tensors."""
        views = {name: adopt(capsule, label=f"input {name!r}") for name, capsule in inputs.items()}
        while True:
            deployment = self._server.model(self._name)
            outs = self._answer(deployment, inputs, views)
            if self._server.model(self._name).dims == deployment.dims:  # else a version of other widths has taken over
                return [_tensor(name, out) for name, out in outs.items()]

    def _answer(
        self, deployment: Deployment, inputs: Mapping[str, Any], views: Mapping[str, TensorView]
    ) -> dict[str, DeviceArray]:
        """Look up the inputs of a request, and return the outputs by name."""
        if "KEYS" in inputs and "KEYS" not in deployment.indices:
            if inputs.keys() != {"KEYS", "NUMKEYS"}:
                raise InvalidInputError(f"reading the inputs: got {', '.join(inputs)}, expected KEYS and NUMKEYS alone")
            keys, counts = views["KEYS"], _host_counts(views["NUMKEYS"])
            check_numkeys(counts, keys.size, ModelTables(self._name, deployment.tables))
            floats = check_counts(zip(deployment.tables, counts, strict=True), self._max_keys)
            batch = (1,) if len(keys.shape) == 2 else ()
            out = self._new_output(deployment, keys, (*batch, floats))
            self._server.lookup_concatenated(inputs["KEYS"], counts, out, self._name, self._device)
            return {"OUTPUT0": out}
        if not inputs:
            names = ", ".join(table.table_name for table in deployment.tables)
            raise InvalidInputError(f"reading the inputs: got none, expected keys of tables: {names}")
        tables = {name: deployment.tables[deployment.table_index(name)] for name in inputs}
        check_counts(((table, views[name].size) for name, table in tables.items()), self._max_keys)
        outs, pooled = {}, self._settings.bags
        for name, table in tables.items():
            shape = views[name].shape
            outs[name] = self._new_output(deployment, views[name], (*(shape[:-1] if pooled else shape), table.dim))
        if pooled:
            bags = {name: Bags(keys, **pooled[name]) for name, keys in inputs.items()}
            self._server.lookup_pooled(bags, self._name, self._device, out=outs)
        else:
            self._server.lookup_tables(inputs, self._name, self._device, out=outs)
        return outs

    def _new_output(self, deployment: Deployment, keys: TensorView, shape: tuple[int, ...]) -> DeviceArray:
        """Return memory for vectors: on the device of the keys, or as set by `output_memory`."""
        on_gpu = self._settings.on_gpu
        if not keys.on_host if on_gpu is None else on_gpu:
            session = deployment.session(self._device, keys.owner)
            if session.on_cuda and session.cache is not None:
                return session.cache.new_array(shape, np.float32)
        return np.empty(shape, np.float32)


def _read_settings(config: Mapping[str, Any]) -> _Settings:
    """Read the settings of a model from Triton's `ModelConfig`."""
    parameters = {key: value["string_value"] for key, value in config["parameters"].items() if not key.isupper()}
    if not parameters.get("ps"):
        raise ConfigError("config.pbtxt", ["parameters: got no 'ps', expected the path of a ps.json"])
    if (memory := parameters.get("output_memory", "")) not in _MEMORY:
        raise ConfigError("config.pbtxt", [f"parameters: got output_memory {memory!r}, expected 'cpu' or 'gpu'"])
    name = parameters.get("model") or config["name"]
    configuration = load_configuration(parameters["ps"])
    entry = ModelCatalog(configuration, ModelSources(configuration.model_source)).model(name)
    bags = _bag_options(parameters, entry)
    overrides = {
        key: {"string_value": value} for key, value in parameters.items() if not (key in _OWN_PARAMETERS or _is_bag_option(key))
    }
    if overrides:
        entry = override_model(name, entry, entry_changes(name, {"parameters": overrides}))
    return _Settings(configuration, entry, bags, _MEMORY[memory])


def _is_bag_option(key: str) -> bool:
    return key.rpartition(".")[2] in BAG_OPTIONS


def _bag_options(parameters: Mapping[str, str], entry: ModelConfig) -> dict[str, dict[str, Any]]:
    """Return the options of `hps.Bags` by table; empty if no parameter is a combiner."""
    tables = entry.embedding_table_names
    for key in filter(_is_bag_option, parameters):
        if "." in key and key.rpartition(".")[0] not in tables:
            raise ConfigError("config.pbtxt", [f"parameters: got {key!r}, expected the name of a table of {list(tables)}"])
    options_by_table: dict[str, dict[str, Any]] = {}
    for table in tables:
        values = {option: parameters.get(f"{table}.{option}", parameters.get(option)) for option in BAG_OPTIONS}
        try:
            kinds = {"combiner": str, "max_norm": float, "padding_key": int}
            options_by_table[table] = {option: kinds[option](value) for option, value in values.items() if value is not None}
        except ValueError as error:
            raise ConfigError("config.pbtxt", [f"parameters: {error}, expected max_norm and padding_key as numbers"]) from error
    if not any("combiner" in options for options in options_by_table.values()):
        return {}
    if lacking := [table for table, options in options_by_table.items() if "combiner" not in options]:
        raise ConfigError("config.pbtxt", [f"parameters: got no combiner for {lacking}, expected one for all tables, or none"])
    return options_by_table


def _host_counts(view: TensorView) -> list[int]:
    if view.code != INT or not view.on_host or not view.contiguous:
        got = f"{view.dtype_name} on {view.device_name}"
        raise InvalidDtypeError(f"reading NUMKEYS: got {got}, expected integers in host memory")
    counts: list[int] = as_host_keys(view.host_array((math.prod(view.shape),))).tolist()
    return counts


def _tensor(name: str, out: DeviceArray) -> Any:
    """Make Triton's tensor of an output without a copy."""
    if not isinstance(out, np.ndarray):
        return triton.Tensor.from_dlpack(name, out)
    if not out.size:
        return triton.Tensor(name, out)  # its strides by DLPack are 0, which Triton refuses
    capsule = out.__dlpack__()
    tensor = triton.Tensor.from_dlpack(name, capsule)
    # Triton renames a consumed capsule differently from DLPack's protocol, so NumPy would print an error when it is collected.
    mark_consumed(capsule)
    return tensor
