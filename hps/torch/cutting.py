"""Cuts a module at its embedding lookups, on the graph of torch.export.

    inputs --guards--> keys programs --keys, offsets, weights--> lookups --vectors--> network --> outputs

A *lookup* is an embedding, an embedding bag or a selection of rows of a stored two-dimensional weight, by keys that depend on
the request. The computation of its keys, offsets and weights is a *keys program*, the rest is the *network*; nodes that both
need are in both. Both come from one graph, so no mask, rule or length of the module is lost. The weights of looked up tables
are in neither program, unless the module also uses them in other ways (tied outputs).

torch.export silently turns Python values into constants: random numbers, clocks, counters, `torch.compiler.is_compiling()`,
swallowed exceptions. `proof.py` finds these by runs.
"""

import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

import sympy
import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from hps.errors import InvalidInputError
from hps.torch.module_inputs import FlatModule, ModuleInputs
from hps.torch.sizes import INTEGERS, FixedSizesError, ProgramSizes, expression_of
from hps.torch.tracing import (
    HOMES,
    TRACING_MODES,
    SizeBranches,
    attributes_of,
    drop_created,
    export,
    export_error,
    require_stateless,
    tracing,
)

aten: Any = torch.ops.aten
_LOOKUPS: Final = (aten.embedding.default, aten.embedding_bag.padding_idx, aten.index.Tensor, aten.index_select.default)
_VIEWS: Final = (aten.view.default, aten.reshape.default, aten._unsafe_view.default)
_ROWS: Final = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
_POOLINGS: Final = ("sum", "mean", "max")
_TO_THE_END: Final = 2**63 - 1


@dataclass(frozen=True)
class TracedSource:
    """The source of a lookup's keys, offsets or weights. *Immutable.*"""

    node: fx.Node  # of the module's graph
    input: str = ""  # the input that it is, or has as a column; empty: computed by a keys program
    column: int | None = None  # of the input; None: all of it


@dataclass(eq=False)
class TracedLookup:
    """A lookup of a module."""

    weight: str  # path of the looked up weight
    node: fx.Node  # of the module's graph; its value becomes an input of the network
    pooling: str = "none"  # or sum, mean, max
    padding: int | None = None  # a key that is ignored
    max_norm: float | None = None
    include_last_offset: bool = False
    parts: dict[str, TracedSource] = field(default_factory=dict)  # `keys`, and if used `offsets` and `weights`
    name: str = ""  # of the vectors, as an input of the network
    expands: bool = False  # the keys are a column, for which the vectors get a dimension
    line: str = ""  # of the module, for messages


