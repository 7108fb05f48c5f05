"""A cache on the CPU whose device has little memory, or breaks; it raises what the CUDA cache raises then."""

from collections.abc import Sequence
from typing import ClassVar

from hps.cache.cpu.cache import NumpyCache, NumpyLookup
from hps.errors import DeviceError, DeviceMemoryError
from hps.types import TableSpec


class FullDevice(NumpyCache):
    """Caches that share a device.

    Attributes:
        free_rows: of all caches together, closed ones included.
        broken: every query fails from now on.
    """

    free_rows: ClassVar[int] = 1 << 40
    broken: ClassVar[bool] = False

    @classmethod
    def create(
        cls, tables: Sequence[TableSpec], capacity_rows: Sequence[int], device_id: int, static: bool = False
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


class _Lookup(NumpyLookup):
    def query(self, segments):
        if FullDevice.broken:
            raise DeviceError("querying the embedding cache of CUDA device 0: an illegal memory access was encountered")
        return super().query(segments)
