"""Every way to ask a server has the answers of the server in process: vectors, found-masks, bags, 16 bits, scores and errors.

What a wire alone has is tested in a module of its own; what all have is a row of a table here, and a wire is a class.
"""

import asyncio
import contextlib
import json
from collections.abc import Callable, Iterator, Mapping
from http.client import HTTPConnection
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import httpx
import numpy as np
import orjson
import pytest
import torch
import tritonclient.grpc as triton_grpc
import tritonclient.http as triton_http
from tritonclient.grpc import service_pb2 as pb
from tritonclient.utils import InferenceServerException
from tritonclient.utils import shared_memory as regions

import hps
import hps.torch
from hps.testing.waiting import PATIENCE_S
from tests.fakes import entry_points
from tests.servers.running_service import document_of, model_of
from tests.servers.served_process import ServedProcess

DIMS = {"user": 5, "item": 32, "word": 7}
ROWS, MOST, MOST_OF_REQUEST = 300, 10_000, 12_000
WIDTHS = {"FP32": "<f4", "FP16": "<f2", "BF16": "<u2", "FP64": "<f8"}
NAMES = {"<i8": "INT64", "<i4": "INT32", "<f4": "FP32"}
EACH = {"FP32": 4, "FP16": 2, "BF16": 2, "FP64": 8}
Keys = Mapping[str, np.ndarray]


class Answer(NamedTuple):
    """Attributes:
    vectors: by table, the elements as the bits of their datatype.
    found: by table; empty where the wire has no masks.
    """

    vectors: dict[str, np.ndarray]
    found: dict[str, np.ndarray]


def rows_of(table: str) -> np.ndarray:
    """Multiples of 1/8, so that sums are the same in any order."""
    return np.random.default_rng(DIMS[table]).integers(-800, 800, (ROWS, DIMS[table])).astype(np.float32) / 8


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

    def score(self, inputs: Keys) -> np.ndarray:
        raise NotImplementedError


class InProcess(Wire):
    def __init__(self, server: hps.HPS) -> None:
        self._server = server

    def lookup(self, tables: Keys, datatypes: Mapping[str, str], model: str = "m") -> Answer:
        vectors, found = self._server.lookup_tables(tables, model, return_found=True)
        return Answer({name: narrowed(one, datatypes[name]) for name, one in vectors.items()}, dict(found))

    def pooled(self, tables: Mapping[str, hps.Bags], datatype: str = "FP32") -> dict[str, np.ndarray]:
        return {name: narrowed(one, datatype) for name, one in self._server.lookup_pooled(tables, "m").items()}

    def score(self, inputs: Keys) -> np.ndarray:
        return np.asarray(self._server.score("scored", inputs)["score"])


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
        return torch.empty(shape, dtype=torch.bfloat16) if datatype == "BF16" else np.empty(shape, WIDTHS[datatype])

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

    def score(self, inputs: Keys) -> np.ndarray:
        return np.asarray(self._result(self._client.score("scored", inputs))["score"])


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
        return self._empty(shape, WIDTHS[datatype])


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
        made = self.library.InferInput(name, list(array.shape), NAMES[array.dtype.newbyteorder("<").str])
        made.set_data_from_numpy(array, **self.binary)
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

    def score(self, inputs: Keys) -> np.ndarray:
        tensors = [self._input(name, array) for name, array in inputs.items()]
        samples = len(inputs["age"])
        result = self._client.infer("scored", tensors, outputs=self._outputs({"score": 4 * samples}))
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
        for one in self._regions.values():
            regions.destroy_shared_memory_region(one)
        super().close()

    def _input(self, name: str, array: np.ndarray) -> Any:
        made = self.library.InferInput(name, list(array.shape), NAMES[array.dtype.newbyteorder("<").str])
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
        found = regions.get_contents_as_numpy(place, np.dtype(WIDTHS[datatype]), list(shape), self._where[name])
        return bits_of(found.copy(), datatype)


