"""Requests, without I/O: what a client sends, and what the answer means.

Requests with the same tables and numbers of keys have the same head and JSON part, which is made once.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final, NamedTuple
from urllib.parse import quote, urlencode

import numpy as np
import orjson

from hps.client.addresses import Address
from hps.client.answers import DTYPES, Answer, ExpectedAnswer
from hps.client.shared_memory import Reference, SharedMemory
from hps.errors import InvalidDtypeError, InvalidInputError, RemoteError
from hps.tensors.array_checks import as_host_array, as_host_keys, as_output
from hps.tensors.bags import Bags, Pooling, input_arrays, pooling_of
from hps.types import FloatArray, KeyArray, Scores

_MOST_FORMS: Final = 256
_NARROW: Final = {np.dtype(np.float16): "FP16", np.dtype(np.uint16): "BF16"}  # of outputs that are adopted
_DATATYPES: Final = {dtype.str: name for name, dtype in DTYPES.items()}
_MOST_DEADLINE_US: Final = 3_600_000_000


class RemoteCall(NamedTuple):
    """A request and how to read its answer. *Immutable.*"""

    start: bytes  # of its head; address and token go between `start` and `rest`
    rest: bytes  # of the head, and the JSON part
    arrays: Sequence[np.ndarray]  # of its binary part
    answer: Callable[[], Answer]  # makes a reader of the answer
    result: Callable[[Answer], Any]  # makes the result of the call from a complete answer
    repeatable: bool = True  # whether it may be sent again after it may have been executed
    takes_errors: bool = False  # whether `result` takes answers with any status


class Input(NamedTuple):
    """An input of a request."""

    name: str
    array: np.ndarray


class _Form(NamedTuple):
    start: bytes
    rest: bytes
    expected: ExpectedAnswer


class Encoder:
    """Encodes requests. *Thread-safe.*

    Args:
        token: bearer or admin token; empty for none.

    Raises:
        InvalidInputError: the token cannot be sent.
    """

    def __init__(self, token: str) -> None:
        if not token.isascii() or not token.isprintable():
            raise InvalidInputError("connecting to a server: the token has characters other than printable ASCII")
        self._token = f"Authorization: Bearer {token}\r\n".encode() if token else b""
        self._forms: dict[Any, _Form] = {}
        self._heads: dict[tuple[bytes, Address], bytes] = {}
        self.memories: list[SharedMemory] = []

    def parts(self, call: RemoteCall, address: Address) -> list[Any]:
        """Return the bytes of a request to an address."""
        head = self._heads.get(key := (call.start, address))
        if head is None:
            method, path = call.start.split(b" ", 1)
            host = f" HTTP/1.1\r\nHost: {address.authority}\r\n".encode()
            if len(self._heads) >= _MOST_FORMS:
                self._heads.clear()
            head = self._heads[key] = method + b" " + address.prefix.encode() + path + host + self._token
        return [head + call.rest, *(array.data.cast("B") for array in call.arrays if array.size)]

    def lookup(
        self,
        model: str,
        version: str | None,
        inputs: Sequence[Input],
        rows: Mapping[str, tuple[int, ...]],
        out: Mapping[str, Any] | None,
        result: Callable[[Answer], Any],
        *,
        found: bool = False,
        datatypes: Mapping[str, str] = MappingProxyType({}),
        parameters: Mapping[str, Any],
    ) -> RemoteCall:
        """Encode a lookup.

        Args:
            inputs: C-contiguous arrays of int64 or float32.
            rows: by output, the shape of its keys or bags.
            out: arrays that take the vectors.
            found: whether the answer has masks.
            datatypes: those of outputs that are not FP32.
            parameters: of the request.
        """
        arrays = [input_.array for input_ in inputs]
        references: list[Reference | None] = []
        targets: dict[str, Reference | None] = {}
        if memories := self.memories:
            references = [_reference(array, memories) for array in arrays]
            targets = {} if out is None else {name: _reference(out[name], memories) for name in rows}
            arrays = [array for array, reference in zip(arrays, references, strict=True) if reference is None]
        shapes = tuple((input_.name, input_.array.shape, input_.array.dtype.str) for input_ in inputs)
        options = tuple(datatypes.items()), tuple(parameters.items())
        key = (model, version, shapes, tuple(rows.items()), found, *options, *references, *targets.items())
        form = self._forms.get(key)
        if form is None:
            form = self._cache(key, self._form(model, version, inputs, rows, found, datatypes, parameters, references, targets))
        out_of = None if out is None else lambda name, shape: _output(out[name], shape)
        expected = form.expected
        return RemoteCall(form.start, form.rest, arrays, lambda: Answer(expected, out_of), result)

    def _form(
        self,
        model: str,
        version: str | None,
        inputs: Sequence[Input],
        rows: Mapping[str, tuple[int, ...]],
        found: bool,
        datatypes: Mapping[str, str],
        parameters: Mapping[str, Any],
        references: Sequence[Reference | None],
        targets: Mapping[str, Reference | None],
    ) -> _Form:
        tensors, size = [], 0
        for index, input_ in enumerate(inputs):
            reference = references[index] if references else None
            tensors.append(_tensor(input_, reference))
            size += 0 if reference else input_.array.nbytes
        masks = {f"{name}.found": shape for name, shape in rows.items()} if found else {}
        options = {**parameters, "binary_data_output": True, "vectors": True}  # of a model with a network, too
        document: dict[str, Any] = {"inputs": tensors, "parameters": options}
        shared = frozenset(name for name, reference in targets.items() if reference is not None)
        if shared or datatypes:
            document["outputs"] = outputs = []
            for name in [*rows, *masks]:
                parameters_of = reference.parameters if (reference := targets.get(name)) else {"binary_data": True}
                kind = {"datatype": datatypes[name]} if name in datatypes else {}
                outputs.append({"name": name, "parameters": {**parameters_of, **kind}})
        elif found:
            options["found"] = True
        return _Form(
            *_infer(model, version, document, size), ExpectedAnswer(dict(rows), masks, version, shared, datatypes=datatypes)
        )

    def score(self, model: str, version: str | None, inputs: Sequence[Input], parameters: Mapping[str, Any]) -> RemoteCall:
        """Encode a request for scores.

        Args:
            inputs: C-contiguous arrays of any dtype that has a name in `DTYPES`.
            parameters: of the request.
        """
        arrays = [input_.array for input_ in inputs]
        key = (
            model,
            version,
            tuple((input_.name, input_.array.shape, input_.array.dtype.str) for input_ in inputs),
            tuple(parameters.items()),
        )
        form = self._forms.get(key)
        if form is None:
            options = {**parameters, "binary_data_output": True}
            document = {"inputs": [_tensor(input_) for input_ in inputs], "parameters": options}
            start, rest = _infer(model, version, document, sum(array.nbytes for array in arrays))
            form = self._cache(key, _Form(start, rest, ExpectedAnswer({}, {}, version, scores=True)))
        expected = form.expected
        return RemoteCall(
            form.start,
            form.rest,
            arrays,
            lambda: Answer(expected),
            lambda answer: Scores(answer.version, answer.outputs),
        )

    def _cache(self, key: Any, form: _Form) -> _Form:
        if len(self._forms) >= _MOST_FORMS:
            self._forms.clear()
        self._forms[key] = form
        return form


def _infer(model: str, version: str | None, document: Mapping[str, Any], size: int) -> tuple[bytes, bytes]:
    """Return start and rest of an inference request, whose binary part has `size` bytes."""
    text = orjson.dumps(document)
    of_version = "" if version is None else f"/versions/{quote(version, safe='')}"
    start = f"POST /v2/models/{quote(model, safe='')}{of_version}/infer".encode()
    return start, b"Inference-Header-Content-Length: %d\r\nContent-Length: %d\r\n\r\n%s" % (len(text), len(text) + size, text)


def _tensor(input_: Input, reference: Reference | None = None) -> dict[str, Any]:
    """Describe an input whose values are in the binary part, or in shared memory."""
    return {
        "name": input_.name,
        "datatype": _DATATYPES[input_.array.dtype.str],
        "shape": input_.array.shape,
        "parameters": reference.parameters if reference else {"binary_data_size": input_.array.nbytes},
    }


def json_call(
    method: str,
    path: str,
    result: Callable[[Any], Any],
    body: Any = None,
    *,
    repeatable: bool = True,
    refused: Callable[[Answer], Any] | None = None,
) -> RemoteCall:
    """Make a request with a JSON object, answered by JSON.

    Args:
        refused: makes the result of an answer whose status is not 200, which otherwise raises an error.
    """
    try:
        text = b"" if body is None else orjson.dumps(body)
    except TypeError as error:  # text with surrogates, such as arguments of commands may have
        raise InvalidInputError(f"writing the request: {error}") from error

    def read(answer: Answer) -> Any:
        if answer.status != 200 and refused is not None:
            return refused(answer)
        try:
            return result(orjson.loads(answer.text))
        except (ValueError, KeyError, TypeError) as error:
            raise RemoteError(f"reading an answer: got {answer.text[:200]!r}, which is no answer of hps serve") from error

    rest = b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n%s" % (len(text), text)
    return RemoteCall(f"{method} {path}".encode(), rest, (), Answer, read, repeatable, refused is not None)


def rows_call(
    method: str,
    model: str,
    table: str,
    version: str | None,
    keys: KeyArray,  # (n,)
    vectors: FloatArray | None = None,  # (n, dim)
) -> RemoteCall:
    """Make a request that writes or deletes rows."""
    inputs = [Input("KEYS", keys)]
    if vectors is not None:
        inputs.append(Input("VECTORS", vectors))
    text = orjson.dumps({"inputs": [_tensor(input_) for input_ in inputs]})
    size = len(text) + sum(input_.array.nbytes for input_ in inputs)
    rest = b"Inference-Header-Content-Length: %d\r\nContent-Length: %d\r\n\r\n%s" % (len(text), size, text)
    path = rows_path(model, table, version)
    return RemoteCall(
        f"{method} {path}".encode(),
        rest,
        [input_.array for input_ in inputs],
        Answer,
        lambda answer: str(orjson.loads(answer.text)["version"]),
        repeatable=False,
    )


def rows_path(model: str, table: str, version: str | None, key: int | None = None) -> str:
    """Return the path of a table's rows, or of one."""
    of_key = "" if key is None else f"/{int(key)}"
    of_version = "" if version is None else "?" + urlencode({"version": version})
    return f"/v1/models/{quote(model, safe='')}/tables/{quote(table, safe='')}/rows{of_key}{of_version}"


