"""A cache on the CPU whose device has little memory, or breaks; it raises what the CUDA cache raises then."""

from collections.abc import Sequence
from typing import Any, ClassVar

from hps.cache.base import ALONE, DeviceSharing
from hps.cache.cpu.cache import NumpyCache, NumpyLookup
from hps.errors import DeviceError, DeviceMemoryError
from hps.types import TableSpec


def _checked(base: type, name: str) -> Any:
    """The method of a base class, which fails while the device is lost."""

    def call(self: Any, *arguments: Any) -> Any:
        if FullDevice.broken:
            raise DeviceError(f"{name} of the embedding cache of CUDA device 0: an illegal memory access was encountered")
        return getattr(base, name)(self, *arguments)

    return call


class FullDevice(NumpyCache):
    """Caches that share a device.

    Attributes:
        free_rows: of all caches together, closed ones included.
        broken: the device is lost: every call fails from now on.
    """

    free_rows: ClassVar[int] = 1 << 40
    broken: ClassVar[bool] = False

    @property
    def failure(self) -> str | None:
        return "an illegal memory access was encountered" if FullDevice.broken else None

    @classmethod
    def create(
        cls,
        tables: Sequence[TableSpec],
        capacity_rows: Sequence[int],
        device_id: int,
        static: bool = False,
        sharing: DeviceSharing = ALONE,
    ) -> "FullDevice":
        if sum(capacity_rows) > cls.free_rows:
            raise DeviceMemoryError(
                f"allocating the embedding cache of model {tables[0].model_name!r}: got {sum(capacity_rows)} rows, expected at "
                f"most the {cls.free_rows} that are free on CUDA device {device_id}; lower gpucacheper"
            )
        cls.free_rows -= sum(capacity_rows)
        return super().create(tables, capacity_rows, device_id, static)

    def create_lookup(self) -> NumpyLookup:
        return _Lookup(self)

    insert, update, erase, dump, stats, device_memory = (
        _checked(NumpyCache, name) for name in ("insert", "update", "erase", "dump", "stats", "device_memory")
    )


class _Lookup(NumpyLookup):
    query = _checked(NumpyLookup, "query")
