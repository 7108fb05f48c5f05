"""The sizes of an exported program: names, conditions, and their text in `version.json`."""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import sympy
import torch
from torch import fx

from hps.errors import InvalidInputError
from hps.torch.module_inputs import ModuleInputs

INTEGERS: Final = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
SAMPLES: Final = sympy.Symbol("samples", integer=True, nonnegative=True)


class FixedSizesError(InvalidInputError):
    """The outputs do not have a row for each sample; another tracing mode may help."""


class ProgramSizes:
    """The sizes of a program, by name: `samples`, and `hist_1` for dimension 1 of input `hist`."""

    def __init__(
        self,
        doing: str,
        inputs: ModuleInputs,
        placeholders: Mapping[str, fx.Node],
        outputs: Mapping[str, fx.Node],
        ragged: Mapping[str, str],
        equal: Mapping[Any, Any],
    ) -> None:
        self._doing = doing
        self._equal = equal
        self.notes: list[str] = []
        dims = {name: [expression_of(size) for size in node.meta["val"].shape] for name, node in placeholders.items()}
        rows = {name: node.meta["val"].shape[0] for name, node in outputs.items()}
        first = next(iter(rows.values()))
        self.samples = first if isinstance(first, int) else first.node.hint
        self._names: dict[Any, Any] = {}
        for name, expressions in dims.items():
            if expressions[0].is_Symbol and name not in ragged and inputs.tensors[name].shape[0] == self.samples:
                # An input with as many rows as there are samples has a row a sample. If that is a coincidence, the guards
                # refuse more requests than the program would, never fewer.
                self._names[expressions[0]] = SAMPLES
        found = self._renamed(expression_of(first))
        if found != SAMPLES and not (solved := _solved(found)):
            self._refuse_rows(inputs, dims, next(iter(rows)), found)
        if found != SAMPLES:
            self._names |= solved
        for name, expression in rows.items():
            if (found := self._renamed(expression_of(expression))) != SAMPLES:
                self._refuse_rows(inputs, dims, name, found)
        if not any(SAMPLES in self._renamed(sizes[0]).free_symbols for sizes in dims.values()):
            self._refuse_rows(inputs, dims, next(iter(rows)), SAMPLES)
        self.examples: dict[str, int] = {}
        implied = dict.fromkeys(inputs.ragged.values(), SAMPLES + 1)
        implied |= {f"{name}.weights": dims[name][0] for name in inputs.ragged}
        for name, expressions in dims.items():
            for dim, expression in enumerate(expressions):
                if not dim and expression.is_Symbol and expression not in self._names and name in implied:
                    self._names[expression] = self._renamed(implied[name])
                self._name(name, dim, expression, inputs.tensors[name].shape[dim])
        self.shapes = {
            name: tuple(
                int(expression) if expression.is_Integer else self.written(self._renamed(expression))
                for expression in expressions
            )
            for name, expressions in dims.items()
        }
        for name, shape in self.shapes.items():
            fixed = [str(size) for size in shape[1:] if isinstance(size, int)]
            if fixed and inputs.tensors[name].dtype in INTEGERS:
                self.notes.append(f"input {name!r} always has {' x '.join(fixed)} values a sample, as in the examples")
        self.guards = self.conditions(next(iter(placeholders.values())).meta["val"], self._names)

    def _refuse_rows(self, inputs: ModuleInputs, dims: Mapping[str, Any], name: str, rows: Any) -> None:
        fixed = next(
            (input_name for input_name, sizes in dims.items() if sizes and sizes[0].is_Integer and int(sizes[0]) > 1), None
        )
        if rows.is_Integer and fixed is not None:
            raise FixedSizesError(
                f"{self._doing}: forward fixes the number of samples to {inputs.tensors[fixed].shape[0]}, that of input "
                f"{fixed!r} in the examples: does it use len(), int(), float() or tolist() of a size? Use x.shape[0] as it is"
            )
        raise FixedSizesError(
            f"{self._doing}: output {name!r} has {rows} rows, expected one for each sample of the inputs, or the same of all "
            "outputs"
        )

    def _name(self, name: str, dim: int, expression: Any, size: int) -> None:
        for symbol in expression.free_symbols:
            if symbol not in self._names:
                self._names[symbol] = sympy.Symbol(re.sub(r"\W", "_", f"{name}_{dim}"), integer=True, nonnegative=True)
        if expression.is_Symbol and self._names[expression].is_Symbol and self._names[expression] != SAMPLES:
            self.examples[str(self._names[expression])] = size

    def _renamed(self, expression: Any) -> Any:
        return expression.subs(self._equal).xreplace(self._names)

    def symbols_in(self, symbols: Iterable[Any]) -> set[Any]:
        """Return the names in the expressions of symbols of the graph."""
        return {name for symbol in symbols for name in self._renamed(symbol).free_symbols}

    def of(self, value: torch.Tensor) -> list[Any]:
        """Return the sizes of a tensor of the graph, in names."""
        return [self._renamed(expression_of(size)) for size in value.shape]

    def written(self, expression: Any) -> str:
        """Write an expression of sizes in names.

        Raises:
            InvalidInputError: it has an operator that cannot be checked.
        """
        try:
            return _written(expression)
        except KeyError as error:
            raise InvalidInputError(f"{self._doing}: forward makes a size of {expression}, which cannot be checked") from error

    def conditions(self, program: Any, names: Mapping[Any, Any]) -> list[str]:
        """Write the conditions that a traced program relies on.

        Args:
            program: any symbolic tensor of it.
            names: of its symbols.
        """
        environment = program.fake_mode.shape_env
        found: list[str] = []
        for guard in environment.guards:
            guarded = environment.replace(guard.expr).subs(self._equal)
            for condition in sympy.And.make_args(guarded):
                if condition.free_symbols <= {*names}:  # others depend on values
                    renamed = condition.xreplace(names)
                    found += [] if renamed == sympy.true else [self.written(renamed)]
        for symbol, bounds in environment.var_to_range.items():
            if symbol in names and environment.replace(symbol) == symbol:
                named = self.written(names[symbol])
                found += [f"{named} >= {int(bounds.lower)}"] if bounds.lower > 0 else []
                found += [f"{named} <= {int(bounds.upper)}"] if bounds.upper < 1 << 40 else []
        return found

    def conditions_of(self, program: torch.export.ExportedProgram, known: Sequence[Sequence[Any]]) -> list[str]:
        """Write the conditions of a program that was exported of a part.

        Args:
            known: the sizes of its inputs, in the names of this module.
        """
        values = {node.name: node.meta["val"] for node in program.graph.nodes if node.op == "placeholder"}
        inputs = [values[name] for name in program.graph_signature.user_inputs]
        names: dict[Any, Any] = {}
        found: list[str] = []
        for value, sizes in zip(inputs, known, strict=True):
            for size, own_size in zip(map(expression_of, value.shape), sizes, strict=True):
                if size.is_Symbol and size not in names:
                    names[size] = own_size
                elif (renamed := size.xreplace(names)) != own_size:
                    found.append(f"{self.written(own_size)} == {self.written(renamed)}")
        return found + self.conditions(inputs[0], names)


