"""The files of a report: contents, figures, page."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.image import imread

from blasst.core.types import PREFILL_TILE
from blasst.report.contents import FigureData, Report, read_contents
from blasst.report.write import HTML_FILE, build_figures, redraw_report, write_report

TARGETS = (0.5, 0.7)
LENGTHS = (4096, 8192)


def example_report() -> tuple[Report, FigureData]:
    """Numbers of a plausible run."""
    rng = np.random.default_rng(0)
    report = Report(
        calibration=[
            {"phase": phase, "seqlen": length, "target": target, "achieved": target + 0.01}
            for phase in ("prefill", "decode")
            for length in LENGTHS
            for target in TARGETS
        ],
        quality=[
            {
                "phase": "both",
                "seqlen": 4096,
                "target": target,
                "task": task,
                "n": 4,
                "dense": 0.75,
                "sparse": 0.5,
            }
            for task in ("niah_single_1", "vt")
            for target in TARGETS
        ],
        nll=[
            {"seqlen": length, "target": t, "dense": 2.7, "sparse": 2.71}
            for length in LENGTHS
            for t in TARGETS
        ],
        skipped_mass=[
            {"phase": "prefill", "seqlen": 4096, "target": 0.5, "mean": 0.01, "p99": 0.1, "max": 0.4}
        ],
        environment={"model": "a <small> model", "cpu": "a CPU", "gpu": None, "date": "2026-01-01"},
    )
    thresholds = np.logspace(-4, -0.2, 12)
    points = [
        {
            "phase": phase,
            "seqlen": length,
            "threshold": float(t),
            "sparsity": float(1 / (1 + 9 / (t * length))),
        }
        for phase in ("prefill", "decode")
        for length in LENGTHS
        for t in thresholds
    ]
    curves = [
        {"phase": "prefill", "seqlen": 4096, "threshold": thresholds.tolist(), "sparsity": [0.5] * 12},
    ]
    visited = np.tril(np.ones((16, 16), dtype=int)).repeat(2, axis=0)
    figures = FigureData(
        points=points,
        curves=curves,
        head_sparsity={"prefill": rng.random((6, 4)).tolist(), "decode": rng.random((6, 2)).tolist()},
        skip_map={
            "kept": (visited * (rng.random(visited.shape) < 0.4)).tolist(),
            "visited": visited.tolist(),
            "tile": [PREFILL_TILE.query, PREFILL_TILE.key],
            "title": "Layer 1",
        },
        histograms=[
            {
                "phase": "prefill",
                "seqlen": 4096,
                "target": 0.5,
                "edges": [1e-3, 1e-2, 1e-1, 1.0],
                "counts": [5, 3, 1],
                "below": 7,
            }
        ],
        kinds=[{"phase": "prefill", "seqlen": 4096, "target": 0.5, "kind": "code", "achieved": 0.3}],
        notes=["A target could not be reached & here is why."],
    )
    return report, figures


FIGURES = ("calibration", "target", "quality", "skipped_mass", "head_sparsity", "skip_map")


class _Page(HTMLParser):
    """Collects what a page refers to and whether its tags close."""

    def __init__(self) -> None:
        super().__init__()
        self.sources: list[str] = []
        self.open_tags: list[str] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.sources += [value or "" for name, value in attrs if name in ("src", "href")]
        if tag not in ("meta", "img", "br"):
            self.open_tags.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open_tags.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def test_written_report_reads_back_equal(tmp_path: Path) -> None:
    report, figures = example_report()
    write_report(tmp_path, report, figures)
    again, figures_again = read_contents(tmp_path)
    assert again == report
    assert json.loads(json.dumps(figures_again.points)) == list(figures.points)


def test_report_json_has_exactly_the_promised_keys(tmp_path: Path) -> None:
    write_report(tmp_path, *example_report())
    value = json.loads((tmp_path / "report.json").read_text())
    assert set(value) == {"calibration", "quality", "nll", "skipped_mass", "environment"}
    assert set(value["calibration"][0]) == {"phase", "seqlen", "target", "achieved"}
    assert set(value["quality"][0]) == {"phase", "seqlen", "target", "task", "n", "dense", "sparse"}
    assert set(value["nll"][0]) == {"seqlen", "target", "dense", "sparse"}
    assert set(value["skipped_mass"][0]) == {"phase", "seqlen", "target", "mean", "p99", "max"}


def test_every_figure_is_a_png_with_something_drawn(tmp_path: Path) -> None:
    files = write_report(tmp_path, *example_report())
    assert {path.stem for path in files[:-1]} == set(FIGURES)
    for path in files[:-1]:
        pixels = imread(path)
        assert pixels.shape[0] > 300 and pixels.shape[1] > 600
        assert pixels[..., :3].std() > 0.05, f"{path.name} is nearly blank"


def test_page_is_self_contained_and_well_formed(tmp_path: Path) -> None:
    write_report(tmp_path, *example_report())
    page = _Page()
    text = (tmp_path / HTML_FILE).read_text()
    page.feed(text)
    assert page.open_tags == []
    assert len(page.sources) == len(FIGURES)
    assert all(source.startswith("data:image/png;base64,") for source in page.sources)
    assert not re.search(r"https?://|<script", text)
    assert "a <small> model" in page.text  # escaped in the source, so it is text and no tag
    assert "could not be reached & here" in page.text


def test_labels_of_a_figure_do_not_overlap() -> None:
    for name, figure in build_figures(*example_report()).items():
        figure.draw_without_rendering()
        renderer = figure.canvas.get_renderer()  # type: ignore[attr-defined]
        boxes = []
        for ax in figure.axes:
            texts = [ax.title, ax.xaxis.label, ax.yaxis.label]
            boxes += [(t.get_text(), t.get_window_extent(renderer)) for t in texts if t.get_text()]
            legend = ax.get_legend()
            if legend is not None:
                boxes.append(("legend", legend.get_window_extent(renderer)))
        for index, (first, box) in enumerate(boxes):
            inside = box.x0 >= 0 and box.y0 >= 0 and box.x1 <= figure.bbox.x1 and box.y1 <= figure.bbox.y1
            assert inside, f"{name}: {first!r} leaves the figure"
            for second, other in boxes[index + 1 :]:
                assert not box.overlaps(other), f"{name}: {first!r} overlaps {second!r}"


def test_every_axis_of_every_figure_is_labelled() -> None:
    for name, figure in build_figures(*example_report()).items():
        for ax in figure.axes:
            assert ax.get_ylabel(), f"{name}: an axis without label"


def test_redraw_gives_the_same_page(tmp_path: Path) -> None:
    write_report(tmp_path, *example_report())
    first = (tmp_path / HTML_FILE).read_bytes()
    (tmp_path / HTML_FILE).unlink()
    redraw_report(tmp_path)
    assert (tmp_path / HTML_FILE).read_bytes() == first


def test_report_without_figure_data_still_gives_tables(tmp_path: Path) -> None:
    report, _ = example_report()
    files = write_report(tmp_path, report, FigureData())
    assert {path.name for path in files} == {"target.png", "quality.png", HTML_FILE}


@pytest.mark.parametrize(
    ("name", "row"),
    [
        ("calibration", {"phase": "prefill", "seqlen": 4096, "target": 0.5, "achieved": 50.0}),
        ("calibration", {"phase": "prefill", "seqlen": 4096, "target": 0.5}),
        ("nll", {"seqlen": 4096, "target": 0.5, "dense": 2.0, "sparse": float("nan")}),
        (
            "skipped_mass",
            {"phase": "decode", "seqlen": 4096, "target": 0.5, "mean": 0.1, "p99": 0.2, "max": 1.5},
        ),
    ],
    ids=["percent instead of share", "missing key", "nan", "mass above 1"],
)
def test_row_with_wrong_unit_or_keys_is_refused(name: str, row: dict[str, Any]) -> None:
    parts: dict[str, Any] = {
        "calibration": [],
        "quality": [],
        "nll": [],
        "skipped_mass": [],
        "environment": {},
    }
    with pytest.raises(ValueError, match=name):
        Report(**{**parts, name: [row]})


def test_folder_without_report_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        redraw_report(tmp_path)
    (tmp_path / "report.json").write_text('{"calibration": []}')
    with pytest.raises(ValueError, match="not a report"):
        redraw_report(tmp_path)
