"""Which series of a metric exist: those of a model begin and end with it."""

import threading
from collections.abc import Callable, Collection, Sequence
from typing import Generic, Protocol, TypeAlias, TypeVar

from hps.types import split_tag

_T = TypeVar("_T")
Labels: TypeAlias = tuple[str, ...]


class _Ending(Protocol):
    def end(self, model: str, tables: Collection[str] = ()) -> None:
        """Remove the series of a model; with `tables`, only those of its other tables."""


class Models:
    """The models that have series. *Thread-safe.*

    Without any `begin`, every model has some: parts may be used without a parameter server. The empty name stands for all
    models that are gone.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.series: list[_Ending] = []
        self._names: set[str] | None = None

    def begin(self, name: str) -> None:
        """Let a model have series. Idempotent."""
        with self.lock:
            self._names = (self._names or set()) | {name}

    def end(self, name: str) -> None:
        """Remove all series of a model; until it begins again it gets no others, also from threads that still run for it."""
        with self.lock:
            self._names = (self._names or set()) - {name}
            for series_ in self.series:
                series_.end(name)

    def narrow(self, name: str, tables: Collection[str]) -> None:
        """Remove the series of a model's tables that none of its versions has any more."""
        with self.lock:
            for series_ in self.series:
                series_.end(name, tables)

    def has(self, name: str) -> bool:
        """Whether a model has series. Called while holding `lock`."""
        return not name or self._names is None or name in self._names


class Series(Generic[_T]):
    """Counters by labels. *Thread-safe*; the counters have locks of their own.

    Args:
        names: names of the labels. `model`, or the model of a `tag`, owns the counter.
        make: makes the counter of new labels.
    """

    def __init__(self, models: Models, names: Sequence[str], make: Callable[[Labels], _T]) -> None:
        self._models = models
        self._make = make
        self._place = next((at for at, name in enumerate(names) if name in ("model", "tag")), None)
        self._of_tags = "tag" in names
        self._table = names.index("table") if "table" in names else None
        self._counters: dict[Labels, _T] = {}
        models.series.append(self)

    def of(self, *labels: str) -> _T:
        """Return the counter for these labels, made on first use; if their model has ended, one that nobody reads."""
        found = self._counters.get(labels)
        if found is not None:
            return found
        with self._models.lock:
            if self._place is None or self._models.has(self._owner(labels)):
                return self._counters.setdefault(labels, self._make(labels))
        return self._make(labels)

    def remove(self, *labels: str) -> None:
        self._counters.pop(labels, None)

    def items(self) -> list[tuple[Labels, _T]]:
        return list(self._counters.items())

    def end(self, model: str, tables: Collection[str] = ()) -> None:
        """Remove the series of a model or, with `tables`, of its other tables. Called by `Models`."""
        if self._place is None or (tables and self._table is None):
            return
        for labels in list(self._counters):
            if self._owner(labels) == model and not (tables and labels[self._table or 0] in tables):
                self.remove(*labels)

    def _owner(self, labels: Labels) -> str:
        name = labels[self._place or 0]
        return (split_tag(name) or (name,))[0] if self._of_tags else name
