"""Requests and answers of the open inference protocol, written and read by hand."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import orjson

DTYPES = {"FP32": "<f4", "FP16": "<f2", "BF16": "<u2", "FP64": "<f8", "BOOL": "?", "INT64": "<i8"}
NAMES = {"int64": "INT64", "int32": "INT32", "int16": "INT16", "int8": "INT8", "uint8": "UINT8", "bool": "BOOL"}
NAMES |= {"float64": "FP64", "float32": "FP32", "float16": "FP16"}
LENGTH = "Inference-Header-Content-Length"


def with_tensors(
    arrays: Mapping[str, np.ndarray], *, binary: bool, shapes: Mapping[str, Any] | None = None, padding: str = "", **more: Any
) -> tuple[bytes, int | None]:
    """The body of a request with these inputs, and the length of its JSON part where binary tensors follow."""
    inputs = [
        {"name": name, "datatype": kind_of(one), "shape": (shapes or {}).get(name, [*one.shape])}
        | ({"parameters": {"binary_data_size": one.nbytes}} if binary else {"data": one.ravel().tolist()})
        for name, one in arrays.items()
    ]
    text = orjson.dumps({"inputs": inputs, **more}) + padding.encode()
    return (text + b"".join(array.tobytes() for array in arrays.values()), len(text)) if binary else (text, None)


def request_of(arrays: Mapping[str, np.ndarray], **members: Any) -> tuple[dict[str, str], bytes]:
    """Headers and body of a request for these inputs.

    Args:
        members: of its JSON, such as `parameters`.
    """
    body, length = with_tensors(arrays, binary=True, **members)
    return {LENGTH: str(length)}, body


def tensors_of(headers: Any, body: bytes) -> dict[str, np.ndarray]:
    """The outputs of an answer."""
    at, found = int(headers[LENGTH]), {}
    for output in orjson.loads(body[:at])["outputs"]:
        size = output["parameters"]["binary_data_size"]
        found[output["name"]] = np.frombuffer(body[at : at + size], DTYPES[output["datatype"]]).reshape(output["shape"])
        at += size
    assert at == len(body)
    return found


def kind_of(array: np.ndarray) -> str:
    return NAMES[array.dtype.name]
