"""The service on a free port of this process, as `hps serve --fronts 0` runs it."""

import socket
import threading
from contextlib import contextmanager

import httpx
from prometheus_client.parser import text_string_to_metric_families

from hps.configuration.load import load_configuration
from hps.serve.engine.app import Application
from hps.serve.engine.lifecycle import Lifecycle
from hps.serve.frontend.supervisor import bind
from hps.serve.server import Server
from hps.testing.waiting import PATIENCE_S, wait_until


class RunningService:
    """A service in a thread.

    Attributes:
        app: the ASGI application.
        url: where it listens.
        grpc: address of gRPC, if it has one.
        client: an HTTP client with that base address.
    """

    def __init__(self, lifecycle: Lifecycle, *, grpc: bool = False) -> None:
        self.app = Application(lifecycle)
        self._grpc_place = bind("127.0.0.1", 0, shared=True) if grpc else None
        address = None if self._grpc_place is None else self._grpc_place.getsockname()
        self.grpc = f"{address[0]}:{address[1]}" if address else ""
        self.server = Server(self.app, bind("127.0.0.1", 0), grpc_address=address)
        self.url = self.server.url
        self._thread = threading.Thread(target=self.server.run, daemon=True)
        self.client = httpx.Client(base_url=self.url, timeout=30)

    @property
    def frontend(self):
        return self.server.frontend

    @property
    def held(self) -> int:
        """Bytes held for clients."""
        return self.frontend.memory.used + self.frontend.exchange.slots.used

    @property
    def is_idle(self) -> bool:
        """Whether nothing of any request is left: no lookup, no body, no answer."""
        return not self.requests and not self.held

    @property
    def connections(self) -> int:
        """How many connections the server has."""
        return len(self.server.frontend.connections.order)

    @property
    def passed_on(self) -> int:
        """How many requests the engine's application answers."""
        return len(self.server._uvicorn.server_state.tasks)

    @property
    def requests(self) -> int:
        """How many requests are being answered."""
        return len(self.server.frontend.exchange.pending)

    def start(self) -> None:
        self._thread.start()  # clients may connect already: it listens

    def stop(self) -> bool:
        """Stop as a signal does; False when it takes too long."""
        self.client.close()
        self.server.stop()
        self._thread.join(PATIENCE_S)
        if self._grpc_place is not None:
            self._grpc_place.close()
        return not self._thread.is_alive()

    def connect(self) -> socket.socket:
        """A raw connection."""
        return socket.create_connection(("127.0.0.1", int(self.url.rpartition(":")[2])), timeout=30)


def model_of(name, sources, dims, **more):
    """A model of a configuration: its tables by name, with their widths, from as many sources."""
    return {
        "model": name,
        "sparse_files": [str(source) for source in sources],
        "embedding_table_names": list(dims),
        "embedding_vecsize_per_table": list(dims.values()),
        "maxnum_catfeature_query_per_table_per_sample": [1] * len(dims),
        "default_value_for_each_table": [0.0] * len(dims),
        "deployed_device_list": [0],
        "max_batch_size": 1000,
        **more,
    }


def row_files_alone(directory):
    """The tiers of a configuration whose only database is one of row files."""
    return {"volatile_db": {"type": "disabled"}, "persistent_db": {"type": "row_files", "path": str(directory)}}


def document_of(*models, persistent=None, kind="rocks_db", **more):
    """A configuration of models on the CPU: a hash map and, given its directory, a persistent database of a kind."""
    document = {"supportlonglong": True, "device": "cpu", "volatile_db": {"type": "hash_map"}, "models": list(models), **more}
    if persistent is not None:
        document["persistent_db"] = {"type": kind, "path": str(persistent)}
    return document


def samples(service):
    """Every sample of /metrics, by its name and the values of its labels."""
    families = text_string_to_metric_families(service.client.get("/metrics").text)
    return {(sample.name, *sample.labels.values()): sample.value for family in families for sample in family.samples}


@contextmanager
def running_service(document, parameter_server=None, *, ready=True, grpc=False, **settings):
    """Serve a configuration, given as a dict; without a parameter server of the caller's it loads one."""
    service = RunningService(Lifecycle(load_configuration(document), parameter_server, **settings), grpc=grpc)
    lifecycle = service.app.lifecycle
    service.start()
    try:
        if ready:
            is_ready = lambda: lifecycle.serving and not lifecycle.not_ready_reason and service.frontend.exchange._answers  # noqa: E731
            wait_until(lambda: is_ready() or lifecycle.failure, "the service is ready, and its front knows the engine")
            if lifecycle.failure:
                raise lifecycle.failure
        yield service
    finally:
        assert service.stop()
