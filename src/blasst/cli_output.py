"""How the command line shows things: tables, progress on stderr, and one JSON line at the end."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from rich.console import Console

#: progress(done, total, label): what long functions call.
ProgressCallback = Callable[[int, int, str], None]

_STATE_COLOURS = {"ok": "green", "limited": "yellow", "missing": "red"}

console = Console(highlight=False)
error_console = Console(stderr=True, highlight=False)


def print_json(value: Any) -> None:
    """One JSON line on standard output.

    Args:
        value: anything that json takes.
    """
    console.print(json.dumps(value, allow_nan=False), markup=False, soft_wrap=True)


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.4g}"
    return str(value)


def print_table(title: str, rows: Sequence[Mapping[str, Any]]) -> None:
    """A table with one line per row; numbers to the right.

    Args:
        title: heading.
        rows: mappings with the same keys.
    """
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    if not rows:
        console.print(f"{title}: nothing to show")
        return
    for key, value in rows[0].items():
        numeric = isinstance(value, int | float) and not isinstance(value, bool)
        table.add_column(key, justify="right" if numeric else "left", overflow="fold")
    for row in rows:
        cells = [_cell(value) for value in row.values()]
        if "state" in row:
            colour = _STATE_COLOURS.get(str(row["state"]), "default")
            cells = [f"[{colour}]{cell}[/]" if cell == row["state"] else cell for cell in cells]
        table.add_row(*cells)
    console.print(table)


@contextmanager
def progress_bar(title: str) -> Iterator[ProgressCallback]:
    """A progress bar on stderr; where that is no terminal, one line whenever the label changes.

    Args:
        title: what is being done; a callback's label follows it.
    """
    if not error_console.is_terminal:
        last = ""

        def report(done: int, total: int, label: str) -> None:
            nonlocal last
            if label != last:
                last = label
                error_console.print(f"{title}: {label} ({done}/{total})", markup=False)

        yield report
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=error_console) as progress:
        task = progress.add_task(title, total=None)

        def advance(done: int, total: int, label: str) -> None:
            progress.update(task, completed=done, total=total, description=f"{title}: {label}")

        yield advance
