"""Generated q, k, v with heavy-tailed attention, as trained models have it; normal inputs barely skip."""

from __future__ import annotations

import torch
from torch import Tensor

#: Keys that share one level of importance.
_BLOCK = 64
#: Share of key blocks that draw most of the weight, and how far below them the others lie, in nats.
_HOT_SHARE = 0.1
_COLD_NATS = (2.0, 14.0)


def structured_inputs(
    batch: int,
    seqlen_q: int,
    seqlen_k: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    *,
    dtype: torch.dtype,
    device: torch.device,
    seed: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v with a few hot blocks of keys, the first among them, and the rest between 2 and 14 nats lower.

    One direction is common to all queries; the length of a key along it sets the block's level. The rest is
    normal noise.

    Args:
        batch: sequences.
        seqlen_q: query rows.
        seqlen_k: keys.
        num_heads: query heads.
        num_kv_heads: key and value heads.
        head_dim: size of a vector.
        dtype: of the results.
        device: of the results.
        seed: the same seed gives the same values on every device.

    Returns:
        q (batch, seqlen_q, num_heads, head_dim), k and v (batch, seqlen_k, num_kv_heads, head_dim).
    """
    random = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=random)

    q = normal(batch, seqlen_q, num_heads, head_dim)
    k = normal(batch, seqlen_k, num_kv_heads, head_dim)
    v = normal(batch, seqlen_k, num_kv_heads, head_dim)
    blocks = -(-seqlen_k // _BLOCK)
    low, high = _COLD_NATS
    level = -(low + (high - low) * torch.rand(batch, num_kv_heads, blocks, generator=random))
    hot = torch.rand(batch, num_kv_heads, blocks, generator=random) < _HOT_SHARE
    hot[..., 0] = True
    level = torch.where(hot, 0.0, level).repeat_interleave(_BLOCK, -1)[..., :seqlen_k]
    # q's first channel is sqrt(head_dim), so the score gains exactly k's first channel.
    q[..., 0] = head_dim**0.5
    k[..., 0] = level.transpose(1, 2)
    return q.to(device, dtype), k.to(device, dtype), v.to(device, dtype)
