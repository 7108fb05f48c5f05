"""Requests and answers of the open inference protocol with binary tensors over HTTP, written and read by hand."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import orjson

DTYPES = {"FP32": "<f4", "FP16": "<f2", "BF16": "<u2", "FP64": "<f8", "BOOL": "?"}
NAMES = {"<i8": "INT64", "<i4": "INT32", "<f4": "FP32"}
LENGTH = "Inference-Header-Content-Length"


def request_of(arrays: Mapping[str, np.ndarray], **members: Any) -> tuple[dict[str, str], bytes]:
    """Headers and body of a request for these inputs.

    Args:
        members: of its JSON, such as `parameters`.
    """
    inputs = [
        {"name": name, "datatype": kind_of(one), "shape": one.shape, "parameters": {"binary_data_size": one.nbytes}}
        for name, one in arrays.items()
    ]
    text = orjson.dumps({"inputs": inputs, **members})
    return {LENGTH: str(len(text))}, text + b"".join(one.tobytes() for one in arrays.values())


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
    return NAMES[array.dtype.newbyteorder("<").str]
