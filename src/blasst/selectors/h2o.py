"""H2O: the keys with most accumulated attention, and the most recent ones.

Source: arXiv:2306.14048, "H2O: Heavy-Hitter Oracle for Efficient Generative Inference of Large Language
Models".
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from blasst.selectors.prompt_votes import prompt_votes
from blasst.selectors.selector import check_inputs, check_past
from blasst.selectors.tiles import DECODE_KEY, largest, share_of, tile_sums, tiles_from


@dataclass(frozen=True)
class H2O:
    """Half of the budget for the most recent tiles, half for the heaviest of the others.

    A key's weight is the attention that all queries of the prompt gave it. The paper evicts one token at each
    step and goes on counting among those that stay; here the choice is made once, after a dense prompt, and
    whole tiles of 64 keys stay by the sum of their keys. Keys that came after the prompt are recent, and stay
    even if they exceed their half. The query heads of a KV head count together.

    Attributes:
        dial: share of all tiles.
    """

    dial: float = 0.25

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
        past = check_past(past_q, q, k, "H2O")
        prompt = past.shape[1]
        votes = prompt_votes(past, k, prompt, scale)
        score = tile_sums(torch.nn.functional.pad(votes, (0, k.shape[1] - prompt)), DECODE_KEY)
        tiles = score.shape[-1]
        count = share_of(self.dial, tiles)
        tile = torch.arange(tiles, device=k.device)
        recent = (tile >= tiles - (count + 1) // 2) | tiles_from(prompt, k)
        return largest(score, count, torch.ones_like(recent), recent)[:, :, None]
