"""Programs of `torch.export`, checked before PyTorch reads them.

`torch.export.load` trusts its files. It unpickles anything if its restricted reader fails, resolves `torch.os.system` as an
operator, evaluates sizes with sympy, imports the modules that the structure of the inputs names, and compiles source code with
the names of tensors. So each of these is checked here: members are tensors and JSON, operators compute, sizes are arithmetic,
names are identifiers. Parts that the computation does not need are left out.
"""

import io
import json
import keyword
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any, Final, NoReturn

import torch

from hps.errors import ModelFileError
from hps.networks.torch_archives import archive_of, members, refuse_member
from hps.networks.torch_expressions import checked_size

_MODEL: Final = "models/model.json"
_OLD_MODEL: Final = "serialized_exported_program.json"
_TEXTS: Final = re.compile(r"archive_format|archive_version|byteorder|version|\.data/(version|serialization_id)")
_CONFIGS: Final = re.compile(r"(data/(?:weights|constants)/)model_(?:weights|constants)_config\.json")
_TENSORS: Final = re.compile(r"data/(weights/weight|constants/tensor)_[0-9]+")
_EXAMPLES: Final = re.compile(r"data/sample_inputs/model\.pt|serialized_example_inputs\.pt")
_PICKLES: Final = re.compile(r"data/(weights|constants)/model\.pt|serialized_(state_dict|constants)\.pt")
_IGNORED: Final = re.compile(r"(extra|extra_files)/.*")
NATIVE: Final = re.compile(r"(.*/)?data/aotinductor/.*")
"""Members of a package of AOTInductor: libraries of machine code."""

_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_DOTTED: Final = re.compile(r"(?!__)[A-Za-z0-9_]+(\.(?!__)[A-Za-z0-9_]+)*")
_NAMES: Final = {"name", "as_name", "forward_arg_names", "user_input_name"}
_DOTTED_NAMES: Final = {"parameter_name", "buffer_name", "tensor_constant_name", "verifiers", "fqn"}
_ANYTHING: Final = {"as_string", "as_strings", "torch_version"}
_FLOATS: Final = {"as_float", "as_floats", "as_float_lists", "real", "imag"}
_DROPPED: Final = {"metadata", "treespec_namedtuple_fields"}
_SPECS: Final = {"in_spec", "out_spec"}
_STRUCTURES: Final = {
    *(None, "builtins.tuple", "builtins.list", "builtins.dict", "collections.OrderedDict", "torch.Size"),
    *("torch.fx.immutable_collections.immutable_list", "torch.fx.immutable_collections.immutable_dict"),
}

_OPERATOR: Final = re.compile(
    r"torch\.ops\.(?!higher_order\.)([A-Za-z]\w*|_quantized)\.((?!__)[A-Za-z_]\w*|__i?(?:and|or|xor|lshift|rshift)__)\.([A-Za-z]\w*)"
)
_HIGHER: Final = re.compile(  # those that run graphs of the same program
    r"torch\.ops\.higher_order\.(cond|while_loop|map|map_impl|scan|associative_scan|invoke_subgraph|wrap|wrap_with_autocast|"
    r"wrap_with_set_grad_enabled|tag_activation_checkpoint|strict_mode|out_dtype|auto_functionalized(_v2)?|flex_attention)"
)
_OF_SIZES: Final = re.compile(
    r"torch\.(sym_(not|float|int|max|min|ite|sum)|_sym_sqrt)|math\.(trunc|floor|ceil|sqrt)|"
    r"torch\.amp\.autocast_mode\._(enter|exit)_autocast|torch\._C\._set_grad_enabled|"
    r"_operator\.(eq|ne|le|ge|lt|gt|neg|pos|abs|mul|add|sub|floordiv|truediv|mod|pow|and_|or_|not_|xor|getitem)"
)
REFUSED_SPACES: Final = re.compile(
    r"hps|rpc|c10d|_c10d\w*|dist\w*|symm_mem|_dtensor|debug\w*|profiler|inductor\w*|static_runtime|_test|export|streams"
)
"""Operators that do something else than compute: they reach other machines, tables, files or memory by address."""
REFUSED_OPERATORS: Final = {"save", "from_file"}


