"""MInference's vertical-slash pattern: the columns and diagonals that the last rows look at.

Source: arXiv:2407.02490, "MInference 1.0: Accelerating Pre-filling for Long-Context LLMs via Dynamic Sparse
Attention", Algorithm 2.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from blasst.selectors.selector import check_inputs
from blasst.selectors.tiles import PromptTiles, largest, share_of
from blasst.selectors.vertical_slash import BAND, line_weights, tiles_on_lines

#: The diagonals next to the main one that the authors' code always keeps.
_LOCAL = 100


@dataclass(frozen=True)
class MInference:
    """The heaviest columns and the heaviest diagonals, by the attention of the last rows.

    The paper finds two counts for each head offline, on samples, and has two other patterns; here every head
    is vertical-slash and takes the same share `dial` of its columns and of its diagonals. Columns are key
    tiles of 128 keys, diagonals are bands of 64 offsets (the paper: single ones). The first tile and the
    diagonals of the last 100 offsets are always kept.

    Attributes:
        dial: share of the columns and of the diagonals.
        rows: last rows that speak for all; 64 in the paper.
    """

    dial: float = 0.25
    rows: int = 64

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
        tile = torch.arange(lines.columns.shape[-1], device=q.device)
        columns = largest(lines.columns, share_of(self.dial, len(tile)), tile >= 0, tile == 0)
        band = torch.arange(lines.bands.shape[-1], device=q.device) - lines.zero
        real = lines.real_bands(causal)
        local = real & (band >= 0) & (band * BAND < _LOCAL)
        bands = largest(lines.bands, share_of(self.dial, int(real.sum())), real, local)
        return tiles_on_lines(columns, bands, lines.zero, grid) | grid.last()
