"""Packages a trained module as one version of a model: its embeddings as tables, the rest as the network."""

import copy
import inspect
import io
import logging
import os
import posixpath
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import nn

from hps.configuration.load import DenseConfig, load_configuration
from hps.errors import InvalidInputError, ModelFileError
from hps.models.manifest import VERSION
from hps.models.sources import ModelSources
from hps.scoring.deployed import OpenedNetwork
from hps.scoring.features import arrays_of, read_request
from hps.scoring.scorer import Scorer
from hps.tensors.bags import Bags
from hps.tensors.segments import Segment
from hps.torch.embeddings import Embedding, EmbeddingForm, embeddings_of, refuse_unequal, tables_of, unwrapped
from hps.torch.ranks import gather
from hps.torch.saving import save
from hps.torch.tables import Table, is_sharded

_log = logging.getLogger(__name__)
_FILE = "dense.pt2"
_DTYPES = {
    torch.float32: "float32",
    torch.float16: "float16",
    torch.int64: "int64",
    torch.int32: "int32",
    torch.bool: "bool",
}
_FIRST_MARK = 1 << 20  # keys of small models are below


@dataclass(frozen=True)
class PackagedModel:
    """The result of `package`. *Immutable.*

    Attributes:
        place: path or URI of the model's directory.
        version: that was written.
        entry: the model's entry, as in its `model.json`.
        dense: what the version's `version.json` says of the network.
        difference: largest difference between the module's outputs on the examples and those of the package.
        command: serves the repository.
    """

    place: str
    version: str
    entry: Mapping[str, Any] = field(repr=False)
    dense: DenseConfig = field(repr=False)
    difference: float
    command: str


def package(
    module: nn.Module,
    directory: str | os.PathLike[str],
    example_inputs: Sequence[Any] | Mapping[str, Any],
    *,
    outputs: Sequence[str] | None = None,
    per_request: Sequence[str] = (),
    hotness: int | Mapping[str, int] | None = None,
    settings: Mapping[str, Any] | None = None,
    dynamic_batching: bool = True,
    max_queue_delay_us: int = 0,
    tolerance: float = 1e-5,
    note: str = "",
    sources: ModelSources | None = None,
) -> PackagedModel:
    """Write a trained module as one version of a model, which `hps serve` answers with scores.

    The embeddings of the module (`nn.Embedding`, `nn.EmbeddingBag`, torchrec's `EmbeddingBagCollection`; quantised or sharded
    ones as for `save`) become tables; all the rest becomes a program of `torch.export`, whose inputs are their vectors and the
    other inputs of the module. Keys must reach the embeddings as the module is given them: whole inputs, or columns of one. A
    column is an input of its own, named like the table. If weights are sharded, every rank makes the call, and rank 0's
    examples count.

    Args:
        module: in evaluation mode its outputs must not depend on the other samples. On the CPU.
        directory: path or URI of the version, `<repository>/<model>/<version>`; without the version, the next one is written.
        example_inputs: positional arguments of the module, or arguments by name: tensors with two samples or more, samples
            first, and KeyedJaggedTensors. They are kept in the program's file.
        outputs: names of the outputs. Default: `score`, or the keys of a dict that the module returns, or `output0` and so on.
        per_request: names of inputs that a request may give once for all its samples.
        hotness: most keys of a sample, as for `save`. Default: those of the examples, and 100 for bags of any size.
        settings: as for `save`.
        dynamic_batching, max_queue_delay_us: of the configuration's `dense`.
        tolerance: largest difference, absolute or relative, between the module's outputs and the package's on the examples.
        note, sources: as for `hps.write_version`.

    Raises:
        InvalidInputError: the module has no embedding, keys that it computes, or shards outside of its embeddings; it cannot be
            exported; or the package answers otherwise than the module. Nothing was written.
        ModelFileError, ConfigError: as for `save`.
    """
    sources = sources or ModelSources()
    place, version = _version_of(os.fspath(directory))
    module = unwrapped(module)
    embeddings = embeddings_of(module)
    for one in embeddings:
        refuse_unequal(one)
    _refuse_shards(module, embeddings)
    was_training = module.training
    module.eval()
    try:
        with gather(f"packaging {place}", tables_of(embeddings)) as job, torch.no_grad():
            inputs = _Inputs(module, example_inputs)
            expected = _outputs(module(*inputs.positional, **inputs.named), outputs)
            if job.leads():
                said = {"dynamic_batching": dynamic_batching, "max_queue_delay_us": max_queue_delay_us}
                tried = _try(
                    place,
                    module,
                    embeddings,
                    job.tables,
                    inputs,
                    expected,
                    per_request,
                    hotness,
                    settings or {},
                    said,
                    tolerance,
                )
                job.finish(replace(tried, content=b""))
            else:
                tried = job.follow()
    finally:
        module.train(was_training)
    saved = save(
        module,
        place,
        version=version,
        hotness=tried.hotness,
        settings=settings,
        note=note,
        network=(tried.dense, tried.content),
        sources=sources,
    )
    command = f"hps serve {posixpath.dirname(saved.place.rstrip('/')) or '.'}"
    _log.info(
        "packaged %s, version %s: its scores differ by %.2g at most; serve it: %s",
        saved.place,
        saved.version,
        tried.difference,
        command,
    )
    return PackagedModel(saved.place, saved.version, saved.entry, tried.dense, tried.difference, command)


