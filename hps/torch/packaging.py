"""Packages a trained module as one version of a model: tables, keys programs and the network, cut out of its graph."""

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
from hps.torch.cutting import Cut, TracedLookup, TracedSource, cut
from hps.torch.embeddings import unwrapped
from hps.torch.module_inputs import DTYPES, ModuleInputs
from hps.torch.proof import Proof, is_request_input, run_once
from hps.torch.ranks import fail_together, gather
from hps.torch.saving import save
from hps.torch.sizes import strongest
from hps.torch.traced_copy import TracedCopy
from hps.torch.tracing import export, quiet

_log = logging.getLogger(__name__)
_FILES: Final = {"pt2": "dense.pt2", "aotinductor": "dense.pt2", "onnx": "dense.onnx"}
_ANY_NUMBER: Final = 100
"""Maximum keys of a sample where the module takes any number of them."""


@dataclass(frozen=True)
class PackagedModel:
    """The result of `package`. *Immutable.*"""

    place: str  # path or URI of the model's directory
    version: str  # the version that was written
    entry: Mapping[str, Any] = field(repr=False)  # the model's entry, as in its `model.json`
    dense: DenseConfig = field(repr=False)  # the entry `dense` of the version's `version.json`
    difference: float  # largest difference between outputs of the module and of the package, over all inputs tried
    command: str  # a command that serves the repository
    notes: tuple[str, ...] = ()  # for the user: sizes that are fixed, tables that are copied, why requests are not batched
    inputs: ModuleInputs | None = field(default=None, repr=False, compare=False)

    def request(self, *args: Any, **kwargs: Any) -> dict[str, np.ndarray]:
        """Turn arguments of the module into the inputs of a request, by name: for `HPS.score` and the clients.

        Raises:
            InvalidInputError: structure or constants differ from the examples.
        """
        if self.inputs is None:
            raise InvalidInputError("making a request: this rank did not trace the module, expected rank 0")
        tensors = self.inputs.flatten(args, kwargs)
        return {name: tensor.numpy() for name, tensor in tensors.items() if is_request_input(self.dense, name)}


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
    """Write a trained module as one version of a model, whose scores `hps serve` returns.

    The module is exported with `torch.export` and cut at its lookups (`cutting.py`): embeddings, embedding bags and
    `weight[keys]` of stored tables. The computation of their keys becomes a keys program, the rest the network. So masks, rules
    on keys, lengths, hashes, offsets and positions are served unchanged; a module that cannot be exported is refused with the
    line. Requests give the module's own inputs. Inputs within a dict or list are named by their path (`batch.item`, `lS_i.0`),
    and each feature `f` of a KeyedJaggedTensor has keys `f` and `f.offsets`. The package is then compared with the module on
    the examples and on variants of them: other orders, numbers of samples, lengths and keys. The module is not changed.

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
        dynamic_batching, max_queue_delay_us: of the configuration's `dense`. Default: requests are batched if test runs find
            that rows do not depend on each other.
        tolerance: largest difference, absolute or relative, between outputs of the module and the package. Default: 1e-5;
            2e-3 for half and 2e-2 for bfloat16 outputs.
        format: `pt2` (programs of torch.export), `aotinductor` (compiled for this processor) or `onnx`.
        allow_stale_copy: allow online updates of tables of which the network has a copy (tied outputs); they do not change the
            copy.
        progress: called with the name of the next step.
        note, sources: as for `hps.write_version`.

    Raises:
        InvalidInputError: the module cannot be exported or cut, with the reason and its line, or the outputs of the package
            differ from the module's. Nothing was written.
        ModelFileError, ConfigError: as for `save`.
    """
    report = progress or _log.debug
    sources = sources or ModelSources()
    place, version = _split_version(os.fspath(directory))
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
    report(f"exporting a {inputs.module}")
    with fail_together(f"packaging {place}", traced.is_sharded):
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
            files = version_of.files(report)
            batching = {"dynamic_batching": dynamic_batching is not False, "max_queue_delay_us": max_queue_delay_us}
            stale_copies = {
                "stale_copies": [tables[path][0] for path in found.shared_weights],
                "allow_stale_copy": allow_stale_copy,
            }
            dense = version_of.entry | batching | (stale_copies if found.shared_weights else {})
            hotness_by_table = version_of.hotness(hotness)
            dense["dynamic_batching"] &= proof.rows_are_independent
            entry = _candidate_entry(place, job.tables, hotness_by_table, dense, settings or {})
            config = load_configuration({"models": [entry]}).models[0]
            if config.dense is None:
                raise ModelFileError(f"packaging {place}: the settings remove the network")
            report("comparing the package with the module")
            proof.compare(config, config.dense, files, job.tables)
            if not proof.rows_are_independent and dynamic_batching:
                raise InvalidInputError(f"packaging {place}: got dynamic_batching, but {proof.why_dependent}")
            if not proof.rows_are_independent and dynamic_batching is None:
                entry["dense"]["dynamic_batching"] = False
                proof.notes.append(f"requests are answered one by one: {proof.why_dependent}")
            described = load_configuration({"models": [entry]}).models[0].dense or config.dense
            candidate = _Candidate(
                described, files, hotness_by_table, proof.difference, (*found.notes, *_stale_copy_notes(dense), *proof.notes)
            )
            job.finish(candidate)
        else:
            candidate = job.follow()
    saved = save(
        dict(tables.values()),
        place,
        version=version,
        hotness=candidate.hotness,
        settings=settings,
        note=note,
        network=(candidate.dense, candidate.files),
        sources=sources,
    )
    command = f"hps serve {posixpath.dirname(saved.place.rstrip('/')) or '.'}"
    for note in candidate.notes:
        _log.info("packaged %s: %s", saved.place, note)
    _log.info(
        "packaged %s, version %s: its scores differ by %.2g at most; serve it: %s",
        saved.place,
        saved.version,
        candidate.difference,
        command,
    )
    return PackagedModel(
        saved.place, saved.version, saved.entry, candidate.dense, candidate.difference, command, candidate.notes, inputs
    )


