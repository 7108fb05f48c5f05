"""How many files a reader opens who follows a message of the update log from its feed to the caches."""

import sys
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest

import hps
from hps.cache.cpu.cache import NumpyCache
from hps.stores.hash_map.database import HashMapDatabase
from tests.ring1.repo.test_lookup_path import PACKAGE
from tests.ring1.versions.test_live_updates import KEYS, Log, Make, caught_up, check
from tests.ring1.versions.test_live_updates import document as document  # fixtures
from tests.ring1.versions.test_live_updates import log as log

MOST_FILES = 8


def test_a_message_crosses_few_files(document: Make, log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    found: set[str] = set()

    def noting(owner: Any, name: str) -> None:
        function = getattr(owner, name)

        def call(*arguments: Any, **named: Any) -> Any:
            frame: FrameType | None = sys._getframe(1)
            while frame is not None:
                if (path := Path(frame.f_code.co_filename)).is_relative_to(PACKAGE):
                    found.add(path.relative_to(PACKAGE).as_posix())
                frame = frame.f_back
            found.add(Path(sys.modules[function.__module__].__file__ or "").relative_to(PACKAGE).as_posix())
            return function(*arguments, **named)

        monkeypatch.setattr(owner, name, call)

    with hps.HPS(document("hash_map", updates=None)) as server:
        for owner, name in ((NumpyCache, "update"), (NumpyCache, "erase"), (HashMapDatabase, "apply")):
            noting(owner, name)
        caught_up(server, log.publish(1, deleted=KEYS[:4]))
        check(server, lambda keys: np.where(keys <= 4, -1, keys % 2))
    found = {path for path in found if not path.startswith("ground/threads/")}  # what runs the feed
    assert {"updates/feed.py", "versions/deployment.py", "engine/chain.py", "cache/cpu/cache.py"} <= found, sorted(found)
    assert len(found) <= MOST_FILES, sorted(found)