class Cut:
    """A module cut at its lookups.

    Attributes:
        shapes: of each input, dimensions as numbers or expressions of sizes; `samples` is the number of samples.
        ragged: by name of an input with an element for each key of bags, the input with their offsets; empty if computed.
        branches: whether the module may branch on sizes, so that a request cannot be padded.
        why_unbatched: the reason in the graph against merging requests; empty if there is none.
        sizes: of the examples, by name, without `samples`.
        guards: conditions on sizes that the programs rely on.
        lookups: in the order of the graph.
        shared_weights: looked up weights that are also used in other ways.
        notes: for the user.
        samples: number of samples of the examples.
    """

    def __init__(self, inputs: ModuleInputs, program: torch.export.ExportedProgram) -> None:
        self._doing = f"packaging a {inputs.module}"
        self.notes: list[str] = []
        self.module: Any = program.module()  # parameters are attributes of it, by their paths
        self.graph: fx.Graph = self.module.graph
        for node in list(self.graph.nodes):
            if node.op == "call_module":  # guards on sizes, which `ProgramSizes` reads from the program
                self.graph.erase_node(node)
        self._refuse_changes()
        self._drop_full_slices()
        self.inputs: dict[str, fx.Node] = dict(
            zip(inputs.tensors, [node for node in self.graph.nodes if node.op == "placeholder"], strict=True)
        )
        out = next(node for node in self.graph.nodes if node.op == "output")
        self.outputs: dict[str, fx.Node] = dict(zip(program.call_spec.out_spec.context, _leaves(out), strict=True))
        self._equal: dict[Any, Any] = {}
        self.lookups = self._find_lookups()
        self._refuse_two_levels()
        weights = {f"{name}.weights": offsets for name, offsets in inputs.ragged.items() if f"{name}.weights" in self.inputs}
        self.why_unbatched = ""
        self.branches = True
        self.ragged = self._find_ragged() | inputs.ragged | weights
        self.names = sizes = ProgramSizes(self._doing, inputs, self.inputs, self.outputs, self.ragged, self._equal)
        self.shapes, self.sizes, self.guards, self.samples = sizes.shapes, sizes.examples, sizes.guards, sizes.samples
        self.notes += sizes.notes
        for index, lookup in enumerate(self.lookups):
            lookup.name = self.free_name(f"vectors_{index}")
            for part, source in lookup.parts.items():
                lookup.parts[part] = self._as_input(lookup, source, part)
        self._sized = self._find_sized()
        needed = self._network_nodes()
        self.reads = [name for name, node in self.inputs.items() if node in needed]
        attributes = {node.target for node in needed if node.op == "get_attr"}
        self.shared_weights = sorted({lookup.weight for lookup in self.lookups} & attributes)
        for lookup in self.lookups:
            if lookup.max_norm is not None and lookup.weight in self.shared_weights:
                raise InvalidInputError(
                    f"{self._doing}: {plain_path(lookup.weight)!r} is also used in other ways, and lookups scale its rows in "
                    f"place{lookup.line}; scale them once and drop max_norm, or look up in a copy"
                )

    def need_filled(self, symbols: Iterable[Any] | None) -> None:
        """Add guards that sizes are at least 1, for a module that branches on them; None: all sizes."""
        # Torch assumes that sizes are positive, so it makes no guard for a branch such as `if size == 0`.
        names = {*self.sizes} if symbols is None else {str(symbol) for symbol in self.names.symbols_in(symbols)}
        self.guards += [f"{name} >= 1" for name in self.sizes if name in names]

    # -- checks

    def _refuse_changes(self) -> None:
        for node in reversed(list(self.graph.nodes)):
            if node.target is aten.copy_.default and not node.users:
                target, source = node.args[:2]
                renormed = isinstance(source, fx.Node) and source.target is aten.embedding_renorm.default
                if target.op == "get_attr" and not renormed:
                    raise InvalidInputError(
                        f"{self._doing}: forward changes its state {plain_path(target.target)!r} in evaluation mode; a served "
                        "module has no memory: make it an input, or change it only if self.training"
                    )
                self.graph.erase_node(node)  # a renormed weight, or an input that is changed after its use
            elif _is_random(node):
                raise InvalidInputError(
                    f"{self._doing}: {node.target} draws random numbers in evaluation mode{line_of(node)}; pass "
                    "training=self.training to a dropout, and give random numbers as an input"
                )

    def _drop_full_slices(self) -> None:
        for node in list(self.graph.nodes):
            if node.target is aten.slice.Tensor:
                got = _arguments(node)
                if got["start"] in (None, 0) and got["step"] == 1 and got["end"] in (None, _TO_THE_END):
                    node.replace_all_uses_with(node.args[0])
                    self.graph.erase_node(node)

    def _refuse_two_levels(self) -> None:
        nodes = {lookup.node: lookup for lookup in self.lookups}
        for lookup in self.lookups:
            for ancestor in _ancestors(source.node for source in lookup.parts.values()):
                if ancestor in nodes:
                    raise InvalidInputError(
                        f"{self._doing}: the keys of {plain_path(lookup.weight)!r} depend on the vectors of "
                        f"{plain_path(nodes[ancestor].weight)!r}"
                        f"{lookup.line}: two levels of lookups; package the first part as a separate model, and call the "
                        "second with its outputs"
                    )
        if not self.lookups:
            inner = any(
                isinstance(getattr(self.module, str(node.target), None), fx.GraphModule)
                for node in self.graph.nodes
                if node.op == "get_attr"
            )
            reason = "; ".join(self.notes) or (
                "its lookups are inside of torch.cond or a similar operator" if inner else "it has no embedding"
            )
            raise InvalidInputError(
                f"{self._doing}: got no lookup of a stored table by keys of the request ({reason}); expected an embedding, an "
                "embedding bag or weight[keys] of a parameter"
            )

    # -- lookups

    def _find_lookups(self) -> list[TracedLookup]:
        depends = _depends_on_values(self.graph)
        nodes = [node for node in self.graph.nodes if node.target in _LOOKUPS]
        return [lookup for node in nodes if (lookup := self._lookup(node, depends)) is not None]

    def _lookup(self, node: fx.Node, depends: set[fx.Node]) -> TracedLookup | None:
        got = _arguments(node)
        selects = node.target in (aten.index.Tensor, aten.index_select.default)
        if selects:
            keys = got["index"] if node.target is aten.index_select.default else got["indices"][0]
            if node.target is aten.index.Tensor and len(got["indices"]) != 1:
                return None
            got |= {"weight": got["self"], "indices": keys}
            if got.get("dim", 0) != 0 or not isinstance(keys, fx.Node) or keys.meta["val"].dtype not in INTEGERS:
                return None
        weight, renorm = _stored(got["weight"])
        keys = got["indices"]
        if weight is None:
            if not selects:
                self.notes.append(f"a table that is computed stays in the network{line_of(node)}")
            return None
        rows = self.attribute(str(weight.target))
        if rows.ndim != 2 or rows.dtype not in _ROWS or keys not in depends or (selects and not isinstance(rows, nn.Parameter)):
            return None  # constant keys, such as positions: the small table stays where it is
        lookup = TracedLookup(str(weight.target), node, line=line_of(node))
        if renorm is not None:
            if renorm.args[1] is not keys or (len(renorm.args) > 3 and renorm.args[3] != 2.0):
                raise InvalidInputError(
                    f"{self._doing}: got a norm_type other than 2, or vectors that are scaled for other keys{lookup.line}"
                )
            lookup.max_norm = float(renorm.args[2])  # type: ignore[arg-type]
        if node.target is not aten.embedding_bag.padding_idx:
            if node.target is aten.index.Tensor:
                keys = self._from_the_end(keys, rows.shape[0])
            lookup.parts["keys"] = TracedSource(keys)
            return lookup
        lookup.pooling = _POOLINGS[got["mode"]]
        lookup.include_last_offset = bool(got["include_last_offset"])
        if (padding := got["padding_idx"]) is not None:
            lookup.padding = int(padding) % rows.shape[0]
        if any(user.target is not operator.getitem or user.args[1] != 0 for user in node.users):
            raise InvalidInputError(f"{self._doing}: more than the vectors of a bag is read{lookup.line}")
        parts = _matrix_of_bags(keys, got["offsets"], got["per_sample_weights"])
        if parts[1] is None:  # the traced number of offsets is the number of rows
            self._equal[expression_of(got["offsets"].meta["val"].shape[0])] = expression_of(parts[0].meta["val"].shape[0])
        lookup.parts |= {
            name: TracedSource(part_node)
            for name, part_node in zip(("keys", "offsets", "weights"), parts, strict=True)
            if part_node is not None
        }
        return lookup

    def _from_the_end(self, keys: fx.Node, rows: int) -> fx.Node:
        """Count negative keys from the end, as `weight[keys]` does."""
        with self.graph.inserting_before(keys.next):
            value = keys.meta["val"]
            is_negative = self.graph.call_function(aten.lt.Scalar, (keys, 0))
            shifted = self.graph.call_function(aten.add.Tensor, (keys, rows))
            wrapped = self.graph.call_function(aten.where.self, (is_negative, shifted, keys))
        is_negative.meta["val"], shifted.meta["val"], wrapped.meta["val"] = value.bool(), value, value
        return wrapped

    def _as_input(self, lookup: TracedLookup, source: TracedSource, part: str) -> TracedSource:
        """Return the source of a part of a lookup as an input, or a column of one, if it is."""
        node, column = source.node, None
        names = {input_node: name for name, input_node in self.inputs.items()}
        if part == "keys":
            node, casts = _uncast(node)
            if node.target in (aten.select.int, aten.slice.Tensor) and node.args[0] in {**names}:
                node, column, expands = _column(node)
            elif node.target in (aten.select.int, aten.slice.Tensor):
                inner, below = _uncast(node.args[0])  # type: ignore[arg-type]
                if inner in names and len(inner.meta["val"].shape) == 2:
                    number, expands = _column(node)[1:]
                    node, column, casts = (inner, number, casts + below) if number is not None else (node, None, casts)
            bag = lookup.pooling != "none"
            if column is not None and not (bag and (not expands or lookup.padding is not None or "weights" in lookup.parts)):
                lookup.pooling, lookup.expands = "none", expands and not bag  # a bag of one key is its vector
                if isinstance(width := self.shapes[names[node]][1], str):
                    self.guards.append(f"{width} >= {column + 1}")
                return TracedSource(source.node, names[node], column)
            if column is not None or (casts and node.meta["val"].dtype not in INTEGERS):
                return source
        return TracedSource(source.node, names[node]) if node in names else source

    def _find_ragged(self) -> dict[str, str]:
        """Find the inputs with an element for each key of bags, and the inputs with their offsets, if any."""
        found: dict[str, str] = {}
        counts: dict[fx.Node, Any] = {}
        names = {input_node: name for name, input_node in self.inputs.items()}
        for lookup in self.lookups:
            if (offsets := lookup.parts.get("offsets")) is None:
                continue
            count = expression_of(lookup.parts["keys"].node.meta["val"].shape[0])
            if counts.setdefault(offsets.node, count) != count:  # merging cannot shift them for both
                self.why_unbatched = f"offsets are of several inputs{lookup.line}"
            for name, node in self.inputs.items():
                if node is not offsets.node and expression_of(node.meta["val"].shape[0]) == count:
                    found[name] = names.get(offsets.node, "")
        return found

    # -- programs

    def attribute(self, path: str) -> Any:
        """Return a weight, buffer or constant of the module."""
        return operator.attrgetter(path)(self.module)

    def free_name(self, name: str) -> str:
        """Return a name that no input has."""
        while name in self.inputs:
            name += "_"
        return name

    def sizes_of(self, name: str) -> list[Any]:
        """Return the sizes of an input, or of the vectors of a lookup, as expressions."""
        lookup = next((lookup for lookup in self.lookups if lookup.name == name), None)
        if lookup is None:
            return self.names.of(self.inputs[name].meta["val"])
        value = lookup.node.meta["val"]
        sizes = self.names.of(value[0] if isinstance(value, tuple | list) else value)
        return [*sizes[:1], *sizes[2:]] if lookup.expands else sizes

    def attributes(self) -> set[str]:
        """List the paths of weights, buffers and constants that the programs read."""
        needed = self._network_nodes() | _ancestors(self.computed())
        return {str(node.target) for node in needed if node.op == "get_attr"}

    def put(self, path: str, value: torch.Tensor) -> None:
        """Replace a weight that the programs read."""
        owner, _, name = path.rpartition(".")
        setattr(self.module.get_submodule(owner), name, nn.Parameter(value, requires_grad=False))

    def computed(self) -> list[fx.Node]:
        """List the nodes that keys programs compute."""
        nodes = [part.node for lookup in self.lookups for part in lookup.parts.values() if not part.input]
        return list(dict.fromkeys(nodes))

    def inputs_of(self, nodes: Iterable[fx.Node]) -> list[str]:
        """List the inputs on whose values or sizes nodes depend."""
        needed = _ancestors(nodes)
        return [name for name, node in self.inputs.items() if node in needed]

    def keys_program(self, nodes: Sequence[fx.Node], names: Sequence[str]) -> tuple[nn.Module, list[str]]:
        """Return the program that computes nodes, by name, and its inputs."""
        needed = _ancestors(nodes)
        new, copies = fx.Graph(), {}
        inputs = self.inputs_of(nodes)
        for index, name in enumerate(inputs):
            copies[self.inputs[name]] = new.placeholder(f"input_{index}")
        for node in self.graph.nodes:
            if node in needed and node not in copies:
                copies[node] = new.node_copy(node, copies.__getitem__)
        new.output(tuple(copies[node] for node in nodes))
        return _NamedProgram(fx.GraphModule(self.module, new), inputs, list(names)), inputs

    def network(self) -> tuple[nn.Module, list[str]]:
        """Return the network, and the names of the inputs and vectors that it reads."""
        new, copies = fx.Graph(), {}
        for index, name in enumerate(self.reads):
            copies[self.inputs[name]] = new.placeholder(f"input_{index}")
        for index, lookup in enumerate(self.lookups):
            vectors = new.placeholder(f"vectors_{index}")
            value = lookup.node.meta["val"]
            value = value[0] if isinstance(value, tuple | list) else value
            if lookup.expands:
                vectors = new.call_function(aten.unsqueeze.default, (vectors, 1))
            if value.dtype is not torch.float32:
                vectors = new.call_function(aten._to_copy.default, (vectors,), {"dtype": value.dtype})
            copies[lookup.node] = vectors
        needed = self._network_nodes()
        for node in self.graph.nodes:
            if node in copies or node not in needed:
                continue
            if node in self._sized:
                source, dim = self._sized[node]
                copies[node] = new.call_function(aten.sym_size.int, (copies[source], dim))
                continue
            if (
                node.target is operator.getitem
                and node.args[0] in copies
                and node.args[0].target is aten.embedding_bag.padding_idx
            ):
                copies[node] = copies[node.args[0]]
            else:
                copies[node] = new.node_copy(node, copies.__getitem__)
        new.output(tuple(copies[node] for node in self.outputs.values()))
        names = [*self.reads, *(lookup.name for lookup in self.lookups)]
        return _NamedProgram(fx.GraphModule(self.module, new), names, list(self.outputs)), names

    def _network_nodes(self) -> set[fx.Node]:
        stops = {*(lookup.node for lookup in self.lookups), *self._sized}
        return _ancestors(self.outputs.values(), stops)

    def _find_sized(self) -> dict[fx.Node, tuple[fx.Node, int]]:
        """Find sizes of inputs that equal sizes of vectors, so that the network need not read these inputs."""
        vectors: dict[Any, tuple[fx.Node, int]] = {}
        for lookup in self.lookups:
            value = lookup.node.meta["val"]
            for dim, size in enumerate((value[0] if isinstance(value, tuple | list) else value).shape[:-1]):
                vectors.setdefault(expression_of(size).subs(self._equal), (lookup.node, dim))
        sizes = [node for node in self.graph.nodes if node.target is aten.sym_size.int and node.args[0].op == "placeholder"]
        return {node: vectors[size] for node in sizes if (size := expression_of(node.meta["val"])) in vectors}


