"""RocksDB is killed again and again, at random: what was acknowledged is there."""

import random
import sys  # noqa: F401 - for the children
from pathlib import Path

from hps.stores.rocks_db.database import RocksDatabase  # noqa: F401 - for the children
from hps.testing.databases import DIM, TAG, fetched, vectors_of  # noqa: F401 - for the children
from tests.ring2.stores.rocks_db.test_rocks_db_faults import child
from tests.ring2.stores.rocks_db.test_rocks_db_logs import KEYS
from tests.tables.rocks_database import opened


def test_kills_are_never_refused_whatever_the_logs_are_at(tmp_path: Path):
    code = """
        from tests.nightly.stores.rocks_db.test_rocks_db_kills import *
        database = RocksDatabase(sys.argv[1])
        tags = [f"{TAG}.{i}" for i in range(4)]
        for tag in tags:
            database.open_table(tag, DIM)
        print("open", flush=True)
        for turn in range(100_000):
            rng = random.Random(turn)
            tag = rng.choice(tags)
            database.insert(tag, KEYS[:500], vectors_of(KEYS[:500], DIM, turn % 250))
            print(tag, turn % 250, flush=True)
            if rng.random() < 0.3:
                database.finish_load(rng.choice(tags))
            if rng.random() < 0.1:
                print(tag, "dropped", flush=True)
                database.drop_table(tag)
                database.open_table(tag, DIM)
    """
    rng, path, acknowledged = random.Random(5), tmp_path / "rocksdb", {}
    for _ in range(10):
        with child(code, path) as writer:
            assert writer.stdout.readline() == "open\n", writer.stderr.read()
            lines = [writer.stdout.readline() for _ in range(rng.randrange(1, 40))]
            writer.kill()
            lines += writer.stdout.read().split("\n")  # what communicate() reads lacks the lines that are buffered already
        for tag, version in (line.split() for line in lines if line.strip()):
            acknowledged[tag] = version
            if version != "dropped":
                following = str((int(version) + 1) % 250)  # perhaps written, not acknowledged
        with opened(path) as database:
            for tag, version in acknowledged.items():
                database.open_table(tag, DIM)
                out, _ = fetched(database, tag, KEYS[:500], DIM)
                candidates = list({version, following} - {"dropped"})
                fits = [v for v in candidates if (out == vectors_of(KEYS[:500], DIM, int(v))).all()]
                assert fits or version == "dropped"
                acknowledged[tag] = fits[0] if fits else "dropped"
