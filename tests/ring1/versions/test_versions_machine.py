"""Versions of a model that are deployed, replaced, rolled back, written to and started again, against a dict.

Every lookup must be answered from the rows of the version that serves: those of its files, changed by
what was written to this very version. A version whose rows an earlier process, or an earlier deployment, left in RocksDB may
come back with them or from its files, but as a whole. Longer in tests/nightly/versions.
"""

import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

import hps
from hps.ground.progress import NoProgress
from tests.servers.running_service import document_of, model_of

DIMS = {"narrow": 1, "wide": 3}
KEYS = range(6)
DEFAULT = -1.0
VERSION = st.sampled_from(["1", "2", "3"])
Rows = dict[tuple[str, int], float]  # the first element of the vector of a table's key; the others are the same


@dataclass
class Version:
    """One version, of certain files, and the rows that it may have; more than one choice only until they are looked up."""

    number: str
    files: int
    choices: list[Rows]


class Stopped(NoProgress):
    """A progress that ends a load with its first rows."""

    def advance(self, tag: str, rows: int) -> None:
        raise InterruptedError(tag)


class VersionsMachine(RuleBasedStateMachine):
    """One parameter server; `serving` and `kept` are what it has, `left` what may be in RocksDB besides."""

    persistent = False

    def __init__(self) -> None:
        super().__init__()
        self.directory = Path(tempfile.mkdtemp(prefix="hps-versions-"))
        self.stamp = 0
        self.files: dict[str, tuple[int, Rows]] = {}
        self.serving: Version | None = None
        self.kept: Version | None = None
        self.pinned = ""
        self.left: dict[tuple[str, int], list[Rows]] = {}

    @initialize(kind=st.sampled_from([{}, {"gpucache": False}, {"embedding_cache_type": "static"}]))
    def begin(self, kind: dict[str, object]) -> None:
        for number in ("1", "2", "3"):
            self.replace_files(number)
        places = {number: [str(self.directory / number / table) for table in DIMS] for number in self.files}
        versions = [{"version": number, "sparse_files": places[number]} for number in ("2", "3")]
        model = model_of("m", places["1"], DIMS, versions=versions, default_value_for_each_table=[DEFAULT] * len(DIMS))
        model |= {"gpucacheper": 0.5, "hit_rate_threshold": 1.1, **kind}
        self.writable = self.persistent or "embedding_cache_type" not in kind
        self.document = document_of(model, persistent=self.directory / "rocksdb" if self.persistent else None)
        self.server = hps.HPS(self.document)
        self.server.live.first_retry_s = 0.0  # a poll tries what has failed at once
        self.serving = self.loaded("3")

    def loaded(self, number: str) -> Version:
        """A version that is not in memory: from its files, or with what RocksDB may have of it."""
        stamp, rows = self.files[number]
        return Version(number, stamp, [dict(rows), *map(dict, self.left.get((number, stamp), []))])

    def leave(self, *versions: Version | None) -> None:
        if self.persistent:
            self.left |= {(version.number, version.files): version.choices for version in versions if version is not None}

    @rule(number=VERSION)
    def replace_files(self, number: str) -> None:
        self.stamp += 1
        rows = {}
        for table, dim in DIMS.items():
            keys = [key for key in KEYS if (key + self.stamp) % 3]
            for key in keys:
                rows[table, key] = float(self.stamp * 100 + key)
            vectors = np.array([[rows[table, key]] * dim for key in keys], np.float32)
            hps.write_sparse_model(self.directory / number / table, (np.array(keys), vectors), overwrite=True)
        self.files[number] = (self.stamp, rows)

    @rule(number=VERSION)
    def deploy(self, number: str) -> None:
        assert self.server.deploy("m", number).version == number
        self.deployed(number)
        self.pinned = number

    @rule(by=st.sampled_from(["unpin", "deploy", "poll", "stay"]))
    def go_on_by_policy(self, by: str) -> None:
        """A start, and polling, serve the pinned version; `deploy` and `unpin` end that."""
        if by == "stay":
            number = self.server.deploy("m", pin=False).version
            assert number == (self.pinned or "3")
        elif by == "poll":
            assert self.server.poll() in ({}, {"m": None})
            if self.serving is None:  # an undeployment is left alone, until files change
                number = self.server.models and self.server.model("m").version
                assert number in ((), self.pinned or "3")
            else:
                number = self.server.model("m").version
        elif by == "unpin" and not self.pinned:
            return
        else:
            number = getattr(self.server, by)("m").version
            assert number == "3"
            self.pinned = ""
        if number:
            self.deployed(number)

    def deployed(self, number: str) -> None:
        stamp = self.files[number][0]
        if self.serving and (self.serving.number, self.serving.files) == (number, stamp):
            return
        if self.kept and (self.kept.number, self.kept.files) == (number, stamp):
            self.serving, self.kept = self.kept, self.serving
            return
        self.leave(self.kept)
        self.serving, self.kept = self.loaded(number), self.serving or self.kept

    @rule(number=VERSION)
    def fail_to_deploy(self, number: str) -> None:
        """Only what has to be read can fail."""
        try:
            self.server.deploy("m", number, progress=Stopped())
        except InterruptedError:
            return
        self.deployed(number)
        self.pinned = number

    @precondition(lambda self: self.serving)
    @rule()
    def roll_back(self) -> None:
        if not self.kept and self.serving.number == "1":
            with pytest.raises(hps.ConflictError):
                self.server.rollback("m")
            return
        self.server.rollback("m")
        if self.kept:
            self.serving, self.kept = self.kept, self.serving
        else:
            self.deployed(str(int(self.serving.number) - 1))
        self.pinned = self.serving.number

    @precondition(lambda self: self.serving)
    @rule()
    def undeploy(self) -> None:
        self.server.undeploy("m")
        self.leave(self.serving, self.kept)
        self.serving = self.kept = None

    @precondition(lambda self: self.serving and self.writable)
    @rule(table=st.sampled_from(list(DIMS)), key=st.sampled_from(KEYS), value=st.integers(-9, 9))
    def insert(self, table: str, key: int, value: int) -> None:
        self.server.insert([key], np.full((1, DIMS[table]), value, np.float32), "m", table)
        for rows in self.serving.choices:
            rows[table, key] = float(value)

    @precondition(lambda self: self.serving and self.writable)
    @rule(table=st.sampled_from(list(DIMS)), key=st.sampled_from(KEYS))
    def delete(self, table: str, key: int) -> None:
        self.server.delete([key], "m", table)
        for rows in self.serving.choices:
            rows.pop((table, key), None)

    @rule()
    def start_again(self) -> None:
        self.server.close()
        self.leave(self.serving, self.kept)
        self.server = hps.HPS(self.document)
        self.server.live.first_retry_s = 0.0  # a poll tries what has failed at once
        if not self.persistent:
            self.pinned = ""
        self.serving, self.kept = self.loaded(self.pinned or "3"), None

    @invariant()
    def is_pinned_to_what_was_chosen_last(self) -> None:
        if hasattr(self, "server"):
            pin = self.server.pin("m")
            assert ("" if pin is None else pin.version) == self.pinned
            assert self.server.check(60.0) == []

    @invariant()
    def serves_the_rows_of_one_version(self) -> None:
        if self.serving is None:
            return
        found = {}
        answers = self.server.lookup_tables({table: list(KEYS) for table in DIMS}, "m", return_found=True)
        for table in DIMS:
            vectors, there = (answer[table] for answer in answers)
            assert (vectors == vectors[:, :1]).all(), "no torn vector"
            assert (vectors[~there] == DEFAULT).all()
            found |= {(table, key): float(vectors[key, 0]) for key in KEYS if there[key]}
        assert found in self.serving.choices
        self.serving.choices = [found]

    def teardown(self) -> None:
        if hasattr(self, "server"):
            self.server.close()
        shutil.rmtree(self.directory)


class PersistentVersionsMachine(VersionsMachine):
    """The same with RocksDB below the hash map."""

    persistent = True


TestVersions = VersionsMachine.TestCase
TestPersistentVersions = PersistentVersionsMachine.TestCase
TestVersions.settings = TestPersistentVersions.settings = settings(
    max_examples=5, stateful_step_count=15, deadline=None, print_blob=True
)
