"""What the queries of a prompt gave to its keys: the softmax weights by which methods evict."""

from __future__ import annotations

import math

import torch
from torch import Tensor

#: Rows whose weights exist together.
_ROWS = 256


def prompt_votes(past_q: Tensor, k: Tensor, rows: int, scale: float) -> Tensor:
    """Softmax weight that the last rows of a prompt give each key, mean over a KV head's query heads.

    Args:
        past_q: (batch, prompt, num_heads, head_dim); row i sees the keys up to i.
        k: (batch, seqlen_k, num_kv_heads, head_dim), of which the first `prompt` count.
        rows: how many last rows vote; all if there are fewer.
        scale: softmax scale.

    Returns:
        (batch, num_kv_heads, prompt), summed over rows.
    """
    batch, prompt = past_q.shape[:2]
    num_kv_heads = k.shape[2]
    keys = k[:, :prompt].float().permute(0, 2, 3, 1)[:, :, None]  # (batch, num_kv_heads, 1, dim, prompt)
    votes = keys.new_zeros(batch, num_kv_heads, prompt)
    key = torch.arange(prompt, device=k.device)
    for first in range(max(prompt - rows, 0), prompt, _ROWS):
        part = past_q[:, first : first + _ROWS].float()
        end = first + part.shape[1]
        part = part.unflatten(2, (num_kv_heads, -1)).permute(0, 2, 3, 1, 4)
        scores = part @ keys[..., :end] * scale  # (batch, num_kv_heads, group, rows, keys)
        row = torch.arange(first, end, device=k.device)
        scores = scores.masked_fill(key[:end] > row[:, None], -math.inf)
        votes[..., :end] += scores.softmax(-1).sum(-2).mean(2)
    return votes


def pooled(votes: Tensor, kernel_size: int) -> Tensor:
    """Largest vote among neighbouring keys, so that whole passages stay.

    Args:
        votes: (batch, num_kv_heads, keys).
        kernel_size: odd number of keys.
    """
    return torch.nn.functional.max_pool1d(votes, kernel_size, stride=1, padding=kernel_size // 2)
