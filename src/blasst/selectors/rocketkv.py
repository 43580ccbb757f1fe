"""RocketKV: evict by the prompt's votes, then choose at each step among what is left.

Source: arXiv:2502.14051, "RocketKV: Accelerating Long-Context LLM Inference via Two-Stage KV Cache
Compression".
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from blasst.selectors.quest import rows_of_kv_heads, upper_bounds
from blasst.selectors.selector import check_inputs, check_past
from blasst.selectors.snapkv import SnapKV
from blasst.selectors.tiles import largest, new_tiles, share_of


@dataclass(frozen=True)
class RocketKV:
    """Eviction by votes, then bounds among the survivors; each stage takes the same part of the compression.

    The first keeps the share sqrt(dial) of the tiles as SnapKV does, with a wide pooling window, for the rest
    of the sequence. The second keeps the share `dial` of all tiles, among those, by the range of each channel
    over a tile as Quest does, but only in the channels where the KV head's queries are largest. The paper
    evicts single keys in the first stage, adapts the pooling to the prompt and has smaller pages in the
    second; here both choose tiles of 64 keys.

    Attributes:
        dial: share of the tiles that a step reads.
        window: last queries of the prompt that vote in the first stage.
        kernel_size: keys over which their votes are pooled; odd.
        channels: share of head_dim that the second stage looks at.
    """

    dial: float = 0.25
    window: int = 32
    kernel_size: int = 63
    channels: float = 0.5

    def select(
        self, q: Tensor, k: Tensor, *, past_q: Tensor | None = None, softmax_scale: float | None = None
    ) -> Tensor:
        """As `DecodeSelector.select`.

        Args:
            q: (batch, new tokens, num_heads, head_dim).
            k: (batch, seqlen_k, num_kv_heads, head_dim).
            past_q: (batch, prompt, num_heads, head_dim), needed.
            softmax_scale: default head_dim ** -0.5.
        """
        scale = check_inputs(q, k, softmax_scale, self.dial)
        past = check_past(past_q, q, k, "RocketKV")
        if not 0 < self.channels <= 1:
            raise ValueError(f"channels: got {self.channels}, want a number in (0, 1]")
        first = SnapKV(math.sqrt(self.dial), self.window, self.kernel_size).choose(past, k, scale)
        rows = rows_of_kv_heads(q, k) * scale
        bound = self._narrow_bounds(rows, k).amax(2)
        always = new_tiles(q.shape[1], k)
        return largest(bound, share_of(self.dial, bound.shape[-1]), first, always & first)[:, :, None]

    def _narrow_bounds(self, rows: Tensor, k: Tensor) -> Tensor:
        """Quest's bounds in the strongest channels of the rows, (batch, num_kv_heads, rows, tiles)."""
        size = rows.shape[-1]
        strength = rows.abs().sum(2)  # (batch, num_kv_heads, head_dim)
        every = torch.ones_like(strength, dtype=torch.bool)
        used = largest(strength, max(1, share_of(self.channels, size)), every, ~every)
        return upper_bounds(rows * used[:, :, None], k)
