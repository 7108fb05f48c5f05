"""A process that deploys two versions of a whole model in turn, and prints its resident memory in bytes after each so many."""

import re
import shutil
import sys
from pathlib import Path

import numpy as np
import torch

import hps.torch
from hps.ground.memory.heap import bound_heap

EVERY = 20


class Module(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.item = torch.nn.Embedding(20_000, 16)
        self.top = torch.nn.Sequential(
            torch.nn.Linear(20, 256), torch.nn.ReLU(), torch.nn.Linear(256, 128), torch.nn.ReLU(), torch.nn.Linear(128, 1)
        )

    def forward(self, item: torch.Tensor, dense: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.top(torch.cat([self.item(item), dense], 1)).squeeze(1)
        return scores


def main(place: Path, form: str, count: int) -> None:
    bound_heap(8)  # as an engine
    examples = {"item": torch.arange(4), "dense": torch.randn(4, 4)}
    hps.torch.package(Module().eval(), place / "m" / "1", examples, format=form)
    shutil.copytree(place / "m" / "1", place / "m" / "2")
    document = {
        "supportlonglong": True,
        "device": "cpu",
        "volatile_db": {"type": "hash_map"},
        "model_repository": str(place),
    }
    with hps.HPS(document) as server:
        for number in range(1, count + 1):
            server.deploy("m", str(1 + number % 2), force=True)
            server.score("m", {"item": np.arange(3), "dense": np.zeros((3, 4), np.float32)})
            if not number % EVERY:
                found = re.search(r"^Rss:\s+(\d+)", Path("/proc/self/smaps_rollup").read_text(), re.MULTILINE)
                sys.stdout.write(f"{int(found[1]) * 1024 if found else 0}\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
