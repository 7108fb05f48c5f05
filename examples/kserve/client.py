"""Looks keys up through KServe's own client: by REST with JSON and with binary tensors, and by gRPC.

    python -m venv kserve && kserve/bin/pip install kserve
    kserve/bin/python examples/kserve/client.py http://127.0.0.1:8000 127.0.0.1:8001 MODEL TABLE DIM

Prints the vectors of the keys 0 to 9 as JSON, three times the same, and fails where the client fails.
"""

import asyncio
import json
import sys

import numpy as np
from kserve import InferenceGRPCClient, InferenceRESTClient, InferInput, InferRequest, RESTConfig
from kserve.protocol.infer_type import RequestedOutput


def request(model: str, table: str, *, binary: bool) -> InferRequest:
    keys = InferInput(table, [10], "INT64")
    keys.set_data_from_numpy(np.arange(10), binary_data=binary)
    vectors = RequestedOutput(table, parameters={"binary_data": binary})
    return InferRequest(model_name=model, infer_inputs=[keys], request_outputs=[vectors])


async def main(url: str, grpc_address: str, model: str, table: str, dim: int) -> None:
    rest = InferenceRESTClient(RESTConfig(protocol="v2"))
    states = [await rest.is_server_live(url), await rest.is_server_ready(url), await rest.is_model_ready(url, model)]
    requested = [request(model, table, binary=binary) for binary in (False, True)]
    answers = [await rest.infer(url, request, model_name=model) for request in requested]
    await rest.close()
    grpc = InferenceGRPCClient(grpc_address)
    states += [await grpc.is_server_live(), await grpc.is_server_ready(), await grpc.is_model_ready(model)]
    answers.append(await grpc.infer(request(model, table, binary=True)))
    await grpc.close()
    for answer in answers:
        vectors = answer.outputs[0].as_numpy()
        if not all(states) or vectors.shape != (10, dim):
            sys.exit(f"got vectors of shape {vectors.shape} and states {states}, expected (10, {dim}) and all True")
        print(json.dumps(vectors.tolist()))


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:5], int(sys.argv[5])))
