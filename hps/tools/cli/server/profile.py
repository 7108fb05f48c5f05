"""`hps profile`: measure lookups in process or of a running server, and show where their time goes."""

import json
import os
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from hps import errors
from hps.tools.cli import console
from hps.tools.cli.pictures import check_picture, draw_profile
from hps.tools.cli.running_server import Certificate

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console

    from hps.tools.profiling.in_process import InProcess
    from hps.tools.profiling.keys import Workload
    from hps.tools.profiling.profile import Profile, Row
    from hps.tools.profiling.service import Service
    from hps.types import KeyArray

EXAMPLE = "Example: `hps profile http://127.0.0.1:8000 --rate 2000 --rate 4000 --p99-ms 5 --picture rates.svg`"
_BATCH = 1000
_STAGE_TEXTS = {"http": "HTTP request", "lookup": "complete lookup", "outside": "outside of stages"}


def profile_command(
    target: Annotated[
        str, typer.Argument(metavar="CONFIG|URL", help="A ps.json, or the URL of a running server.", show_default=False)
    ],
    model: Annotated[str, typer.Option(help="Name of the model; required if there are several.", show_default=False)] = "",
    table: Annotated[list[str] | None, typer.Option(help="Look up in this table; may be repeated. Default: all.")] = None,
    batch: Annotated[
        list[int] | None,
        typer.Option(help="Keys per table of a lookup; repeat for more rows. Default: 1000, or as many as the model takes."),
    ] = None,
    concurrency: Annotated[int, typer.Option(min=1, help="Threads; of a server, connections.")] = 4,
    rate: Annotated[
        list[float] | None,
        typer.Option(
            help="Lookups per second, independent of the answers; latencies count from the time when each is due. Repeat for "
            "more rows of results. Default: each begins when the previous one ends."
        ),
    ] = None,
    seconds: Annotated[float, typer.Option(min=0.01, help="Duration of each measurement.")] = 10.0,
    warmup: Annotated[float, typer.Option(min=0.0, help="Seconds of warm-up before each row of results.")] = 2.0,
    distribution: Annotated[
        Literal["power-law", "hot-keys", "uniform"], typer.Option(help="The popularity of keys.")
    ] = "power-law",
    alpha: Annotated[float, typer.Option(min=0.0, help="Exponent of the power law.")] = 0.99,
    hot_key_percentage: Annotated[float, typer.Option(min=0.0, max=1.0, help="Share of the keys that are hot.")] = 0.2,
    hot_key_coverage: Annotated[float, typer.Option(min=0.0, max=1.0, help="Share of the requests for hot keys.")] = 0.8,
    rows: Annotated[
        int, typer.Option(min=0, help="Draw keys from 0 to ROWS - 1. Default: those of the model files; of a server, as many.")
    ] = 0,
    keys: Annotated[
        Path | None,
        typer.Option(help="Keys recorded by `hps serve --record-trace`, or a .npy of int64, instead of drawn keys."),
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of drawn keys.")] = 1,
    bags: Annotated[int, typer.Option(min=0, help="Keys per bag: ask for sums of bags instead of vectors.")] = 0,
    device: Annotated[int | None, typer.Option(help="In process: device of the embedding cache.", show_default=False)] = None,
    on_device: Annotated[bool, typer.Option("--on-device", help="In process: keys and vectors are on the GPU.")] = False,
    processes: Annotated[
        int | None,
        typer.Option(
            min=1, show_default=False, help="For a server: number of processes that send lookups. Default: half the processors."
        ),
    ] = None,
    token: Annotated[
        str,
        typer.Option(
            envvar=["HPS_BEARER_TOKEN", "HPS_ADMIN_TOKEN"],
            show_default=False,
            help="Token of the server. Safer in the environment, since all users of this machine see command lines.",
        ),
    ] = "",
    certificate: Certificate = None,
    check: Annotated[bool, typer.Option("--check", help="First look up some keys twice and compare the vectors.")] = False,
    p50_ms: Annotated[float | None, typer.Option("--p50-ms", help="Upper bound of p50.", show_default=False)] = None,
    p99_ms: Annotated[float | None, typer.Option("--p99-ms", help="Upper bound of p99.", show_default=False)] = None,
    min_keys_per_s: Annotated[float | None, typer.Option(help="Lower bound of the throughput.", show_default=False)] = None,
    min_hit_rate: Annotated[
        float | None, typer.Option(help="Lower bound of the embedding cache's hit rate, 0 to 1.", show_default=False)
    ] = None,
    max_failures: Annotated[float, typer.Option(min=0.0, max=1.0, help="The share of lookups that may fail.")] = 0.0,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write all figures to this file.", show_default=False)
    ] = None,
    picture: Annotated[Path | None, typer.Option(help="Draw the figures to this .svg or .png.", show_default=False)] = None,
) -> None:
    """Measure the speed of lookups, where their time goes, and which tier answers.

    CONFIG is opened in this process, without HTTP. A URL is a running server, whose own counters, over all clients, show where
    the time goes. Exit code 1 means that a bound is missed or that more lookups failed than `--max-failures`.
    """
    with console.reported(), ExitStack() as stack:
        from hps.tools.profiling.in_process import InProcess
        from hps.tools.profiling.keys import Workload
        from hps.tools.profiling.profile import Bounds, Profile
        from hps.tools.profiling.service import Service

        workload = Workload(distribution, alpha, hot_key_percentage, hot_key_coverage, seed)
        rates = [*(rate or ())] or [None]
        _check(batch or (), rates, bags, json_file, picture)
        profiler: Service | InProcess
        if "://" not in target:
            from hps.configuration.load import load_configuration
            from hps.parameter_server import HPS

            progress = stack.enter_context(console.progress())
            server = stack.enter_context(HPS(load_configuration(target), progress=progress))
            profiler = InProcess(server, model, table or (), bags, device, on_device)
        elif device is None and not on_device:
            profiler = Service(target, token, model, table or (), bags, processes, certificate)
        else:
            raise errors.InvalidInputError("profiling a server: --device and --on-device are for a CONFIG")
        batches = batch or [_default_batch(profiler.most_keys, len(profiler.tables), bags)]
        drawn = _keys(profiler, workload, keys, rows)
        profile = Profile(
            target,
            {
                "model": profiler.model,
                "tables": profiler.tables,
                "workload": f"keys of {keys}" if keys else workload.text,
                "bags": bags,
                "concurrency": concurrency,
                "warm_up_s": warmup,
            },
        )
        bounds = Bounds(p50_ms, p99_ms, min_keys_per_s, min_hit_rate, max_failures)
        screen = console.screen()
        header = f"{target}: model {profiler.model}, tables {', '.join(profiler.tables)}; {profile.about['workload']}"
        screen.print(header, soft_wrap=True)
        for size in batches:
            if check:
                profiler.check(drawn, size)
            for per_s in rates:
                profile.add(profiler.measure(drawn, size, concurrency, seconds, per_s, warmup), bounds)
        _print(screen, profile)
        if json_file is not None:
            try:
                with open(json_file, "w", opener=_open_without_waiting) as file:
                    file.write(json.dumps(asdict(profile), indent=2) + "\n")
            except OSError as error:
                raise errors.InvalidInputError(f"writing {json_file}: {error}") from error
        if picture is not None:
            draw_profile(picture, profile)
    if profile.missed:
        for text in profile.missed:
            typer.echo(f"missed: {text}", err=True)
        raise typer.Exit(1)


