"""The figures of the report; each function takes plain rows or arrays and returns a new Figure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import BoundaryNorm, ListedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import PercentFormatter
from numpy.typing import NDArray

from blasst.core.types import PHASES, Phase
from blasst.report.style import (
    CYCLE,
    GREY,
    MARKERS,
    legend_beside,
    length_axis,
    length_label,
    new_figure,
)

Row = Mapping[str, Any]


def _phases(rows: Sequence[Row]) -> list[str]:
    """Phases that occur, prefill first."""
    present = {row["phase"] for row in rows}
    return [phase for phase in PHASES if phase in present]


def _percent_y(ax: Axes, label: str) -> None:
    ax.set_ylim(0.0, 1.02)
    ax.yaxis.set_major_formatter(PercentFormatter(1.0))
    ax.set_ylabel(label)
    ax.grid(axis="y", color="#E5E7EB", linewidth=0.8)
    ax.set_axisbelow(True)


def calibration_figure(points: Sequence[Row], curves: Sequence[Row]) -> Figure:
    """Measured sparsity over threshold, one colour per length, with the fitted curves.

    Args:
        points: rows with phase, seqlen (tokens), threshold (above 0) and sparsity (0..1).
        curves: rows with phase, seqlen and the sequences threshold and sparsity of one fitted curve.
    """
    phases = _phases(points)
    figure, axes = new_figure(len(phases))
    for ax, phase in zip(axes, phases):
        own = [row for row in points if row["phase"] == phase]
        for index, length in enumerate(sorted({row["seqlen"] for row in own})):
            colour = CYCLE[index % len(CYCLE)]
            ax.scatter(
                [row["threshold"] for row in own if row["seqlen"] == length],
                [row["sparsity"] for row in own if row["seqlen"] == length],
                s=14,
                alpha=0.6,
                color=colour,
                marker=MARKERS[index % len(MARKERS)],
                linewidths=0,
                label=length_label(length),
            )
            for curve in curves:
                if curve["phase"] == phase and curve["seqlen"] == length:
                    ax.plot(curve["threshold"], curve["sparsity"], color=colour, linewidth=1.5)
        ax.set_xscale("log")
        ax.set_xlim(left=min((row["threshold"] for row in own if row["sparsity"] > 0.01), default=None))
        ax.set_xlabel("threshold (weight ratio, no unit)")
        _percent_y(ax, "sparsity (skipped / visited tiles)")
        ax.set_title(f"Calibration, {phase}: points and fit")
        title = "length (tokens)\npoint: counted\nline: fitted"
        ax.legend(title=title, loc="upper left", frameon=False, fontsize=8, title_fontsize=8)
    return figure


def target_figure(rows: Sequence[Row]) -> Figure:
    """Achieved sparsity on held-out prompts by length; the dashed lines are the targets.

    Args:
        rows: the "calibration" rows of report.json: phase, seqlen, target, achieved.
    """
    phases = _phases(rows)
    figure, axes = new_figure(len(phases))
    targets = sorted({row["target"] for row in rows})
    lengths = sorted({row["seqlen"] for row in rows})
    for ax, phase in zip(axes, phases):
        for index, target in enumerate(targets):
            own = sorted(
                (row["seqlen"], row["achieved"])
                for row in rows
                if row["phase"] == phase and row["target"] == target
            )
            if not own:
                continue
            colour = CYCLE[index % len(CYCLE)]
            ax.axhline(target, color=colour, linestyle="--", linewidth=1.0, alpha=0.7)
            ax.plot(
                [length for length, _ in own],
                [achieved for _, achieved in own],
                color=colour,
                marker=MARKERS[index % len(MARKERS)],
                linewidth=1.5,
                label=f"{target:.0%}",
            )
        length_axis(ax, lengths)
        _percent_y(ax, "achieved sparsity")
        ax.set_title(f"Target against achieved, {phase}")
    legend_beside(axes[-1], "target\n(dashed)")
    return figure


def quality_figure(quality: Sequence[Row], nll: Sequence[Row]) -> Figure:
    """Task scores and loss against target sparsity; target 0 is the dense run on the same items.

    Args:
        quality: the "quality" rows of report.json: phase, seqlen, target, task, n, dense, sparse.
        nll: the "nll" rows of report.json: seqlen, target, dense, sparse (nats per token).
    """
    figure, axes = new_figure(2, width=11.0)
    ax = axes[0]
    targets = sorted({row["target"] for row in quality})
    tasks = sorted({row["task"] for row in quality})
    quality_lengths = sorted({row["seqlen"] for row in quality})
    lines = []
    for task, length in sorted({(row["task"], row["seqlen"]) for row in quality}):
        own = [row for row in quality if row["task"] == task and row["seqlen"] == length]
        index = tasks.index(task)
        sparse = {row["target"]: row["sparse"] for row in own}
        line = [own[0]["dense"], *(sparse.get(target, np.nan) for target in targets)]
        lines.append(line)
        ax.plot(
            [0.0, *targets],
            line,
            color=CYCLE[index % len(CYCLE)],
            marker=MARKERS[index % len(MARKERS)],
            markersize=5,
            linewidth=1.2,
            linestyle=("-", "--", "-.", (0, (1, 1)))[quality_lengths.index(length) % 4],
            alpha=0.85,
            label=f"{task}, {length_label(length)}, n={own[0]['n']}",
        )
    if lines:
        mean = np.nanmean(np.array(lines, dtype=np.float64), axis=0)
        ax.plot([0.0, *targets], mean, color="black", linewidth=2.0, marker="X", label="mean of these")
    _percent_y(ax, "mean score")
    ax.set_title("Task score, dense (0%) and sparse")
    legend_beside(ax, "task, length, items")

    ax = axes[1]
    lengths = sorted({row["seqlen"] for row in nll})
    for index, length in enumerate(lengths):
        differences = sorted(
            (row["target"], row["sparse"] - row["dense"]) for row in nll if row["seqlen"] == length
        )
        ax.plot(
            [0.0, *(target for target, _ in differences)],
            [0.0, *(difference for _, difference in differences)],
            color=CYCLE[index % len(CYCLE)],
            marker=MARKERS[index % len(MARKERS)],
            linewidth=1.5,
            label=length_label(length),
        )
    ax.axhline(0.0, color=GREY, linewidth=0.8)
    ax.grid(axis="y", color="#E5E7EB", linewidth=0.8)
    ax.set_axisbelow(True)
    ax.set_ylabel("NLL, sparse minus dense (nats per token)")
    ax.set_title("Loss on held-out text")
    legend_beside(ax, "length (tokens)")
    for ax in axes:
        ax.set_xlabel("target sparsity")
        ax.xaxis.set_major_formatter(PercentFormatter(1.0))
    return figure


def head_sparsity_figure(sparsity: Mapping[Phase, NDArray[np.float64]], target: float) -> Figure:
    """Sparsity of each layer and head as a heat map, one panel per phase.

    Args:
        sparsity: phase -> (layers, heads in prefill, KV heads in decode), 0..1.
        target: target sparsity of the run, for the title.
    """
    phases = [phase for phase in PHASES if phase in sparsity]
    figure, axes = new_figure(len(phases))
    image = None
    for ax, phase in zip(axes, phases):
        values = sparsity[phase]
        image = ax.imshow(values, vmin=0.0, vmax=1.0, cmap="cividis", aspect="auto", interpolation="nearest")
        ax.spines[:].set_visible(False)
        ax.set_xlabel("query head" if phase == "prefill" else "KV head (all its query heads agree)")
        ax.set_ylabel("layer")
        step = max(1, -(-values.shape[1] // 16))
        ax.set_xticks(range(0, values.shape[1], step))
        ax.set_title(f"Sparsity at target {target:.0%}, {phase}")
    if image is not None:
        bar = figure.colorbar(image, ax=axes, format=PercentFormatter(1.0))
        bar.set_label("skipped / visited tiles")
    return figure


def skip_map_figure(
    kept: NDArray[np.bool_],
    visited: NDArray[np.bool_],
    tile: tuple[int, int],
    title: str,
) -> Figure:
    """Which tiles of one head were kept, skipped, or never visible.

    Args:
        kept: (query tiles, key tiles), True = visited and kept.
        visited: (query tiles, key tiles), True = at least one visible pair.
        tile: rows and keys of one tile, tokens.
        title: which head, length and threshold this is.
    """
    figure, (ax,) = new_figure(width=7.4)
    states = np.where(visited, np.where(kept, 2, 1), 0)
    colours = ("#F3F4F6", "#E69F00", "#0072B2")
    extent = (0.0, states.shape[1] * tile[1] / 1024, states.shape[0] * tile[0] / 1024, 0.0)
    ax.imshow(
        states,
        cmap=ListedColormap(list(colours)),
        norm=BoundaryNorm([-0.5, 0.5, 1.5, 2.5], 3),
        interpolation="nearest",
        aspect="equal",
        extent=extent,
    )
    ax.set_xlabel("key position (1024 tokens)")
    ax.set_ylabel("query position (1024 tokens)")
    ax.set_title(title)
    share = 1.0 - kept.sum() / max(1, visited.sum())
    labels = ("not visible", f"skipped ({share:.0%})", f"kept ({1.0 - share:.0%})")
    ax.legend(
        handles=[Patch(color=colour, label=label) for colour, label in zip(colours, labels)],
        loc="upper left",
        bbox_to_anchor=(1.01, 1.0),
        frameon=False,
        fontsize=9,
        title=f"tile of {tile[0]} queries x {tile[1]} keys",
        title_fontsize=8,
    )
    return figure


def skipped_mass_figure(histograms: Sequence[Row]) -> Figure:
    """How much softmax weight each row lost, as a histogram over rows on a logarithmic axis.

    Args:
        histograms: rows with phase, seqlen, target, edges (bins + 1 ascending masses, 0..1), counts (bins)
            and below (rows under the first edge, most of them with nothing skipped).
    """
    phases = _phases(histograms)
    figure, axes = new_figure(len(phases))
    for ax, phase in zip(axes, phases):
        own = [row for row in histograms if row["phase"] == phase]
        highest = 0.0
        for index, row in enumerate(own):
            counts = np.asarray(row["counts"], dtype=np.float64)
            total = counts.sum() + row["below"]
            outside = row["below"] / max(1.0, total)
            label = f"{row['target']:.0%}, {length_label(row['seqlen'])}; {outside:.0%}"
            highest = max(highest, float(counts.max()) / max(1.0, total))
            ax.stairs(
                counts / max(1.0, total),
                row["edges"],
                color=CYCLE[index % len(CYCLE)],
                linewidth=1.5,
                label=label,
            )
        ax.set_xscale("log")
        ax.set_xlabel("skipped softmax weight of a row (0 to 1)")
        ax.set_ylabel("share of rows")
        ax.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
        ax.set_ylim(0.0, max(highest, 0.01) * (1.2 + 0.07 * len(own)))  # the legend stands above the data
        ax.set_title(f"Skipped mass, {phase}")
        ax.legend(
            title="target, length; rows left of the axis",
            frameon=False,
            fontsize=8,
            title_fontsize=8,
            loc="upper left",
        )
    return figure