_COMPARISONS: Final = {
    sympy.Eq: "==",
    sympy.Ne: "!=",
    sympy.StrictLessThan: "<",
    sympy.LessThan: "<=",
    sympy.StrictGreaterThan: ">",
    sympy.GreaterThan: ">=",
}
_OPERATORS: Final = {"FloorDiv": "//", "Mod": "%", "PythonMod": "%", "CleanDiv": "//"}
_ROUNDED: Final = {"TruncToInt": "({} // {})", "FloorToInt": "({} // {})", "CeilToInt": "(-(-{} // {}))"}


def _written(expression: Any) -> str:
    """Write an expression of sizes. Raises KeyError for other operators."""
    if expression.is_Integer:
        return str(int(expression))
    if expression.is_Symbol:
        return str(expression)
    kind = type(expression).__name__
    if kind in _ROUNDED and type(quotient := expression.args[0]).__name__ == "IntTrueDiv":
        above, below = map(_written, quotient.args)
        if kind != "TruncToInt" or quotient.args[0].is_nonnegative:
            return _ROUNDED[kind].format(above, below)
    parts = [_written(arg) for arg in expression.args]
    if (sign := _COMPARISONS.get(type(expression))) is not None:
        return f"{parts[0]} {sign} {parts[1]}"
    if expression.is_Add:
        return f"({' + '.join(reversed(parts))})" if len(parts) > 1 else parts[0]
    if expression.is_Mul:
        return f"({' * '.join(parts)})"
    if kind in ("Max", "Min"):
        return f"{kind.lower()}({', '.join(parts)})"
    if len(parts) != 2:
        raise KeyError(kind)
    return f"({parts[0]} {_OPERATORS[kind]} {parts[1]})"


def strongest(guards: Sequence[str]) -> list[str]:
    """Return the guards without lower bounds that another one implies."""
    bounds: dict[str, int] = {}
    others: list[str] = []
    for guard in guards:
        if (found := re.fullmatch(r"(\w+) (>=?) (\d+)", guard)) is None:
            others.append(guard)
        else:
            bounds[found[1]] = max(bounds.get(found[1], 0), int(found[3]) + (found[2] == ">"))
    return list(dict.fromkeys([*others, *(f"{name} >= {least}" for name, least in bounds.items())]))


def expression_of(size: Any) -> Any:
    return sympy.Integer(size) if isinstance(size, int) else size.node.expr


def _solved(samples: Any) -> dict[Any, Any]:
    """Solve the number of samples for its symbol: return the symbol as an expression of `samples`."""
    symbols = samples.free_symbols
    if len(symbols) != 1:
        return {}
    (symbol,) = symbols
    if samples == symbol:
        return {symbol: SAMPLES}
    if type(samples).__name__ == "FloorDiv" and samples.args[0] == symbol:
        return {symbol: SAMPLES * samples.args[1]}
    shift = sympy.expand(samples - symbol)
    return {symbol: SAMPLES - shift} if shift.is_Integer else {}
