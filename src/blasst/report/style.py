"""How every figure looks: fonts, sizes and colours that stay apart for colour-blind readers."""

from __future__ import annotations

from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

#: Okabe and Ito's palette without its yellow, which is too pale for lines on white.
CYCLE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
GREY = "#6B7280"

_INCH_HEIGHT = 3.9
_DPI = 150


def new_figure(columns: int = 1, width: float | None = None) -> tuple[Figure, list[Axes]]:
    """An empty figure with a row of axes, independent of pyplot's global state.

    Args:
        columns: axes beside each other.
        width: inches; default 6.4 for one column and 5.0 a column for more.
    """
    inches = width if width is not None else (6.4 if columns == 1 else 5.0 * columns)
    figure = Figure(figsize=(inches, _INCH_HEIGHT), dpi=_DPI, layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.subplots(1, columns, squeeze=False)
    axes: list[Axes] = list(grid[0])
    for ax in axes:
        ax.spines[["top", "right"]].set_visible(False)
        ax.title.set_fontsize(11)
    return figure, axes


def length_label(length: int) -> str:
    """A sequence length as people write it: 4096 -> "4K", 1000 -> "1000"."""
    return f"{length // 1024}K" if length >= 1024 and length % 1024 == 0 else str(length)


def length_axis(ax: Axes, lengths: list[int]) -> None:
    """Make x a base-2 axis of sequence lengths with one labelled tick per length.

    Args:
        ax: axes to change.
        lengths: lengths to label, tokens.
    """
    ax.set_xscale("log", base=2)
    ax.set_xticks(lengths, [length_label(length) for length in lengths])
    ax.xaxis.set_minor_locator(NullLocator())
    ax.set_xlim(min(lengths) / 1.25, max(lengths) * 1.25)
    ax.set_xlabel("sequence length (tokens)")


def legend_beside(ax: Axes, title: str | None = None) -> None:
    """Put the legend to the right of the axes, where it cannot cover data.

    Args:
        ax: axes with labelled artists.
        title: heading of the legend.
    """
    ax.legend(
        title=title, loc="upper left", bbox_to_anchor=(1.01, 1.0), frameon=False, fontsize=8, title_fontsize=8
    )


def save_png(figure: Figure, path: Path) -> None:
    """Write a figure as PNG; the folder must exist.

    Args:
        figure: a figure of new_figure.
        path: target file.
    """
    figure.savefig(path, format="png", metadata={"Software": None})