@dataclass(frozen=True)
class CheckedProgram:
    """A program of `torch.export` whose parts were checked. *Immutable.*

    Attributes:
        archive: what PyTorch reads.
        guards: conditions on inputs, as PyTorch wrote them; it does not get them.
        operators: that it calls, as namespace and name.
        has_examples: whether it was saved with example inputs.
    """

    archive: io.BytesIO
    guards: tuple[str, ...]
    operators: frozenset[tuple[str, str]]
    has_examples: bool


def checked_program(name: str, content: bytes) -> CheckedProgram:
    """Check a program, and write the archive that PyTorch reads.

    Raises:
        ModelFileError: it is no program, or holds what may run code; the message names it.
    """
    found = members(name, content)
    model = _MODEL if _MODEL in found else _OLD_MODEL
    if model not in found:
        listed = ", ".join(list(found)[:5]) or "nothing"
        raise ModelFileError(
            f"opening the network {name}: it cannot be read as a program of torch.export: its archive has {listed}, expected "
            f"{_MODEL}"
        )
    written: dict[str, bytes] = {}
    pickled: set[str] = set()
    for member in found:
        if config := _CONFIGS.fullmatch(member):
            pickled |= _checked_config(name, member, config[1], found)
    program, has_examples = _Program(name), False
    for member in list(found):
        data = found.pop(member)
        if member == model:
            written[member] = json.dumps(program.checked(_json(name, member, data))).encode()
        elif _CONFIGS.fullmatch(member) or _TEXTS.fullmatch(member):
            written[member] = data
        elif _EXAMPLES.fullmatch(member):
            has_examples = bool(_repickled(name, member, data))
            written[member] = b""  # nothing needs them
        elif _PICKLES.fullmatch(member) or member in pickled:
            written[member] = _repickled(name, member, data)
        elif _TENSORS.fullmatch(member):
            written[member] = data
        elif not _IGNORED.fullmatch(member):
            refuse_member(name, member)
    root = "archive/" if model == _MODEL else ""
    return CheckedProgram(archive_of(written, root), tuple(program.guards), frozenset(program.operators), has_examples)


def _json(name: str, member: str, content: bytes) -> Any:
    try:
        return json.loads(content)
    except (ValueError, RecursionError) as error:
        raise ModelFileError(f"opening the network {name}: {member!r} in its archive is not JSON: {error}") from error


def _checked_config(name: str, member: str, directory: str, found: Mapping[str, bytes]) -> set[str]:
    """Check the list of weights or constants, and return the members that are pickled tensors."""
    pickled = set()
    try:
        for entry in _json(name, member, found[member])["config"].values():
            place = directory + entry["path_name"]
            if not _TENSORS.fullmatch(place) or place not in found:
                refuse_member(name, place)
            if entry.get("use_pickle"):
                pickled.add(place)
            elif not found[place] and prod(size["as_int"] for size in entry["tensor_meta"]["sizes"]):
                raise ValueError(f"{entry['path_name']} is empty, and its sizes are not")
    except ModelFileError:
        raise
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise ModelFileError(f"opening the network {name}: {member!r} in its archive cannot be read: {error!r}") from error
    return pickled


def _repickled(name: str, member: str, content: bytes) -> bytes:
    """Read a pickle of tensors by PyTorch's restricted reader, and write it anew: what reads it next may be unrestricted."""
    if not content:
        return content
    try:
        tensors = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    except Exception as error:  # noqa: BLE001 - whatever the pickle brings about
        called = re.search(r"GLOBAL (\S+)", str(error))
        refuse_member(name, member, f", a pickle of {called[1] if called else 'something else than tensors'}")
    file = io.BytesIO()
    torch.save(tensors, file)
    return file.getvalue()


