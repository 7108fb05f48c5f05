"""Every way to ask a server for vectors, bags and scores, as classes with the same calls; `tests/ring2/serve/test_wires.py`.

Each asks for model `m` with the tables of `DIMS`, and for the scores of model `scored`, with inputs `item` and `age`.
"""

import asyncio
import contextlib
import json
from collections.abc import Callable, Mapping
from http.client import HTTPConnection
from itertools import pairwise
from typing import Any, ClassVar, NamedTuple

import httpx
import numpy as np
import torch
import tritonclient.grpc as triton_grpc
import tritonclient.http as triton_http
from tritonclient.grpc import service_pb2 as pb
from tritonclient.utils import shared_memory as regions

import hps
import hps.torch
from hps.testing.waiting import PATIENCE_S
from tests.servers.binary_tensors import DTYPES, kind_of, request_of, tensors_of
from tests.servers.served_process import ServedProcess

DIMS = {"user": 5, "item": 32, "word": 7}
EACH = {"FP32": 4, "FP16": 2, "BF16": 2, "FP64": 8}
Keys = Mapping[str, np.ndarray]


class Answer(NamedTuple):
    """Attributes:
    vectors: by table, the elements as the bits of their datatype.
    found: by table; empty where the wire has no masks.
    """

    vectors: dict[str, np.ndarray]
    found: dict[str, np.ndarray]


def narrowed(vectors: np.ndarray, datatype: str) -> np.ndarray:
    """Round float32 once: the bits of an output of this datatype."""
    if datatype == "FP16":
        with np.errstate(over="ignore"):
            return vectors.astype(np.float16).view(np.uint16)
    bits = np.ascontiguousarray(vectors, np.float32).view(np.uint32)
    if datatype == "FP32":
        return bits
    wide = bits.astype(np.uint64)
    return ((wide + 0x7FFF + (wide >> 16 & 1)) >> 16).astype(np.uint16)


def bits_of(array: Any, datatype: str) -> np.ndarray:
    """The bits of an output that a library has decoded."""
    if isinstance(array, torch.Tensor):
        array = array.contiguous().view(torch.int16 if datatype == "BF16" else array.dtype).numpy()
    array = np.ascontiguousarray(array)
    if datatype == "BF16" and array.dtype == np.float32:  # widened again
        return (array.view(np.uint32) >> 16).astype(np.uint16)
    return array.view(np.uint32 if datatype == "FP32" else np.uint16)


# -- the wires --------------------------------------------------------------------------------------------------------


class Wire:
    """One way to ask a server.

    Attributes:
        datatypes: of outputs that it can ask for.
        mixes: whether each output of a request may have another one.
        scores: whether it scores.
        ragged: whether offsets are the caller's, so that they may be wrong.
    """

    datatypes: tuple[str, ...] = ("FP32", "FP16", "BF16")
    mixes = True
    scores = True
    ragged = True

    def lookup(self, tables: Keys, datatypes: Mapping[str, str], model: str = "m") -> Answer:
        raise NotImplementedError

    def pooled(self, tables: Mapping[str, hps.Bags], datatype: str = "FP32") -> dict[str, np.ndarray]:
        raise NotImplementedError

    def score(self, inputs: Keys, model: str = "scored") -> np.ndarray:
        raise NotImplementedError


class InProcess(Wire):
    def __init__(self, server: hps.HPS) -> None:
        self._server = server

    def lookup(self, tables: Keys, datatypes: Mapping[str, str], model: str = "m") -> Answer:
        vectors, found = self._server.lookup_tables(tables, model, return_found=True)
        return Answer({name: narrowed(one, datatypes[name]) for name, one in vectors.items()}, dict(found))

    def pooled(self, tables: Mapping[str, hps.Bags], datatype: str = "FP32") -> dict[str, np.ndarray]:
        return {name: narrowed(one, datatype) for name, one in self._server.lookup_pooled(tables, "m").items()}

    def score(self, inputs: Keys, model: str = "scored") -> np.ndarray:
        return np.asarray(self._server.score(model, inputs)["score"])