@dataclass(frozen=True)
class _Tried:
    """A network that answered the examples as the module does. *Immutable.*"""

    dense: DenseConfig
    content: bytes
    hotness: Mapping[str, int]
    difference: float


def _try(
    place: str,
    module: nn.Module,
    embeddings: Sequence[Embedding],
    tables: Mapping[str, Table],
    inputs: "_Inputs",
    expected: Mapping[str, torch.Tensor],
    per_request: Sequence[str],
    hotness: int | Mapping[str, int] | None,
    settings: Mapping[str, Any],
    said: Mapping[str, Any],
    tolerance: float,
) -> _Tried:
    """Export a module without its embeddings, and compare what a server would answer with `expected`."""
    calls = _calls_of(module, embeddings, inputs)
    content, dense_inputs = _exported(module, embeddings, inputs, calls, list(expected))
    lookups = {call.name: call.entry() for call in calls}
    features = {
        name: {"dtype": _DTYPES[inputs.given[name].dtype], "shape": [-1, *inputs.given[name].shape[1:]]}
        for name in dense_inputs
    }
    if unknown := sorted(set(per_request) - {*lookups, *features}):
        known = ", ".join([*lookups, *features])
        raise InvalidInputError(f"packaging {place}: got per_request {unknown[0]!r}, expected some of {known}")
    described: dict[str, Any] = {
        "format": "pt2",
        "file": _FILE,
        "inputs": {
            name: one | ({"per_request": True} if name in per_request else {}) for name, one in {**lookups, **features}.items()
        },
        "outputs": list(expected),
        **said,
    }
    most = _hotness(calls, hotness)
    config = load_configuration({"models": [_tried_entry(place, tables, most, described, settings)]}).models[0]
    if config.dense is None:
        raise ModelFileError(f"packaging {place}: the settings remove the network")
    examples = {call.name: call.example(inputs) for call in calls} | {name: inputs.given[name].numpy() for name in features}
    difference = _compare(place, config, config.dense, content, list(tables.values()), examples, expected, tolerance)
    return _Tried(config.dense, content, most, difference)


def _refuse_shards(module: nn.Module, embeddings: Sequence[Embedding]) -> None:
    own = {id(part) for one in embeddings for part in one.module.modules()}
    for path, part in module.named_modules():
        for name, one in () if id(part) in own else part.named_parameters(path, recurse=False):
            if is_sharded(one):
                raise InvalidInputError(
                    f"packaging {name}: got a {type(one).__name__} outside of the embeddings, expected a tensor; gather it"
                )


