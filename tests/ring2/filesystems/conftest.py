"""What the tests of failing object stores share; each module gives `server`, a server of one of them."""

import functools
from collections.abc import Iterator
from typing import Any

import pytest

from hps.testing.filesystems import noise
from tests.servers.misbehaving_proxy import MisbehavingProxy
from tests.tables.object_store_faults import HASTY, SIZE, store_at


@pytest.fixture
def root(server: Any) -> str:
    """The URI of a directory in a new bucket."""
    return f"{server.scheme}://{server.new_bucket()}/models"


@pytest.fixture
def file(server: Any, root: str) -> str:
    """An object of SIZE bytes of noise."""
    server.put(f"{root}/item/key", noise(SIZE))
    return f"{root}/item/key"


@functools.cache
def proxy_to(port: int) -> MisbehavingProxy:
    return MisbehavingProxy(port)


@pytest.fixture
def proxy(server: Any) -> Iterator[MisbehavingProxy]:
    """One for all tests of a server, because its clients take long to make; it begins each test with good manners."""
    proxy = proxy_to(server.port)
    proxy.reset()
    yield proxy
    proxy.reset()


@pytest.fixture
def patient(proxy: MisbehavingProxy, root: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    """For faults that answer at once: however slow this machine is, no timeout is in the way."""
    monkeypatch.setattr("hps.filesystems.retries._FIRST_PAUSE_S", 0.01)
    return store_at(proxy.url, root, timeout_s=20, deadline_s=40, max_attempts=4)


@pytest.fixture
def hasty(proxy: MisbehavingProxy, root: str) -> Any:
    """For faults that take as long as they are let."""
    return store_at(proxy.url, root, **HASTY)
