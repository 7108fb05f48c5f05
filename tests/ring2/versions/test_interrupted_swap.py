"""A process that swaps versions is killed; the next one serves one whole version, and no disk fills up.

At many random moments: tests/nightly/versions.
"""

import json
import os
import random
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TextIO

import numpy as np

import hps
from hps.stores.base import PersistentDatabase
from hps.testing.waiting import PATIENCE_S
from hps.types import split_tag
from tests.servers.child_processes import ChildProcesses
from tests.servers.running_service import document_of, model_of
from tests.tables.swapping_child import CONTENTS, DIMS, KEYS, MODEL, ROWS, VERSIONS, put_content, vectors_of, write_contents

SEED = 20_261_122
VERSION_BYTES = ROWS * sum(4 * dim + 32 for dim in DIMS.values())  # on disk


def content_of(server: hps.HPS) -> int:
    """The content of every row of all tables, on every tier; the test fails where it is not one."""
    deployment = server.model(MODEL)
    held = server.lookup_tables(dict.fromkeys(DIMS, KEYS), MODEL)
    content = int(held["user"][0, 0]) // 1_000_000
    for table, dim in DIMS.items():
        expected = vectors_of(dim, content)
        np.testing.assert_array_equal(held[table], expected)
        for database in deployment.chain.databases:
            chunks = database.scan(deployment.tables[deployment.indices[table]].tag, ROWS)
            keys, vectors = map(np.concatenate, zip(*chunks, strict=True))
            np.testing.assert_array_equal(vectors[np.argsort(keys)], expected, err_msg=f"{database.kind} {table}")
    return content


def kill_in_swaps(tmp_path: Path, children: ChildProcesses, moments: Iterable[Callable[[TextIO], object]]) -> None:
    """Kill a process that swaps versions at each of these moments, and look at what it left.

    Args:
        moments: each is called with what the process prints, a line as a change begins, of which one was read.
    """
    write_contents(tmp_path)
    for version in range(1, VERSIONS + 1):
        put_content(tmp_path, version, version % CONTENTS)
    places = {
        version: [str(tmp_path / str(version) / f"{table}.model") for table in DIMS] for version in range(1, VERSIONS + 1)
    }
    versions = [{"version": str(version), "sparse_files": places[version]} for version in range(2, VERSIONS + 1)]
    model = model_of(MODEL, places[1], DIMS, versions=versions, max_batch_size=ROWS, gpucacheper=0.2, hit_rate_threshold=1.1)
    document = document_of(model, persistent=tmp_path / "rocksdb")
    (configuration := tmp_path / "ps.json").write_text(json.dumps(document))
    chance = random.Random(SEED)
    for kill, moment in enumerate(moments):
        child = children.start(sys.executable, "-m", "tests.tables.swapping_child", configuration, tmp_path, SEED + kill)
        assert child.stdout is not None
        assert child.stdout.readline(), child.communicate()[1]
        moment(child.stdout)
        child.kill()
        child.communicate(timeout=PATIENCE_S)
        with hps.HPS(document) as server:
            place = os.readlink(tmp_path / server.model(MODEL).version)
            assert content_of(server) == int(Path(place).name), "the version has the content that its files have"
            assert server.deploy(MODEL, str(chance.randint(1, VERSIONS))) is server.model(MODEL)
            content_of(server)
            (database,) = (
                database for database in server.model(MODEL).chain.databases if isinstance(database, PersistentDatabase)
            )
            slots = {names[1] for tag in database.tags() if (names := split_tag(tag))}
            assert len(slots) <= 2, "what serves, and what is kept"
        size = sum(path.stat().st_size for path in (tmp_path / "rocksdb").rglob("*") if path.is_file())
        assert size < 3 * VERSION_BYTES, "what serves, what is kept, and logs"


def test_a_process_killed_in_a_swap_leaves_one_whole_version(tmp_path: Path, children: ChildProcesses) -> None:
    kill_in_swaps(tmp_path, children, [lambda lines: None, lambda lines: [lines.readline() for _ in range(3)]])
