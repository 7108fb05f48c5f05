"""One cache a device, on a host with several."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import hps
from hps.errors import InvalidInputError
from hps.tensors.batch import Batch
from hps.testing.caches import bits, distinct_keys, spec, vectors_of
from tests.gpu.cupy_if_installed import CupyCache, cupy
from tests.servers.running_service import document_of, model_of

pytestmark = pytest.mark.gpu


@pytest.fixture
def caches() -> Iterator[list[Any]]:
    if cupy.cuda.runtime.getDeviceCount() < 2:
        pytest.skip("needs two GPUs")
    made = [CupyCache.create([spec(16)], [4000], device) for device in range(2)]
    yield made
    for cache in made:
        cache.close()


def test_calls_leave_the_current_device_alone(caches: list[Any]):
    keys = distinct_keys(10)
    for current in range(2):
        with cupy.cuda.Device(current):
            for cache in caches:
                cache.insert(0, keys, vectors_of(keys, 16))
                lookup, out = cache.create_lookup(), np.empty((10, 16), np.float32)
                assert lookup.query(Batch.of(0, keys, out)) == 0
                lookup.finish()
                np.testing.assert_array_equal(bits(out), bits(vectors_of(keys, 16)))
                assert cupy.cuda.runtime.getDevice() == current


def test_tensors_of_another_device_are_refused(caches: list[Any]):
    with cupy.cuda.Device(1):
        keys, out = cupy.zeros(10, cupy.int64), cupy.zeros((10, 16), cupy.float32)
    with pytest.raises(InvalidInputError, match="on CUDA device 1, expected one on CUDA device 0"):
        caches[0].create_lookup().query(Batch.of(0, keys, out))


def lookups_by_device(server: hps.HPS) -> dict[str, float]:
    families = server.metrics.registry.collect()
    samples = [sample for family in families for sample in family.samples if sample.name == "hps_device_lookups_total"]
    return {sample.labels["device"]: sample.value for sample in samples}


def test_server_has_a_cache_on_every_deployed_device(caches: list[Any], tmp_path):
    torch = pytest.importorskip("torch")
    keys = np.arange(3000)
    hps.write_sparse_model(tmp_path / "t.model", (keys, vectors_of(keys, 16)))
    changes = {"deployed_device_list": [0, 1], "max_batch_size": 3000, "gpucacheper": 0.5, "hit_rate_threshold": 1.1}
    model = model_of("m", [tmp_path / "t.model"], {"t": 16}, cache_refresh_percentage_per_iteration=0.2, **changes)
    config = document_of(model, device="cuda", persistent_db={"type": "disabled"})
    with hps.HPS(config) as server:
        assert [cache.device_id for cache in server.model("m").caches] == [0, 1]
        assert all(cache.stats(0).resident_rows > 1000 for cache in server.model("m").caches)
        for device in (0, 1, 0, 1):
            out = torch.full((3000, 16), torch.nan, device=f"cuda:{device}")
            server.lookup_fromdlpack(torch.from_numpy(keys).to(f"cuda:{device}"), out, "m", 0, device)
            np.testing.assert_array_equal(bits(out.cpu().numpy()), bits(vectors_of(keys, 16)))
        server.insert([7], np.full((1, 16), 2.5, np.float32), "m", 0)
        for device in (0, 1):
            assert (server.lookup([7], "m", 0, device) == 2.5).all()
        before = lookups_by_device(server)
        for device in (0, 1, 1, 1):
            out = torch.full((3000, 16), torch.nan, device=f"cuda:{device}")
            server.lookup_concatenated(torch.from_numpy(keys).to(f"cuda:{device}"), [3000], out, "m")
            np.testing.assert_array_equal(bits(out.cpu().numpy())[8:], bits(vectors_of(keys, 16))[8:])
        for _ in range(10):
            np.testing.assert_array_equal(server.lookup_tables({"t": keys[8:]}, "m")["t"], vectors_of(keys[8:], 16))
        asked = {device: count - before[device] for device, count in lookups_by_device(server).items()}
        assert asked == {"0": 6, "1": 8}
        elsewhere = torch.zeros(1, dtype=torch.int64, device="cuda:1")
        with pytest.raises(InvalidInputError):
            server.lookup_fromdlpack(elsewhere, torch.zeros(1, 16, device="cuda:1"), "m", 0, 0)
