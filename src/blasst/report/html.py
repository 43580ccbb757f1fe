"""One HTML file with the tables and figures of a report inside it; no script, no outside address."""

from __future__ import annotations

import base64
import html
from collections.abc import Mapping, Sequence
from typing import Any

from blasst.report.contents import FigureData, Report

_STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; color: #111827; max-width: 1040px; margin: 2rem auto;
  padding: 0 1rem; }
h1 { font-size: 1.7rem; margin-bottom: .2rem; }
h2 { font-size: 1.2rem; margin-top: 2.2rem; border-bottom: 1px solid #e5e7eb; padding-bottom: .2rem; }
p { max-width: 75ch; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-size: .9rem; margin: .8rem 0; }
th, td { padding: .25rem .8rem; border-bottom: 1px solid #e5e7eb; text-align: right; white-space: nowrap; }
th { background: #f3f4f6; }
th.text, td.text { text-align: left; }
img { max-width: 100%; height: auto; display: block; margin: .8rem 0; }
.note { background: #fef3c7; padding: .4rem .8rem; border-radius: 4px; max-width: 75ch; }
footer { color: #6b7280; font-size: .85rem; margin-top: 2rem; }
"""

_SECTIONS: tuple[tuple[str, str, str, str], ...] = (
    (
        "calibration",
        "Calibration",
        "One pass over the calibration prompts counts, for many thresholds at once, how many tiles would be "
        "skipped. The fitted curve turns a target sparsity and a length into a threshold.",
        "",
    ),
    (
        "target",
        "Target against achieved",
        "Held-out prompts, not seen by the fit. Achieved sparsity is skipped over visited tiles, summed over "
        "layers, heads and prompts before dividing.",
        "calibration",
    ),
    (
        "quality",
        "Quality against dense attention",
        "The same items answered dense and sparse; prompts follow the prefill rule, answers the decode rule. "
        "With few items a difference of one answer is noise.",
        "quality",
    ),
    (
        "skipped_mass",
        "Skipped mass",
        "The softmax weight, 0 to 1, that dense attention gives to the keys that were skipped. The output "
        "moves by at most twice this weight times the largest value vector.",
        "skipped_mass",
    ),
    (
        "head_sparsity",
        "Layers and heads",
        "One threshold for the whole model; layers and heads differ on their own.",
        "",
    ),
    (
        "skip_map",
        "One head",
        "Each cell is one tile. The first key tile and the diagonal hold most maxima and are kept.",
        "",
    ),
)

_HEADINGS = {
    "seqlen": "length",
    "n": "items",
    "nll": "NLL",
    "p99": "99th percentile",
    "dense": "dense",
    "sparse": "sparse",
}


def _cell(key: str, value: Any) -> str:
    if isinstance(value, bool) or value is None:
        return {True: "yes", False: "no", None: "none"}[value]
    if key == "target":
        return f"{value:.0%}"
    if isinstance(value, float):
        return f"{value:.4f}" if abs(value) < 100.0 else f"{value:.0f}"
    return str(value)


def _table(rows: Sequence[Mapping[str, Any]]) -> str:
    """An HTML table with one row per mapping; text to the left, numbers to the right."""
    if not rows:
        return "<p>Not measured in this run.</p>"
    keys = list(rows[0])
    classes = {key: ' class="text"' if isinstance(rows[0][key], str) else "" for key in keys}
    head = "".join(f"<th{classes[key]}>{html.escape(_HEADINGS.get(key, key))}</th>" for key in keys)
    body = "".join(
        "<tr>"
        + "".join(f"<td{classes[key]}>{html.escape(_cell(key, row[key]))}</td>" for key in keys)
        + "</tr>"
        for row in rows
    )
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _kinds_side_by_side(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """One row per phase, length and target, one column per kind of prompt."""
    table: dict[tuple[Any, ...], dict[str, Any]] = {}
    for row in rows:
        key = {name: row[name] for name in ("phase", "seqlen", "target")}
        table.setdefault(tuple(key.values()), key)[row["kind"]] = row["achieved"]
    return list(table.values())


def _image(name: str, title: str, images: Mapping[str, bytes]) -> str:
    if name not in images:
        return ""
    data = base64.b64encode(images[name]).decode("ascii")
    return f'<img alt="{html.escape(title)}" src="data:image/png;base64,{data}">'


def render_html(report: Report, figures: FigureData, images: Mapping[str, bytes]) -> str:
    """The whole page as one string.

    Args:
        report: measured numbers, shown as tables.
        figures: its notes are shown at the top.
        images: figure name -> PNG bytes; a missing figure leaves its section with the table alone.

    Returns:
        A self-contained HTML 5 document.
    """
    environment = report.environment
    parts = [
        '<!doctype html><html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>blasst report</title><style>{_STYLE}</style></head><body>",
        "<h1>blasst report</h1>",
        f"<p>{html.escape(str(environment.get('model', 'model not named')))}, "
        f"{html.escape(str(environment.get('gpu') or environment.get('cpu', 'CPU')))}, "
        f"{html.escape(str(environment.get('date', '')))}</p>",
        *(f'<p class="note">{html.escape(note)}</p>' for note in figures.notes),
    ]
    for name, title, text, rows_name in _SECTIONS:
        image = _image(name, title, images)
        rows = getattr(report, rows_name) if rows_name else ()
        if not image and not rows:
            continue
        parts.append(f"<h2>{title}</h2><p>{text}</p>{image}")
        if rows_name:
            parts.append(_table(rows))
        if name == "calibration" and figures.kinds:
            parts.append("<p>Content moves sparsity: each kind of prompt at the threshold of a target.</p>")
            parts.append(_table(_kinds_side_by_side(figures.kinds)))
        if rows_name == "quality":
            nll = [{**row, "difference": row["sparse"] - row["dense"]} for row in report.nll]
            parts.append("<p>Loss on held-out prompts, nats per token:</p>" + _table(nll))
    parts.append("<h2>Environment</h2>")
    parts.append(_table([{"what": key, "value": _cell(key, value)} for key, value in environment.items()]))
    parts.append("<footer>The same numbers: report.json beside this file.</footer></body></html>\n")
    return "\n".join(parts)
