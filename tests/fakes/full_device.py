"""A cache on the CPU whose device has little memory, or breaks; it raises what the CUDA cache raises then."""

from collections.abc import Sequence
from typing import ClassVar

from hps.cache.base import ALONE, DeviceSharing
from hps.cache.cpu.cache import NumpyCache, NumpyLookup
from hps.errors import DeviceError, DeviceMemoryError
from hps.types import TableSpec


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

    def insert(self, table, keys, rows):
        _check("inserting into")
        super().insert(table, keys, rows)

    def update(self, table, keys, rows):
        _check("updating")
        super().update(table, keys, rows)

    def erase(self, table, keys):
        _check("erasing from")
        super().erase(table, keys)

    def dump(self, table):
        _check("dumping")
        return super().dump(table)

    def stats(self, table):
        _check("reading counters of")
        return super().stats(table)

    def device_memory(self):
        _check("asking for the memory of")
        return super().device_memory()


class _Lookup(NumpyLookup):
    def query(self, segments):
        _check("querying")
        return super().query(segments)


def _check(doing: str) -> None:
    if FullDevice.broken:
        raise DeviceError(f"{doing} the embedding cache of CUDA device 0: an illegal memory access was encountered")
