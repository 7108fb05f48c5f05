"""Compares a package, as a server runs it, with the module that it was made of.

The graph is what makes masks, lengths and rules right. Runs find what no graph shows: random numbers, clocks and counters of
Python, `torch.compiler.is_compiling()`, what an `except` swallows, and whether rows depend on each other.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, Final

import numpy as np
import torch
from torch import nn

from hps.configuration.load import DenseConfig, ModelConfig
from hps.errors import HPSError, InvalidInputError, NetworkError, TooManyKeysError
from hps.scoring.deployed import OpenedNetwork
from hps.scoring.features import ScoreInputs, arrays_of, read_request
from hps.scoring.scorer import Scorer
from hps.tensors.batch import Batch
from hps.torch.cutting import Cut, plain_path
from hps.torch.module_inputs import ModuleInputs, outputs_of
from hps.torch.tables import Table
from hps.torch.traced_copy import TracedCopy, copied

Tensors = Mapping[str, torch.Tensor]
_TOLERANCES: Final = {torch.float16: 2e-3, torch.bfloat16: 2e-2}
_SMALL_BYTES: Final = 16 << 20
_GIVEN_ONCE: Final = "what is per request given once"
_KEYS: Final = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


class Proof:
    """Runs of a module, and what they say of its package.

    Attributes:
        rows_are_independent: whether the answer to a row is the same in other orders, alone, and in a larger batch.
        why_dependent: in words.
        difference: largest difference between package and module so far.
        notes: what its owner should know.
        guards: conditions on sizes that the graph does not tell.
    """

    def __init__(
        self,
        module: nn.Module,
        inputs: ModuleInputs,
        found: Cut,
        traced: TracedCopy,
        outputs: Sequence[str] | None,
        tolerance: float | None,
    ) -> None:
        self._inputs, self._cut, self._outputs = inputs, found, outputs
        self._doing = f"packaging a {inputs.module}"
        self._alone = not traced.is_sharded
        scaled = {plain_path(lookup.weight) for lookup in found.lookups if lookup.max_norm is not None}
        self._module = _to_run(module, scaled) if self._alone else module
        self._device = next((parameter.device for parameter in (*module.parameters(), *module.buffers())), torch.device("cpu"))
        self._tolerance = tolerance
        self.notes: list[str] = []
        self.guards: list[str] = []
        self.difference = 0.0
        self.rows_are_independent, self.why_dependent = True, ""
        self._examples = self._run(inputs.tensors)
        if self._alone:
            self._refuse_moods()
            self._find_dependence()
        if found.why_apart:
            self.rows_are_independent, self.why_dependent = False, found.why_apart

    def _run(self, tensors: Tensors) -> dict[str, torch.Tensor]:
        """Call the module; in evaluation mode, on copies."""
        training = self._module.training
        self._module.eval()
        try:
            with torch.no_grad():
                given = {name: one.to(self._device, copy=True) for name, one in tensors.items()}
                found = outputs_of(self._inputs.call(self._module, given), self._outputs, squeezed=True)
        finally:
            self._module.train(training)
        if any(not one.ndim for one in found.values()):
            self.guards.append("samples >= 2")  # a squeeze() drops the only sample: it is answered in a batch of two
        return {name: one.detach().cpu().reshape(one.shape or (1,)) for name, one in found.items()}

    def _refuse_moods(self) -> None:
        again = self._run(self._inputs.tensors)
        for name, one in self._examples.items():
            if self._worst(one, again[name], name)[1]:
                raise InvalidInputError(
                    f"{self._doing}: it answers the same inputs differently from call to call (output {name!r}): random "
                    "numbers, a clock or a counter of Python? Give them as inputs"
                )

    def _worst(self, ours: torch.Tensor, theirs: torch.Tensor, name: str) -> tuple[float, bool]:
        """Return the largest difference, and whether it is too large."""
        if ours.shape != theirs.shape:
            return float("inf"), True
        half = max((_TOLERANCES.get(self._cut.outputs[name].meta["val"].dtype, 0.0), *self._of_weights()))
        tolerance = self._tolerance or max(half, 1e-5)
        ours, theirs = ours.double(), theirs.double()
        known = ~(ours.isnan() | theirs.isnan())  # a server refuses what is not a number
        ours, theirs = ours[known], theirs[known]
        difference = torch.nan_to_num((ours - theirs).abs())
        worst = float(difference.max()) if difference.numel() else 0.0
        return worst, not torch.allclose(ours, theirs, rtol=tolerance, atol=tolerance)

    def _of_weights(self) -> list[float]:
        """Return the tolerances of the dtypes that the module computes in."""
        return [
            _TOLERANCES.get(parameter.dtype, 0.0) for parameter in (*self._module.parameters(), *self._module.buffers())
        ] or [0.0]

    def _find_dependence(self) -> None:
        count = self._cut.samples
        orders = {
            "in another order": torch.arange(count).flip(0),
            "alone": torch.arange(1),
            "in a larger batch": torch.arange(count).repeat(2),
        }
        for what, order in orders.items():
            tensors = self._take(order)
            if tensors is None:
                self.rows_are_independent = False
                self.why_dependent = "its inputs cannot be taken apart by samples"
                return
            if self._depends(what, tensors, {name: one[order] for name, one in self._examples.items()}):
                return
        for factor in (1e3, -1e3):
            tensors = dict(self._inputs.tensors)
            for name, one in tensors.items():
                if one.is_floating_point() and self._cut.shapes[name][0] == "samples" and len(one) == count > 1:
                    tensors[name] = torch.cat([one[:-1], one[-1:] * factor])
            first = {name: one[:-1] for name, one in self._examples.items()}
            if self._depends("beside one of large numbers", tensors, first):
                return

    def _depends(self, what: str, tensors: Tensors, expected: Tensors) -> bool:
        """Return whether the first samples are answered otherwise than expected."""
        try:
            found = self._run(tensors)
        except Exception:  # noqa: BLE001 - the module does not take them
            return False
        for name, one in expected.items():
            if self._worst(found[name][: len(one)], one, name)[1]:
                self.rows_are_independent = False
                self.why_dependent = f"the module answers a sample {what} otherwise (output {name!r})"
                return True
        return False

    def compare(self, config: ModelConfig, dense: DenseConfig, files: Mapping[str, bytes], tables: Mapping[str, Table]) -> None:
        """Score the examples and inputs made of them as a server does, and compare the answers with the module's.

        Answers to requests that are put together decide `rows_are_independent`, too.

        Raises:
            InvalidInputError: the answers differ.
        """
        try:
            opened = OpenedNetwork(config, dense, files, "", ())
        except NetworkError as error:
            raise InvalidInputError(f"{self._doing}: the package does not run: {error}") from error
        try:
            scorer = Scorer(
                config.model,
                config.tables,
                opened.signature,
                opened.networks[None],
                _lookup_in(list(tables.values())),
                refuse_nan=False,
                max_samples=config.max_batch_size,
            )
            asked = [request for request in self._requests(opened, config, dense) if self._is_answered(scorer, *request)]
            if dense.dynamic_batching:
                self._merge(scorer, asked)
        finally:
            opened.close()

    def _requests(
        self, opened: OpenedNetwork, config: ModelConfig, dense: DenseConfig
    ) -> Iterator[tuple[str, ScoreInputs, Tensors]]:
        """Make requests of the examples and their variants, with the module's answers; without those that either refuses."""
        once = [name for name, one in dense.inputs.items() if one.per_request]
        for what, tensors in self._variants(once):
            is_example = tensors is self._inputs.tensors
            try:
                expected = self._examples if is_example else self._run(tensors)
            except Exception:  # noqa: BLE001 - no inputs that the module takes
                continue
            arrays = {name: one.numpy() for name, one in tensors.items() if is_given(dense, name)}
            if what == _GIVEN_ONCE:
                arrays |= {name: arrays[name][:1] for name in once}
            try:
                given = arrays_of(opened.features, arrays)
                yield what, read_request(opened.signature, given, config.max_batch_size, config.model), expected
            except (InvalidInputError, TooManyKeysError):
                if is_example:
                    raise

    def _is_answered(self, scorer: Scorer, what: str, request: ScoreInputs, expected: Tensors) -> bool:
        """Compare the answer to a request with the module's; False if there is none."""
        try:
            (answer,), _ = scorer.score([request])
        except NetworkError as error:
            if expected is self._examples:
                raise InvalidInputError(f"{self._doing}: the package does not run: {error}") from error
            self.notes.append(f"the package fails where the module answers ({what}): {error}")
            return False
        self._check(what, expected, answer)
        return True

    def _merge(self, scorer: Scorer, asked: Sequence[tuple[str, ScoreInputs, Tensors]]) -> None:
        """Score requests together that a server would."""
        together: dict[Any, list[tuple[str, ScoreInputs, Tensors]]] = {}
        for one in asked:
            together.setdefault(one[1].form, []).append(one)
        for group in together.values():
            try:
                answers, _ = scorer.score([request for _, request, _ in group])
            except NetworkError:  # as many samples as it does not run with: a server answers them one by one
                continue
            for (what, _, expected), answer in zip(group, answers, strict=True):
                if self._differs(expected, answer):
                    self.rows_are_independent = False
                    self.why_dependent = f"a request ({what}) is answered otherwise when it is put together with others"
                    return

    def _differs(self, expected: Tensors, answer: Any) -> bool:
        return any(self._worst(torch.from_numpy(np.array(answer[name])), one, name)[1] for name, one in expected.items())

    def _check(self, what: str, expected: Tensors, answer: Any) -> None:
        if isinstance(answer, HPSError):
            raise answer
        for name, theirs in expected.items():
            ours = torch.from_numpy(np.array(answer[name]))
            worst, differs = self._worst(ours, theirs, name)
            if ours.shape != theirs.shape:
                raise InvalidInputError(
                    f"{self._doing}: output {name!r} has shape {list(ours.shape)} when it is served, {list(theirs.shape)} from "
                    f"the module ({what}); expected samples as the first dimension of outputs"
                )
            if differs:
                raise InvalidInputError(
                    f"{self._doing}: output {name!r} differs by up to {worst:.3g} from the module's ({what}): does forward ask "
                    "whether it is traced, read a clock or a random number, or catch exceptions?"
                )
            self.difference = max(self.difference, worst)

    def _variants(self, once: Sequence[str] = ()) -> Iterator[tuple[str, Tensors]]:
        """Make inputs of the examples: the same samples otherwise, other keys, other lengths."""
        tensors, count = self._inputs.tensors, self._cut.samples
        yield "the examples", tensors
        if not self._alone:
            return
        orders = {"one sample": [0], "two samples": [count - 1, 0], "more samples": [*range(count), *range(count)]}
        for what, order in orders.items():
            if (taken := self._take(torch.tensor(order))) is not None:
                yield what, taken
        keys = {
            name
            for name, one in tensors.items()
            if one.dtype in _KEYS and one.numel() and name not in self._cut.ragged.values()
        }
        for what, change in (
            ("other keys", lambda one: one.flatten().roll(1).reshape(one.shape)),
            ("keys in reverse", lambda one: one.flatten().flip(0).reshape(one.shape)),
            ("the smallest key everywhere", lambda one: torch.full_like(one, int(one.min()))),
            ("zeros behind and a row of zeros", _with_zeros),
            ("the largest key everywhere", lambda one: torch.full_like(one, int(one.max()))),
        ):
            yield what, {name: change(one) if name in keys else one for name, one in tensors.items()}
        for size in self._cut.sizes:
            at = {name: [dim for dim, text in enumerate(shape) if text == size] for name, shape in self._cut.shapes.items()}
            if any(0 in dims for dims in at.values()) or any(
                size in str(text) and text != size for shape in self._cut.shapes.values() for text in shape
            ):
                continue
            before = self._cut.sizes[size]
            for length in (1, 2, before + 3):
                if before and length != before:
                    yield f"{size} = {length}", {name: self._resized(one, at[name], length) for name, one in tensors.items()}

    @staticmethod
    def _resized(one: torch.Tensor, dims: Sequence[int], length: int) -> torch.Tensor:
        for dim in dims:
            one = one.index_select(dim, torch.arange(length) % one.shape[dim])
        return one

    def _take(self, order: torch.Tensor) -> dict[str, torch.Tensor] | None:
        """Take samples of the examples; None if they cannot be taken apart."""
        taken: dict[str, torch.Tensor] = {}
        ragged = self._cut.ragged
        for name, one in self._inputs.tensors.items():
            if name in ragged and not ragged[name]:
                return None
            if name in ragged:
                taken |= self._take_ragged(name, one, ragged[name], order)
            elif name not in ragged.values():
                if self._cut.shapes[name][0] != "samples":
                    return None
                taken[name] = one[order]
        return taken

    def _take_ragged(self, name: str, one: torch.Tensor, offsets_name: str, order: torch.Tensor) -> dict[str, torch.Tensor]:
        offsets = self._inputs.tensors[offsets_name]
        ends = (
            offsets
            if self._cut.shapes[offsets_name][0] != "samples"
            else torch.cat([offsets, torch.tensor([len(one)], dtype=offsets.dtype)])
        )
        parts = [one[int(ends[row]) : int(ends[row + 1])] for row in order.tolist()]
        new = torch.tensor([0, *np.cumsum([len(part) for part in parts])], dtype=offsets.dtype)
        return {name: torch.cat(parts), offsets_name: new if ends is offsets else new[:-1]}


