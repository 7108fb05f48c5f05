"""A process that replaces the files of a model and deploys versions for ever, until it is killed.

python -m tests.tables.swapping_child PS_JSON DIRECTORY SEED      prints a line when a change begins
"""

import random
import sys
from itertools import count
from pathlib import Path

import numpy as np

import hps
from hps.types import FloatArray

DIMS = {"user": 4, "item": 7}
MODEL, VERSIONS, ROWS, CONTENTS = "ranker", 3, 40_000, 4
KEYS = np.arange(ROWS)


def vectors_of(dim: int, content: int) -> FloatArray:
    """Vectors that say of which key and content they are."""
    return (KEYS[:, None] * 16 + np.arange(dim) + content * 1_000_000).astype(np.float32)


def write_contents(directory: Path) -> None:
    """Write every content that a version can have."""
    for content in range(CONTENTS):
        for table, dim in DIMS.items():
            hps.write_sparse_model(directory / "contents" / str(content) / f"{table}.model", (KEYS, vectors_of(dim, content)))


def put_content(directory: Path, version: int, content: int) -> None:
    """Let a version have a content from now on, in one step."""
    (link := directory / "next").unlink(missing_ok=True)
    link.symlink_to(directory / "contents" / str(content))
    link.rename(directory / str(version))


def main(configuration: str, directory: str, seed: str) -> None:
    chance = random.Random(int(seed))
    with hps.HPS(configuration) as server:
        for number in count():
            version = chance.randint(1, VERSIONS)
            if chance.random() < 0.5:
                put_content(Path(directory), version, chance.randrange(CONTENTS))
            sys.stdout.write(f"{number} {version}\n")
            sys.stdout.flush()
            if chance.random() < 0.2 and number:
                server.rollback(MODEL)
            else:
                server.deploy(MODEL, str(version))


if __name__ == "__main__":
    main(*sys.argv[1:])