class OurClient(Wire):
    """`hps.connect`."""

    def __init__(self, served: ServedProcess) -> None:
        self._client: Any = hps.connect(served.url)

    def close(self) -> None:
        self._client.close()

    def _result(self, result: Any) -> Any:
        return result

    def _array(self, array: Any) -> Any:
        return array

    def _out(self, shape: tuple[int, int], datatype: str) -> Any:
        return torch.empty(shape, dtype=torch.bfloat16) if datatype == "BF16" else np.empty(shape, DTYPES[datatype])

    def lookup(self, tables: Keys, datatypes: Mapping[str, str], model: str = "m") -> Answer:
        tables = {name: self._array(one) for name, one in tables.items()}
        if set(tables) - DIMS.keys():
            out = None
        else:
            out = {name: self._out((one.size, DIMS[name]), datatypes[name]) for name, one in tables.items()}
        vectors, found = self._result(self._client.lookup_tables(tables, model, out=out, return_found=True))
        return Answer({name: bits_of(vectors[name], datatypes[name]) for name in tables}, dict(found))

    def pooled(self, tables: Mapping[str, hps.Bags], datatype: str = "FP32") -> dict[str, np.ndarray]:
        out = {name: self._out((count_of(one), DIMS[name]), datatype) for name, one in tables.items()}
        vectors = self._result(self._client.lookup_pooled(tables, "m", out=out))
        return {name: bits_of(vectors[name], datatype) for name in tables}

    def score(self, inputs: Keys, model: str = "scored") -> np.ndarray:
        return np.asarray(self._result(self._client.score(model, inputs))["score"])


class OurAsynchronousClient(OurClient):
    """`hps.connect_async`."""

    def __init__(self, served: ServedProcess) -> None:
        self._runner = asyncio.Runner()
        self._client = self._result(self._connected(served.url))

    @staticmethod
    async def _connected(url: str) -> Any:
        return hps.connect_async(url)

    def close(self) -> None:
        self._result(self._client.close())
        self._runner.close()

    def _result(self, result: Any) -> Any:
        async def awaited() -> Any:
            return await result

        return self._runner.run(result if asyncio.iscoroutine(result) else awaited())


class OurSharedMemory(OurClient):
    """`hps.connect` with keys and vectors in memory that it shares with the server."""

    datatypes = ("FP32", "FP16")

    def __init__(self, served: ServedProcess) -> None:
        super().__init__(served)
        self._shared: list[Any] = []

    def close(self) -> None:
        for one in self._shared:
            self._client.release(one)
        super().close()

    def _empty(self, shape: Any, dtype: Any) -> np.ndarray:
        with contextlib.suppress(hps.CapacityError, IndexError):
            return self._shared[-1].empty(shape, dtype)
        self._shared.append(self._client.shared_memory(1 << 21))
        return self._shared[-1].empty(shape, dtype)

    def _array(self, array: Any) -> Any:
        if array.dtype != np.int64:
            return array
        taken = self._empty(array.shape, array.dtype)
        taken[...] = array
        return taken

    def _out(self, shape: tuple[int, int], datatype: str) -> Any:
        return self._empty(shape, DTYPES[datatype])


