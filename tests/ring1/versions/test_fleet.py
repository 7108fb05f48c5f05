"""What follows a change of a fleet, what a replica serves by the document, and which documents it believes."""

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

import hps
from hps.configuration.models import VersionPolicy
from hps.errors import ModelFileChangedError
from hps.filesystems.base import FileStatus
from hps.filesystems.local import LocalFileSystem
from hps.versions import fleet as fleet_module
from hps.versions.fleet import Fleet, FleetChange, ServingDocument, next_document
from hps.versions.kept_files import KeptFiles
from tests.fakes.clock import Clock

VERSIONS = ["1", "2", "3", "4"]
LATEST, TWO, SPECIFIC = VersionPolicy(), VersionPolicy(2), VersionPolicy(0, ("1", "3"))
NOTHING = ("", "", ())
Said = tuple[str, str, tuple[str, ...]]
"""Version, previous version and withdrawn ones."""


def document(version: str = "", previous: str = "", withdrawn: tuple[str, ...] = (), number: int = 5, **others: Any) -> Any:
    content = {"number": number, "version": version, "previous": previous, "withdrawn": withdrawn} | others
    return ServingDocument(**{"by": "deploy", "since": 86_400.0, "writer": "w"} | content)


def said(one: ServingDocument) -> Said:
    return one.version, one.previous, one.withdrawn


# -- the document after a change ------------------------------------------------------------------------------------------


CHANGES: list[tuple[str, Any, Any, str, Said]] = [
    # The first document of a model.
    ("deploy", None, "2", "3", ("2", "3", ())),
    ("deploy", None, None, "2", ("4", "2", ())),
    ("deploy", None, "2", "", ("2", "", ())),
    ("deploy", None, "3", "3", ("3", "", ())),
    ("rollback", None, None, "3", ("2", "", ("3",))),
    ("unpin", None, None, "3", NOTHING),
    # The same version twice: the one before it stays the one to go back to.
    ("deploy", ("3", "2", ()), "3", "3", ("3", "2", ())),
    ("deploy", ("3", "2", ()), "3", "2", ("3", "2", ())),
    ("deploy", ("4", "2", ()), None, "4", ("4", "2", ())),
    # Another version, above, below, and one that was withdrawn.
    ("deploy", ("3", "2", ()), "4", "3", ("4", "3", ())),
    ("deploy", ("4", "3", ("2",)), "1", "4", ("1", "4", ("2",))),
    ("deploy", ("2", "", ("3",)), "3", "2", ("3", "2", ())),
    ("deploy", ("2", "", ("4",)), None, "2", ("3", "2", ("4",))),
    ("deploy", ("2", "4", ("4",)), "2", "2", ("2", "", ("4",))),
    ("deploy", ("", "", ("4",)), "1", "3", ("1", "3", ("4",))),
    # What the document says counts, not what a replica serves yet.
    ("deploy", ("3", "2", ()), "1", "4", ("1", "3", ())),
    ("rollback", ("3", "2", ()), None, "4", ("2", "", ("3",))),
    # To the version before, if there is one; else to the next one below that was not withdrawn.
    ("rollback", ("4", "1", ()), None, "4", ("1", "", ("4",))),
    ("rollback", ("4", "9", ()), None, "4", ("3", "", ("4",))),
    ("rollback", ("4", "4", ()), None, "4", ("3", "", ("4",))),
    ("rollback", ("2", "", ("3",)), None, "2", ("1", "", ("3", "2"))),
    ("rollback", ("3", "", ("2",)), None, "3", ("1", "", ("2", "3"))),
    ("rollback", ("", "", ("4",)), None, "3", ("2", "", ("4", "3"))),
    ("rollback", ("9", "", ()), None, "9", ("4", "", ("9",))),
    # Withdrawn versions stay withdrawn, each named once.
    ("unpin", ("2", "1", ("3",)), None, "2", ("", "", ("3",))),
    ("rollback", ("3", "2", ("3", "4", "3")), None, "3", ("2", "", ("3", "4"))),
]


