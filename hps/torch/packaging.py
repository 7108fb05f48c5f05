"""Packages a trained module as one version of a model: tables, keys programs and the network, cut out of the module's own
graph."""

import io
import logging
import os
import posixpath
import re
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from torch import nn

from hps.configuration.load import DenseConfig, load_configuration
from hps.errors import InvalidInputError, ModelFileError
from hps.models.manifest import VERSION
from hps.models.sources import ModelSources
from hps.torch.cutting import Cut, TracedLookup, TracedSource, cut, export, quiet, strongest
from hps.torch.embeddings import unwrapped
from hps.torch.module_inputs import DTYPES, ModuleInputs
from hps.torch.proof import Proof, is_given, run_once
from hps.torch.ranks import agreed, gather
from hps.torch.saving import save
from hps.torch.traced_copy import TracedCopy

_log = logging.getLogger(__name__)
_FILES: Final = {"pt2": "dense.pt2", "aotinductor": "dense.pt2", "onnx": "dense.onnx"}
_ANY_NUMBER: Final = 100
"""Keys of a sample for which there is room where the module takes any number of them."""


@dataclass(frozen=True)
class PackagedModel:
    """The result of `package`. *Immutable.*

    Attributes:
        place: path or URI of the model's directory.
        version: that was written.
        entry: the model's entry, as in its `model.json`.
        dense: what the version's `version.json` says of the network.
        difference: largest difference between the module's outputs and those of the package, on all inputs that were tried.
        command: serves the repository.
        notes: what its owner should know: sizes that are fixed, tables that are copied, why requests are not batched.
    """

    place: str
    version: str
    entry: Mapping[str, Any] = field(repr=False)
    dense: DenseConfig = field(repr=False)
    difference: float
    command: str
    notes: tuple[str, ...] = ()
    inputs: ModuleInputs | None = field(default=None, repr=False, compare=False)

    def request(self, *args: Any, **kwargs: Any) -> dict[str, np.ndarray]:
        """Turn arguments of the module into the inputs of a request, by name: for `HPS.score` and the clients.

        Raises:
            InvalidInputError: they have another structure or other constants than the examples.
        """
        if self.inputs is None:
            raise InvalidInputError("making a request: this rank did not trace the module, expected rank 0")
        tensors = self.inputs.flatten(args, kwargs)
        return {name: one.numpy() for name, one in tensors.items() if is_given(self.dense, name)}


