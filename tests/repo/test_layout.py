"""What keeps the house one that a newcomer finds the way around in."""

from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_no_drawer_for_everything():
    names = {path.stem for path in (ROOT / "hps").rglob("*.py")}
    assert not names & {"utils", "util", "helpers", "common", "misc"}
