"""The inputs of a module as named tensors, and the module as a function of them.

A request gives tensors by name. A module may take nested dicts and lists, `*args`, `**kwargs`, a `KeyedJaggedTensor` and
numbers, so its arguments are flattened: `batch.item` is the entry `item` of the dict `batch`, `lS_i.0` the first of a list. A
`KeyedJaggedTensor` becomes one ragged input a feature: keys `f`, their `f.offsets` and, if weighted, `f.weights`. Numbers,
strings and None are constants, with the values of the examples.
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
"""Dtypes that requests cannot have, and their replacements."""

_CONSTANTS: Final = (int, float, complex, str, bytes, type(None), enum.Enum, torch.dtype, torch.device, np.generic)

DTYPES: Final = {
    getattr(torch, name): name for name in ("float32", "float16", "float64", "int64", "int32", "int16", "int8", "uint8", "bool")
}


@dataclass(frozen=True)
class _Slot:
    """A leaf of the arguments. *Immutable.*"""

    names: tuple[str, ...]  # of its inputs; empty for a constant
    features: tuple[str, ...] = ()  # of a `KeyedJaggedTensor`, in its order
    weighted: bool = False
    value: Any = None


class ModuleInputs:
    """The signature of a module, learned from example inputs. *Immutable.*

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
        leaves, self._spec = self._flattened(arguments)
        self._slots: list[_Slot] = []
        self._dtypes: dict[str, torch.dtype] = {}
        self.tensors: dict[str, torch.Tensor] = {}
        self.ragged: dict[str, str] = {}
        for path, leaf in leaves:
            self._slots.append(self._slot(self._name(path), leaf))
            for name, tensor in zip(self._slots[-1].names, self._parts(self._slots[-1], leaf), strict=True):
                if name in self.tensors:
                    raise InvalidInputError(f"packaging a {self.module}: got two inputs that are called {name!r}; rename one")
                if tensor.ndim and not len(tensor) and name not in self.ragged:
                    raise InvalidInputError(
                        f"packaging a {self.module}: got input {name!r} that is empty, expected a few samples"
                    )
                self._dtypes[name] = tensor.dtype
                self.tensors[name] = self._checked(name, tensor)
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
                key_name = feature if feature not in {**self.tensors, **self._signature.parameters} else f"{name}.{feature}"
                self.ragged[key_name] = f"{key_name}.offsets"
                names += [key_name, f"{key_name}.offsets", *([f"{key_name}.weights"] if weighted else [])]
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
            jagged = leaf[feature]
            offsets = jagged.offsets()
            weights = jagged.weights_or_none()
            key_weights = [jagged.values().float() if weights is None else weights] if slot.weighted else []  # none of no keys
            parts += [jagged.values(), offsets - offsets[:1], *key_weights]
        return parts

    def _checked(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        tensor = tensor.detach().to("cpu", _NARROW.get(tensor.dtype, tensor.dtype), copy=True).contiguous()
        if not tensor.ndim:
            raise InvalidInputError(f"packaging a {self.module}: got a number for input {name!r}, expected one for each sample")
        if tensor.dtype not in DTYPES:
            raise InvalidInputError(
                f"packaging a {self.module}: got input {name!r} of {tensor.dtype}, expected {', '.join(DTYPES.values())}"
            )
        return tensor

    def flatten(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        """Return the tensors of another call, by name.

        Raises:
            InvalidInputError: structure, constants, features or dtypes differ from the examples.
        """
        leaves, spec = self._flattened(self._bind(args, kwargs))
        if spec != self._spec:
            raise InvalidInputError(f"calling a packaged {self.module}: got inputs of another structure than the examples")
        tensors: dict[str, torch.Tensor] = {}
        for slot, (path, leaf) in zip(self._slots, leaves, strict=True):
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
            for name, tensor in zip(slot.names, self._parts(slot, leaf), strict=True):
                if tensor.dtype != self._dtypes[name] or tensor.ndim != self.tensors[name].ndim:
                    got = f"{tensor.dtype} of shape {list(tensor.shape)}"
                    raise InvalidInputError(
                        f"calling a packaged {self.module}: got input {name!r} of {got}, expected {self._dtypes[name]} of "
                        f"{self.tensors[name].ndim} dimensions"
                    )
                tensors[name] = tensor
        return {name: self._checked(name, tensor) for name, tensor in tensors.items()}

    def call(self, module: nn.Module, tensors: Mapping[str, torch.Tensor]) -> Any:
        """Call a module with other tensors."""
        leaves: list[Any] = []
        for slot in self._slots:
            tensors_of_slot = [tensors[name].to(self._dtypes[name]) for name in slot.names]
            leaves.append(
                _jagged(slot, tensors_of_slot) if slot.features else tensors_of_slot[0] if tensors_of_slot else slot.value
            )
        bound = inspect.BoundArguments(self._signature, pytree.tree_unflatten(leaves, self._spec))
        return module(*bound.args, **bound.kwargs)


def is_jagged(leaf: Any) -> bool:
    """Return whether a value is a torchrec KeyedJaggedTensor."""
    return type(leaf).__name__ == "KeyedJaggedTensor" and type(leaf).__module__.startswith("torchrec.")


def _jagged(slot: _Slot, parts: Sequence[torch.Tensor]) -> Any:
    """Make a KeyedJaggedTensor of features, whose JaggedTensors are the given tensors themselves."""
    from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

    step = 2 + slot.weighted
    keys, offsets = parts[0::step], parts[1::step]
    weights = parts[2::step] if slot.weighted else [None] * len(keys)
    lengths = [offset[1:] - offset[:-1] for offset in offsets]
    columns = zip(slot.features, keys, weights, lengths, offsets, strict=True)
    return KeyedJaggedTensor(
        list(slot.features),
        torch.cat(list(keys)),
        torch.cat(list(weights)) if slot.weighted else None,  # type: ignore[arg-type]
        torch.cat(lengths),
        stride=offsets[0].shape[0] - 1,
        length_per_key=[key.shape[0] for key in keys],
        jt_dict={
            name: JaggedTensor(values, weight_values, key_lengths, key_offsets)
            for name, values, weight_values, key_lengths, key_offsets in columns
        },
    )


class FlatModule(nn.Module):
    """Calls a module with tensors by name, and returns its outputs by name."""

    def __init__(self, module: nn.Module, inputs: ModuleInputs, outputs: Sequence[str] | None) -> None:
        super().__init__()
        self.module = module
        self._inputs = inputs
        self._outputs = outputs

    def forward(self, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return outputs_of(self._inputs.call(self.module, tensors), self._outputs)


def outputs_of(outputs: Any, names: Sequence[str] | None, *, squeezed: bool = False) -> dict[str, torch.Tensor]:
    """Name the outputs of a module: `score` for a single one, the keys of a dict, or `output0` and so on.

    Args:
        squeezed: allow zero-dimensional outputs, as a `squeeze()` of one sample returns.

    Raises:
        InvalidInputError: an output is no tensor, or the names do not fit.
    """
    if hasattr(outputs, "to_dict") and not isinstance(outputs, Mapping):  # torchrec's KeyedTensor
        outputs = outputs.to_dict()
    if isinstance(outputs, Mapping):
        outputs = dict(outputs)  # of any class
    elif dataclasses.is_dataclass(outputs):
        outputs = {field.name: getattr(outputs, field.name) for field in dataclasses.fields(outputs)}
    leaves = [(path, leaf) for path, leaf in pytree.tree_flatten_with_path(outputs)[0] if leaf is not None]
    if not isinstance(outputs, Mapping):
        if names is None:
            names = ["score"] if len(leaves) == 1 else [f"output{index}" for index in range(len(leaves))]
        if len(names) != len(leaves):
            raise InvalidInputError(f"packaging: got {len(names)} names of outputs, expected {len(leaves)}")
        named = dict(zip(names, [leaf for _, leaf in leaves], strict=True))
    else:
        paths = [".".join(str(getattr(key, "key", getattr(key, "idx", key))) for key in path) for path, _ in leaves]
        if twice := next((name for index, name in enumerate(paths) if name in paths[:index]), None):
            raise InvalidInputError(f"packaging: got two outputs that would both be {twice!r}; rename one")
        named = dict(zip(paths, [leaf for _, leaf in leaves], strict=True))
        if names is not None and set(names) - set(named):
            raise InvalidInputError(f"packaging: got outputs {list(names)}, expected some of {', '.join(named)}")
        named = {name: named[name] for name in names or named}
    for name, output in named.items():
        if not isinstance(output, torch.Tensor) or not (output.ndim or squeezed):
            got = f"{type(output).__name__}{' without dimensions' if isinstance(output, torch.Tensor) else ''}"
            raise InvalidInputError(f"packaging: got output {name!r} of type {got}, expected a tensor, samples first")
    return {name: output.to(_NARROW.get(output.dtype, output.dtype)) for name, output in named.items()}