def _version_of(directory: str) -> tuple[str, str | None]:
    parent, last = posixpath.split(directory.rstrip("/"))
    return (parent or ".", last) if VERSION.fullmatch(last) else (directory, None)


class _Inputs:
    """The example inputs of a module, by the names of its parameters."""

    def __init__(self, module: nn.Module, example_inputs: Sequence[Any] | Mapping[str, Any]) -> None:
        positional = [] if isinstance(example_inputs, Mapping) else list(example_inputs)
        named = dict(example_inputs) if isinstance(example_inputs, Mapping) else {}
        try:
            bound = inspect.signature(module.forward).bind(*positional, **named)
        except TypeError as error:
            raise InvalidInputError(
                f"packaging a {type(module).__name__}: its forward does not take the examples: {error}"
            ) from error
        self.module = type(module).__name__
        self.positional, self.named = bound.args, bound.kwargs
        self.given: dict[str, Any] = dict(bound.arguments)
        self.tensors = {name: one for name, one in self.given.items() if isinstance(one, torch.Tensor)}
        for name, one in self.tensors.items():
            if one.device.type != "cpu":
                raise InvalidInputError(f"packaging a {self.module}: got input {name!r} on {one.device}, expected the CPU")
            if not one.ndim:
                raise InvalidInputError(f"packaging a {self.module}: got a number for input {name!r}, expected samples first")
            if one.dtype not in _DTYPES:
                raise InvalidInputError(
                    f"packaging a {self.module}: got input {name!r} of {one.dtype}, expected {', '.join(_DTYPES.values())}"
                )
        self.keys = [name for name, one in self.tensors.items() if one.dtype in (torch.int64, torch.int32)]

    def arguments(self, other: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments of a call with other values of some inputs."""
        names = [*self.given]
        values = {**self.given, **other}
        count = len(self.positional)
        return tuple(values[name] for name in names[:count]), {name: values[name] for name in names[count:]}


@dataclass(eq=False)
class _Call:
    """A call of an embedding: what becomes an input of the network.

    Attributes:
        name: of the input.
        table: whose vectors it has.
        shape: of the keys, without samples.
        source: the module's input with the keys, or the KeyedJaggedTensor.
        columns: of it; None: all of it.
        offsets: the module's input with the offsets.
        pooling, max_norm, padding_key: how vectors are pooled.
        feature: of a KeyedJaggedTensor.
    """

    name: str
    table: str
    source: str
    shape: tuple[int, ...] = ()
    columns: list[int] | None = None
    offsets: str = ""
    include_last: bool = True
    pooling: str = "none"
    max_norm: float | None = None
    padding_key: int | None = None
    feature: str = ""

    def entry(self) -> dict[str, Any]:
        """Return its entry of `dense.inputs`."""
        entry: dict[str, Any] = {"table": self.table}
        pooling, hotness = self.pooling, None
        if pooling == "none" and self.shape:
            hotness = self.shape[0]
        if pooling == "none" and self.max_norm is not None:
            pooling, hotness = "sum", 1
        if pooling != "none":
            entry["pooling"] = pooling
        if hotness is not None:
            entry["hotness"] = hotness
        if self.max_norm is not None:
            entry["max_norm"] = self.max_norm
        if self.padding_key is not None:
            entry["padding_key"] = self.padding_key
        return entry

    def example(self, inputs: _Inputs) -> Any:
        """Return the keys of the examples, as `HPS.score` takes them."""
        if self.feature:
            keys = inputs.given[self.source][self.feature]
            return Bags(keys.values().long().numpy(), keys.offsets().long().numpy())
        given = inputs.given[self.source].long()
        if self.offsets:
            offsets = inputs.given[self.offsets].long().numpy()
            return Bags(given.numpy(), offsets, include_last_offset=self.include_last)
        chosen = given if self.columns is None else given[:, self.columns]
        return np.ascontiguousarray(chosen.reshape(len(given), *self.shape).numpy())


class _Recorder(nn.Module):
    """Stands for an embedding: notes what it is asked, and answers zeros of the right shape."""

    def __init__(self, one: Embedding, asked: list[tuple[Embedding, dict[str, Any]]]) -> None:
        super().__init__()
        self._one = one
        self._asked = asked

    def forward(self, *args: Any, **named: Any) -> Any:
        bound = _arguments(self._one, args, named)
        self._asked.append((self._one, bound))
        return _zeros(self._one, bound)


class _Injected(nn.Module):
    """Stands for an embedding: answers with vectors that are inputs of the network."""

    def __init__(self, one: Embedding, take: Callable[[], torch.Tensor]) -> None:
        super().__init__()
        self._one = one
        self._take = take

    def forward(self, *args: Any, **named: Any) -> Any:
        one = self._one
        if one.form is EmbeddingForm.BAG_COLLECTION:
            return _keyed(one, torch.cat([self._take() for names in one.outputs for _ in names], 1).to(one.dtype))
        return self._take().to(one.dtype)


def _arguments(one: Embedding, args: tuple[Any, ...], named: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call of an embedding, by the names of `nn.EmbeddingBag`'s, or as `features`."""
    if one.form in (EmbeddingForm.COLLECTION, EmbeddingForm.BAG_COLLECTION):
        return {"features": [*args, *named.values()][0]}
    bound = dict(inspect.signature(one.module.forward).bind(*args, **named).arguments)
    return {"input" if name == "indices" else name: given for name, given in bound.items()}


def _keyed(one: Embedding, values: torch.Tensor) -> Any:
    from torchrec.sparse.jagged_tensor import KeyedTensor

    dims = [lookup.emb_vec_size for lookup in one.lookups for _ in lookup.features]
    return KeyedTensor([name for names in one.outputs for name in names], dims, values)


def _zeros(one: Embedding, bound: Mapping[str, Any]) -> Any:
    if one.form is EmbeddingForm.COLLECTION:
        return {}
    if one.form is EmbeddingForm.BAG_COLLECTION:
        width = sum(lookup.emb_vec_size * len(lookup.features) for lookup in one.lookups)
        return _keyed(one, torch.zeros(bound["features"].stride(), width, dtype=one.dtype))
    keys, dim = bound["input"], one.lookups[0].emb_vec_size
    if one.form is EmbeddingForm.BAGS:
        offsets = bound.get("offsets")
        rows = len(keys) if offsets is None else len(offsets) - bool(one.include_last_offset)
        return torch.zeros(rows, dim, dtype=one.dtype)
    return torch.zeros(*keys.shape, dim, dtype=one.dtype)


def _calls_of(module: nn.Module, embeddings: Sequence[Embedding], inputs: _Inputs) -> list[_Call]:
    """Find where the keys of each call of an embedding come from: each integer of the inputs gets a number of its own."""
    asked: list[tuple[Embedding, dict[str, Any]]] = []
    stand_ins = {id(one.module): _Recorder(one, asked) for one in embeddings}
    marked: dict[str, torch.Tensor] = {}
    at = _FIRST_MARK
    starts: dict[str, int] = {}
    for name in inputs.keys:
        given = inputs.tensors[name]
        starts[name] = at
        marked[name] = torch.arange(at, at + given.numel(), dtype=given.dtype).reshape(given.shape)
        at += given.numel()
    copied = _with(module, stand_ins)
    positional, named = inputs.arguments(marked)
    try:
        copied(*positional, **named)
    except Exception as error:
        raise InvalidInputError(
            f"packaging a {inputs.module}: it cannot run with other keys than those of the examples ({type(error).__name__}: "
            f"{str(error)[:200]}); expected that only its embeddings read keys"
        ) from error
    calls: list[_Call] = []
    taken: set[str] = set()

    def named_once(wanted: str) -> str:
        name, number = wanted, 2
        while name in taken:
            name, number = f"{wanted}_{number}", number + 1
        taken.add(name)
        return name

    for one, bound in asked:
        for call in _described(one, bound, inputs, starts):
            call.name = named_once(call.name)
            calls.append(call)
    return calls


def _described(one: Embedding, bound: dict[str, Any], inputs: _Inputs, starts: Mapping[str, int]) -> Iterator[_Call]:
    doing = f"packaging {one.path or inputs.module}"
    if one.form is EmbeddingForm.COLLECTION:
        raise InvalidInputError(
            f"{doing}: got an EmbeddingCollection, whose rows are jagged; expected pooled or padded vectors"
        )
    if one.form is EmbeddingForm.BAG_COLLECTION:
        features = bound["features"]
        source = next((name for name, given in inputs.given.items() if given is features), "")
        if not source or one.is_weighted:
            what = "weights" if source else "a KeyedJaggedTensor that the module makes"
            raise InvalidInputError(f"{doing}: got {what}, expected an input of the module without weights")
        for lookup in one.lookups:
            for feature in lookup.features:
                yield _Call(
                    feature,
                    lookup.name,
                    source,
                    pooling=lookup.pooling,
                    max_norm=lookup.max_norm,
                    padding_key=lookup.padding_idx,
                    feature=feature,
                )
        return
    for name in ("per_sample_weights", "compressed_indices_mapping"):
        if bound.get(name) is not None:
            raise InvalidInputError(f"{doing}: got {name}, expected none")
    (lookup,) = one.lookups
    source, positions = _origin(doing, bound["input"], inputs, starts)
    shape = tuple(bound["input"].shape)
    given = inputs.tensors[source]
    call = _Call(source, lookup.name, source, max_norm=lookup.max_norm)
    if one.form is EmbeddingForm.BAGS:
        call.pooling, call.padding_key, call.include_last = lookup.pooling, lookup.padding_idx, one.include_last_offset
    if (offsets := bound.get("offsets")) is not None:
        call.offsets, found = _origin(doing, offsets, inputs, starts)
        whole = np.arange(given.numel()), np.arange(inputs.tensors[call.offsets].numel())
        if not (np.array_equal(positions, whole[0]) and np.array_equal(found, whole[1])):
            raise InvalidInputError(f"{doing}: got a part of an input as keys or offsets, expected all of it")
        yield call
        return
    rows, width = len(given), given[0].numel() if len(given) else 0
    if len(shape) not in (1, 2) or shape[0] != rows or given.ndim > 2:
        got = f"keys of shape {list(shape)} from input {source!r} of shape {list(given.shape)}"
        raise InvalidInputError(f"{doing}: got {got}, expected [samples] or [samples, keys]")
    columns = positions.reshape(rows, -1) - width * np.arange(rows)[:, None]
    if not (columns == columns[0]).all() or columns.min() < 0 or columns.max() >= max(width, 1):
        raise InvalidInputError(f"{doing}: got keys of other samples from input {source!r}, expected each sample's own")
    chosen = columns[0].tolist()
    call.shape = shape[1:]
    if chosen != list(range(width)):
        call.columns, call.name = chosen, lookup.name
    yield call


def _origin(doing: str, keys: torch.Tensor, inputs: _Inputs, starts: Mapping[str, int]) -> tuple[str, np.ndarray]:
    """Find the input that keys come from, and their positions in it."""
    marks = keys.detach().reshape(-1).to(torch.int64).numpy()
    for name, start in starts.items():
        positions = marks - start
        if marks.size and positions.min() >= 0 and positions.max() < inputs.tensors[name].numel():
            return name, positions
    raise InvalidInputError(
        f"{doing}: got keys that the module computes, expected them as it is given them: an input, or columns of one; compute "
        "them before (a hash, an offset), or give the table the keys as they come"
    )


def _with(module: nn.Module, stand_ins: Mapping[int, nn.Module]) -> nn.Module:
    """Copy a module with other modules in place of its embeddings; parameters are shared."""
    memo: dict[int, Any] = dict(stand_ins)
    memo.update({id(one): one for one in (*module.parameters(), *module.buffers())})
    copied: nn.Module = copy.deepcopy(module, memo)
    return copied


class _Rest(nn.Module):
    """A module whose embeddings' vectors are inputs, in a dict."""

    def __init__(
        self,
        module: nn.Module,
        embeddings: Sequence[Embedding],
        inputs: _Inputs,
        calls: Sequence[_Call],
        outputs: Sequence[str],
    ) -> None:
        super().__init__()
        self._vectors: list[torch.Tensor] = []
        self.module = _with(module, {id(one.module): _Injected(one, self._take) for one in embeddings})
        self._inputs = inputs
        self._names = [call.name for call in calls]
        self._outputs = list(outputs)
        self._turn = [0]

    def _take(self) -> torch.Tensor:
        self._turn[0] += 1
        return self._vectors[self._turn[0] - 1]

    def forward(self, given: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        self._vectors[:] = [given[name] for name in self._names]
        self._turn[0] = 0
        samples = next(iter(given.values())).shape[0]
        others = {name: given[name] for name in self._inputs.tensors if name in given and name not in self._names}
        for name in self._inputs.keys:
            if name not in others:
                tensor = self._inputs.tensors[name]
                others[name] = torch.zeros((samples, *tensor.shape[1:]), dtype=tensor.dtype)
        positional, named = self._inputs.arguments(others)
        try:
            outputs = _outputs(self.module(*positional, **named), self._outputs)
        finally:
            self._vectors.clear()
        return outputs


def _exported(
    module: nn.Module, embeddings: Sequence[Embedding], inputs: _Inputs, calls: Sequence[_Call], outputs: Sequence[str]
) -> tuple[bytes, list[str]]:
    """Export the rest of a module. Returns the program's file, and the module's inputs that it reads."""
    dims = {name: table.shape[1] for name, table in tables_of(embeddings).items()}
    others = [
        name for name in inputs.tensors if name not in {source for call in calls for source in (call.source, call.offsets)}
    ]
    samples = max([2, *(len(inputs.tensors[name]) for name in others)])
    given = {
        call.name: torch.zeros(samples, *(() if call.pooling != "none" else call.shape), dims[call.table]) for call in calls
    }
    for name in others:
        tensor = inputs.tensors[name]
        if name in given:
            raise InvalidInputError(f"packaging a {inputs.module}: got two inputs {name!r}, a table's and its own; rename one")
        given[name] = tensor if len(tensor) > 1 else tensor.repeat(2, *[1] * (tensor.ndim - 1))
    batch = torch.export.Dim("samples", min=1)
    try:
        program = torch.export.export(
            _Rest(module, embeddings, inputs, calls, outputs),
            (given,),
            dynamic_shapes=({name: {0: batch} for name in given},),
            strict=False,
        )
    except Exception as error:
        lines = str(error).strip().splitlines()
        raise InvalidInputError(
            f"packaging a {inputs.module}: torch.export cannot export it without its embeddings: {type(error).__name__}: "
            f"{lines[0][:400] if lines else ''}"
        ) from error
    file = io.BytesIO()
    torch.export.save(program, file)
    return file.getvalue(), others


def _outputs(found: Any, names: Sequence[str] | None) -> dict[str, torch.Tensor]:
    if not isinstance(found, tuple | list | Mapping):
        found = (found,)
    if isinstance(found, Mapping):
        named = {str(name): one for name, one in found.items()}
        if names is not None and set(names) - set(named):
            raise InvalidInputError(f"packaging: got outputs {list(names)}, expected some of {', '.join(named)}")
        named = {name: named[name] for name in names or named}
    else:
        if names is None:
            names = ["score"] if len(found) == 1 else [f"output{place}" for place in range(len(found))]
        if len(names) != len(found):
            raise InvalidInputError(f"packaging: got {len(names)} names of outputs, expected {len(found)}")
        named = dict(zip(names, found, strict=True))
    for name, one in named.items():
        if not isinstance(one, torch.Tensor) or not one.ndim:
            raise InvalidInputError(
                f"packaging: got output {name!r} of type {type(one).__name__}, expected a tensor, samples first"
            )
    return named


def _hotness(calls: Sequence[_Call], hotness: int | Mapping[str, int] | None) -> dict[str, int]:
    """Return the most keys of a sample, by table."""
    most: dict[str, int] = {}
    for call in calls:
        any_number = call.pooling != "none" and not call.shape
        own = 100 if any_number else call.shape[0] if call.shape else 1
        most[call.table] = max(own, most.get(call.table, 0))
    if isinstance(hotness, int):
        return dict.fromkeys(most, hotness)
    return most | dict(hotness or {})


def _tried_entry(
    place: str,
    tables: Mapping[str, Table],
    most: Mapping[str, int],
    dense: Mapping[str, Any],
    settings: Mapping[str, Any],
) -> dict[str, Any]:
    """Make an entry with which the network is tried, before anything is written."""
    name = re.sub(r"[^a-zA-Z0-9_-]", "_", posixpath.basename(place.rstrip("/"))) or "model"
    return {
        "model": name,
        "sparse_files": list(tables),
        "embedding_table_names": list(tables),
        "embedding_vecsize_per_table": [table.shape[1] for table in tables.values()],
        "maxnum_catfeature_query_per_table_per_sample": [most.get(name, 1) for name in tables],
        "default_value_for_each_table": [0.0] * len(tables),
        "deployed_device_list": [0],
        "max_batch_size": 4096,
        **{key: value for key, value in settings.items() if key == "max_batch_size"},
        "dense": dict(dense),
    }


def _compare(
    place: str,
    config: Any,
    dense: DenseConfig,
    content: bytes,
    tables: Sequence[Table],
    examples: Mapping[str, Any],
    expected: Mapping[str, torch.Tensor],
    tolerance: float,
) -> float:
    """Score the examples as a server does, with vectors from the weights, and return the largest difference."""
    opened = OpenedNetwork(config, dense, {dense.file: content}, "", ())

    def look_up(segments: Sequence[Segment]) -> None:
        for one in segments:
            keys, places = torch.unique(torch.from_numpy(np.ascontiguousarray(one.keys)), return_inverse=True)
            rows = tables[one.table].read(keys)
            if (pooling := one.pooling) is None:
                one.out[:] = rows[places].numpy()
                continue
            offsets = (
                np.arange(pooling.count) * pooling.hotness if pooling.offsets is None else pooling.offsets[: pooling.count]
            )
            padding = (keys == pooling.padding_key).nonzero().flatten().tolist() if pooling.padding_key is not None else []
            one.out[:] = nn.functional.embedding_bag(
                places,
                rows,
                torch.from_numpy(np.asarray(offsets)),
                mode=pooling.combiner.name.lower(),
                max_norm=pooling.max_norm or None,
                padding_idx=padding[0] if padding else None,
            ).numpy()

    try:
        scorer = Scorer(config.model, config.tables, opened.features, opened.networks[None], look_up, refuse_nan=False)
        request = read_request(opened.features, arrays_of(opened.features, examples), config.max_batch_size, config.model)
        (answer,), _ = scorer.score([request])
    finally:
        opened.close()
    if not isinstance(answer, dict):
        raise answer
    largest = 0.0
    for name, module_says in expected.items():
        ours, theirs = torch.from_numpy(np.array(answer[name])).double(), module_says.detach().double()
        if ours.shape != theirs.shape:
            raise InvalidInputError(
                f"packaging {place}: output {name!r} has shape {list(ours.shape)} when it is served, {list(theirs.shape)} from "
                "the module; expected samples as the first dimension of inputs and outputs"
            )
        difference = (ours - theirs).abs()
        worst = float(torch.nan_to_num(difference, nan=float("inf")).max()) if difference.numel() else 0.0
        if not torch.allclose(ours, theirs, rtol=tolerance, atol=tolerance, equal_nan=True):
            raise InvalidInputError(
                f"packaging {place}: output {name!r} differs by up to {worst:.3g} from the module's on the examples; expected "
                f"at most {tolerance:g} (tolerance): does the module read its keys, or other samples, outside of its "
                "embeddings?"
            )
        largest = max(largest, worst)
    return largest
