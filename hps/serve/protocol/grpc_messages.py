"""The messages and services of gRPC: `protos/services.binpb`, which `make protos` compiles from the `.proto` files beside it.

They are in a separate pool: clients' libraries register other files with the same names in the global pool.
"""

from pathlib import Path
from typing import Any, Final

from google.protobuf.descriptor_pb2 import FileDescriptorSet
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass

COMPILED: Final = Path(__file__).with_name("protos") / "services.binpb"
FILES: Final = {file.name: file for file in FileDescriptorSet.FromString(COMPILED.read_bytes()).file}
POOL: Final = DescriptorPool()
for _file in FILES.values():
    POOL.AddSerializedFile(_file.SerializeToString())


def message(name: str) -> Any:
    """Return the class of a message, by its full name."""
    return GetMessageClass(POOL.FindMessageTypeByName(name))
