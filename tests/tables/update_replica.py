"""A replica for tests to kill: it serves a model, follows the log of its updates, and judges what it looks up meanwhile.

python -m tests.tables.update_replica PS_JSON KEY_BITS     answers each line of JSON on its standard input with one

    {"do": "positions"}          how far it has applied each partition of each topic
    {"do": "dump", "to": file}   writes the rows of every tier: <table>/<tier>/keys, sorted, and <table>/<tier>/rows
    {"do": "checked"}            how many vectors it has looked up, and what was wrong with them
"""

import json
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np

import hps
from hps.ground.rows import encode
from hps.tensors.batch import Batch
from hps.types import KeyArray, RowArray
from hps.versions.deployment import Deployment
from tests.tables.numbered_updates import NumberedRows

MODEL = "shop"
DIMS = {"item": 8, "user": 6}
BY_HUGECTR = "user"
"""The table whose updates are HugeCTR's frames: they have no deletions, and one that is sent once more is a later one."""
_LOOKED_UP = 512


class Replica:
    """The parameter server of this process and the thread that reads from it."""

    def __init__(self, server: hps.HPS, key_bits: int) -> None:
        self.server = server
        self.checked = 0
        self.wrong: list[str] = []
        self._rows = {
            table.table_name: NumberedRows(key_bits, table.dim, table.table_name != BY_HUGECTR, table.row_dtype)
            for table in server.model(MODEL).tables
        }
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        """Look random keys up for ever: no vector is a mixture, and none is older than one that was there before."""
        rng = np.random.default_rng()
        seen = {table: np.zeros(rows.keys, np.int64) for table, rows in self._rows.items()}
        try:
            while True:
                keys = {table: rng.integers(0, rows.keys, _LOOKED_UP) for table, rows in self._rows.items()}
                for table, vectors in self.server.lookup_tables(keys, MODEL).items():
                    rows, floor = self._rows[table], seen[table][keys[table]]
                    for what, which in rows.judge(keys[table], vectors, floor).items():
                        row = int(np.flatnonzero(which)[0])
                        got, key = rows.changes_of(vectors[row : row + 1])[0], keys[table][row]
                        self.wrong.append(f"{what}: {table} {key}: change {got} after {floor[row]}")
                    if table != BY_HUGECTR:
                        np.maximum.at(seen[table], keys[table], rows.changes_of(vectors))
                    self.checked += vectors.shape[0]
        except hps.NotReadyError:
            return
        except Exception as error:  # told to the test
            self.wrong.append(repr(error))
            raise

    def answer(self, command: dict[str, Any]) -> object:
        if command["do"] == "positions":
            return {partition: at for update in self.server.updates() for partition, at in update.positions.items()}
        if command["do"] == "dump":
            self.server.drain(30)
            np.savez(command["to"], **self._dump(self.server.model(MODEL)))
        return {"checked": self.checked, "wrong": self.wrong[:5]}

    @staticmethod
    def _dump(deployment: Deployment) -> dict[str, Any]:
        held: dict[str, tuple[KeyArray, RowArray]] = {}
        for index, table in enumerate(deployment.tables):
            for database in deployment.chain.databases:
                chunks = [*database.scan(table.tag, 65_536)] or [
                    (np.empty(0, np.int64), np.empty((0, table.width), np.float32))
                ]
                keys, rows = map(np.concatenate, zip(*chunks, strict=True))
                held[f"{table.table_name}/{database.kind}"] = keys, rows
            for cache in deployment.caches:
                keys = cache.dump(index)
                vectors, found = np.zeros((keys.size, table.dim), np.float32), np.zeros(keys.size, np.bool_)
                lookup = cache.create_lookup()
                lookup.query(Batch.of(index, keys, vectors, found))
                lookup.finish()
                held[f"{table.table_name}/cache"] = keys[found], encode("dumping", vectors[found], table.row_dtype)
        arrays: dict[str, Any] = {}
        for name, (keys, rows) in held.items():
            order = np.argsort(keys)
            arrays |= {f"{name}/keys": keys[order], f"{name}/rows": rows[order]}
        return arrays


def _say(what: object) -> None:
    sys.stdout.write(json.dumps(what) + "\n")
    sys.stdout.flush()


def main(configuration: str, key_bits: str) -> None:
    with hps.HPS(Path(configuration)) as server:
        replica = Replica(server, int(key_bits))
        _say("ready")
        for line in sys.stdin:
            _say(replica.answer(json.loads(line)))


if __name__ == "__main__":
    main(*sys.argv[1:])
