"""The public functions: check once, build the canonical problem, run it through one torch op."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from blasst.core import checks
from blasst.core.block_mask import check_block_mask
from blasst.core.cache import append_to_cache, check_new_keys
from blasst.core.int8_screen import with_screen
from blasst.core.key_codes import KeyCodes
from blasst.core.problem import AttentionProblem
from blasst.core.progressive_keys import ProgressiveKeys, with_progressive_keys
from blasst.core.threshold import threshold_from_scale_factor
from blasst.core.types import MAX_DECODE_TOKENS, AttentionOutput, Phase
from blasst.kernels import op, repeats, select
from blasst.kernels.names import IMPLS


@dataclass(frozen=True)
class _Options:
    """The keywords that all public functions share."""

    threshold: float | Tensor | None
    threshold_scale_factor: float | Tensor | None
    causal: bool
    softmax_scale: float | None
    window_size: tuple[int, int]
    softcap: float
    sinks: Tensor | None
    max_skipped_mass: float | None
    dense_tail: int
    block_mask: Tensor | None
    return_lse: bool
    return_counts: bool
    return_mass_bound: bool
    return_kept_tiles: bool
    impl: str


def blasst_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    threshold: float | Tensor | None = None,
    threshold_scale_factor: float | Tensor | None = None,
    causal: bool = False,
    softmax_scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    max_skipped_mass: float | None = None,
    dense_tail: int = 0,
    block_mask: Tensor | None = None,
    screen: str | None = None,
    return_lse: bool = False,
    return_counts: bool = False,
    return_mass_bound: bool = False,
    return_kept_tiles: bool = False,
    impl: str = "auto",
) -> AttentionOutput:
    """Attention that skips key tiles whose every softmax weight would lie below a threshold.

    The prefill rule: 64 query rows of a head skip a tile of 128 keys when each row's best score in it lies
    more than ln(1 / threshold) below the row's running maximum. Skipped keys leave the softmax, so each has
    true weight < threshold.

    Args:
        q: (batch, seqlen_q, num_heads, head_dim), float16, bfloat16 or float32.
        k: (batch, seqlen_k, num_kv_heads, head_dim); num_kv_heads divides num_heads.
        v: (batch, seqlen_k, num_kv_heads, head_dim_v).
        threshold: linear ratio in [0, 1], float or float32 tensor (batch,) on the device, read at run time
            (there above 1 acts as 1, NaN and negative as 0). None = dense; 0 = the skipping kernel that
            skips nothing.
        threshold_scale_factor: instead of threshold: the threshold of a sequence is
            min(1, threshold_scale_factor / its number of keys); float or float32 tensor (batch,).
        causal: bottom-right aligned: row i sees keys <= i + seqlen_k - seqlen_q. Default False.
        softmax_scale: factor on q . k. Default head_dim ** -0.5.
        window_size: (left, right) keys around the aligned position; -1 = unlimited.
        softcap: scores become softcap * tanh(score / softcap); 0 = none.
        sinks: (num_heads,) natural-log logits that join each row's softmax denominator.
        max_skipped_mass: error budget eps in (0, 1): the skipped softmax weight of every row stays
            <= eps / (1 + eps). Costs sparsity. None = no budget.
        dense_tail: query tiles that hold one of the last so many rows of a sequence skip nothing: cheap, and
            the end of a prompt is what the first new token is read from. Default 0.
        block_mask: bool (batch, num_heads, query tiles, key tiles) in tiles of 64 x 128, on the device of q:
            a tile that is False is not attended and not counted, and skipping happens among the others. Each
            row that sees keys must keep a tile; checked on a CPU, on a GPU such a row has out 0 and lse -inf
            (or its sink). None = every tile.
        screen: "int8": decide from 8-bit copies of q and k, before any score is known, which tiles go,
            against the row's final maximum and on the safe side of every rounding: a rule of its own with
            the same guarantees (docs/method.md). Goes with a threshold, without
            max_skipped_mass and return_mass_bound. None (default) = the rule above.
        return_lse: fill AttentionOutput.lse.
        return_counts: fill AttentionOutput.counts.
        return_mass_bound: fill AttentionOutput.mass_bound.
        return_kept_tiles: fill AttentionOutput.kept_tiles.
        impl: "auto", "triton", "eager" or "reference". "auto" never runs dense when skipping was asked.

    Returns:
        AttentionOutput; parts that were not asked for are None. A row without visible keys has out 0 and
        lse -inf.

    Raises:
        TypeError: a wrong type, or a dtype of an argument that is fixed.
        ValueError: a wrong value, shape or device, or dtypes of q, k, v that differ.
        UnsupportedError: no kernel can serve the call, or screen stands beside what it does not go with.
        NotImplementedError: gradients are wanted; there is no backward pass.

    Source: BLASST (arXiv:2512.12087) Algorithm 1; docs/method.md.
    """
    options = _Options(
        threshold,
        threshold_scale_factor,
        causal,
        softmax_scale,
        window_size,
        softcap,
        sinks,
        max_skipped_mass,
        dense_tail,
        block_mask,
        return_lse,
        return_counts,
        return_mass_bound,
        return_kept_tiles,
        impl,
    )
    checks.check_qkv(q, k, v, 4, 4, ("q", "k", "v"))
    checks.check_batch(k, q, ("k", "q"))
    problem = _problem(q, k, v, options, "prefill", kv_len=k.shape[1], max_seqlens=(q.shape[1], k.shape[1]))
    return op.call(with_screen(problem, screen), impl, return_lse)


def blasst_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    seqused_k: Tensor | None = None,
    block_table: Tensor | None = None,
    threshold: float | Tensor | None = None,
    threshold_scale_factor: float | Tensor | None = None,
    causal: bool = False,
    softmax_scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    max_skipped_mass: float | None = None,
    dense_tail: int = 0,
    block_mask: Tensor | None = None,
    screen: str | None = None,
    return_lse: bool = False,
    return_counts: bool = False,
    return_mass_bound: bool = False,
    return_kept_tiles: bool = False,
    impl: str = "auto",
) -> AttentionOutput:
    """`blasst_attn_func` over sequences of different lengths packed behind each other; the prefill rule.

    With block_table, k and v are a paged cache and cu_seqlens_k gives the lengths: chunked prefill.

    Args:
        q: (total_q, num_heads, head_dim).
        k: (total_k, num_kv_heads, head_dim), or pages (num_pages, page_size, num_kv_heads, head_dim).
        v: like k, with head_dim_v.
        cu_seqlens_q: int32 (batch + 1,), where each sequence's rows begin; starts at 0.
        cu_seqlens_k: int32 (batch + 1,), the same for keys.
        max_seqlen_q: at least the longest sequence's rows.
        max_seqlen_k: at least the longest sequence's keys.
        seqused_k: int32 (batch,), keys in use of each sequence; default all.
        block_table: int32 (batch, max_pages), page numbers; entries past need are not read.
        threshold: as in `blasst_attn_func`, (batch,) for a tensor.
        threshold_scale_factor: as in `blasst_attn_func`; divides by each sequence's own length.
        causal: bottom-right aligned per sequence.
        softmax_scale: default head_dim ** -0.5.
        window_size: (left, right), -1 = unlimited.
        softcap: 0 = none.
        sinks: (num_heads,).
        max_skipped_mass: error budget in (0, 1).
        dense_tail: as in `blasst_attn_func`; of each sequence.
        block_mask: as in `blasst_attn_func`, sized by max_seqlen_q and max_seqlen_k; tiles beyond a sequence
            are not looked at.
        screen: as in `blasst_attn_func`.
        return_lse: fill AttentionOutput.lse, (num_heads, total_q).
        return_counts: fill AttentionOutput.counts.
        return_mass_bound: fill AttentionOutput.mass_bound.
        return_kept_tiles: fill AttentionOutput.kept_tiles, sized by max_seqlen_q and max_seqlen_k.
        impl: as in `blasst_attn_func`.

    Returns:
        AttentionOutput with out (total_q, num_heads, head_dim_v).

    Raises:
        TypeError: a wrong type, or a dtype of an argument that is fixed.
        ValueError: a wrong value, shape or device, or dtypes of q, k, v that differ.
        UnsupportedError: no kernel can serve the call, or screen stands beside what it does not go with.
        NotImplementedError: gradients are wanted.

    Source: BLASST (arXiv:2512.12087); argument names of FlashAttention.
    """
    options = _Options(
        threshold,
        threshold_scale_factor,
        causal,
        softmax_scale,
        window_size,
        softcap,
        sinks,
        max_skipped_mass,
        dense_tail,
        block_mask,
        return_lse,
        return_counts,
        return_mass_bound,
        return_kept_tiles,
        impl,
    )
    checks.check_qkv(q, k, v, 3, 3 if block_table is None else 4, ("q", "k", "v"))
    checks.check_index("cu_seqlens_q", cu_seqlens_q, (None,), q.device)
    batch = cu_seqlens_q.shape[0] - 1
    if batch < 0:
        raise ValueError("cu_seqlens_q: got no entries, want batch + 1")
    checks.check_index("cu_seqlens_k", cu_seqlens_k, (batch + 1,), q.device)
    for name, value in (("max_seqlen_q", max_seqlen_q), ("max_seqlen_k", max_seqlen_k)):
        if isinstance(value, bool) or not isinstance(value, int | torch.SymInt):
            raise TypeError(f"{name}: got {value!r}, want an integer >= 0")
        if value < 0:
            raise ValueError(f"{name}: got {value}, want an integer >= 0")
    checks.check_cu_seqlens("cu_seqlens_q", cu_seqlens_q, q.shape[0], max_seqlen_q, "max_seqlen_q")
    total_k = k.shape[0] if block_table is None else None
    checks.check_cu_seqlens("cu_seqlens_k", cu_seqlens_k, total_k, max_seqlen_k, "max_seqlen_k")
    kv_len = cu_seqlens_k[1:] - cu_seqlens_k[:-1]
    if seqused_k is not None:
        kv_len = checks.check_index("seqused_k", seqused_k, (batch,), q.device)
        checks.check_lengths("seqused_k", seqused_k, 0, max_seqlen_k)
        if block_table is None:
            checks.check_used_keys(seqused_k, cu_seqlens_k)
    if block_table is not None:
        checks.check_index("block_table", block_table, (batch, None), q.device)
        name = "cu_seqlens_k" if seqused_k is None else "seqused_k"
        checks.check_lengths(name, kv_len, 0, block_table.shape[1] * k.shape[1])
        checks.check_pages(block_table, kv_len, None, k)
    problem = _problem(
        q,
        k,
        v,
        options,
        "prefill",
        kv_len=kv_len,
        max_seqlens=(max_seqlen_q, max_seqlen_k),
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
        seqused_k=seqused_k,
        block_table=block_table,
    )
    return op.call(with_screen(problem, screen), impl, return_lse)


def blasst_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor | ProgressiveKeys,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    *,
    cache_seqlens: Tensor | int | None = None,
    block_table: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    k_descale: float | Tensor | None = None,
    v_descale: float | Tensor | None = None,
    threshold: float | Tensor | None = None,
    threshold_scale_factor: float | Tensor | None = None,
    causal: bool = False,
    softmax_scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    max_skipped_mass: float | None = None,
    block_mask: Tensor | None = None,
    screen: KeyCodes | str | None = None,
    return_lse: bool = False,
    return_counts: bool = False,
    return_mass_bound: bool = False,
    return_kept_tiles: bool = False,
    impl: str = "auto",
) -> AttentionOutput:
    """Attention of new tokens against a KV cache: 1 to 8 tokens by the decode rule, more by the prefill rule.

    The decode rule: the first and the last two visible tiles of 64 keys are anchors and always kept; any
    other tile is skipped when every query head of the KV head and every new token has its best score more
    than ln(1 / threshold) below its maximum over the anchors. V of a skipped tile is not loaded. There is no
    dense tail here, also not for more than 8 tokens: `blasst_attn_varlen_func` has one, for pages too.

    Args:
        q: (batch, seqlen_q, num_heads, head_dim), float16, bfloat16 or float32.
        k_cache: (batch, capacity, num_kv_heads, head_dim), or pages (num_pages, page_size, num_kv_heads,
            head_dim) with block_table. Dtype of q, or float8_e4m3fn together with v_cache. Or
            `ProgressiveKeys` of that shape (pages of multiples of 64 slots): attention is that of the keys as
            stored, and tiles are screened as with screen, in calls that go with it.
        v_cache: like k_cache, with head_dim_v; may share storage with k_cache (MLA).
        k: (batch, new, num_kv_heads, head_dim) keys to write into k_cache at cache_seqlens, in place. Dtype
            of k_cache; beside a float8_e4m3fn cache that of q as well, then divided by k_descale, clamped to
            the range of the cache (+-448) and rounded to nearest even. NaN stays NaN.
        v: (batch, new, num_kv_heads, head_dim_v) values to write into v_cache, likewise.
        cache_seqlens: keys already in the cache, without k; int or int32 (batch,). Default: the capacity of
            a cache without pages.
        block_table: int32 (batch, max_pages), page numbers; entries past need are not read.
        cache_leftpad: int32 (batch,), first valid slot of each sequence; slots before it do not exist.
        k_descale: scale of a float8_e4m3fn k_cache: the keys are k_cache.float() * k_descale, and scores and
            skips are theirs. Positive float, or float32 tensor (), (num_kv_heads,) or (batch, num_kv_heads)
            on the device of q, where values are not read back. Default 1.
        v_descale: the same for v_cache.
        threshold: as in `blasst_attn_func`.
        threshold_scale_factor: as in `blasst_attn_func`; divides by cache and new keys of each sequence.
        causal: bottom-right aligned; matters for more than one new token. Default False.
        softmax_scale: default head_dim ** -0.5.
        window_size: (left, right), -1 = unlimited.
        softcap: 0 = none.
        sinks: (num_heads,).
        max_skipped_mass: error budget in (0, 1).
        block_mask: as in `blasst_attn_func`; under the decode rule (batch, num_kv_heads, 1, key tiles) in
            tiles of 64 keys that cover the capacity. The anchors are then the first and the last two tiles
            that it leaves.
        screen: codes of the keys in a k_cache that is a tensor, from which many tiles are known to be skipped
            before they are scored; every result is the same bit for bit. Under the decode rule, with a
            threshold, without max_skipped_mass, return_mass_bound, cache_leftpad and a float8_e4m3fn cache.
            Codes of tiles that k completes are made by this call; see `KeyCodes` for keys written otherwise.
            With more than 8 new tokens "int8", as in `blasst_attn_func`. None = none.
        return_lse: fill AttentionOutput.lse.
        return_counts: fill AttentionOutput.counts; (batch, num_kv_heads) under the decode rule. With screen
            or progressive keys also counts.screened, where the call was screened.
        return_mass_bound: fill AttentionOutput.mass_bound.
        return_kept_tiles: fill AttentionOutput.kept_tiles.
        impl: as in `blasst_attn_func`.

    Returns:
        AttentionOutput with out (batch, seqlen_q, num_heads, head_dim_v).

    Raises:
        TypeError: a wrong type, or a dtype of an argument that is fixed.
        ValueError: a wrong value, shape or device, dtypes of q, k, v that do not fit each other, or a scale
            beside a cache that is not float8_e4m3fn.
        UnsupportedError: no kernel can serve the call, the cache has another 8-bit dtype, or screen stands
            beside what it does not go with.
        NotImplementedError: gradients are wanted.

    Source: BLASST (arXiv:2512.12087) section 3.4; the anchor rule is docs/method.md.
    """
    key, number = None, threshold if type(threshold) is float and 0 <= threshold <= 1 else None
    given = None if number is not None else threshold
    plain = k is None and v is None and threshold_scale_factor is None and block_mask is None
    store = k_cache if isinstance(k_cache, ProgressiveKeys) else None
    if isinstance(k_cache, ProgressiveKeys):
        k_cache = k_cache.stand_in()  # until the new keys are in
    plain = plain and screen is None and store is None
    if plain and cache_seqlens is not None:
        settings = (causal, softmax_scale, window_size, softcap, max_skipped_mass, return_lse, return_counts)
        key = repeats.call_key(
            (*settings, return_mass_bound, return_kept_tiles, impl, number is None),
            *(q, k_cache, v_cache, given, sinks, k_descale, v_descale),
            *(cache_seqlens, cache_leftpad, block_table),
        )
    tensors = (
        q,
        k_cache,
        v_cache,
        given,
        sinks,
        k_descale,
        v_descale,
        cache_seqlens,
        cache_leftpad,
        block_table,
    )
    plan = None if key is None else repeats.find(key)
    if plan is not None:
        at = given if number is None else repeats.constant(number, q.shape[0], q.device)
        return repeats.run(plan, *tensors[:3], at, *tensors[4:])
    options = _Options(
        threshold,
        threshold_scale_factor,
        causal,
        softmax_scale,
        window_size,
        softcap,
        sinks,
        max_skipped_mass,
        0,
        block_mask,
        return_lse,
        return_counts,
        return_mass_bound,
        return_kept_tiles,
        impl,
    )
    checks.check_qkv(q, k_cache, v_cache, 4, 4, ("q", "k_cache", "v_cache"), fp8=True)
    batch, num_kv_heads = q.shape[0], k_cache.shape[2]
    if block_table is not None:
        checks.check_index("block_table", block_table, (batch, None), q.device)
        capacity = block_table.shape[1] * k_cache.shape[1]
    else:
        capacity = k_cache.shape[1]
        checks.check_batch(k_cache, q, ("k_cache", "q"))
    before = _cache_lengths(cache_seqlens, block_table, k, batch, capacity, q.device)
    if k is not None or v is not None:
        k, v = check_new_keys(k_cache, v_cache, k, v, batch, q.dtype)
        checks.check_no_grad(k, v)
    lengths = before if k is None else before + k.shape[1]
    kv_len = lengths
    if cache_leftpad is not None:
        checks.check_index("cache_leftpad", cache_leftpad, (batch,), q.device)
        checks.check_lengths("cache_leftpad", cache_leftpad, 0, capacity)
        kv_len = lengths - cache_leftpad
        checks.check_lengths("cache_seqlens minus cache_leftpad", kv_len, 0, capacity)
    if block_table is not None:
        checks.check_pages(block_table, lengths, cache_leftpad, k_cache)
    k_scale = checks.check_descale("k_descale", k_descale, batch, num_kv_heads, k_cache)
    v_scale = checks.check_descale("v_descale", v_descale, batch, num_kv_heads, v_cache)
    phase: Phase = "decode" if q.shape[1] <= MAX_DECODE_TOKENS else "prefill"
    problem = _problem(
        q,
        k_cache,
        v_cache,
        options,
        phase,
        kv_len=kv_len,
        max_seqlens=(q.shape[1], capacity),
        seqused_k=lengths,
        leftpad_k=cache_leftpad,
        block_table=block_table,
        k_descale=k_scale,
        v_descale=v_scale,
    )
    if store is None:
        problem = with_screen(problem, screen)
    else:
        problem = replace(problem, progressive=True)
        store.check_call(screen, block_table)
    if k is not None and v is not None:
        if not torch.compiler.is_compiling():
            select.choose(problem, impl)  # a call that cannot be served must leave the cache alone
        if store is not None:
            store.append(k, before, block_table)
        own_keys = k_cache if store is None else None
        append_to_cache(own_keys, v_cache, k, v, before, block_table, k_scale, v_scale)
        if isinstance(screen, KeyCodes):
            screen.truncate(before)
            screen.append(k_cache, lengths, block_table)
    if store is not None:
        problem = with_progressive_keys(problem, store)
    result = op.call(problem, impl, return_lse)
    if key is not None:
        repeats.remember(key, problem, return_lse, *tensors)
    return result


def _cache_lengths(
    cache_seqlens: Tensor | int | None,
    block_table: Tensor | None,
    k: Tensor | None,
    batch: int,
    capacity: int,
    device: torch.device,
) -> Tensor:
    """Keys already in the cache as int32 (batch,)."""
    if cache_seqlens is None:
        if block_table is not None or k is not None:
            raise ValueError(
                "cache_seqlens: got None, want an int or an int32 tensor (batch,) when the cache has pages "
                "or new keys are written"
            )
        cache_seqlens = capacity
    if isinstance(cache_seqlens, bool) or not isinstance(cache_seqlens, int | Tensor | torch.SymInt):
        raise TypeError(f"cache_seqlens: got {cache_seqlens!r}, want an int or an int32 tensor ({batch},)")
    new = k.shape[1] if isinstance(k, Tensor) and k.dim() == 4 else 0  # other k are refused after this
    if isinstance(cache_seqlens, Tensor):
        checks.check_index("cache_seqlens", cache_seqlens, (batch,), device)
        checks.check_lengths("cache_seqlens", cache_seqlens, 0, capacity - new)
        return cache_seqlens
    if not 0 <= cache_seqlens <= capacity - new:
        raise ValueError(
            f"cache_seqlens: got {cache_seqlens}, want 0 to {capacity - new} (room for new keys)"
        )
    return torch.full((batch,), cache_seqlens, dtype=torch.int32, device=device)


def _problem(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    options: _Options,
    phase: Phase,
    *,
    kv_len: int | Tensor,
    max_seqlens: tuple[int, int],
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    seqused_k: Tensor | None = None,
    leftpad_k: Tensor | None = None,
    block_table: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
) -> AttentionProblem:
    """Check the shared options and build the problem."""
    if options.impl not in IMPLS:
        raise ValueError(f"impl: got {options.impl!r}, want one of {', '.join(IMPLS)}")
    checks.check_no_grad(q, k, v, options.sinks)
    checks.check_dtype(q, options.impl)
    batch = q.shape[0] if cu_seqlens_q is None else cu_seqlens_q.shape[0] - 1
    threshold = _threshold(options, kv_len, batch, q.device)
    problem = AttentionProblem(
        q=q,
        k=k,
        v=v,
        phase=phase,
        threshold=threshold,
        softmax_scale=checks.check_softmax_scale(options.softmax_scale, q.shape[-1]),
        causal=checks.check_flag("causal", options.causal),
        window_size=checks.check_window(options.window_size),
        softcap=checks.check_softcap(options.softcap),
        sinks=checks.check_sinks(options.sinks, q.shape[-2], q.device),
        max_skipped_mass=checks.check_max_skipped_mass(options.max_skipped_mass, threshold is not None),
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
        seqused_k=seqused_k,
        leftpad_k=leftpad_k,
        block_table=block_table,
        max_seqlen_q=max_seqlens[0],
        max_seqlen_k=max_seqlens[1],
        k_descale=k_descale,
        v_descale=v_descale,
        dense_tail=checks.check_dense_tail(options.dense_tail),
        want_counts=options.return_counts,
        want_mass_bound=options.return_mass_bound,
        want_kept_tiles=options.return_kept_tiles,
    )
    if options.block_mask is None:
        return problem
    return replace(problem, block_mask=check_block_mask(options.block_mask, problem))


def _threshold(options: _Options, kv_len: int | Tensor, batch: int, device: torch.device) -> Tensor | None:
    """float32 (batch,) thresholds, or None for a dense call."""
    if options.threshold_scale_factor is None:
        if options.threshold is None:
            return None
        return checks.check_threshold("threshold", options.threshold, batch, device, limit=1.0)
    if options.threshold is not None:
        raise ValueError("threshold, threshold_scale_factor: got both, want one of them")
    factor = checks.check_threshold(
        "threshold_scale_factor", options.threshold_scale_factor, batch, device, limit=math.inf
    )
    _warn_when_clamped(options.threshold_scale_factor, kv_len)
    return threshold_from_scale_factor(factor, kv_len)


def _warn_when_clamped(factor: float | Tensor, kv_len: int | Tensor) -> None:
    """Say once that a factor made for long prompts meets a short one (the threshold is clamped to 1)."""
    if torch.compiler.is_compiling() or isinstance(factor, Tensor):
        return
    if isinstance(kv_len, Tensor):
        if not checks.readable(kv_len) or kv_len.numel() == 0:
            return
        kv_len = int(kv_len.min())
    if factor > kv_len > 0:
        checks.warn_once(
            "clamped",
            f"threshold_scale_factor: got {factor:g} for a sequence of {kv_len} keys; the threshold is "
            "clamped to 1 there, which skips as much as the rule allows (said once)",
        )
