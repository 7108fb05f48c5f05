"""`python -m benchmarks NAME...`: run benchmarks, print their tables and write their results; without a name, list them."""

import argparse
import sys
from importlib import import_module
from pathlib import Path

from benchmarks import compare
from benchmarks.harness import RESULTS, Report

CASES = {  # name: what is measured, and beside what
    "numpy_cache": "the embedding cache on a CPU, beside np.take",
    "hash_map": "the hash map, beside np.take and a dict",
    "rocks_db": "RocksDB, beside rocksdict",
    "row_files": "row files, beside RocksDB: loads, starts, lookups warm, cold, and beside a writer",
    "row_file_store": "a sealed version of 2 GB from object storage: the first answer, and all until it is here",
    "redis": "Redis, one server and three, beside a raw socket and redis-py",
    "row_bytes": "rows per GB in each row format, in every host tier",
    "load": "a load of each tier from files, beside the same from memory",
    "sources": "reading from disk, HDFS, S3 and GCS, beside their own clients",
    "http": "the HTTP service, beside a raw ASGI echo and a bare orjson route",
    "grpc": "gRPC beside HTTP: requests a second, processor time of a request",
    "client": "hps.connect beside a raw socket, urllib3, httpx and tritonclient; sockets beside shared memory",
    "canary": "lookups beside a canary and a shadow, and without",
    "writes": "lookups beside online writes over HTTP",
    "updates": "updates from Kafka and Redis Streams: delay, rate, lookups beside them",
    "checks": "checks of a version: duration, share of a core, lookups beside them",
    "aging": "rows that expire: processor time, memory, lookups beside them (row_ttl_s)",
    "refresh": "lookups beside a refresh (GPU or CPU)",
    "plan": "predicted and measured hit rates (GPU or CPU)",
    "row_formats": "the AUC of a DLRM with rows in fewer bits, beside float32",
    "cold_start": "the first lookup after an installation: nothing compiled, compiled before, compiled ahead",
    "gpu_cache": "GPU: kernels of the cache, beside a plain gather and torch",
    "gpu_lookup": "GPU: whole lookups from Python, prepared or not and through a layer, beside torch; a warm-up",
    "misses": "GPU: misses by the link and by a copy, beside a gather over the link",
    "file_misses": "GPU: misses by the link from a row file, beside the hash map, and the start of one",
    "sharing": "GPU: devices that share the rows of a cache, beside copies on each, and a gather from both memories",
    "pooled": "GPU: pooled lookups, beside a plain kernel and torch",
    "scores": "scores of a whole model over HTTP, beside a plain FastAPI application (GPU or CPU)",
    "loadgen": "scores under MLCommons LoadGen, scenarios Server and Offline (GPU or CPU)",
    "dlrmv3": "the sparse stage of MLPerf's DLRMv3: 8,048 rows of 512 float16 a query, also under LoadGen (GPU or CPU)",
}


def main() -> None:
    """Run the named benchmarks, or compare checkouts."""
    if sys.argv[1:2] == ["compare"]:
        compare.main(sys.argv[2:])
    listed = "\n".join(f"  {name:12} {what}" for name, what in CASES.items())
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description=__doc__,
        epilog=f"benchmarks:\n{listed}\n\n  compare --against CHECKOUT   this checkout beside another, in turn",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("names", nargs="*", choices=[*CASES, []], metavar="NAME", help="as below")
    parser.add_argument("--out", type=Path, default=RESULTS, help="directory of the results (default: %(default)s)")
    parser.add_argument("--quick", action="store_true", help="small sizes, to see that it runs; the figures mean nothing")
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    if not arguments.names:
        parser.print_help()
        return
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