class _Program:
    """The JSON of a program. *One thread.* Collects guards and operators while it is checked."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._sizes: dict[str, str] = {}
        self._targets: set[str] = set()
        self.guards: list[str] = []
        self.operators: set[tuple[str, str]] = set()

    def checked(self, document: Any) -> Any:
        if not isinstance(document, dict) or not isinstance(document.get("graph_module"), dict):
            self._refuse("graph_module", document)
        guards = document.pop("guards_code", None) or []
        if not isinstance(guards, list) or not all(isinstance(guard, str) for guard in guards):
            self._refuse("guards_code", guards)
        self.guards = guards
        for symbol in document.get("range_constraints") or {}:
            self._size("range_constraints", symbol)
        calls = (
            document["graph_module"].get("module_call_graph") or []
        )  # those after the first describe modules that were flattened
        document["graph_module"]["module_call_graph"] = [
            call for call in calls if isinstance(call, dict) and call.get("fqn") == ""
        ]
        return self._walked("", document)

    def _walked(self, key: str, value: Any) -> Any:
        if isinstance(value, dict):
            if not all(map(_is_plain, value)):
                self._refuse(key, next(name for name in value if not _is_plain(name)))
            return {name: ({} if name in _DROPPED else self._walked(name, below)) for name, below in value.items()}
        if isinstance(value, list):
            return [self._walked(key, item) for item in value]
        return self._text(key, value) if isinstance(value, str) else value

    def _text(self, key: str, text: str) -> str:
        if key == "expr_str":
            return self._size(key, text)
        if key in ("target", "as_operator"):
            self._operator(text)
        elif key in _SPECS:
            self._structure(key, text)
        elif key in _NAMES:
            if text and (not _NAME.fullmatch(text) or keyword.iskeyword(text)):
                self._refuse(key, text)
        elif key in _DOTTED_NAMES:
            if text and not _DOTTED.fullmatch(text):
                self._refuse(key, text)
        elif key == "type":  # of a device
            if not re.fullmatch("[a-z]{1,20}", text):
                self._refuse(key, text)
        elif key not in _ANYTHING and not (key in _FLOATS and text in ("Infinity", "-Infinity", "NaN")):
            self._refuse(key, text)
        return text

    def _size(self, key: str, text: str) -> str:
        if text not in self._sizes:
            try:
                self._sizes[text] = checked_size(text)
            except ValueError as error:
                self._refuse(key, text, str(error))
        return self._sizes[text]

    def _operator(self, text: str) -> None:
        if text in self._targets:
            return
        if called := _OPERATOR.fullmatch(text):
            inner = called[1] == "prim" and called[2] != "device"  # of PyTorch's interpreter: they take what is on its stack
            if inner or REFUSED_SPACES.fullmatch(called[1]) or called[2] in REFUSED_OPERATORS:
                self._refuse("target", text, f"operator {called[1]}.{called[2]} does something else than compute")
            self.operators.add((called[1], called[2]))
        elif not (_HIGHER.fullmatch(text) or _OF_SIZES.fullmatch(text)):
            self._refuse("target", text, "it is no operator of tensors")
        self._targets.add(text)

    def _structure(self, key: str, text: str) -> None:
        try:
            _, top = json.loads(text)
            for node in _nodes(top):
                if node["type"] not in _STRUCTURES:
                    self._refuse(key, node["type"], "expected tuples, lists and dicts")
                context = json.loads(node["context"]) if node["context"] is not None else None
                keys = context if isinstance(context, list) else [context]
                if not all(key is None or isinstance(key, str | int | float) for key in keys):
                    self._refuse(key, node["context"], "expected keys that are texts or numbers")
            named = [node for node in top["children_spec"][1:2] if node["type"] == "builtins.dict"] if key == "in_spec" else []
            for name in (load for node in named for load in json.loads(node["context"])):
                if not _NAME.fullmatch(name) or keyword.iskeyword(name):
                    self._refuse(key, name)
        except (KeyError, TypeError, ValueError, RecursionError) as error:
            self._refuse(key, text, repr(error))

    def _refuse(self, key: str, value: Any, why: str = "it may run code when it is read") -> NoReturn:
        raise ModelFileError(
            f"opening the network {self._name}: got {str(value)[:200]!r} as {key or 'the program'}: {why[:300]}; expected what "
            "torch.export.save writes of a module that computes with tensors"
        )


def _is_plain(key: str) -> bool:
    return key.isprintable() and not {*key} & {*"'\"\\"}


def _nodes(top: Any) -> Iterator[Any]:
    stack = [top]
    while stack:
        node = stack.pop()
        yield node
        stack += node["children_spec"]