class TritonHTTP(Wire):
    """NVIDIA's client for HTTP, with binary tensors."""

    library: Any = triton_http
    binary: ClassVar[dict[str, bool]] = {"binary_data": True}
    mixes = False

    def __init__(self, served: ServedProcess) -> None:
        self._client = triton_http.InferenceServerClient(served.url.removeprefix("http://"))

    def close(self) -> None:
        self._client.close()

    def _input(self, name: str, array: np.ndarray) -> Any:
        made = self.library.InferInput(name, list(array.shape), kind_of(array))
        made.set_data_from_numpy(array, **(self.binary if array.dtype != np.float16 else {}))  # which JSON does not have
        return made

    def _outputs(self, sizes: Mapping[str, int]) -> list[Any] | None:
        return [self.library.InferRequestedOutput(name, **self.binary) for name in sizes]

    def _output(self, result: Any, name: str, datatype: str, shape: tuple[int, ...]) -> np.ndarray:
        return bits_of(result.as_numpy(name), datatype)

    def lookup(self, tables: Keys, datatypes: Mapping[str, str], model: str = "m") -> Answer:
        [datatype] = {datatypes[name] for name in tables}
        inputs = [self._input(name, array) for name, array in tables.items()]
        dims = {name: DIMS.get(name, 1) for name in tables}
        outputs = self._outputs({name: EACH[datatype] * one.size * dims[name] for name, one in tables.items()})
        masks = [self.library.InferRequestedOutput(f"{name}.found", **self.binary) for name in tables]
        result = self._client.infer(model, inputs, outputs=outputs + masks, parameters={"datatype": datatype})
        shapes = {name: (one.size, dims[name]) for name, one in tables.items()}
        vectors = {name: self._output(result, name, datatype, shape) for name, shape in shapes.items()}
        return Answer(vectors, {name: result.as_numpy(f"{name}.found") for name in tables})

    def pooled(self, tables: Mapping[str, hps.Bags], datatype: str = "FP32") -> dict[str, np.ndarray]:
        inputs = [self._input(name, array) for name, array in bag_tensors(tables).items()]
        shapes = {name: (count_of(one), DIMS[name]) for name, one in tables.items()}
        outputs = self._outputs({name: EACH[datatype] * rows * dim for name, (rows, dim) in shapes.items()})
        parameters = {"datatype": datatype, **bag_parameters(tables)}
        result = self._client.infer("m", inputs, outputs=outputs, parameters=parameters)
        return {name: self._output(result, name, datatype, shape) for name, shape in shapes.items()}

    def score(self, inputs: Keys, model: str = "scored") -> np.ndarray:
        tensors = [self._input(name, array) for name, array in inputs.items()]
        samples = len(inputs.get("age", ()))  # what shared memory has room for
        result = self._client.infer(model, tensors, outputs=self._outputs({"score": 4 * samples}))
        return self._output(result, "score", "FP32", (samples,)).view(np.float32)


class TritonJSON(TritonHTTP):
    """The same with JSON."""

    binary: ClassVar[dict[str, bool]] = {"binary_data": False}
    datatypes = ("FP32", "FP16")


class TritonGRPC(TritonHTTP):
    """NVIDIA's client for gRPC."""

    library: Any = triton_grpc
    binary: ClassVar[dict[str, bool]] = {}

    def __init__(self, served: ServedProcess) -> None:
        self._client = triton_grpc.InferenceServerClient(served.grpc)