@dataclass(frozen=True)
class _Candidate:
    """A package without its tables, after the comparison. *Immutable.*"""

    dense: DenseConfig
    files: Mapping[str, bytes]
    hotness: Mapping[str, int]
    difference: float
    notes: tuple[str, ...]


class VersionDescription:
    """Makes the entry `dense` of `version.json` for a cut module, and its programs."""

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
        self._names = {node: found.free_name(f"keys_{index}") for index, node in enumerate(found.computed())}
        plain = {lookup.name: self._plain(lookup) for lookup in found.lookups}
        consumed: set[str] = set()
        described: dict[str, Any] = {}
        lookups: dict[str, Any] = {}
        for lookup in found.lookups:
            if (description := plain[lookup.name]) is None:
                lookups[lookup.name] = self._lookup(lookup)
                continue
            name = lookup.parts["keys"].input
            described[name] = description
            consumed |= {source.input for source in lookup.parts.values()}
            lookup.name = name
        for name, tensor in inputs.tensors.items():
            if name not in consumed and not self._is_unused_feature(name):
                described[name] = {"dtype": DTYPES[tensor.dtype], "shape": self._shape(name)}
        for name, offsets in found.ragged.items():
            if name in described and "shape" in described[name] and offsets in described:
                described[offsets].setdefault("offsets_of", name)
        self.network, self.reads = found.network()
        sizes = {size for description in described.values() for size in _sizes_in(description.get("shape", ()))}
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
        optional = {
            "lookups": lookups,
            "keys": [
                {
                    "file": f"keys{index or ''}{_FILES[format][5:]}",
                    "inputs": found.inputs_of(nodes),
                    "outputs": [self._names[node] for node in nodes],
                }
                for index, nodes in enumerate(self._keys)
            ],
            "sizes": {name: size for name, size in found.sizes.items() if name in sizes},
        }
        if self.reads != [*self.entry["inputs"]]:  # compiled programs take inputs by position
            optional["network_inputs"] = self.reads
        self._sizes = sizes | {"samples"}
        self.entry |= {key: description for key, description in optional.items() if description}
        self.guard(found.guards)

    def guard(self, guards: Sequence[str]) -> None:
        """Add conditions on sizes: of the batch, which may be padded, or of each request if the module branches on sizes."""
        key = "request_guards" if self._cut.branches else "guards"
        known_guards = [guard for guard in guards if {*_sizes_in([guard])} <= self._sizes]
        if guards_to_keep := strongest([*self.entry.get(key, ()), *known_guards]):
            self.entry[key] = guards_to_keep

    def _is_unused_feature(self, name: str) -> bool:
        """Return whether an input belongs to an unused feature of a KeyedJaggedTensor."""
        feature = name if name in self._inputs.ragged else name.rpartition(".")[0]
        if feature not in self._inputs.ragged:
            return False
        cut = self._cut
        inputs_read = {*cut.reads, *cut.inputs_of(cut.computed())}
        inputs_read |= {part.input for lookup in cut.lookups for part in lookup.parts.values()}
        return not inputs_read & {feature, self._inputs.ragged[feature], f"{feature}.weights"}

    def _grouped(self, per_request: set[str]) -> list[list[Any]]:
        """Group the nodes that keys programs compute: those of per-request inputs alone, and others."""
        groups: dict[bool, list[Any]] = {}
        for node in self._cut.computed():
            groups.setdefault({*self._cut.inputs_of([node])} <= per_request, []).append(node)
        return list(groups.values())

    def _shape(self, name: str) -> list[int | str]:
        first, *others = self._cut.shapes[name]
        return [-1 if first == "samples" else first, *others]

    def _plain(self, lookup: TracedLookup) -> dict[str, Any] | None:
        """Describe a lookup whose keys are an input used only there; None for others."""
        keys, offsets, weights = (lookup.parts.get(part) for part in ("keys", "offsets", "weights"))
        if keys is None or not keys.input or keys.column is not None or self._inputs.tensors[keys.input].dtype != torch.int64:
            return None
        name, cut = keys.input, self._cut
        ragged = self._inputs.ragged.get(name)
        own_names = {name} if ragged is None else {name, ragged, f"{name}.weights"} & {*self._inputs.tensors}
        if own_names & {*cut.reads, *cut.inputs_of(cut.computed())}:
            return None
        parts = [part.input for other in cut.lookups if other is not lookup for part in other.parts.values()]
        if own_names & {*parts} or {part.input for part in (offsets, weights) if part is not None} != own_names - {name}:
            return None
        shape = cut.shapes[name]
        sizes = {*_sizes_in(shape)} - {"samples"}
        expressions = [*cut.guards, *(text for other, dims in cut.shapes.items() if other not in own_names for text in dims)]
        if sizes & {*_sizes_in(expressions)}:
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
        options = {"max_norm": lookup.max_norm, "padding_key": lookup.padding}
        return {name: value for name, value in options.items() if value is not None}

    def _lookup(self, lookup: TracedLookup) -> dict[str, Any]:
        entry: dict[str, Any] = {"table": self._tables[lookup.weight]}
        if lookup.pooling != "none":
            entry["pooling"] = lookup.pooling
        entry |= {part: self._source(source) for part, source in lookup.parts.items()} | self._options(lookup)
        return entry | ({"include_last_offset": True} if lookup.include_last_offset and "offsets" in lookup.parts else {})

    def _source(self, source: TracedSource) -> dict[str, Any]:
        if not source.input:
            return {"output": self._names[source.node]}
        return {"input": source.input} | ({} if source.column is None else {"column": source.column})

    def hotness(self, hotness: int | Mapping[str, int] | None) -> dict[str, int]:
        """Return the maximum keys of a sample, by table."""
        most: dict[str, int] = {}
        for lookup in self._cut.lookups:
            source = lookup.parts["keys"]
            shape = source.node.meta["val"].shape
            free = "offsets" in lookup.parts or any(not isinstance(size, int) for size in shape[1:])
            fixed = int(np.prod([size for size in shape[1:] if isinstance(size, int)], dtype=np.int64))
            name = self._tables[lookup.weight]
            most[name] = max(most.get(name, 0), max(fixed, 1) * (_ANY_NUMBER if free else 1))
        return dict.fromkeys(most, hotness) if isinstance(hotness, int) else most | dict(hotness or {})

    def files(self, report: Callable[[str], None]) -> dict[str, bytes]:
        """Return the programs by file name."""
        tensors, cut = self._inputs.tensors, self._cut
        files: dict[str, bytes] = {}
        values: dict[Any, torch.Tensor] = {cut.inputs[name]: tensor for name, tensor in tensors.items()}
        for entry, nodes in zip(self.entry.get("keys", ()), self._keys, strict=True):
            program, inputs = cut.keys_program(nodes, entry["outputs"])
            inputs_of_program = {name: tensors[name] for name in inputs}
            values |= zip(nodes, program(inputs_of_program).values(), strict=True)
            report(f"exporting {entry['file']}")
            files[entry["file"]] = self._program(program, inputs_of_program, entry["outputs"])
        inputs_of_program = {name: tensors[name] for name in cut.reads}
        for lookup in cut.lookups:
            value = lookup.node.meta["val"]
            dim = int((value[0] if isinstance(value, tuple | list) else value).shape[-1])
            rows = _rows_of(lookup, values, tensors)
            inputs_of_program[lookup.name] = torch.zeros(*rows, dim)
        report(f"exporting {self.entry['file']}")
        files[self.entry["file"]] = self._program(self.network, inputs_of_program, self.entry["outputs"])
        return files

    def _program(self, module: nn.Module, inputs: Mapping[str, torch.Tensor], outputs: Sequence[str]) -> bytes:
        """Export a program that takes and returns tensors by name, and add its conditions on sizes."""
        sizes = {name: self._cut.sizes_of(name) for name in inputs}
        try:
            with quiet():
                try:
                    program, content = _export_program(module, inputs, sizes, outputs, self._format)
                except Exception:  # noqa: BLE001 - torch's exporters raise any class
                    # Some parts cannot be exported with all sizes free although the module could: free only the first ones.
                    program, content = _export_program(module, inputs, sizes, outputs, self._format, all_sizes=False)
        except Exception as error:
            lines = str(error).strip().splitlines()
            raise InvalidInputError(
                f"packaging: a program cannot be made for {self._format}: {type(error).__name__}: "
                f"{lines[0][:400] if lines else ''}"
            ) from error
        self.guard(self._cut.names.conditions_of(program, [*sizes.values()]))
        return content


