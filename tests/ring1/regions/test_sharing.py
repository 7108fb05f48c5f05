"""How many fronts there are by default, and how they share the memory that clients may make the service hold."""

import pytest

from hps.configuration.load import ServiceConfig
from hps.regions import sharing
from hps.regions.sharing import body_bytes, default_fronts, slab_bytes

MIB = 1 << 20


@pytest.mark.parametrize(("processors", "fronts"), [(1, 1), (2, 1), (3, 1), (4, 2), (16, 14), (18, 16), (19, 16), (256, 16)])
def test_the_default_number_of_fronts_leaves_processors_and_memory(processors, fronts, monkeypatch):
    monkeypatch.setattr(sharing, "available_processors", lambda: processors)
    assert default_fronts() == default_fronts(processors) == fronts


@pytest.mark.parametrize(
    ("held", "body", "fronts", "slab", "other"),
    [
        (2048, 8, 2, 512, 512),  # halves of its share
        (2048, 8, 4, 256, 256),
        (2048, 8, 1, 512, 1536),  # at most so much of a slab
        (2048, 8, 32, 64, 16),  # at least so much, and room for two bodies
        (2048, 700, 4, 256, 1400),
        (64, 32, 1, 32, 48),  # no more than there is
        (64, 8, 4, 32, 16),
    ],
)
def test_a_front_has_room_for_answers_and_for_bodies(held, body, fronts, slab, other):
    settings = ServiceConfig(max_held_bytes=held * MIB, max_body_bytes=body * MIB)
    assert (slab_bytes(settings, fronts), body_bytes(settings, fronts)) == (slab * MIB, other * MIB)


def test_a_slab_has_whole_pages():
    assert slab_bytes(ServiceConfig(max_held_bytes=300 * MIB + 5000, max_body_bytes=MIB), 1) == 150 * MIB
