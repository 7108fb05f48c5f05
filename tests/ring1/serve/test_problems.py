"""Recent warnings and errors, folded by kind."""

import logging
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from hps.serve.logs.problems import RecentProblems, kind_of

FORGED = "a\n2026-01-01 00:00:00,000 ERROR hps: all is lost\r\x1b[2J\u2028\u202e"
Problems = tuple[RecentProblems, logging.Logger]


@pytest.fixture
def problems() -> Iterator[Problems]:
    """A handler, and a logger that has no other."""
    handler, logger = RecentProblems(most=3), logging.getLogger("tests.problems")
    logger.propagate, logger.handlers = False, [handler]
    yield handler, logger
    logger.propagate, logger.handlers = True, []


def kept(handler: RecentProblems) -> list[tuple[str, str, int]]:
    return [(entry.level, entry.text, entry.count) for entry in handler.entries()]


REDIS = "reads of volatile_db: redis 10.0.0.7:6379: connecting failed ([Errno 111] Connection refused)"


@pytest.mark.parametrize(
    ("text", "other"),
    [
        (f"{REDIS} (fetching 18 keys of table hps_et.ads.user)", f"{REDIS} (fetching 4 keys of table hps_et.shop@2.item)"),
        (REDIS, REDIS.replace("10.0.0.7", "redis-0.redis.svc").replace("111", "113")),
        ("got 'a b' of \"c\", retrying in 5 s", "got 'd' of \"\", retrying in 1,600.5 s"),
        ("keys 1, 2, -3: lost", "keys 4: lost"),
        ("row -9223372036854775808 of s3://models/a/1: lost", "row 7 of /data: lost"),
        ("worker's queue of model-7 is full", "worker's queue of model-12 is full"),
    ],
)
def test_numbers_keys_hosts_names_and_paths_make_no_other_kind(text: str, other: str) -> None:
    assert kind_of(text) == kind_of(other) != text


@pytest.mark.parametrize(
    ("text", "other"),
    [
        ("reads of volatile_db: timed out", "reads of persistent_db: timed out"),
        ("reads of volatile_db: timed out", "writes of volatile_db: timed out"),
        ("device 1 is lost: out of memory", "device 1 is lost: illegal address"),
        ("don't load 'a'; it's old", "don't load 'a'; it's new"),
        ("it's the disk's fault", "it's the network's fault"),
    ],
)
def test_other_words_make_another_kind(text: str, other: str) -> None:
    assert kind_of(text) != kind_of(other)


def test_problems_of_a_kind_are_one_with_its_times_and_its_latest_texts(problems: Problems) -> None:
    handler, logger = problems
    logger.info("not a problem")
    logger.warning("disk is full")
    for model in ("ads", "feed", "home", "ads", "mail", "shop"):  # an argument of one word is a name
        logger.warning("loading model %s failed: %s", model, "no such file")
    logger.warning("loading model %s failed: %s", "ads", "out of memory")
    logger.error("loading model %s failed: %s", "ads", "out of memory")
    memory, files = "loading model ads failed: out of memory", "loading model shop failed: no such file"
    assert kept(handler) == [("error", memory, 1), ("warning", memory, 1), ("warning", files, 6)]  # the disk is forgotten
    entry = handler.entries()[2]
    assert (entry.logger, entry.first_s <= entry.time_s) == ("tests.problems", True)
    assert entry.others == tuple(f"loading model {model} failed: no such file" for model in ("mail", "ads", "home"))
    logger.warning("loading model %s failed: %s", "feed", "no such file")
    latest = handler.entries()[0]
    assert (latest.count, latest.first_s) == (7, entry.first_s)
    logger.warning("loading model %s failed: %s", "shop", "no such file")
    latest = handler.entries()[0]
    assert [text.split()[2] for text in (latest.text, *latest.others)] == ["shop", "feed", "mail", "ads"]  # each once


def test_arguments_by_name_signs_of_percent_and_causes_are_kept(problems: Problems) -> None:
    handler, logger = problems
    logger.warning("%(disk)s is full", {"disk": "data"})
    for cause in (ValueError("broken"), ValueError("empty")):
        logger.error("serving failed", exc_info=cause)
    assert kept(handler) == [
        ("error", "serving failed: ValueError: empty", 1),
        ("error", "serving failed: ValueError: broken", 1),
        ("warning", "data is full", 1),
    ]
    logger.warning("the disk is 100 % full")
    assert kept(handler)[0] == ("warning", "the disk is 100 % full", 1)


def test_texts_are_bounded_lines(problems: Problems) -> None:
    handler, logger = problems
    for number in range(5):
        logger.warning("%s %d%s", "abcde"[number], number, " x" * 5000)
    assert [(text[0], len(text)) for _, text, _ in kept(handler)] == [("e", 1000)]
    logger.warning("got %s", FORGED * 50)  # clients' strings control nobody's terminal
    text = kept(handler)[0][1]
    assert (text.isprintable(), len(text)) == (True, 1000)
    try:
        raise ValueError("broken")
    except ValueError:
        logger.exception("serving failed")
    assert kept(handler)[0][1] == "serving failed: ValueError: broken"


def test_problems_of_many_threads_are_all_counted(problems: Problems) -> None:
    handler, logger = problems
    with ThreadPoolExecutor(4) as threads:
        for _ in range(4):
            threads.submit(lambda: [logger.warning("same") for _ in range(200)])
    assert kept(handler) == [("warning", "same", 800)]
