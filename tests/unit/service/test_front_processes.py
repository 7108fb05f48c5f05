"""How many fronts there are by default."""

import pytest

from hps.service.fronts import supervisor


@pytest.mark.parametrize(("processors", "fronts"), [(1, 1), (2, 1), (3, 1), (4, 2), (16, 14), (18, 16), (19, 16), (256, 16)])
def test_the_default_number_of_fronts_leaves_processors_and_memory(processors, fronts, monkeypatch):
    monkeypatch.setattr(supervisor, "available_processors", lambda: processors)
    assert supervisor.default_fronts() == fronts
