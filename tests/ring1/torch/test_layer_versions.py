"""A layer of a version answers from that version alone, whatever is deployed beneath it."""

import copy
import gc
import logging
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import hps.torch
from hps import HPS, InvalidInputError, VersionMismatchError
from hps.testing.waiting import wait_until
from hps.torch import BagTable, EmbeddingBag, EmbeddingBagCollection, LookupLayer, convert
from tests.servers.running_service import document_of, model_of

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
DIM, ROWS = 3, 20
KEYS = torch.arange(4)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[HPS]:
    for version in (1, 2, 3):
        hps.write_sparse_model(
            tmp_path / "m" / str(version) / "t", (np.arange(ROWS), np.full((ROWS, DIM), version, np.float32))
        )
    model = model_of("m", ["t"], {"t": DIM}, version_path=str(tmp_path / "m"), gpucacheper=1.0, hit_rate_threshold=1.1)
    with HPS(document_of(model), deploy_models=False) as server:
        server.deploy("m", "1")
        yield server
    hps.torch.close()


def states(server: HPS) -> dict[str, str]:
    return {version.version: version.state for version in server.versions("m")}


def settled(server: HPS) -> dict[str, str]:
    wait_until(lambda: "retiring" not in states(server).values(), "nothing retires")
    return states(server)


def rows(server: HPS, version: str | None, **more: float) -> Callable[[], Tensor]:
    layer = LookupLayer(server, "m", "t", DIM, version=version, **more)
    return lambda: layer(KEYS)[:, 0]


def bags(server: HPS, version: str | None) -> Callable[[], Tensor]:
    layer = EmbeddingBag(server, "m", "t", DIM, version=version, mode="sum")
    return lambda: layer(KEYS.reshape(-1, 1))[:, 0]


def collection(server: HPS, version: str | None) -> Callable[[], Tensor]:
    layer = EmbeddingBagCollection(server, "m", [BagTable("t", ["f"], DIM)], version=version)
    return lambda: layer({"f": KEYS.reshape(-1, 1)})["f"][:, 0]


LAYERS = [rows, bags, collection, lambda server, version: rows(server, version, max_norm=100.0)]


@pytest.mark.parametrize("make", LAYERS, ids=["rows", "bags", "collection", "max_norm"])
def test_a_layer_goes_on_with_its_version_beneath_two_others(
    server: HPS, make: Callable[..., Callable[[], Tensor]], caplog: pytest.LogCaptureFixture
) -> None:
    own, latest, default = make(server, "1"), make(server, "latest"), make(server, None)
    for version in ("2", "3"):
        with caplog.at_level(logging.WARNING):
            caplog.clear()
            server.deploy("m", version)
        assert f"version {version} takes over, but layers of this process still use version 1" in caplog.text
        assert own().tolist() == [1.0] * 4
        assert latest().tolist() == default().tolist() == [float(version)] * 4
    assert settled(server)["1"] == "available"
    server.undeploy("m", "1")
    with pytest.raises(VersionMismatchError, match="of version 1: that is no longer in service; 3 serves"):
        own()
    assert latest().tolist() == [3.0] * 4


def test_a_version_retires_when_its_last_layer_is_gone(server: HPS, caplog: pytest.LogCaptureFixture) -> None:
    first, second = rows(server, "1"), rows(server, "1")
    server.deploy("m", "2")
    del first
    gc.collect()
    server.deploy("m", "3")
    assert settled(server)["1"] == "available"
    assert second().tolist() == [1.0] * 4
    del second
    gc.collect()
    caplog.clear()
    server.deploy("m", "2")
    assert settled(server).get("1") != "available"
    assert "go on with" not in caplog.text


def test_a_layer_of_a_version_that_is_not_deployed_is_refused_when_it_looks_up(server: HPS) -> None:
    layer = rows(server, "2")
    with pytest.raises(VersionMismatchError, match=r"of version 2: .* 1 serves"):
        layer()
    server.deploy("m", "2")
    assert layer().tolist() == [2.0] * 4
    server.undeploy("m")
    with pytest.raises(hps.UnknownModelError):
        layer()
    for wrong in ("two", "", "0", "-1", 1.5):
        with pytest.raises(InvalidInputError, match="expected a number or 'latest'"):
            rows(server, wrong)  # type: ignore[arg-type]
    assert "version='2'" in repr(LookupLayer(server, "m", "t", DIM, version=2))


def test_a_converted_module_does_not_mix_versions_and_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def trained(value: float) -> nn.Module:
        module = nn.Sequential(nn.Embedding(ROWS, DIM), nn.Linear(DIM, 1))
        nn.init.constant_(module[0].weight, value)  # type: ignore[arg-type]
        return module.eval()

    first, second = trained(1.0), trained(2.0)
    with HPS(document_of(model_repository=str(tmp_path))) as server:
        converted = convert(first, server, "m", repository=tmp_path)
        torch.testing.assert_close(converted(KEYS), first(KEYS))
        with caplog.at_level(logging.WARNING):
            again = convert(second, server, "m", repository=tmp_path)
        assert "version 2 takes over, but layers of this process still use version 1" in caplog.text
        torch.testing.assert_close(converted(KEYS), first(KEYS))
        torch.testing.assert_close(again(KEYS), second(KEYS))
        torch.testing.assert_close(copy.deepcopy(again)(KEYS), second(KEYS))
        assert server.pin("m") is None, "nobody chose it by hand"
        del converted
        gc.collect()
        convert(trained(3.0), server, "m", repository=tmp_path)
        assert settled(server).get("1") != "available"
        torch.testing.assert_close(again(KEYS), second(KEYS))


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_module_is_converted_to_the_serving_a_given_or_the_latest_version(server: HPS, device: str) -> None:
    def layer(version: str | int | None) -> nn.Module:
        return convert(nn.ModuleDict({"t": nn.Embedding(ROWS, DIM, device=device)}), server, "m", version=version)["t"]  # type: ignore[index]

    serving, latest = layer(None), layer("latest")
    for version in ("2", "3"):
        server.deploy("m", version)
        assert serving(KEYS)[:, 0].tolist() == layer(1)(KEYS)[:, 0].tolist() == [1.0] * 4
        assert latest(KEYS)[:, 0].tolist() == layer(None)(KEYS)[:, 0].tolist() == [float(version)] * 4
    server.undeploy("m", "1")
    for _ in range(2):
        with pytest.raises(VersionMismatchError, match="of version 1"):
            serving(KEYS)
    with pytest.raises(hps.UnknownVersionError):
        layer(1)
    with pytest.raises(InvalidInputError, match="expected a number or 'latest'"):
        layer("first")
    assert latest(KEYS)[:, 0].tolist() == [3.0] * 4
