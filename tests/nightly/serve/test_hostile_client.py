"""The hostile client of ring 2 at its full size."""

from pathlib import Path

from tests.servers.hostile_client import BEYOND, BUDGET, MB, HostileClient


def test_ten_thousand_requests_that_never_repeat_leave_a_front_small(tmp_path: Path) -> None:
    with HostileClient(tmp_path) as client:
        client.check()
        before, most = client.front_bytes, 0
        for first in range(0, 10_000, 500):
            client.send(first, 500)
            most = max(most, client.front_bytes)
        print(f"front: {before / MB:.0f} MB before, {most / MB:.0f} MB at most, {client.statuses}")
        assert not client.statuses.keys() & {500, "UNKNOWN", "INTERNAL"}, client.statuses
        assert client.figure("hps_http_cached_bytes") < 100 * MB
        assert most < BUDGET + BEYOND
        client.check()
