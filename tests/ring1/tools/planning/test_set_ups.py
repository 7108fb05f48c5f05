"""Estimated rates of host tiers: those that were measured."""

import pytest

from benchmarks.figures import figures, rows_of
from hps.configuration.load import load_configuration
from hps.ground.registry import implementation
from hps.tools.planning import set_ups

ROWS, DIM = 4_000_000, 32


def test_rates_are_those_of_the_results() -> None:
    [load] = rows_of("row_files", what="load", table_rows=ROWS, dim=DIM)
    [start] = rows_of("row_files", what="start to the first answer", table_rows=ROWS, dim=DIM)
    warm = figures("row_files", what="warm", table_rows=ROWS, dim=DIM, batch=100_000, threads=1)
    for kind, rate in set_ups._LOADED_BYTES_PER_S.items():
        assert rate == pytest.approx(load[f"{kind}_rows_per_s"] * load[f"{kind}_bytes_a_row"], rel=0.05)
    volatile = load_configuration({"model_repository": "models"}).volatile_db
    [need] = implementation("database", "hash_map").room_for(volatile, [("item", DIM, ROWS)])
    filled_s = need.size_bytes / set_ups._STARTED_BYTES_PER_S["rocks_db + hash_map"]
    assert set_ups._START_S + filled_s == pytest.approx(start.hash_map_s, rel=0.05)
    assert pytest.approx(start.row_files_s, abs=0.01) == set_ups._START_S
    for name, kind in (("rocks_db + hash_map", "hash_map"), ("row_files", "row_files"), ("row_files, resident", "row_files")):
        assert set_ups._ROWS_PER_S[name] == pytest.approx(warm[f"{kind}_rows_per_s"], rel=0.05)
