"""Misses that the GPU reads from a row file in place, beside the same rows in a hash map whose index is on the device.

What is measured, and how, is that of `bench_misses.py`.
"""

from benchmarks.bench_misses import files
from benchmarks.harness import Report, gpu_facts


def run(report: Report, quick: bool) -> None:
    """Measure all of it; `quick` takes small tables."""
    report.about |= gpu_facts()
    files(report, quick)
