"""Tables for docs/results.md, and the figure of all methods, from the rows of the quality scripts.

python benchmarks/quality_tables.py DIR [--figure methods.png]

DIR holds what benchmarks/target_sparsity.py (achieved.jsonl, counts.jsonl), benchmarks/nll_mass.py
(nll.jsonl) and benchmarks/long_tasks.py (tasks*.jsonl) wrote; a table whose rows are missing is left out.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from blasst.report.quality import (
    achieved_tables,
    kind_fits,
    lines_of,
    methods_figure,
    nll_tables,
    task_points,
    task_tables,
)
from blasst.report.style import save_png


def main() -> None:
    """Parse and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--figure", type=Path, help="also draw quality over sparsity of all methods")
    options = parser.parse_args()
    achieved, counts = (lines_of(options.folder / name) for name in ("achieved.jsonl", "counts.jsonl"))
    beside = (".sparsity.jsonl", ".environment.jsonl")
    found = [p for p in sorted(options.folder.glob("tasks*.jsonl")) if not p.name.endswith(beside)]
    points = task_points(found)
    sections = {
        "Achieved against target sparsity, held-out prompts": achieved_tables(achieved) if achieved else (),
        "Calibrated on one kind of prompt": kind_fits(counts) if counts else (),
        "Long-context tasks": task_tables(points),
        "NLL and skipped mass": nll_tables(rows) if (rows := lines_of(options.folder / "nll.jsonl")) else (),
    }
    for title, tables in sections.items():
        text = "\n\n".join(tables)
        if text:
            print(f"## {title}\n\n{text}\n")
    if options.figure is not None:
        save_png(methods_figure(points), options.figure)


if __name__ == "__main__":
    main()
