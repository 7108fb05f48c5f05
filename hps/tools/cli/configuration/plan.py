"""`hps plan`: predict the memory and hit rates of a configuration before it is loaded."""

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hps import errors
from hps.ground.progress import size_text
from hps.tools.cli import console
from hps.tools.cli.pictures import check_picture, draw_plan

if TYPE_CHECKING:
    from rich.console import Console

    from hps.cache.base import KeptKernels
    from hps.ground.memory.capacity import Place
    from hps.tools.planning.device_sharing import SharingForecast
    from hps.tools.planning.forecast import Forecast, Suggestion
    from hps.tools.planning.memory import Machine, PlannedNeed, Total
    from hps.tools.planning.row_formats import FormatNeed
    from hps.tools.planning.set_ups import SetUp

EXAMPLE = "Example: `hps plan ps.json --trace keys.trace --goal 0.95 --picture plan.svg`"
_POWERS = ("", "K", "M", "G", "T")
_UNCERTAIN = "? fewer than 200 recorded keys fit such a cache: it may be off by more than 0.02. Record at a higher rate"


def plan_command(
    config: console.ConfigPath,
    trace: Annotated[Path | None, typer.Option(help="Keys recorded by `hps serve --record-trace`.", exists=True)] = None,
    alpha: Annotated[
        float | None,
        typer.Option(min=0.0, max=4.0, help="Assume a power law with this exponent for tables without recorded keys."),
    ] = None,
    fit: Annotated[
        bool, typer.Option("--fit", help="Use the power law that fits the recorded keys, for short recordings.")
    ] = False,
    goal: Annotated[
        float | None, typer.Option(min=0.0, max=1.0, help="Suggest the smallest gpucacheper with this hit rate.")
    ] = None,
    budget: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Suggest the gpucacheper for this cache memory per device, as 8GB.")
    ] = None,
    gpu_memory: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Memory of each GPU, to plan for another machine.")
    ] = None,
    ram: Annotated[str | None, typer.Option(metavar="SIZE", help="As --gpu-memory, for RAM.")] = None,
    disk: Annotated[str | None, typer.Option(metavar="SIZE", help="As --gpu-memory, for the disk.")] = None,
    redis: Annotated[str | None, typer.Option(metavar="SIZE", help="As --gpu-memory, for Redis.")] = None,
    processors: Annotated[
        int | None,
        typer.Option(
            min=1, help="Processors of another machine; they determine the number of frontends, unless service.fronts is set."
        ),
    ] = None,
    run_networks: Annotated[
        bool, typer.Option("--run-networks", help="Run each network on the CPU, to measure what a full batch needs.")
    ] = False,
    devices: Annotated[
        int,
        typer.Option(min=1, max=64, help="GPUs of one host: predict hit rates and rates of lookups by device sharing."),
    ] = 1,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    picture: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Draw hit rates by cache size: .svg or .png (extra `plot`).")
    ] = None,
) -> None:
    """Print the memory that CONFIG needs on each tier, whether it fits, and the hit rates of its caches.

    Nothing is loaded, except networks by --run-networks, and no database is opened. The exit code is 1 if something does not
    fit. 1 GB is 10^9 bytes, 1 GiB 2^30.
    """
    with console.reported():
        from dataclasses import asdict

        from hps.configuration.load import load_configuration
        from hps.statistics.key_traces import read_traces
        from hps.tools.cli.state_directories import completed
        from hps.tools.planning import memory
        from hps.tools.planning.device_sharing import forecast_sharings
        from hps.tools.planning.forecast import Forecast
        from hps.tools.planning.row_formats import needs_by_format
        from hps.tools.planning.set_ups import compare_set_ups

        check_picture(picture)
        capacities = {"gpu": gpu_memory, "ram": ram, "disk": disk, "redis": redis}
        sizes: dict[Place, int] = {place: _size(text) for place, text in capacities.items() if text is not None}  # type: ignore[misc]
        configuration = load_configuration(completed(config))
        versions = memory.served_versions(configuration)
        machine = memory.this_machine(configuration, sizes)
        on_cuda = memory.caches_on_cuda(configuration, machine)
        needs = memory.planned_needs(configuration, versions, on_cuda)
        if run_networks:
            needs += memory.run_needs(configuration, versions, on_cuda)
        needs += memory.frontend_needs(configuration.service, on_cuda, processors)
        totals = memory.totals(needs, machine)
        traces = read_traces(trace) if trace else []
        forecasts = [
            Forecast(version, traces, alpha, fit=fit, on_cuda=on_cuda) for version in versions if version.config.gpucache
        ]
        predicted = [forecast for forecast in forecasts if forecast.tables]
        suggestions = [forecast.for_goal(goal) for forecast in predicted] if goal is not None else []
        if budget is not None:
            share = memory.share_within(_size(budget), versions, on_cuda)
            suggestions += [forecast.at(share) for forecast in predicted]
        if (goal is not None or budget is not None or devices > 1) and not predicted:
            raise errors.InvalidInputError("planning: --goal, --budget and --devices need keys, expected --trace or --alpha")
        if devices > 1 and not on_cuda:
            problem = f"--devices is of GPUs, got device {configuration.device}; expected cuda, or auto with --gpu-memory"
            raise errors.InvalidInputError(f"planning: {problem}")
        if picture is not None:
            draw_plan(picture, [table for forecast in predicted for table in forecast.tables])
        formats = needs_by_format(configuration, versions, on_cuda, predicted)
        sharings = forecast_sharings(predicted, devices) if devices > 1 else []
        set_ups = compare_set_ups(configuration, versions, on_cuda)
        models = [version.config for version in versions]
        kernels = memory.kernels_here(models) if on_cuda and gpu_memory is None else []
        if as_json:
            document = _document(needs, totals, machine, predicted, suggestions, formats, sharings)
            document["set_ups"] = [asdict(set_up) for set_up in set_ups]
            document["gpu_kernels"] = [asdict(kept) for kept in kernels]
            typer.echo(json.dumps(document, indent=1))
        else:
            kernel_lines = _kernel_lines(config, kernels) if on_cuda else []
            _print(needs, totals, machine, predicted, suggestions, formats, sharings, set_ups, kernel_lines)
            if not run_networks and any(version.network is not None for version in versions):
                typer.echo("\nmemory that networks allocate while they run is not counted; --run-networks measures it")
        if any(total.fits is False for total in totals):
            raise typer.Exit(1)


