"""The page of whole models: its examples print what it says, draw its picture, and serve what its curl shows."""

import json
import re
import shutil
from pathlib import Path

import httpx
import pytest

from tests.docs.examples import DOCS, run_examples
from tests.servers.served_process import ServedProcess

pytest.importorskip("torchrec")


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str, str]:
    """Where the examples ran, what they printed, and what the page says that they print."""
    place = tmp_path_factory.mktemp("page")
    return place, *run_examples("whole-models.md", place)


def test_examples_print_what_the_page_says(ran: tuple[Path, str, str]) -> None:
    _, printed, said = ran
    assert printed == said


def test_the_picture_is_what_its_example_draws(ran: tuple[Path, str, str]) -> None:
    assert (ran[0] / "din.svg").read_text() == (DOCS / "pictures" / "din.svg").read_text(), "copy it to docs/pictures"


def test_the_first_example_is_served_as_the_page_shows(ran: tuple[Path, str, str]) -> None:
    page = (DOCS / "whole-models.md").read_text()
    body = re.findall(r"-d '(.*)'$", page, re.MULTILINE)[0]
    [shown] = re.findall(r"`(\{\"model\":.*\})`", page)
    shutil.rmtree(ran[0] / "repository" / "ranker" / "2")  # of a later example
    with ServedProcess(ran[0] / "repository", ran[0]) as served:
        answer = httpx.post(f"{served.url}/v1/models/ranker/score", content=body).json()
    answer["outputs"]["score"] = [round(one, 4) for one in answer["outputs"]["score"]]
    assert answer == json.loads(shown)
