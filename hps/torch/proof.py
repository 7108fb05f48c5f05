"""Compares a package, run as by a server, with the module that it was made of.

The graph keeps masks, lengths and rules. Runs find what no graph shows: Python's random numbers, clocks and counters,
`torch.compiler.is_compiling()`, swallowed exceptions, and rows that depend on each other.
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
from hps.torch.sizes import INTEGERS
from hps.torch.tables import Table
from hps.torch.traced_copy import TracedCopy, copy_module

Tensors = Mapping[str, torch.Tensor]
_TOLERANCES: Final = {torch.float16: 2e-3, torch.bfloat16: 2e-2}
_SMALL_BYTES: Final = 16 << 20


class Proof:
    """Runs a module, and compares its outputs with those of its package.

    Attributes:
        rows_are_independent: whether the output for a row is the same in other orders, alone, and in a larger batch.
        why_dependent: the reason if they are not, for people.
        difference: largest difference between package and module so far.
        notes: for the user.
        guards: conditions on sizes that the graph does not have.
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
        self._module = _runnable_copy(module, scaled) if self._alone else module
        self._device = _device_of(module)
        self._tolerance = tolerance
        self.notes: list[str] = []
        self.guards: list[str] = []
        self.difference = 0.0
        self.rows_are_independent, self.why_dependent = True, ""
        self._examples = self._run(inputs.tensors)
        if self._alone:
            self._require_repeatable()
            self._find_dependence()
        if found.why_unbatched:
            self.rows_are_independent, self.why_dependent = False, found.why_unbatched

    def _run(self, tensors: Tensors) -> dict[str, torch.Tensor]:
        """Call the module in evaluation mode, on copies of the inputs."""
        training = self._module.training
        self._module.eval()
        try:
            with torch.no_grad():
                inputs = {name: tensor.to(self._device, copy=True) for name, tensor in tensors.items()}
                outputs = outputs_of(self._inputs.call(self._module, inputs), self._outputs, squeezed=True)
        finally:
            self._module.train(training)
        if any(not tensor.ndim for tensor in outputs.values()):
            self.guards.append("samples >= 2")  # a squeeze() drops the only sample: it is answered in a batch of two
        return {name: tensor.detach().cpu().reshape(tensor.shape or (1,)) for name, tensor in outputs.items()}

    def _require_repeatable(self) -> None:
        repeated = self._run(self._inputs.tensors)
        for name, output in self._examples.items():
            if self._difference(output, repeated[name], name)[1]:
                raise InvalidInputError(
                    f"{self._doing}: it answers the same inputs differently from call to call (output {name!r}): random "
                    "numbers, a clock or a counter of Python? Give them as inputs"
                )

    def _difference(self, got: torch.Tensor, expected: torch.Tensor, name: str) -> tuple[float, bool]:
        """Return the largest difference, and whether it is too large."""
        if got.shape != expected.shape:
            return float("inf"), True
        half = max((_TOLERANCES.get(self._cut.outputs[name].meta["val"].dtype, 0.0), *self._weight_tolerances()))
        tolerance = self._tolerance or max(half, 1e-5)
        got, expected = got.double(), expected.double()
        comparable = ~(got.isnan() | expected.isnan())  # a server refuses what is not a number
        got, expected = got[comparable], expected[comparable]
        difference = torch.nan_to_num((got - expected).abs())
        largest = float(difference.max()) if difference.numel() else 0.0
        return largest, not torch.allclose(got, expected, rtol=tolerance, atol=tolerance)

    def _weight_tolerances(self) -> list[float]:
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
        for change, order in orders.items():
            tensors = self._select(order)
            if tensors is None:
                self.rows_are_independent = False
                self.why_dependent = "its inputs cannot be split by samples"
                return
            if self._is_dependent(change, tensors, {name: output[order] for name, output in self._examples.items()}):
                return
        for factor in (1e3, -1e3):
            tensors = dict(self._inputs.tensors)
            for name, tensor in tensors.items():
                if tensor.is_floating_point() and self._cut.shapes[name][0] == "samples" and len(tensor) == count > 1:
                    tensors[name] = torch.cat([tensor[:-1], tensor[-1:] * factor])
            first = {name: output[:-1] for name, output in self._examples.items()}
            if self._is_dependent("in a batch with large numbers", tensors, first):
                return

    def _is_dependent(self, change: str, tensors: Tensors, expected: Tensors) -> bool:
        """Return whether the outputs for the first samples differ from the expected ones."""
        try:
            outputs = self._run(tensors)
        except Exception:  # noqa: BLE001 - the module does not take them
            return False
        for name, output in expected.items():
            if self._difference(outputs[name][: len(output)], output, name)[1]:
                self.rows_are_independent = False
                self.why_dependent = f"the module's output for a sample differs {change} (output {name!r})"
                return True
        return False

    def compare(self, config: ModelConfig, dense: DenseConfig, files: Mapping[str, bytes], tables: Mapping[str, Table]) -> None:
        """Score the examples and their variants as a server does, and compare the scores with the module's outputs.

        `rows_are_independent` also requires that merged requests get the same scores.

        Raises:
            InvalidInputError: the scores differ.
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
            requests = [request for request in self._requests(opened, config, dense) if self._compare_answer(scorer, *request)]
            if dense.dynamic_batching:
                self._compare_merged(scorer, requests)
        finally:
            opened.close()

    def _requests(
        self, opened: OpenedNetwork, config: ModelConfig, dense: DenseConfig
    ) -> Iterator[tuple[str, ScoreInputs, Tensors]]:
        """Yield requests of the examples and their variants with the module's outputs, if module and server take them."""
        for variant, tensors in self._variants():
            is_example = tensors is self._inputs.tensors
            try:
                expected = self._examples if is_example else self._run(tensors)
            except Exception:  # noqa: BLE001 - no inputs that the module takes
                continue
            arrays = {name: input_.numpy() for name, input_ in tensors.items() if is_request_input(dense, name)}
            try:
                given = arrays_of(opened.features, arrays)
                yield variant, read_request(opened.signature, given, config.max_batch_size, config.model), expected
            except (InvalidInputError, TooManyKeysError):
                if is_example:
                    raise

    def _compare_answer(self, scorer: Scorer, variant: str, request: ScoreInputs, expected: Tensors) -> bool:
        """Compare the scores of a request with the module's outputs. Return False if the network fails."""
        try:
            (answer,), _ = scorer.score([request])
        except NetworkError as error:
            if expected is self._examples:
                raise InvalidInputError(f"{self._doing}: the package does not run: {error}") from error
            self.notes.append(f"the package fails where the module answers ({variant}): {error}")
            return False
        self._require_equal(variant, expected, answer)
        return True

    def _compare_merged(self, scorer: Scorer, requests: Sequence[tuple[str, ScoreInputs, Tensors]]) -> None:
        """Score together the requests that a server would merge."""
        together: dict[Any, list[tuple[str, ScoreInputs, Tensors]]] = {}
        for request in requests:
            together.setdefault(request[1].form, []).append(request)
        for group in together.values():
            try:
                answers, _ = scorer.score([request for _, request, _ in group])
            except NetworkError:  # not for this number of samples: a server then scores the requests one by one
                continue
            for (variant, _, expected), answer in zip(group, answers, strict=True):
                if self._differs(expected, answer):
                    self.rows_are_independent = False
                    self.why_dependent = f"the scores of a request ({variant}) differ when it is merged with others"
                    return

    def _differs(self, expected: Tensors, answer: Any) -> bool:
        return any(
            self._difference(torch.from_numpy(np.array(answer[name])), output, name)[1] for name, output in expected.items()
        )

    def _require_equal(self, variant: str, expected: Tensors, answer: Any) -> None:
        if isinstance(answer, HPSError):
            raise answer
        for name, expected_output in expected.items():
            output = torch.from_numpy(np.array(answer[name]))
            difference, differs = self._difference(output, expected_output, name)
            if output.shape != expected_output.shape:
                raise InvalidInputError(
                    f"{self._doing}: output {name!r} has shape {list(output.shape)} when it is served and "
                    f"{list(expected_output.shape)} from the module ({variant}); expected samples as the first dimension"
                )
            if differs:
                raise InvalidInputError(
                    f"{self._doing}: output {name!r} differs by up to {difference:.3g} from the module's ({variant}): does "
                    "forward check whether it is traced, read a clock or a random number, or catch exceptions?"
                )
            self.difference = max(self.difference, difference)

    def _variants(self) -> Iterator[tuple[str, Tensors]]:
        """Yield the examples and variants of them: other numbers of samples, other keys, other lengths."""
        tensors, count = self._inputs.tensors, self._cut.samples
        yield "the examples", tensors
        if not self._alone:
            return
        orders = {"one sample": [0], "two samples": [count - 1, 0], "more samples": [*range(count), *range(count)]}
        for variant, order in orders.items():
            if (selected := self._select(torch.tensor(order))) is not None:
                yield variant, selected
        keys = {
            name
            for name, tensor in tensors.items()
            if tensor.dtype in INTEGERS and tensor.numel() and name not in self._cut.ragged.values()
        }
        for variant, change in (
            ("other keys", lambda tensor: tensor.flatten().roll(1).reshape(tensor.shape)),
            ("keys in reverse", lambda tensor: tensor.flatten().flip(0).reshape(tensor.shape)),
            ("the smallest key everywhere", lambda tensor: torch.full_like(tensor, int(tensor.min()))),
            ("zeros behind and a row of zeros", _with_zeros),
            ("the largest key everywhere", lambda tensor: torch.full_like(tensor, int(tensor.max()))),
        ):
            yield variant, {name: change(tensor) if name in keys else tensor for name, tensor in tensors.items()}
        for size in self._cut.sizes:
            dims_of_size = {
                name: [dim for dim, text in enumerate(shape) if text == size] for name, shape in self._cut.shapes.items()
            }
            if any(0 in dims for dims in dims_of_size.values()) or any(
                size in str(text) and text != size for shape in self._cut.shapes.values() for text in shape
            ):
                continue
            before = self._cut.sizes[size]
            for length in (1, 2, before + 3):
                if before and length != before:
                    yield (
                        f"{size} = {length}",
                        {name: self._resized(tensor, dims_of_size[name], length) for name, tensor in tensors.items()},
                    )

    @staticmethod
    def _resized(tensor: torch.Tensor, dims: Sequence[int], length: int) -> torch.Tensor:
        for dim in dims:
            tensor = tensor.index_select(dim, torch.arange(length) % tensor.shape[dim])
        return tensor

    def _select(self, order: torch.Tensor) -> dict[str, torch.Tensor] | None:
        """Select samples of the examples; None if they cannot be split."""
        selected: dict[str, torch.Tensor] = {}
        ragged = self._cut.ragged
        for name, tensor in self._inputs.tensors.items():
            if name in ragged and not ragged[name]:
                return None
            if name in ragged:
                selected |= self._select_ragged(name, tensor, ragged[name], order)
            elif name not in ragged.values():
                if self._cut.shapes[name][0] != "samples":
                    return None
                selected[name] = tensor[order]
        return selected

    def _select_ragged(
        self, name: str, values: torch.Tensor, offsets_name: str, order: torch.Tensor
    ) -> dict[str, torch.Tensor]:
        offsets = self._inputs.tensors[offsets_name]
        ends = (
            offsets
            if self._cut.shapes[offsets_name][0] != "samples"
            else torch.cat([offsets, torch.tensor([len(values)], dtype=offsets.dtype)])
        )
        parts = [values[int(ends[row]) : int(ends[row + 1])] for row in order.tolist()]
        new = torch.tensor([0, *np.cumsum([len(part) for part in parts])], dtype=offsets.dtype)
        return {name: torch.cat(parts), offsets_name: new if ends is offsets else new[:-1]}


