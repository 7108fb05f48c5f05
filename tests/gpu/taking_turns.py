"""Scores that are asked for while two versions of a model take turns."""

import threading
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

import hps


def ask_while_versions_take_turns(
    server: hps.HPS,
    make: Callable[[np.random.Generator], tuple[Any, Mapping[str, Callable[[], Any]]]],
    *,
    askers: int,
    deploys: int,
) -> None:
    """Check that each answer is of the version that it names, and that both versions answer.

    Args:
        make: draws a request for model m, and by version what returns its scores.
    """
    stop, seen = threading.Event(), set()
    wrong: list[str] = []

    def ask(seed: int) -> None:
        rng = np.random.default_rng(seed)
        while not stop.is_set():
            given, expected = make(rng)
            answer = server.score("m", given)
            seen.add(answer.version)
            if np.abs(answer["score"] - (right := expected[answer.version]())).max() > 1e-5:
                others = {version: np.abs(answer["score"] - scores()).max() for version, scores in expected.items()}
                wrong.append(f"version {answer.version}: got {answer['score']}, expected {right}; distances {others}")

    threads = [threading.Thread(target=ask, args=(seed,)) for seed in range(askers)]
    for thread in threads:
        thread.start()
    for number in range(deploys):
        server.deploy("m", str(1 + number % 2))
    stop.set()
    for thread in threads:
        thread.join(60)
    assert not wrong
    assert seen == {"1", "2"}
