"""A service of gRPC that stops under load, again and again."""

import signal
import threading
import time

import grpc
import numpy as np
from tritonclient.grpc import service_pb2_grpc as pb_grpc

from tests.ring2.service.test_grpc import first_vectors, request_of
from tests.servers.child_processes import ChildProcesses
from tests.servers.fronted_service import FrontedService, vectors_of


def test_a_stop_fails_no_call(children: ChildProcesses, tmp_path) -> None:
    service = FrontedService(children, tmp_path / "s", fronts=2, drain_s=4)
    answered, failures, stopping = [], [], threading.Event()

    def ask() -> None:
        with grpc.insecure_channel(service.grpc, options=[("grpc.use_local_subchannel_pool", 1)]) as channel:
            stub = pb_grpc.GRPCInferenceServiceStub(channel)
            while not stopping.is_set():
                try:
                    response = stub.ModelInfer(request_of(np.arange(500)), timeout=10)
                    np.testing.assert_array_equal(first_vectors(response), vectors_of(0, np.arange(500)))
                    answered.append(time.monotonic())
                except grpc.RpcError as error:
                    failures.append((time.monotonic(), error.code(), error.details()))
                    return

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    time.sleep(0.5)
    began = time.monotonic()
    service.process.send_signal(signal.SIGTERM)
    time.sleep(3)
    assert [one for one in failures if one[0] < began + 3] == []
    assert max(answered) > began + 1  # the drain
    assert service.process.wait(30) == 0
    stopping.set()
    for thread in threads:
        thread.join()
    # A client that asks on without a pause finds nobody at last; no call that reached the service is lost.
    assert {code for _, code, _ in failures} <= {grpc.StatusCode.UNAVAILABLE}
    assert all("onnect" in details or "GOAWAY" in details or "refused" in details for _, _, details in failures), failures
