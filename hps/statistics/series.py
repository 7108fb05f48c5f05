"""Series of metrics by labels. Series of a model exist from `begin` to `end`."""

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

    Without any `begin`, every model has series: parts may be used without a parameter server. The empty name stands for all
    undeployed models.
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
        """Remove all series of a model. Until the next `begin` it gets no others, even from threads that still run for it."""
        with self.lock:
            self._names = (self._names or set()) - {name}
            for series_ in self.series:
                series_.end(name)

    def narrow(self, name: str, tables: Collection[str]) -> None:
        """Remove the series of a model's other tables, which none of its versions has any more."""
        with self.lock:
            for series_ in self.series:
                series_.end(name, tables)

    def has(self, name: str) -> bool:
        """Return whether a model has series. Called while holding `lock`."""
        return not name or self._names is None or name in self._names


class Series(Generic[_T]):
    """Counters by labels. *Thread-safe*; the counters have locks of their own.

    Args:
        names: names of the labels. A counter ends with its `model`, or the model of its `tag`.
        make: creates the counter of new labels.
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
        """Return the counter for these labels, created on first use; a discarded one if their model has ended."""
        # Lookups come here, so the usual case takes no lock: reading a dict is atomic. Only a new counter must not be created
        # while its model ends, or its series would stay for ever.
        counter = self._counters.get(labels)
        if counter is not None:
            return counter
        with self._models.lock:
            if self._place is None or self._models.has(self._model_of(labels)):
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
            if self._model_of(labels) == model and not (tables and labels[self._table or 0] in tables):
                self.remove(*labels)

    def _model_of(self, labels: Labels) -> str:
        name = labels[self._place or 0]
        return (split_tag(name) or (name,))[0] if self._of_tags else name
