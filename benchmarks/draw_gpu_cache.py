"""Draws `docs/gpu-cache.svg` from `results/gpu_cache.json`: `python -m benchmarks.draw_gpu_cache`."""

import json
import math
from pathlib import Path

from benchmarks.harness import RESULTS

_PICTURE = Path(__file__).parents[1] / "docs" / "gpu-cache.svg"
_LINES = {
    "gather_mkeys_per_s": ("plain gather of known rows", "#888888"),
    "mkeys_per_s": ("query of the embedding cache", "#0b6e4f"),
    "torch_index_select_mkeys_per_s": ("torch.index_select", "#b85c00"),
}
_WIDTH, _HEIGHT, _LEFT, _TOP = 380, 300, 70, 50


def main() -> None:
    """Write the picture."""
    rows = json.loads((RESULTS / "gpu_cache.json").read_text())["rows"]
    queries = [row for row in rows if row["axes"]["work"] == "query" and row["axes"]["alpha"] == 0]
    panels = [_panel(dim, [row for row in queries if row["axes"]["dim"] == dim], place) for place, dim in enumerate((32, 128))]
    legend = [
        f'<text x="{_LEFT + 250 * i}" y="20" fill="{color}">&#9644; {name}</text>'
        for i, (name, color) in enumerate(_LINES.values())
    ]
    size = f'width="{2 * (_WIDTH + _LEFT) + 20}" height="{_HEIGHT + _TOP + 50}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="12">'
    white = '<rect width="100%" height="100%" fill="white"/>'
    _PICTURE.write_text("\n".join([head, white, *legend, *panels, "</svg>"]) + "\n")
    print(_PICTURE)


def _panel(dim: int, rows: list[dict[str, dict[str, float]]], place: int) -> str:
    left = _LEFT + place * (_WIDTH + _LEFT)
    rows = sorted(rows, key=lambda row: row["axes"]["batch"])
    low, high = math.log2(rows[0]["axes"]["batch"]), math.log2(rows[-1]["axes"]["batch"])
    top = math.log10(20_000)
    bottom = math.log10(100)

    def x(batch: float) -> float:
        return left + (math.log2(batch) - low) / (high - low) * (_WIDTH - 40)

    def y(rate: float) -> float:
        return _TOP + (top - math.log10(max(rate, 100))) / (top - bottom) * _HEIGHT

    parts = [f'<text x="{left}" y="{_TOP - 12}" font-weight="bold">dim {dim}: million keys a second by batch size</text>']
    for rate in (100, 200, 500, 1000, 2000, 5000, 10_000, 20_000):
        parts.append(f'<line x1="{left}" x2="{left + _WIDTH - 40}" y1="{y(rate):.1f}" y2="{y(rate):.1f}" stroke="#dddddd"/>')
        parts.append(f'<text x="{left - 6}" y="{y(rate) + 4:.1f}" text-anchor="end">{rate:,}</text>')
    for row in rows[::2]:
        batch = int(row["axes"]["batch"])
        name = f"{batch >> 10}k" if batch < 1 << 20 else f"{batch >> 20}M"
        parts.append(f'<text x="{x(batch):.1f}" y="{_TOP + _HEIGHT + 18}" text-anchor="middle">{name}</text>')
    for figure, (_name, color) in _LINES.items():
        points = " ".join(f"{x(row['axes']['batch']):.1f},{y(row['figures'][figure]):.1f}" for row in rows)
        parts.append(f'<polyline points="{points}" fill="none" stroke="{color}" stroke-width="2"/>')
    return "\n".join(parts)


if __name__ == "__main__":
    main()
