"""Object stores whose answers never end: no timeout of a socket notices, since there always is another byte in time."""

from typing import Any

import pytest

from hps.testing.filesystems import noise
from tests.servers.misbehaving_proxy import MisbehavingProxy, Trickle, first
from tests.servers.s3_server import know_only_moto, s3_server
from tests.tables.object_store_faults import SIZE, read, store_at


@pytest.fixture(params=[pytest.param("s3", marks=pytest.mark.s3), pytest.param("gcs", marks=pytest.mark.gcs)])
def server(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    if request.param == "gcs":
        return request.getfixturevalue("gcs_server")
    know_only_moto(monkeypatch)
    return s3_server()


def test_a_body_that_trickles_is_given_up_for_another(server: Any) -> None:
    """After half of the time to the deadline."""
    file = f"{server.scheme}://{server.new_bucket()}/key"
    server.put(file, noise(SIZE))
    with MisbehavingProxy(server.port) as proxy:
        store = store_at(proxy.url, file, timeout_s=5, deadline_s=10)
        assert store.status(file).size_bytes == SIZE
        proxy.rule, proxy.requests = first(1, Trickle(after_bytes=1000), lambda request: request.method == "GET"), []
        assert read(store, file) == noise(SIZE)
        assert len(proxy.requests) == 2
