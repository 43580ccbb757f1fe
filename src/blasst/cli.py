"""The command line: parses, calls, prints. Heavy imports happen inside a command, after its checks."""

from __future__ import annotations

import os
import sys
import traceback
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from blasst._version import __version__
from blasst.cli_arguments import (
    DEFAULT_MODEL,
    INSTALL_MODEL,
    existing_file,
    existing_folder,
    linear_threshold,
    model_argument,
    output_file,
    output_folder,
    sequence_lengths,
    sparse_settings,
    sparsity_target,
)
from blasst.cli_output import error_console, print_json, print_table, progress_bar
from blasst.core.errors import BlasstError

app = typer.Typer(
    name="blasst",
    help="Sparse attention that skips tiles of keys which cannot matter.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

Json = Annotated[bool, typer.Option("--json", help="Print one JSON line and no table.")]
Model = Annotated[
    str,
    typer.Argument(
        callback=model_argument, help=f'"{DEFAULT_MODEL}" (in a wheel), a model folder, or a .gguf file.'
    ),
]
Device = Annotated[str, typer.Option(help="torch device of the model.")]
Profile = Annotated[
    Path | None, typer.Option(parser=existing_file, metavar="FILE", help="Calibration file; needs --target.")
]
Targets = Annotated[
    list[float] | None,
    typer.Option(
        "--target", parser=sparsity_target, metavar="S", help="Target sparsity in [0, 1); repeatable."
    ),
]
Thresholds = Annotated[
    list[float] | None,
    typer.Option(
        "--threshold", parser=linear_threshold, metavar="T", help="Threshold in [0, 1]; repeatable."
    ),
]
Lengths = Annotated[
    list[int], typer.Option(parser=sequence_lengths, metavar="L,L", help='Tokens, for example "1K,4096".')
]

_show_traceback = False


def _print_version(value: bool) -> None:
    if value:
        sys.stdout.write(f"blasst {__version__}\n")
        raise typer.Exit()


@app.callback()
def _main(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
    show_traceback: Annotated[
        bool, typer.Option("--traceback", help="On an error, print where it happened.")
    ] = False,
) -> None:
    global _show_traceback
    _show_traceback = show_traceback
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # nothing is fetched at run time


@app.command()
def doctor(json_output: Json = False) -> None:
    """What this machine can run, and why not the rest."""
    from blasst.report.doctor import examine

    rows = [asdict(finding) for finding in examine(INSTALL_MODEL)]
    if json_output:
        print_json({"findings": rows})
    else:
        print_table("This machine", rows)


def run() -> int:
    """Run the command line; an error of ours is one line on stderr.

    Returns:
        0 = done, 1 = failed, 2 = bad arguments.
    """
    try:
        app()
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else 1
    except (BlasstError, ValueError, OSError, ImportError) as error:
        if _show_traceback:
            traceback.print_exc()
        error_console.print(f"error: {error}", markup=False)
        return 2 if isinstance(error, ValueError) else 1
    return 0