def _size(text: str) -> int:
    """Read a size in bytes: `80GB`, `1.5 TiB`, `4096`."""
    match = re.fullmatch(r"\s*([0-9.]+)\s*([KMGT]?)(i?)B?\s*", text, re.IGNORECASE)
    try:
        return int(float(match[1]) * (1024 if match[3] else 1000) ** _POWERS.index(match[2].upper()))  # type: ignore[index, operator]
    except (TypeError, ValueError, OverflowError):
        raise errors.InvalidInputError(f"planning: got the size {text[:80]!r}, expected one such as 80GB") from None


def _document(
    needs: "list[PlannedNeed]",
    totals: "list[Total]",
    machine: "Machine",
    forecasts: "list[Forecast]",
    suggestions: "list[Suggestion]",
    formats: "list[FormatNeed]",
    sharings: "list[SharingForecast]",
) -> dict[str, Any]:
    from dataclasses import asdict

    from hps.tools.planning.device_sharing import reasons_against

    document: dict[str, Any] = {
        "needs": [{**{k: v for k, v in asdict(planned).items() if k != "need"}, **asdict(planned.need)} for planned in needs],
        "totals": [{**asdict(total), "fits": total.fits, "source": machine.source.get(total.place)} for total in totals],
        "tables": [asdict(table) for forecast in forecasts for table in forecast.tables],
        "suggestions": [asdict(suggestion) for suggestion in suggestions],
        "row_formats": [asdict(row_format) for row_format in formats],
    }
    if sharings:
        document["device_sharings"] = [asdict(sharing) for sharing in sharings]
        document["device_sharings_left_out"] = [
            {"model": version.config.model, "version": version.config.version, "sharing": sharing, "reason": reason}
            for version in (forecast.version for forecast in forecasts)
            for sharing, reason in reasons_against(version, sharings[0].devices).items()
        ]
    return document


