"""The example that people copy fails where what it serves is not what was trained; nightly tests run all of it."""

import torch

from examples.dlrm.__main__ import auc, compare


def test_dlrm_example_fails_where_answers_differ() -> None:
    logits, labels = torch.tensor([3.0, 1.0, 2.0, 0.0]), torch.tensor([1.0, 0.0, 0.0, 1.0])
    assert auc(logits, labels) == 0.5
    assert compare("here", logits, logits, labels)
    assert not compare("here", logits + 0.01, logits, labels)
