"""XAttention: a tile matters as much as the sums along its antidiagonals say.

Source: arXiv:2503.16428, "XAttention: Block Sparse Attention with Antidiagonal Scoring", Algorithm 1.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from blasst.selectors.selector import check_inputs, repeat_heads
from blasst.selectors.tiles import KEY, QUERY, PromptTiles, smallest_set, tile_sums


@dataclass(frozen=True)
class XAttention:
    """Squares of stride x stride scores are summed along one antidiagonal, which every row and column meets.

    Softmax over the squares of a row of squares, summed over a tile, is the tile's mass; a query tile keeps
    the fewest tiles that hold the share `dial` of it. The paper's blocks are 128 x 128; here 64 x 128. As in
    the authors' experiments the first tile and the diagonal are always kept and count first.

    Attributes:
        dial: the paper's threshold tau, cumulative mass.
        stride: side of a square; 8 or 16 in the paper. Divides 64.
    """

    dial: float = 0.9
    stride: int = 8

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
        if self.stride < 1 or QUERY % self.stride:
            raise ValueError(f"stride: got {self.stride}, want a divisor of {QUERY}")
        grid = PromptTiles.of(q, k, causal)
        always = (grid.first() | grid.last()) & grid.visible()
        return smallest_set(self._mass(q, k, grid, scale), self.dial, grid.visible(), always)

    def _mass(self, q: Tensor, k: Tensor, grid: PromptTiles, scale: float) -> Tensor:
        """(batch, num_heads, query tiles, key tiles)."""
        side, num_heads = self.stride, q.shape[2]
        rows = _squares(q.float().transpose(1, 2), side).flip(-2)  # row S-1-i of a square meets key i
        keys = _squares(repeat_heads(k, num_heads), side)
        scores = rows.flatten(-2) @ keys.flatten(-2).transpose(-1, -2) * (scale / side)
        first_key = torch.arange(scores.shape[-1], device=q.device) * side
        if grid.causal:
            last_row = torch.arange(scores.shape[-2], device=q.device) * side + side - 1 + grid.offset
            scores = scores.masked_fill(first_key > last_row[:, None], -math.inf)
        weight = scores.softmax(-1).nan_to_num(0.0)  # a row of squares that sees nothing
        of_rows = tile_sums(weight, KEY // side)
        return tile_sums(of_rows.transpose(-1, -2), QUERY // side).transpose(-1, -2)


def _squares(x: Tensor, side: int) -> Tensor:
    """(batch, heads, seqlen, dim) to (batch, heads, squares, side, dim), padded with zeros."""
    return torch.nn.functional.pad(x, (0, 0, 0, -x.shape[2] % side)).unflatten(2, (-1, side))
