"""The release: its workflow is read and not run; the commands in it that need no runner are run as processes."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from deploy import release
from tests import ROOT

WORKFLOW = ROOT / ".github" / "workflows" / "release.yml"
JOBS = yaml.safe_load(WORKFLOW.read_text())["jobs"]
STEPS = [step for job in JOBS.values() for step in job["steps"]]
COMMANDS = [line.strip() for step in STEPS for line in step.get("run", "").splitlines()]


def run(*command, **options):
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False, timeout=300, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_workflow_pleases_zizmor():
    run(Path(sys.executable).with_name("zizmor"), "--offline", "--no-progress", WORKFLOW)


def test_every_action_is_one_commit_and_says_its_version():
    used = re.findall(r"uses: (.*)", WORKFLOW.read_text())
    assert len(used) == sum("uses" in step for step in STEPS) > 10
    assert [one for one in used if not re.fullmatch(r"[\w-]+/[\w-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+", one)] == []
    versions = {}
    for one in used:
        versions.setdefault(one.partition("@")[0], set()).add(one)
    assert all(len(found) == 1 for found in versions.values())


def test_a_job_may_do_what_it_does_and_pypi_comes_last():
    assert yaml.safe_load(WORKFLOW.read_text())["permissions"] == {}
    writes = {name: {key for key, value in job["permissions"].items() if value == "write"} for name, job in JOBS.items()}
    attesting = {"id-token", "attestations", "artifact-metadata"}
    assert writes == {"dist": set(), "images": {"packages", *attesting}, "chart": {"packages"}, "pypi": attesting}
    assert set(JOBS["pypi"]["needs"]) == JOBS.keys() - {"pypi"}
    assert all("timeout-minutes" in job for job in JOBS.values())


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for name in (*release.NAMED, "pyproject.toml", "CHANGELOG.md"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    return tmp_path


def test_all_files_name_one_version():
    assert list(release.disagreements()) == []


@pytest.mark.parametrize("name", release.NAMED)
def test_a_file_of_another_version_stops_a_release(tree, name):
    version = release.version_of(ROOT)
    text = (tree / name).read_text()
    last = text.rindex(version)  # one of several is enough
    (tree / name).write_text(f"{text[:last]}9.9.9{text[last + len(version) :]}")
    (problem,) = release.disagreements(tree)
    assert problem.startswith(f"{name}: got ")
    assert "9.9.9" in problem


def test_a_release_needs_its_tag_and_a_dated_heading(tree):
    version = release.version_of(ROOT)
    heading = f"CHANGELOG.md: expected a heading `## [{version}] - YYYY-MM-DD`"
    assert heading in release.check(f"v{version}", tree)
    changelog = (tree / "CHANGELOG.md").read_text()
    (tree / "CHANGELOG.md").write_text(changelog.replace("## [Unreleased]", f"## [{version}] - 2026-11-25"))
    assert release.check(f"v{version}", tree) == []
    assert f"the tag: got v9.9.9, expected v{version}" in release.check("v9.9.9", tree)
    assert f"the tag: got {version}, expected v{version}" in release.check(version, tree)
