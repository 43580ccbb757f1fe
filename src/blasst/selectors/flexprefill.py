"""FlexPrefill: each head picks its pattern by how well tile means predict the attention of its last rows.

Source: arXiv:2502.20766, "FlexPrefill: A Context-Aware Sparse Attention Mechanism for Efficient Long-Sequence
Inference", Algorithms 1 to 4.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from blasst.selectors.selector import check_inputs, repeat_heads
from blasst.selectors.tiles import KEY, QUERY, PromptTiles, smallest_set, tile_means
from blasst.selectors.vertical_slash import Lines, line_weights, tiles_on_lines


@dataclass(frozen=True)
class FlexPrefill:
    """Query-aware tiles where tile means predict well, columns and diagonals elsewhere.

    The attention of the last rows, summed over key tiles, is compared with the softmax of products of means.
    If the square root of their Jensen-Shannon divergence is below tau, the head takes the fewest tiles of the
    whole map of products of means that hold the share `dial` of it; else the fewest columns and, apart, the
    fewest diagonals that do so. The paper's blocks are 128 x 128 and its columns and diagonals single ones;
    here tiles of 64 x 128, columns of 128 keys and bands of 64 offsets. The first tile and the diagonal are
    always kept. The paper's least budget of 1024 keys per row is left out: it would keep half of a prompt of
    4K.

    Attributes:
        dial: the paper's gamma, cumulative mass.
        tau: largest distance at which means are trusted; 0.1 in the paper.
        rows: last rows that speak for all; 128 in the paper.
    """

    dial: float = 0.9
    tau: float = 0.1
    rows: int = 128

    def select(
        self, q: Tensor, k: Tensor, *, causal: bool = True, softmax_scale: float | None = None
    ) -> Tensor:
        """As `PrefillSelector.select`.

        Args:
            q: (batch, seqlen_q, num_heads, head_dim).
            k: (batch, seqlen_k, num_kv_heads, head_dim).
            causal: bottom-right aligned.
            softmax_scale: default head_dim ** -0.5.
        """
        scale = check_inputs(q, k, softmax_scale, self.dial)
        grid = PromptTiles.of(q, k, causal)
        lines = line_weights(q, k, self.rows, grid, scale)
        trusted = self.means_distance(q, k, lines, scale) < self.tau  # (batch, num_heads)
        always = grid.first() | grid.last()
        on_lines = self._on_lines(lines, grid) | always
        return torch.where(trusted[..., None, None], self._by_means(q, k, grid, scale, always), on_lines)

    def means_distance(self, q: Tensor, k: Tensor, lines: Lines, scale: float) -> Tensor:
        """Square root of the Jensen-Shannon divergence, 0 to sqrt(ln 2), (batch, num_heads).

        Args:
            q: (batch, seqlen_q, num_heads, head_dim).
            k: (batch, seqlen_k, num_kv_heads, head_dim).
            lines: of the last rows.
            scale: softmax scale.
        """
        mean_row = q[:, -lines.weight.shape[2] :].float().mean(1)  # (batch, num_heads, head_dim)
        means = tile_means(repeat_heads(k, q.shape[2]), KEY)
        guess = ((means @ mean_row[..., None])[..., 0] * scale).softmax(-1)
        truth = lines.columns / lines.columns.sum(-1, keepdim=True).clamp(min=1e-30)
        middle = (guess + truth) / 2
        return ((_divergence(guess, middle) + _divergence(truth, middle)) / 2).clamp(min=0).sqrt()

    def _by_means(self, q: Tensor, k: Tensor, grid: PromptTiles, scale: float, always: Tensor) -> Tensor:
        rows = tile_means(q.float().transpose(1, 2), QUERY)
        keys = tile_means(repeat_heads(k, q.shape[2]), KEY)
        scores = (rows @ keys.transpose(-1, -2) * scale).masked_fill(~grid.visible(), -math.inf)
        weight = scores.softmax(-1).nan_to_num(0.0)
        flat = smallest_set(weight.flatten(2), self.dial, grid.visible().flatten(), always.flatten())
        return flat.unflatten(-1, grid.shape)

    def _on_lines(self, lines: Lines, grid: PromptTiles) -> Tensor:
        every = torch.ones_like(lines.columns, dtype=torch.bool)
        columns = smallest_set(lines.columns, self.dial, every, ~every)
        real = lines.real_bands(grid.causal)
        bands = smallest_set(lines.bands, self.dial, real, torch.zeros_like(real))
        return tiles_on_lines(columns, bands, lines.zero, grid)


def _divergence(p: Tensor, q: Tensor) -> Tensor:
    """Kullback-Leibler divergence over the last dimension, in nats; 0 ln 0 = 0."""
    return torch.where(p > 0, p * (p.clamp(min=1e-30) / q.clamp(min=1e-30)).log(), 0.0).sum(-1)
