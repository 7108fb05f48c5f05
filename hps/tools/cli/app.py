"""The command line: one module per command or group of commands.

Exit codes: 0 done; 1 a failure while running (a database, a device); 2 wrong configuration, model files or arguments; 130
stopped by Ctrl-C. An error is one message on standard error. Commands import their modules when they run, so that `hps --help`
is fast.
"""

from typing import Annotated

import typer

from hps.ground.version import __version__
from hps.tools.cli.configuration import check_config, init, plan
from hps.tools.cli.server import compile_kernels, live_models, profile, serve, top
from hps.tools.cli.tables import (
    check_database,
    check_version,
    create_model,
    import_tables,
    load,
    lookup,
    publish,
    row_formats,
    seal,
    updates,
)

app = typer.Typer(
    name="hps",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("serve", epilog=serve.EXAMPLE)(serve.serve_command)
app.command("load", epilog=load.EXAMPLE)(load.load_command)
app.command("init", epilog=init.EXAMPLE)(init.init_command)
app.command("import", epilog=import_tables.EXAMPLE)(import_tables.import_command)
app.command(
    "lookup",
    epilog=lookup.EXAMPLE,
    context_settings={"ignore_unknown_options": True},  # so that -5 is a key
)(lookup.lookup_command)
app.command("profile", epilog=profile.EXAMPLE)(profile.profile_command)
app.command("check-config", epilog=check_config.EXAMPLE)(check_config.check_config_command)
app.command("check-database", epilog=check_database.EXAMPLE)(check_database.check_database_command)
app.command("check-version", epilog=check_version.EXAMPLE)(check_version.check_version_command)
app.command("compile", epilog=compile_kernels.EXAMPLE)(compile_kernels.compile_command)
app.command("plan", epilog=plan.EXAMPLE)(plan.plan_command)
app.command("row-formats", epilog=row_formats.EXAMPLE)(row_formats.row_formats_command)
app.command("seal", epilog=seal.EXAMPLE)(seal.seal_command)
app.command("publish", epilog=publish.EXAMPLE)(publish.publish_command)
app.add_typer(updates.updates, name="updates")
app.command("top", epilog=top.EXAMPLE)(top.top_command)
app.command("create-model", epilog=create_model.EXAMPLE)(create_model.create_model_command)
for _name, _command in (
    ("models", live_models.models_command),
    ("deploy", live_models.deploy_command),
    ("undeploy", live_models.undeploy_command),
    ("promote", live_models.promote_command),
    ("rollback", live_models.rollback_command),
    ("unpin", live_models.unpin_command),
    ("refresh", live_models.refresh_command),
    ("record", live_models.record_command),
):
    app.command(_name, epilog=live_models.EXAMPLES[_name])(_command)
updates.updates.command("status", epilog=live_models.EXAMPLES["updates status"])(live_models.updates_status_command)


def main() -> None:
    app(prog_name="hps")


@app.callback(
    epilog="First steps: `hps create-model models/sample/item.model --rows 50000 --dim 32`, `hps init models/sample`, "
    "`hps check-config ps.json`, `hps serve ps.json`.",
    invoke_without_command=True,
)
def _hps(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
) -> None:
    """Serve embedding vectors of recommender models from GPU memory, RAM, Redis and RocksDB.

    serve, load, lookup, plan, row-formats, profile, publish, check-config and check-version take CONFIG: a ps.json, as in
    HugeCTR. top, models, deploy, promote, undeploy, rollback, unpin, refresh and record call a running server (--url or
    HPS_URL; the token is in HPS_ADMIN_TOKEN).
    """
    if version:
        typer.echo(f"hps {__version__}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())
        raise typer.Exit(2)
