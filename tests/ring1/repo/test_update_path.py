"""How many files of the package a reader opens who follows an update from its log to the caches."""

import sys
import threading
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest

import hps
from hps.configuration.load import UpdateSourceConfig
from hps.registry import IMPLEMENTATIONS, Ours
from hps.testing.waiting import wait_until
from hps.updates.publisher import Publisher, open_writer
from tests.ring1.repo.test_lookup_path import CHANGES, DIM, PACKAGE, files
from tests.servers.running_service import document_of, model_of

__all__ = ["files"]
MOST_FILES = 9  # and the one that reads Kafka, in place of which a log in memory is read here
KEYS = np.arange(10)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_an_update_crosses_few_files_on_its_way_to_the_cache(device: str, files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for part in ("update_log", "update_log_writer"):
        name = "MemoryLog" if part == "update_log" else "MemoryLogWriter"
        monkeypatch.setitem(IMPLEMENTATIONS[part], "memory", Ours(f"tests.fakes.memory_log:{name}"))
    source = {"type": "memory", "brokers": "update-path", "poll_timeout_ms": 20}
    publisher = Publisher(open_writer(UpdateSourceConfig(**source)), "hps_et.m.t", dim=DIM, create_partitions=1, owned=True)
    crossed: set[str] = set()

    def note(frame: FrameType, event: str, _argument: Any) -> None:
        """Note the files on the stack wherever messages are decoded, and wherever the cache is changed or changes something."""
        if event != "call" or frame.f_code.co_name not in ("decode", "update", "changing"):
            return
        place: FrameType | None = frame
        while place is not None:
            if (path := Path(place.f_code.co_filename)).is_relative_to(PACKAGE):
                crossed.add(path.relative_to(PACKAGE).as_posix())
            place = place.f_back

    threading.setprofile(note)
    try:
        model = model_of("m", [files], {"t": DIM}, cache_refresh_percentage_per_iteration=1.0, **CHANGES)
        with hps.HPS(document_of(model, device=device, update_source=source)) as server:
            threading.setprofile(None)
            keys = server.model("m").caches[0].dump(0)[: KEYS.size]
            publisher.insert(keys, np.ones((keys.size, DIM), np.float32))
            publisher.flush()
            wait_until(lambda: bool((server.lookup(keys, "m", 0) == 1).all()), "the update to be applied")
    finally:
        threading.setprofile(None)
        sys.setprofile(None)
        publisher.close()
    assert {"updates/feed.py", "updates/framing.py", "versions/deployment.py"} <= crossed
    assert any(path.startswith("cache/") for path in crossed)
    assert len(crossed) <= MOST_FILES, sorted(crossed)
