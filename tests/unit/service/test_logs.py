"""What the service says of itself."""

import logging
import threading

import pytest

from hps.service.logs import Problem, RecentProblems


@pytest.fixture
def problems():
    """A handler, and a logger that has no other."""
    handler, logger = RecentProblems(most=3), logging.getLogger("tests.problems")
    logger.propagate, logger.handlers = False, [handler]
    yield handler, logger
    logger.propagate, logger.handlers = True, []


def test_equal_problems_are_one_that_is_counted_and_the_latest_comes_first(problems):
    handler, logger = problems
    logger.info("not a problem")
    for text in ("a", "b", "a"):
        logger.warning("table %s is away", text)
    logger.error("table %s is away", "a")
    entries = handler.entries()
    assert [(one.level, one.text, one.count) for one in entries] == [
        ("error", "table a is away", 1),
        ("warning", "table a is away", 2),
        ("warning", "table b is away", 1),
    ]
    assert type(entries[0]) is Problem
    assert entries[0].logger == "tests.problems"
    assert entries[0].time_s >= entries[2].time_s


def test_the_oldest_problem_is_forgotten_and_texts_are_bounded(problems):
    handler, logger = problems
    for number in range(5):
        logger.warning("%d%s", number, "x" * 5000)
    entries = handler.entries()
    assert [one.text[0] for one in entries] == ["4", "3", "2"]
    assert all(len(one.text) == 1000 for one in entries)


def test_a_problem_says_which_exception_was_behind_it(problems):
    handler, logger = problems
    try:
        raise ValueError("broken")
    except ValueError:
        logger.exception("serving failed")
    assert handler.entries()[0].text == "serving failed: ValueError: broken"


def test_problems_of_many_threads_are_all_counted(problems):
    handler, logger = problems
    threads = [threading.Thread(target=lambda: [logger.warning("same") for _ in range(200)]) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [(one.text, one.count) for one in handler.entries()] == [("same", 800)]
