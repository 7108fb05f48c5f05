"""How many fronts there are by default, and from when they get connections."""

import socket

import pytest

from hps.regions import sharing
from hps.service.fronts import supervisor


@pytest.mark.parametrize(("processors", "fronts"), [(1, 1), (2, 1), (3, 1), (4, 2), (16, 14), (18, 16), (19, 16), (256, 16)])
def test_the_default_number_of_fronts_leaves_processors_and_memory(processors, fronts, monkeypatch):
    monkeypatch.setattr(sharing, "available_processors", lambda: processors)
    assert sharing.default_fronts() == sharing.default_fronts(processors) == fronts


def test_a_front_gets_no_connections_before_it_listens():
    with supervisor.reserve("127.0.0.1", 0) as place, supervisor.bind_beside(place) as first, supervisor.bind_beside(place):
        first.listen()
        for _ in range(32):  # by their ports, about half would go to the other
            with socket.create_connection(place.getsockname(), 5):
                first.settimeout(5)
                first.accept()[0].close()
