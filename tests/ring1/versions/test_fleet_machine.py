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
from hps.errors import ConflictError, HPSError
from hps.versions.fleet import FleetChange, ServingDocument, next_document
from tests.ring1.versions.test_fleet import Replica

VERSIONS = ["1", "2", "3", "4"]
POLICY = VersionPolicy()
REPLICA = st.integers(0, 2)
CHANGE: st.SearchStrategy[tuple[FleetChange, str | None]] = st.one_of(
    st.just(("rollback", None)),
    st.just(("unpin", None)),
    st.just(("deploy", None)),
    st.tuples(st.just("deploy"), st.sampled_from(VERSIONS)),
)


class FleetReplica(Replica):
    """A fleet's replica; the last one has no persistent database.

    Attributes:
        known: the highest document that it has read since it may have forgotten any.
    """

    def __init__(self, number: int, home: Path) -> None:
        self.known: ServingDocument | None = None
        kept = home / f"rocksdb-{number}" if number < 2 else None
        if kept is not None:
            kept.mkdir()
        super().__init__(home / "model", kept)

    def start(self) -> None:
        super().start()
        if self._kept is None:
            self.known = None


class FleetMachine(RuleBasedStateMachine):
    """`written` are the documents by number, `old` copies of the file that somebody may put back."""

    def __init__(self) -> None:
        super().__init__()
        self.home = Path(tempfile.mkdtemp(prefix="hps-fleet-"))
        self.place = self.home / "model"
        self.place.mkdir()
        self.file = self.place / "serving.json"
        self.replicas = [FleetReplica(number, self.home) for number in range(3)]
        self.written: dict[int, ServingDocument] = {}
        self.old: list[bytes] = []

    def teardown(self) -> None:
        shutil.rmtree(self.home)

    def look(self, replica: FleetReplica) -> None:
        """Read the document, and check that the replica knows what it has read."""
        replica.fleet.read("m", str(self.place))
        self.know(replica)

    def know(self, replica: FleetReplica) -> None:
        known = replica.fleet.known("m")
        if known is not None and (replica.known is None or known.number > replica.known.number):
            replica.known = known

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
            return next_document(known, by, version, "4", VERSIONS, POLICY)

        try:
            document = replica.fleet.write("m", str(self.place), change)
        except HPSError:
            self.know(replica)
            return
        assert by != "rollback" or left[0] in document.withdrawn
        assert document.number not in self.written or self.written[document.number] == document
        if self.written and replica.known is not None:
            assert document.number > replica.known.number
        self.written[document.number] = document
        self.old.append(self.file.read_bytes())
        self.know(replica)
        assert replica.fleet.known("m") == document
        assert replica.fleet.problem("m") == ""

    @rule(first=REPLICA, second=REPLICA, version=st.sampled_from(VERSIONS))
    def write_at_the_same_time(self, first: int, second: int, version: str) -> None:
        """The second writer reads and writes between the first one's look and its write."""
        one, two = self.replicas[first], self.replicas[second]
        if (
            one is two
            or one.repository.away
            or two.repository.away
            or (self.file.exists() and b'"format": 2' in self.file.read_bytes())
        ):
            return
        inner: list[ServingDocument] = []

        def change(known: ServingDocument | None) -> ServingDocument:
            mine = next_document(known, "deploy", version, "", VERSIONS, POLICY)
            inner.append(
                two.fleet.write("m", str(self.place), lambda known: next_document(known, "deploy", "1", "", VERSIONS, POLICY))
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
        self.replicas[number].repository.away = cut

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
            assert replica.fleet.check_integrity() == []
            if replica.known is None:
                continue
            known = replica.fleet.of("m", str(self.place))
            assert known is not None
            assert known.number >= replica.known.number
            (chosen,) = known.desired.chosen(VERSIONS, POLICY) or [""]
            if known == replica.known:
                assert chosen not in known.withdrawn
                assert not chosen or known.desired.allows(chosen) or known.version not in VERSIONS


TestFleet = FleetMachine.TestCase
TestFleet.settings = settings(max_examples=20, stateful_step_count=20, deadline=None, print_blob=True)
