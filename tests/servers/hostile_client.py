"""A client with every right that sends no request twice: each field that a front may remember is new, long, and padded."""

import gzip
import http.client
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import grpc
import httpx
import numpy as np
import torch
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc import service_pb2_grpc as pb_grpc

import hps.torch
from tests.servers.binary_tensors import LENGTH, tensors_of, with_tensors
from tests.servers.running_service import document_of
from tests.servers.served_process import ServedProcess
from tests.servers.service_processes import children_of

MB = 1 << 20
BUDGET = 256 * MB
BEYOND = 200 * MB
TOKEN = {"Authorization": "Bearer secret"}
WIDE = "\U0001f600"
ITEMS = np.array([3, 1, 4])


class Scores(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.item = torch.nn.Embedding(100, 4)

    def forward(self, item: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return self.item(item).sum(1) * scale


class HostileClient:
    """A client of a service that it starts, whose model `s` has a table and a network.

    Attributes:
        refused: how many requests were answered by each status.
    """

    def __init__(self, place: Path) -> None:
        torch.manual_seed(1)
        self._module = Scores().eval()
        hps.torch.package(self._module, place / "models" / "s" / "1", {"item": torch.arange(3), "scale": torch.ones(3)})
        limits = {"bearer_token": "secret", "max_held_bytes": BUDGET, "max_body_bytes": 4 * MB, "access_log_per_s": 0}
        document = document_of(model_repository=str(place / "models"), service=limits)
        (place / "served").mkdir()
        self.process = ServedProcess(document, place / "served", 1, "--grpc-port", 0)
        self.statuses: dict[Any, int] = {}

    def __enter__(self) -> "HostileClient":
        self.process.__enter__()
        self._to = urlsplit(self.process.url).netloc
        self._connect()
        return self

    def __exit__(self, *error: object) -> None:
        self._connection.close()
        self._channel.close()
        self.process.__exit__(*error)

    def _connect(self) -> None:
        self._connection = http.client.HTTPConnection(self._to, timeout=30)
        self._channel = grpc.insecure_channel(self.process.grpc)
        self._stub = pb_grpc.GRPCInferenceServiceStub(self._channel)

    @property
    def front_bytes(self) -> int:
        """Resident memory of the front, its slab included."""
        front = children_of(self.process._process.pid)[1]
        return int(re.search(r"^Rss:\s+(\d+)", Path(f"/proc/{front}/smaps_rollup").read_text(), re.MULTILINE)[1]) * 1024  # type: ignore[index]

    def figure(self, name: str) -> float:
        text = httpx.get(f"{self.process.url}/metrics", headers=TOKEN).text
        return sum(map(float, re.findall(rf"^{name}{{[^}}]*}} (\S+)$", text, re.MULTILINE)))

    def check(self) -> None:
        """It is answered as ever."""
        arrays = {"item": ITEMS, "scale": np.ones(3, np.float32)}
        body, length = with_tensors(arrays, binary=True, parameters={"binary_data_output": True})
        answer = httpx.post(f"{self.process.url}/v2/models/s/infer", headers=TOKEN | {LENGTH: str(length)}, content=body)
        assert answer.status_code == 200, answer.text
        with torch.inference_mode():
            wanted = self._module(torch.from_numpy(ITEMS), torch.ones(3)).numpy()
        [found] = tensors_of(answer.headers, answer.content).values()
        np.testing.assert_allclose(found.ravel(), wanted, rtol=1e-6)

    def send(self, first: int, count: int) -> None:
        """Send requests, each another."""
        for number in range(first, first + count):
            kinds = [*self._http(number), None]
            kind = kinds[number % len(kinds)]
            if number % 500 == 499:
                self._connection.close()
                self._channel.close()
                self._connect()
            status: Any = self._call(number) if kind is None else self._ask(*kind)
            self.statuses[status] = self.statuses.get(status, 0) + 1

    def _ask(self, method: str, path: str, body: bytes, headers: dict[str, str]) -> int:
        connection = self._connection
        try:
            connection.putrequest(method, path, skip_accept_encoding=True)
            for name, value in (TOKEN | headers | {"Content-Length": str(len(body))}).items():
                connection.putheader(name, value)
            connection.endheaders(body)
            answer = connection.getresponse()
            answer.read()
        except (http.client.HTTPException, OSError):
            connection.close()  # it opens again by itself
            return 0
        return answer.status

    def _http(self, number: int) -> Iterator[tuple[str, str, bytes, dict[str, str]]]:
        """Every kind of request over HTTP, as this number has it."""
        name = f"{number:08}"
        long = name * 900  # of 7,200 characters, which are remembered
        items = {"item": ITEMS, "scale": np.ones(3, np.float32)}
        infer, asked = "/v2/models/s/infer", {"parameters": {"binary_data_output": True}}
        vectors = {"parameters": {"vectors": True, "binary_data_output": True}}

        pooled = {"vectors": True, "combiner": "sum", "max_norm": number + 1}

        def binary(arrays: dict[str, np.ndarray], **more: Any) -> tuple[str, str, bytes, dict[str, str]]:
            body, length = with_tensors(arrays, binary=True, **more)
            return "POST", infer, body, {LENGTH: str(length)}

        def text(arrays: dict[str, np.ndarray], **more: Any) -> bytes:
            return with_tensors(arrays, binary=False, **more)[0]

        yield binary(items, id=long, **asked)
        yield binary(items, id=WIDE + long[:7000], **asked)
        yield binary(items, padding=" " * (number % 7000), id=name, **asked)
        yield binary(items, parameters={"binary_data_output": True, long: 1, "timeout": number + 10**6})
        yield binary({"item": ITEMS}, id=long, **vectors)
        yield binary({"item": ITEMS}, id=long, parameters={"vectors": True, "datatype": "FP16", "binary_data_output": True})
        yield binary({"item": np.zeros((1, 1 + number % 50), np.int64)}, id=name, **vectors)
        yield binary({"item": np.zeros((1, 2), np.int64)}, id=long, parameters=pooled)
        yield binary({"item": ITEMS, "item.offsets": np.array([0, number % 4, 3])}, id=long, **vectors)
        yield binary({"KEYS": ITEMS, "NUMKEYS": np.array([3], np.int32)}, id=long, **vectors)
        yield "POST", infer, text(items, id=long), {}
        yield "POST", infer, text({"item": np.full(900, number), "scale": np.ones(900, np.float32)}), {}
        yield (
            "POST",
            infer,
            b'{"inputs": [{"name": "item", "datatype": "INT64", "shape": [1], "data": [%s%d]}]}'
            % (
                b"{}," * 2500,
                number,
            ),
            {},
        )
        yield "POST", infer, text(items, id=name, padding=" " * (1 << 20)), {}
        yield "POST", infer, gzip.compress(text(items, id=name, padding=" " * (1 << 20)), 1), {"Content-Encoding": "gzip"}
        yield "POST", infer, text({long[:4000]: ITEMS}), {}
        yield "POST", "/v1/models/s/lookup", json.dumps({"tables": {"item": [number] * 3}, "id": long}).encode(), {}
        yield "POST", "/v1/models/s/score", json.dumps({"items": [{"item": 1, "scale": 1.5, long: 1}]}).encode(), {}
        yield "POST", f"/v2/models/{long}/infer", b"{}", {}
        yield "POST", f"/v2/models/{'%F0%9F%98%80'}{name * 200}/infer", b"{}", {}
        yield "POST", f"/v2/models/s/versions/{name * 200}/infer", b"{}", {}
        yield "POST", f"{infer}?{name * 200}", text(items), {}
        yield "GET", f"/v2/health/live?{name * 6000}", b"", {}
        yield "GET", f"/v2/models/{name}", b"", {}
        yield "GET", f"/{long}", b"", {}
        yield "POST", infer, text(items), {"X-Padding": name * 7500}
        yield "POST", infer, text(items), {f"X-{name}-{nth}": "" for nth in range(100)}
        yield "POST", infer, text(items), {"X-Request-Id": name, "traceparent": f"00-{number + 1:032x}-{number + 1:016x}-01"}
        yield "POST", infer, text(items), {"Authorization": f"Bearer {name * 200}"}
        yield "POST", infer, text(items), {"Origin": f"http://{name * 200}", "X-Forwarded-For": name * 100}

    def _call(self, number: int) -> Any:
        """One of the calls of gRPC, as this number has it."""
        name = f"{number:08}"
        long, stub = name * 900, self._stub
        infer = pb.ModelInferRequest(model_name="s", id=long, raw_input_contents=[ITEMS.tobytes(), bytes(12)])
        for tensor, datatype in (("item", "INT64"), ("scale", "FP32")):
            infer.inputs.add(name=tensor, datatype=datatype, shape=[3])
        typed = pb.ModelInferRequest(model_name=WIDE + name * 100, id=name)
        typed.inputs.add(name="item", datatype="FP64", shape=[900]).contents.fp64_contents.extend([number] * 900)
        infer.parameters[name].int64_param = number
        calls: list[tuple[Any, Any]] = [
            (stub.ModelInfer, infer),
            (stub.ModelInfer, typed),
            (stub.ModelReady, pb.ModelReadyRequest(name=long)),
            (stub.ModelMetadata, pb.ModelMetadataRequest(name=name * 20, version=name)),
            (stub.ServerLive, pb.ServerLiveRequest()),
        ]
        call, request = calls[number // 31 % len(calls)]
        metadata = [("authorization", "Bearer secret"), (f"x-{name}", name * 100), ("x-padding", name * 1000)]
        try:
            call(request, metadata=metadata, timeout=30)
        except grpc.RpcError as error:
            return error.code().name
        return "OK"
