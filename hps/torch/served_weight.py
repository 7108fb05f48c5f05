"""The `weight` of a layer whose rows are in a server: it describes the table, supports lookups, and refuses other uses."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.nn import functional

from hps.errors import ServedWeightError

Rows = Callable[[Tensor, float | None], Tensor]
"""Looks up keys of any shape, with an optional limit of the vectors' norm."""

_OF_AN_EMPTY_TENSOR = ("dtype", "device", "layout", "is_cuda", "is_cpu", "is_meta", "is_floating_point", "element_size", "type")
_REFUSED = (
    "add radd iadd sub rsub isub mul rmul imul truediv rtruediv floordiv mod pow rpow matmul rmatmul neg abs lt le gt ge eq ne "
    "setitem iter array float int"
)


class ServedWeight:
    """Replaces the weight of a converted embedding. *Immutable.*

    `weight[keys]`, `index_select(0, keys)` and `nn.functional.embedding(keys, weight)` look up.

    Attributes:
        shape: rows of the trained table, and its width.
        dtype, device: of the layer's outputs; also `new_zeros` and the like, `tensor.to(weight)` and `tensor.type_as(weight)`.
    """

    requires_grad = False
    grad = None
    ndim = 2

    def __init__(self, name: str, shape: Sequence[int], like: Tensor, rows: Rows) -> None:
        self.shape = torch.Size(shape)
        self._like = like
        self._name = name
        self._rows = rows

    def size(self, dim: int | None = None) -> Any:
        return self.shape if dim is None else self.shape[dim]

    def dim(self) -> int:
        return 2

    def numel(self) -> int:
        return self.shape.numel()

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, rows: Any) -> Tensor:
        if isinstance(rows, slice):
            rows = torch.arange(*rows.indices(len(self)), device=self.device)
        elif isinstance(rows, int | list):
            rows = torch.tensor(rows, device=self.device)
        if not isinstance(rows, Tensor) or rows.is_floating_point() or rows.dtype in (torch.bool, torch.uint8):  # masks
            self._refuse(f"weight[{rows.dtype if isinstance(rows, Tensor) else type(rows).__name__}]")
        rows = rows.long()
        return self._rows(torch.where(rows < 0, rows + len(self), rows), None)

    def index_select(self, dim: int, index: Tensor) -> Tensor:
        if dim not in (0, -2):
            self._refuse(f"index_select of dimension {dim}")
        return self._rows(index, None)

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        named = dict(kwargs or {})
        if function is functional.embedding and isinstance(args[1], cls):
            if named.get("max_norm") is not None and named.get("norm_type", 2.0) != 2.0:
                args[1]._refuse(f"nn.functional.embedding with norm_type {named['norm_type']}")
            return args[1]._rows(args[0], named.get("max_norm"))
        if function in (torch.Tensor.to, torch.Tensor.type_as) and isinstance(args[1], cls):
            return function(args[0], args[1]._like, *args[2:], **named)
        if function is torch.index_select and isinstance(args[0], cls):
            return args[0].index_select(*args[1:], **named)
        arguments = [leaf for arg in (*args, *named.values()) for leaf in (arg if isinstance(arg, list | tuple) else (arg,))]
        served: ServedWeight = next(argument for argument in arguments if isinstance(argument, cls))
        return served._refuse(getattr(function, "__name__", str(function)))

    def __repr__(self) -> str:
        return f"ServedWeight({self._name}, {list(self.shape)}, {self.dtype})"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        if name in _OF_AN_EMPTY_TENSOR or name.startswith("new_"):
            return getattr(self._like, name)
        return self._refuse(name)

    def _refuse(self, use: str) -> NoReturn:
        raise ServedWeightError(
            f"using the weight of {self._name}: got {use}, but its rows are in the server; expected a lookup: the layer "
            "itself, weight[keys], nn.functional.embedding or index_select. An output layer that is tied to a table needs a "
            "copy of it: make the copy a Parameter before you convert the module, or use hps.torch.package, which makes one"
        )


def _refused(name: str) -> Callable[..., NoReturn]:
    return lambda self, *_: self._refuse(name)


for _name in _REFUSED.split():
    setattr(ServedWeight, f"__{_name}__", _refused(f"__{_name}__"))
ServedWeight.__hash__ = object.__hash__  # type: ignore[method-assign]
