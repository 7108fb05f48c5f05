"""`hps compile`: compile kernels ahead, for an image or before a machine serves requests."""

import re
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hps import errors
from hps.tools.cli import console

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from hps.configuration.load import Configuration

EXAMPLE = "Example: `hps compile` or `hps compile ps.json --gpu sm_90`"
_ARCHITECTURE = re.compile(r"(?:sm_)?(\d{2,3})")
_USUAL_WIDTHS = (4, 8, 16, 32, 64, 128, 256)


def compile_command(
    config: Annotated[
        Path | None,
        typer.Argument(metavar="[CONFIG]", help="Compile what this ps.json uses; by default everything.", show_default=False),
    ] = None,
    gpu: Annotated[
        list[str] | None,
        typer.Option(
            metavar="ARCHITECTURES",
            help="Also compile the CUDA kernels for these GPUs, as sm_90 or sm_80,sm_90, for the widths of CONFIG or by "
            "default for the usual ones. Needs CuPy and NVRTC, and no GPU.",
        ),
    ] = None,
    baseline: Annotated[
        bool,
        typer.Option(
            "--baseline", help="Compile for any recent processor (x86-64-v3, or arm64), not for the one of this machine."
        ),
    ] = False,
    processes: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Number of compiling processes; by default one for each processor. With 1, and PYTHONHASHSEED=0 in the "
            "environment, the same sources give the same files.",
        ),
    ] = None,
) -> None:
    """Compile kernels, so that later starts are fast. Compiled kernels are skipped.

    Machine code is kept in NUMBA_CACHE_DIR or, by default, inside the installation if that is writable, else in ~/.cache/hps.
    Later processes use it, also from an installation that is read-only by then.
    """
    with console.reported(), console.progress("info"):
        from hps.ground.kernels import machine_code

        architectures = _architectures(gpu or [])
        machine_code.choose_baseline() if baseline else machine_code.refuse_baseline()
        from hps.configuration.load import read_configuration
        from hps.ground.kernels.compilations import COMPILATIONS
        from hps.ground.kernels.numba_kernels import compile_kernels, declared_kernels

        configuration = read_configuration(config) if config else None
        kernels = _kernels(configuration) if configuration else declared_kernels()
        start_s = time.monotonic()
        compile_kernels(*kernels, processes=processes)
        compiled = COMPILATIONS.all().get("numba", (0, 0.0))[0]
        target = "the baseline" if baseline else "this processor"
        _print_counts(f"{len(kernels)} kernels for {target}", compiled, len(kernels) - compiled, start_s)
        for architecture in architectures:
            start_s = time.monotonic()
            compiled, skipped = _compile_for_gpu(configuration, architecture)
            _print_counts(f"{compiled + skipped} CUDA kernels for sm_{architecture}", compiled, skipped, start_s)
        directory = machine_code.directory()
        if directory is None:
            raise errors.HPSError("compiling kernels: no directory is writable; set NUMBA_CACHE_DIR to one that is")
        typer.echo(f"kept in {directory}")


def _print_counts(kernels: str, compiled: int, skipped: int, start_s: float) -> None:
    typer.echo(f"{kernels}: compiled {compiled} in {time.monotonic() - start_s:.1f} s, {skipped} were there")


def _architectures(options: list[str]) -> list[str]:
    architectures = []
    for text in filter(None, (part.strip() for option in options for part in option.split(","))):
        match = _ARCHITECTURE.fullmatch(text)
        if match is None:
            raise errors.InvalidInputError(f"--gpu: got {text!r}, expected architectures as sm_90")
        architectures.append(match[1])
    return list(dict.fromkeys(architectures))


def _kernels(configuration: "Configuration") -> "list[Callable[..., Any]]":
    from hps.versions.tiers import choose_cache, served_kernels

    return served_kernels(configuration, choose_cache(configuration.device))


def _compile_for_gpu(configuration: "Configuration | None", architecture: str) -> tuple[int, int]:
    from hps.cache.base import KernelNeed
    from hps.ground.registry import implementation
    from hps.versions.device_kernels import kernel_needs

    usual = [KernelNeed([(dim, "float32")], static=static, shared=False) for dim in _USUAL_WIDTHS for static in (False, True)]
    needs = usual if configuration is None else kernel_needs(configuration.models)
    compiled, skipped = implementation("cache", "cuda").compile_ahead(needs, architecture)
    return compiled, skipped
