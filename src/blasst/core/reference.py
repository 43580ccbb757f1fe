"""The oracle: what the specification says, tile by tile, in float64 or any other dtype.

Written for reading, not for speed. Every kernel is compared with it: kept tiles as sets, outputs within the
error of the same computation in the dtype of the inputs.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from blasst.core.checks import check_dense_tail
from blasst.core.problem import AttentionProblem
from blasst.core.reference_sequence import SequenceSolver
from blasst.core.sequences import map_shape, split_sequences
from blasst.core.types import (
    DECODE_TILE,
    PREFILL_TILE,
    Phase,
    SkipCounts,
    TileShape,
    VisitingOrder,
)


class ReferenceOutput(NamedTuple):
    """Everything the reference knows about a call.

    Attributes:
        out: (batch, seqlen_q, num_heads, head_dim_v) or packed, in the dtype of the computation.
        lse: natural log-sum-exp of kept tiles and sink; (batch, num_heads, seqlen_q), packed
            (num_heads, total_q).
        counts: skipped and visited tiles.
        mass_bound: upper bound of skipped_mass, shape of lse.
        kept_tiles: bool (batch, heads, query tiles, key tiles).
        skipped_mass: true softmax weight of skipped keys, shape of lse.
        margin: shape of kept_tiles; max over rows of tile_max minus the maximum that the rule compares with
            (of the bounds of both, where the call is screened in int8); inf where a tile is kept at any
            threshold, nan where it is not visited.
    """

    out: Tensor
    lse: Tensor
    counts: SkipCounts
    mass_bound: Tensor
    kept_tiles: Tensor
    skipped_mass: Tensor
    margin: Tensor


def reference_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    threshold: float | Tensor | None = None,
    phase: Phase = "prefill",
    causal: bool = False,
    softmax_scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    max_skipped_mass: float | None = None,
    dense_tail: int = 0,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    seqused_k: Tensor | None = None,
    leftpad_k: Tensor | None = None,
    block_table: Tensor | None = None,
    k_descale: float | Tensor | None = None,
    v_descale: float | Tensor | None = None,
    block_mask: Tensor | None = None,
    int8_screen: bool = False,
    tile: TileShape | None = None,
    order: VisitingOrder = "sink_first",
    kept_tiles: Tensor | None = None,
    dtype: torch.dtype = torch.float64,
) -> ReferenceOutput:
    """Attention by the specification, with everything it knows.

    Args:
        q: (batch, seqlen_q, num_heads, head_dim), or packed (total_q, num_heads, head_dim) with cu_seqlens_q.
        k: (batch, seqlen_k, num_kv_heads, head_dim), packed, or pages (num_pages, page_size, ...).
        v: like k with head_dim_v.
        threshold: in [0, 1], float or (batch,); None = dense.
        phase: "prefill" (running maximum) or "decode" (anchors).
        causal: bottom-right aligned.
        softmax_scale: factor on q . k; default head_dim ** -0.5.
        window_size: (left, right), -1 = unlimited.
        softcap: cap * tanh(score / cap); 0 = none.
        sinks: (num_heads,) logits, or None.
        max_skipped_mass: error budget in (0, 1), or None.
        dense_tail: query tiles with one of the last so many rows of a sequence skip nothing.
        cu_seqlens_q: (batch + 1,) for packed q.
        cu_seqlens_k: (batch + 1,) for packed k, or lengths of pages.
        seqused_k: (batch,) key slots in use.
        leftpad_k: (batch,) first valid key slot.
        block_table: (batch, max_pages).
        k_descale: the keys are k.float() * k_descale; float, (), (num_kv_heads,) or (batch, num_kv_heads);
            None = 1.
        v_descale: the same for v.
        block_mask: bool, shape of kept_tiles: tiles that may be attended; None = all.
        int8_screen: decide with bounds from 8-bit copies of q and k, as `screen="int8"` does; prefill only.
        tile: vote shape; default the serving shape of the phase.
        order: visiting order of prefill.
        kept_tiles: a map to follow instead of deciding (True = keep).
        dtype: dtype of the whole computation.

    Returns:
        ReferenceOutput.

    Source: BLASST Algorithm 1 with the choices of docs/method.md.
    """
    max_q = q.shape[1] if cu_seqlens_q is None else _longest(cu_seqlens_q)
    if block_table is not None:
        max_k = block_table.shape[1] * k.shape[1]
    else:
        max_k = k.shape[1] if cu_seqlens_k is None else _longest(cu_seqlens_k)
    batch = q.shape[0] if cu_seqlens_q is None else cu_seqlens_q.shape[0] - 1
    if threshold is not None:
        threshold = torch.as_tensor(threshold, dtype=torch.float64, device=q.device).expand(batch)
    shape = batch, k.shape[-2]
    scales = [
        None if x is None else torch.as_tensor(x, dtype=torch.float32, device=q.device).expand(shape)
        for x in (k_descale, v_descale)
    ]
    problem = AttentionProblem(
        q=q,
        k=k,
        v=v,
        phase=phase,
        threshold=threshold,
        softmax_scale=q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale,
        causal=causal,
        window_size=window_size,
        softcap=softcap,
        sinks=sinks,
        max_skipped_mass=max_skipped_mass,
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
        seqused_k=seqused_k,
        leftpad_k=leftpad_k,
        block_table=block_table,
        max_seqlen_q=max_q,
        max_seqlen_k=max_k,
        k_descale=scales[0],
        v_descale=scales[1],
        block_mask=block_mask,
        dense_tail=check_dense_tail(dense_tail),
        int8_screen=int8_screen,
    )
    return run_reference(problem, tile=tile, order=order, kept_tiles=kept_tiles, dtype=dtype)


def _longest(cu_seqlens: Tensor) -> int:
    lengths = cu_seqlens[1:] - cu_seqlens[:-1]
    return int(lengths.max()) if lengths.numel() else 0


def run_reference(
    problem: AttentionProblem,
    *,
    tile: TileShape | None = None,
    order: VisitingOrder = "sink_first",
    kept_tiles: Tensor | None = None,
    dtype: torch.dtype = torch.float64,
) -> ReferenceOutput:
    """`reference_attention` on a canonical problem."""
    tile = tile or (PREFILL_TILE if problem.phase == "prefill" else DECODE_TILE)
    shape, device = map_shape(problem, tile), problem.q.device
    head_rows = problem.q.shape[:-1]  # (batch, seqlen_q, heads) or (total_q, heads)
    out = torch.zeros(*head_rows, problem.head_dim_v, dtype=dtype, device=device)
    lse = torch.full(head_rows, -math.inf, dtype=dtype, device=device)
    mass_bound, skipped_mass = torch.zeros_like(lse), torch.zeros_like(lse)
    kept = torch.zeros(shape, dtype=torch.bool, device=device)
    margin = torch.full(shape, math.nan, dtype=dtype, device=device)
    skipped = torch.zeros(shape[:2], dtype=torch.int64, device=device)
    visited, screened = torch.zeros_like(skipped), torch.zeros_like(skipped)

    for sequence in split_sequences(problem):
        b = sequence.index
        solver = SequenceSolver(problem, sequence, tile, order, dtype)
        given = None if kept_tiles is None else kept_tiles[b]
        place = (sequence.rows,) if problem.packed else (b, sequence.rows)
        for i in range(solver.num_query_tiles):
            row_ids, head_ids = solver.rows_of(i)
            sure = torch.zeros_like(kept[b, :, i])
            state = solver.solve(i, given, kept[b, :, i], margin[b, :, i], sure)
            valid = solver.row_valid(i)
            visited[b] += solver.num_visited(i)
            gone = solver.num_visited(i) - kept[b, :, i].sum(-1)
            skipped[b] += gone
            screened[b] += gone if problem.int8_screen else sure.sum(-1)
            norm = torch.where(state.row_sum == 0, torch.ones_like(state.row_sum), state.row_sum)
            values = (
                (out, state.acc / norm[..., None]),
                (lse, state.row_max + state.row_sum.log()),
                (mass_bound, _share(state.bound, state.row_sum)),
                (skipped_mass, _share(state.skipped, state.row_sum)),
            )
            for target, value in values:
                target[place][row_ids[:, valid], head_ids[:, valid]] = value[:, valid]
    axes = (1, 0) if problem.packed else (0, 2, 1)
    return ReferenceOutput(
        out,
        lse.permute(axes),
        SkipCounts(skipped, visited, screened if problem.screened else None),
        mass_bound.permute(axes),
        kept,
        skipped_mass.permute(axes),
        margin,
    )


def _share(part: Tensor, rest: Tensor) -> Tensor:
    """part / (part + rest), 0 where nothing was left out (also for rows without keys)."""
    return torch.where(part == 0, torch.zeros_like(part), part / (part + rest))
