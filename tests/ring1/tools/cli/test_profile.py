"""`hps profile` without options: lookups of a size that the model takes."""

import json
from pathlib import Path

import numpy as np
import pytest

from hps.models.writer import write_sparse_model
from hps.tools.cli.server.profile import _default_batch
from tests.ring1.tools.cli.test_cli import run
from tests.servers.running_service import document_of, model_of


@pytest.mark.parametrize(
    ("most_keys", "tables", "bags", "batch"),
    [
        *((4096, 2, 0, 1000), (1000, 1, 0, 1000), (999, 1, 0, 999), (1, 1, 0, 1)),
        *((4096, 2000, 0, 500), (4096, 3_000_000, 0, 1)),
        *((4096, 1, 7, 994), (64, 1, 32, 64), (63, 1, 32, 32), (16, 1, 32, 32)),
    ],
)
def test_the_default_size_of_a_lookup_is_what_the_model_takes(most_keys: int, tables: int, bags: int, batch: int) -> None:
    assert _default_batch(most_keys, tables, bags) == batch


@pytest.mark.parametrize(("options", "batch"), [((), 16), (("--table", "item"), 24), (("--bags", "5"), 15)])
def test_a_model_of_small_batches_is_profiled_without_a_batch(tmp_path: Path, options: tuple[str, ...], batch: int) -> None:
    dims = {"user": 4, "item": 8}
    for name, dim in dims.items():
        write_sparse_model(tmp_path / name, (np.arange(100), np.ones((100, dim), np.float32)))
    most = {"max_batch_size": 8, "maxnum_catfeature_query_per_table_per_sample": [2, 3]}
    config, figures = tmp_path / "ps.json", tmp_path / "figures.json"
    config.write_text(json.dumps(document_of(model_of("m", [tmp_path / name for name in dims], dims, **most))))
    quick = ("--seconds", "0.05", "--warmup", "0", "--json", figures)
    result = run("profile", config, *quick, *options)
    assert result.exit_code == 0, result.output
    assert [row["batch"] for row in json.loads(figures.read_text())["rows"]] == [batch]
