"""`hps import`: convert tables of other formats to sparse model files."""

from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

import typer

from hps import errors
from hps.ground.progress import size_text
from hps.tools.cli import console as terminal

RowDtype: TypeAlias = Literal["float32", "float16", "bfloat16", "int8"]
EXAMPLE = "Example: `hps import dlrm.pt models/dlrm --tables 'emb_l.*.weight' && hps serve models/dlrm/ps.json`"


def import_command(
    source: Annotated[
        str,
        typer.Argument(
            metavar="SOURCE",
            help="A .npz, .npy, .safetensors, .pt, .pth, .bin or .parquet file, a directory of .npy or .parquet files, or what "
            "a trainer wrote: a directory of torch.distributed.checkpoint, dynamicemb, TorchEasyRec, SOK or HugeCTR's "
            "embedding_dump.",
            show_default=False,
        ),
    ],
    destination: Annotated[
        str | None, typer.Argument(metavar="DESTINATION", help="The directory to write, a path or URI.", show_default=False)
    ] = None,
    listing: Annotated[bool, typer.Option("--list", help="Print the arrays of SOURCE and write nothing.")] = False,
    tables: Annotated[
        str | None,
        typer.Option(
            metavar="PATTERN",
            help="Import every array (in a directory without .npy files: every entry) whose name matches, with * for any "
            "characters, as one table below DESTINATION, and write a ps.json that serves all of them.",
        ),
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="With --tables: the model's name in the ps.json. Default: the last part of DESTINATION.")
    ] = None,
    write_config: Annotated[
        Path | None, typer.Option(metavar="PATH", help="With --tables: path of the ps.json. Default: DESTINATION/ps.json.")
    ] = None,
    keys: Annotated[
        str | None,
        typer.Option(
            help="Tensor, column or member of the keys (with .npy: a file). Default: keys, key, ids or id. With --tables, each "
            "* is replaced by the match of the same * in PATTERN. Default there: row numbers."
        ),
    ] = None,
    vectors: Annotated[
        str | None, typer.Option(help="As --keys. Default: vectors, embeddings, emb_vector, ..., or the only (n, dim) floats.")
    ] = None,
    first_key: Annotated[int | None, typer.Option(help="Use row numbers, starting here, as keys.")] = None,
    file_format: Annotated[
        str | None,
        typer.Option(
            "--format",
            help="npy, npz, safetensors, torch, parquet, dcp, dynamicemb, hugectr, torcheasyrec, torcheasyrec_delta, sok or "
            "int32_keys. Default: by the names of the files.",
        ),
    ] = None,
    dim: Annotated[
        int | None,
        typer.Option(min=1, help="Refuse vectors of another number of elements, where no file says it; tbe8 may need it."),
    ] = None,
    delta_of: Annotated[
        str | None,
        typer.Option(
            metavar="VERSION",
            help="With --tables: write DESTINATION, <model>/<number>, as a version that changes this one. SOURCE is an "
            "increment, or a directory of increments named by steps, step_N or ..._step_N.parquet, which are applied in order.",
        ),
    ] = None,
    after: Annotated[
        int | None,
        typer.Option(
            metavar="STEP",
            min=0,
            help="With --delta-of: the step that VERSION is of; leave out earlier ones. Default: as VERSION says.",
        ),
    ] = None,
    every: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=0,
            help="With --delta-of: refuse increments that lack a multiple of N. 0: check none. Default: the most "
            "frequent interval.",
        ),
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option(
            help="bfloat16, if SOURCE stores its bits as other 16-bit elements; fused8bit, tbe8 (both FBGEMM's) or rowwise8 "
            "(NVE's), if it stores such rows of codes, scale and offset as uint8."
        ),
    ] = None,
    row_dtype: Annotated[
        RowDtype,
        typer.Option(help="Serve the tables in this format: refuse rows that it cannot hold, and write it to the ps.json."),
    ] = "float32",
    seal: Annotated[
        bool, typer.Option("--seal", help="Also write the row file of each table in its `--row-dtype`, as `hps seal`.")
    ] = False,
    overwrite: Annotated[bool, typer.Option(help="Replace existing models and an existing ps.json.")] = False,
    config: Annotated[
        Path | None, typer.Option(metavar="CONFIG", help="A ps.json with the model_source of DESTINATION.")
    ] = None,
) -> None:
    """Write the embedding table in SOURCE as a sparse model, or with --tables all tables and a ps.json.

    float16, bfloat16, float64 and rows of 8 bits become float32, all integer keys int64. Tables are read in chunks and may
    be larger than memory. Pickled code in SOURCE is never run.
    """
    with terminal.reported():
        from hps.configuration.load import load_configuration
        from hps.models.importing.checkpoint import list_arrays
        from hps.models.importing.importer import import_model, import_tables
        from hps.models.importing.increments import import_delta

        if listing:
            for info in list_arrays(source, file_format=file_format):
                typer.echo(info)
            return
        if destination is None:
            raise errors.InvalidInputError(f"importing {source}: got no DESTINATION, expected a path or URI, or --list")
        if tables is None and (model or write_config or delta_of):
            named = "--delta-of needs" if delta_of else "--model and --write-config need"
            raise errors.InvalidInputError(f"importing {source}: {named} --tables")
        if delta_of is None and (after is not None or every is not None):
            raise errors.InvalidInputError(f"importing {source}: --after and --every need --delta-of")
        if delta_of is not None and (model or write_config or overwrite or vectors or dim or row_dtype != "float32"):
            raise errors.InvalidInputError(
                f"importing {source}: --delta-of goes without --model, --write-config, --overwrite, --vectors, --dim and "
                "--row-dtype, which the version's model has"
            )
        with terminal.progress() as progress:  # logging is set up from here on, also for notices of the configuration
            model_source = load_configuration(config).model_source if config is not None else None
            options: dict[str, Any] = {
                **{"keys": keys, "file_format": file_format, "dtype": dtype, "first_key": first_key},
                **{"model_source": model_source, "progress": progress},
            }
            if tables is not None and delta_of is not None:
                delta = import_delta(source, destination, delta_of, tables=tables, after=after, every=every, **options)
            options |= {"vectors": vectors, "dim": dim, "row_dtype": row_dtype, "overwrite": overwrite}
            if delta_of is not None:
                written = {}
            elif tables is None:
                written = {destination: import_model(source, destination, **options)}
            else:
                written = import_tables(source, destination, tables, model=model, write_config=write_config, **options)
            if seal:
                from hps.models.sealing import seal_version
                from hps.models.sources import ModelSources

                format_of = row_dtype if delta_of is None else None
                for place in [destination] if delta_of is not None else written:
                    seal_version(place, row_dtype=format_of, sources=ModelSources(model_source), progress=progress)
        if delta_of is not None:
            for name, rows in delta.changed.items():
                typer.echo(f"{delta.place}/{name}: {terminal.rows_text(rows)} changed, {delta.deleted[name]:,} keys deleted")
            steps = f", steps {delta.steps[0]} to {delta.steps[-1]}" if delta.steps else ""
            typer.echo(f"{delta.place}: a delta of version {delta_of}{steps}")
            return
        for place, table in written.items():
            origin = "" if table.dtype == "float32" else f" (from {table.dtype})"
            from_keys = repr(table.keys.name) if table.keys else f"row numbers from {table.first_key} on"
            typer.echo(
                f"{place}: {terminal.rows_text(table.rows)} of {table.dim} float32{origin}, {size_text(table.size_bytes)}; "
                f"vectors from {table.vectors.name!r}, keys from {from_keys}"
            )
        if tables is None:
            stored = "" if row_dtype == "float32" else f', "row_dtype": ["{row_dtype}"]'
            typer.echo(f'in a configuration: "sparse_files": ["{place}"], "embedding_vecsize_per_table": [{table.dim}]{stored}')
        else:
            served = write_config or f"{destination.rstrip('/')}/ps.json"
            count = "1 table" if len(written) == 1 else f"{len(written)} tables"
            size = size_text(sum(table.size_bytes for table in written.values()))
            typer.echo(f"{served}: {count}, {size}; `hps serve {served}` serves them")
