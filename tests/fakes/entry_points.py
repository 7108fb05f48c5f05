"""A package with entry points, as an installer leaves it."""

from collections.abc import Mapping
from pathlib import Path


def install(directory: Path, group: str, points: Mapping[str, str], package: str = "acme") -> None:
    """Write what `importlib.metadata` finds once the directory is on the path."""
    info = directory / f"{package}-2.1.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 2.1\n")
    lines = "\n".join(f"{name} = {target}" for name, target in points.items())
    (info / "entry_points.txt").write_text(f"[{group}]\n{lines}\n")
