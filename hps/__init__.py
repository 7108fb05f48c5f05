"""A hierarchical parameter server for recommender inference.

    import hps

    with hps.HPS("configs/minimal.json") as server:
        vectors = server.lookup([17, 42], "sample", "item")  # (2, dim) float32

Names are imported on first use: `import hps` does no work and needs no GPU, Redis or boto3.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hps.config import Configuration as Configuration
    from hps.config import load_configuration as load_configuration
    from hps.errors import *  # noqa: F403
    from hps.inference_params import DatabaseOverflowPolicy_t as DatabaseOverflowPolicy_t
    from hps.inference_params import DatabaseType_t as DatabaseType_t
    from hps.inference_params import EmbeddingCacheType_t as EmbeddingCacheType_t
    from hps.inference_params import InferenceParams as InferenceParams
    from hps.inference_params import ParameterServerConfig as ParameterServerConfig
    from hps.inference_params import PersistentDatabaseParams as PersistentDatabaseParams
    from hps.inference_params import UpdateSourceParams as UpdateSourceParams
    from hps.inference_params import UpdateSourceType_t as UpdateSourceType_t
    from hps.inference_params import VolatileDatabaseParams as VolatileDatabaseParams
    from hps.model_files import open_sparse_model as open_sparse_model
    from hps.model_writer import write_sparse_model as write_sparse_model
    from hps.parameter_server import HPS as HPS

_ERRORS = (
    "HPSError",
    "ConfigError",
    "MissingDependencyError",
    "ModelFileError",
    "ModelFileNotFoundError",
    "ModelFileChangedError",
    "ModelSourceError",
    "InvalidInputError",
    "InvalidDtypeError",
    "TooManyKeysError",
    "UnknownModelError",
    "UnknownTableError",
    "UnknownDeviceError",
    "NotReadyError",
    "WorkspaceTimeoutError",
    "DatabaseError",
    "DatabaseTimeoutError",
    "DatabaseLockedError",
    "DatabaseCorruptError",
    "TableWidthError",
    "DeviceError",
    "DeviceMemoryError",
)
_HOME = {
    "HPS": "hps.parameter_server",
    "Configuration": "hps.config",
    "load_configuration": "hps.config",
    "InferenceParams": "hps.inference_params",
    "ParameterServerConfig": "hps.inference_params",
    "VolatileDatabaseParams": "hps.inference_params",
    "PersistentDatabaseParams": "hps.inference_params",
    "UpdateSourceParams": "hps.inference_params",
    "DatabaseType_t": "hps.inference_params",
    "DatabaseOverflowPolicy_t": "hps.inference_params",
    "UpdateSourceType_t": "hps.inference_params",
    "EmbeddingCacheType_t": "hps.inference_params",
    "open_sparse_model": "hps.model_files",
    "write_sparse_model": "hps.model_writer",
    **dict.fromkeys(_ERRORS, "hps.errors"),
}
__version__ = "0.1.0"
__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name in _HOME:
        value = globals()[name] = getattr(import_module(_HOME[name]), name)
        return value
    raise AttributeError(f"module 'hps' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
