"""The messages and services of gRPC, made from the `.proto` files beside this module when it is imported.

They are in a pool of their own: clients' libraries register other files with the same names in the global one.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from google.protobuf.descriptor_pb2 import DescriptorProto, EnumDescriptorProto, FieldDescriptorProto, FileDescriptorProto
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass

_PLACE: Final = Path(__file__).with_name("protos")
_TOKEN: Final = re.compile(r'[\w.]+|"[^"]*"|[{}()<>,;=]')
_SCALARS: Final = {
    name: getattr(FieldDescriptorProto, f"TYPE_{name.upper()}")
    for name in ("bool", "bytes", "double", "float", "int32", "int64", "string", "uint32", "uint64")
}


def read_proto(text: str, name: str) -> FileDescriptorProto:
    """Read a file in the part of proto3's language that ours are in."""
    tokens = iter(_TOKEN.findall(re.sub(r"//.*", "", text)))
    file = FileDescriptorProto(name=name, syntax="proto3")
    for token in tokens:
        if token == "package":
            file.package = next(tokens)
        elif token == "message":
            _read_message(tokens, file.message_type.add(name=next(tokens)))
        elif token == "enum":
            _read_enum(tokens, file.enum_type.add(name=next(tokens)))
        elif token == "service":
            service = file.service.add(name=next(tokens))
            for one in tokens:
                if one == "}":
                    break
                if one == "rpc":
                    method = service.method.add(name=next(tokens))
                    method.client_streaming, method.input_type = _read_stream(tokens)
                    next(tokens)
                    method.server_streaming, method.output_type = _read_stream(tokens)
    return file


def _read_stream(tokens: Iterator[str]) -> tuple[bool, str]:
    inside = [token for token in iter(tokens.__next__, ")") if token != "("]
    return len(inside) == 2, inside[-1]


def _read_enum(tokens: Iterator[str], enum: EnumDescriptorProto) -> None:
    next(tokens)
    for name in iter(tokens.__next__, "}"):
        next(tokens)
        enum.value.add(name=name, number=int(next(tokens)))
        next(tokens)


def _read_message(tokens: Iterator[str], message: DescriptorProto) -> None:
    next(tokens)
    choice = False
    for token in tokens:
        if token == "}":
            if not choice:
                return
            choice = False
        elif token == "message":
            _read_message(tokens, message.nested_type.add(name=next(tokens)))
        elif token == "enum":
            _read_enum(tokens, message.enum_type.add(name=next(tokens)))
        elif token == "oneof":
            message.oneof_decl.add(name=next(tokens))
            choice = bool(next(tokens))
        else:
            field = message.field.add(label=FieldDescriptorProto.LABEL_OPTIONAL)
            kind = next(tokens) if token == "repeated" else token
            if kind == "map":
                entry = message.nested_type.add()
                entry.options.map_entry = True
                for number, name in enumerate(("key", "value"), 1):
                    next(tokens)
                    one = entry.field.add(name=name, number=number, label=FieldDescriptorProto.LABEL_OPTIONAL)
                    _set_type(one, next(tokens))
                next(tokens)
            field.name = next(tokens)
            next(tokens)
            field.number = int(next(tokens))
            next(tokens)
            if kind == "map":
                kind = entry.name = f"{field.name.title().replace('_', '')}Entry"
            if token in ("map", "repeated"):
                field.label = FieldDescriptorProto.LABEL_REPEATED
            if choice:
                field.oneof_index = len(message.oneof_decl) - 1
            _set_type(field, kind)


def _set_type(field: FieldDescriptorProto, kind: str) -> None:
    if kind in _SCALARS:
        field.type = _SCALARS[kind]
    else:
        field.type_name = kind  # the pool finds out whether it is a message or an enumeration


def _files() -> Iterator[FileDescriptorProto]:
    for path in sorted(_PLACE.glob("*.proto")):
        text = path.read_text(encoding="utf-8")
        yield read_proto(text, f"hps/{path.name}")
        if path.name == "reflection.proto":
            yield read_proto(
                text.replace("package grpc.reflection.v1;", "package grpc.reflection.v1alpha;"), "hps/reflection_v1alpha.proto"
            )


POOL: Final = DescriptorPool()
FILES: Final = {file.name: file for file in _files()}
for _file in FILES.values():
    POOL.AddSerializedFile(_file.SerializeToString())


def message(name: str) -> Any:
    """Return the class of a message, by its full name."""
    return GetMessageClass(POOL.FindMessageTypeByName(name))
