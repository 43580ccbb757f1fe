"""Decode times of one kernel against a KV cache, dense and at several sparsities, beside torch.

Decode reads memory: K of every key and V of the kept tiles. So a row also says at which rate, and how long
the host needs to start a call.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from blasst.bench.check import SampledTiles, visited_tiles_of_head
from blasst.bench.inputs import Inputs
from blasst.bench.record import BenchmarkRow
from blasst.bench.timing import host_microseconds
from blasst.bench.variants import (
    BenchmarkResult,
    OwnKernel,
    checked_variants,
    timed_rows,
    torch_baseline,
)
from blasst.core.types import DECODE_TILE, AttentionOutput
from blasst.functional import blasst_attn_with_kvcache
from blasst.testing import pages_from


class _Cache(NamedTuple):
    """Keys and values as the kernel gets them: (batch, capacity, ...) without a table, else pages."""

    k: Tensor
    v: Tensor
    lengths: Tensor  # int32 (batch,)
    block_table: Tensor | None


_FP8 = torch.float8_e4m3fn


def _cache(inputs: Inputs, page_size: int, dtype: torch.dtype, seed: int) -> _Cache:
    batch, seqlen = inputs.k.shape[:2]
    lengths = torch.full((batch,), seqlen, dtype=torch.int32, device=inputs.k.device)
    if page_size == 0:
        return _Cache(inputs.k.to(dtype), inputs.v.to(dtype), lengths, None)
    k, table = pages_from(inputs.k, page_size, fill=math.nan, seed=seed)
    v, _ = pages_from(inputs.v, page_size, fill=math.nan, seed=seed)
    return _Cache(k.to(dtype), v.to(dtype), lengths, table)


def _bytes_read(inputs: Inputs, sparsity: float, element_size: int) -> float:
    """Bytes of K of all keys and V of the kept ones; the last tile, which may be short, is always kept."""
    batch, seqlen, num_kv_heads, head_dim = inputs.k.shape
    keys = batch * num_kv_heads * seqlen
    visited = batch * num_kv_heads * visited_tiles_of_head(inputs, False, "decode")
    skipped = round(sparsity * visited) * DECODE_TILE.key
    return float((2 * keys - skipped) * head_dim * element_size)


def _with_decode_fields(
    row: BenchmarkRow, call: Callable[[], object], inputs: Inputs, page_size: int, dtype: torch.dtype
) -> BenchmarkRow:
    return dataclasses.replace(
        row,
        us=row.ms * 1e3,
        tbps=_bytes_read(inputs, row.sparsity, dtype.itemsize) / row.ms / 1e9,
        page_size=page_size,
        cache_dtype=None if dtype == inputs.k.dtype else str(dtype).removeprefix("torch."),
        new_tokens=inputs.q.shape[1],
        host_us=host_microseconds(call, inputs.q.device),
    )


def measure_decode(
    inputs: Inputs,
    sparsities: Sequence[float],
    *,
    page_size: int = 0,
    fp8: bool = False,
    impl: str = "auto",
    repeats: int | None = None,
    seed: int = 0,
) -> BenchmarkResult:
    """Check, then time: torch's dense attention, ours dense, at threshold 0 and at each wanted sparsity.

    The L2 cache is flushed before each timed call. Several new tokens see each other causally.

    Args:
        inputs: new tokens as q, the whole cache as k and v.
        sparsities: wanted, in (0, 1); the thresholds are found on the kernel's own counts.
        page_size: slots of a page of the cache that our kernel reads; 0 = contiguous, as torch's always is.
        fp8: round keys and values to float8_e4m3fn first; our kernel then reads a cache of that dtype,
            torch's the same values in the dtype of q.
        impl: kernel, as in `blasst_attn_with_kvcache`; "auto" is resolved once, for the dense call.
        repeats: timed calls of each variant, interleaved; None = about 200 ms of each, 7 to 50 calls.
        seed: of the shuffled pages and of the choice of the head that is compared with the reference.

    Raises:
        WrongResultError: an output, a count or a decision is wrong; nothing is timed then.
        UnsupportedError: the kernel cannot serve one of the calls.
    """
    causal = inputs.q.shape[1] > 1
    if fp8:
        k, v = (x.to(_FP8).to(x.dtype) for x in (inputs.k, inputs.v))
        inputs = dataclasses.replace(inputs, name=f"{inputs.name}, rounded to e4m3", k=k, v=v)
    stored = _FP8 if fp8 else inputs.k.dtype
    cache = _cache(inputs, page_size, stored, seed)

    @functools.cache
    def on_device(threshold: float) -> Tensor:  # a float would cost each timed call a kernel that fills one
        return torch.full_like(cache.lengths, threshold, dtype=torch.float32)

    def attend(*, threshold: float | None, **options: Any) -> AttentionOutput:
        return blasst_attn_with_kvcache(
            inputs.q,
            cache.k,
            cache.v,
            cache_seqlens=cache.lengths,
            block_table=cache.block_table,
            threshold=None if threshold is None else on_device(threshold),
            causal=causal,
            softmax_scale=inputs.softmax_scale,
            **options,
        )

    baseline = torch_baseline(inputs, causal)
    sampled = SampledTiles(inputs, causal, seed, phase="decode")
    own = OwnKernel(attend, impl, sampled, visited_tiles_of_head(inputs, causal, "decode"))
    variants, notes = checked_variants(own, baseline, sampled, sparsities)
    timed = timed_rows("decode", variants, inputs, causal, repeats=repeats, cold_l2=True)
    rows = [
        # torch's baseline reads the contiguous cache
        _with_decode_fields(
            row, variant.call, inputs, *((page_size, stored) if number else (0, inputs.k.dtype))
        )
        for number, (row, variant) in enumerate(zip(timed, variants))
    ]
    return BenchmarkResult(rows, notes)