@pytest.mark.parametrize(("by", "known", "version", "serving", "expected"), CHANGES)
def test_a_change_is_followed_by_the_document_that_it_means(
    by: FleetChange, known: Said | None, version: str | None, serving: str, expected: Said
) -> None:
    made = next_document(known and document(*known), by, version, serving, VERSIONS, LATEST)
    assert (said(made), made.by) == (expected, by)


def test_a_deployment_without_a_version_takes_the_last_that_the_policy_chooses() -> None:
    assert next_document(None, "deploy", None, "", VERSIONS, SPECIFIC).version == "3"
    assert next_document(document("", "", ("3",)), "deploy", None, "", VERSIONS, SPECIFIC).version == "1"


@pytest.mark.parametrize(
    ("by", "known", "version", "serving", "versions", "complaint"),
    [
        ("deploy", None, "9", "4", VERSIONS, "got '9', expected one of 1, 2, 3, 4"),
        ("deploy", None, "9" * 50, "4", VERSIONS, f"got '{'9' * 40}', expected"),
        ("deploy", None, None, "", [], "got 'none', expected one of none"),
        ("deploy", ("2", "", ("1",)), None, "2", ["1"], "got 'none', expected one of 1"),
        *(
            ("rollback", None, None, at, VERSIONS, f"from {at or 'none'}; versions are 1, 2, 3, 4, withdrawn none")
            for at in ("1", "")
        ),
        ("rollback", ("2", "", ("1",)), None, "2", ["2"], "from 2; versions are 2, withdrawn 1"),
        ("rollback", ("2", "2", ("1",)), None, "2", VERSIONS, "from 2; .* withdrawn 1"),
        ("rollback", ("2", "", ()), None, "2", [], "versions are none, withdrawn none"),
    ],
)
def test_a_change_that_leads_nowhere_is_refused(
    by: FleetChange, known: Said | None, version: str | None, serving: str, versions: list[str], complaint: str
) -> None:
    with pytest.raises(hps.UnknownVersionError if by == "deploy" else hps.ConflictError, match=complaint):
        next_document(known and document(*known), by, version, serving, versions, LATEST)


@pytest.mark.parametrize(
    ("now", "known", "number"),
    [
        (0.0, None, 1),
        (2e-6, None, 2),
        (1.0, None, 1_000_000),
        (1.0, 999_998, 1_000_000),
        (1.0, 999_999, 1_000_000),
        (1.0, 1_000_000, 1_000_001),
        (1.0, 5_000_000, 5_000_001),
    ],  # the last of a writer whose clock is ahead
)
def test_numbers_ascend_whatever_the_clock_says(
    monkeypatch: pytest.MonkeyPatch, now: float, known: int | None, number: int
) -> None:
    monkeypatch.setattr("hps.versions.fleet.time.time", Clock(now))
    one, two = (next_document(known and document("1", number=known), "deploy", "2", "1", VERSIONS, LATEST) for _ in range(2))
    assert (one.number, one.since) == (number, now)
    assert one != two, "another writer's"
    assert one == two.model_copy(update={"writer": one.writer})


@pytest.mark.parametrize("count", [99, 100])
def test_the_last_hundred_withdrawn_versions_are_remembered(count: int) -> None:
    withdrawn = tuple(str(number) for number in range(10, 10 + count))
    made = next_document(document("4", "3", withdrawn), "rollback", None, "4", VERSIONS, LATEST)
    assert made.withdrawn == (*withdrawn[count - 99 :], "4")


# -- what a document says --------------------------------------------------------------------------------------------------


