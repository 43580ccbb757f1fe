"""Counts of skipped and visited tiles: summed over prompts first, divided afterwards."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from blasst.core.errors import CalibrationError

Floats = NDArray[np.float64]

#: Points outside this range of sparsity are not fitted: a few tiles decide them.
FITTED_SPARSITY = (0.1, 0.9)
#: Prompts whose lengths differ by less than this factor share one curve.
SAME_LENGTH_FACTOR = 1.2


@dataclass(frozen=True)
class CountPoint:
    """Counts of one prompt, summed over layers and heads.

    Attributes:
        kind: kind of prompt, for example "prose".
        seqlen: the kv_len by which the kernel will divide.
        threshold: rising linear thresholds in (0, 1], float64 (T,).
        skipped: tiles skipped at each threshold, int64 (T,).
        visited: visited tiles.

    Raises:
        CalibrationError: shapes or values that no count can have.
    """

    kind: str
    seqlen: int
    threshold: Floats
    skipped: NDArray[np.int64]
    visited: int

    def __post_init__(self) -> None:
        where = f"count of a {self.kind!r} prompt of length {self.seqlen}"
        if self.threshold.ndim != 1 or self.threshold.shape != self.skipped.shape or not self.threshold.size:
            raise CalibrationError(
                f"{where}: threshold and skipped must both be (T,), got {self.threshold.shape} and "
                f"{self.skipped.shape}"
            )
        if self.seqlen < 1 or self.visited < 1:
            raise CalibrationError(
                f"{where}: seqlen and visited must be at least 1, got {self.visited} visited"
            )
        inside = (self.threshold > 0.0) & (self.threshold <= 1.0)
        if not inside.all() or (np.diff(self.threshold) <= 0.0).any():
            raise CalibrationError(f"{where}: thresholds must rise and lie in (0, 1]")
        counts = self.skipped
        if counts[0] < 0 or counts[-1] > self.visited or (np.diff(counts) < 0).any():
            raise CalibrationError(f"{where}: skipped must not fall with the threshold nor exceed visited")


@dataclass(frozen=True)
class PooledCurve:
    """Counts of several prompts, summed.

    Attributes:
        seqlen: geometric mean of their lengths, weighted by visited tiles.
        samples: prompts in the sum.
        visited: visited tiles.
        threshold: rising linear thresholds, float64 (T,).
        skipped: tiles skipped at each threshold, int64 (T,).
    """

    seqlen: int
    samples: int
    visited: int
    threshold: Floats
    skipped: NDArray[np.int64]

    @property
    def sparsity(self) -> Floats:
        """Skipped over visited, float64 (T,)."""
        return self.skipped / self.visited

    def sparsity_at(self, threshold_log: float) -> float:
        """Measured sparsity at a threshold, interpolated in its logarithm."""
        return float(np.interp(threshold_log, np.log(self.threshold), self.sparsity))

    def fitted(self) -> NDArray[np.bool_]:
        """Which points lie in the fitted range, bool (T,)."""
        return (self.sparsity >= FITTED_SPARSITY[0]) & (self.sparsity <= FITTED_SPARSITY[1])


def count_points(rows: Iterable[Mapping[str, Any]], phase: str) -> list[CountPoint]:
    """Points of the lines in which prompts' counts are kept; a prompt without tiles has none.

    Args:
        rows: with phase, kind, kv_len, thresholds, skipped and visited.
        phase: whose rows are taken.
    """
    return [
        CountPoint(
            row["kind"],
            row["kv_len"],
            np.array(row["thresholds"], dtype=np.float64),
            np.array(row["skipped"], dtype=np.int64),
            row["visited"],
        )
        for row in rows
        if row["phase"] == phase and row["visited"]
    ]


def achieved_sparsity(points: Sequence[CountPoint], threshold: float) -> float:
    """Sparsity of counted prompts at one threshold: counts summed, interpolated in ln(threshold).

    Args:
        points: prompts counted at the same thresholds.
        threshold: linear, in (0, 1]; outside the counted thresholds the nearest one.

    Raises:
        CalibrationError: no points, or different thresholds.
    """
    return pool(points).sparsity_at(math.log(threshold) if threshold > 0.0 else -math.inf)


def pool(points: Sequence[CountPoint]) -> PooledCurve:
    """Sum the counts of prompts of about one length.

    Raises:
        CalibrationError: no points, or different thresholds.
    """
    if not points:
        raise CalibrationError("need at least 1 counted prompt, got 0")
    threshold = points[0].threshold
    for point in points:
        if not np.array_equal(point.threshold, threshold):
            raise CalibrationError("all prompts must be counted at the same thresholds")
    visited = sum(point.visited for point in points)
    log_length = sum(point.visited * math.log(point.seqlen) for point in points) / visited
    skipped = np.stack([point.skipped for point in points]).sum(axis=0)
    return PooledCurve(round(math.exp(log_length)), len(points), visited, threshold, skipped)


def group_by_length(points: Sequence[CountPoint]) -> list[list[CountPoint]]:
    """Prompts of about the same length, shortest first; within a group lengths differ by less than 1.2x."""
    groups: list[list[CountPoint]] = []
    for point in sorted(points, key=lambda item: item.seqlen):
        if groups and point.seqlen < groups[-1][0].seqlen * SAME_LENGTH_FACTOR:
            groups[-1].append(point)
        else:
            groups.append([point])
    return groups
