"""Partial attention results put together by their log-sum-exp."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor


def merge_attention(outs: Sequence[Tensor], lses: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Merge partial attention results over disjoint sets of keys by their log-sum-exp.

    Parts with lse -inf saw nothing: whatever their out holds is ignored.

    Args:
        outs: each (batch, seqlen_q, num_heads, head_dim_v) or packed (total_q, num_heads, head_dim_v).
        lses: each float32 (batch, num_heads, seqlen_q) or packed (num_heads, total_q), natural log.

    Returns:
        (out, lse) in the dtype of the first out and float32; (0, -inf) where every part is empty.

    Raises:
        ValueError: no parts, or parts of different shapes.
    """
    if len(outs) == 0 or len(outs) != len(lses):
        raise ValueError(
            f"outs, lses: got {len(outs)} and {len(lses)} parts, want the same number, at least 1"
        )
    shape = outs[0].shape
    wanted = (shape[1], shape[0]) if len(shape) == 3 else (shape[0], shape[2], shape[1])
    for out, part in zip(outs, lses, strict=True):
        if out.shape != shape or tuple(part.shape) != wanted:
            raise ValueError(
                f"outs, lses: got shapes {tuple(out.shape)} and {tuple(part.shape)}, "
                f"want {tuple(shape)} and {wanted}"
            )
    stacked = torch.stack([part.float() for part in lses])
    lse = stacked.logsumexp(0)
    safe = torch.where(lse == -math.inf, torch.zeros_like(lse), lse)
    total = torch.zeros(shape, dtype=torch.float32, device=outs[0].device)
    for out, part in zip(outs, stacked, strict=True):
        weight = (part - safe).exp().transpose(-1, -2)[..., None]
        empty = (part == -math.inf).transpose(-1, -2)[..., None]
        total = total + torch.where(empty, 0.0, weight * out.float())
    return total.to(outs[0].dtype), lse
