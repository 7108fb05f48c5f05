"""A hierarchical parameter server for recommender inference.

    import hps

    with hps.HPS("configs/in_process.json") as server:
        vectors = server.lookup([17, 42], "sample", "item")  # (2, dim) float32

Names are imported on first use: `import hps` does no work and needs no GPU, Redis or boto3.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from hps import errors
from hps.ground.version import __version__ as __version__

if TYPE_CHECKING:
    from hps.client.async_client import AsyncClient as AsyncClient
    from hps.client.async_client import connect_async as connect_async
    from hps.client.client import Client as Client
    from hps.client.client import connect as connect
    from hps.configuration.hugectr_structs import DatabaseOverflowPolicy_t as DatabaseOverflowPolicy_t
    from hps.configuration.hugectr_structs import DatabaseType_t as DatabaseType_t
    from hps.configuration.hugectr_structs import EmbeddingCacheType_t as EmbeddingCacheType_t
    from hps.configuration.hugectr_structs import InferenceParams as InferenceParams
    from hps.configuration.hugectr_structs import ParameterServerConfig as ParameterServerConfig
    from hps.configuration.hugectr_structs import PersistentDatabaseParams as PersistentDatabaseParams
    from hps.configuration.hugectr_structs import UpdateSourceParams as UpdateSourceParams
    from hps.configuration.hugectr_structs import UpdateSourceType_t as UpdateSourceType_t
    from hps.configuration.hugectr_structs import VolatileDatabaseParams as VolatileDatabaseParams
    from hps.configuration.load import Configuration as Configuration
    from hps.configuration.load import load_configuration as load_configuration
    from hps.errors import *  # noqa: F403
    from hps.models.files import open_sparse_model as open_sparse_model
    from hps.models.writer import write_sparse_model as write_sparse_model
    from hps.models.writer import write_version as write_version
    from hps.parameter_server import HPS as HPS
    from hps.statistics.snapshot import DeviceStatistics as DeviceStatistics
    from hps.statistics.snapshot import Latency as Latency
    from hps.statistics.snapshot import ModelStatistics as ModelStatistics
    from hps.statistics.snapshot import ServerStatistics as ServerStatistics
    from hps.statistics.snapshot import TableStatistics as TableStatistics
    from hps.statistics.snapshot import TierStatistics as TierStatistics
    from hps.tensors.bags import Bags as Bags
    from hps.tensors.strings import Strings as Strings
    from hps.types import Scores as Scores
    from hps.updates.publisher import Publisher as Publisher
    from hps.updates.publisher import open_publisher as open_publisher
    from hps.versions.fixed_lookups import CapturedLookup as CapturedLookup
    from hps.versions.fixed_lookups import PreparedLookup as PreparedLookup

_STATISTICS = (
    "ServerStatistics",
    "ModelStatistics",
    "TableStatistics",
    "TierStatistics",
    "DeviceStatistics",
    "Latency",
)
_HOME = {
    "HPS": "hps.parameter_server",
    "Bags": "hps.tensors.bags",
    "Scores": "hps.types",
    "Strings": "hps.tensors.strings",
    "connect": "hps.client.client",
    "Client": "hps.client.client",
    "connect_async": "hps.client.async_client",
    "AsyncClient": "hps.client.async_client",
    "CapturedLookup": "hps.versions.fixed_lookups",
    "PreparedLookup": "hps.versions.fixed_lookups",
    "Configuration": "hps.configuration.load",
    "load_configuration": "hps.configuration.load",
    "InferenceParams": "hps.configuration.hugectr_structs",
    "ParameterServerConfig": "hps.configuration.hugectr_structs",
    "VolatileDatabaseParams": "hps.configuration.hugectr_structs",
    "PersistentDatabaseParams": "hps.configuration.hugectr_structs",
    "UpdateSourceParams": "hps.configuration.hugectr_structs",
    "DatabaseType_t": "hps.configuration.hugectr_structs",
    "DatabaseOverflowPolicy_t": "hps.configuration.hugectr_structs",
    "UpdateSourceType_t": "hps.configuration.hugectr_structs",
    "EmbeddingCacheType_t": "hps.configuration.hugectr_structs",
    "open_sparse_model": "hps.models.files",
    "write_sparse_model": "hps.models.writer",
    "write_version": "hps.models.writer",
    "Publisher": "hps.updates.publisher",
    "open_publisher": "hps.updates.publisher",
    **dict.fromkeys(_STATISTICS, "hps.statistics.snapshot"),
    **{name: "hps.errors" for name in vars(errors) if name.endswith("Error")},
}
__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name in _HOME:
        value = globals()[name] = getattr(import_module(_HOME[name]), name)
        return value
    raise AttributeError(f"module 'hps' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
