"""Shows where `package` cuts a module, as text and as a picture."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any, Final

from torch import nn

from hps.torch.cutting import cut
from hps.torch.embeddings import unwrapped
from hps.torch.module_inputs import ModuleInputs
from hps.torch.packaging import VersionDescription
from hps.torch.traced_copy import TracedCopy

_LINE: Final = re.compile(r' \(File "(?:.*/)?([^"/]+)", line (\d+), in \w+: (.*)\)')
_WIDTH, _ROW, _GAP = 190, 30, 60
_COLOURS: Final = {"input": "#e8f0fe", "keys": "#fef3d8", "lookup": "#e2f5e5", "network": "#f3e8fd", "output": "#eeeeee"}


@dataclass(frozen=True)
class Explanation:
    """Describes where a module is cut. *Immutable.* Notebooks show the picture."""

    text: str  # a line for each input, guard, keys program and lookup, and for the network
    svg: str
    dense: Mapping[str, Any]  # the entry of `version.json`, before `package` has compared outputs

    def __str__(self) -> str:
        return self.text

    def _repr_svg_(self) -> str:
        return self.svg


def explain(
    module: nn.Module,
    example_inputs: Sequence[Any] | Mapping[str, Any],
    *,
    outputs: Sequence[str] | None = None,
    per_request: Sequence[str] = (),
) -> Explanation:
    """Show how `package` would cut a module at its lookups, without writing or running anything.

    Args:
        module, example_inputs, outputs, per_request: as for `package`.

    Raises:
        InvalidInputError: as of `package`, if the module cannot be exported or cut.
    """
    module = unwrapped(module)
    inputs = ModuleInputs(module, example_inputs)
    traced = TracedCopy(module)
    found = cut(traced.module, inputs, outputs)
    tables = {path: name for path, (name, _) in traced.tables(found).items()}
    dense = VersionDescription(found, inputs, tables, per_request, "pt2").entry
    lines = {lookup.name: _LINE.sub(r"  # \1:\2: \3", lookup.line) for lookup in found.lookups}
    return Explanation(_text(dense, lines, found.notes), _picture(dense), dense)


def _lookups(dense: Mapping[str, Any]) -> dict[str, tuple[str, list[str]]]:
    """Return the description of each lookup and the names that it reads, by the name of its vectors."""
    found: dict[str, tuple[str, list[str]]] = {}
    for name, entry in dense["inputs"].items():
        if "table" in entry:
            found[name] = _words(entry, name), [name]
    for name, entry in dense.get("lookups", {}).items():
        sources = [entry[part] for part in ("keys", "offsets", "weights") if part in entry]
        column = entry["keys"].get("column")
        read = [source.get("input") or source["output"] for source in sources]
        found[name] = _words(entry, ", ".join([read[0] + ("" if column is None else f"[:, {column}]"), *read[1:]])), read
    return found


def _words(lookup: Mapping[str, Any], keys: str) -> str:
    options = [f"{name} {lookup[name]:g}" for name in ("max_norm", "padding_key") if name in lookup]
    pooled = f"{lookup['pooling']} of " if lookup.get("pooling", "none") != "none" else ""
    return f"{pooled}{lookup['table']}[{keys}]" + (f" ({', '.join(options)})" if options else "")


def _text(dense: Mapping[str, Any], lines: Mapping[str, str], notes: Sequence[str]) -> str:
    rows: list[tuple[str, str]] = []
    for name, entry in dense["inputs"].items():
        shape = ", ".join("samples" if size == -1 else str(size) for size in entry.get("shape", (-1,)))
        rows.append(
            ("input", f"{name}: " + (f"keys of table {entry['table']}" if "table" in entry else f"{entry['dtype']} [{shape}]"))
        )
    rows += [("guard", entry) for kind in ("guards", "request_guards") for entry in dense.get(kind, ())]
    for entry in dense.get("keys", ()):
        rows.append(("keys program", f"{', '.join(entry['inputs'])} -> {', '.join(entry['outputs'])}"))
    rows += [("lookup", f"{name} = {words}{lines.get(name, '')}") for name, (words, _) in _lookups(dense).items()]
    reads = dense.get("network_inputs", [*dense["inputs"]])
    rows.append(("network", f"{', '.join(reads)} -> {', '.join(dense['outputs'])}"))
    rows += [("note", note) for note in notes]
    return "\n".join(f"{kind:<14}{text}" for kind, text in rows)


def _picture(dense: Mapping[str, Any]) -> str:
    """Draw inputs, keys programs, lookups, network and outputs as columns of boxes, linked to their sources."""
    lookups = _lookups(dense)
    columns: list[tuple[str, dict[str, tuple[str, list[str]]]]] = [
        ("input", {f"input {name}": (name, []) for name in dense["inputs"]}),
        (
            "keys",
            {
                f"keys {entry['file']}": (f"keys program {entry['file']}", [f"input {name}" for name in entry["inputs"]])
                for entry in dense.get("keys", ())
            },
        ),
        ("lookup", {}),
        ("network", {}),
        ("output", {f"output {name}": (name, ["network"]) for name in dense["outputs"]}),
    ]
    programs = {output: f"keys {entry['file']}" for entry in dense.get("keys", ()) for output in entry["outputs"]}
    for name, (words, read) in lookups.items():
        columns[2][1][f"lookup {name}"] = words, [programs.get(entry, f"input {entry}") for entry in dict.fromkeys(read)]
    reads = dense.get("network_inputs", [*dense["inputs"]])
    columns[3][1]["network"] = (
        f"network {dense['file']}",
        [f"lookup {read}" if read in lookups else f"input {read}" for read in reads],
    )
    columns_with_boxes = [(kind, boxes) for kind, boxes in columns if boxes]
    height = max(len(boxes) for _, boxes in columns_with_boxes) * _ROW + 20
    places: dict[str, tuple[int, float]] = {}
    shapes: list[str] = []
    for number, (kind, boxes) in enumerate(columns_with_boxes):
        for row, (key, (words, sources)) in enumerate(boxes.items()):
            x, y = number * (_WIDTH + _GAP) + 10, height * (row + 0.5) / len(boxes)
            places[key] = x, y
            for source in sources:
                x_source, y_source = places[source]
                shapes.insert(0, f'<path d="M{x_source + _WIDTH} {y_source:.0f}L{x} {y:.0f}" stroke="#888" fill="none"/>')
            shapes.append(
                f'<rect x="{x}" y="{y - 11:.0f}" width="{_WIDTH}" height="22" rx="4" fill="{_COLOURS[kind]}" stroke="#555"/>'
                f'<text x="{x + 8}" y="{y + 4:.0f}">{escape(words if len(words) < 30 else words[:28] + "…")}'
                f"<title>{escape(words)}</title></text>"
            )
    width = len(columns_with_boxes) * (_WIDTH + _GAP) - _GAP + 20
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'font-family="sans-serif" font-size="11">{"".join(shapes)}</svg>'
    )
