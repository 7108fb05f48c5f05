"""The inputs of a module as named tensors, and the module as a function of them.

A request gives tensors by name. A module takes whatever its author liked: nested dicts and lists, `*args`, `**kwargs`, a
`KeyedJaggedTensor`, numbers. So its arguments are flattened: `batch.item` is the entry `item` of the dict `batch`, `lS_i.0` the
first of a list. A `KeyedJaggedTensor` becomes one ragged input a feature: keys `f`, their `f.offsets` and perhaps `f.weights`.
What is no tensor (a number, a string, None) is a constant, as in the examples.
"""

import dataclasses
import enum
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from torch import nn
from torch.utils import _pytree as pytree  # how torch.export takes inputs apart, and what its documentation names

from hps.errors import InvalidInputError

_NARROW: Final = {torch.bfloat16: torch.float32}
"""Dtypes that requests cannot have, and what they give instead."""

_CONSTANTS: Final = (int, float, complex, str, bytes, type(None), enum.Enum, torch.dtype, torch.device, np.generic)

DTYPES: Final = {
    getattr(torch, name): name for name in ("float32", "float16", "float64", "int64", "int32", "int16", "int8", "uint8", "bool")
}


@dataclass(frozen=True)
class _Slot:
    """A leaf of the arguments. *Immutable.*

    Attributes:
        names: of its inputs; empty for a constant.
        features: of a `KeyedJaggedTensor`, in its order.
        weighted: whether its keys have weights.
        value: of a constant.
    """

    names: tuple[str, ...]
    features: tuple[str, ...] = ()
    weighted: bool = False
    value: Any = None


