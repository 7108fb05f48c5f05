"""Invariants of versions and tiers that are broken on purpose are found, and every check has an end."""

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

import hps
from hps.versions.fleet import Fleet
from hps.versions.integrity import check_tiers
from hps.versions.kept_files import KeptFiles
from hps.versions.live_models import LiveModels
from hps.versions.pins import Pins
from tests.fakes.fake_deployment import fake
from tests.ring1.versions.test_fleet import document


def test_states_that_contradict_each_other_are_found() -> None:
    live = LiveModels({"m": fake("1")})
    assert live.check_integrity() == []
    served = live.serving["m"]
    live.serving = {"m": fake("2"), "n": fake("1")}
    assert [finding.partition(":")[0] for finding in live.check_integrity()] == [
        "model 'n' serves, but has no versions",
        "model 'm'",
    ]
    live.serving = {"m": served}
    [version] = live._models["m"].versions
    live._models["m"].versions = [version, version]
    assert {"a deployment has two states", "a version is in service twice: ['1', '1']"} <= {
        finding.partition(": ")[2] for finding in live.check_integrity()
    }


def test_a_pin_that_a_restart_would_not_find_is_found(tmp_path: Path) -> None:
    pins = Pins(KeptFiles(tmp_path, "hps-pins"))
    pins.pin("m", "2", "deploy")
    pins.end("n")
    assert pins.check_integrity() == []
    for path in (tmp_path / "hps-pins").iterdir():
        path.unlink()
    assert "a restart would find None" in pins.check_integrity()[0]


def test_a_document_that_withdraws_what_it_serves_is_found() -> None:
    fleet = Fleet(cast(Any, None))
    fleet._adopt("m", document("2", "", ("2",)), "a", None)
    assert "withdraws what it serves" in fleet.check_integrity()[0]


class Part:
    """A cache or database, with what it finds."""

    kind = device_name = "part"

    def __init__(self, found: list[str] | hps.HPSError, wait: threading.Event | None = None) -> None:
        self._found, self._wait = found, wait

    def check_integrity(self) -> list[str]:
        if self._wait is not None:
            self._wait.wait()
        if isinstance(self._found, hps.HPSError):
            raise self._found
        return self._found


@pytest.mark.parametrize(
    ("part", "expected"),
    [
        (Part([]), []),
        (Part(["a key is there twice"]), ["a key is there twice"]),
        (Part(hps.DeviceError("it is lost")), ["it cannot be checked: it is lost"]),
    ],
)
def test_findings_of_tiers_are_collected(part: Any, expected: list[str]) -> None:
    chain, config = SimpleNamespace(databases=[Part([])]), SimpleNamespace(model="m")
    version = SimpleNamespace(version="1", config=config, device_caches=[part], chain=chain)
    live: Any = SimpleNamespace(all=lambda: [version])
    assert [finding.partition("part: ")[2] for finding in check_tiers(live, 60.0)] == expected
    assert check_tiers(live, 60.0, {"more": Part(["it leaks"])})[0] == "more: it leaks"


def test_a_check_that_does_not_end_is_abandoned() -> None:
    ended = threading.Event()
    chain, config = SimpleNamespace(databases=[Part([], ended), Part(["wrong"])]), SimpleNamespace(model="m")
    live: Any = SimpleNamespace(all=lambda: [SimpleNamespace(version="1", config=config, device_caches=[], chain=chain)])
    try:
        found = check_tiers(live, 0.0)
    finally:
        ended.set()
    assert "part: it was not checked within 0 s" in found
