"""How the devices of a model share its rows, and how many rows they have room for."""

from collections.abc import Callable
from typing import Any, ClassVar

import pytest

from hps.cache.base import ALONE, NEAR_SHARE, DeviceSharing
from hps.cache.cpu.cache import NumpyCache
from hps.configuration.load import ModelConfig, load_configuration
from hps.errors import CapacityError
from hps.models.sources import ModelSources
from hps.registry import IMPLEMENTATIONS, Ours
from hps.types import CheckResult
from hps.versions.deployment import cache_capacities, device_sharing, usable_sharing
from hps.versions.preflight import preflight
from tests.servers.running_service import document_of, model_of

ROWS = [100_000, 30]
REASON = "CUDA device 0 cannot access the memory of device 1"


class Apart(NumpyCache):
    """A cache of devices that reach each other or do not; it notes what room is asked for."""

    device = "cuda"
    reason: ClassVar[str | None] = None
    asked: ClassVar[list[tuple[int, list[int], DeviceSharing]]] = []

    @classmethod
    def reason_against_sharing(cls, device_ids: Any) -> str | None:
        return cls.reason

    @classmethod
    def check_room(cls, tables, capacity_rows, device_id, static=False, index_bytes=(), sharing=ALONE) -> None:
        cls.asked.append((device_id, list(capacity_rows), sharing))


@pytest.fixture(autouse=True)
def nothing_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Apart, "asked", [])
    monkeypatch.setattr(Apart, "reason", None)


def config(sharing: str, devices: int = 2, **changes: Any) -> ModelConfig:
    settings = {"gpucacheper": 0.2, "deployed_device_list": list(range(devices)), "device_sharing": sharing, **changes}
    [model] = load_configuration(document_of(model_of("m", ["a", "b"], {"a": 8, "b": 4}, **settings), device="cuda")).models
    return model


def shared(model: ModelConfig) -> tuple[DeviceSharing, list[int]]:
    sharing = device_sharing(model, ROWS)
    return sharing, cache_capacities(model, ROWS, sharing)


@pytest.mark.parametrize("devices", [2, 3])
@pytest.mark.parametrize(("kind", "near"), [("partition", ()), ("hot", (int(NEAR_SHARE * 20_000), 0))])
def test_devices_have_room_for_the_own_rows_of_each(kind: str, near: tuple[int, ...], devices: int) -> None:
    sharing, capacities = shared(config(kind, devices))
    assert sharing == DeviceSharing(tuple(range(devices)), near)
    assert capacities == [devices * (20_000 - sum(near)), devices * 6]
    assert shared(config(kind, devices, gpucacheper=1.0))[1] == ROWS, "there are no more"
    assert shared(config(kind, 3, gpucacheper=0.5))[1] == ROWS


def test_a_static_table_is_cached_once() -> None:
    sharing, capacities = shared(config("partition", 3, embedding_cache_type="static"))
    assert sharing.device_ids == (0, 1, 2)
    assert capacities == cache_capacities(config("replicate", 3, embedding_cache_type="static"), ROWS)
    assert capacities == [117_648, 36]  # of which 85 % are used


@pytest.mark.parametrize(
    "model", [config("replicate"), config("hot", 1), config("partition", 1), config("hot", gpucache=False)], ids=range(4)
)
def test_others_share_nothing(model: ModelConfig) -> None:
    assert shared(model) == (ALONE, [20_000, 6] if model.gpucache else [0, 0])


def test_devices_that_cannot_reach_each_other_cache_by_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    assert usable_sharing(config("hot"), Apart, ROWS) == (device_sharing(config("hot"), ROWS), None)
    monkeypatch.setattr(Apart, "reason", REASON)
    assert usable_sharing(config("hot"), Apart, ROWS) == (ALONE, REASON)
    assert usable_sharing(config("replicate"), Apart, ROWS) == (ALONE, None)
    assert usable_sharing(config("hot"), NumpyCache, ROWS) == (ALONE, None)


@pytest.fixture
def checked(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], list[CheckResult]]:
    """What a check of the machine finds about devices."""
    monkeypatch.setitem(IMPLEMENTATIONS["cache"], "cuda", Ours(f"{__name__}:Apart"))

    def check(sharing: str) -> list[CheckResult]:
        model = config(sharing)
        configuration = load_configuration(document_of(model.model_dump(), device="cuda"))
        tables = {table: (rows, 0) for table, rows in zip(model.tables, ROWS, strict=True)}
        found = preflight(configuration, tables, ModelSources(configuration.model_source), 5)
        return [one for one in found if "dev" in one.where]

    return check


Check = Callable[[str], list[CheckResult]]


def test_a_check_of_the_machine_asks_each_device_for_its_part(checked: Check) -> None:
    [found] = checked("hot")
    assert (found.level, found.where) == ("good", "device")
    sharing, capacities = shared(config("hot"))
    assert Apart.asked == [(device, capacities, sharing) for device in (0, 1)]


def test_a_check_of_the_machine_warns_of_devices_that_share_nothing(checked: Check, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Apart, "reason", REASON)
    [found] = checked("partition")
    assert (found.level, found.where) == ("warning", "models[0].device_sharing")
    assert "device_sharing partition is impossible here" in found.text
    assert REASON in found.text
    assert Apart.asked == [(device, [20_000, 6], ALONE) for device in (0, 1)]


def test_a_check_of_the_machine_finds_parts_that_do_not_fit(checked: Check, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise CapacityError("too large")

    monkeypatch.setattr(Apart, "check_room", refuse)
    expected = ("wrong", "models[0].deployed_device_list", "too large")
    assert [(one.level, one.where, one.text) for one in checked("hot")] == [expected] * 2