class RawHTTP(Wire):
    """Binary tensors on one connection, written by hand."""

    parameters: ClassVar[dict[str, Any]] = {}

    def __init__(self, served: ServedProcess) -> None:
        self._connection = HTTPConnection("127.0.0.1", int(served.url.rpartition(":")[2]), timeout=PATIENCE_S)
        self._connection.connect()
        self._connection.auto_open = 0  # the same connection after other refusals

    def close(self) -> None:
        self._connection.close()

    def ask(self, arrays: Keys, outputs: list[dict[str, Any]], model: str = "m", **parameters: Any) -> dict[str, Any]:
        self.send(arrays, outputs, model, **parameters)
        return self.take()

    def send(self, arrays: Keys, outputs: list[dict[str, Any]], model: str = "m", **parameters: Any) -> None:
        inputs = []
        for name, array in arrays.items():
            size = {"binary_data_size": array.nbytes}
            inputs.append(
                {"name": name, "datatype": NAMES[array.dtype.newbyteorder("<").str], "shape": array.shape, "parameters": size}
            )
        text = orjson.dumps({"inputs": inputs, "outputs": outputs, "parameters": {**self.parameters, **parameters}})
        head = {"Inference-Header-Content-Length": str(len(text))}
        body = text + b"".join(array.tobytes() for array in arrays.values())
        self._connection.request("POST", f"/v2/models/{model}/infer", body, head)
        self._large = len(body) > 1 << 16

    def take(self) -> dict[str, Any]:
        response = self._connection.getresponse()
        data = response.read()
        if response.will_close:  # the rest of a large body may not be read
            assert self._large, (response.status, data)
            self._connection.connect()
        if response.status != 200:
            raise Refusal(str(response.status), json.loads(data)["error"])
        at = int(response.headers["inference-header-content-length"])
        found = {}
        for output in json.loads(data[:at])["outputs"]:
            size = output["parameters"]["binary_data_size"]
            kind = {**WIDTHS, "BOOL": "?"}[output["datatype"]]
            found[output["name"]] = np.frombuffer(data[at : at + size], kind).reshape(output["shape"])
            at += size
        assert at == len(data)
        return found

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

    def score(self, inputs: Keys) -> np.ndarray:
        output = {"name": "score", "parameters": {"binary_data": True}}
        return np.asarray(self.ask(inputs, [output], "scored")["score"])


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

    def score(self, inputs: Keys) -> np.ndarray:
        items = [{name: one[nth].item() for name, one in inputs.items()} for nth in range(len(inputs["age"]))]
        return np.array(self._post("/v1/models/scored/score", {"user": {}, "items": items})["outputs"]["score"], np.float32)


class Stubs(Wire):
    """gRPC without a library: keys as typed contents, not as raw bytes, where they can be."""

    def __init__(self, served: ServedProcess) -> None:
        self._client = triton_grpc.InferenceServerClient(served.grpc)

    def close(self) -> None:
        self._client.close()

    def _ask(self, arrays: Keys, model: str, outputs: Mapping[str, str], **parameters: Any) -> dict[str, bytes]:
        request = pb.ModelInferRequest(model_name=model)
        for name, array in arrays.items():
            kind = NAMES[array.dtype.newbyteorder("<").str]
            contents = request.inputs.add(name=name, datatype=kind, shape=array.shape).contents
            field = {"INT64": "int64_contents", "INT32": "int_contents", "FP32": "fp32_contents"}[kind]
            getattr(contents, field).extend(array.ravel().tolist())
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
        return dict(zip([one.name for one in response.outputs], response.raw_output_contents, strict=True))

    def lookup(self, tables: Keys, datatypes: Mapping[str, str], model: str = "m") -> Answer:
        outputs = {name: datatypes[name] for name in tables} | {f"{name}.found": "" for name in tables}
        raw = self._ask(tables, model, outputs)
        vectors = {name: _vectors(raw[name], name, datatypes[name]) for name in tables}
        return Answer(vectors, {name: np.frombuffer(raw[f"{name}.found"], np.bool_) for name in tables})

    def pooled(self, tables: Mapping[str, hps.Bags], datatype: str = "FP32") -> dict[str, np.ndarray]:
        raw = self._ask(bag_tensors(tables), "m", dict.fromkeys(tables, datatype), **bag_parameters(tables))
        return {name: _vectors(raw[name], name, datatype) for name in tables}

    def score(self, inputs: Keys) -> np.ndarray:
        return np.frombuffer(self._ask(inputs, "scored", {"score": ""})["score"], np.float32)


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
            given = [None if one is None else torch.from_numpy(one) for one in parts_of(bags)]
            options = {"mode": bags.combiner, "max_norm": bags.max_norm, "padding_idx": bags.padding_key}
            layer = hps.torch.EmbeddingBag(self._url, "m", name, DIMS[name], include_last_offset=True, **options)
            found[name] = bits_of(layer(*given), "FP32")
        return found


