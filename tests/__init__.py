"""The tests, in rings: see docs/testing.md."""

from pathlib import Path

ROOT = Path(__file__).parents[1]
"""The top of the repository."""
