"""What a sparse session counts and measures."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from blasst.core.types import PHASES, Phase, SkipCounts

#: Most values that `MassSamples` keeps per phase.
MAX_SAMPLES = 1 << 20

#: Most values taken from one call.
SAMPLES_PER_CALL = 1024


@dataclass(frozen=True, eq=False)
class LayerStats:
    """Tiles of one layer and phase since `enable` or `reset_stats`.

    Attributes:
        layer: module name.
        phase: "prefill" or "decode".
        skipped: int64 on the CPU, (num_heads,) in prefill, (num_kv_heads,) in decode; summed over sequences.
        visited: the same shape.
        screened: the same shape, skipped tiles whose scores were not needed; 0 without a `ScreenedCache`.
    """

    layer: str
    phase: Phase
    skipped: Tensor
    visited: Tensor
    screened: Tensor

    @property
    def sparsity(self) -> float:
        """Skipped over visited tiles of the layer; 0 when nothing was visited."""
        return int(self.skipped.sum()) / max(int(self.visited.sum()), 1)


@dataclass(eq=False)
class Counters:
    """Sums of tile counts per layer and phase, on the device, without a synchronisation."""

    sums: dict[tuple[int, Phase], SkipCounts] = field(default_factory=dict)

    def add(self, layer: int, phase: Phase, counts: SkipCounts) -> None:
        """Add the counts of one call."""
        new = SkipCounts(*(torch.zeros_like(counts.visited[0]) if x is None else x.sum(0) for x in counts))
        known = self.sums.get((layer, phase))
        if known is None:
            self.sums[layer, phase] = new
        else:
            for total, x in zip(known, new, strict=True):
                if total is not None and x is not None:
                    total.add_(x)

    def records(self, names: tuple[str, ...]) -> list[LayerStats]:
        """One record per layer and phase, in model order, prefill first."""
        ordered = sorted(self.sums.items(), key=lambda item: (PHASES.index(item[0][1]), item[0][0]))
        return [
            LayerStats(names[i], phase, *(x.cpu() for x in counts if x is not None))
            for (i, phase), counts in ordered
        ]


@dataclass(frozen=True, eq=False)
class LayerMass:
    """Skipped softmax mass of the rows of one layer and phase since `enable` or `reset_stats`.

    Attributes:
        layer: module name.
        phase: "prefill" or "decode".
        rows: number of rows, over heads and sequences.
        mean: over rows, 0..1.
        max: over rows, 0..1.
        heads: mean over the rows of each query head, 0..1; empty where calls do not tell heads apart.
    """

    layer: str
    phase: Phase
    rows: int
    mean: float
    max: float
    heads: tuple[float, ...] = ()


class MassTotals(NamedTuple):
    """Sums over rows, on the device: mass float64 (), number of rows int64 (), largest mass ()."""

    total: Tensor
    rows: Tensor
    largest: Tensor

    def plus(self, other: MassTotals) -> MassTotals:
        """Totals of the rows of both."""
        largest = torch.maximum(self.largest, other.largest.to(self.largest.device))
        return MassTotals(
            self.total + other.total.to(self.total.device),
            self.rows + other.rows.to(self.rows.device),
            largest,
        )

    def mean(self) -> float:
        """Mean mass of a row; 0 without rows."""
        return float(self.total) / max(int(self.rows), 1)


@dataclass(eq=False)
class MassSamples:
    """Skipped softmax mass of rows: exact mean and maximum per layer, and a bounded sample of all.

    Everything stays on the device until it is read. The sample takes evenly spaced rows of a call; when it is
    full, every second chunk is dropped and from then on every second call is sampled, and so on.
    """

    layers: dict[int, MassTotals] = field(default_factory=dict)
    heads: dict[int, Tensor] = field(default_factory=dict)  # (2, num_heads): sum of masses, rows
    chunks: list[Tensor] = field(default_factory=list)
    every: int = 1
    calls: int = 0

    def add(self, layer: int, mass: Tensor) -> None:
        """Add the mass of each row of a call of a layer; NaN marks rows that see nothing.

        Args:
            layer: number of the layer.
            mass: (batch, num_heads, rows), (num_heads, rows) or (rows of any heads,).
        """
        flat = mass.flatten()
        valid = ~flat.isnan()
        clean = flat.nan_to_num(nan=0.0)
        totals = MassTotals(clean.sum(dtype=torch.float64), valid.sum(), clean.amax())
        known = self.layers.get(layer)
        self.layers[layer] = totals if known is None else known.plus(totals)
        if mass.dim() > 1:
            by_head = torch.stack([clean.view_as(mass).double(), valid.view_as(mass).double()]).sum(-1)
            by_head = by_head.flatten(1, -2).sum(1) if by_head.dim() > 2 else by_head
            self.heads[layer] = by_head + self.heads[layer] if layer in self.heads else by_head
        if self.calls % self.every == 0:
            step = max(1, flat.numel() // SAMPLES_PER_CALL)
            self.chunks.append(flat[self.calls % step :: step][:SAMPLES_PER_CALL].clone())
            if len(self.chunks) * SAMPLES_PER_CALL > MAX_SAMPLES:
                self.chunks, self.every = self.chunks[::2], self.every * 2
        self.calls += 1

    def head_means(self, layer: int) -> tuple[float, ...]:
        """Mean mass of the rows of each head of a layer; empty where no call told heads apart."""
        if layer not in self.heads:
            return ()
        total, rows = self.heads[layer].cpu()
        return tuple((total / rows.clamp(min=1)).tolist())

    def samples(self) -> Tensor:
        """float32 (samples,) on the CPU, values in [0, 1]."""
        if not self.chunks:
            return torch.zeros(0)
        joined = torch.cat([chunk.cpu() for chunk in self.chunks])
        return joined[~joined.isnan()]

    def summary(self) -> dict[str, float]:
        """Mean and max over all rows, p99 from the sample, and the number of rows."""
        sample = self.samples()
        if not self.layers or not len(sample):
            return {"mean": 0.0, "p99": 0.0, "max": 0.0, "rows": 0}
        totals = functools.reduce(MassTotals.plus, self.layers.values())
        return {
            "mean": totals.mean(),
            "p99": float(torch.quantile(sample[: 1 << 23].double(), 0.99)),
            "max": float(totals.largest),
            "rows": int(totals.rows),
        }