def package(
    module: nn.Module,
    directory: str | os.PathLike[str],
    example_inputs: Sequence[Any] | Mapping[str, Any],
    *,
    outputs: Sequence[str] | None = None,
    per_request: Sequence[str] = (),
    hotness: int | Mapping[str, int] | None = None,
    settings: Mapping[str, Any] | None = None,
    dynamic_batching: bool | None = None,
    max_queue_delay_us: int = 0,
    tolerance: float | None = None,
    format: str = "pt2",  # noqa: A002 - as in the configuration
    allow_stale_copy: bool = False,
    note: str = "",
    progress: Callable[[str], None] | None = None,
    sources: ModelSources | None = None,
) -> PackagedModel:
    """Write a trained module as one version of a model, which `hps serve` answers with scores.

    The module is exported with `torch.export` and cut at its lookups (`cutting.py`): embeddings, embedding bags and
    `weight[keys]` of stored tables. What leads to their keys becomes a keys program, all the rest the network. So whatever
    else the module does with its inputs (masks, rules on keys, lengths, hashes, offsets, positions) is served as it is, and
    what cannot be exported is refused with the line of the module. Requests give the module's own inputs; those within a dict
    or list are named by their path (`batch.item`, `lS_i.0`), and each feature `f` of a KeyedJaggedTensor has keys `f` and
    `f.offsets`. The package is then
    compared with the module on the examples and on inputs made of them: other orders, one sample, more samples, other lengths,
    other keys. The module itself is not touched.

    Args:
        module: on any device; compiled and data-parallel modules are unwrapped. If weights are sharded, every rank makes the
            call, and rank 0's examples count.
        directory: path or URI of the version, `<repository>/<model>/<version>`; without the version, the next one is written.
        example_inputs: arguments of the module, or arguments by name: tensors or NumPy arrays, samples first,
            KeyedJaggedTensors, or any nesting of these. Numbers, strings and None are constants of the package.
        outputs: names of the outputs. Default: `score`, or the keys of a dict that the module returns, or `output0` and so on.
        per_request: names of inputs that a request may give once for all its samples.
        hotness: most keys of a sample, as for `save`. Default: those of the examples, and 100 where it may be any number.
        settings: as for `save`.
        dynamic_batching, max_queue_delay_us: of the configuration's `dense`. Default: batches are made if rows of the inputs
            do not depend on each other, which is tried.
        tolerance: largest difference, absolute or relative, between outputs of the module and the package. Default: 1e-5, and
            of half and bfloat16 outputs 2e-3 and 2e-2.
        format: what runs the programs: `pt2` (programs of torch.export), `aotinductor` (compiled for this processor) or `onnx`.
        allow_stale_copy: let online updates reach tables of which the network has a copy (tied outputs), which they do not
            change.
        progress: is told what is done next.
        note, sources: as for `hps.write_version`.

    Raises:
        InvalidInputError: the module cannot be exported or cut, with the reason and its line, or the package answers otherwise
            than the module. Nothing was written.
        ModelFileError, ConfigError: as for `save`.
    """
    tell = progress or _log.debug
    sources = sources or ModelSources()
    place, version = _version_of(os.fspath(directory))
    if format not in _FILES:
        raise InvalidInputError(f"packaging {place}: got format {format!r}, expected {', '.join(_FILES)}")
    module = unwrapped(module)
    inputs = ModuleInputs(module, example_inputs)
    if unknown := sorted({*per_request} - {*inputs.tensors}):
        raise InvalidInputError(
            f"packaging {place}: got per_request {unknown[0]!r}, expected some of {', '.join(inputs.tensors)}"
        )
    traced = TracedCopy(module)
    if not traced.is_sharded:
        run_once(module, inputs)
    tell(f"exporting a {inputs.module}")
    with agreed(f"packaging {place}", traced.is_sharded):
        found = cut(traced.module, inputs, outputs)
        tables = traced.tables(found)
        traced.restore(found)
    with gather(f"packaging {place}", dict(tables.values())) as job, torch.no_grad():
        proof = Proof(module, inputs, found, traced, outputs, tolerance)
        if job.leads():
            version_of = VersionDescription(
                found, inputs, {path: name for path, (name, _) in tables.items()}, per_request, format
            )
            version_of.guard(proof.guards)
            files = version_of.files(tell)
            batching = {"dynamic_batching": dynamic_batching is not False, "max_queue_delay_us": max_queue_delay_us}
            stale = {"stale_copies": [tables[path][0] for path in found.kept], "allow_stale_copy": allow_stale_copy}
            dense = version_of.entry | batching | (stale if found.kept else {})
            most = version_of.hotness(hotness)
            dense["dynamic_batching"] &= proof.rows_are_independent
            entry = _tried_entry(place, job.tables, most, dense, settings or {})
            config = load_configuration({"models": [entry]}).models[0]
            if config.dense is None:
                raise ModelFileError(f"packaging {place}: the settings remove the network")
            tell("comparing the package with the module")
            proof.compare(config, config.dense, files, job.tables)
            if not proof.rows_are_independent and dynamic_batching:
                raise InvalidInputError(f"packaging {place}: got dynamic_batching, but {proof.why_dependent}")
            if not proof.rows_are_independent and dynamic_batching is None:
                entry["dense"]["dynamic_batching"] = False
                proof.notes.append(f"requests are answered one by one: {proof.why_dependent}")
            described = load_configuration({"models": [entry]}).models[0].dense or config.dense
            tried = _Tried(described, files, most, proof.difference, (*found.notes, *_of_copies(dense), *proof.notes))
            job.finish(tried)
        else:
            tried = job.follow()
    saved = save(
        dict(tables.values()),
        place,
        version=version,
        hotness=tried.hotness,
        settings=settings,
        note=note,
        network=(tried.dense, tried.files),
        sources=sources,
    )
    command = f"hps serve {posixpath.dirname(saved.place.rstrip('/')) or '.'}"
    for one in tried.notes:
        _log.info("packaged %s: %s", saved.place, one)
    _log.info(
        "packaged %s, version %s: its scores differ by %.2g at most; serve it: %s",
        saved.place,
        saved.version,
        tried.difference,
        command,
    )
    return PackagedModel(saved.place, saved.version, saved.entry, tried.dense, tried.difference, command, tried.notes, inputs)


