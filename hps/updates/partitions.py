"""What logs share that read partition by partition: the state of each, and the reports about them."""

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, field
from threading import Condition, Lock
from typing import Final, Generic, TypeVar

from hps.updates.arrivals import Arrivals
from hps.updates.base import Partition, UpdateLog

_MOST_PROBLEMS: Final = 3


@dataclass(slots=True, eq=False, kw_only=True)
class PartitionState:
    """Reading state of one partition. *Guarded by the lock of its log.*

    Attributes:
        trouble: why its messages do not arrive; empty if they do.
    """

    paused: bool = False
    trouble: str = ""
    arrivals: Arrivals = field(default_factory=Arrivals)


_State = TypeVar("_State", bound=PartitionState)


class PartitionedLog(UpdateLog, Generic[_State]):
    """A log that keeps a state for each partition.

    Attributes:
        lock: guards everything below; `poll` may hold it for as long as it waits.
        states: by partition; read without the lock only as a copy, `list(states.items())`.
        losses: descriptions of lost messages that `lost` has not returned yet.
        starts: positions that `begun` has not returned yet.
    """

    def __init__(self, lock: "Lock | Condition") -> None:
        self.lock = lock
        self.states: dict[Partition, _State] = {}
        self.losses: dict[Partition, str] = {}
        self.starts: dict[Partition, str] = {}

    @abstractmethod
    def _problems(self, topic: str) -> Iterator[str]:
        """Yield the problems of a topic, or of all topics if it is empty. Takes no lock."""

    @property
    def problem(self) -> str:
        return self.problem_of("")

    def problem_of(self, topic: str) -> str:
        problems = list(dict.fromkeys(self._problems(topic)))
        more = f"; and {len(problems) - _MOST_PROBLEMS} more" if len(problems) > _MOST_PROBLEMS else ""
        return "; ".join(problems[:_MOST_PROBLEMS]) + more

    def unread_since(self) -> dict[Partition, float | None]:
        return {partition: state.arrivals.unread_since() for partition, state in list(self.states.items())}

    def lost(self) -> dict[Partition, str]:
        with self.lock:
            losses, self.losses = self.losses, {}
        return losses

    def begun(self) -> dict[Partition, str]:
        with self.lock:
            starts, self.starts = self.starts, {}
        return starts
