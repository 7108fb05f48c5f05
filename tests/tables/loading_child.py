"""`python -m tests.tables.loading_child PROGRAM CONFIG DIM PHASE ROW`: load in steps, and stop after a chosen moment.

PROGRAM is `load` (the command `hps load`) or `serve` (a parameter server that starts). A phase is a step of the databases,
such as `ingest`. Before the first step PHASE at row ROW or later, this process prints `<phase> <row>`; it does that step,
prints `held 0` and waits instead of the next. A parent that kills this process after the first of these lines kills it
somewhere in that step. A load that never reaches the step prints `whole` before it waits.
"""

import sys
from collections.abc import Callable
from typing import Any

import hps
from hps.models import files as model_files
from hps.stores.hash_map.database import HashMapDatabase
from hps.stores.rocks_db import engine as rocks_db_engine
from hps.stores.rocks_db.database import RocksDatabase
from hps.stores.rocks_db.load_records import LoadRecords

CHUNK_ROWS, BATCH_ROWS, UNMERGED_FILES = 2000, 4000, 5
STEPS = {
    "create": (rocks_db_engine.Engine, "create"),
    "drop": (rocks_db_engine.Engine, "drop"),
    "stage": (rocks_db_engine.Engine, "stage"),
    "ingest": (rocks_db_engine.Engine, "ingest"),
    "merge": (rocks_db_engine.Engine, "_merge"),
    "settle": (rocks_db_engine.Engine, "settle"),
    "record": (LoadRecords, "_put"),
    "forget": (LoadRecords, "remove"),
    "volatile": (HashMapDatabase, "insert"),
}


class Moment:
    """The moment at which to stop, and how far the load is."""

    def __init__(self, phase: str, row: int) -> None:
        self.phase, self.row = phase, row
        self.at = 0
        self.came = False

    def step(self, phase: str, work: Callable[..., Any]) -> Callable[..., Any]:
        def telling(*arguments: Any, **options: Any) -> Any:
            if self.came:
                hold()
            if phase == self.phase and self.at >= self.row:
                self.came = True
                tell(phase, self.at)
            return work(*arguments, **options)

        return telling


def tell(what: str, row: int) -> None:
    sys.stdout.write(f"{what} {row}\n")
    sys.stdout.flush()


def hold() -> None:
    """Wait to be killed; this process also ends when its parent does."""
    tell("held", 0)
    sys.stdin.read()
    raise SystemExit("nobody killed this process")


def main(program: str, config: str, dim: int, moment: Moment) -> None:
    real = RocksDatabase.load_chunk

    def load_chunk(self: RocksDatabase, tag: str, keys: Any, vectors: Any, record: Any) -> None:
        moment.at = record.rows_done - keys.size
        real(self, tag, keys, vectors, record)

    model_files.CHUNK_BYTES = CHUNK_ROWS * (8 + 4 * dim)
    rocks_db_engine._LOAD_FILES = UNMERGED_FILES
    RocksDatabase.load_chunk = load_chunk  # type: ignore[method-assign]
    RocksDatabase.load_bytes = BATCH_ROWS * (8 + 4 * dim)
    for phase, (owner, name) in STEPS.items():
        setattr(owner, name, moment.step(phase, getattr(owner, name)))
    if program == "load":
        from hps.tools.cli.app import app

        app(["load", config], standalone_mode=False)
        tell("whole", moment.at)
        hold()
    with hps.HPS(config):
        tell("whole", moment.at)
        hold()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), Moment(sys.argv[4], int(sys.argv[5])))