def _with_zeros(tensor: torch.Tensor) -> torch.Tensor:
    """Set the second half of each row, and all of the first row, to zero, the usual padding."""
    tensor = tensor.clone()
    if tensor.ndim > 1:
        tensor[:, tensor.shape[1] // 2 :] = 0
    tensor[:1] = 0
    return tensor


def is_request_input(dense: DenseConfig, name: str) -> bool:
    """Return whether a tensor of a module is part of requests: an input, or its offsets or weights."""
    return name in dense.inputs or name.rpartition(".")[0] in dense.inputs


def run_once(module: nn.Module, inputs: ModuleInputs) -> None:
    """Run a copy of a module on the examples before tracing, so that global caches of the module hold no traced tensors.

    Raises:
        InvalidInputError: it does not run.
    """
    scaled = {
        f"{path}.{name}".lstrip(".")
        for path, part in module.named_modules()
        if getattr(part, "max_norm", None) is not None
        for name, _ in part.named_parameters()
    }
    device = _device_of(module)
    if device.type == "meta":
        return
    copied = _runnable_copy(module, scaled).eval()
    try:
        with torch.no_grad():
            inputs.call(copied, {name: parameter.to(device, copy=True) for name, parameter in inputs.tensors.items()})
    except Exception as error:
        raise InvalidInputError(
            f"packaging a {inputs.module}: it does not run on the examples: {type(error).__name__}: {error}"
        ) from error
    for (path, parameter), original in zip(copied.named_parameters(), module.parameters(), strict=True):
        shared = parameter.data_ptr() == original.data_ptr()
        if path not in scaled and not shared and not torch.equal(torch.nan_to_num(parameter), torch.nan_to_num(original)):
            raise InvalidInputError(
                f"packaging a {inputs.module}: forward changes its weight {path!r}; a served module has no memory: change it "
                "once, before it is packaged"
            )


def _device_of(module: nn.Module) -> torch.device:
    return next((weight.device for weight in (*module.parameters(), *module.buffers())), torch.device("cpu"))


def _runnable_copy(module: nn.Module, scaled: Collection[str]) -> nn.Module:
    """Copy a module that may change itself when it runs. Large weights are shared, except those scaled to a norm by a run."""
    memo: dict[int, Any] = {}
    for path, parameter in module.named_parameters():
        if path not in scaled and parameter.numel() * parameter.element_size() > _SMALL_BYTES:
            memo[id(parameter)] = nn.Parameter(parameter.detach(), requires_grad=False)
    memo |= {id(part): part for part in module.modules() if type(part).__module__.startswith(("torch.ao.", "torchrec.quant."))}
    return copy_module(module, memo)


def _lookup_in(tables: Sequence[Table]) -> Any:
    """Return a function that looks up batches in the weights."""

    def look_up(batch: Batch) -> None:
        for position, (table, keys_of_table, out) in enumerate(zip(batch.tables, batch.keys, batch.outs, strict=True)):
            keys, positions = torch.unique(torch.from_numpy(np.ascontiguousarray(keys_of_table)), return_inverse=True)
            rows = tables[table].read(keys)
            if not batch.poolings:
                out[:] = rows[positions].numpy()
                continue
            pooling = batch.poolings[position]
            offsets = (
                np.arange(pooling.count) * pooling.hotness if pooling.offsets is None else pooling.offsets[: pooling.count]
            )
            padding = (keys == pooling.padding_key).nonzero().flatten().tolist() if pooling.padding_key is not None else []
            if not len(rows):
                rows = torch.zeros(1, out.shape[1])
            out[:] = nn.functional.embedding_bag(
                positions,
                rows,
                torch.from_numpy(np.asarray(offsets)),
                mode=pooling.combiner.name.lower(),
                max_norm=pooling.max_norm or None,
                padding_idx=padding[0] if padding else None,
                per_sample_weights=None if pooling.weights is None else torch.from_numpy(np.asarray(pooling.weights)),
            ).numpy()

    return look_up
