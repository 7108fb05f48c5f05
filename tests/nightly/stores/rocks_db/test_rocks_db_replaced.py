"""A database is opened thousands of times while another process replaces its table: no open sees a part of a table, or none."""

import os
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

import hps
from hps.errors import DatabaseError, DatabaseTimeoutError
from hps.models.writer import write_sparse_model
from hps.tools.cli.tables.sample import sample_vectors
from tests.ring2.stores.rocks_db.test_rocks_db_faults import child
from tests.servers.running_service import document_of, model_of

OPENS = int(os.environ.get("HPS_REPLACED_OPENS", "2000"))
VERSIONS, ROWS, DIM = 3, 20_000, 8
KEYS = np.arange(ROWS, dtype=np.int64) * 7
ASKED = KEYS[:: ROWS // 500]
WRITER = """
    import sys, time
    from contextlib import closing
    from itertools import count
    from pathlib import Path
    from hps.stores.rocks_db.database import RocksDatabase
    from hps.models.loading.table_load import LoadTargets, TableLoad
    from hps.types import TableSpec
    path, pause_s = Path(sys.argv[1]), float(sys.argv[2])
    RocksDatabase.load_bytes = 100_000  # several files
    turn = count()
    while True:
        with closing(RocksDatabase(path / "rocksdb", num_threads=2)) as database:
            for _ in range(next(turn) % 3 + 1):
                source = str(path / f"item{next(turn) % 3}")
                TableLoad(TableSpec("shop", "item", 8, 0.25, 1000), source, LoadTargets((database,))).run()
                print("loaded", flush=True)
                time.sleep(pause_s)
"""


@pytest.mark.parametrize("pause_s", [1.0, 0.3])
def test_no_open_beside_a_process_that_replaces_the_table_sees_less_than_a_version(tmp_path: Path, pause_s: float) -> None:
    versions = [sample_vectors(KEYS, DIM, seed) for seed in range(VERSIONS)]
    for seed, vectors in enumerate(versions):
        write_sparse_model(tmp_path / f"item{seed}", [(KEYS, vectors)])
    model = model_of("shop", [tmp_path / "item0"], {"item": DIM}, default_value_for_each_table=[0.25])
    model |= {"maxnum_catfeature_query_per_table_per_sample": [1000], "gpucache": False}
    document = document_of(model, persistent=tmp_path / "rocksdb", volatile_db={"type": "disabled"})
    document["persistent_db"] |= {"read_only": True, "num_threads": 1}
    outcomes: Counter[str] = Counter()
    with child(WRITER, tmp_path, pause_s) as writer:
        assert writer.stdout.readline() == "loaded\n", writer.stderr.read()
        for _ in range(OPENS):
            try:
                server = hps.HPS(document)
            except DatabaseTimeoutError:
                outcomes["busy"] += 1
                continue
            except DatabaseError as error:
                outcomes[f"{type(error).__name__}: {error}"] += 1
                continue
            with server:
                vectors, found = server.lookup(ASKED, "shop", "item", return_found=True)
            seen = [seed for seed in range(VERSIONS) if (vectors == versions[seed][:: ROWS // 500]).all()]
            outcomes["whole" if seen and found.all() else "empty" if not found.any() else "wrong"] += 1
        assert writer.poll() is None, writer.stderr.read()
        writer.kill()
    sys.stdout.write(f"{OPENS} opens, {pause_s} s between replacements: {dict(outcomes)}\n")
    assert set(outcomes) <= {"whole", "busy"}
    assert outcomes["busy"] <= OPENS // 100
