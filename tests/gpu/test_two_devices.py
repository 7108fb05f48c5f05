"""One cache a device, on a host with several."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from hps.cache.base import Segment
from hps.errors import InvalidInputError
from tests.contracts.cache_contract import bits, distinct_keys, spec, vectors_of

pytestmark = pytest.mark.gpu


@pytest.fixture
def caches() -> Iterator[list[Any]]:
    import cupy

    from hps.cache.cupy_cache import CupyCache

    if cupy.cuda.runtime.getDeviceCount() < 2:
        pytest.skip("needs two GPUs")
    made = [CupyCache.create([spec(16)], [4000], device) for device in range(2)]
    yield made
    for cache in made:
        cache.close()


def test_each_device_answers_from_its_own_cache(caches: list[Any]):
    import cupy

    keys = distinct_keys(1000)
    for device, cache in enumerate(caches):
        cache.insert(0, keys, vectors_of(keys, 16, device))

    def ask(device: int) -> np.ndarray:
        cache = caches[device]
        workspace = cache.create_workspace()
        with cupy.cuda.Device(device):
            for _ in range(50):
                out = cupy.full((1000, 16), cupy.nan, cupy.float32)
                segments = cache.adopt(workspace, [Segment(0, cupy.asarray(keys), out)])
                missed = cache.query(workspace, segments).count
                cache.finish(workspace, segments)
                assert missed < 10
            return out.get()

    with ThreadPoolExecutor(2) as pool:
        for device, out in enumerate(pool.map(ask, range(2))):
            resident = np.isin(keys, caches[device].dump(0))
            np.testing.assert_array_equal(bits(out[resident]), bits(vectors_of(keys, 16, device)[resident]))


def test_calls_leave_the_current_device_alone(caches: list[Any]):
    import cupy

    keys = distinct_keys(10)
    for current in range(2):
        with cupy.cuda.Device(current):
            for cache in caches:
                cache.insert(0, keys, vectors_of(keys, 16))
                workspace = cache.create_workspace()
                out = np.empty((10, 16), np.float32)
                segments = cache.adopt(workspace, [Segment(0, keys, out)])
                assert cache.query(workspace, segments).count == 0
                cache.finish(workspace, segments)
                np.testing.assert_array_equal(bits(out), bits(vectors_of(keys, 16)))
                assert cupy.cuda.runtime.getDevice() == current


def test_tensors_of_another_device_are_refused(caches: list[Any]):
    import cupy

    with cupy.cuda.Device(1):
        keys, out = cupy.zeros(10, cupy.int64), cupy.zeros((10, 16), cupy.float32)
    workspace = caches[0].create_workspace()
    with pytest.raises(InvalidInputError, match="on CUDA device 0"):
        caches[0].adopt(workspace, [Segment(0, keys, out)])
