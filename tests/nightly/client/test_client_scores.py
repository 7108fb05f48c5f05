"""`Client.score` while its server dies and comes back with another version."""

import signal
from pathlib import Path

import pytest

import hps
from tests.ring2.client.test_client_scores import document, inputs, package
from tests.servers.served_process import ServedProcess


def test_scores_come_back_after_each_death_of_the_server_and_say_their_version(tmp_path: Path) -> None:
    package(tmp_path / "models", 1)
    versions = {}
    with ServedProcess(document(tmp_path), tmp_path) as served, hps.connect(served.url) as client:
        for version in ("1", "2", "3"):
            if version != "1":
                package(tmp_path / "models", int(version))
                served.stop(signal.SIGKILL)
                for _ in range(2):
                    with pytest.raises(hps.RemoteConnectionError):
                        client.score("m", inputs(5))
                served.start()
            answer = client.score("m", inputs(5))
            assert answer.version == version
            versions[version] = answer["pair"]
    assert len({one.tobytes() for one in versions.values()}) == 3
