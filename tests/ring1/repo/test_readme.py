"""What the README and the first page say of the repository, and how long all pages are; `tests/docs` follows their commands."""

import re

from docs.runbook_page import slug
from tests import ROOT

README = (ROOT / "README.md").read_text()
DOCS = ROOT / "docs"
MOST_WORDS = 52_000
TASKS = {  # what strangers come for, and the page that begins with it
    "migrating-from-hugectr.md": "HugeCTR",
    "whole-models.md": "torch",
    "kubernetes.md": "Kubernetes",
    "updates.md": "online",
    "planning.md": "memory",
    "slow.md": "slow",
    "extending.md": "tier",
}


def test_the_readme_is_read_to_the_end_and_has_the_table_of_the_index() -> None:
    assert len(README.splitlines()) <= 90
    table = [re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", line) for line in README.splitlines() if line.startswith("| ")]
    index = [re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", line) for line in (ROOT / "docs" / "index.md").read_text().splitlines()]
    of_index = index[index.index("| you want to | read |") : index.index("", index.index("| you want to | read |"))]
    assert [line.replace(" (`make site`)", "") for line in table[-len(of_index) :]] == of_index


def test_links_of_the_pages_beside_the_readme_lead_somewhere() -> None:
    """Those of the docs are checked when the site is built."""
    broken, seen = [], 0
    for page in ROOT.glob("*.md"):
        for path, anchor in re.findall(r"\]\((?!https?:)([^)#\s]*)#?([^)\s]*)\)", page.read_text()):
            target = ROOT / (path or page.name)
            headings = re.findall(r"^#+ (.+)$", target.read_text(), re.MULTILINE) if anchor and target.is_file() else []
            seen += 1
            if not target.exists() or anchor not in ["", *map(slug, headings)]:
                broken.append(f"{page.name}: {path}#{anchor}")
    assert (broken, seen > 80) == ([], True)


def test_commands_are_where_the_makefile_installs_them() -> None:
    """A fresh clone has `hps` in .venv/bin and nowhere else."""
    commands = re.findall(r"(?:^    |(?<!`)`)((?:\S+/)?(?:hps|python) [^`\n]+)", README, re.MULTILINE)
    assert commands
    assert [command for command in commands if not command.startswith(".venv/bin/")] == []


def test_the_first_page_and_the_site_lead_to_each_task_and_to_what_is_not_done() -> None:
    index, site = (DOCS / "index.md").read_text(), (ROOT / "mkdocs.yml").read_text()
    for page, task in TASKS.items():
        rows = [line for line in index.splitlines() if line.startswith("| ") and f"({page})" in line]
        assert [row for row in rows if task in row.split("|")[1]], f"index.md: {page} under {task!r}"
        assert [line for line in site.splitlines() if line.endswith(f": {page}") and task in line], f"mkdocs.yml: {page}"
    assert "\n## What it does not do\n" in index
    assert "(docs/index.md#what-it-does-not-do)" in README


def test_pages_are_no_longer_than_somebody_reads() -> None:
    words = {page.name: len(page.read_text().split()) for page in DOCS.glob("*.md")}
    assert sum(words.values()) <= MOST_WORDS, sorted(words.items(), key=lambda item: -item[1])[:8]