class ModuleInputs:
    """How a module is called, learned from examples. *Immutable.*

    Attributes:
        tensors: the examples by name, on the CPU.
        ragged: by name of a feature's keys, the name of its offsets.
    """

    def __init__(self, module: nn.Module, example_inputs: Sequence[Any] | Mapping[str, Any]) -> None:
        self.module = type(module).__name__
        self._signature = inspect.signature(module.forward)
        if isinstance(example_inputs, Mapping):
            arguments = self._bind((), example_inputs)
        else:
            arguments = self._bind(example_inputs if isinstance(example_inputs, Sequence) else (example_inputs,), {})
        found, self._spec = self._flattened(arguments)
        self._slots: list[_Slot] = []
        self._dtypes: dict[str, torch.dtype] = {}
        self.tensors: dict[str, torch.Tensor] = {}
        self.ragged: dict[str, str] = {}
        for path, leaf in found:
            self._slots.append(self._slot(self._name(path), leaf))
            for name, one in zip(self._slots[-1].names, self._parts(self._slots[-1], leaf), strict=True):
                if name in self.tensors:
                    raise InvalidInputError(f"packaging a {self.module}: got two inputs that are called {name!r}; rename one")
                if one.ndim and not len(one) and name not in self.ragged:
                    raise InvalidInputError(
                        f"packaging a {self.module}: got input {name!r} that is empty, expected a few samples"
                    )
                self._dtypes[name] = one.dtype
                self.tensors[name] = self._checked(name, one)
        if not self.tensors:
            raise InvalidInputError(f"packaging a {self.module}: got no tensor in the examples, expected one at least")

    def _bind(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        try:
            return dict(self._signature.bind(*args, **kwargs).arguments)
        except TypeError as error:
            raise InvalidInputError(f"packaging a {self.module}: its forward does not take the examples: {error}") from error

    @staticmethod
    def _flattened(arguments: Mapping[str, Any]) -> tuple[list[tuple[Any, Any]], pytree.TreeSpec]:
        return pytree.tree_flatten_with_path(dict(arguments), is_leaf=is_jagged)

    def _name(self, path: Any) -> str:
        parts = [str(next(getattr(key, of) for of in ("key", "idx", "name") if hasattr(key, of))) for key in path]
        kind = self._signature.parameters[parts[0]].kind
        if kind is inspect.Parameter.VAR_KEYWORD:
            parts = parts[1:]
        return ".".join(part.removeprefix("_") for part in parts)

    def _slot(self, name: str, leaf: Any) -> _Slot:
        if is_jagged(leaf):
            if leaf.variable_stride_per_key():
                raise InvalidInputError(
                    f"packaging a {self.module}: got {name!r} with another number of bags for each feature, expected as many"
                )
            weighted = leaf.weights_or_none() is not None
            names: list[str] = []
            for feature in [*leaf.keys()]:
                own = feature if feature not in {**self.tensors, **self._signature.parameters} else f"{name}.{feature}"
                self.ragged[own] = f"{own}.offsets"
                names += [own, f"{own}.offsets", *([f"{own}.weights"] if weighted else [])]
            return _Slot(tuple(names), tuple(leaf.keys()), weighted)
        if isinstance(leaf, torch.Tensor | np.ndarray):
            if isinstance(leaf, np.ndarray) and leaf.dtype.kind not in "biuf":
                raise InvalidInputError(
                    f"packaging a {self.module}: got input {name!r} of {leaf.dtype}, expected {', '.join(DTYPES.values())}"
                )
            if isinstance(leaf, torch.Tensor) and leaf.layout is not torch.strided:
                raise InvalidInputError(
                    f"packaging a {self.module}: got input {name!r} as a sparse tensor, expected a dense one"
                )
            return _Slot((name,))
        if not isinstance(leaf, _CONSTANTS):
            raise InvalidInputError(
                f"packaging a {self.module}: got a {type(leaf).__name__} as {name!r}, in which no tensor can be seen; expected "
                "tensors in dicts, lists and tuples, or a class that is registered (torch.export.register_dataclass)"
            )
        return _Slot((), value=leaf)

    @staticmethod
    def _parts(slot: _Slot, leaf: Any) -> list[torch.Tensor]:
        """Take the tensors out of a leaf."""
        if not slot.names:
            return []
        if not slot.features:
            return [torch.from_numpy(np.ascontiguousarray(leaf)) if isinstance(leaf, np.ndarray) else leaf]
        parts: list[torch.Tensor] = []
        for feature in slot.features:
            one = leaf[feature]
            offsets = one.offsets()
            weights = one.weights_or_none()
            its = [one.values().float() if weights is None else weights] if slot.weighted else []  # none of no keys
            parts += [one.values(), offsets - offsets[:1], *its]
        return parts

    def _checked(self, name: str, one: torch.Tensor) -> torch.Tensor:
        one = one.detach().to("cpu", _NARROW.get(one.dtype, one.dtype), copy=True).contiguous()
        if not one.ndim:
            raise InvalidInputError(f"packaging a {self.module}: got a number for input {name!r}, expected one for each sample")
        if one.dtype not in DTYPES:
            raise InvalidInputError(
                f"packaging a {self.module}: got input {name!r} of {one.dtype}, expected {', '.join(DTYPES.values())}"
            )
        return one

    def flatten(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        """Return the tensors of another call, by name.

        Raises:
            InvalidInputError: it has another structure than the examples, other constants, features or dtypes.
        """
        found, spec = self._flattened(self._bind(args, kwargs))
        if spec != self._spec:
            raise InvalidInputError(f"calling a packaged {self.module}: got inputs of another structure than the examples")
        tensors: dict[str, torch.Tensor] = {}
        for slot, (path, leaf) in zip(self._slots, found, strict=True):
            if slot.features:
                if not is_jagged(leaf) or not {*slot.features} <= {*leaf.keys()}:
                    raise InvalidInputError(
                        f"calling a packaged {self.module}: got {self._name(path)!r} without all of {', '.join(slot.features)}"
                    )
                if leaf.values().numel() and (leaf.weights_or_none() is not None) != slot.weighted:
                    got = "without weights" if slot.weighted else "with weights"
                    raise InvalidInputError(
                        f"calling a packaged {self.module}: got {self._name(path)!r} {got}, unlike the examples"
                    )
            elif bool(slot.names) != isinstance(leaf, torch.Tensor | np.ndarray) or (
                not slot.names and (type(leaf) is not type(slot.value) or (leaf != slot.value and leaf == leaf))  # not a number
            ):
                expected = "a tensor" if slot.names else f"{slot.value!r}, as in the examples"
                raise InvalidInputError(
                    f"calling a packaged {self.module}: got {leaf!r} as {self._name(path)!r}, expected {expected}"
                )
            for name, one in zip(slot.names, self._parts(slot, leaf), strict=True):
                if one.dtype != self._dtypes[name] or one.ndim != self.tensors[name].ndim:
                    expected = f"{self._dtypes[name]} of {self.tensors[name].ndim} dimensions"
                    raise InvalidInputError(
                        f"calling a packaged {self.module}: got input {name!r} of {one.dtype} of shape {list(one.shape)}, "
                        f"expected {expected}"
                    )
                tensors[name] = one
        return {name: self._checked(name, one) for name, one in tensors.items()}

    def call(self, module: nn.Module, tensors: Mapping[str, torch.Tensor]) -> Any:
        """Call a module with other tensors."""
        leaves: list[Any] = []
        for slot in self._slots:
            own = [tensors[name].to(self._dtypes[name]) for name in slot.names]
            leaves.append(_jagged(slot, own) if slot.features else own[0] if own else slot.value)
        bound = inspect.BoundArguments(self._signature, pytree.tree_unflatten(leaves, self._spec))
        return module(*bound.args, **bound.kwargs)


def is_jagged(leaf: Any) -> bool:
    """Return whether a value is a torchrec KeyedJaggedTensor."""
    return type(leaf).__name__ == "KeyedJaggedTensor" and type(leaf).__module__.startswith("torchrec.")


def _jagged(slot: _Slot, parts: Sequence[torch.Tensor]) -> Any:
    """Make the KeyedJaggedTensor of some features, which answers for each of them with the very tensors it was made of."""
    from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

    step = 2 + slot.weighted
    keys, offsets = parts[0::step], parts[1::step]
    weights = parts[2::step] if slot.weighted else [None] * len(keys)
    lengths = [offset[1:] - offset[:-1] for offset in offsets]
    every = zip(slot.features, keys, weights, lengths, offsets, strict=True)
    return KeyedJaggedTensor(
        list(slot.features),
        torch.cat(list(keys)),
        torch.cat(list(weights)) if slot.weighted else None,  # type: ignore[arg-type]
        torch.cat(lengths),
        stride=offsets[0].shape[0] - 1,
        length_per_key=[key.shape[0] for key in keys],
        jt_dict={
            name: JaggedTensor(own, its_weights, its_lengths, its_offsets)
            for name, own, its_weights, its_lengths, its_offsets in every
        },
    )


class FlatModule(nn.Module):
    """A module that takes tensors by name, and returns its outputs by name."""

    def __init__(self, module: nn.Module, inputs: ModuleInputs, outputs: Sequence[str] | None) -> None:
        super().__init__()
        self.module = module
        self._inputs = inputs
        self._outputs = outputs

    def forward(self, given: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return outputs_of(self._inputs.call(self.module, given), self._outputs)


def outputs_of(found: Any, names: Sequence[str] | None, *, squeezed: bool = False) -> dict[str, torch.Tensor]:
    """Name the outputs of a module: `score` if there is one, the keys of a dict, or `output0` and so on.

    Args:
        squeezed: allow numbers, which a `squeeze()` makes of one sample.

    Raises:
        InvalidInputError: one is no tensor, or the names do not fit.
    """
    if hasattr(found, "to_dict") and not isinstance(found, Mapping):  # torchrec's KeyedTensor
        found = found.to_dict()
    if isinstance(found, Mapping):
        found = dict(found)  # of any class
    elif dataclasses.is_dataclass(found):
        found = {field.name: getattr(found, field.name) for field in dataclasses.fields(found)}
    leaves = [(path, leaf) for path, leaf in pytree.tree_flatten_with_path(found)[0] if leaf is not None]
    if not isinstance(found, Mapping):
        if names is None:
            names = ["score"] if len(leaves) == 1 else [f"output{place}" for place in range(len(leaves))]
        if len(names) != len(leaves):
            raise InvalidInputError(f"packaging: got {len(names)} names of outputs, expected {len(leaves)}")
        named = dict(zip(names, [leaf for _, leaf in leaves], strict=True))
    else:
        paths = [".".join(str(getattr(key, "key", getattr(key, "idx", key))) for key in path) for path, _ in leaves]
        if twice := next((name for place, name in enumerate(paths) if name in paths[:place]), None):
            raise InvalidInputError(f"packaging: got two outputs that would both be {twice!r}; rename one")
        named = dict(zip(paths, [leaf for _, leaf in leaves], strict=True))
        if names is not None and set(names) - set(named):
            raise InvalidInputError(f"packaging: got outputs {list(names)}, expected some of {', '.join(named)}")
        named = {name: named[name] for name in names or named}
    for name, one in named.items():
        if not isinstance(one, torch.Tensor) or not (one.ndim or squeezed):
            got = f"{type(one).__name__}{' without dimensions' if isinstance(one, torch.Tensor) else ''}"
            raise InvalidInputError(f"packaging: got output {name!r} of type {got}, expected a tensor, samples first")
    return {name: one.to(_NARROW.get(one.dtype, one.dtype)) for name, one in named.items()}