class BagRequest(NamedTuple):
    """The bags of a table, checked."""

    name: str
    keys: KeyArray  # (n,)
    pooling: Pooling

    def inputs(self) -> tuple[list[Input], dict[str, Any]]:
        """Return the inputs of all bags, and the parameters of the request."""
        name, pooling = self.name, self.pooling
        parameters: dict[str, Any] = {f"{name}.combiner": pooling.combiner.name.lower()}
        if pooling.max_norm:
            parameters[f"{name}.max_norm"] = pooling.max_norm
        if pooling.padding_key is not None:
            parameters[f"{name}.padding_key"] = pooling.padding_key
        if pooling.offsets is None:
            inputs = [Input(name, self.keys.reshape(pooling.count, pooling.hotness))]
        else:
            offsets = np.append(pooling.offsets[: pooling.count], self.keys.size).astype(np.int64)
            inputs = [Input(name, self.keys), Input(f"{name}.offsets", offsets)]
        if pooling.weights is not None:
            inputs.append(Input(f"{name}.weights", pooling.weights))
        return inputs, parameters


def bag_request(name: str, bags: Bags) -> BagRequest:
    """Check the bags of a table.

    Raises:
        InvalidInputError, InvalidDtypeError: they are not as `hps.Bags` requires.
    """
    array = as_host_array(bags.keys, "keys", "integers, or as many of them for every bag")
    flat = as_host_keys(array.reshape(-1))
    return BagRequest(name, flat, pooling_of(name, bags, flat.size, array.shape, on_cuda=False))


