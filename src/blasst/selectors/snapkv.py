"""SnapKV: the last queries of the prompt vote once which of its keys stay.

Source: arXiv:2404.14469, "SnapKV: LLM Knows What You are Looking for Before Generation".
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from blasst.selectors.prompt_votes import pooled, prompt_votes
from blasst.selectors.selector import check_inputs, check_past
from blasst.selectors.tiles import DECODE_KEY, largest, share_of, tile_sums, tiles_from


@dataclass(frozen=True)
class SnapKV:
    """The tiles with most pooled votes, and everything from the observation window on.

    The paper evicts single tokens; here a tile of 64 keys has the sum of its pooled votes, and whole tiles
    stay. The paper votes per query head; here the query heads of a KV head vote together.

    Attributes:
        dial: share of all tiles, the window and new tokens included.
        window: last queries of the prompt that vote, whose keys stay.
        kernel_size: keys over which votes are pooled by their maximum; odd.
    """

    dial: float = 0.25
    window: int = 32
    kernel_size: int = 7

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
        past = check_past(past_q, q, k, "SnapKV")
        return self.choose(past, k, scale)[:, :, None]

    def choose(self, past_q: Tensor, k: Tensor, scale: float) -> Tensor:
        """Tiles that stay, bool (batch, num_kv_heads, tiles).

        Args:
            past_q: (batch, prompt, num_heads, head_dim).
            k: (batch, seqlen_k, num_kv_heads, head_dim).
            scale: softmax scale.
        """
        if self.window < 1 or self.kernel_size < 1 or self.kernel_size % 2 == 0:
            raise ValueError(
                f"window, kernel_size: got {self.window} and {self.kernel_size}, "
                "want at least 1, and an odd kernel_size"
            )
        prompt = past_q.shape[1]
        votes = pooled(prompt_votes(past_q, k, self.window, scale), self.kernel_size)
        votes = torch.nn.functional.pad(votes, (0, k.shape[1] - prompt))
        score = tile_sums(votes, DECODE_KEY)
        always = tiles_from(max(prompt - self.window, 0), k)
        count = share_of(self.dial, score.shape[-1])
        return largest(score, count, torch.ones_like(always), always)