def _rows_of(lookup: TracedLookup, values: Mapping[Any, torch.Tensor], tensors: Mapping[str, torch.Tensor]) -> tuple[int, ...]:
    """Return the number of vectors of a lookup for the examples."""

    def part(name: str) -> torch.Tensor | None:
        source = lookup.parts.get(name)
        if source is None:
            return None
        tensor = tensors[source.input] if source.input else values[source.node]
        return tensor if source.column is None else tensor[:, source.column]

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
    """Calls a program with tensors by position, as AOTInductor's packages are called."""

    def __init__(self, module: nn.Module, names: Sequence[str]) -> None:
        super().__init__()
        self.module = module
        self._names = list(names)

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(self.module(dict(zip(self._names, tensors, strict=True))).values())


def _export_program(
    module: nn.Module,
    inputs: Mapping[str, torch.Tensor],
    sizes: Mapping[str, Sequence[Any]],
    outputs: Sequence[str],
    format: str,  # noqa: A002
    *,
    all_sizes: bool = True,
) -> tuple[torch.export.ExportedProgram, bytes]:
    """Export a program for an engine, each time anew, since engines change the exported graph."""
    inputs = {name: tensor.clone() for name, tensor in inputs.items()}
    if format == "pt2":
        file = io.BytesIO()
        program = export(module, (inputs,), sizes=sizes, all_sizes=all_sizes)
        torch.export.save(program, file)
        return program, file.getvalue()
    program = export(_Positional(module, [*inputs]), tuple(inputs.values()), sizes=sizes, all_sizes=all_sizes)
    with tempfile.TemporaryDirectory(prefix="hps-package-") as directory:
        path = Path(directory, _FILES[format])
        if format == "onnx":
            exported = torch.onnx.export(
                program, (), input_names=[*inputs], output_names=[*outputs], dynamo=True, verbose=False
            )
            exported.save(path)  # type: ignore[union-attr]
        else:
            from torch._inductor import aoti_compile_and_package  # its documented home

            aoti_compile_and_package(program, package_path=str(path))
        return program, path.read_bytes()


def _split_version(directory: str) -> tuple[str, str | None]:
    parent, last = posixpath.split(directory.rstrip("/"))
    return (parent or ".", last) if VERSION.fullmatch(last) else (directory, None)


def _stale_copy_notes(dense: Mapping[str, Any]) -> list[str]:
    policy = "allowed (allow_stale_copy)" if dense.get("allow_stale_copy") else "refused, unless allow_stale_copy is set"
    return [
        f"table {name!r} is also used other than by lookups, so the network has a copy of it, which online updates do not "
        f"change: they are {policy}"
        for name in dense.get("stale_copies", ())
    ]


def _candidate_entry(
    place: str, tables: Mapping[str, Any], most: Mapping[str, int], dense: Mapping[str, Any], settings: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the entry for the comparison, which runs before anything is written."""
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