def _with_zeros(one: torch.Tensor) -> torch.Tensor:
    """Set the second half of each row, and all of the first row, to zero: what is usual for padding."""
    one = one.clone()
    if one.ndim > 1:
        one[:, one.shape[1] // 2 :] = 0
    one[:1] = 0
    return one


def is_given(dense: DenseConfig, name: str) -> bool:
    """Return whether requests give a tensor of a module: an input, or offsets or weights of one."""
    return name in dense.inputs or name.rpartition(".")[0] in dense.inputs


def run_once(module: nn.Module, inputs: ModuleInputs) -> None:
    """Run a copy of a module on the examples before it is traced, so that what it caches elsewhere holds no traced tensors.

    Raises:
        InvalidInputError: it does not run.
    """
    scaled = {
        f"{path}.{name}".lstrip(".")
        for path, part in module.named_modules()
        if getattr(part, "max_norm", None) is not None
        for name, _ in part.named_parameters()
    }
    device = next((parameter.device for parameter in (*module.parameters(), *module.buffers())), torch.device("cpu"))
    if device.type == "meta":
        return
    ours = _to_run(module, scaled).eval()
    try:
        with torch.no_grad():
            inputs.call(ours, {name: one.to(device, copy=True) for name, one in inputs.tensors.items()})
    except Exception as error:
        raise InvalidInputError(
            f"packaging a {inputs.module}: it does not run on the examples: {type(error).__name__}: {error}"
        ) from error
    for (path, one), own in zip(ours.named_parameters(), module.parameters(), strict=True):
        shared = one.data_ptr() == own.data_ptr()
        if path not in scaled and not shared and not torch.equal(torch.nan_to_num(one), torch.nan_to_num(own)):
            raise InvalidInputError(
                f"packaging a {inputs.module}: forward changes its weight {path!r}; a served module has no memory: change it "
                "once, before it is packaged"
            )


def _to_run(module: nn.Module, scaled: Collection[str]) -> nn.Module:
    """Copy a module that may change itself when it runs. Large weights are shared, but those that running scales to a norm."""
    memo: dict[int, Any] = {}
    for path, one in module.named_parameters():
        if path not in scaled and one.numel() * one.element_size() > _SMALL_BYTES:
            memo[id(one)] = nn.Parameter(one.detach(), requires_grad=False)
    memo |= {id(part): part for part in module.modules() if type(part).__module__.startswith(("torch.ao.", "torchrec.quant."))}
    return copied(module, memo)


def _lookup_in(tables: Sequence[Table]) -> Any:
    """Return what looks a batch up in the weights."""

    def look_up(batch: Batch) -> None:
        for place, (table, asked, out) in enumerate(zip(batch.tables, batch.keys, batch.outs, strict=True)):
            keys, places = torch.unique(torch.from_numpy(np.ascontiguousarray(asked)), return_inverse=True)
            rows = tables[table].read(keys)
            if not batch.poolings:
                out[:] = rows[places].numpy()
                continue
            pooling = batch.poolings[place]
            offsets = (
                np.arange(pooling.count) * pooling.hotness if pooling.offsets is None else pooling.offsets[: pooling.count]
            )
            padding = (keys == pooling.padding_key).nonzero().flatten().tolist() if pooling.padding_key is not None else []
            if not len(rows):
                rows = torch.zeros(1, out.shape[1])
            out[:] = nn.functional.embedding_bag(
                places,
                rows,
                torch.from_numpy(np.asarray(offsets)),
                mode=pooling.combiner.name.lower(),
                max_norm=pooling.max_norm or None,
                padding_idx=padding[0] if padding else None,
                per_sample_weights=None if pooling.weights is None else torch.from_numpy(np.asarray(pooling.weights)),
            ).numpy()

    return look_up
