"""Write every file of a report: JSON, PNGs and the HTML page."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from blasst.report import plots
from blasst.report.contents import FigureData, Report, read_contents, write_contents
from blasst.report.html import render_html
from blasst.report.style import save_png

HTML_FILE = "report.html"


def build_figures(report: Report, figures: FigureData) -> dict[str, Figure]:
    """Every figure that the numbers allow, by name.

    Args:
        report: measured numbers.
        figures: numbers behind the figures.
    """
    built = {}
    if figures.points:
        built["calibration"] = plots.calibration_figure(figures.points, figures.curves)
    if report.calibration:
        built["target"] = plots.target_figure(report.calibration)
    if report.quality or report.nll:
        built["quality"] = plots.quality_figure(report.quality, report.nll)
    if figures.histograms:
        built["skipped_mass"] = plots.skipped_mass_figure(figures.histograms)
    if figures.head_sparsity:
        arrays = {phase: np.asarray(rows, dtype=np.float64) for phase, rows in figures.head_sparsity.items()}
        built["head_sparsity"] = plots.head_sparsity_figure(arrays, figures.head_target)
    if figures.skip_map is not None:
        skip_map = figures.skip_map
        built["skip_map"] = plots.skip_map_figure(
            np.asarray(skip_map["kept"], dtype=np.bool_),
            np.asarray(skip_map["visited"], dtype=np.bool_),
            (skip_map["tile"][0], skip_map["tile"][1]),
            skip_map["title"],
        )
    return built


def write_pictures(folder: Path, report: Report, figures: FigureData) -> list[Path]:
    """Write the PNGs and report.html.

    Args:
        folder: target folder; must exist.
        report: measured numbers.
        figures: numbers behind the figures.

    Returns:
        The written files, report.html last.
    """
    written = []
    images = {}
    for name, figure in build_figures(report, figures).items():
        path = folder / f"{name}.png"
        save_png(figure, path)
        images[name] = path.read_bytes()
        written.append(path)
    page = folder / HTML_FILE
    page.write_text(render_html(report, figures, images), encoding="utf-8")
    return [*written, page]


def write_report(folder: Path, report: Report, figures: FigureData) -> list[Path]:
    """Write report.json, figures.json, the PNGs and report.html.

    Args:
        folder: target folder; created when missing.
        report: measured numbers.
        figures: numbers behind the figures.

    Returns:
        The picture files, report.html last.
    """
    folder.mkdir(parents=True, exist_ok=True)
    write_contents(folder, report, figures)
    return write_pictures(folder, report, figures)


def redraw_report(folder: Path) -> list[Path]:
    """Draw the pictures and the page again from the JSON files in a folder.

    Args:
        folder: a folder that write_report wrote.

    Returns:
        The written files, report.html last.

    Raises:
        FileNotFoundError: no report.json there.
        ValueError: a file is not a report.
    """
    return write_pictures(folder, *read_contents(folder))
