"""Traces modules by torch.export, with sizes as free as possible, and without lasting effects on the module."""

import io
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr
from typing import Any, Final, NamedTuple

import torch
from torch import nn
from torch.fx.experimental import _config  # has the only switch that makes sizes of 0 and 1 guards; pinned by a test
from torch.utils import _pytree as pytree

from hps.errors import InvalidInputError
from hps.torch.module_inputs import ModuleInputs

HOMES: Final = tuple(f"{torch.__file__.rpartition('/')[0]}{end}" for end in ("/", "rec/"))
"""Directories of torch and torchrec."""


class TracingMode(NamedTuple):
    """Whether a module is traced with dynamo, and with all sizes free, or only the number of samples."""

    strict: bool
    all_sizes: bool


TRACING_MODES: Final = [
    TracingMode(strict=strict, all_sizes=all_sizes) for strict in (False, True) for all_sizes in (True, False)
]


def export(
    module: nn.Module,
    inputs: tuple[Any, ...],
    *,
    sizes: Mapping[str, Sequence[Any]] | None = None,
    strict: bool = False,
    all_sizes: bool = True,
) -> torch.export.ExportedProgram:
    """Export a module that takes tensors, or a dict of them; sizes that the module does not fix are free, also to be 0 and 1.

    Args:
        sizes: of the tensors by name, in their order; numbers are fixed. Default: none is.
        all_sizes: free all dimensions; False: only the first ones.
    """
    tensors = [*inputs[0].values()] if isinstance(inputs[0], Mapping) else inputs
    sizes_by_tensor = [*sizes.values()] if sizes is not None else [[None] * tensor.ndim for tensor in tensors]
    dims = [
        {
            dim: torch.export.Dim.AUTO
            for dim, size in enumerate(sizes_of_tensor[: None if all_sizes else 1])
            if size is None or not size.is_Integer
        }
        for sizes_of_tensor in sizes_by_tensor
    ]
    shapes: Any = (dict(zip(inputs[0], dims, strict=True)),) if isinstance(inputs[0], Mapping) else (tuple(dims),)
    with tracing():
        return torch.export.export(module, inputs, dynamic_shapes=shapes, strict=strict)


@contextmanager
def quiet() -> Iterator[None]:
    """Drop output and warnings of torch's exporters: users cannot act on them, and errors are raised."""
    with redirect_stderr(io.StringIO()), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@contextmanager
def tracing() -> Iterator[None]:
    """Trace sizes of 0 and 1 like others, with guards where they are special."""
    patch: Any = _config.patch  # type: ignore[attr-defined]
    with torch.no_grad(), patch(backed_size_oblivious=True), quiet():
        yield


class SizeBranches:
    """Records whether code outside of torch branches on a size while it is traced, so that other sizes need another program.

    Conditions of torch's own operators, such as broadcasting, are ignored: they do not change the meaning of a row.

    Attributes:
        found: whether it does.
        symbols: in the conditions.
        foregone: whether a condition had no symbol: torch assumes positive sizes, so `size == 0` is false without a guard.
    """

    def __enter__(self) -> "SizeBranches":
        self.found = self.foregone = False
        self.symbols: set[Any] = set()
        self._of_torch: Callable[[torch.SymBool], bool] = torch.SymBool.__bool__
        of_torch, of_size = self._of_torch, torch.SymInt.__bool__.__code__

        def watched(condition: torch.SymBool) -> bool:
            frame: Any = sys._getframe(1)
            if frame.f_code is of_size:  # `if size:` is `if size != 0:`
                frame = frame.f_back
            if not frame.f_code.co_filename.startswith(HOMES):
                symbols = condition.node.expr.free_symbols
                self.found, self.foregone = True, self.foregone or not symbols
                self.symbols |= symbols
            return bool(of_torch(condition))  # type: ignore[no-untyped-call]

        torch.SymBool.__bool__ = watched  # type: ignore[method-assign]
        return self

    def __exit__(self, *_: object) -> None:
        torch.SymBool.__bool__ = self._of_torch  # type: ignore[method-assign]