CHOICES: list[tuple[Said, VersionPolicy, list[str]]] = [
    (("3", "2", ()), LATEST, ["3"]),
    (("3", "2", ()), TWO, ["2", "3"]),
    (("3", "", ("2",)), TWO, ["1", "3"]),
    (("2", "", ("2",)), LATEST, ["2"]),  # it is named
    (("2", "", ()), SPECIFIC, ["1", "2"]),
    # Not there yet: what was served before.
    (("5", "2", ()), LATEST, ["2"]),
    (("5", "2", ()), TWO, ["1", "2"]),
    (("5", "2", ("2",)), LATEST, ["4"]),
    (("5", "9", ("4",)), LATEST, ["3"]),
    (("5", "", ()), LATEST, ["4"]),
    (("5", "2", tuple(VERSIONS)), TWO, []),
    # What the policy chooses.
    (NOTHING, LATEST, ["4"]),
    (("", "", ("4", "3")), LATEST, ["2"]),
    (("", "", ("4",)), TWO, ["2", "3"]),
    (("", "", tuple(VERSIONS)), LATEST, []),
]


@pytest.mark.parametrize(("known", "policy", "chosen"), CHOICES)
def test_a_document_chooses_versions(known: Said, policy: VersionPolicy, chosen: list[str]) -> None:
    assert document(*known).desired.chosen(VERSIONS, policy) == chosen


@pytest.mark.parametrize(
    ("known", "allowed"),
    [(("2", "1", ("3",)), ["2"]), (("2", "", ("2",)), ["2"]), (("", "", ("3",)), ["1", "2", "4"]), (("", "", ()), VERSIONS)],
)
def test_a_replica_follows_with_certain_versions_alone(known: Said, allowed: list[str]) -> None:
    assert [version for version in VERSIONS if document(*known).desired.allows(version)] == allowed


@pytest.mark.parametrize(
    "wrong",
    [
        {"number": 0},
        {"number": "5"},
        {"version": "two"},
        {"previous": "../2"},
        {"withdrawn": ("1",) * 101},
        {"by": "undeploy"},
        {"since": -1.0},
        {"since": 2e11},
        {"writer": ""},
        {"writer": "w" * 65},
        {"other": 1},
    ],
    ids=str,
)
def test_what_is_no_document_is_refused(wrong: dict[str, Any]) -> None:
    assert document("1", "2", ("3",) * 100, 1, since=0.0, writer="w" * 64).number == 1, "the bounds are allowed"
    with pytest.raises(ValidationError):
        document(**wrong)


# -- which documents a replica believes ----------------------------------------------------------------------------------


class Repository(LocalFileSystem):
    """A repository whose host may be away, and whose files somebody writes while they are read.

    Attributes:
        interrupted: so many of the next looks find that the file was replaced meanwhile.
        meanwhile: called before a file is replaced.
        looks: at files.
    """

    def __init__(self) -> None:
        super().__init__()
        self.away = False
        self.interrupted = 0
        self.looks = 0
        self.meanwhile: Callable[[], object] = lambda: None

    def locate(self, source: str) -> tuple[LocalFileSystem, str]:
        return self, source

    def status(self, path: str) -> FileStatus:
        self.looks += 1
        if self.away:
            raise hps.ModelSourceError(f"opening {path}: no answer")
        if self.interrupted:
            self.interrupted -= 1
            raise ModelFileChangedError(f"reading {path}: it was replaced")
        return super().status(path)

    def replace(self, path: str, content: bytes, version: str) -> str:
        self.meanwhile()
        return super().replace(path, content, version)


class Replica:
    """A fleet's replica, which keeps documents in a directory of its own."""

    def __init__(self, place: Path, kept: Path | None = None) -> None:
        self.repository, self.place, self.file = Repository(), str(place), place / "serving.json"
        self._kept = kept
        self.start()

    def start(self) -> None:
        self.fleet = Fleet(self.repository, KeptFiles(self._kept, "hps-fleet"))  # type: ignore[arg-type]

    def read(self) -> str | None:
        """Read the document; returns the version that it says."""
        self.fleet.read("m", self.place)
        return self.shown

    @property
    def shown(self) -> str | None:
        known = self.fleet.known("m")
        return None if known is None else known.version

    @property
    def problem(self) -> str:
        return self.fleet.problem("m")

    def write(self, version: str, number: int) -> ServingDocument:
        return self.fleet.write("m", self.place, lambda known: document(version, number=number))


