"""The public function in torch SDPA's layout and names."""

from __future__ import annotations

from torch import Tensor

from blasst.core import checks
from blasst.core.errors import UnsupportedError
from blasst.core.types import AttentionOutput
from blasst.functional import blasst_attn_func


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    threshold: float | Tensor | None = None,
    threshold_scale_factor: float | Tensor | None = None,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    max_skipped_mass: float | None = None,
    dense_tail: int = 0,
    return_lse: bool = False,
    return_counts: bool = False,
    return_mass_bound: bool = False,
    return_kept_tiles: bool = False,
    impl: str = "auto",
) -> AttentionOutput:
    """`blasst_attn_func` in the layout and names of torch's scaled_dot_product_attention.

    Args:
        query: (batch, num_heads, seqlen_q, head_dim).
        key: (batch, num_kv_heads, seqlen_k, head_dim).
        value: (batch, num_kv_heads, seqlen_k, head_dim_v).
        attn_mask: must be None; use is_causal, window_size or the varlen function.
        dropout_p: must be 0.
        is_causal: bottom-right aligned (torch aligns top-left; the same when seqlen_q == seqlen_k).
        scale: factor on q . k; default head_dim ** -0.5.
        enable_gqa: must be True when num_kv_heads differs from num_heads, as in torch.
        threshold: as in `blasst_attn_func`.
        threshold_scale_factor: as in `blasst_attn_func`.
        window_size: (left, right), -1 = unlimited.
        softcap: 0 = none.
        sinks: (num_heads,).
        max_skipped_mass: error budget in (0, 1).
        dense_tail: as in `blasst_attn_func`.
        return_lse: fill AttentionOutput.lse.
        return_counts: fill AttentionOutput.counts.
        return_mass_bound: fill AttentionOutput.mass_bound.
        return_kept_tiles: fill AttentionOutput.kept_tiles.
        impl: as in `blasst_attn_func`.

    Returns:
        AttentionOutput with out (batch, num_heads, seqlen_q, head_dim_v).

    Raises:
        TypeError: a wrong type, or a dtype of an argument that is fixed.
        ValueError: a wrong value, shape or device, or dtypes of q, k, v that differ.
        UnsupportedError: an attention mask or dropout was given, or no kernel can serve the call.
        NotImplementedError: gradients are wanted.

    Source: BLASST (arXiv:2512.12087); argument names of torch.
    """
    if attn_mask is not None:
        raise UnsupportedError(
            "attn_mask: got a mask, want None; causal, window and lengths are expressed by is_causal, "
            "window_size and blasst_attn_varlen_func"
        )
    if dropout_p != 0.0:
        raise UnsupportedError(f"dropout_p: got {dropout_p!r}, want 0.0 (there is no dropout)")
    q, k, v = (
        t.transpose(1, 2) if isinstance(t, Tensor) and t.dim() == 4 else t for t in (query, key, value)
    )
    checks.check_qkv(q, k, v, 4, 4, ("query", "key", "value"))
    checks.check_batch(key, query, ("key", "query"))
    checks.check_dtype(query, impl, "query")
    checks.check_flag("is_causal", is_causal)
    checks.check_softmax_scale(scale, query.shape[-1], "scale")
    if query.shape[1] != key.shape[1] and not enable_gqa:
        raise ValueError(
            f"enable_gqa: got False, want True for {query.shape[1]} query and {key.shape[1]} key heads"
        )
    result = blasst_attn_func(
        q,
        k,
        v,
        threshold=threshold,
        threshold_scale_factor=threshold_scale_factor,
        causal=is_causal,
        softmax_scale=scale,
        window_size=window_size,
        softcap=softcap,
        sinks=sinks,
        max_skipped_mass=max_skipped_mass,
        dense_tail=dense_tail,
        return_lse=return_lse,
        return_counts=return_counts,
        return_mass_bound=return_mass_bound,
        return_kept_tiles=return_kept_tiles,
        impl=impl,
    )
    return result._replace(out=result.out.transpose(1, 2))
