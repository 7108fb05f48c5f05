"""Parts of a benchmark that fail one by one: each has a time limit, and becomes a row with its error where it fails."""

import faulthandler
import json
import signal
import time
import traceback
from collections.abc import Callable
from typing import Any

from benchmarks.harness import Report

_HANG_S = 20  # beyond a part's limit: then nothing but the end of the process helps


def add(report: Report, axes: dict[str, Any], figures: dict[str, Any]) -> None:
    """Record a row, and print it: whatever happens later, it is not lost."""
    report.add(axes, figures)
    print(json.dumps(report.rows[-1]), flush=True)


def part(report: Report, name: str, limit_s: int, call: Callable[[], Any]) -> Any:
    """Call one part; None where it failed, which is a row then. Parts may be nested: the inner one's limit counts meanwhile.

    A device that hangs ends the process, with a traceback.
    """

    def late(_signal: int, _frame: Any) -> None:
        raise TimeoutError(f"not done after {limit_s} s")

    start = time.perf_counter()
    before = signal.signal(signal.SIGALRM, late)
    left = signal.alarm(limit_s)
    faulthandler.dump_traceback_later(limit_s + _HANG_S, exit=True)
    try:
        return call()
    except Exception as error:  # noqa: BLE001 - it becomes a row
        traceback.print_exc()
        add(report, {"work": name}, {"error": f"{type(error).__name__}: {error}"[:500]})
        return None
    finally:
        seconds = time.perf_counter() - start
        faulthandler.cancel_dump_traceback_later()
        signal.signal(signal.SIGALRM, before)
        signal.alarm(max(1, left - int(seconds)) if left else 0)
        if left:
            faulthandler.dump_traceback_later(max(1, left - int(seconds)) + _HANG_S, exit=True)
        print(f"# {name}: {seconds:.1f} s", flush=True)
