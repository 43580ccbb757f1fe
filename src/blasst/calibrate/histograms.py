"""Margins of visited tiles in bins of candidate thresholds, summed on the device they come from."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from blasst.calibrate.counts import Floats
from blasst.core.types import Phase


@dataclass(eq=False)
class Histograms:
    """Histograms per phase, sequence and layer.

    Bin i holds the tiles whose margin is at least i of the sorted log thresholds, so the tiles skipped at
    threshold j are those in bins 0 to j.

    Attributes:
        log_thresholds: rising ln of the candidates, float64 (T,).
        sums: int64 (heads that vote, T + 1) by (phase, sequence, layer).
        lengths: kv_len of each call, by layer, by (phase, sequence).
    """

    log_thresholds: Floats
    sums: dict[tuple[Phase, int, int], Tensor] = field(default_factory=dict)
    lengths: dict[tuple[Phase, int], dict[int, list[int]]] = field(default_factory=dict)
    _edges: dict[torch.device, Tensor] = field(default_factory=dict)

    def edges(self, device: torch.device) -> Tensor:
        """The sorted log thresholds, float32, on a device."""
        if device not in self._edges:
            self._edges[device] = torch.tensor(self.log_thresholds, dtype=torch.float32, device=device)
        return self._edges[device]

    def add(self, phase: Phase, index: int, layer: int, kv_len: int, margins: Tensor) -> None:
        """Add one call of one sequence.

        Args:
            phase: phase of the call.
            index: number of the sequence.
            layer: number of the layer.
            kv_len: keys by which the kernel divides.
            margins: float32 (heads that vote, visited tiles); NaN is kept at any threshold.
        """
        self.lengths.setdefault((phase, index), {}).setdefault(layer, []).append(kv_len)
        edges = self.edges(margins.device)
        bins = torch.bucketize(margins, edges, right=True)  # NaN goes last: kept
        known = self.sums.get((phase, index, layer))
        if known is None:
            known = torch.zeros(margins.shape[0], len(edges) + 1, dtype=torch.int64, device=margins.device)
            self.sums[phase, index, layer] = known
        known.scatter_add_(1, bins, torch.ones_like(bins))

    def take(
        self, phase: Phase, index: int, layers: int
    ) -> tuple[int, NDArray[np.int64], NDArray[np.int64]] | None:
        """(kv_len, skipped, visited) of one sequence since the last `clear`; None = it never ran."""
        known = self.lengths.get((phase, index))
        if not known:
            return None
        lengths = max(known.values(), key=max)  # layers with a sliding window may hold fewer keys
        parts = {layer: self.sums[phase, index, layer].cpu().numpy() for layer in known}
        heads = max(part.shape[0] for part in parts.values())
        table = np.zeros((layers, heads, len(self.log_thresholds) + 1), dtype=np.int64)
        for layer, part in parts.items():
            table[layer, : part.shape[0]] = part
        skipped = table[..., :-1].cumsum(axis=-1).transpose(2, 0, 1)
        # A prompt is labelled with its last call (all its keys), decode steps with their mean.
        kv_len = lengths[-1] if phase == "prefill" else round(sum(lengths) / len(lengths))
        return kv_len, skipped, table.sum(axis=-1)

    def clear(self) -> None:
        """Start the next prompts."""
        self.sums.clear()
        self.lengths.clear()