@pytest.fixture
def one(tmp_path: Path) -> Replica:
    (tmp_path / "model").mkdir()
    (tmp_path / "kept").mkdir()
    return Replica(tmp_path / "model", tmp_path / "kept")


@pytest.fixture
def two(one: Replica) -> Replica:
    return Replica(Path(one.place))


def test_a_document_is_read_when_it_is_first_asked_for_and_then_when_somebody_says_so(one: Replica, two: Replica) -> None:
    assert one.fleet.of("m", "") is None
    assert one.repository.looks == 0, "a model without a directory of versions has none"
    assert (one.shown, one.problem, one.fleet.age_s("m")) == (None, "", None)
    assert one.fleet.of("m", one.place) is None
    two.write("1", 10)
    assert one.fleet.of("m", one.place) is None
    assert one.read() == "1"
    assert one.fleet.of("m", one.place) == two.fleet.known("m")
    assert str(one.fleet.of("m", one.place)) == "version 1 (by deploy, 1970-01-02 00:00:00 UTC)"
    assert str(document(by="unpin")) == "what the version_policy chooses (by unpin, 1970-01-02 00:00:00 UTC)"


@pytest.mark.parametrize(("number", "believed"), [(9, False), (10, False), (11, True)])
def test_another_document_counts_only_with_a_higher_number(one: Replica, number: int, believed: bool) -> None:
    one.write("1", 10)
    one.file.write_text(document("2", number=number).model_dump_json())
    for _ in range(2):
        assert one.read() == ("2" if believed else "1")
        assert one.problem == "" if believed else f"it went back from number 10, which said {document('1')}" in one.problem
    assert one.write("3", 12).version == one.read()
    assert one.problem == "", "a new document heals it"


SPOILT = [
    (b"{", "it is not a serving document (it: Invalid JSON"),
    (b"[" * 10_000, "it is not a serving document"),
    (b'{"format": 1, "number": "one", "by": "deploy", "since": 1, "writer": "x"}', "not a serving document (number: "),
    (b" " * ((16 << 10) + 1), "got 16385 bytes, expected at most"),
    (b'{"format": 3, "serve": "3"}', "a newer release of hps wrote it; update this replica"),
    (b'{"format": "2"}', "it is not a serving document"),
    (None, "it is gone; the last one said version 1"),
]


@pytest.mark.parametrize(("content", "why"), SPOILT, ids=range(len(SPOILT)))
def test_what_cannot_be_a_document_changes_nothing_also_after_a_restart(
    one: Replica, content: bytes | None, why: str, caplog: pytest.LogCaptureFixture
) -> None:
    one.write("2", 9)
    one.write("1", 10)
    before = one.file.read_bytes()
    one.file.unlink() if content is None else one.file.write_bytes(content)
    for _ in range(2):
        assert (one.read(), why in one.problem) == ("1", True), one.problem
    assert caplog.text.count("what the fleet serves is not known to be current") == 1, "it is said once"
    one.start()
    assert one.fleet.of("m", one.place) == document("1", number=10)
    assert why in one.problem
    if content and b'"format": 3' not in content and len(content) <= 16 << 10:
        assert one.write("3", 11).version == one.read()
    else:
        one.file.write_bytes(before)
        assert one.read() == "1", "the same document is no step back"
    assert one.problem == ""