@dataclass(frozen=True)
class _Tried:
    """What a package consists of beside its tables. *Immutable.*"""

    dense: DenseConfig
    files: Mapping[str, bytes]
    hotness: Mapping[str, int]
    difference: float
    notes: tuple[str, ...]


class VersionDescription:
    """What `version.json` says of a cut module, and its programs.

    Attributes:
        entry: `dense`.
    """

    def __init__(
        self,
        found: Cut,
        inputs: ModuleInputs,
        tables: Mapping[str, str],
        per_request: Sequence[str],
        format: str,  # noqa: A002
    ) -> None:
        self._cut = found
        self._inputs = inputs
        self._tables = tables
        self._format = format
        self._keys = self._grouped(set(per_request))
        self._names = {node: found.free_name(f"keys_{place}") for place, node in enumerate(found.computed())}
        plain = {lookup.name: self._plain(lookup) for lookup in found.lookups}
        taken: set[str] = set()
        described: dict[str, Any] = {}
        lookups: dict[str, Any] = {}
        for lookup in found.lookups:
            if (one := plain[lookup.name]) is None:
                lookups[lookup.name] = self._lookup(lookup)
                continue
            name = lookup.parts["keys"].input
            described[name] = one
            taken |= {source.input for source in lookup.parts.values()}
            lookup.name = name
        for name, tensor in inputs.tensors.items():
            if name not in taken and not self._is_unused_feature(name):
                described[name] = {"dtype": DTYPES[tensor.dtype], "shape": self._shape(name)}
        for name, offsets in found.ragged.items():
            if name in described and "shape" in described[name] and offsets in described:
                described[offsets].setdefault("offsets_of", name)
        self.network, self.reads = found.network()
        sizes = {size for one in described.values() for size in _sizes_in(one.get("shape", ()))}
        self.entry: dict[str, Any] = {
            "format": "onnx" if format == "onnx" else "pt2",
            "file": _FILES[format],
            "inputs": {
                name: described[name] | ({"per_request": True} if name in per_request else {})
                for name in [*inputs.tensors]
                if name in described
            },
            "outputs": list(found.outputs),
        }
        more = {
            "lookups": lookups,
            "keys": [
                {
                    "file": f"keys{place or ''}{_FILES[format][5:]}",
                    "inputs": found.inputs_of(nodes),
                    "outputs": [self._names[node] for node in nodes],
                }
                for place, nodes in enumerate(self._keys)
            ],
            "sizes": {name: size for name, size in found.sizes.items() if name in sizes},
        }
        if self.reads != [*self.entry["inputs"]]:  # compiled programs take inputs by position
            more["network_inputs"] = self.reads
        self._sizes = sizes | {"samples"}
        self.entry |= {what: one for what, one in more.items() if one}
        self.guard(found.guards)

    def guard(self, guards: Sequence[str]) -> None:
        """Add conditions on sizes: on those of the batch, which may be padded, unless the module branches on sizes."""
        what = "request_guards" if self._cut.branches else "guards"
        known = [guard for guard in guards if {*_sizes_in([guard])} <= self._sizes]
        if found := strongest([*self.entry.get(what, ()), *known]):
            self.entry[what] = found

    def _is_unused_feature(self, name: str) -> bool:
        """Return whether an input belongs to a feature of a KeyedJaggedTensor that nothing reads."""
        feature = name if name in self._inputs.ragged else name.rpartition(".")[0]
        if feature not in self._inputs.ragged:
            return False
        found = self._cut
        read = {*found.reads, *found.inputs_of(found.computed())}
        read |= {part.input for lookup in found.lookups for part in lookup.parts.values()}
        return not read & {feature, self._inputs.ragged[feature], f"{feature}.weights"}

    def _grouped(self, per_request: set[str]) -> list[list[Any]]:
        """Group what keys programs compute: by values that a request gives once, and by others."""
        groups: dict[bool, list[Any]] = {}
        for node in self._cut.computed():
            groups.setdefault({*self._cut.inputs_of([node])} <= per_request, []).append(node)
        return list(groups.values())

    def _shape(self, name: str) -> list[int | str]:
        first, *others = self._cut.shapes[name]
        return [-1 if first == "samples" else first, *others]

    def _plain(self, lookup: TracedLookup) -> dict[str, Any] | None:
        """Describe a lookup whose keys are an input that nothing else reads; None for others."""
        keys, offsets, weights = (lookup.parts.get(what) for what in ("keys", "offsets", "weights"))
        if keys is None or not keys.input or keys.column is not None or self._inputs.tensors[keys.input].dtype != torch.int64:
            return None
        name, found = keys.input, self._cut
        ragged = self._inputs.ragged.get(name)
        own = {name} if ragged is None else {name, ragged, f"{name}.weights"} & {*self._inputs.tensors}
        if own & {*found.reads, *found.inputs_of(found.computed())}:
            return None
        parts = [part.input for one in found.lookups if one is not lookup for part in one.parts.values()]
        if own & {*parts} or {part.input for part in (offsets, weights) if part is not None} != own - {name}:
            return None
        shape = found.shapes[name]
        sizes = {*_sizes_in(shape)} - {"samples"}
        said = [*found.guards, *(text for other, dims in found.shapes.items() if other not in own for text in dims)]
        if sizes & {*_sizes_in(said)}:
            return None
        entry: dict[str, Any] = {"table": self._tables[lookup.weight]}
        if lookup.pooling != "none":
            if offsets is None and (len(shape) != 2 or shape[0] != "samples"):
                return None
            entry["pooling"] = lookup.pooling
            if offsets is None and isinstance(shape[1], int):
                entry["hotness"] = shape[1]
        elif shape[0] != "samples" or len(shape) > 2 or sizes:
            return None
        elif len(shape) == 2:
            if lookup.max_norm is not None:
                return None
            entry["hotness"] = shape[1]
        elif lookup.max_norm is not None:
            entry |= {"pooling": "sum", "hotness": 1}
        return entry | self._options(lookup)

    @staticmethod
    def _options(lookup: TracedLookup) -> dict[str, Any]:
        found = {"max_norm": lookup.max_norm, "padding_key": lookup.padding}
        return {name: one for name, one in found.items() if one is not None}

    def _lookup(self, lookup: TracedLookup) -> dict[str, Any]:
        entry: dict[str, Any] = {"table": self._tables[lookup.weight]}
        if lookup.pooling != "none":
            entry["pooling"] = lookup.pooling
        entry |= {what: self._source(source) for what, source in lookup.parts.items()} | self._options(lookup)
        return entry | ({"include_last_offset": True} if lookup.include_last_offset and "offsets" in lookup.parts else {})

    def _source(self, source: TracedSource) -> dict[str, Any]:
        if not source.input:
            return {"output": self._names[source.node]}
        return {"input": source.input} | ({} if source.column is None else {"column": source.column})

    def hotness(self, hotness: int | Mapping[str, int] | None) -> dict[str, int]:
        """Return the most keys of a sample, by table."""
        most: dict[str, int] = {}
        for lookup in self._cut.lookups:
            source = lookup.parts["keys"]
            shape = source.node.meta["val"].shape
            free = "offsets" in lookup.parts or any(not isinstance(size, int) for size in shape[1:])
            fixed = int(np.prod([size for size in shape[1:] if isinstance(size, int)], dtype=np.int64))
            name = self._tables[lookup.weight]
            most[name] = max(most.get(name, 0), max(fixed, 1) * (_ANY_NUMBER if free else 1))
        return dict.fromkeys(most, hotness) if isinstance(hotness, int) else most | dict(hotness or {})

    def files(self, tell: Callable[[str], None]) -> dict[str, bytes]:
        """Make the programs, by the names of their files."""
        tensors, found = self._inputs.tensors, self._cut
        files: dict[str, bytes] = {}
        asked: dict[Any, torch.Tensor] = {found.inputs[name]: one for name, one in tensors.items()}
        for entry, nodes in zip(self.entry.get("keys", ()), self._keys, strict=True):
            program, inputs = found.keys_program(nodes, entry["outputs"])
            given = {name: tensors[name] for name in inputs}
            asked |= zip(nodes, program(given).values(), strict=True)
            tell(f"exporting {entry['file']}")
            files[entry["file"]] = self._program(program, given, entry["outputs"])
        given = {name: tensors[name] for name in found.reads}
        for lookup in found.lookups:
            value = lookup.node.meta["val"]
            dim = int((value[0] if isinstance(value, tuple | list) else value).shape[-1])
            rows = _rows_of(lookup, asked, tensors)
            given[lookup.name] = torch.zeros(*rows, dim)
        tell(f"exporting {self.entry['file']}")
        files[self.entry["file"]] = self._program(self.network, given, self.entry["outputs"])
        return files

    def _program(self, module: nn.Module, given: Mapping[str, torch.Tensor], outputs: Sequence[str]) -> bytes:
        """Export a program that takes and returns tensors by name, and note on which sizes it relies."""
        known = {name: self._cut.sizes_of(name) for name in given}
        try:
            with quiet():
                try:
                    program, content = _saved(module, given, known, outputs, self._format)
                except Exception:  # noqa: BLE001 - of torch's exporters, which raise anything
                    program, content = _saved(module, given, known, outputs, self._format, every=False)
        except Exception as error:
            lines = str(error).strip().splitlines()
            raise InvalidInputError(
                f"packaging: a program cannot be made for {self._format}: {type(error).__name__}: "
                f"{lines[0][:400] if lines else ''}"
            ) from error
        self.guard(self._cut.names.conditions_of(program, [*known.values()]))
        return content