def export_error(inputs: ModuleInputs, error: Exception) -> InvalidInputError:
    """Describe why a module cannot be exported, with the last line outside of torch, and a remedy if one is known."""
    frames = traceback.extract_tb(error.__traceback__)
    module_frames = [
        frame
        for frame in frames
        if not frame.filename.startswith(HOMES) and "/hps/torch/" not in frame.filename and "<" not in frame.filename
    ]
    text = " ".join(str(error).split())
    hint = ""
    if "PackedSequence" in text or any("pack_padded_sequence" in f"{frame.name} {frame.line}" for frame in frames):
        hint = (
            "; packed sequences cannot be exported: run the network on the padded matrix, and gather its output at length - 1"
        )
    elif "data-dependent" in text or "GuardOnDataDependent" in type(error).__name__ or ".item()" in text:
        hint = "; a branch on values cannot be exported: use torch.where, or masks"
    line = (
        f" ({module_frames[-1].filename}:{module_frames[-1].lineno}: {(module_frames[-1].line or '')[:120]})"
        if module_frames
        else ""
    )
    return InvalidInputError(
        f"packaging a {inputs.module}: torch.export cannot export it: {type(error).__name__}: {text[:300]}{line}{hint}"
    )


def attributes_of(module: nn.Module) -> dict[str, list[Any]]:
    """Return the attributes of a module and its parts, which Python code may change while it is traced."""
    found: dict[str, list[Any]] = {}
    for path, part in module.named_modules():
        for name, value in vars(part).items():
            if name not in ("_parameters", "_buffers", "_modules") and not name.startswith(("_forward", "_backward")):
                found[f"{path}.{name}".lstrip(".")] = pytree.tree_leaves(value)
    return found


def require_stateless(
    inputs: ModuleInputs,
    module: nn.Module,
    before: Mapping[str, Sequence[Any]],
    trace: Callable[[], torch.export.ExportedProgram],
    code: str,
) -> None:
    """Trace a module again; refuse one that keeps state between calls, or whose program differs from trace to trace.

    Args:
        before: its attributes before it was traced.
        code: of the first trace.

    Raises:
        InvalidInputError: it does.
    """
    # Attributes that forward created are replaced by objects that fail on use, unless forward creates them again first.
    after = attributes_of(module)
    changed = [name for name, value in after.items() if name in before and not _same(before[name], value)]
    created = [name for name in after if name not in before]
    for path in created:
        parent, name = _parent_of(module, path)
        parent[name] = _RemovedAttribute()
    retraced, cause = "", None
    try:
        retraced = trace().graph_module.code
    except Exception as error:
        if not created:
            raise
        cause = error
    drop_created(module, before)
    if changed or (created and retraced != code):
        raise InvalidInputError(
            f"packaging a {inputs.module}: forward sets {[*changed, *created][0]!r} of the module; a served module has no "
            "memory: make it in __init__, as a buffer if it is a tensor"
        ) from cause
    if retraced != code:
        raise InvalidInputError(
            f"packaging a {inputs.module}: forward is a different program each time it is traced: does it read a clock, a "
            "counter or a random number of Python? Give them as inputs"
        )


def drop_created(module: nn.Module, before: Mapping[str, Any]) -> None:
    """Remove the attributes that forward created."""
    for path in [path for path in attributes_of(module) if path not in before]:
        parent, name = _parent_of(module, path)
        del parent[name]


def _parent_of(module: nn.Module, path: str) -> tuple[dict[str, Any], str]:
    parent, _, name = path.rpartition(".")
    return vars(module.get_submodule(parent)), name


class _RemovedAttribute:
    """Replaces an attribute that the last call created; any use fails, even a comparison."""

    def __eq__(self, other: object) -> bool:
        raise TypeError("an attribute of the last call is used")

    __hash__ = __bool__ = __eq__  # type: ignore[assignment]


def _same(before: Sequence[Any], after: Sequence[Any]) -> bool:
    plain = (int, float, str, bool, type(None), torch.dtype, torch.device)
    return len(before) == len(after) and all(
        old is new or (isinstance(old, plain) and old == new) for old, new in zip(before, after, strict=True)
    )
