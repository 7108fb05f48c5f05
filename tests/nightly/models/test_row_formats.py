"""A trained DLRM answers as well with all of its tables in fewer bits: the AUC of clicks that it has not seen."""

import torch

from benchmarks.bench_row_formats import logits_of, served, trained
from examples.dlrm.__main__ import TOLERANCE, auc


def test_the_auc_stays_with_rows_in_fewer_bits() -> None:
    model, batches = trained(rows=1000, dim=16, steps=60, held_out=4)
    labels = torch.cat([batch.labels for batch in batches])
    expected = logits_of(model, batches)
    assert auc(expected, labels) > 0.75  # it has learned something that could be lost
    for row_dtype, most in (("float32", 1e-6), ("float16", 0.0002), ("bfloat16", 0.0002), ("int8", 0.001)):
        logits = served(model, batches, row_dtype)
        off = float((logits - expected).abs().max())
        assert off < TOLERANCE if row_dtype == "float32" else off > TOLERANCE  # rows are in fewer bits
        assert abs(auc(logits, labels) - auc(expected, labels)) < most
