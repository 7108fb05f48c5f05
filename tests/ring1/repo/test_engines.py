"""What keeps the house one that a newcomer finds the way around in: each engine and the environment have one owner."""

import ast
import functools

import pytest

from tests import ROOT

OWNERS = {
    "rocksdict": "hps/stores/rocks_db/",
    "redis": ("hps/stores/redis/", "hps/updates/redis_streams"),
    "hiredis": "hps/stores/redis/",
    "cupy": ("hps/cache/cuda/", "hps/tools/profiling/in_process"),  # a profile makes tensors as its callers do
    "fastapi": "hps/serve/",
    "starlette": "hps/serve/",
    "uvicorn": "hps/serve/",
    "uvloop": "hps/serve/",
    "typer": "hps/tools/cli/",
    "boto3": "hps/filesystems/s3",
    "botocore": "hps/filesystems/s3",
    "azure": "hps/filesystems/azure",
    "hdfs_native": "hps/filesystems/hdfs",
    "google": ("hps/filesystems/gcs", "hps/serve/protocol/grpc_messages", "hps/serve/frontend/grpc_methods"),  # protobuf
    "grpc": "hps/serve/frontend/grpc_server",
    "torch": ("hps/models/formats/torch_", "hps/networks/torch_", "hps/torch/"),
    "onnxruntime": "hps/networks/onnx_",
    "pyarrow": "hps/models/formats/parquet",
    "safetensors": "hps/models/formats/safetensors_",
    "ml_dtypes": "hps/models/formats/safetensors_",
}


@functools.cache
def imports(path):
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            found.add(node.module.split(".")[0])
    return found


@pytest.mark.parametrize("engine", OWNERS)
def test_engine_is_imported_by_its_owner_alone(engine):
    naming = [path for path in (ROOT / "hps").rglob("*.py") if engine in path.read_text()]
    importers = {path.relative_to(ROOT).as_posix() for path in naming if engine in imports(path)}
    assert {name for name in importers if not name.startswith(OWNERS[engine])} == set()


def test_configuration_and_environment_are_read_in_one_place():
    sources = {path.relative_to(ROOT).as_posix(): path.read_text() for path in (ROOT / "hps").rglob("*.py")}
    readers = {path for path, source in sources.items() if "os.environ" in source or "getenv(" in source}
    assert readers <= {"hps/configuration/load.py"}


def test_no_drawer_for_everything():
    names = {path.stem for path in (ROOT / "hps").rglob("*.py")}
    assert not names & {"utils", "util", "helpers", "common", "misc"}
