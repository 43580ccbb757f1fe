"""Writing new keys and values into a KV cache, contiguous or paged."""

from __future__ import annotations

import torch
from torch import Tensor

from blasst.core.types import FP8


def check_new_keys(
    k_cache: Tensor, v_cache: Tensor, k: object, v: object, batch: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """New keys and values that fit a cache, in its dtype or in `dtype`, that of q; nothing is written."""
    if k is None or v is None:
        raise ValueError(f"{'k' if k is None else 'v'}: got None, want k and v together")
    new = None
    for name, tensor, cache in (("k", k, k_cache), ("v", v, v_cache)):
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{name}: got {type(tensor).__name__}, want a tensor")
        new = tensor.shape[1] if new is None and tensor.dim() == 4 else new
        wanted = (batch, "new" if new is None else new, *cache.shape[2:])
        if tuple(tensor.shape) != wanted:
            raise ValueError(f"{name}: got shape {tuple(tensor.shape)}, want {wanted}")
        if tensor.dtype not in (cache.dtype, dtype) or tensor.device != cache.device:
            dtypes = " or ".join(dict.fromkeys((str(cache.dtype), str(dtype))))
            raise ValueError(
                f"{name}: got {tensor.dtype} on {tensor.device}, want {dtypes} on {cache.device}"
            )
    return k, v  # type: ignore[return-value]


def quantize(x: Tensor, descale: Tensor | None) -> Tensor:
    """x / descale as float8_e4m3fn: clamped to its range, rounded to nearest even; NaN stays.

    Args:
        x: (batch, slots, num_kv_heads, dim).
        descale: float32 (batch, num_kv_heads), or None = 1.
    """
    x = x.float() if descale is None else x.float() / descale[:, None, :, None]
    largest = torch.finfo(FP8).max  # older versions of torch make NaN of what lies beyond
    return x.clamp(-largest, largest).to(FP8)


def append_to_cache(
    k_cache: Tensor | None,
    v_cache: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: Tensor,
    block_table: Tensor | None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
) -> None:
    """Write new keys and values behind the cached ones, in place; all checks were done before.

    Args:
        k_cache: (batch, capacity, num_kv_heads, head_dim), or pages with a block_table; None = k is written
            by whoever stores the keys.
        v_cache: like k_cache, with head_dim_v.
        k: (batch, new, num_kv_heads, head_dim).
        v: (batch, new, num_kv_heads, head_dim_v).
        lengths: int32 (batch,) slots in use before.
        block_table: int32 (batch, max_pages), or None.
        k_descale: float32 (batch, num_kv_heads) scale of an fp8 cache, or None = 1; k in another dtype than
            the cache is divided by it and rounded.
        v_descale: the same for v.
    """
    slot = lengths[:, None].long() + torch.arange(k.shape[1], device=lengths.device)  # (batch, new)
    if block_table is None:
        place = (torch.arange(lengths.shape[0], device=lengths.device)[:, None].expand_as(slot), slot)
    else:
        page_size = v_cache.shape[1]
        place = (block_table.long().gather(1, slot // page_size), slot % page_size)
    for cache, new, descale in ((k_cache, k, k_descale), (v_cache, v, v_descale)):
        if cache is None:
            continue
        if cache.dtype == FP8:  # torch writes no fp8 at an index on a CPU
            stored = new if new.dtype == FP8 else quantize(new, descale)
            cache.view(torch.uint8)[place] = stored.view(torch.uint8)
        else:
            cache[place] = new