def test_a_replica_that_never_read_a_document_serves_nothing_by_guess(two: Replica) -> None:
    two.file.write_text("{")
    for _ in range(2):
        with pytest.raises(hps.ModelFileError, match="not a serving document"):
            two.fleet.of("m", two.place)
    two.repository.away = True
    two.start()
    with pytest.raises(hps.ModelSourceError, match="no answer"):
        two.fleet.of("m", two.place)


def test_while_the_repository_is_away_the_last_document_ages(one: Replica, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(100.0)
    monkeypatch.setattr("hps.versions.fleet.time.monotonic", clock)
    one.write("1", 10)
    clock.now = 103.0
    assert one.fleet.age_s("m") == 3.0
    one.read()
    assert one.fleet.age_s("m") == 0.0
    one.repository.away = True
    for age in (4.0, 9.0):
        clock.now = 103.0 + age
        assert (one.read(), one.fleet.age_s("m")) == ("1", age)
        assert one.problem.endswith("no answer")
    with pytest.raises(hps.ModelSourceError):
        one.write("2", 11)
    one.repository.away = False
    assert (one.read(), one.problem, one.fleet.age_s("m")) == ("1", "", 0.0)


def test_a_file_that_did_not_change_is_not_read_again(one: Replica, monkeypatch: pytest.MonkeyPatch) -> None:
    one.write("1", 10)
    reads = []
    monkeypatch.setattr(Repository, "read_into", lambda *arguments, **more: reads.append(arguments))
    assert (one.read(), one.problem, reads) == ("1", "", [])


@pytest.mark.parametrize(("interrupted", "read"), [(1, True), (2, True), (3, False)])
def test_a_read_that_a_writer_interrupts_is_tried_three_times(one: Replica, two: Replica, interrupted: int, read: bool) -> None:
    two.write("1", 10)
    one.repository.interrupted = interrupted
    assert one.read() == ("1" if read else None)
    assert one.problem == "" if read else one.problem.endswith("it was replaced")
    assert one.read() == "1"


def test_a_change_between_the_look_and_the_decision_is_noticed(one: Replica, two: Replica, monkeypatch: Any) -> None:
    """The content is looked at again before a decision is made on it."""
    two.write("1", 10)
    found, calls = fleet_module.read_small_file, []

    def read(*arguments: Any, **more: Any) -> Any:
        calls.append(arguments)
        if len(calls) == 2:
            two.write("3", 11)
        return found(*arguments, **more)

    with monkeypatch.context() as patch:
        patch.setattr(fleet_module, "read_small_file", read)
        with pytest.raises(hps.ConflictError, match="it was changed just now; read it"):
            one.write("2", 12)
    assert one.read() == "3"


def test_a_document_of_a_newer_release_is_not_overwritten(one: Replica) -> None:
    one.write("1", 10)
    one.file.write_text('{"format": 3}')
    for _ in range(2):
        with pytest.raises(hps.ConflictError, match="change the fleet with that release"):
            one.write("2", 11)
    assert one.file.read_text() == '{"format": 3}'
    one.file.write_text('{"format": 0}')
    assert one.write("2", 11).version == "2"


def test_a_kept_copy_that_is_damaged_is_said_and_is_none(one: Replica, caplog: pytest.LogCaptureFixture) -> None:
    one.write("1", 10)
    one.file.unlink()
    [kept] = (one.file.parent.parent / "kept" / "hps-fleet").iterdir()
    for text in ("{", json.dumps({"number": 1})):
        kept.write_text(text)
        one.start()
        assert one.read() is None
    assert caplog.text.count("the kept copy of its serving.json is unusable") == 2


def test_a_disk_that_cannot_keep_the_document_is_said(one: Replica, caplog: pytest.LogCaptureFixture) -> None:
    (one.file.parent.parent / "kept" / "hps-fleet").write_text("no directory")
    caplog.set_level(logging.ERROR)
    for number in (10, 11):
        assert one.write(str(number), number).version == one.shown
    assert caplog.text.count("keeping the serving.json beside the persistent database failed") == 2
