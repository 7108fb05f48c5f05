"""Functions that models name as their `transform`."""

import threading

import numpy as np

import hps

RELEASED = threading.Event()


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
    raise KeyError("a bug")


def same(inputs):
    return dict(inputs)


def big_endian(inputs):
    return {"item": np.full(inputs["city"].shape, 7, ">i8")}