def score_inputs(inputs: Mapping[str, Any]) -> list[Input]:
    """Return the inputs of a request for scores.

    Raises:
        InvalidInputError, InvalidDtypeError: an input is no array in host memory, or of a dtype that no request has.
    """
    tensors: list[Input] = []
    for name, value in inputs.items():
        for tensor_name, array in input_arrays(name, value).items():
            if array.dtype.str not in _DATATYPES:
                names = ", ".join(map(str, DTYPES.values()))
                raise InvalidDtypeError(f"scoring: got input {tensor_name!r} of {array.dtype}, expected one of {names}")
            tensors.append(Input(tensor_name, array))
    return tensors


def deadline(timeout_s: float) -> dict[str, int]:
    """Return the parameter that says for how long an answer is of use."""
    return {"timeout": max(1, min(int(1e6 * timeout_s), _MOST_DEADLINE_US))}


def _reference(array: Any, memories: Sequence[SharedMemory]) -> Reference | None:
    return next((reference for memory in memories if (reference := memory.place(array)) is not None), None)


def narrow_datatypes(tables: Iterable[str], out: Mapping[str, Any] | None) -> dict[str, str]:
    """Return the datatypes of outputs of 16 bits, by table.

    Raises:
        InvalidDtypeError, InvalidInputError: an output cannot take vectors.
    """
    dtypes = {} if out is None else {name: as_output(out[name], 0, 0, narrow=True).dtype for name in tables}
    return {name: _NARROW[dtype] for name, dtype in dtypes.items() if dtype in _NARROW}


def _output(out: Any, shape: tuple[int, ...]) -> FloatArray:
    rows, dim = shape
    vectors: FloatArray = as_output(out, rows, dim, narrow=True)
    return vectors
