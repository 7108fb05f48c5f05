"""The servers that are measured over HTTP, each a process: the service, and its limits.

python -m benchmarks.http_servers raw PORT DIRECTORY          raw ASGI: reads the request, returns DIRECTORY/answer.bin
python -m benchmarks.http_servers orjson PORT DIRECTORY       raw ASGI: orjson in, numpy take, orjson out, no checks
python -m benchmarks.http_servers service PORT DIRECTORY      the service of DIRECTORY/ps.json
"""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send

from hps.configuration.load import load_configuration
from hps.serve.engine.app import Application
from hps.serve.engine.lifecycle import Lifecycle
from hps.serve.server import Server, listen


async def _read(receive: Receive) -> bytes:
    message = await receive()
    body: bytes = message["body"]
    while message["more_body"]:
        message = await receive()
        body += message["body"]
    return body


async def _answer(send: Send, content_type: bytes, body: bytes) -> None:
    headers = [(b"content-type", content_type), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def raw(directory: Path) -> ASGIApp:
    """The limit of binary answers: their bytes, with nothing done for them."""
    answer = (directory / "answer.bin").read_bytes()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await _read(receive)
        await _answer(send, b"application/octet-stream", answer)

    return app


def bare_orjson(directory: Path) -> ASGIApp:
    """The limit of JSON answers: parse, look up by position, serialise; no checks, no thread."""
    vectors = np.load(directory / "vectors.npy")

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        request = orjson.loads(await _read(receive))
        if "tables" in request:
            keys = np.array(request["tables"]["t0"], np.int64)
            answer: dict[str, Any] = {"tables": {"t0": vectors[keys]}}
        else:
            keys = np.array(request["inputs"][0]["data"], np.int64)
            values = vectors[keys].reshape(-1)
            output = {"name": "OUTPUT0", "datatype": "FP32", "shape": [values.size], "data": values}
            answer = {"model_name": "m", "model_version": "1", "outputs": [output]}
        await _answer(send, b"application/json", orjson.dumps(answer, option=orjson.OPT_SERIALIZE_NUMPY))

    return app


def main(kind: str, port: str, directory: str) -> None:
    """Serve until a signal."""
    if kind == "service":
        app = Application(Lifecycle(load_configuration(Path(directory) / "ps.json")))
        Server(app, listen("127.0.0.1", int(port))).run()
        return
    uvicorn.run(
        {"raw": raw, "orjson": bare_orjson}[kind](Path(directory)),
        port=int(port),
        loop="uvloop",
        http="httptools",
        ws="none",
        lifespan="off",
        log_level="warning",
        access_log=False,
        proxy_headers=False,
        server_header=False,
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