class Refusal(Exception):
    """What a wire without a library was told. `args`: status and message."""


def _vectors(data: bytes, table: str, datatype: str) -> np.ndarray:
    return bits_of(np.frombuffer(data, WIDTHS[datatype]).reshape(-1, DIMS[table]), datatype)


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


# -- the servers ------------------------------------------------------------------------------------------------------

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


@pytest.fixture(scope="module")
def document(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """Model `m` with rows in bytes, half floats and floats; model `scored` with a network of another package's engine."""
    place = tmp_path_factory.mktemp("wires")
    entry_points.install(place / "engine", "hps.networks", {"arrays": "tests.fakes.networks:ArrayNetwork"})
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(place / "engine")
        patch.setenv("PYTHONPATH", f"{place / 'engine'}:{Path(hps.__file__).parents[1]}")
        for name in DIMS:
            hps.write_sparse_model(place / name, (np.arange(ROWS), rows_of(name)))
        said = {"format": "arrays", "file": "dense.json", "outputs": ["score"]}
        said["inputs"] = {"item": {"table": "item"}, "age": {}}
        hps.write_version(
            place / "scored" / "1", {"item": (np.arange(ROWS), rows_of("item"))}, network=(said, b'{"factor": 0.5}')
        )
        model = model_of(
            "m",
            [place / name for name in DIMS],
            DIMS,
            default_value_for_each_table=[0.1, 6e4, -0.3],
            maxnum_catfeature_query_per_table_per_sample=[MOST // 1000] * 3,
            row_dtype=["float32", "int8", "float16"],
            hit_rate_threshold=1.1,
            gpucacheper=0.3,
        )
        dims = {"item": DIMS["item"]}
        scored = model_of("scored", ["item"], dims, version_path=str(place / "scored"), hit_rate_threshold=1.1)
        service = {"max_keys_per_request": MOST_OF_REQUEST, "shared_memory_bytes": 1 << 24, "access_log_per_s": 0}
        yield document_of(model, scored, service=service)


@pytest.fixture(scope="module")
def reference(document: dict[str, Any]) -> Iterator[InProcess]:
    with hps.HPS(document) as server:
        yield InProcess(server)


@pytest.fixture(scope="module", params=[0, 2], ids=["without fronts", "with fronts"])
def served(
    request: pytest.FixtureRequest, document: dict[str, Any], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServedProcess]:
    with ServedProcess(document, tmp_path_factory.mktemp("served"), request.param, "--grpc-port", 0) as served:
        yield served


@pytest.fixture(params=WIRES, ids=lambda one: one.__name__)
def wire(request: pytest.FixtureRequest, served: ServedProcess) -> Iterator[Any]:
    made = request.param(served)
    yield made
    made.close()


# -- what all of them answer ------------------------------------------------------------------------------------------

LOOKUPS: dict[str, dict[str, Any]] = {
    "tables with absent and repeated keys": {"user": [0, 299, 10**12, 7, 7], "item": np.arange(280, 320), "word": [3]},
    "one of three tables without keys": {"user": [], "item": [1, 1], "word": [2, 3]},
    "another one": {"word": [], "user": [5], "item": [8]},
    "no keys at all": {"user": [], "item": [], "word": []},
    "one key": {"word": [5]},
    "the ends of 64 bits": {"item": [-1, -(2**63), 2**63 - 1, 4]},
    "as many keys as one table may have": {"word": np.arange(MOST) % 310},
    "many keys of two tables": {"user": np.arange(3000)[::-1] % 310, "item": np.arange(3000) % 310},
    "keys of 32 bits": {"user": np.array([1, 2, 3], np.int32), "word": np.array([4], np.int32)},
}


def arrays(tables: Mapping[str, Any]) -> dict[str, np.ndarray]:
    return {
        name: np.ascontiguousarray(one if isinstance(one, np.ndarray) else np.array(one, np.int64))
        for name, one in tables.items()
    }


def check(got: Answer, expected: Answer, what: str) -> None:
    assert got.vectors.keys() == expected.vectors.keys(), what
    for name, bits in expected.vectors.items():
        assert got.vectors[name].dtype == bits.dtype, (what, name)
        np.testing.assert_array_equal(got.vectors[name], bits, f"{what}: {name}")
    for name, mask in got.found.items():
        np.testing.assert_array_equal(mask, expected.found[name], f"{what}: {name}")


def test_lookups_have_vectors_and_masks_of_the_server_in_process(wire: Any, reference: InProcess) -> None:
    """Each twice, since a front keeps the layout of an answer for the next one."""
    for what, tables in LOOKUPS.items():
        for datatype in wire.datatypes:
            datatypes = dict.fromkeys(DIMS, datatype)
            expected = reference.lookup(arrays(tables), datatypes)
            for _ in range(2):
                check(wire.lookup(arrays(tables), datatypes), expected, f"{what} in {datatype}")


def test_each_output_may_have_a_datatype_of_its_own(wire: Any, reference: InProcess) -> None:
    if not wire.mixes:
        pytest.skip("it asks for one datatype")
    tables = arrays(LOOKUPS["tables with absent and repeated keys"])
    for turn in range(3):
        chosen = {name: wire.datatypes[(nth + turn) % len(wire.datatypes)] for nth, name in enumerate(DIMS)}
        check(wire.lookup(tables, chosen), reference.lookup(tables, chosen), str(chosen))


BAGS: dict[str, Callable[[], dict[str, hps.Bags]]] = {
    "empty bags, an absent key": lambda: {"user": hps.Bags([1, 2, 10**12, 7], [0, 2, 2, 4]), "word": hps.Bags([3], [0, 0, 1])},
    "each combiner": lambda: {
        name: hps.Bags(np.arange(9), [0, 1, 5, 9], combiner=combiner)
        for name, combiner in zip(DIMS, ("sum", "mean", "sqrtn"), strict=True)
    },
    "each combiner with weights": lambda: {
        name: hps.Bags(np.arange(9), [0, 1, 5, 9], np.arange(9, dtype=np.float32) / 4 - 1, combiner=combiner)
        for name, combiner in zip(DIMS, ("sum", "mean", "sqrtn"), strict=True)
    },
    "a padding key and a largest norm": lambda: {
        "user": hps.Bags([3, 1, 3, 2], [0, 3, 4], padding_key=3),
        "item": hps.Bags([3, 1, 3, 2], [0, 3, 4], max_norm=1.5, combiner="mean"),
    },
    "as many keys in each bag": lambda: {
        "user": hps.Bags(np.array([[1, 2], [3, 4], [5, 5]])), "word": hps.Bags(np.array([[9]])),
    },
    "no bags": lambda: {"user": hps.Bags([], [0])},
    "one empty bag": lambda: {"item": hps.Bags([], [0, 0])},
    "thousands of bags": lambda: {"user": hps.Bags(np.arange(9000) % 300, np.arange(3001) * 3)},
}  # fmt: skip


def test_bags_are_pooled_as_in_process(wire: Any, reference: InProcess) -> None:
    for what, bags in BAGS.items():
        expected = reference.pooled(bags())
        for _ in range(2):
            got = wire.pooled(bags())
            assert got.keys() == expected.keys(), what
            for name, bits in expected.items():  # of int8 rows the order of terms shows
                np.testing.assert_allclose(got[name].view(np.float32), bits.view(np.float32), 2e-6, 1e-5, err_msg=what)
        for datatype in wire.datatypes[1:]:
            got = wire.pooled(bags(), datatype)
            for name, bits in reference.pooled(bags(), datatype).items():
                if name != "item":
                    np.testing.assert_array_equal(got[name], bits, f"{what}: {name} in {datatype}")


def test_scores_are_those_of_the_server_in_process(wire: Any, reference: InProcess) -> None:
    if not wire.scores:
        pytest.skip("it does not score")
    for samples in (1, 2, 17):
        given = {"item": np.arange(samples) * 19 % 320, "age": np.arange(samples, dtype=np.float32) / 4}
        for _ in range(2):
            np.testing.assert_array_equal(wire.score(given), reference.score(given))


# -- what all of them refuse ------------------------------------------------------------------------------------------


class Refused(NamedTuple):
    """Attributes:
    ask: the wrong call.
    error: of the server in process, and of the clients and layers of this package.
    status: over HTTP.
    code: of gRPC.
    says: part of the message.
    """

    ask: Callable[[Wire], Any]
    error: type[hps.HPSError]
    status: str
    code: str
    says: str


PLAIN = dict.fromkeys((*DIMS, "x"), "FP32")
REFUSED = {
    "a model": Refused(
        lambda wire: wire.lookup(arrays({"user": [1]}), PLAIN, "x"),
        hps.UnknownModelError, "404", "NOT_FOUND", "'x'",
    ),
    "a table": Refused(lambda wire: wire.lookup(arrays({"x": [1]}), PLAIN), hps.UnknownTableError, "404", "NOT_FOUND", "'x'"),
    "a dtype": Refused(
        lambda wire: wire.lookup({"user": np.array([1.5], np.float32)}, PLAIN),
        hps.InvalidDtypeError, "400", "INVALID_ARGUMENT", "",
    ),
    "keys of a table": Refused(
        lambda wire: wire.lookup({"user": np.zeros(MOST + 1, np.int64)}, PLAIN),
        hps.TooManyKeysError, "413", "RESOURCE_EXHAUSTED", str(MOST + 1),
    ),
    "bags of a table": Refused(
        lambda wire: wire.pooled({"user": hps.Bags(np.zeros((MOST + 1, 1), np.int64))}),
        hps.TooManyKeysError, "413", "RESOURCE_EXHAUSTED", str(MOST + 1),
    ),
    "offsets that end elsewhere": Refused(
        lambda wire: wire.pooled({"user": hps.Bags([1, 2], [0, 3])}),
        hps.InvalidInputError, "400", "INVALID_ARGUMENT", "",
    ),
}  # fmt: skip


def refusal(ask: Callable[[], Any]) -> tuple[str, str]:
    """What a wire raises: the name of a class of this package, the status of HTTP, or the code of gRPC; and its message."""
    try:
        ask()
    except hps.HPSError as error:
        return type(error).__name__, str(error)
    except InferenceServerException as error:
        return error.status().removeprefix("StatusCode."), error.message()
    except Refusal as error:
        return error.args[0].removeprefix("StatusCode."), error.args[1]
    raise AssertionError("it was answered")


def test_wrong_requests_end_in_the_same_error_and_the_next_one_is_answered(wire: Any, reference: InProcess) -> None:
    good = arrays({"user": [1, 10**12]})
    for what, wrong in REFUSED.items():
        if what.startswith("offsets") and not wire.ragged:
            continue
        assert refusal(lambda wrong=wrong: wrong.ask(reference))[0] == wrong.error.__name__, what
        for _ in range(2):
            error, message = refusal(lambda wrong=wrong: wrong.ask(wire))
            assert error in (wrong.error.__name__, wrong.status, wrong.code), (what, error, message)
            assert wrong.says in message, (what, message)
            check(wire.lookup(good, PLAIN), reference.lookup(good, PLAIN), f"after {what}")


def test_a_request_has_at_most_so_many_keys_in_all_its_tables(wire: Any, reference: InProcess) -> None:
    if isinstance(wire, TorchLayers):
        pytest.skip("a layer asks for one table")
    half = MOST_OF_REQUEST // 2
    for keys in (half, half + 1, half):  # as many as may be, and one more
        tables = {"user": np.zeros(half, np.int64), "word": np.zeros(keys, np.int64)}
        if keys == half:
            check(wire.lookup(tables, PLAIN), reference.lookup(tables, PLAIN), "as many as may be")
        else:
            error, message = refusal(lambda tables=tables: wire.lookup(tables, PLAIN))
            assert error in ("TooManyKeysError", "413", "RESOURCE_EXHAUSTED")
            assert "max_keys_per_request" in message


def test_datatypes_that_a_wire_does_not_have_are_refused(wire: Any, reference: InProcess) -> None:
    if not isinstance(wire, RawHTTP | Stubs | TritonHTTP):
        pytest.skip("its outputs have no names of datatypes")
    tables = arrays({"user": [1, 2]})
    for datatype in ("FP64", *(("BF16",) if isinstance(wire, TritonJSON) else ())):
        for _ in range(2):
            error, message = refusal(lambda datatype=datatype: wire.lookup(tables, dict.fromkeys(DIMS, datatype)))
            assert error in ("400", "INVALID_ARGUMENT")
            assert f"'{datatype}'" in message
            check(wire.lookup(tables, PLAIN), reference.lookup(tables, PLAIN), "afterwards")


# -- answers in 16 bits, which are rounded into memory of their own ---------------------------------------------------


def test_answers_in_16_bits_side_by_side_have_their_own_memory(served: ServedProcess) -> None:
    wires = [RawHTTP(served) for _ in range(16)]
    for turn in range(3):
        datatype, kind = ("FP32", np.float32) if turn == 1 else ("FP16", np.float16)
        asked = [(np.arange(2000) * 7 + nth + turn) % ROWS for nth in range(len(wires))]
        outputs = [{"name": "user", "parameters": {"binary_data": True, "datatype": datatype}}]
        for wire, keys in zip(wires, asked, strict=True):
            wire.send({"user": keys}, outputs)
        for wire, keys in zip(wires, asked, strict=True):
            np.testing.assert_array_equal(wire.take()["user"].view(kind), rows_of("user")[keys].astype(kind))
    for wire in wires:
        wire.close()


@pytest.mark.parametrize("library", [triton_http, triton_grpc])
def test_columns_of_one_output_are_rounded_once_too(served: ServedProcess, library: Any) -> None:
    arrays = {"KEYS": np.array([1, 2, 3] * 3), "OFFSETS": np.array([[0, 2, 3]] * 3)}
    tensors = [library.InferInput(name, list(array.shape), "INT64") for name, array in arrays.items()]
    for tensor, array in zip(tensors, arrays.values(), strict=True):
        tensor.set_data_from_numpy(array)
    address = served.grpc if library is triton_grpc else served.url.removeprefix("http://")
    with library.InferenceServerClient(address) as client:
        for datatype in ("FP16", "FP32", "BF16", "FP16"):
            sums = client.infer("m", tensors).as_numpy("OUTPUT0")
            found = client.infer("m", tensors, parameters={"datatype": datatype}).as_numpy("OUTPUT0")
            assert sums.shape == (2, sum(DIMS.values()))
            np.testing.assert_array_equal(bits_of(found, datatype), narrowed(sums, datatype))