def _print(
    needs: "list[PlannedNeed]",
    totals: "list[Total]",
    machine: "Machine",
    forecasts: "list[Forecast]",
    suggestions: "list[Suggestion]",
    formats: "list[FormatNeed]",
    sharings: "list[SharingForecast]",
    set_ups: "list[SetUp]",
    kernel_lines: list[str],
) -> None:
    screen = console.screen(160)
    _print_memory(screen, needs, totals, machine)
    for line in kernel_lines:
        screen.print(f"\n{line}", soft_wrap=True)
    _print_set_ups(screen, set_ups)
    _print_formats(screen, formats)
    if forecasts:
        _print_hit_rates(screen, forecasts)
    else:
        screen.print("\nhit rates: unknown without keys; give --trace or --alpha")
    if sharings:
        _print_sharings(screen, sharings, forecasts)
    for suggestion in suggestions:
        reached = suggestion.gpucacheper is not None
        text = f"gpucacheper {suggestion.gpucacheper:g}" if reached else "no gpucacheper reaches the goal: at 1"
        screen.print(f"\nmodel {suggestion.model} version {suggestion.version}: {text}, hit rate {suggestion.hit_rate:.3f}")
        for table, share in suggestion.per_table.items():
            screen.print(f"  {table}: {'never' if share is None else f'{100 * share:.3g} % of its rows'}")


def _print_memory(screen: "Console", needs: "list[PlannedNeed]", totals: "list[Total]", machine: "Machine") -> None:
    rows = []
    for planned in needs:
        place = planned.need.place if planned.device is None else f"gpu {planned.device}"
        purpose = f"{planned.need.what} (while loading)" if planned.need.temporary else planned.need.what
        rows.append((planned.model, planned.version, planned.tier, purpose, place, size_text(planned.need.size_bytes)))
    screen.print(console.table(("model", "version", "tier", "for", "place"), ("size",), rows))
    screen.print()
    summary = console.table(("place",), ("needed", "while loading", "there"))
    summary.add_column("")
    for total in totals:
        verdict = {True: "fits", False: "DOES NOT FIT", None: "unknown"}[total.fits]
        if total.place == "ram":
            verdict += ", including pinned memory" if any(total_.place == "pinned" for total_ in totals) else ""
        if total.place == "pinned":
            verdict = "part of ram"
        if source := machine.source.get(total.place):
            verdict = f"{verdict} ({source})"
        free = "?" if total.free_bytes is None else size_text(total.free_bytes)
        summary.add_row(total.place, size_text(total.size_bytes), size_text(total.peak_bytes), free, verdict)
    screen.print(summary)


def _print_formats(screen: "Console", formats: "list[FormatNeed]") -> None:
    from hps.types import ROW_DTYPES

    table = console.table(("model", "version", "table", "tier", "row_dtype"), ROW_DTYPES)
    for row_format in formats:
        cells = [size_text(row_format.size_bytes[row_dtype]) for row_dtype in ROW_DTYPES]
        table.add_row(row_format.model, row_format.version, row_format.table, row_format.tier, row_format.row_dtype, *cells)
        if row_format.hit_rates:
            rates = [f"{row_format.hit_rates[row_dtype]:.3f}" for row_dtype in ROW_DTYPES]
            table.add_row("", "", "", "  hit rate with the memory of", row_format.row_dtype, *rates)
    if formats:
        screen.print()
        screen.print("memory of each table by row format")
        screen.print(table)


