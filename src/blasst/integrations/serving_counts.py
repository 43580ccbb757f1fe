"""Skipped and visited tiles of a serving process: summed on the device, logged, and shown as metrics.

A worker process sums without a synchronisation. A thread of it reads the sums once a second and, when they
moved, writes them into a folder that the process with the metrics page made; a collector there reads them.
"""

from __future__ import annotations

import atexit
import json
import logging
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from blasst.core.types import PHASES, Phase, SkipCounts

#: Seconds between two looks of the thread; a look is one copy of four numbers.
_LOOK_INTERVAL = 1.0

#: Metrics blasst_tiles_<name>_total, with their help.
_METRICS = (("skipped", "Key tiles that were skipped."), ("visited", "Key tiles looked at."))


class Tiles(NamedTuple):
    """Tiles of one phase since the start."""

    skipped: int
    visited: int

    @property
    def sparsity(self) -> float:
        """Skipped over visited; 0 when nothing was visited."""
        return self.skipped / max(self.visited, 1)


Totals = dict[Phase, Tiles]


def describe(now: Totals, before: Totals) -> str:
    """One line: sparsity since the last one, and the tiles behind it.

    Args:
        now: tiles since the start.
        before: tiles at the last line.
    """
    parts = []
    for phase in PHASES:
        new = Tiles(now[phase].skipped - before[phase].skipped, now[phase].visited - before[phase].visited)
        if new.visited:
            parts.append(f"{phase} {new.sparsity:.1%} of {new.visited} tiles skipped")
        else:
            parts.append(f"{phase} none")
    return ", ".join(parts)


@dataclass(eq=False)
class SkipMeter:
    """Sums of a worker process.

    Attributes:
        log: where a line goes, or None.
        log_interval: seconds between two lines; 0 = none.
        folder: where the sums are written for the metrics page, or None.
        publish: called with the tiles since the start whenever they moved, for an engine with counters of
            its own, or None.
    """

    log: Callable[[str], None] | None = None
    log_interval: float = 0.0
    folder: Path | None = None
    publish: Callable[[Totals], None] | None = None
    _sums: dict[Phase, Tensor] = field(default_factory=dict, repr=False)
    _logged: Totals = field(default_factory=lambda: dict.fromkeys(PHASES, Tiles(0, 0)), repr=False)
    _written: Totals | None = field(default=None, repr=False)
    _stop: threading.Event = field(default_factory=threading.Event, repr=False)
    _looking: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def add(self, phase: Phase, counts: SkipCounts) -> None:
        """Add the tiles of one call; no synchronisation."""
        new = torch.stack((counts.skipped.sum(), counts.visited.sum()))
        if phase in self._sums:
            self._sums[phase].add_(new)
        else:
            self._sums[phase] = new

    def totals(self) -> Totals:
        """Tiles since the start; waits for the device."""
        empty = Tiles(0, 0)
        sums = {phase: self._sums.get(phase) for phase in PHASES}
        return {phase: empty if s is None else Tiles(*s.tolist()) for phase, s in sums.items()}

    def start(self) -> None:
        """Begin to log and to write, until `stop` or the end of the process."""
        threading.Thread(target=self._run, name="blasst-counts", daemon=True).start()
        atexit.register(self.stop)

    def stop(self) -> None:
        """Log and write what is left, and end; a second call does nothing."""
        if not self._stop.is_set():
            self._stop.set()
            self._look(log=True)

    def _run(self) -> None:
        last = time.monotonic()
        while not self._stop.wait(_LOOK_INTERVAL):
            due = time.monotonic() - last >= self.log_interval
            self._look(log=due)
            if due:
                last = time.monotonic()

    def _look(self, log: bool) -> None:
        with self._looking:  # the thread and `stop` may meet here
            totals = self.totals()
            if totals != self._written and self.folder is not None and self.folder.is_dir():
                write_totals(self.folder, totals)
            if totals != self._written and self.publish is not None:
                self.publish(totals)
            self._written = totals
            if log and self.log is not None and self.log_interval > 0 and totals != self._logged:
                self.log(describe(totals, self._logged))
                self._logged = totals


def engine_counters() -> Callable[[Totals], None] | None:
    """Counters of this process for an engine whose metrics page gathers those of all its processes.

    Returns:
        What `SkipMeter.publish` takes, or None without prometheus_client; the counters show 0 at once.
    """
    try:
        from prometheus_client import Counter
    except ImportError:
        return None
    counters = {name: Counter(f"blasst_tiles_{name}", text, ["phase"]) for name, text in _METRICS}
    shown = dict.fromkeys(PHASES, Tiles(0, 0))

    def publish(totals: Totals) -> None:
        for phase, tiles in totals.items():
            for name, counter in counters.items():
                counter.labels(phase).inc(getattr(tiles, name) - getattr(shown[phase], name))
        shown.update(totals)

    publish(dict(shown))
    return publish


def write_totals(folder: Path, totals: Totals) -> None:
    """Write the sums of this process; a reader never sees half a file.

    Args:
        folder: of the process with the metrics page.
        totals: tiles since the start.
    """
    path = folder / f"{os.getpid()}.json"
    handle, partial = tempfile.mkstemp(dir=folder, suffix=".partial")
    with os.fdopen(handle, "w", encoding="utf-8") as file:
        json.dump(totals, file)
    os.replace(partial, path)


def read_totals(folder: Path) -> Totals:
    """Sum of all worker processes that wrote into a folder.

    Args:
        folder: of the process with the metrics page.
    """
    sums = {phase: [0, 0] for phase in PHASES}
    for path in folder.glob("*.json"):
        for phase, tiles in json.loads(path.read_text(encoding="utf-8")).items():
            sums[phase][0] += tiles[0]
            sums[phase][1] += tiles[1]
    return {phase: Tiles(*pair) for phase, pair in sums.items()}


class TileCollector:
    """Prometheus collector of blasst_tiles_skipped_total and blasst_tiles_visited_total, by phase."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def describe(self) -> Iterable[Any]:
        """The metrics without values."""
        return self._families({phase: Tiles(0, 0) for phase in PHASES})

    def collect(self) -> Iterator[Any]:
        """The metrics as they stand."""
        yield from self._families(read_totals(self.folder))

    @staticmethod
    def _families(totals: Totals) -> Iterator[Any]:
        from prometheus_client.core import CounterMetricFamily

        for name, text in _METRICS:
            family = CounterMetricFamily(f"blasst_tiles_{name}", text, labels=["phase"])
            for phase, tiles in totals.items():
                family.add_metric([phase], getattr(tiles, name))
            yield family


#: Folders of this process; they vanish with it.
_folders: list[tempfile.TemporaryDirectory[str]] = []
_collectors: list[TileCollector] = []


def open_metrics() -> Path | None:
    """Make the folder that workers write to and register its collector; None without prometheus_client.

    A later call starts again from zero with a new folder.
    """
    try:
        from prometheus_client import REGISTRY
    except ImportError:
        return None
    folder = tempfile.TemporaryDirectory(prefix="blasst-counts-")
    _folders.append(folder)
    while _collectors:
        REGISTRY.unregister(_collectors.pop())
    collector = TileCollector(Path(folder.name))
    REGISTRY.register(collector)
    _collectors.append(collector)
    return Path(folder.name)


def line_logger(name: str) -> Callable[[str], None]:
    """A function that writes a line to a logger.

    Args:
        name: of the logger; an engine shows those below its own name.
    """
    logger = logging.getLogger(name)
    return lambda line: logger.info("blasst: %s", line)