def _rows_of(lookup: TracedLookup, asked: Mapping[Any, torch.Tensor], tensors: Mapping[str, torch.Tensor]) -> tuple[int, ...]:
    """Return how many vectors a lookup has for the examples."""

    def part(what: str) -> torch.Tensor | None:
        source = lookup.parts.get(what)
        if source is None:
            return None
        found = tensors[source.input] if source.input else asked[source.node]
        return found if source.column is None else found[:, source.column]

    keys, offsets = part("keys"), part("offsets")
    if keys is None:
        return ()
    if lookup.pooling == "none":
        return tuple(keys.shape)
    return (len(keys) if offsets is None else len(offsets) - lookup.include_last_offset,)


def _sizes_in(texts: Iterable[Any]) -> list[str]:
    return [
        name
        for text in texts
        if isinstance(text, str)
        for name in re.findall(r"[A-Za-z_]\w*", text)
        if name not in ("min", "max")
    ]


class _Positional(nn.Module):
    """A program that takes tensors by position, as packages of AOTInductor are called."""

    def __init__(self, module: nn.Module, names: Sequence[str]) -> None:
        super().__init__()
        self.module = module
        self._names = list(names)

    def forward(self, *given: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(self.module(dict(zip(self._names, given, strict=True))).values())


def _saved(
    module: nn.Module,
    given: Mapping[str, torch.Tensor],
    known: Mapping[str, Sequence[Any]],
    outputs: Sequence[str],
    format: str,  # noqa: A002
    *,
    every: bool = True,
) -> tuple[torch.export.ExportedProgram, bytes]:
    """Export a program for an engine; each gets an export of its own, which it may change."""
    given = {name: one.clone() for name, one in given.items()}
    if format == "pt2":
        file = io.BytesIO()
        program = export(module, (given,), known=known, every=every)
        torch.export.save(program, file)
        return program, file.getvalue()
    program = export(_Positional(module, [*given]), tuple(given.values()), known=known, every=every)
    with tempfile.TemporaryDirectory(prefix="hps-package-") as directory:
        place = Path(directory, _FILES[format])
        if format == "onnx":
            made = torch.onnx.export(program, (), input_names=[*given], output_names=[*outputs], dynamo=True, verbose=False)
            made.save(place)  # type: ignore[union-attr]
        else:
            from torch._inductor import aoti_compile_and_package  # its documented home

            aoti_compile_and_package(program, package_path=str(place))
        return program, place.read_bytes()


def _version_of(directory: str) -> tuple[str, str | None]:
    parent, last = posixpath.split(directory.rstrip("/"))
    return (parent or ".", last) if VERSION.fullmatch(last) else (directory, None)


def _of_copies(dense: Mapping[str, Any]) -> list[str]:
    return [
        f"table {name!r} is read otherwise, too, so the network has a copy of it, which online updates do not reach: they are "
        + ("allowed (allow_stale_copy)" if dense["allow_stale_copy"] else "refused, unless allow_stale_copy is set")
        for name in dense.get("stale_copies", ())
    ]


def _tried_entry(
    place: str, tables: Mapping[str, Any], most: Mapping[str, int], dense: Mapping[str, Any], settings: Mapping[str, Any]
) -> dict[str, Any]:
    """Make an entry with which the network is tried, before anything is written."""
    return {
        "model": re.sub(r"[^a-zA-Z0-9_-]", "_", posixpath.basename(place.rstrip("/"))) or "model",
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
