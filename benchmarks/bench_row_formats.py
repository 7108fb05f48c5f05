"""What rows in fewer bits cost a trained model: the AUC of a DLRM whose 26 tables are served in each `row_dtype`.

The DLRM is that of `examples/dlrm`, trained for 1,000 batches of 512 clicks drawn as they describe. Each format serves the same
held-out clicks through layers that look pooled bags up, with all tables in that format. float32 answers as the trained module
does, which is checked. `row_costs` says what the vectors of the trained tables lose: the worst of the tables.
"""

import json
import tempfile
from pathlib import Path

import numpy as np
import torch

import hps.torch
from benchmarks.harness import Report
from examples.dlrm.__main__ import TOLERANCE, auc, train
from examples.dlrm.criteo import HOTNESS, Clicks, Criteo
from examples.dlrm.model import DLRM
from hps.tools.planning.row_costs import row_costs
from hps.types import ROW_DTYPES, row_width

BATCH = 4096


def trained(rows: int, dim: int, steps: int, held_out: int) -> tuple[DLRM, list[Clicks]]:
    """A trained DLRM, and batches of clicks that it has not seen."""
    torch.manual_seed(0)
    torch.sparse.check_sparse_tensor_invariants.disable()  # and no warning that they are not checked
    criteo = Criteo(rows)
    model = DLRM(criteo.rows, dim)
    train(model, criteo, steps, 512)
    return model.eval(), [criteo.draw(BATCH, steps + 1 + i) for i in range(held_out)]


@torch.no_grad()
def logits_of(module: torch.nn.Module, batches: list[Clicks]) -> torch.Tensor:
    return torch.cat([module(batch.dense, batch.keys, batch.offsets) for batch in batches])


def served(model: DLRM, batches: list[Clicks], row_dtype: str) -> torch.Tensor:
    """The logits of the model with every embedding served in a format, by the NumPy cache and the hash map."""
    with tempfile.TemporaryDirectory() as place:
        config = Path(place, "ps.json")
        config.write_text(json.dumps({"device": "cpu", "volatile_db": {"type": "hash_map"}, "model_repository": place}))
        hotness = {f"embeddings_{table}": most for table, most in enumerate(HOTNESS)}
        settings = {"row_dtype": row_dtype, "gpucacheper": 0.1, "max_batch_size": BATCH}
        with hps.HPS(config) as server:
            module = hps.torch.convert(model, server, "dlrm", repository=place, hotness=hotness, settings=settings)
            return logits_of(module, batches)


def run(report: Report, quick: bool) -> None:
    """Train, then serve in each format."""
    rows, dim, steps, held_out = (1000, 8, 20, 1) if quick else (100_000, 16, 1000, 16)
    model, batches = trained(rows, dim, steps, held_out)
    labels = torch.cat([batch.labels for batch in batches])
    expected = logits_of(model, batches)
    report.about |= {"clicks": len(labels), "steps": steps, "tables": len(HOTNESS), "rows": sum(Criteo(rows).rows), "dim": dim}
    tables = {f"emb_{i}": embedding.weight.detach().numpy() for i, embedding in enumerate(model.embeddings)}
    for row_dtype in ROW_DTYPES:
        logits = served(model, batches, row_dtype)
        off = float((logits - expected).abs().max())
        if row_dtype == "float32" and off > TOLERANCE:
            raise ValueError(f"float32 is served with logits up to {off} off")
        figures = {"auc": auc(logits, labels), "auc_difference": auc(logits, labels) - auc(expected, labels)}
        report.add(
            {"work": "AUC", "row_dtype": row_dtype},
            figures | {"logit_difference": off, "row_bytes": 4 * row_width(dim, row_dtype)},
        )
    for row_dtype in ROW_DTYPES[1:]:
        costs = [
            row_costs(name, *weights.shape, [(np.arange(len(weights)), weights)], (row_dtype,))[0]
            for name, weights in tables.items()
        ]
        figures = {"rms_share": max(cost.rms_share for cost in costs), "cosine_least": min(cost.cosine_least for cost in costs)}
        report.add({"work": "rows", "row_dtype": row_dtype, "dim": dim}, figures)