def _default_batch(most_keys: int, tables: int, bags: int) -> int:
    """Return the default keys per table of a lookup: a multiple of `bags`, at most 1000, within the model's limits."""
    from hps.configuration.load import ServiceConfig

    size = min(_BATCH, most_keys, max(1, ServiceConfig().max_keys_per_request // tables))
    return max(size - size % bags, bags) if bags else size


def _check(
    batches: "Sequence[int]", rates: "Sequence[float | None]", bags: int, json_file: Path | None, picture: Path | None
) -> None:
    """Refuse wrong options before anything is loaded."""
    if wrong := [size for size in batches if size < 1 or (bags and size % bags)]:
        expected = f"multiples of --bags {bags}" if bags else "at least 1"
        raise errors.InvalidInputError(f"reading --batch: got {wrong}, expected {expected}")
    if wrong_rates := [rate for rate in rates if rate is not None and not 0 < rate < 1e7]:
        raise errors.InvalidInputError(f"reading --rate: got {wrong_rates}, expected lookups a second")
    for file in (json_file, picture):
        if file is not None and not file.absolute().parent.is_dir():
            raise errors.InvalidInputError(f"writing {file}: its directory does not exist")
    check_picture(picture)


def _open_without_waiting(path: str, flags: int) -> int:
    """Open a file; a named pipe without a reader is an error instead of a wait."""
    descriptor = os.open(path, flags | os.O_NONBLOCK, 0o666)
    os.set_blocking(descriptor, True)
    return descriptor


def _keys(profiler: "Service | InProcess", workload: "Workload", keys: Path | None, rows: int) -> "dict[str, KeyArray]":
    """Choose the keys of each table."""
    if keys is not None:
        from hps.tools.profiling.keys import recorded_keys

        return recorded_keys(keys, profiler.model, profiler.tables)
    if rows:
        return {table: workload.draw(rows, index) for index, table in enumerate(profiler.tables)}
    available = profiler.known_keys()
    if unknown := [table for table, (count, _) in available.items() if not count]:
        raise errors.InvalidInputError(
            f"drawing keys of {', '.join(unknown)}: it is not known how many there are; give --rows, or recorded --keys"
        )
    return {table: workload.draw(count, index, ids) for index, (table, (count, ids)) in enumerate(available.items())}


def _print(screen: "Console", profile: "Profile") -> None:
    times_ms = ("p50 ms", "p95 ms", "p99 ms", "p99.9 ms", "max ms")
    lookups = console.table((), ("keys", "rate/s", "lookups/s", "keys/s", *times_ms, "failed"), title="Lookups")
    for row in profile.rows:
        times = row.latency
        quantiles = (times.p50_ms, times.p95_ms, times.p99_ms, times.p999_ms, times.max_ms)
        rate = f"{row.rate:,.10g}" if row.rate else "closed"
        failed = sum(row.failures.values())
        lookups.add_row(
            f"{row.batch:,} x {row.tables}",
            rate,
            f"{row.lookups_per_s:,.0f}",
            f"{row.keys_per_s:,.0f}",
            *(f"{ms:.3f}" for ms in quantiles),
            f"{failed:,}",
        )
    screen.print(lookups)
    for row in profile.rows:
        _print_row(screen, row)


def _print_row(screen: "Console", row: "Row") -> None:
    """Print where the time of one row of results went, and which tiers answered."""
    title = f"{row.batch:,} keys" + (f" at {row.rate:,.10g}/s" if row.rate else "")
    if row.stages:
        figures = ("lookups", "of the time", "mean us", "p50 us", "p99 us")
        stages = (
            (
                _STAGE_TEXTS.get(name, name),
                f"{times.count:,}",
                f"{times.share:.1%}",
                *(f"{us:,.1f}" for us in (times.mean_us, times.p50_us, times.p99_us)),
            )
            for name, times in row.stages.items()
        )
        screen.print(console.table(("stage",), figures, stages, title=f"Stages, {title}"))
    lines = [f"{name}: {tier.hit_rate:.2%} of {tier.asked:,} keys" for name, tier in row.tiers.items()]
    if lines:
        screen.print(f"hit rates: {'; '.join(lines)}; in no tier: {row.default_keys:,}", soft_wrap=True)
    for cause, count in row.failures.items():
        screen.print(f"failed: {count:,} x {cause}")
    if row.failures:
        screen.print(f"failed lookups took {row.failed.p50_ms:.3f} ms (p50), {row.failed.max_ms:.3f} ms at most")
    late = f"; lookups began {row.lateness.p99_ms:.3f} ms late (p99)" if row.rate else ""
    screen.print(f"the client's own work: {row.generator_busy:.2f} of a processor{late}")
