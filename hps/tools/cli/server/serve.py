"""`hps serve`: load the models of a configuration and answer lookups over HTTP."""

import logging
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Literal

import typer

from hps.tools.cli import console

EXAMPLE = "Example: `hps serve configs/minimal.json --port 8000`"
_log = logging.getLogger(__name__)


def serve_command(
    config: console.ConfigPath,
    host: Annotated[str | None, typer.Option(help="Address to listen on, instead of CONFIG's.")] = None,
    port: Annotated[int | None, typer.Option(min=0, max=65535, help="Port, instead of CONFIG's; 0 takes any.")] = None,
    fronts: Annotated[
        int | None,
        typer.Option(min=0, max=256, help="Number of frontend processes, instead of CONFIG's; 0: a single process."),
    ] = None,
    grpc_port: Annotated[
        int | None, typer.Option(min=0, max=65535, help="Port for gRPC, instead of CONFIG's; 0 takes any; by default none.")
    ] = None,
    log_level: Annotated[
        Literal["critical", "error", "warning", "info", "debug"] | None,
        typer.Option(case_sensitive=False, help="Minimum level to log, instead of CONFIG's."),
    ] = None,
    log_format: Annotated[
        Literal["text", "json"] | None,
        typer.Option(case_sensitive=False, help="Write log lines as text or as JSON, instead of CONFIG's setting."),
    ] = None,
    force: console.Force = False,
    allow_empty: Annotated[
        bool | None,
        typer.Option(
            "--allow-empty", help="Be ready without any model, as before the first one is published.", show_default=False
        ),
    ] = None,
    record_trace: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Record a sample of the requested keys for hps plan and profile."),
    ] = None,
    trace_rate: Annotated[float, typer.Option(min=1e-6, max=1.0, help="The share of distinct keys to record.")] = 0.01,
    trace_max_mb: Annotated[int, typer.Option(min=1, help="Stop recording at this size of FILE.")] = 256,
    hash_keys: Annotated[bool, typer.Option("--hash-keys", help="Record hashes that cannot be traced back to keys.")] = False,
    state: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", help="Keep row files of a repository below DIR. Default: hps in the user's state directory."
        ),
    ] = None,
) -> None:
    """Load the models of CONFIG and answer lookups over HTTP until Ctrl-C.

    CONFIG may be a repository of models, a directory or URI. Then rows are kept in row files below --state, where the next
    server of the repository finds them, with its online writes; where no files can be kept, in a hash map.

    Tables on disk are not reloaded. Each model answers as soon as it is loaded, and a model that cannot be loaded does not
    stop the others. /v2/health/ready answers 200 when every model is ready; until then it reports the progress.

    SIGTERM gives load balancers time before the server stops (service.drain_s); Ctrl-C does not. SIGHUP reloads CONFIG:
    settings that may change at run time do, and the log names the others.
    """
    with console.reported(), ExitStack() as stack:
        from hps.configuration.load import read_configuration
        from hps.serve.logs.lines import formatter_of
        from hps.tools.cli.state_directories import state_directory

        source, notes = stack.enter_context(state_directory(config, state))
        configuration = read_configuration(source)  # has the settings of logs; its notices are logged when it is used
        service = configuration.service
        with console.progress(log_level or service.log_level, formatter_of(log_format or service.log_format)) as progress:
            from hps.parameter_server import HPS
            from hps.serve.server import serve

            def record(server: HPS) -> None:
                if record_trace is not None:
                    server.record_trace(record_trace, rate=trace_rate, max_bytes=trace_max_mb << 20, hash_keys=hash_keys)

            for note in notes:
                _log.info("%s", note)
            closed = serve(
                configuration,
                host,
                port,
                progress,
                force=force,
                source=source,
                log_level=log_level,
                log_format=log_format,
                on_open=record,
                fronts=fronts,
                grpc_port=grpc_port,
                allow_empty=allow_empty,
            )
        if not closed:
            console.end_process(1)
