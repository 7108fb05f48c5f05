"""`python -m benchmarks NAME...`: run benchmarks, print their tables and write their results."""

import argparse
import sys
from importlib import import_module
from pathlib import Path

from benchmarks.harness import RESULTS, Report


def main() -> None:
    """Run the named benchmarks."""
    names = sorted(path.stem.removeprefix("bench_") for path in Path(__file__).parent.glob("bench_*.py"))
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("names", nargs="+", choices=names, metavar="NAME", help=f"one or more of: {', '.join(names)}")
    parser.add_argument("--out", type=Path, default=RESULTS, help="directory of the results (default: %(default)s)")
    parser.add_argument("--quick", action="store_true", help="small sizes, to see that it runs; the figures mean nothing")
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    failed = False
    for name in arguments.names:
        report = Report(name, seed=arguments.seed)
        import_module(f"benchmarks.bench_{name}").run(report, arguments.quick)
        report.show()
        print(report.write(arguments.out))
        failed |= any("error" in row["figures"] for row in report.rows)
    sys.exit(failed)


if __name__ == "__main__":
    main()
