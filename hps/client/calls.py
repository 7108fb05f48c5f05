"""The calls of a server, defined once for both clients."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias
from urllib.parse import quote

import numpy as np

from hps.client.addresses import Address
from hps.client.answers import Answer
from hps.client.bag_parts import BagParts
from hps.client.requests import (
    Encoder,
    Input,
    RemoteCall,
    bag_request,
    deadline,
    json_call,
    narrow_datatypes,
    rows_call,
    rows_path,
    score_inputs,
)
from hps.client.retries import Attempts
from hps.client.routing import (
    Declared,
    PartAnswer,
    Parts,
    Routed,
    RoutedWrite,
    Router,
    Rows,
    ShareCalls,
    Written,
    merge_parts,
)
from hps.client.shared_memory import SharedMemory
from hps.errors import InvalidInputError, NotReadyError, RemoteConnectionError
from hps.ground.shares import TableShare
from hps.tensors.array_checks import as_host_keys, as_host_vectors, as_output
from hps.tensors.bags import Bags
from hps.types import BoolArray, FloatArray, IndexArray, KeyArray

Joined: TypeAlias = Callable[[Any], Any]
"""Makes the result of a call from what its routing returns."""


class Calls:
    """The calls of a client. *Thread-safe.* `Client` returns the results, `AsyncClient` awaitables of them.

    Args:
        addresses: of servers with the same models.
        route: "keys": split the keys of a lookup over the servers; "": one server answers each call.

    Attributes:
        timeout_s: default timeout of calls.
    """

    def __init__(self, addresses: Sequence[Address], token: str, timeout_s: float, connections: int, route: str = "") -> None:
        names = [address.text for address in addresses]
        if route not in ("", "keys"):
            raise InvalidInputError(f'connecting to servers: got route {route!r}, expected "keys" or none')
        if route and len(set(names)) < len(names):
            raise InvalidInputError(f"connecting to servers: got addresses {', '.join(names)}, expected each once")
        if not timeout_s > 0:
            raise InvalidInputError(f"connecting to a server: got timeout_s {timeout_s!r}, expected a number above 0")
        if connections < 1:
            raise InvalidInputError(f"connecting to a server: got connections {connections!r}, expected at least 1")
        self._encoder = Encoder(token)
        self._router = Router(names) if len(names) > 1 and route else None
        self.timeout_s = timeout_s
        self._addresses = addresses
        self._current = 0  # index of the server that was reached last
        self._closed = False

    @property
    def addresses(self) -> tuple[str, ...]:
        """Addresses of the servers, without slashes at their ends."""
        return tuple(address.text for address in self._addresses)

    @property
    def closed(self) -> bool:
        """Whether calls are refused."""
        return self._closed

    def _check_open(self) -> None:
        if self._closed:
            raise NotReadyError("using a client: it is closed; connect again")

    def _to_try(self, attempts: Attempts) -> Iterator[tuple[int, Address, float]]:
        """Yield the servers to connect to, the current one first: index, address, and time for the attempt."""
        first, count = self._current, len(self._addresses)
        for nth in range(count):
            index = (first + nth) % count
            yield index, self._addresses[index], attempts.remaining_s() / (count - nth)

    @staticmethod
    def _unreachable(attempts: Attempts, errors: Sequence[str]) -> RemoteConnectionError:
        attempts.remaining_s()
        return RemoteConnectionError(f"connecting to {'; '.join(errors)}; is the server running there?")

    def __repr__(self) -> str:
        return f"<hps.{type(self).__name__} of {', '.join(address.text for address in self._addresses)}>"

    def _remove_memories(self) -> None:
        for memory in self._encoder.memories:
            memory.close()

    def _request(self, call: RemoteCall, timeout_s: float | None) -> Any:
        raise NotImplementedError

    def _request_in_parts(
        self,
        routed: Routed[RemoteCall] | RoutedWrite[RemoteCall],
        timeout_s: float | None,
        merge: Joined,
        complete: RemoteCall,
    ) -> Any:
        """Request parts of a call from several servers; if its routing returns None, all keys from one.

        Args:
            merge: makes the result of the call from what the routing returns.
            complete: the request for all keys.
        """
        raise NotImplementedError

    def _share_calls(
        self, model_name: str, part_of: Callable[[Mapping[str, KeyArray], Rows, str], RemoteCall]
    ) -> ShareCalls[RemoteCall]:
        path = f"/v2/models/{quote(model_name, safe='')}"
        return ShareCalls(model_name, lambda: json_call("GET", path, _declared, repeatable=False), part_of)

    def _lookup(
        self,
        tables: Mapping[str, KeyArray],
        model_name: str,
        version: str | None,
        device_id: int | None,
        out: Mapping[str, Any] | None,
        result: Callable[[Mapping[str, FloatArray], Mapping[str, BoolArray], str], Any],
        found: bool,
        timeout_s: float | None,
    ) -> Any:
        # `result` makes the result of the call from vectors, found-masks and version.
        parameters = {} if device_id is None else {"DeviceID": device_id}
        datatypes = narrow_datatypes(tables, out)

        def call(
            keys: Mapping[str, KeyArray],
            output: Mapping[str, Any] | None,
            read: Callable[[Answer], Any],
            version: str | None = version,
        ) -> RemoteCall:
            inputs = [Input(name, array) for name, array in keys.items()]
            rows = {name: (array.size,) for name, array in keys.items()}
            return self._encoder.lookup(
                model_name, version, inputs, rows, output, read, found=found, datatypes=datatypes, parameters=parameters
            )

        def part(keys: Mapping[str, KeyArray], rows: Rows, version: str | None = version) -> RemoteCall:
            remote_call = call(keys, out if rows is None else None, _part_answer, version)
            return remote_call._replace(repeatable=False)  # the router repeats

        def of_parts(parts: Parts) -> Any:
            return result(*merge_parts(tables, parts, lambda name, shape: _output(out, name, shape)), parts[0][1].version)

        complete = call(tables, out, lambda answer: result(answer.vectors, answer.found, answer.version))
        if self._router is None:
            return self._request(complete, timeout_s)
        routed = self._router.route(tables, part, self._share_calls(model_name, part))
        return self._request_in_parts(routed, timeout_s, of_parts, complete)

    def lookup(
        self,
        keys: Any,
        model_name: str,
        table: str,
        *,
        version: str | None = None,
        device_id: int | None = None,
        out: Any = None,
        return_found: bool = False,
        timeout_s: float | None = None,
    ) -> Any:
        """Look up the vectors of keys in one table.

        Args:
            keys: (n,) integers: a sequence or an array of int64, int32 or uint64 (reinterpreted bit for bit); duplicates
                allowed.
            out: receives the vectors in its first n x dim elements: float32 in host memory, C-contiguous, writable; or float16
                or bfloat16, which the server rounds to and sends. After an error its content is unspecified.

        Returns:
            (n, dim) float32, or `out`. With `return_found` also (n,) bool: True for keys that a tier has.
        """

        def result(vectors: Mapping[str, FloatArray], found: Mapping[str, BoolArray], _: str) -> Any:
            output = vectors[table] if out is None else out
            return (output, found[f"{table}.found"]) if return_found else output

        outputs = None if out is None else {table: out}
        flat = {table: as_host_keys(keys)}
        return self._lookup(flat, model_name, version, device_id, outputs, result, return_found, timeout_s)

    def lookup_tables(
        self,
        tables: Mapping[str, Any],
        model_name: str,
        *,
        version: str | None = None,
        device_id: int | None = None,
        out: Mapping[str, Any] | None = None,
        return_found: bool = False,
        return_version: bool = False,
        timeout_s: float | None = None,
    ) -> Any:
        """Look up several tables of a model at once, in one version.

        Args:
            tables: keys by table, as for `lookup`.
            out: by table, as for `lookup`.

        Returns:
            {table: (n, dim) float32}, or `out`; views of one array unless keys are routed. With `return_found` also
            {table: (n,) bool}, and with `return_version` also the version that answered.
        """
        _check_outputs(tables, out)

        def result(vectors: Mapping[str, FloatArray], found: Mapping[str, BoolArray], answered: str) -> Any:
            output = vectors if out is None else dict(out)
            masks = [{name: found[f"{name}.found"] for name in tables}] if return_found else []
            return (output, *masks, answered) if return_version else (output, *masks) if masks else output

        flat = {name: as_host_keys(keys) for name, keys in tables.items()}
        return self._lookup(flat, model_name, version, device_id, out, result, return_found, timeout_s)

    def lookup_pooled(
        self,
        tables: Mapping[str, Bags],
        model_name: str,
        *,
        version: str | None = None,
        device_id: int | None = None,
        out: Mapping[str, Any] | None = None,
        return_version: bool = False,
        timeout_s: float | None = None,
    ) -> Any:
        """Look up bags of keys in several tables at once; the server combines the vectors of each bag into one.

        Of tables that are split, each share combines its keys and the client the answers; of a maximum it takes all vectors.

        Args:
            tables: bags by table, in host memory.
            out: by table, as for `lookup`.

        Returns:
            {table: (bags, dim) float32}, or `out`; views of one array. With `return_version` also the version that answered.
        """
        requests = {name: bag_request(name, bags) for name, bags in tables.items()}
        _check_outputs(tables, out)
        datatypes = narrow_datatypes(tables, out)
        device = {} if device_id is None else {"DeviceID": device_id}

        def call(read: Callable[[Answer], Any], version: str | None = version) -> RemoteCall:
            inputs, parameters = list[Input](), dict[str, Any](device)
            for request in requests.values():
                of_table, options = request.inputs()
                inputs += of_table
                parameters |= options
            rows = {name: (request.pooling.count,) for name, request in requests.items()}
            return self._encoder.lookup(
                model_name, version, inputs, rows, out, read, datatypes=datatypes, parameters=parameters
            )

        def result(vectors: Mapping[str, FloatArray], answered: str) -> Any:
            output = vectors if out is None else dict(out)
            return (output, answered) if return_version else output

        complete = call(lambda answer: result(answer.vectors, answer.version))
        if self._router is None:
            return self._request(complete, timeout_s)
        bags_of = {name: BagParts(request) for name, request in requests.items()}

        def part(_: Mapping[str, KeyArray], rows: Rows, version: str | None = version) -> RemoteCall:
            if rows is None:
                return call(_part_answer, version)._replace(repeatable=False)
            inputs, parameters, shapes = list[Input](), dict[str, Any](device), dict[str, tuple[int, ...]]()
            for name, of_table in rows.items():
                of_keys, count, options = bags_of[name].request(of_table)
                inputs += of_keys
                parameters |= options
                shapes[name] = (count,)
            remote_call = self._encoder.lookup(model_name, version, inputs, shapes, None, _part_answer, parameters=parameters)
            return remote_call._replace(repeatable=False)

        def of_parts(parts: Parts) -> Any:
            vectors = dict(parts[0][1].vectors) if parts[0][0] is None else _combined(bags_of, parts, out)
            return result(vectors, parts[0][1].version)

        keys = {name: bags.keys for name, bags in bags_of.items()}
        routed = self._router.route(keys, part, self._share_calls(model_name, part), between_replicas=False)
        return self._request_in_parts(routed, timeout_s, of_parts, complete)

    def score(
        self,
        model_name: str,
        inputs: Mapping[str, Any],
        *,
        version: str | None = None,
        device_id: int | None = None,
        timeout_s: float | None = None,
    ) -> Any:
        """Look the vectors of samples up, and run the model's network on them, as `HPS.score` does.

        Args:
            inputs: by name of the network's inputs, as for `HPS.score`. Python's integers are sent as int64 and its floats as
                float32; a feature of another dtype wants an array of that dtype.
            timeout_s: sent to the server, which does not start to score after it.

        Returns:
            `Scores`: outputs of the network by name, (samples, ...), and the version that answered.

        Raises:
            InvalidInputError: inputs are wrong, or the client routes keys, while a network reads all vectors on one server.
            RemoteError: the network failed.
        """
        if self._router is not None:
            raise InvalidInputError(
                "scoring: got a client that routes keys, expected one without a route, of servers with all rows: a network "
                "reads all vectors of its samples on one server"
            )
        arrays = score_inputs(inputs)
        parameters = deadline(self.timeout_s if timeout_s is None else timeout_s)
        if device_id is not None:
            parameters["DeviceID"] = device_id
        return self._request(self._encoder.score(model_name, version, arrays, parameters), timeout_s)

    def report(
        self, tables: Mapping[str, Any], model_name: str, *, version: str | None = None, timeout_s: float | None = None
    ) -> Any:
        """Look up several tables, and return the hits of each tier and the times of the stages, by name of the figure."""
        inputs = [Input(name, as_host_keys(keys)) for name, keys in tables.items()]
        rows = {input_.name: (input_.array.size,) for input_ in inputs}

        def result(answer: Answer) -> dict[str, Any]:
            return {} if answer.layout is None else dict(answer.layout.parameters)

        call = self._encoder.lookup(model_name, version, inputs, rows, None, result, parameters={"report": True})
        return self._request(call, timeout_s)

    def insert(
        self,
        keys: Any,
        vectors: Any,
        model_name: str,
        table: str,
        *,
        version: str | None = None,
        timeout_s: float | None = None,
    ) -> Any:
        """Add or replace vectors in every tier, online. Needs the admin token. Sent at most once to a server.

        A client that routes keys writes rows of tables that are split to all servers of their shares.

        Args:
            keys: (n,) integers. The last of equal keys counts.
            vectors: (n, dim) float32, or anything NumPy converts to real numbers.

        Returns:
            The modified version. After `RemoteConnectionError` and `RemoteTimeoutError` each key has its old or its new vector.

        Raises:
            PartialWriteError: some servers of a table that is split did not acknowledge their keys, which it names.
        """
        return self._write("POST", model_name, table, version, as_host_keys(keys), as_host_vectors(vectors), timeout_s)

    def delete(
        self, keys: Any, model_name: str, table: str, *, version: str | None = None, timeout_s: float | None = None
    ) -> Any:
        """Remove keys from every tier, online, as `insert` writes them.

        Returns:
            The modified version, as for `insert`.
        """
        return self._write("DELETE", model_name, table, version, as_host_keys(keys), None, timeout_s)

    def _write(
        self,
        method: str,
        model_name: str,
        table: str,
        version: str | None,
        keys: KeyArray,  # (n,)
        vectors: FloatArray | None,  # (n, dim)
        timeout_s: float | None,
    ) -> Any:
        complete = rows_call(method, model_name, table, version, keys, vectors)
        if self._router is None or (vectors is not None and vectors.shape[:1] != keys.shape):  # which a server refuses
            return self._request(complete, timeout_s)

        def write(rows: IndexArray) -> RemoteCall:
            call = rows_call(method, model_name, table, version, keys[rows], None if vectors is None else vectors[rows])
            return call._replace(result=lambda answer: Written(call.result(answer)))

        shares = self._share_calls(model_name, lambda *_: complete)
        return self._request_in_parts(self._router.route_write(keys, write, shares), timeout_s, str, complete)

    def row(self, key: int, model_name: str, table: str, *, version: str | None = None, timeout_s: float | None = None) -> Any:
        """Return the stored row of a key: `vector`, `found`, `tier`, `written_at_us`, `version` and others. For debugging."""

        def result(row: dict[str, Any]) -> dict[str, Any]:
            return row | {"vector": np.array(row["vector"], np.float32)}

        return self._request(json_call("GET", rows_path(model_name, table, version, key), result), timeout_s)

    def models(self, *, timeout_s: float | None = None) -> Any:
        """Return the names of the deployed models, a tuple."""
        return self._request(json_call("GET", "/v2", lambda answer: tuple(answer["models"])), timeout_s)

    def tables(self, model_name: str, *, version: str | None = None, timeout_s: float | None = None) -> Any:
        """Return the tables of a model: {name: dim}."""
        of_version = "" if version is None else f"/versions/{quote(version, safe='')}"
        path = f"/v2/models/{quote(model_name, safe='')}{of_version}"
        return self._request(
            json_call("GET", path, lambda answer: {table["name"]: table["dim"] for table in answer["tables"]}), timeout_s
        )

    def ready(self, *, timeout_s: float | None = None) -> Any:
        """Return whether lookups of every model are answered.

        Raises:
            RemoteConnectionError, RemoteTimeoutError: the server does not answer.
        """
        call = json_call(
            "GET", "/v2/health/ready", lambda answer: bool(answer["ready"]), repeatable=False, refused=lambda answer: False
        )
        return self._request(call, timeout_s)

    def ask(
        self, path: str, method: str = "GET", body: Mapping[str, Any] | None = None, *, timeout_s: float | None = None
    ) -> Any:
        """Call any other route: send and receive a JSON object. Sent at most once.

        Args:
            path: escaped, with the query.
        """
        return self._request(json_call(method, path, dict, body, repeatable=False), timeout_s)

    def shared_memory(self, size_bytes: int, *, timeout_s: float | None = None) -> Any:
        """Share memory with a server on the same machine, so that arrays in it bypass the socket.

            memory = client.shared_memory(1 << 20)
            keys, vectors = memory.empty(1000, np.int64), memory.empty((1000, 32), np.float32)
            client.lookup(keys, "sample", "item", out=vectors)

        Returns:
            A `SharedMemory`. Keys and outputs of lookups in it are sent as references.

        Raises:
            UnauthorizedError: the server does not share memory (service.shared_memory_bytes), or not with this client.
            CapacityError: no room in /dev/shm, or within the server's limit.
            InvalidInputError: the client routes keys over several servers.
        """
        if self._router is not None:
            raise InvalidInputError("sharing memory: got a client that routes keys, expected one of a single server")
        memory = SharedMemory(size_bytes)

        def refused(answer: Answer) -> Any:
            memory.close()
            raise answer.error() or InvalidInputError("sharing memory: refused")

        def result(_: Any) -> SharedMemory:
            self._encoder.memories = [*self._encoder.memories, memory]
            return memory

        path = f"/v2/systemsharedmemory/region/{memory.name}/register"
        body = {"key": f"/{memory.name}", "offset": 0, "byte_size": size_bytes}
        return self._request(json_call("POST", path, result, body, repeatable=False, refused=refused), timeout_s)

    def release(self, memory: SharedMemory, *, timeout_s: float | None = None) -> Any:
        """Stop sharing memory. Its arrays stay valid; lookups send them through the socket again."""
        self._encoder.memories = [region for region in self._encoder.memories if region is not memory]
        memory.close()
        path = f"/v2/systemsharedmemory/region/{memory.name}/unregister"
        return self._request(json_call("POST", path, lambda _: None), timeout_s)


def _part_answer(answer: Answer) -> PartAnswer:
    return PartAnswer(answer.version, answer.vectors, answer.found)


def _declared(model: dict[str, Any]) -> Declared:
    shard = model.get("shard")
    return Declared(None if shard is None else TableShare(int(shard["index"]), int(shard["of"])))


def _combined(bags_of: Mapping[str, BagParts], parts: Parts, out: Mapping[str, Any] | None) -> dict[str, FloatArray]:
    """Combine the answers of parts to the vectors of bags, and write them to the outputs, if there are any."""
    vectors = {}
    for name, bags in bags_of.items():
        of_table = [(rows[name], answer.vectors[name]) for rows, answer in parts if rows is not None and name in rows]
        combined = bags.combine(of_table, of_table[0][1].shape[1])
        if out is not None:
            output = _output(out, name, combined.shape)
            if output.dtype == np.float32:
                output[...] = combined
            else:
                from hps.ground.rows import to_16_bits  # imports numba, which takes a second

                to_16_bits(combined, output)
            combined = output
        vectors[name] = combined
    return vectors


def _output(out: Mapping[str, Any] | None, name: str, shape: tuple[int, ...]) -> FloatArray:
    if out is None:
        return np.empty(shape, np.float32)
    vectors: FloatArray = as_output(out[name], *shape, narrow=True)
    return vectors.reshape(-1)[: shape[0] * shape[1]].reshape(shape)


def _check_outputs(tables: Mapping[str, Any], out: Mapping[str, Any] | None) -> None:
    missing: Sequence[str] = [] if out is None else [name for name in tables if name not in out]
    if missing:
        raise InvalidInputError(f"looking up tables: out has no entry for {missing[0]!r}; name an output for every table")
