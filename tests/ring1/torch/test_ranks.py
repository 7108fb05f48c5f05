"""Pieces of a table are taken once each, and have to make up the whole."""

from typing import Any

import pytest
import torch
from torch import nn

import hps
from hps.torch import save
from hps.torch.ranks import _sources_of, gather
from hps.torch.tables import Piece, ShardedTable, WeightTable

WHOLE = (0, 0, 10, 6)
ROWS = [(0, 0, 4, 6), (4, 0, 4, 6), (8, 0, 2, 6)]
GRID = [(0, 0, 5, 2), (0, 2, 5, 4), (5, 0, 5, 2), (5, 2, 5, 4)]


@pytest.mark.parametrize(
    ("said", "owners"),
    [
        ([[WHOLE]], {WHOLE: (0, 0)}),
        ([[WHOLE], [WHOLE], [WHOLE]], {WHOLE: (0, 0)}),
        ([[], [WHOLE]], {WHOLE: (1, 0)}),
        ([[one] for one in ROWS], {one: (rank, 0) for rank, one in enumerate(ROWS)}),
        ([GRID[:3], GRID[2:]], {**{one: (0, number) for number, one in enumerate(GRID[:3])}, GRID[3]: (1, 1)}),
    ],
)
def test_each_piece_is_taken_from_the_first_rank_that_holds_it(said: Any, owners: Any) -> None:
    assert _sources_of("saving", (10, 6), said) == owners


@pytest.mark.parametrize(
    "said", [[[]], [ROWS[:2]], [GRID[1:]], [[WHOLE], ROWS[:1]], [[(0, 0, 11, 6)]], [[(0, 0, 10, 5), (0, 4, 10, 2)]]]
)
def test_pieces_with_gaps_and_overlaps_are_refused(said: Any) -> None:
    with pytest.raises(
        hps.InvalidInputError, match=r"saving: got shards .* expected that they cover 10 rows of 6 elements once"
    ):
        _sources_of("saving", (10, 6), said)


def test_sharded_tables_need_a_process_group() -> None:
    half = ShardedTable((10, 6), [Piece(0, 0, WeightTable("saving", torch.zeros(5, 6)))])
    with pytest.raises(hps.InvalidInputError, match="expected init_process_group before"), gather("saving", {"t": half}):
        pass


def test_a_tensor_of_another_class_is_refused(tmp_path: Any) -> None:
    class Own(torch.Tensor):
        pass

    module = nn.Embedding(3, 2)
    module.weight = nn.Parameter(torch.zeros(3, 2).as_subclass(Own))
    with pytest.raises(hps.InvalidInputError, match="got weights of type Own, expected"):
        save(module, tmp_path / "m")
    assert not list(tmp_path.iterdir())
