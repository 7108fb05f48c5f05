"""Functions that models name as their `transform`."""

import threading

import numpy as np

import hps

RELEASED = threading.Event()
IMPORTED = threading.Event()
SEEN = []
"""The texts of each call of `second`."""


def cities(inputs):
    """Keys of the cities' names, by their lengths; and the ages in years of the days."""
    item, days = inputs["city"], inputs["days"]
    return {"item": 7 * np.diff(item.offsets).reshape(item.shape), "age": (days / 365).astype(np.float32)}


def failing(inputs):
    text = inputs["city"].to_list()[0]
    if text == b"refuse":
        raise hps.InvalidInputError("there is no such city")
    if text == b"wait":
        RELEASED.wait(60)
    if text == b"nothing":
        return None
    if text == b"objects":
        return {"item": np.array([object()]), "age": np.zeros(1)}
    found = {"item": np.zeros(1, np.int64), "age": np.zeros((1,) * {b"number": 0, b"nine": 9}.get(text, 1))}
    if text == b"more":
        return {**found, "other": found["age"]}
    if text in (b"number", b"nine"):
        return found
    raise KeyError("a bug")


def same(inputs):
    return dict(inputs)


def big_endian(inputs):
    return {"item": np.full(inputs["city"].shape, 7, ">i8")}


def first(inputs):
    """The number that each text begins with; waits for `IMPORTED` where a text has v."""
    texts = inputs["text"].to_list()
    if any(b"v" in text for text in texts):
        IMPORTED.wait(60)
    return {"item": np.array([int(text[:1]) for text in texts])}


def second(inputs):
    """The second number of each text; refuses x, fails for bug, and waits for `RELEASED` where a text has w."""
    texts = inputs["text"].to_list()
    SEEN.append([text.decode() for text in texts])
    if any(b"x" in text for text in texts):
        raise hps.InvalidInputError("got an x")
    if any(b"bug" in text for text in texts):
        raise KeyError("a bug")
    if any(b"w" in text for text in texts):
        RELEASED.wait(60)
    return {"item": np.array([int(text[1:2]) for text in texts])}
