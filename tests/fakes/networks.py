"""A network on arrays whose file says what it does, and tables that answer a scorer without a server."""

import json
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np

from hps.cache.base import GraphPart
from hps.engine.session import GraphLookups
from hps.errors import DeviceMemoryError, InvalidInputError, ModelFileError
from hps.networks.base import Network, NetworkTensor
from hps.tensors.batch import Batch
from hps.testing.pooling_oracle import pooled
from tests.fakes.region_front import tables_of

Arrays = Mapping[str, np.ndarray]


class ArrayNetwork(Network):
    """Runs a function of arrays; opened from a file, the function that its JSON describes.

    `{"factor": f}`: each output is f times the sum of all inputs of a sample. `"does"`: with `"samples"` of them (2; 0 is when
    it is opened), `hang` until the file beside it is removed (`"until"`), `slow` by `"seconds"`, `raise`, `nan`, `short` (one
    sample too few);
    `exit` (it ends the process); `memory` (it does not fit). `"bytes_per_sample"`: allocated while it runs. `"adds"`: each
    output is its only input plus this, in int64: a keys program. `"keeps"`: outputs that are inputs, by name.

    Attributes:
        calls: numbers of samples of its runs.
        opened: all networks that were opened from files.
    """

    opened: ClassVar[list["ArrayNetwork"]] = []

    def __init__(self, function: Callable[[Arrays], Mapping[str, np.ndarray]]) -> None:
        self.function = function
        self.calls: list[int] = []
        self.closed = False

    @classmethod
    def open(
        cls, name: str, content: bytes, inputs: Sequence[NetworkTensor], outputs: Sequence[str], device: int | None
    ) -> Self:
        try:
            said = json.loads(content)
        except ValueError as error:
            raise ModelFileError(f"opening the network {name}: it is not JSON") from error
        if said.get("does") == "memory":
            raise DeviceMemoryError(f"opening the network {name}: it does not fit on the device")

        wrong = said.get("samples", 2)  # of requests; trials and warm-ups have other numbers
        if wrong == 0:
            _misbehaving(said, np.zeros(0))

        def run(given: Arrays) -> Mapping[str, np.ndarray]:
            if "adds" in said:
                [keys] = given.values()
                return dict.fromkeys(outputs, keys.astype(np.int64) + np.array(said["adds"]))
            sums = sum(one.reshape(len(one), -1).sum(1, dtype=np.float64) for one in given.values())
            scores = (said.get("factor", 1.0) * sums).astype(np.float32)
            np.empty(said.get("bytes_per_sample", 0) * len(scores), np.uint8).fill(1)
            if len(scores) == wrong:
                scores = _misbehaving(said, scores)
            return dict.fromkeys(outputs, scores) | {name: given[of] for name, of in said.get("keeps", {}).items()}

        network = cls(run)
        cls.opened.append(network)
        return network

    def put(self, array: np.ndarray) -> np.ndarray:
        return array

    def take(self, tensor: np.ndarray, index: np.ndarray) -> np.ndarray:
        return tensor[index]

    def run(self, inputs: Arrays) -> Mapping[str, np.ndarray]:
        assert not self.closed, "a closed network runs"
        self.calls.append(len(next(iter(inputs.values()))))
        return self.function(inputs)

    def fetch(self, outputs: Arrays) -> dict[str, np.ndarray]:
        return dict(outputs)

    def close(self) -> None:
        assert not self.closed, "a network is closed twice"
        self.closed = True


class DeviceNetwork(ArrayNetwork):
    """A network that keeps the rules of a CUDA device: it reads memory of its own, which is filled by `write` alone.

    Attributes:
        captured: number of runs that were captured.
    """

    on_cuda = True

    def __init__(self, function: Callable[[Arrays], Mapping[str, np.ndarray]]) -> None:
        super().__init__(function)
        self.captured = 0

    def empty(self, shape: tuple[int, ...], dtype: str) -> np.ndarray:
        return np.full(shape, 77, dtype)

    def put(self, array: np.ndarray) -> np.ndarray:
        return array.copy()

    def part(self, memory: np.ndarray, start: int, dtype: str, shape: tuple[int, ...]) -> np.ndarray:
        return np.ndarray(shape, dtype, memory, start)

    def write(self, tensor: np.ndarray, source: np.ndarray) -> None:
        tensor[...] = source

    def fixed(self, run: Callable[[], Arrays], *, owner: object = None) -> Callable[[], Arrays]:
        self.captured += 1
        outputs = run() if owner else {name: values.copy() for name, values in run().items()}

        def replay() -> Arrays:
            for name, values in run().items():
                if not owner:
                    outputs[name][...] = values
            return outputs

        return replay

    def fetch(self, outputs: Arrays) -> dict[str, np.ndarray]:
        return {name: values.copy() for name, values in outputs.items()}


