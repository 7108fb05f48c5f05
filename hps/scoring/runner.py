"""The network, keys programs and lookups of one deployment, which batches in new and in kept memory run."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from hps.engine.session import GraphLookups
from hps.errors import DeviceError, NetworkError
from hps.networks.base import Network, Tensor
from hps.scoring.network_calls import NetworkCalls
from hps.scoring.signature import Signature
from hps.tensors.batch import Batch
from hps.types import KeyArray, TableSpec

Outputs: TypeAlias = dict[str, npt.NDArray[Any]]
"""By name, (samples, ...) in host memory."""
T = TypeVar("T")


class Runner:
    """Runs networks and lookups of one deployment on one device. *Thread-safe.*

    Args:
        model: its name, for errors.
        lookup: looks a batch up.
        graph_lookups: returns lookups that can be captured with the network; None if there are none.
        on_device: whether lookups write to the memory of the network's device rather than to the host's.
    """

    def __init__(
        self,
        model: str,
        tables: Sequence[TableSpec],
        signature: Signature,
        calls: NetworkCalls,
        lookup: Callable[[Batch], None],
        graph_lookups: Callable[[], GraphLookups | None] = lambda: None,
        *,
        on_device: bool,
    ) -> None:
        self.model = model
        self.tables = tuple(tables)
        self.signature = signature
        self.calls = calls
        self.network: Network = calls.network
        self.lookup = lookup
        self.graph_lookups = graph_lookups
        self.on_device = on_device

    def run(self, run: Callable[[], Mapping[str, Tensor]]) -> Outputs:
        """Run the network, and fetch its outputs.

        Raises:
            NetworkError: it fails. DeviceError: the device does.
        """
        return self.running(lambda: self.network.fetch(run()), "the network")

    def running(self, run: Callable[[], T], program: str) -> T:
        """Run the network or a keys program; errors as for `run`."""
        try:
            with self.calls.running(self):
                return run()
        except DeviceError:
            raise
        except Exception as error:
            lines = str(error).strip().splitlines()
            raise NetworkError(
                f"running {program} of model {self.model!r}: {type(error).__name__}: {lines[0][:300] if lines else ''}"
            ) from error

    @staticmethod
    def run_of(
        network: Network, inputs: Mapping[str, Tensor], indices: Mapping[str, Tensor]
    ) -> Callable[[], Mapping[str, Tensor]]:
        """Return a run of a network on inputs; inputs with an index are repeated by it."""
        if not indices:
            return lambda: network.run(inputs)
        return lambda: network.run({**inputs, **{name: network.take(inputs[name], index) for name, index in indices.items()}})

    def groups(self, pooled: Mapping[int, bool]) -> list[tuple[bool, list[int]]]:
        """Group lookups, by their places: a group has each table at most once, and pools all or none."""
        groups: dict[tuple[bool, int], list[int]] = {}
        turns: dict[tuple[bool, int], int] = {}
        for place, pools in pooled.items():
            group = pools, self.signature.lookups[place].table
            turns[group] = turn = turns.get(group, -1) + 1
            groups.setdefault((pools, turn), []).append(place)
        return [(pools, places) for (pools, _), places in groups.items()]

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Copy values where lookups read them, cast as C does."""
        if self.on_device:
            self.network.write(target, source)
        elif source.dtype.kind == "f":
            with np.errstate(invalid="ignore"):
                np.copyto(target, source, casting="unsafe")
        else:
            np.copyto(target, source, casting="unsafe")


def index_of(times: KeyArray) -> KeyArray:
    """Return the row of each sample, from how often each row counts."""
    return np.repeat(np.arange(len(times)), times)
