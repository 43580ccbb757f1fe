"""Tile counts of serving processes: sums, lines of the log, files, Prometheus."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from blasst.core.types import SkipCounts
from blasst.integrations.serving_counts import (
    SkipMeter,
    TileCollector,
    Tiles,
    describe,
    read_totals,
    write_totals,
)


def counts(skipped: int, visited: int) -> SkipCounts:
    return SkipCounts(torch.tensor([[skipped, 0]]), torch.tensor([[visited, 2]]))


def test_meter_sums_by_phase() -> None:
    meter = SkipMeter()
    meter.add("prefill", counts(3, 10))
    meter.add("prefill", counts(1, 4))
    assert meter.totals() == {"prefill": Tiles(4, 18), "decode": Tiles(0, 0)}


def test_lines_of_the_log_add_up_and_stop_says_the_rest(tmp_path: Path) -> None:
    lines: list[str] = []
    meter = SkipMeter(lines.append, 0.5, tmp_path)
    meter.start()
    meter.add("decode", counts(3, 8))
    deadline = time.monotonic() + 20
    while not lines and time.monotonic() < deadline:
        time.sleep(0.05)
    meter.add("decode", counts(1, 38))
    meter.stop()
    meter.stop()
    assert lines == [
        "prefill none, decode 30.0% of 10 tiles skipped",
        "prefill none, decode 2.5% of 40 tiles skipped",
    ]
    assert read_totals(tmp_path) == {"prefill": Tiles(0, 0), "decode": Tiles(4, 50)}


def test_an_idle_meter_is_silent(tmp_path: Path) -> None:
    lines: list[str] = []
    meter = SkipMeter(lines.append, 0.1, tmp_path)
    meter.start()
    meter.stop()
    assert lines == []


def test_files_of_several_workers_are_summed(tmp_path: Path) -> None:
    write_totals(tmp_path, {"prefill": Tiles(1, 2), "decode": Tiles(3, 4)})
    (tmp_path / "other.json").write_text(json.dumps({"prefill": [10, 20], "decode": [30, 40]}))
    (tmp_path / "half.partial").write_text("{")
    assert read_totals(tmp_path) == {"prefill": Tiles(11, 22), "decode": Tiles(33, 44)}
    assert describe(read_totals(tmp_path), {"prefill": Tiles(1, 2), "decode": Tiles(33, 44)}) == (
        "prefill 50.0% of 20 tiles skipped, decode none"
    )


def test_prometheus_shows_both_counters_by_phase(tmp_path: Path) -> None:
    client = pytest.importorskip("prometheus_client", reason="prometheus_client is not installed")
    write_totals(tmp_path, {"prefill": Tiles(1, 2), "decode": Tiles(3, 4)})
    registry = client.CollectorRegistry()
    registry.register(TileCollector(tmp_path))
    text = client.generate_latest(registry).decode()
    assert 'blasst_tiles_skipped_total{phase="prefill"} 1.0' in text
    assert 'blasst_tiles_visited_total{phase="decode"} 4.0' in text


#: A worker of an engine whose metrics page gathers the counters of all its processes.
WORKER = """
import torch
from blasst.core.types import SkipCounts
from blasst.integrations.serving_counts import SkipMeter, engine_counters

meter = SkipMeter(publish=engine_counters())
for skipped in (3, 0, 4):
    meter.add("decode", SkipCounts(torch.tensor([[skipped]]), torch.tensor([[10]])))
    meter._look(log=False)
meter._look(log=False)
"""


def test_counters_of_several_processes_add_up_and_show_0_at_once(tmp_path: Path) -> None:
    client = pytest.importorskip("prometheus_client", reason="prometheus_client is not installed")
    from prometheus_client.multiprocess import MultiProcessCollector

    environment = {**os.environ, "PROMETHEUS_MULTIPROC_DIR": str(tmp_path)}
    for _ in range(2):
        subprocess.run([sys.executable, "-c", WORKER], env=environment, check=True, timeout=120)
    registry = client.CollectorRegistry()
    MultiProcessCollector(registry, path=str(tmp_path))
    text = client.generate_latest(registry).decode()
    assert 'blasst_tiles_skipped_total{phase="decode"} 14.0' in text
    assert 'blasst_tiles_visited_total{phase="decode"} 60.0' in text
    assert 'blasst_tiles_visited_total{phase="prefill"} 0.0' in text