class TritonSharedMemory(TritonHTTP):
    """NVIDIA's client with keys and vectors in a segment of shared memory."""

    KEYS, VECTORS = ("hps-wires-keys", 1 << 18), ("hps-wires-vectors", 1 << 20)

    def __init__(self, served: ServedProcess) -> None:
        super().__init__(served)
        self._regions = {}
        for name, size in (self.KEYS, self.VECTORS):
            self._regions[name] = regions.create_shared_memory_region(name, f"/{name}", size)
            self._client.register_system_shared_memory(name, f"/{name}", size)
        self._at = self._places = 0

    def close(self) -> None:
        self._client.unregister_system_shared_memory()
        for region in self._regions.values():
            regions.destroy_shared_memory_region(region)
        super().close()

    def _input(self, name: str, array: np.ndarray) -> Any:
        made = self.library.InferInput(name, list(array.shape), kind_of(array))
        if not array.nbytes:
            made.set_data_from_numpy(array)
            return made
        self._at = self._at if self._at + array.nbytes <= self.KEYS[1] else 0
        regions.set_shared_memory_region(self._regions[self.KEYS[0]], [array], self._at)
        made.set_shared_memory(self.KEYS[0], array.nbytes, self._at)
        self._at += -(-array.nbytes // 8) * 8
        return made

    def _outputs(self, sizes: Mapping[str, int]) -> list[Any] | None:
        found, self._where, at = [], {}, 0
        for name, size in sizes.items():
            found.append(self.library.InferRequestedOutput(name))
            if size:
                found[-1].set_shared_memory(self.VECTORS[0], size, at)
                self._where[name] = at
            at += -(-size // 8) * 8
        return found

    def _output(self, result: Any, name: str, datatype: str, shape: tuple[int, ...]) -> np.ndarray:
        if name not in self._where:
            return super()._output(result, name, datatype, shape)
        place = self._regions[self.VECTORS[0]]
        found = regions.get_contents_as_numpy(place, np.dtype(DTYPES[datatype]), list(shape), self._where[name])
        return bits_of(found.copy(), datatype)


class RawHTTP(Wire):
    """Binary tensors on one connection, written by hand."""

    parameters: ClassVar[dict[str, Any]] = {}

    def __init__(self, served: ServedProcess) -> None:
        self._connection = HTTPConnection("127.0.0.1", int(served.url.rpartition(":")[2]), timeout=PATIENCE_S)
        self._connection.connect()
        self._connection.auto_open = 0  # the same connection, unless the server closes it

    def close(self) -> None:
        self._connection.close()

    def ask(self, arrays: Keys, outputs: list[dict[str, Any]], model: str = "m", **parameters: Any) -> dict[str, Any]:
        self.send(arrays, outputs, model, **parameters)
        return self.take()

    def send(self, arrays: Keys, outputs: list[dict[str, Any]], model: str = "m", **parameters: Any) -> None:
        parameters = {**self.parameters, **parameters}
        headers, body = request_of(arrays, outputs=outputs, parameters=parameters)
        self._connection.request("POST", f"/v2/models/{model}/infer", body, headers)

    def take(self) -> dict[str, Any]:
        response = self._connection.getresponse()
        data = response.read()
        if response.will_close:  # it was refused by its head, before its body had arrived
            self._connection.connect()
        if response.status != 200:
            raise Refusal(str(response.status), json.loads(data)["error"])
        return dict(tensors_of(response.headers, data))

    def lookup(self, tables: Keys, datatypes: Mapping[str, str], model: str = "m") -> Answer:
        outputs = []
        for name in tables:
            outputs.append({"name": name, "parameters": {"binary_data": True, "datatype": datatypes[name]}})
            outputs.append({"name": f"{name}.found", "parameters": {"binary_data": True}})
        found = self.ask(tables, outputs, model)
        vectors = {name: bits_of(found[name], datatypes[name]) for name in tables}
        return Answer(vectors, {name: found[f"{name}.found"] for name in tables})

    def pooled(self, tables: Mapping[str, hps.Bags], datatype: str = "FP32") -> dict[str, np.ndarray]:
        outputs = [{"name": name, "parameters": {"binary_data": True, "datatype": datatype}} for name in tables]
        found = self.ask(bag_tensors(tables), outputs, **bag_parameters(tables))
        return {name: bits_of(found[name], datatype) for name in tables}

    def score(self, inputs: Keys, model: str = "scored") -> np.ndarray:
        self.send_scores(inputs, model)
        return np.asarray(self.take()["score"])

    def send_scores(self, inputs: Keys, model: str = "scored") -> None:
        self.send(inputs, [{"name": "score", "parameters": {"binary_data": True}}], model)


class RawHTTPWithReport(RawHTTP):
    """With a report, which another part of the service answers."""

    parameters: ClassVar[dict[str, Any]] = {"report": True}
    scores = False


class Curl(Wire):
    """Lists of keys as JSON."""

    datatypes = ("FP32",)
    ragged = False

    def __init__(self, served: ServedProcess) -> None:
        self._client = httpx.Client(base_url=served.url, timeout=PATIENCE_S)

    def close(self) -> None:
        self._client.close()

    def _post(self, path: str, request: Any) -> Any:
        answer = self._client.post(path, json=request)
        if answer.status_code != 200:
            raise Refusal(str(answer.status_code), answer.json()["error"])
        return answer.json()

    def lookup(self, tables: Keys, datatypes: Mapping[str, str], model: str = "m") -> Answer:
        request = {"tables": {name: one.tolist() for name, one in tables.items()}, "found": True}
        answer = self._post(f"/v1/models/{model}/lookup", request)
        vectors = {name: np.array(answer["tables"][name], np.float32).reshape(-1, DIMS[name]) for name in tables}
        return Answer({name: one.view(np.uint32) for name, one in vectors.items()}, answer["found"])

    def pooled(self, tables: Mapping[str, hps.Bags], datatype: str = "FP32") -> dict[str, np.ndarray]:
        request: dict[str, Any] = {"bags": {}, "weights": {}}
        for name, bags in tables.items():
            keys, offsets, weights = parts_of(bags)
            request["bags"][name] = [keys[at:to].tolist() for at, to in pairwise(offsets)]
            if weights is not None:
                request["weights"][name] = [weights[at:to].tolist() for at, to in pairwise(offsets)]
        if not request["weights"]:
            del request["weights"]
        for key, value in bag_parameters(tables).items():
            name, _, option = key.partition(".")
            request.setdefault(option, {})[name] = value
        answer = self._post("/v1/models/m/lookup", request)["tables"]
        return {name: np.array(answer[name], np.float32).reshape(-1, DIMS[name]).view(np.uint32) for name in tables}

    def score(self, inputs: Keys, model: str = "scored") -> np.ndarray:
        return np.array(self.outputs(inputs, model)["score"], np.float32)

    def outputs(self, inputs: Keys, model: str) -> Any:
        """Of the model that was cut, `of_bags` are lists, whose ends are left out; what is of the user is nested."""
        samples = len(inputs["age"])
        items: list[dict[str, Any]] = [{} for _ in range(samples)]
        for name, one in inputs.items():
            ends = inputs["ends"].tolist() if name.startswith("of_bags") else range(len(one) + 1)
            for item, (start, end) in zip(items, pairwise(ends), strict=False):
                item[name] = one[start:end].tolist() if name.startswith("of_bags") else one[start].tolist()
        user = {"user": {"id": inputs["user.id"][0].item()}} if "user.id" in inputs else {}
        for item in items:
            item.pop("ends", None)
            item.pop("user.id", None)
        return self._post(f"/v1/models/{model}/score", {"user": user, "items": items})["outputs"]


CONTENTS = {"INT64": "int64_contents", "UINT8": "uint_contents", "BOOL": "bool_contents"}
CONTENTS |= dict.fromkeys(("INT32", "INT16", "INT8"), "int_contents") | {"FP32": "fp32_contents", "FP64": "fp64_contents"}


class Stubs(Wire):
    """gRPC without a library: keys as typed contents, not as raw bytes, where they can be."""

    def __init__(self, served: ServedProcess) -> None:
        self._client = triton_grpc.InferenceServerClient(served.grpc)

    def close(self) -> None:
        self._client.close()

    def _ask(self, arrays: Keys, model: str, outputs: Mapping[str, str], **parameters: Any) -> dict[str, bytes]:
        request = pb.ModelInferRequest(model_name=model)
        for name, array in arrays.items():
            kind = kind_of(array)
            tensor = request.inputs.add(name=name, datatype=kind, shape=array.shape)
            if any(array.dtype == np.float16 for array in arrays.values()):
                request.raw_input_contents.append(array.tobytes())
            else:
                getattr(tensor.contents, CONTENTS[kind]).extend(array.ravel().tolist())
        for name, datatype in outputs.items():
            output = request.outputs.add(name=name)
            if datatype:
                output.parameters["datatype"].string_param = datatype
        for name, value in parameters.items():
            field = {str: "string_param", int: "int64_param", float: "double_param"}[type(value)]
            setattr(request.parameters[name], field, value)
        try:
            response = self._client._client_stub.ModelInfer(request)
        except triton_grpc.grpc.RpcError as error:
            raise Refusal(str(error.code()), error.details()) from error
        return dict(zip([output.name for output in response.outputs], response.raw_output_contents, strict=True))

    def lookup(self, tables: Keys, datatypes: Mapping[str, str], model: str = "m") -> Answer:
        outputs = {name: datatypes[name] for name in tables} | {f"{name}.found": "" for name in tables}
        raw = self._ask(tables, model, outputs)
        vectors = {name: _vectors(raw[name], name, datatypes[name]) for name in tables}
        return Answer(vectors, {name: np.frombuffer(raw[f"{name}.found"], np.bool_) for name in tables})

    def pooled(self, tables: Mapping[str, hps.Bags], datatype: str = "FP32") -> dict[str, np.ndarray]:
        raw = self._ask(bag_tensors(tables), "m", dict.fromkeys(tables, datatype), **bag_parameters(tables))
        return {name: _vectors(raw[name], name, datatype) for name in tables}

    def score(self, inputs: Keys, model: str = "scored") -> np.ndarray:
        return np.frombuffer(self._ask(inputs, model, {"score": ""})["score"], np.float32)


class TorchLayers(Wire):
    """Layers of `hps.torch` with an address."""

    datatypes = ("FP32",)
    scores = False

    def __init__(self, served: ServedProcess) -> None:
        self._url = served.url

    def close(self) -> None:
        hps.torch.close()

    def lookup(self, tables: Keys, datatypes: Mapping[str, str], model: str = "m") -> Answer:
        layers = {name: hps.torch.LookupLayer(self._url, model, name, DIMS.get(name, 1)) for name in tables}
        vectors = {name: layers[name](torch.from_numpy(one)) for name, one in tables.items()}
        return Answer({name: bits_of(one, "FP32") for name, one in vectors.items()}, {})

    def pooled(self, tables: Mapping[str, hps.Bags], datatype: str = "FP32") -> dict[str, np.ndarray]:
        found = {}
        for name, bags in tables.items():
            given = [None if part is None else torch.from_numpy(part) for part in parts_of(bags)]
            options = {"mode": bags.combiner, "max_norm": bags.max_norm, "padding_idx": bags.padding_key}
            layer = hps.torch.EmbeddingBag(self._url, "m", name, DIMS[name], include_last_offset=True, **options)
            found[name] = bits_of(layer(*given), "FP32")
        return found


class Refusal(Exception):
    """What a wire without a library was told. `args`: status and message."""


def _vectors(data: bytes, table: str, datatype: str) -> np.ndarray:
    return bits_of(np.frombuffer(data, DTYPES[datatype]).reshape(-1, DIMS[table]), datatype)


def parts_of(bags: hps.Bags) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    """Keys, offsets with the end, and weights; those of bags of as many keys are flat."""
    keys = np.asarray(bags.keys, np.int64)
    offsets = np.arange(len(keys) + 1) * keys.shape[1] if bags.offsets is None else np.asarray(bags.offsets, np.int64)
    return keys.ravel(), offsets, None if bags.weights is None else np.asarray(bags.weights, np.float32).ravel()


def count_of(bags: hps.Bags) -> int:
    return len(parts_of(bags)[1]) - 1


def bag_tensors(tables: Mapping[str, hps.Bags]) -> dict[str, np.ndarray]:
    found = {}
    for name, bags in tables.items():
        keys, offsets, weights = parts_of(bags)
        found |= {name: keys, f"{name}.offsets": offsets} | ({} if weights is None else {f"{name}.weights": weights})
    return found


def bag_parameters(tables: Mapping[str, hps.Bags]) -> dict[str, Any]:
    options = ("combiner", "max_norm", "padding_key")
    given = {f"{name}.{option}": getattr(bags, option) for name, bags in tables.items() for option in options}
    return {name: value for name, value in given.items() if value is not None}


WIRES: list[Callable[[ServedProcess], Any]] = [
    RawHTTP,
    RawHTTPWithReport,
    Curl,
    TritonHTTP,
    TritonJSON,
    TritonGRPC,
    Stubs,
    TritonSharedMemory,
    OurClient,
    OurAsynchronousClient,
    OurSharedMemory,
    TorchLayers,
]
