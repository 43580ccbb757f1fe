"""Quest: the tiles of the cache whose best key could score highest, by the range of each channel.

Source: arXiv:2406.10774, "Quest: Query-Aware Sparsity for Efficient Long-Context LLM Inference", Algorithm 1.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from blasst.selectors.selector import check_inputs
from blasst.selectors.tiles import DECODE_KEY, largest, new_tiles, share_of


@dataclass(frozen=True)
class Quest:
    """The tiles with the highest upper bounds of a score.

    The smallest and the largest value of each channel over a tile bound every product with its keys. The
    paper's pages hold 16 keys; here tiles of 64, whose ranges are wider. The paper has one query head for
    each KV head; here a tile counts as much as for the query head and new token that bound it highest. The
    paper leaves the first two layers dense, which is the caller's choice.

    Attributes:
        dial: share of the tiles.
    """

    dial: float = 0.25

    def select(
        self, q: Tensor, k: Tensor, *, past_q: Tensor | None = None, softmax_scale: float | None = None
    ) -> Tensor:
        """As `DecodeSelector.select`.

        Args:
            q: (batch, new tokens, num_heads, head_dim).
            k: (batch, seqlen_k, num_kv_heads, head_dim).
            past_q: not used.
            softmax_scale: default head_dim ** -0.5.
        """
        scale = check_inputs(q, k, softmax_scale, self.dial)
        bound = upper_bounds(rows_of_kv_heads(q, k) * scale, k).amax(2)
        always = new_tiles(q.shape[1], k)
        count = share_of(self.dial, bound.shape[-1])
        return largest(bound, count, torch.ones_like(always), always)[:, :, None]


def rows_of_kv_heads(q: Tensor, k: Tensor) -> Tensor:
    """Query heads and new tokens of each KV head, float32 (batch, num_kv_heads, rows, head_dim).

    Args:
        q: (batch, new tokens, num_heads, head_dim).
        k: (batch, seqlen_k, num_kv_heads, head_dim).
    """
    return q.float().unflatten(2, (k.shape[2], -1)).permute(0, 2, 1, 3, 4).flatten(2, 3)


def channel_ranges(k: Tensor) -> tuple[Tensor, Tensor]:
    """Smallest and largest value of each channel of each tile, (batch, num_kv_heads, tiles, head_dim).

    Args:
        k: (batch, seqlen_k, num_kv_heads, head_dim).
    """
    keys = k.float().permute(0, 2, 3, 1)
    spare = (0, -k.shape[1] % DECODE_KEY)
    low = torch.nn.functional.pad(keys, spare, value=torch.inf).unflatten(-1, (-1, DECODE_KEY)).amin(-1)
    high = torch.nn.functional.pad(keys, spare, value=-torch.inf).unflatten(-1, (-1, DECODE_KEY)).amax(-1)
    return low.transpose(2, 3), high.transpose(2, 3)


def upper_bounds(rows: Tensor, k: Tensor) -> Tensor:
    """No key of a tile scores higher with a row, but for rounding.

    Args:
        rows: (batch, num_kv_heads, rows, head_dim).
        k: (batch, seqlen_k, num_kv_heads, head_dim).

    Returns:
        (batch, num_kv_heads, rows, tiles).
    """
    low, high = channel_ranges(k)
    return rows.clamp(min=0) @ high.transpose(2, 3) + rows.clamp(max=0) @ low.transpose(2, 3)