class _NamedProgram(nn.Module):
    """A program that takes and returns tensors by name."""

    def __init__(self, graph: fx.GraphModule, inputs: Sequence[str], outputs: Sequence[str]) -> None:
        super().__init__()
        for node in graph.graph.nodes:
            node.meta = {}  # of the first trace; engines would trust it after the next one
        self.program = graph
        self._inputs = list(inputs)
        self._outputs = list(outputs)

    def forward(self, given: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return dict(zip(self._outputs, self.program(*[given[name] for name in self._inputs]), strict=True))


def cut(module: nn.Module, inputs: ModuleInputs, outputs: Sequence[str] | None = None) -> Cut:
    """Export a module, and cut it at its lookups.

    Args:
        module: a copy that tracing may change.

    Raises:
        InvalidInputError: it cannot be exported or cut, with the reason and the line of the module.
    """
    # Without dynamo most modules can be traced (KeyedJaggedTensors, autocast); dynamo takes some others (`len`, `.item()` as
    # the end of a slice). Each mode is tried with all sizes free, then with only the number of samples.
    flat = FlatModule(module, inputs, outputs)
    first: InvalidInputError | None = None
    before = attributes_of(module)
    for mode in TRACING_MODES:
        drop_created(module, before)
        trace = partial(export, flat, (inputs.tensors,), strict=mode.strict, all_sizes=mode.all_sizes)
        try:
            with SizeBranches() as branches:
                traced = trace()
            code = traced.graph_module.code
            with tracing():
                program = traced.run_decompositions({})  # functional: without changes in place
        except Exception as error:  # noqa: BLE001 - torch's tracers raise any class
            first = first or (error if isinstance(error, InvalidInputError) else export_error(inputs, error))
            continue
        try:
            found = Cut(inputs, program)
        except FixedSizesError as error:
            first = first or error
            continue
        require_stateless(inputs, module, before, trace, code)
        found.branches = mode.strict or branches.found  # dynamo reads bytecode, so branches cannot be observed
        found.need_filled(None if mode.strict or branches.foregone else branches.symbols)
        if mode.strict:
            found.notes.append("traced with dynamo (strict=True)")
        return found
    raise first or AssertionError


# -- the graph


def plain_path(path: Any) -> str:
    """Return the path of a weight in the module itself, without the wrapper's prefix."""
    return str(path).removeprefix("module.")


def line_of(node: fx.Node) -> str:
    """Return the line of the module that made a node, in brackets; empty if unknown."""
    lines = (node.meta.get("stack_trace") or "").strip().splitlines()
    this_directory = __file__.rpartition("/")[0]
    own_lines = [
        index
        for index, text in enumerate(lines)
        if text.strip().startswith("File") and not any(path in text for path in (*HOMES, this_directory))
    ]
    if not own_lines:
        return ""
    text = lines[own_lines[-1] + 1].strip() if own_lines[-1] + 1 < len(lines) else ""
    return f" ({lines[own_lines[-1]].strip()}{f': {text}' if text else ''})"


def _leaves(out: fx.Node) -> list[Any]:
    found = out.args[0]
    if isinstance(found, fx.Node) and found.target is pytree.tree_unflatten:
        found = found.args[0]
    return list(found) if isinstance(found, tuple | list) else [found]


def _arguments(node: fx.Node) -> dict[str, Any]:
    """Return the arguments of an operator by name, with defaults."""
    known = node.target._schema.arguments  # type: ignore[union-attr]
    arguments = dict(zip([argument.name for argument in known], node.args, strict=False))
    return {argument.name: argument.default_value for argument in known} | arguments | dict(node.kwargs)


def _is_random(node: fx.Node) -> bool:
    """Return whether an operator draws random numbers; attention and recurrent ones are tagged even without dropout."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload) or torch.Tag.nondeterministic_seeded not in target.tags:
        return False
    got = _arguments(node)
    probability = next((got[name] for name in ("dropout_p", "dropout", "p") if name in got), 1.0)
    training = got.get("train", got.get("training", True))  # of recurrent layers, and of rrelu
    return training is not False and probability != 0


def _depends_on_values(graph: fx.Graph) -> set[fx.Node]:
    """Find the nodes that depend on the values of inputs; sizes are no values."""
    found: set[fx.Node] = set()
    for node in graph.nodes:
        sized = node.target in (aten.sym_size.int, aten.sym_numel.default)
        if node.op == "placeholder" or (not sized and any(source in found for source in node.all_input_nodes)):
            found.add(node)
    return found


def _ancestors(nodes: Iterable[fx.Node], stops: Iterable[fx.Node] = ()) -> set[fx.Node]:
    """Find nodes and their ancestors, without the ancestors of `stops`."""
    found: set[fx.Node] = set()
    ends, todo = {*stops}, [*nodes]
    while todo:
        node = todo.pop()
        if node not in found:
            found.add(node)
            todo += [] if node in ends else node.all_input_nodes
    return found


def _stored(node: Any) -> tuple[fx.Node | None, fx.Node | None]:
    """Follow a weight to its attribute; return that, and the node that scales its vectors to a norm."""
    renorm = None
    while isinstance(node, fx.Node) and node.op == "call_function":
        if node.target is aten.embedding_renorm.default:
            renorm = renorm or node
        elif node.target not in (aten.detach.default, aten.alias.default):
            return None, None
        node = node.args[0]
    return (node, renorm) if isinstance(node, fx.Node) and node.op == "get_attr" else (None, None)


def _uncast(node: fx.Node) -> tuple[fx.Node, int]:
    """Skip copies, casts to int64, and casts of integers to wider ones; return also the number of casts."""
    casts = 0
    while node.target is aten.clone.default or (node.target is aten._to_copy.default and not {*node.kwargs} - {"dtype"}):
        source: Any = node.args[0]
        if node.target is aten.clone.default:
            node = source
            continue
        before, after = source.meta["val"].dtype, node.meta["val"].dtype
        if after is not torch.int64 and not (before in INTEGERS and after in INTEGERS and after.itemsize > before.itemsize):
            break
        node, casts = source, casts + 1
    return node, casts


def _column(node: fx.Node) -> tuple[fx.Node, int | None, bool]:
    """Return the matrix of which a node is a column, its number, and whether the column is a matrix itself."""
    got, source = _arguments(node), node.args[0]
    shape = [*map(expression_of, source.meta["val"].shape)]  # type: ignore[union-attr]
    if len(shape) != 2 or got["dim"] not in (1, -1):
        return node, None, False
    width = int(shape[1]) if shape[1].is_Integer else 0
    if node.target is aten.select.int:
        column = got["index"] % width if width else got["index"]
        return (source, column, False) if column >= 0 else (node, None, False)  # type: ignore[return-value]
    start, end, step = got["start"] or 0, width if got["end"] in (None, _TO_THE_END) else got["end"], got["step"]
    if not all(isinstance(bound, int) for bound in (start, end, step)) or (not width and min(start, end - 1) < 0):
        return node, None, False
    chosen = range(width or end)[slice(start, end, step)]
    return (source, chosen[0], True) if len(chosen) == 1 else (node, None, False)  # type: ignore[return-value]


def _matrix_of_bags(keys: fx.Node, offsets: fx.Node, weights: fx.Node | None) -> tuple[fx.Node, fx.Node | None, fx.Node | None]:
    """Restore bags of a matrix of keys, which are traced as its elements, with offsets at every row."""

    def matrix(node: fx.Node | None) -> Any:
        if node is None or node.target not in _VIEWS or len(node.meta["val"].shape) != 1:
            return None
        source, _ = _uncast(node.args[0])  # type: ignore[arg-type]
        return source if len(source.meta["val"].shape) == 2 and source.meta["val"].dtype == node.meta["val"].dtype else None

    found = matrix(keys)
    if found is None or offsets.target is not aten.arange.start_step or offsets.args[0] != 0:
        return keys, offsets, weights
    bags, width = map(expression_of, found.meta["val"].shape)
    end, step = (expression_of(arg.meta["val"] if isinstance(arg, fx.Node) else arg) for arg in (*offsets.args[1:], 1)[:2])
    if step != width or sympy.expand(end - bags * width) != 0 or (weights is not None and matrix(weights) is None):
        return keys, offsets, weights
    return found, None, matrix(weights)
