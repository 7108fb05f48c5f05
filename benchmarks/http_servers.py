"""The servers that ours is measured beside, each a process: `python -m benchmarks.http_servers KIND PORT DIRECTORY`.

raw       raw ASGI: reads the request, returns DIRECTORY/answer.bin
orjson    raw ASGI: orjson in, numpy take of DIRECTORY/vectors.npy, orjson out, no checks
scores    FastAPI around the torch module of DIRECTORY/module.pt, with its tables on the device: what people write without
          a server for it. Takes (n, tables) int64 keys and (n, 13) float32 features, answers (n,) float32, all of them raw
"""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send


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


def scores(directory: Path) -> ASGIApp:
    """The peer of scores: no batching, no cache, no checks."""
    import torch
    from fastapi import FastAPI, Request, Response

    from benchmarks.dlrm import FEATURES

    device = "cuda" if torch.cuda.is_available() else "cpu"
    module = torch.load(directory / "module.pt", weights_only=False).to(device).eval()
    tables = len(module.emb)
    app = FastAPI()

    @app.post("/score")
    async def score(request: Request) -> Response:
        body = await request.body()
        samples = len(body) // (8 * tables + 4 * FEATURES)
        keys = np.frombuffer(body, np.int64, samples * tables).reshape(samples, tables)
        dense = np.frombuffer(body, np.float32, samples * FEATURES, 8 * tables * samples).reshape(samples, FEATURES)
        with torch.inference_mode():
            answer = module(torch.tensor(dense, device=device), torch.tensor(keys, device=device))
        return Response(answer.cpu().numpy().tobytes(), media_type="application/octet-stream")

    return app


def _with_health(app: ASGIApp) -> ASGIApp:
    """Answer questions for readiness, which benchmarks wait for."""

    async def ready(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] == "/v2/health/ready":
            await _answer(send, b"text/plain", b"")
        else:
            await app(scope, receive, send)

    return ready


def main(kind: str, port: str, directory: str) -> None:
    """Serve until a signal."""
    uvicorn.run(
        _with_health({"raw": raw, "orjson": bare_orjson, "scores": scores}[kind](Path(directory))),
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
