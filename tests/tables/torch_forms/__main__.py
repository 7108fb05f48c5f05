"""Print what becomes of each form: `python -m tests.tables.torch_forms [part of a name] [format=onnx]`."""

import logging
import sys
import tempfile
import time
import warnings
from collections import Counter
from pathlib import Path

from tests.tables.torch_forms import FORMS
from tests.tables.torch_forms.judge import judge


def main(*arguments: str) -> None:
    settings = dict(argument.split("=") for argument in arguments if "=" in argument)
    parts = [argument for argument in arguments if "=" not in argument] or [""]
    counts: Counter[str] = Counter()
    for name, form in FORMS.items():
        if not any(part in name for part in parts):
            continue
        began = time.monotonic()
        with tempfile.TemporaryDirectory() as place:
            verdict = judge(form, Path(place), **settings)
        counts[verdict.outcome] += 1
        counts["wrong"] += verdict.wrong
        counts["not as expected"] += bool(verdict.faults)
        sizes = " ".join(f"{one.samples}x{one.length}" for one in verdict.guarded)
        said = verdict.reason or f"{verdict.answered} answered" + (f", refused at {sizes}" if sizes else "")
        sys.stdout.write(f"{name:36} {verdict.outcome:8} {time.monotonic() - began:5.1f} s  {said[:400]}\n")
        for note in verdict.notes:
            sys.stdout.write(f"{'':40} note: {note[:300]}\n")
        for fault in verdict.faults:
            sys.stdout.write(f"{'':36} FAULT: {fault[:400]}\n")
        sys.stdout.flush()
    sys.stdout.write(f"{sum(counts[one] for one in ('exact', 'guarded', 'refused', 'failed'))} forms: {dict(counts)}\n")


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    main(*sys.argv[1:])
