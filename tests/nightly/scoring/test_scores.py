"""Scores for many clients while versions are swapped and the engine dies: none is of two versions, and none is wrong."""

import os
import signal
from pathlib import Path

from hps.testing.waiting import wait_until
from tests.ring2.scoring.test_scores import Clients, document, swapped, write
from tests.ring2.scoring.test_scores import engine as engine  # a fixture
from tests.ring2.scoring.test_scores import repository as repository  # a fixture
from tests.servers.served_process import ServedProcess


def test_no_answer_mixes_versions_while_they_are_swapped(repository: Path, tmp_path: Path) -> None:
    write(repository, 2)
    with ServedProcess(document(repository), tmp_path, 1) as served:
        swapped(served.url, 200)


def test_scores_go_on_when_the_engine_is_started_again(repository: Path, tmp_path: Path) -> None:
    with ServedProcess(document(repository), tmp_path, 1) as served:
        for _ in range(2):
            with Clients(served.url, 4) as clients:
                wait_until(lambda clients=clients: clients.answered > 20, "scores are answered")
                os.kill(served.engine, signal.SIGKILL)
                wait_until(lambda clients=clients: clients.wrong, "the engine is missed")
                failed = len(clients.wrong)

                before = clients.answered
                wait_until(lambda clients=clients, before=before: clients.answered > before + 50, "scores are answered again")
            assert failed
            assert all(one.startswith("503") for one in clients.wrong), set(clients.wrong)
