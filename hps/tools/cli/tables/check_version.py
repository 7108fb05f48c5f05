"""`hps check-version`: run the checks of a version of a model by hand or in CI, without a server."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hps.tools.cli import console
from hps.tools.cli.pictures import check_picture, draw_checks

if TYPE_CHECKING:
    from hps.configuration.load import Configuration
    from hps.versions.checks.report import CheckReport

EXAMPLE = "Example: `hps check-version ps.json ranker --version 8 --against 7`"


def check_version_command(
    config: console.ConfigPath,
    model: Annotated[str, typer.Argument(metavar="MODEL", show_default=False)],
    version: Annotated[str, typer.Option("--version", help="Default: the highest.")] = "",
    against: Annotated[str, typer.Option("--against", help="Compare it with this one. Default: the next one below.")] = "",
    plot: Annotated[
        Path | None,
        typer.Option("--plot", show_default=False, help="Draw the figures: a file .svg or .png (needs matplotlib)."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Check a version of MODEL of CONFIG as a server does before it takes over (models[].checks).

    Loads it and the one to compare with into memory; uses no database, no GPU and no running server, and writes no report. Exit
    codes: 0 it may serve, 1 a check failed that holds or refuses it, 2 it cannot be loaded.
    """
    with console.reported():
        check_picture(plot)
        from hps.configuration.load import load_configuration

        report = _check(load_configuration(config), model, version, against)
        if plot is not None:
            draw_checks(plot, report)
    if as_json:
        typer.echo(report.model_dump_json(indent=1))
    else:
        _print(report)
    if report.verdict != "passed":
        raise typer.Exit(1)


def _check(configuration: "Configuration", model: str, version: str, against: str) -> "CheckReport":
    from hps.configuration.tiers import PersistentDbConfig, UpdateSourceConfig, VolatileDbConfig
    from hps.parameter_server import HPS

    alone = configuration.model_copy(
        update={
            "device": "cpu",
            "volatile_db": VolatileDbConfig(type="parallel_hash_map"),
            "persistent_db": PersistentDbConfig(),
            "update_source": UpdateSourceConfig(),
        }
    )
    with HPS(alone, deploy_models=False) as server, console.progress() as progress:
        numbers = server.catalog.versions(model)
        version = version or (numbers[-1] if numbers else "")
        for number in (version, *([against] if against else [])):
            server.catalog.version(model, number)  # raises for an unknown one
        below = [number for number in numbers if int(number) < int(version)]
        wanted = [number for number in (against or (below[-1] if below else ""), version) if number]
        entry = server.catalog.model(model)
        both = entry.version_policy.__class__(0, tuple(wanted))
        checks = entry.checks.model_copy(update={"enabled": False})
        loaded = entry.model_copy(update={"version_policy": both, "gpucache": False, "checks": checks})
        server.deploy(loaded, progress=progress)
        return server.check_version(model, version, wanted[0])


def _print(report: "CheckReport") -> None:
    table = console.table(("check", "table", "outcome"), ("measured",))
    for found in report.checks:
        figures = ", ".join(f"{name.replace('_', ' ')} {value:.4g}" for name, value in found.figures.items())
        table.add_row(found.check, found.table, found.outcome, figures)
    console.screen().print(table)
    for found in report.checks:
        if found.text:
            typer.echo(f"{found.outcome} ({found.policy}): {found}")
    beside = f" beside version {report.against}" if report.against else ""
    typer.echo(f"{report.model}: version {report.version}{beside}: {report.verdict}, {report.seconds:.1f} s")
