"""What a report holds: the measured rows of report.json and the extra numbers behind its figures."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from blasst.core.types import Phase

Row = dict[str, Any]

#: Keys of every row of each list in report.json; order as written.
ROW_KEYS: Mapping[str, tuple[str, ...]] = {
    "calibration": ("phase", "seqlen", "target", "achieved"),
    "quality": ("phase", "seqlen", "target", "task", "n", "dense", "sparse"),
    "nll": ("seqlen", "target", "dense", "sparse"),
    "skipped_mass": ("phase", "seqlen", "target", "mean", "p99", "max"),
}

#: Values that are shares or scores, 0..1. NLL is in nats per token and may be larger.
_UNIT_KEYS = {
    "calibration": ("target", "achieved"),
    "quality": ("target", "dense", "sparse"),
    "nll": ("target",),
    "skipped_mass": ("target", "mean", "p99", "max"),
}

REPORT_FILE = "report.json"
FIGURES_FILE = "figures.json"


@dataclass(frozen=True)
class Report:
    """The measured numbers, as report.json holds them.

    Attributes:
        calibration: achieved sparsity on held-out prompts: phase, seqlen, target, achieved.
        quality: task scores, sparse beside dense on the same items: phase ("both": the prompt by the prefill
            rule, the answer by the decode rule), seqlen, target, task, n, dense, sparse.
        nll: mean negative log-likelihood, nats per token: seqlen, target, dense, sparse.
        skipped_mass: softmax weight of skipped keys over rows: phase, seqlen, target, mean, p99, max.
        environment: what blasst.bench.record.environment returned, and the settings of the run.
    """

    calibration: Sequence[Row]
    quality: Sequence[Row]
    nll: Sequence[Row]
    skipped_mass: Sequence[Row]
    environment: Row

    def __post_init__(self) -> None:
        """Check keys and ranges, so that a wrong unit never reaches a reader.

        Raises:
            ValueError: a row has other keys, or a value is not finite or not in its range.
        """
        for name, keys in ROW_KEYS.items():
            for index, row in enumerate(getattr(self, name)):
                where = f"{name}[{index}]"
                if set(row) != set(keys):
                    raise ValueError(f"{where}: keys {sorted(row)}, expected {sorted(keys)}")
                for key, value in row.items():
                    if isinstance(value, float) and not math.isfinite(value):
                        raise ValueError(f"{where}: {key} is {value}")
                for key in _UNIT_KEYS[name]:
                    if not 0.0 <= row[key] <= 1.0:
                        raise ValueError(f"{where}: {key} is {row[key]}, expected 0 to 1")


@dataclass(frozen=True)
class FigureData:
    """Numbers that only the figures need; every part may be missing.

    Attributes:
        points: calibration points: phase, seqlen, threshold, sparsity.
        curves: fitted curves: phase, seqlen, threshold (list), sparsity (list).
        head_sparsity: phase -> (layers, heads) nested lists, 0..1.
        head_target: target sparsity that head_sparsity was measured at.
        skip_map: kept and visited (nested lists of 0 and 1), tile (rows, keys) and title; or None.
        histograms: skipped mass: phase, seqlen, target, edges, counts, below.
        kinds: achieved sparsity per kind of calibration prompt: phase, seqlen, target, kind, achieved.
        notes: sentences for the reader, such as targets that could not be reached.
    """

    points: Sequence[Row] = ()
    curves: Sequence[Row] = ()
    head_sparsity: Mapping[Phase, Any] = field(default_factory=dict)
    head_target: float = 0.5
    skip_map: Row | None = None
    histograms: Sequence[Row] = ()
    kinds: Sequence[Row] = ()
    notes: Sequence[str] = ()


def write_contents(folder: Path, report: Report, figures: FigureData) -> None:
    """Write report.json and figures.json.

    Args:
        folder: target folder; must exist.
        report: measured numbers.
        figures: numbers behind the figures.
    """
    for name, part, indent in ((REPORT_FILE, report, 1), (FIGURES_FILE, figures, None)):
        text = json.dumps(dataclasses.asdict(part), indent=indent, allow_nan=False)
        (folder / name).write_text(text + "\n", encoding="utf-8")


def read_contents(folder: Path) -> tuple[Report, FigureData]:
    """Read what write_contents wrote; figures.json may be missing.

    Args:
        folder: a folder with report.json.

    Raises:
        FileNotFoundError: no report.json there.
        ValueError: a file is not JSON or has other keys or values than a report.
    """
    report_path, figures_path = folder / REPORT_FILE, folder / FIGURES_FILE
    try:
        report = Report(**json.loads(report_path.read_text(encoding="utf-8")))
        figures = FigureData()
        if figures_path.exists():
            figures = FigureData(**json.loads(figures_path.read_text(encoding="utf-8")))
    except TypeError as error:
        raise ValueError(f"{folder}: not a report of this version: {error}") from error
    return report, figures
