"""What the README says of the repository; `ring2/repo/test_readme.py` follows its first screen."""

import re

from tests import ROOT

README = (ROOT / "README.md").read_text()


def test_the_readme_is_read_to_the_end_and_has_the_table_of_the_index() -> None:
    assert len(README.splitlines()) <= 90
    table = [re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", line) for line in README.splitlines() if line.startswith("| ")]
    index = [re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", line) for line in (ROOT / "docs" / "index.md").read_text().splitlines()]
    of_index = index[index.index("| you want to | read |") : index.index("", index.index("| you want to | read |"))]
    assert [line.replace(" (`make site`)", "") for line in table[-len(of_index) :]] == of_index
    links = re.findall(r"\]\((?!http)([^)#]+)", README)
    assert [path for path in links if not (ROOT / path).exists()] == []


def test_commands_are_where_the_makefile_installs_them() -> None:
    """A fresh clone has `hps` in .venv/bin and nowhere else."""
    commands = re.findall(r"(?:^    |`)((?:\S+/)?(?:hps|python) [^`\n]+)", README, re.MULTILINE)
    assert commands
    assert [command for command in commands if not command.startswith(".venv/bin/")] == []
