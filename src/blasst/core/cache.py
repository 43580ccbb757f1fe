"""Writing new keys and values into a KV cache, contiguous or paged."""

from __future__ import annotations

import torch
from torch import Tensor


def append_to_cache(
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    lengths: Tensor,
    block_table: Tensor | None,
) -> None:
    """Write new keys and values behind the cached ones, in place."""
    if k is None or v is None:
        raise ValueError(f"{'k' if k is None else 'v'}: got None, want k and v together")
    for name, new, cache in (("k", k, k_cache), ("v", v, v_cache)):
        wanted = (lengths.shape[0], k.shape[1], *cache.shape[2:])
        if tuple(new.shape) != wanted:
            raise ValueError(f"{name}: got shape {tuple(new.shape)}, want {wanted}")
        if new.dtype != cache.dtype or new.device != cache.device:
            raise ValueError(f"{name}: got {new.dtype} on {new.device}, want {cache.dtype} on {cache.device}")
    slot = lengths[:, None].long() + torch.arange(k.shape[1], device=lengths.device)  # (batch, new)
    if block_table is None:
        place = (torch.arange(lengths.shape[0], device=lengths.device)[:, None].expand_as(slot), slot)
    else:
        page_size = k_cache.shape[1]
        place = (block_table.long().gather(1, slot // page_size), slot % page_size)
    k_cache[place] = k
    v_cache[place] = v
