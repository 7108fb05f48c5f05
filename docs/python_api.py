"""Makes the page of the Python API, which the site alone has, from the docstrings of all that `hps` and `hps.torch` export."""

import inspect
import re
from enum import Enum
from types import ModuleType
from typing import Any

import hps
import hps.torch

_HEAD = """# Python API

Everything that `import hps` and `import hps.torch` offer, from the docstrings. Names that are not on this page may change
without notice.
"""
_TORCH = "Layers for PyTorch ([torch.md](torch.md)); wants `pip install '.[torch]'`."
_SECTION = re.compile(r"(Args|Attributes|Returns|Yields|Raises):")
_ENTRY = re.compile(r"([\w*]+(?:, [\w*]+)*): (.*)", re.DOTALL)


def _blocks(lines: list[str]) -> list[str]:
    """Split the body of a section into its entries: each starts at the section's own indent."""
    indent = min(len(line) - len(line.lstrip()) for line in lines if line.strip())
    entries: list[str] = []
    for line in lines:
        if (line.strip() and len(line) - len(line.lstrip()) == indent) or not entries:
            entries.append(line.strip())
        else:
            entries[-1] = f"{entries[-1]} {line.strip()}".strip()
    return entries


def markdown(docstring: str) -> str:
    """Return a Google-style docstring as Markdown: its sections become lists."""
    out, lines = [], docstring.splitlines()
    i = 0
    while i < len(lines):
        section = _SECTION.fullmatch(lines[i])
        if section is None:
            out.append(lines[i])
            i += 1
            continue
        body = []
        while (i := i + 1) < len(lines) and (not lines[i].strip() or lines[i].startswith(" ")):
            body.append(lines[i])
        out += [f"**{section[1]}**", ""]
        if section[1] in ("Returns", "Yields"):
            out += "\n".join(line.strip() for line in body).strip().splitlines()
        else:
            out += [_ENTRY.sub(r"- `\1`: \2", entry) if _ENTRY.match(entry) else f"- {entry}" for entry in _blocks(body)]
        out.append("")
    return "\n".join(out).strip()


def _default(value: Any) -> str:
    if isinstance(value, Enum):
        return f"{type(value).__name__}.{value.name}"
    return "..." if repr(value).startswith("<") else repr(value).replace("'", '"')


def _heading(level: str, name: str, thing: Any) -> list[str]:
    """The name with its parameters, which stand on lines of their own where they are many."""
    shown, keyword_only = [], False
    for parameter in inspect.signature(thing).parameters.values():
        if parameter.kind is parameter.KEYWORD_ONLY and not keyword_only:
            shown.append("*")
            keyword_only = True
        if parameter.name != "self":
            required = parameter.default is parameter.empty
            shown.append(parameter.name if required else f"{parameter.name}={_default(parameter.default)}")
    if len(", ".join(shown)) < 100:
        return [f"{level} `{name}({', '.join(shown)})`"]
    return [f"{level} `{name}`", "\n".join(["```python", f"{name}(", *(f"    {one}," for one in shown), ")", "```"])]


def _exported() -> list[Any]:
    return [getattr(hps, name) for name in hps.__all__]


def _members(cls: type) -> list[tuple[str, Any]]:
    """The public methods and properties of a class and of its bases that are not on the page, in the order of the source."""
    owners = [one for one in cls.__mro__ if one is cls or (one.__module__.startswith("hps.client") and one not in _exported())]
    return [
        (name, member)
        for owner in owners
        for name, member in vars(owner).items()
        if not name.startswith("_") and (inspect.isfunction(member) or isinstance(member, property)) and member.__doc__
    ]


def _entry(name: str, module: ModuleType = hps) -> list[str]:
    thing = getattr(module, name)
    if isinstance(thing, type) and issubclass(thing, Enum):
        return [f"### `{name}`", markdown(inspect.getdoc(thing) or ""), ", ".join(f"`{member.name}`" for member in thing)]
    lines = [*_heading("###", name, thing), markdown(inspect.getdoc(thing) or "")]
    for member_name, member in _members(thing) if isinstance(thing, type) else ():
        shown = f"{name}.{member_name}"
        lines += [f"#### `{shown}`"] if isinstance(member, property) else _heading("####", shown, member)
        lines.append(markdown(inspect.getdoc(member) or ""))
    return lines


def _error_line(error: type) -> str:
    bases = ", ".join(f"`{base.__name__}`" for base in error.__bases__)
    return f"- `{error.__name__}` ({bases}): {' '.join((inspect.getdoc(error) or '').split())}"


def page() -> str:
    """Return the whole page."""
    errors = {name for name in hps.__all__ if isinstance(thing := getattr(hps, name), type) and issubclass(thing, Exception)}
    names = ["HPS", *(name for name in hps.__all__ if name != "HPS" and name not in errors)]
    lines = [_HEAD.strip(), *(line for name in names for line in _entry(name)), "## `hps.torch`", _TORCH]
    lines += [line for name in hps.torch.__all__ for line in _entry(name, hps.torch)]
    lines.append("## Errors")
    lines.append("\n".join(_error_line(getattr(hps, name)) for name in hps.__all__ if name in errors))
    return "\n\n".join(line for line in lines if line) + "\n"
