"""What ring 2 shows of names, tokens and secrets with fronts and a log of text, with a log of JSON."""

from pathlib import Path
from typing import Any

from tests.ring2.versions.test_identity import document as document  # a fixture
from tests.ring2.versions.test_identity import no_secret_is_told
from tests.servers.child_processes import ChildProcesses


def test_no_secret_is_in_a_log_of_json(children: ChildProcesses, tmp_path: Path, document: dict[str, Any]) -> None:
    no_secret_is_told(children, tmp_path, document, "json")