def _misbehaving(said: Mapping[str, Any], scores: np.ndarray) -> np.ndarray:
    match said.get("does"):
        case "hang":
            until = time.monotonic() + 300
            while Path(said["until"]).exists() and time.monotonic() < until:
                time.sleep(0.01)
        case "slow":
            time.sleep(said["seconds"])
        case "exit":
            os._exit(1)
        case "raise":
            raise ValueError("the network's own trouble\nin two lines")
        case "nan":
            return np.full_like(scores, np.nan)
        case "short":
            return scores[1:]
    return scores


class FakeGraphPart(GraphPart):
    """Looks `FakeTables` up, but for keys that are elsewhere: these get vectors of 99, as memory that was not written."""

    counts = False

    def __init__(self, tables: "FakeTables") -> None:
        self.tables = tables
        self.ordered = 0
        self.is_valid = True
        self._room = 0
        self._missed = False

    def prepare(self, batch: Batch) -> None:
        self._room = max(self._room, sum(batch.sizes))
        self.enqueue(batch)

    def enqueue(self, batch: Batch) -> None:
        if sum(batch.sizes) > self._room:
            raise InvalidInputError(f"got {sum(batch.sizes)} keys, expected at most {self._room}")
        self.tables.look_up(batch)
        for keys, out in zip(batch.keys, batch.outs, strict=True):
            if np.isin(keys, list(self.tables.elsewhere)).any():
                self._missed = True
                out[:] = 99

    def order(self) -> bool:
        self.ordered += 1
        return self.is_valid

    def absent(self) -> Mapping[int, int] | None:
        missed, self._missed = self._missed, False
        return None if missed else {}


class FakeTables:
    """Looks up vectors that say their table and key: (table + 1) * key, then the same plus 0.5 and so on.

    Attributes:
        lookups: tables of each lookup, in order.
        fails: raised by the next lookups, if not None.
        elsewhere: keys that are not resident.
        counted: by table, keys of graphs.
        parts: of graphs that have lookups of them.
    """

    def __init__(self, *dims: int, max_keys: int = 1000) -> None:
        self.specs = tables_of(*dims, max_keys=max_keys)
        self.lookups: list[list[int]] = []
        self.fails: Exception | None = None
        self.may_answer = threading.Event()
        self.may_answer.set()
        self.elsewhere: set[int] = set()
        self.counted: Counter[int] = Counter()
        self.parts: list[FakeGraphPart] = []

    def graph_lookups(self) -> GraphLookups:
        self.parts.append(FakeGraphPart(self))
        return GraphLookups(
            self.parts[-1], lambda batch: None, lambda found: self.counted.update(found.keys), lambda: None, lambda: False
        )

    def vectors(self, table: int, keys: np.ndarray) -> np.ndarray:
        dim = self.specs[table].dim
        first = (table + 1.0) * np.asarray(keys, np.float64)[..., None]
        return (first + 0.5 * np.arange(dim)).astype(np.float32)

    def look_up(self, batch: Batch) -> None:
        assert self.may_answer.wait(30)
        self.lookups.append(list(batch.tables))
        assert len({*batch.tables}) == len(batch.tables), "one lookup asks a table twice"
        if self.fails is not None:
            raise self.fails
        for place, (table, keys, out) in enumerate(zip(batch.tables, batch.keys, batch.outs, strict=True)):
            rows = self.vectors(table, keys)
            if not batch.poolings:
                out[:] = rows
                continue
            bags = batch.poolings[place]
            starts = np.arange(bags.count + 1) * bags.hotness if bags.offsets is None else np.asarray(bags.offsets)
            if starts.size == bags.count:
                starts = np.append(starts, batch.sizes[place])
            weights = None if bags.weights is None else np.asarray(bags.weights)
            flat_keys = np.asarray(keys).reshape(-1)
            flat = rows.reshape(flat_keys.size, self.specs[table].dim)
            combiner = bags.combiner.name.lower()
            out[:] = pooled(flat, flat_keys, starts, weights, combiner, bags.max_norm or None, bags.padding_key).vectors
