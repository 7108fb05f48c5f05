"""The servers that `bench_http` measures, each a process: the service, its limits, and the service with another hop.

python -m benchmarks.http_servers raw PORT DIRECTORY          raw ASGI: reads the request, returns DIRECTORY/answer.bin
python -m benchmarks.http_servers echo PORT DIRECTORY         raw ASGI: a model's metadata, and zeros for its vectors
python -m benchmarks.http_servers paced PORT DIRECTORY        the same, each 5 ms after it was asked
python -m benchmarks.http_servers orjson PORT DIRECTORY       raw ASGI: orjson in, numpy take, orjson out, no checks
python -m benchmarks.http_servers service PORT DIRECTORY HOP  the service of DIRECTORY/ps.json; HOP: own threads, or executor
"""

import asyncio
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send

from hps.configuration.load import load_configuration
from hps.service.app import Application
from hps.service.lifecycle import Lifecycle
from hps.service.server import Server, listen


async def _read(receive: Receive) -> bytes:
    message = await receive()
    body: bytes = message["body"]
    while message["more_body"]:
        message = await receive()
        body += message["body"]
    return body


async def _answer(send: Send, content_type: bytes, body: bytes, *more: tuple[bytes, bytes]) -> None:
    headers = [(b"content-type", content_type), (b"content-length", str(len(body)).encode()), *more]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def raw(directory: Path) -> ASGIApp:
    """The limit of binary answers: their bytes, with nothing done for them."""
    answer = (directory / "answer.bin").read_bytes()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await _read(receive)
        await _answer(send, b"application/octet-stream", answer)

    return app


def echo(directory: Path, delay_s: float = 0.0) -> ASGIApp:
    """What load generators are measured with: DIRECTORY/metadata.json, and zeros for the vectors of all tables' keys."""
    metadata = (directory / "metadata.json").read_bytes()
    dims = sum(table["dim"] for table in orjson.loads(metadata)["tables"])
    answers: dict[int, bytes] = {}

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        body = await _read(receive)
        if scope["method"] == "GET":
            await _answer(send, b"application/json", metadata)
            return
        if delay_s:
            await asyncio.sleep(delay_s)
        size = len(body)
        if (answer := answers.get(size)) is None:
            text = int(dict(scope["headers"])[b"inference-header-content-length"])
            answer = answers[size] = b"{}" + bytes((size - text) // 8 * 4 * dims)
        await _answer(send, b"application/octet-stream", answer, (b"inference-header-content-length", b"2"))

    return app


def bare_orjson(directory: Path) -> ASGIApp:
    """The limit of JSON answers: parse, look up by position, serialise; no checks, no thread."""
    vectors = np.load(directory / "vectors.npy")

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        request = orjson.loads(await _read(receive))
        if "tables" in request:
            keys = np.array(request["tables"]["item"], np.int64)
            answer: dict[str, Any] = {"tables": {"item": vectors[keys]}}
        else:
            keys = np.array(request["inputs"][0]["data"], np.int64)
            values = vectors[keys].reshape(-1)
            output = {"name": "OUTPUT0", "datatype": "FP32", "shape": [values.size], "data": values}
            answer = {"model_name": "m", "model_version": "1", "outputs": [output]}
        await _answer(send, b"application/json", orjson.dumps(answer, option=orjson.OPT_SERIALIZE_NUMPY))

    return app


def on_executor(app: Application, threads: int) -> Application:
    """Make the service's lookups reach their threads by the standard library's `run_in_executor`."""
    pool = ThreadPoolExecutor(threads)

    async def run(function: Callable[..., Any], *arguments: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(pool, function, *arguments)

    app._threads.run = run  # type: ignore[method-assign,assignment]
    return app


def main(kind: str, port: str, directory: str, hop: str = "own") -> None:
    """Serve until a signal."""
    if kind == "service":
        configuration = load_configuration(Path(directory) / "ps.json")
        app = Application(Lifecycle(configuration))
        if hop == "executor":
            app = on_executor(app, configuration.service.lookup_threads)
        Server(app, listen("127.0.0.1", int(port))).run()
        return
    uvicorn.run(
        {"raw": raw, "echo": echo, "paced": partial(echo, delay_s=5e-3), "orjson": bare_orjson}[kind](Path(directory)),
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