def _print_set_ups(screen: "Console", set_ups: "list[SetUp]") -> None:
    from hps.tools.planning.set_ups import MEASURED_ON

    if not set_ups:
        return
    table = console.table(
        ("host tiers",), ("memory", "page cache, at most", "disk", "first start", "start", "rows/s of a thread")
    )
    for set_up in set_ups:
        sizes = (size_text(size) for size in (set_up.memory_bytes, set_up.page_cache_bytes, set_up.disk_bytes))
        times = (f"{seconds:,.1f} s" for seconds in (set_up.load_s, set_up.start_s))
        table.add_row(set_up.name, *sizes, *times, f"{set_up.rows_per_s / 1e6:.1f} M")
    screen.print()
    screen.print("what other host tiers would need")
    screen.print(table)
    screen.print(
        f"Times and rates are estimates from measurements on {MEASURED_ON}, without downloading. Row files answer from "
        "the page cache, and from the disk for what memory does not hold."
    )


def _kernel_lines(config: Path, kernels: "list[KeptKernels]") -> list[str]:
    from hps.versions.device_kernels import IMAGE_GPUS, missing_text

    if not kernels:
        known = ", ".join(f"sm_{architecture} ({gpus})" for architecture, gpus in IMAGE_GPUS.items())
        return [f"CUDA kernels are compiled ahead by hps compile {config} --gpu with the GPU's architecture: {known}"]
    return [
        missing_text(kept, str(config)) or f"all {kept.needed} CUDA kernels for {kept.device} are compiled here"
        for kept in kernels
    ]


def _print_hit_rates(screen: "Console", forecasts: "list[Forecast]") -> None:
    from hps.tools.planning.forecast import SHARES

    figures = ("rows", "alpha", *(f"{share * 100:g} %" for share in SHARES), "configured", "hit rate", "misses/s")
    rates = console.table(("model", "table"), figures)
    uncertain = False
    for table in [table for forecast in forecasts for table in forecast.tables]:
        cells = []
        for point in (*table.curve, table.configured):
            unsure = 0 < point.capacity_rows < table.certain_from
            uncertain = uncertain or unsure
            cells.append(f"{point.hit_rate:.3f}{'?' if unsure else ''}")
        missed = "?" if table.keys_per_s is None else f"{table.keys_per_s * (1 - table.configured.hit_rate):,.0f}"
        share = f"{100 * table.configured.capacity_rows / max(table.rows, 1):.3g} %"
        rates.add_row(table.model, table.table, f"{table.rows:,}", f"{table.alpha:.2f}", *cells[:-1], share, cells[-1], missed)
    screen.print()
    screen.print("hit rate by cache size, as a share of the table's rows")
    screen.print(rates)
    if uncertain:
        screen.print(_UNCERTAIN)


def _print_sharings(screen: "Console", sharings: "list[SharingForecast]", forecasts: "list[Forecast]") -> None:
    from hps.tools.planning.device_sharing import reasons_against
    from hps.tools.planning.read_rates import MEASURED_ON

    figures = ("rows in reach", "memory per device", "hit rate", "local", "neighbour", "host", "keys/s per device")
    rates = console.table(("model", "table", "device_sharing"), figures)
    for sharing in sharings:
        shares_found = (sharing.hit_rate, sharing.local, sharing.neighbour, sharing.host)
        shares = [f"{share:.3f}{'' if sharing.certain else '?'}" for share in shares_found]
        size, rate = size_text(sharing.size_bytes), f"{sharing.keys_per_s / 1e6:,.0f} M"
        rates.add_row(sharing.model, sharing.table, sharing.sharing, f"{sharing.capacity_rows:,}", size, *shares, rate)
    screen.print()
    screen.print(f"{sharings[0].devices} devices by device sharing: where they find the rows of their keys, and expected rates")
    screen.print(rates)
    for version in (forecast.version for forecast in forecasts):
        reasons = reasons_against(version, sharings[0].devices)
        for reason in dict.fromkeys(reasons.values()):
            names = " and ".join(sharing for sharing in reasons if reasons[sharing] == reason)
            screen.print(f"model {version.config.model} version {version.config.version}: {names} left out, since {reason}")
    if not all(sharing.certain for sharing in sharings):
        screen.print(_UNCERTAIN)
    screen.print(f"keys/s is an estimate for large batches, from rates measured on {MEASURED_ON}.")
    screen.print(
        "A key takes local / local rate + neighbour / neighbour rate + host / host rate; misses are read in pinned host memory."
    )
