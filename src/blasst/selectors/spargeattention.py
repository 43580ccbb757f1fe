"""SpargeAttention's first stage: products of tile means, trusted where a tile resembles itself.

Source: arXiv:2502.18137, "SpargeAttention: Accurate and Training-free Sparse Attention Accelerating Any Model
Inference". Its second stage is a rule inside the softmax, as blasst's is, and is not here.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from blasst.selectors.selector import check_inputs, repeat_heads
from blasst.selectors.tiles import KEY, QUERY, PromptTiles, smallest_set, tile_means


@dataclass(frozen=True)
class SpargeAttention:
    """A mean speaks for a tile only if its vectors point the same way.

    The self-similarity of a tile is the mean cosine of its pairs. Key tiles below theta are always kept and
    leave the softmax; rows of query tiles below theta keep everything. The others keep the fewest tiles that
    hold the share `dial` of the softmax of products of means. The paper's blocks are 128 x 64; here 64 x 128.
    The diagonal is always kept.

    Attributes:
        dial: the paper's tau, cumulative mass.
        theta: least self-similarity at which a mean is trusted, -1 to 1; the paper tunes it by layer.
    """

    dial: float = 0.9
    theta: float = 0.3

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
        rows, keys = q.float().transpose(1, 2), repeat_heads(k, q.shape[2])
        sure_row = self_similarity(rows, QUERY) >= self.theta  # (batch, num_heads, query tiles)
        sure_key = self_similarity(keys, KEY) >= self.theta
        scores = tile_means(rows, QUERY) @ tile_means(keys, KEY).transpose(-1, -2) * scale
        judged = sure_key[..., None, :] & grid.visible()
        weight = scores.masked_fill(~judged, -math.inf).softmax(-1).nan_to_num(0.0)
        always = (grid.last() | ~(sure_row[..., None] & sure_key[..., None, :])) & grid.visible()
        chosen = smallest_set(weight, self.dial, judged, always & judged)
        return chosen | always


def self_similarity(x: Tensor, size: int) -> Tensor:
    """Mean cosine over all pairs of vectors of a tile: the squared length of the mean of unit vectors.

    Args:
        x: (batch, heads, seqlen, dim).
        size: vectors of a tile.

    Returns:
        (batch, heads, tiles).
    """
    return tile_means(torch.nn.functional.normalize(x, dim=-1), size).square().sum(-1)
