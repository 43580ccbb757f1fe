"""The figure of the prefill benchmark: speed-up over the dense baseline against sparsity."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from blasst.bench import published
from blasst.bench.record import BenchmarkRow
from blasst.bench.variants import CUDNN
from blasst.report.style import GREY, MARKERS, length_label, new_figure

_OURS = "blasst "
#: Colour, marker and title of what was measured in another run.
_FOREIGN = {
    published.TRTLLM_SKIP: ("#D55E00", "s", "TensorRT-LLM skip-softmax *"),
    published.TRTLLM_DENSE: ("#CC79A7", "D", "TensorRT-LLM dense *"),
    published.FLASH_ATTENTION_3: ("#000000", "X", "FlashAttention-3, dense *"),
}
_OUR_COLOURS = ("#0072B2", "#009E73", "#56B4E9")


_INCH_HEIGHT = 5.2

#: A row and the environment it was measured in.
Measured = tuple[BenchmarkRow, Mapping[str, Any]]


def _ratio(row: BenchmarkRow) -> float | None:
    return row.ratio_to_own_dense if row.ratio_to_cudnn is None else row.ratio_to_cudnn


def _series_name(row: BenchmarkRow) -> str:
    mask = "" if row.causal else ", not causal"
    shape = f"{row.num_heads}/{row.num_kv_heads} heads, d{row.head_dim}, {row.dtype}{mask}"
    inputs = row.inputs if row.inputs.startswith("captured") else "generated inputs"
    return f"{row.kernel}: {inputs},\n{shape}"


def _draw_ours(ax: Axes, rows: Sequence[BenchmarkRow]) -> None:
    """One line per kernel and input set; dense as an open marker at sparsity 0."""
    names = list(dict.fromkeys(_series_name(row) for row in rows))
    for index, name in enumerate(names):
        own = [row for row in rows if _series_name(row) == name]
        colour, marker = (_OUR_COLOURS[index % len(_OUR_COLOURS)], MARKERS[index % len(MARKERS)])
        skipping = sorted((row.sparsity, _ratio(row) or 0.0) for row in own if row.threshold is not None)
        ax.plot(
            [sparsity for sparsity, _ in skipping],
            [ratio for _, ratio in skipping],
            color=colour,
            marker=marker,
            linewidth=2.0,
            zorder=4,
            label=name,
        )
        dense = [_ratio(row) or 0.0 for row in own if row.threshold is None]
        ax.scatter(
            [0.0] * len(dense),
            dense,
            s=60,
            facecolors="none",
            edgecolors=colour,
            marker=marker,
            zorder=5,
            label="the same, dense (threshold None)" if dense else None,
        )


def _draw_published(ax: Axes, seqlen: int) -> None:
    for kernel, (colour, marker, title) in _FOREIGN.items():
        points = published.peer_ratios(kernel, seqlen)
        if points:
            ax.plot(
                [sparsity for sparsity, _ in points],
                [ratio for _, ratio in points],
                color=colour,
                marker=marker,
                linewidth=1.2,
                linestyle="--" if len(points) > 1 else "",
                label=title,
            )
    if seqlen == published.PAPER_SEQLEN:
        ax.plot(
            [sparsity for sparsity, _ in published.PAPER_H200_PREFILL],
            [ratio for _, ratio in published.PAPER_H200_PREFILL],
            color="#E69F00",
            marker="v",
            linewidth=1.2,
            linestyle=":",
            label="BLASST paper, H200, batch 1,\nover its own dense baseline",
        )


def _draw_roofline(ax: Axes, cudnn_tflops: float) -> None:
    steps = [number / 100 for number in range(101)]
    ax.plot(
        steps,
        [published.roofline_tflops(s) / cudnn_tflops for s in steps],
        color=GREY,
        linewidth=1.2,
        label=f"roofline 2 x {published.MATMUL_TFLOPS_H200:.0f} / (2 - s) TFLOP/s",
    )
    right = ax.secondary_yaxis(
        "right",
        functions=(
            lambda y: np.asarray(y, dtype=np.float64) * cudnn_tflops,
            lambda y: np.asarray(y, dtype=np.float64) / cudnn_tflops,
        ),
    )
    right.set_ylabel("dense-equivalent TFLOP/s of this run", fontsize=8)
    right.tick_params(labelsize=8)


def _draw_panel(ax: Axes, pairs: Sequence[Measured], seqlen: int) -> None:
    """Everything about one length."""
    rows = [row for row, _ in pairs if row.seqlen_k == seqlen]
    gpus = {str(environment["gpu"]) for row, environment in pairs if row.seqlen_k == seqlen}
    cudnn = [row.tflops for row in rows if row.kernel == CUDNN]
    ax.axhline(1.0, color=GREY, linewidth=0.8, linestyle=(0, (1, 2)))
    if cudnn and all("H200" in gpu for gpu in gpus):
        _draw_published(ax, seqlen)
        _draw_roofline(ax, cudnn[0])
    _draw_ours(ax, [row for row in rows if row.kernel.startswith(_OURS)])
    low, high = ax.get_ylim()
    ax.set_ylim(min(low, 0.6), high)
    ax.set_xlim(-0.02, 1.0)
    ax.xaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    ax.set_xlabel("sparsity (skipped / visited tiles)")
    ax.set_ylabel(f"speed-up over {'cuDNN' if cudnn else 'own dense run'}")
    ax.grid(axis="y", color="#E5E7EB", linewidth=0.8)
    ax.set_axisbelow(True)
    where = ", ".join(sorted(gpus)) if gpus != {"None"} else "CPU"
    ax.set_title(f"Prefill, {length_label(seqlen)} tokens, {where}")


def speed_figure(pairs: Sequence[Measured]) -> Figure:
    """One panel per length: speed-up over cuDNN against realised sparsity.

    Published figures and the roofline, all for an H200, stand beside rows that were measured against cuDNN on
    an H200; a length without cuDNN rows shows the speed-up over the kernel's own dense run.

    Args:
        pairs: (row, environment) of `blasst bench prefill`; other rows are left out.

    Raises:
        ValueError: no row of that benchmark.
    """
    pairs = [pair for pair in pairs if pair[0].bench == "prefill"]
    if not pairs:
        raise ValueError("rows: none of bench prefill")
    lengths = sorted({row.seqlen_k for row, _ in pairs})
    figure, axes = new_figure(len(lengths), width=max(8.0, 5.4 * len(lengths)))
    figure.set_figheight(_INCH_HEIGHT)
    for ax, seqlen in zip(axes, lengths):
        _draw_panel(ax, pairs, seqlen)
    handles: dict[str, Artist] = {}
    for ax in axes:
        handles |= {label: handle for handle, label in zip(*ax.get_legend_handles_labels())}
    footnote = "* ratio to cuDNN of another run on one H200, heavy-tailed inputs, 32/8 heads"
    figure.legend(
        list(handles.values()),
        list(handles),
        loc="outside lower center",
        ncols=3,
        frameon=False,
        fontsize=8,
        title=footnote if any(label.endswith("*") for label in handles) else None,
        title_fontsize=8,
    )
    return figure
