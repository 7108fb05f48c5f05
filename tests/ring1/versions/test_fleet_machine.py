"""Replicas that read, write, crash and lose sight of a fleet's document, in any order; longer in tests/nightly/versions.

A replica that has read a document never chooses, from then on, a version that it withdrew, unless a later document serves it
again: not while it runs, not after a crash, and whatever becomes of the file.
"""

import shutil
import tempfile
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from hps.configuration.models import VersionPolicy
from hps.errors import ConflictError, HPSError, ModelSourceError
from hps.filesystems.base import FileStatus
from hps.filesystems.local import LocalFileSystem
from hps.versions.fleet import Fleet, FleetChange, ServingDocument, following
from hps.versions.kept_files import KeptFiles

VERSIONS = ["1", "2", "3", "4"]
POLICY = VersionPolicy()
REPLICA = st.integers(0, 2)
CHANGE: st.SearchStrategy[tuple[FleetChange, str | None]] = st.one_of(
    st.just(("rollback", None)),
    st.just(("unpin", None)),
    st.just(("deploy", None)),
    st.tuples(st.just("deploy"), st.sampled_from(VERSIONS)),
)


class Link(LocalFileSystem):
    """A replica's way to the repository, which may be cut."""

    cut = False

    def locate(self, source: str) -> tuple[LocalFileSystem, str]:
        return self, source

    def status(self, path: str) -> FileStatus:
        if self.cut:
            raise ModelSourceError(f"opening {path}: no answer")
        return super().status(path)


class Replica:
    """A fleet's replica; the last one has no persistent database.

    Attributes:
        read: the highest document that it has read since it may have forgotten any.
    """

    def __init__(self, number: int, home: Path) -> None:
        self.directory = home / f"rocksdb-{number}" if number < 2 else None
        if self.directory is not None:
            self.directory.mkdir()
        self.link = Link()
        self.read: ServingDocument | None = None
        self.start()

    def start(self) -> None:
        self.fleet = Fleet(self.link, KeptFiles(self.directory, "hps-fleet"))  # type: ignore[arg-type]
        if self.directory is None:
            self.read = None


class FleetMachine(RuleBasedStateMachine):
    """`written` are the documents by number, `old` copies of the file that somebody may put back."""

    def __init__(self) -> None:
        super().__init__()
        self.home = Path(tempfile.mkdtemp(prefix="hps-fleet-"))
        self.place = self.home / "model"
        self.place.mkdir()
        self.file = self.place / "serving.json"
        self.replicas = [Replica(number, self.home) for number in range(3)]
        self.written: dict[int, ServingDocument] = {}
        self.old: list[bytes] = []

    def teardown(self) -> None:
        shutil.rmtree(self.home)

    def look(self, replica: Replica) -> None:
        """Read the document, and check that the replica knows what it has read."""
        replica.fleet.read("m", str(self.place))
        self.know(replica)

    def know(self, replica: Replica) -> None:
        known = replica.fleet.shown("m")
        if known is not None and (replica.read is None or known.number > replica.read.number):
            replica.read = known

    @rule(number=REPLICA)
    def read(self, number: int) -> None:
        self.look(self.replicas[number])

    @rule(number=REPLICA, change=CHANGE)
    def write(self, number: int, change: tuple[FleetChange, str | None]) -> None:
        replica = self.replicas[number]
        by, version = change
        left: list[str] = []

        def change(known: ServingDocument | None) -> ServingDocument:
            left.append(known.version if known and known.version else "4")
            return following(known, by, version, "4", VERSIONS, POLICY)

        try:
            document = replica.fleet.write("m", str(self.place), change)
        except HPSError:
            self.know(replica)
            return
        assert by != "rollback" or left[0] in document.withdrawn
        assert document.number not in self.written or self.written[document.number] == document
        if self.written and replica.read is not None:
            assert document.number > replica.read.number
        self.written[document.number] = document
        self.old.append(self.file.read_bytes())
        self.know(replica)
        assert replica.fleet.shown("m") == document
        assert replica.fleet.problem("m") == ""

    @rule(first=REPLICA, second=REPLICA, version=st.sampled_from(VERSIONS))
    def write_at_the_same_time(self, first: int, second: int, version: str) -> None:
        """The second writer reads and writes between the first one's look and its write."""
        one, two = self.replicas[first], self.replicas[second]
        if one is two or one.link.cut or two.link.cut or (self.file.exists() and b'"format": 2' in self.file.read_bytes()):
            return
        inner: list[ServingDocument] = []

        def change(known: ServingDocument | None) -> ServingDocument:
            mine = following(known, "deploy", version, "", VERSIONS, POLICY)
            inner.append(
                two.fleet.write("m", str(self.place), lambda known: following(known, "deploy", "1", "", VERSIONS, POLICY))
            )
            return mine

        with pytest.raises(ConflictError, match="somebody else changed it at the same time"):
            one.fleet.write("m", str(self.place), change)
        (document,) = inner
        assert ServingDocument.model_validate_json(self.file.read_bytes()) == document
        self.written[document.number] = document
        self.old.append(self.file.read_bytes())
        self.know(one)
        self.know(two)

    @rule(number=REPLICA)
    def crash(self, number: int) -> None:
        self.replicas[number].start()
        self.look(self.replicas[number])

    @rule(number=REPLICA, cut=st.booleans())
    def cut(self, number: int, cut: bool) -> None:
        self.replicas[number].link.cut = cut

    @precondition(lambda self: self.file.exists())
    @rule(how=st.sampled_from(["gone", "damaged", "newer"]))
    def lose(self, how: str) -> None:
        if how == "gone":
            self.file.unlink()
        else:
            self.file.write_text({"damaged": '{"format": 1', "newer": '{"format": 2, "number": 1}'}[how])

    @precondition(lambda self: self.old)
    @rule(data=st.data())
    def restore_a_backup(self, data: st.DataObject) -> None:
        self.file.write_bytes(data.draw(st.sampled_from(self.old)))

    @invariant()
    def chooses_nothing_that_was_withdrawn(self) -> None:
        for replica in self.replicas:
            if replica.read is None:
                continue
            known = replica.fleet.of("m", str(self.place))
            assert known is not None
            assert known.number >= replica.read.number
            (chosen,) = known.to_serve(VERSIONS, POLICY) or [""]
            if known == replica.read:
                assert chosen not in known.withdrawn
                assert not chosen or known.allows(chosen) or known.version not in VERSIONS


TestFleet = FleetMachine.TestCase
TestFleet.settings = settings(max_examples=20, stateful_step_count=20, deadline=None, print_blob=True)
