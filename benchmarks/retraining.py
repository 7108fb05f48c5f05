"""Trains a small click model a day more and again from scratch, and prints what the checks of a version measure.

`python -m benchmarks.retraining` takes 15 s. Clicks follow hidden preferences that drift on the last day; users
and items are drawn by a power law, so that many rows are hardly trained.
"""

import copy

import numpy as np
import torch

from hps.engine.refresh import Pace
from hps.types import FloatArray
from hps.versions.checks.rows import RowPairs, alignment

ROWS, DIM, CLICKS = 5000, 16, 400_000
PACE = Pace(1.0, lambda seconds: False)
HIDDEN = np.random.default_rng(0)
USERS, ITEMS, BIAS = 0.8 * HIDDEN.normal(size=(ROWS, 8)), 0.8 * HIDDEN.normal(size=(ROWS, 8)), 0.7 * HIDDEN.normal(size=ROWS)
DRIFT = 0.3 * HIDDEN.normal(size=(ROWS, 8))

Clicks = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class ClickModel(torch.nn.Module):
    """Scores a user and an item by their vectors, their product and a hidden layer."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.users, self.items = torch.nn.Embedding(ROWS, DIM), torch.nn.Embedding(ROWS, DIM)
        for table in (self.users, self.items):
            torch.nn.init.normal_(table.weight, std=0.05)
        self.top = torch.nn.Sequential(torch.nn.Linear(2 * DIM + 1, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))

    def forward(self, users: torch.Tensor, items: torch.Tensor) -> torch.Tensor:
        user, item = self.users(users), self.items(items)
        scores: torch.Tensor = self.top(torch.cat([user, item, (user * item).sum(1, keepdim=True)], 1)).squeeze(1)
        return scores


def day_of(seed: int, count: int = CLICKS, drift: float = 0.0) -> Clicks:
    random = np.random.default_rng(seed)
    users, items = ((ROWS * random.random(count) ** 3).astype(np.int64) for _ in range(2))
    liked = (USERS[users] * (ITEMS + drift * DRIFT)[items]).sum(1) + BIAS[items] - 1.5
    clicks = random.random(count) < 1 / (1 + np.exp(-liked))
    return torch.tensor(users), torch.tensor(items), torch.tensor(clicks.astype(np.float32))


def train(model: ClickModel, days: list[Clicks]) -> ClickModel:
    optimiser = torch.optim.Adagrad(model.parameters(), lr=0.04)
    for users, items, clicks in days:
        for start in range(0, len(users), 512):
            part = slice(start, start + 512)
            optimiser.zero_grad()
            loss = torch.nn.functional.binary_cross_entropy_with_logits(model(users[part], items[part]), clicks[part])
            loss.backward()  # type: ignore[no-untyped-call]
            optimiser.step()
    return model


def compared(name: str, old: FloatArray, new: FloatArray) -> str:
    norms = np.linalg.norm(old, axis=1), np.linalg.norm(new, axis=1)
    low, high = (np.quantile(norm, (0.25, 0.5, 0.75)) for norm in norms)
    cosine = np.median((old * new).sum(1) / (norms[0] * norms[1]))
    aligned = alignment(RowPairs(old, new), PACE)
    return f"{name}: alignment {aligned:.2f}, cosine {cosine:.2f}, norms {np.maximum(low / high, high / low).max():.1f}"


def main() -> None:
    torch.set_num_threads(1)
    days = [*(day_of(seed) for seed in range(3)), day_of(7, drift=1.0)]
    serving = train(ClickModel(1), days[:3])
    models = {
        "a day more": train(copy.deepcopy(serving), days[3:]),
        "from scratch": train(ClickModel(2), days[1:]),
    }
    users, items, _ = day_of(55, 2000, drift=1.0)
    random = np.random.default_rng(3)
    made_up = tuple(torch.tensor(random.integers(0, ROWS, 1024)) for _ in range(2))
    for title, model in models.items():
        for name in ("users", "items"):
            old, new = (getattr(of, name).weight.detach().numpy() for of in (serving, model))
            print(title, compared(name, old, new))
        with torch.no_grad():
            for name, requests in (("recorded", (users, items)), ("made-up", made_up)):
                old, new = (torch.sigmoid(of(*requests)).numpy() for of in (serving, model))
                print(f"{title} {name} requests: correlation {np.corrcoef(old, new)[0, 1]:.2f}")


if __name__ == "__main__":
    main()
