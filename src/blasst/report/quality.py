"""Tables in Markdown, and a figure, from the rows of the quality scripts in benchmarks/.

Every table function yields finished tables; cells without rows are dashes.
"""

from __future__ import annotations

import json
import warnings
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from blasst.calibrate.counts import count_points
from blasst.calibrate.fit import fit_phase
from blasst.core.errors import CalibrationError
from blasst.core.phase_fit import SERVING_RULES
from blasst.core.types import PHASES
from blasst.evals.results import TaskResults, read_rows
from blasst.report.style import CYCLE, MARKERS, new_figure

Row = dict[str, Any]

#: Tasks that dense solves less often than this say little about skipping.
MIN_DENSE_SCORE = 0.2
METHODS = ("blasst", "exponential", "linear space", "fixed")


def lines_of(path: Path) -> list[Row]:
    """Rows of a JSONL file; none when it is missing."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table in Markdown."""
    lines = [list(header), ["---"] * len(header), *(list(row) for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def share(rows: Iterable[Row]) -> float | None:
    """Skipped over visited tiles of all rows together; None without rows."""
    chosen = list(rows)
    visited = sum(row["visited"] for row in chosen)
    return sum(row["skipped"] for row in chosen) / visited if visited else None


def shown(value: float | None, form: str = ".3f") -> str:
    """A number, or a dash."""
    return "-" if value is None else format(value, form)


def achieved_tables(rows: list[Row]) -> Iterable[str]:
    """Achieved sparsity by length, and how far it lies from the target."""
    cells: dict[tuple[Any, ...], list[Row]] = defaultdict(list)
    for row in rows:
        cells[row["phase"], row["target"], row["seqlen"], row["method"]].append(row)
    places = sorted({key[:3] for key in cells}, key=lambda k: (PHASES.index(k[0]), *k[1:]))
    body = [
        [phase, f"{target:g}", str(seqlen)]
        + [shown(share(cells[phase, target, seqlen, method])) for method in METHODS]
        for phase, target, seqlen in places
    ]
    yield table(["phase", "target", "length", *METHODS], body)
    misses = []
    for method in METHODS:
        found = [(share(cells[*place, method]), place[1]) for place in places]
        errors = [abs(got - target) for got, target in found if got is not None]
        if errors:
            misses.append([method, f"{sum(errors) / len(errors):.3f}", f"{max(errors):.3f}"])
    yield table(["method", "mean distance from the target", "largest"], misses)
    kinds = sorted({row["kind"] for row in rows})
    own = [row for row in rows if row["method"] == "blasst"]
    yield table(
        ["phase", "target", *kinds],
        [
            [phase, f"{target:g}"]
            + [
                shown(share(r for r in own if (r["phase"], r["target"], r["kind"]) == (phase, target, kind)))
                for kind in kinds
            ]
            for phase, target in sorted({place[:2] for place in places})
        ],
    )


def kind_fits(rows: list[Row]) -> Iterable[str]:
    """The exponential's a and b, calibrated on each kind of prompt alone and on all."""
    body = []
    for phase in PHASES:
        own = [row for row in rows if row["phase"] == phase and row["split"] == "calibration"]
        for kind in ("all", *sorted({row["kind"] for row in own})):
            points = count_points([r for r in own if kind in ("all", r["kind"])], phase)
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    fit = fit_phase(points, phase=phase, dense_tail=SERVING_RULES[phase].dense_tail)
            except CalibrationError as error:
                body.append([phase, kind, "-", "-", str(error)])
                continue
            model = fit.exponential
            body.append([phase, kind, f"{model.a:.3g}", f"{model.b:.2f}", f"{model.r2:.2f}"])
    yield table(["phase", "calibrated on", "a", "b", "r2"], body)


def task_points(paths: Sequence[Path]) -> list[Row]:
    """Per file, length and condition: the paired difference in the mean over tasks, and what was left out.

    Args:
        paths: of long_tasks.py, each with its `*.sparsity.jsonl` beside it.
    """
    points: list[Row] = []
    for path in paths:
        results = complete(TaskResults(tuple(read_rows(path).values()), {}, {}))
        if not results.rows:
            continue
        left_out = lines_of(path.with_suffix(".sparsity.jsonl"))
        for least in (0.0, MIN_DENSE_SCORE):
            summary = results.summary(min_dense_score=least)
            for row in summary:
                place = (row.seqlen, row.condition)
                tasks = {row.task}
                if row.task == "mean":
                    same = [r for r in summary if (r.seqlen, r.condition) == place]
                    tasks = {r.task for r in same if r.dense >= least} - {"mean"}
                own = [r for r in left_out if (r["seqlen"], r["condition"]) == place and r["task"] in tasks]
                point: Row = {"least": least, "row": row}
                point |= {phase: share(r for r in own if r["phase"] == phase) for phase in PHASES}
                points.append(point)
    return points


def complete(results: TaskResults) -> TaskResults:
    """Only items that have a row of every condition of their length, so that all compare the same."""
    conditions: dict[int, set[str]] = defaultdict(set)
    of_item: dict[tuple[Any, ...], set[str]] = defaultdict(set)
    for row in results.rows:
        conditions[row.seqlen].add(row.condition)
        of_item[row.task, row.index, row.seed, row.seqlen].add(row.condition)
    kept = [r for r in results.rows if of_item[r.task, r.index, r.seed, r.seqlen] == conditions[r.seqlen]]
    return TaskResults(tuple(kept), {}, {})


def task_tables(points: list[Row]) -> Iterable[str]:
    """Means over tasks, and the three tasks that lose most under each condition."""

    def line(point: Row) -> list[str]:
        row = point["row"]
        low, high = 100 * row.low, 100 * row.high
        return [
            *(str(row.seqlen), row.condition, str(row.n), *(shown(point[phase], ".2f") for phase in PHASES)),
            *(
                f"{row.dense:.3f}",
                f"{row.sparse:.3f}",
                f"{100 * row.difference:+.1f} [{low:+.1f}, {high:+.1f}]",
            ),
        ]

    header = ["length", "condition", "items", *PHASES, "dense", "sparse", "difference in points"]
    for least in (0.0, MIN_DENSE_SCORE):
        means = [p for p in points if p["least"] == least and p["row"].task == "mean"]
        if means:
            yield f"Kinds that dense solves in at least {least:.0%}:\n\n" + table(header, map(line, means))
    worst: dict[tuple[int, str], list[Any]] = defaultdict(list)
    for point in points:
        if point["least"] == 0.0 and point["row"].task != "mean":
            worst[point["row"].seqlen, point["row"].condition].append(point["row"])
    body = []
    for (seqlen, condition), rows in worst.items():
        lost = sorted(rows, key=lambda row: row.difference)[:3]
        body.append(
            [str(seqlen), condition, *(f"{r.task} {100 * r.difference:+.1f} (n={r.n})" for r in lost)]
        )
    if body:
        width = max(map(len, body))
        filled = [line + ["-"] * (width - len(line)) for line in body]
        yield table(["length", "condition", *["most lost", "then", "then"][: width - 2]], filled)


def nll_tables(rows: list[Row]) -> Iterable[str]:
    """NLL and skipped mass per condition, and the layers that lose most."""
    body, layers = [], []
    for row in rows:
        cells = [str(row["seqlen"]), row["kind"], row["condition"]]
        cells += [shown(row["sparsity"].get(phase), ".2f") for phase in PHASES]
        cells += [f"{row['nll_sparse'] - row['nll_dense']:+.4f}", f"{row['kl']:.4f}"]
        cells.append(f"{row['top1_agreement']:.1%}")
        for phase in PHASES:
            mass, bound = row["skipped_mass"].get(phase), row["mass_bound"].get(phase)
            cells.append(
                "-" if mass is None else f"{mass['mean']:.2%} / {mass['p99']:.1%} / {mass['max']:.1%}"
            )
            cells.append("-" if bound is None else f"{bound['mean']:.2%} / {bound['max']:.1%}")
        body.append(cells)
        by_mass = sorted(row["layers"], key=lambda layer: -(layer["mean_skipped_mass"] or 0.0))[:3]
        layers.append([*cells[:3], "; ".join(map(layer_text, by_mass))])
    masses = [f"{phase} {what}" for phase in PHASES for what in ("mean / p99 / max", "bound mean / max")]
    yield table(["length", "prompts", "condition", *PHASES, "NLL", "KL", "same top", *masses], body)
    header = ["length", "prompts", "condition", "layers with most skipped mass, and their worst head"]
    yield table(header, layers)


def layer_text(layer: Row) -> str:
    """A layer's mean skipped mass, and that of its worst head."""
    number = "".join(c for c in layer["layer"] if c.isdigit()) or layer["layer"]
    text = f"{number} ({layer['phase']}) {layer['mean_skipped_mass'] or 0:.1%}"
    heads = layer["head_skipped_mass"]
    return f"{text}, head {heads.index(max(heads))} {max(heads):.1%}" if heads else text


def methods_figure(points: list[Row]) -> Figure:
    """Difference from dense over what was really left out, a panel per phase that is sparse alone.

    Args:
        points: of `task_points`.
    """
    series: dict[str, dict[str, list[tuple[float, Any]]]] = {phase: defaultdict(list) for phase in PHASES}
    for point in points:
        sparse = [phase for phase in PHASES if point[phase] is not None]
        if point["least"] == MIN_DENSE_SCORE and point["row"].task == "mean" and len(sparse) == 1:
            name = point["row"].condition.rpartition(" ")[0]
            label = f"{'blasst' if name in PHASES else name}, {point['row'].seqlen}"
            series[sparse[0]][label].append((point[sparse[0]], point["row"]))
    figure, axes = new_figure(len(PHASES))
    for ax, phase in zip(axes, PHASES):
        for number, (label, found) in enumerate(sorted(series[phase].items())):
            found.sort(key=lambda pair: pair[0])
            x, y = [pair[0] for pair in found], [100 * pair[1].difference for pair in found]
            bars = [
                [100 * (r.difference - r.low) for _, r in found],
                [100 * (r.high - r.difference) for _, r in found],
            ]
            ax.errorbar(
                x,
                y,
                yerr=bars,
                label=label,
                capsize=2,
                color=CYCLE[number % len(CYCLE)],
                marker=MARKERS[(number + number // len(CYCLE)) % len(MARKERS)],
            )
        ax.axhline(0, color="grey", linewidth=0.8)
        ax.set_title(phase)
        ax.set_xlabel("tiles left out")
        ax.set_ylabel("mean over tasks minus dense, points")
        if series[phase]:
            ax.legend(fontsize=7)
    return figure
