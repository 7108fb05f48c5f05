"""What a frontend makes of the engine's snapshot when it cannot import what the engine can."""

import os
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import pytest

from hps.errors import NotReadyError
from hps.regions import layout
from hps.regions.layout import Memory
from hps.serve.frontend.published import LookupTarget, Published
from hps.serve.logs.requests import Served
from hps.serve.protocol.schemas import INFER
from hps.testing.waiting import wait_until
from hps.types import TableSpec

GONE = {"function": "tests.fakes.nothing:f", "inputs": {"city": "bytes"}}
ROLLOUT = {"id": "x", "serving": "1", "version": "2", "queue_requests": 1, "queue_bytes": 1, "header": "", "share": 1.0}


@pytest.fixture
def memory() -> Iterator[Memory]:
    descriptor = os.memfd_create("snapshot")
    os.ftruncate(descriptor, layout.MOST_SNAPSHOT_BYTES)
    yield Memory(descriptor)
    os.close(descriptor)


def version(transform: Any = None) -> dict[str, Any]:
    table = asdict(TableSpec("m", "item", 4, 0.0, 100))
    common = {"tables": [table], "keys_per_sample": 1, "network": None, "lost": []}
    return {"deployment_ids": [[0, 1]], "transform": transform, **common}


def read(memory: Memory, serving: str, transform: Any = GONE, **more: Any) -> Published:
    models = {"m": {"1": version(), "2": version(transform)}, "other": {"1": version()}}
    snapshot = {"serving": {"m": serving, "other": "1"}, "reasons": {}, "blocked": "", "models": models, "rollouts": {}, **more}
    layout.write_text(memory, 0, snapshot, layout.MOST_SNAPSHOT_BYTES - layout.TEXT_AT)
    published = Published(memory, lambda snapshot: None)
    published.poll()
    assert published.version_of(LookupTarget(INFER, "other", None)).tables.version == "1"
    return published


def test_a_version_whose_transform_cannot_be_imported_is_not_ready(memory: Memory) -> None:
    published = read(memory, "2")
    transform = published.version_of(LookupTarget(INFER, "m", None)).tables.transform
    assert transform is not None
    for _ in range(2):
        with pytest.raises(NotReadyError, match=r"(?s)model 'm': transform 'tests\.fakes\.nothing:f'.*No module"):
            transform({})
    wait_until(lambda: not published.unready_reason(), "the import has ended")
    assert published.version_of(LookupTarget(INFER, "m", "1")).ready


def test_a_version_whose_package_this_process_lacks_is_not_ready(memory: Memory) -> None:
    published = read(memory, "2", {**GONE, "function": "nothing"})
    with pytest.raises(NotReadyError, match=r"(?s)model 'm' is not ready: .*function"):
        published.version_of(LookupTarget(INFER, "m", None))
    assert published.version_of(LookupTarget(INFER, "m", "1")).tables.version == "1"


@pytest.mark.parametrize("function", ["tests.fakes.nothing:f", "nothing"])
def test_its_canary_is_left_to_the_serving_version(memory: Memory, function: str) -> None:
    rollouts = {"m": {**ROLLOUT, "mode": "canary", "compare": False}}
    published = read(memory, "1", {**GONE, "function": function}, rollouts=rollouts)
    served = Served()
    served.id = b"id"
    for _ in range(2):
        assert published.version_of(LookupTarget(INFER, "m", None), served).tables.version == "1"
        wait_until(lambda: not published.importing(), "the import has ended")
