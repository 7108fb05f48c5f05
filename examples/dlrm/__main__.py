"""Train a DLRM for a minute, convert its 26 embeddings, and serve it in process and over HTTP.

    .venv/bin/python -m examples.dlrm [--quick] [--directory DIR]

Exits with 1 if a served answer differs from the trained module's.
"""

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
import tritonclient.http as triton

import hps.torch
from examples.dlrm.criteo import HOTNESS, Clicks, Criteo
from examples.dlrm.model import DLRM
from examples.dlrm.running_server import running_server

MODEL = "dlrm"
TOLERANCE = 1e-4  # of a logit: sums of float32 in another order


def auc(logits: torch.Tensor, labels: torch.Tensor) -> float:
    """The area under the ROC curve: how often a click has a higher logit than what was not clicked."""
    ranks = torch.empty(len(logits)).double()
    ranks[logits.argsort()] = torch.arange(1, len(logits) + 1).double()
    clicks = labels.sum().double()
    return float((ranks[labels > 0].sum() - clicks * (clicks + 1) / 2) / (clicks * (len(labels) - clicks)))


def train(model: DLRM, criteo: Criteo, steps: int, batch: int) -> None:
    """Fit the model to fresh batches."""
    embeddings = torch.optim.Adagrad(model.embeddings.parameters(), lr=0.05)
    others = torch.optim.Adam([*model.bottom.parameters(), *model.top.parameters()], lr=1e-3)
    loss_of = torch.nn.BCEWithLogitsLoss()
    losses, started = [], time.perf_counter()
    for step in range(1, steps + 1):
        clicks = criteo.draw(batch, step)
        loss = loss_of(model(clicks.dense, clicks.keys, clicks.offsets), clicks.labels)
        embeddings.zero_grad()
        others.zero_grad()
        loss.backward()
        embeddings.step()
        others.step()
        losses.append(loss.item())
        if step % max(1, steps // 5) == 0:
            print(f"  step {step:5}: loss {np.mean(losses[-steps // 5 :]):.4f}, {time.perf_counter() - started:.0f} s")


def pooled_over_http(url: str, clicks: Clicks) -> torch.Tensor:
    """The vectors of all bags, (B, tables x dim), in one request: keys go out, one vector for each bag comes back."""
    tensors = {"KEYS": torch.cat(clicks.keys).numpy(), "OFFSETS": torch.cat(clicks.offsets).numpy()}
    inputs = []
    for name, array in tensors.items():
        inputs.append(triton.InferInput(name, list(array.shape), "INT64"))
        inputs[-1].set_data_from_numpy(array)
    with triton.InferenceServerClient(url.removeprefix("http://")) as client:
        return torch.from_numpy(client.infer(MODEL, inputs, parameters={"combiner": "mean"}).as_numpy("OUTPUT0").copy())


def compare(what: str, logits: torch.Tensor, trained: torch.Tensor, labels: torch.Tensor) -> bool:
    """Print how far served logits are from those of the trained module; whether they are close enough."""
    difference = float((logits - trained).abs().max())
    print(f"{what}: AUC {auc(logits, labels):.4f}, largest difference of a logit {difference:.1e}")
    return difference <= TOLERANCE


@torch.no_grad()
def main() -> int:
    """Run all of it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small tables and a few steps: seconds in place of a minute")
    parser.add_argument("--directory", type=Path, help="where the model repository goes; by default one that is removed")
    arguments = parser.parse_args()
    steps, rows, dim, test = (20, 1000, 8, 500) if arguments.quick else (1000, 100_000, 16, 4096)
    torch.manual_seed(0)
    torch.sparse.check_sparse_tensor_invariants.disable()  # and no warning that they are not checked
    criteo = Criteo(rows)
    model = DLRM(criteo.rows, dim)
    print(f"training: {len(HOTNESS)} tables, {sum(criteo.rows):,} rows of {dim}, bags of up to {max(HOTNESS)} ids")
    with torch.enable_grad():
        train(model, criteo, steps, 512)
    clicks = criteo.draw(test, seed=0)
    inputs = (clicks.dense, clicks.keys, clicks.offsets)
    trained = model.eval()(*inputs)
    print(f"trained: AUC {auc(trained, clicks.labels):.4f}")

    with tempfile.TemporaryDirectory() as temporary:
        repository = (arguments.directory or Path(temporary)).absolute()
        repository.mkdir(parents=True, exist_ok=True)
        configuration = {"volatile_db": {"type": "hash_map"}, "model_repository": str(repository)}
        config = repository / "ps.json"
        config.write_text(json.dumps(configuration))

        with hps.HPS(config) as server:
            # Save the embeddings, deploy them, and put layers in their place that look them up.
            hotness = {f"embeddings_{table}": most for table, most in enumerate(HOTNESS)}
            served = hps.torch.convert(model, server, MODEL, repository=repository, hotness=hotness)
            equal = compare("in process", served(*inputs), trained, clicks.labels)

        # Another process serves the same repository; the dense part stays here.
        with running_server(config) as url:
            started = time.perf_counter()
            pooled = pooled_over_http(url, clicks)
            print(f"over HTTP: {len(pooled)} samples in one request, {1000 * (time.perf_counter() - started):.0f} ms")
            equal &= compare("over HTTP", model.score(clicks.dense, pooled), trained, clicks.labels)
    return 0 if equal else 1


if __name__ == "__main__":
    sys.exit(main())
