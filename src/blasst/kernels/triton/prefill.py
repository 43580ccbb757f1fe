"""Prefill: one program owns 64 query rows of one head and visits its key tiles of 128, sink first.

Work of a program: find its sequence and the key tiles that its rows can see; visit the first of them
(attention sinks), then from the last (the diagonal) leftwards. Per tile: Q.K^T, row maxima, one vote of
the 64 rows; if all agree the tile ends there, else exp, row sum and P.V. The tile 64 x 128 is the meaning
of a threshold and never changes; large head dims, fp32 and tiles with masks compute it in parts of PART
keys (scores twice: to vote, then to use). Tiles that every row sees whole take a loop without masks.
Registers: scores 64 x 128 fp32, acc 64 x head_dim_v fp32, row state. Shared memory (head_dim 128, 16
bit): Q 16 KB, K 32 KB a stage, V 32 KB a stage in the dense build, 16 KB in the skipping one (V waits for
the vote). fp16, bf16, fp32, with 16-bit q an fp8 cache; head_dim up to 256 and 576/512; pages of any size.
Source: docs/method.md (BLASST Algorithm 1, sink-first order).
"""

from __future__ import annotations

import triton
import triton.language as tl

from blasst.core.problem import AttentionProblem
from blasst.core.types import PREFILL_TILE, AttentionOutput, num_tiles
from blasst.kernels.triton.launch import (
    LENGTHS,
    Launch,
    Outputs,
    allocate,
    capability,
    dimensions,
    flags,
    narrow,
    prefill_config,
    problem_arguments,
    start,
)
from blasst.kernels.triton.primitives import (
    LOG2_E,
    absorb,
    agrees,
    all_of,
    descale_of,
    finite_base,
    group_bound,
    key_extent,
    load_rows,
    log2_threshold,
    mass_share,
    max_or_nan,
    natural_lse,
    part_scores,
    row_maximum,
    sequence_storage,
    store_rows,
    visible_rows,
)


@triton.jit
def _find_sequence(slot, cu_q_ptr, batch, search_steps, BLOCK_M: tl.constexpr):
    """(sequence, query tile) of a slot: sequence b starts at slot cu_q[b] // BLOCK_M + b, room enough."""
    low = 0
    high = batch
    for _ in range(search_steps):
        middle = (low + high) // 2
        reached = tl.load(cu_q_ptr + middle) // BLOCK_M + middle <= slot
        low = tl.where(reached, middle, low)
        high = tl.where(reached, high, middle)
    return low, slot - (tl.load(cu_q_ptr + low) // BLOCK_M + low)


@triton.jit
def _existing(first, span, MASKED: tl.constexpr, PART: tl.constexpr, BLOCK_N: tl.constexpr):
    """Offsets in a tile between which lie all its parts that somebody sees."""
    if MASKED:
        begin = tl.maximum(span[0] - first, 0) // PART * PART
        end = tl.minimum(span[1] - first, BLOCK_N)
    else:
        begin = 0
        end = BLOCK_N
    return begin, end


@triton.jit
def _tile_maximum(
    first,
    row_max,
    query,
    cache,
    scoring,
    span,
    MASKED: tl.constexpr,
    MASS: tl.constexpr,
    SOFTCAP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    MAIN: tl.constexpr,
    TAIL: tl.constexpr,
    STREAM: tl.constexpr,
    NARROW: tl.constexpr,
    PART: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Row maxima of a tile and, with MASS, the bound of its mass, computed in parts of PART keys."""
    begin, end = _existing(first, span, MASKED, PART, BLOCK_N)
    tile_max = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
    tile_bound = tl.zeros([BLOCK_M], dtype=tl.float32)
    for offset in range(begin, end, PART):
        s, _ = part_scores(
            query,
            cache,
            scoring,
            span,
            first + offset,
            PART,
            MASKED,
            SOFTCAP,
            HEAD_DIM,
            MAIN,
            TAIL,
            STREAM,
            NARROW,
        )
        if first >= 0:  # always: see _visit
            tile_max = max_or_nan(tile_max, row_maximum(s))
            if MASS:
                tile_bound += group_bound(s, finite_base(row_max), BLOCK_M, PART)[0]
    return tile_max, tile_bound


@triton.jit
def _absorb_in_parts(
    first,
    state,
    query,
    cache,
    scoring,
    span,
    MASKED: tl.constexpr,
    MASS: tl.constexpr,
    SOFTCAP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    MAIN: tl.constexpr,
    TAIL: tl.constexpr,
    HEAD_DIM_V: tl.constexpr,
    MAIN_V: tl.constexpr,
    TAIL_V: tl.constexpr,
    STREAM: tl.constexpr,
    NARROW: tl.constexpr,
    PART: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Score a kept tile once more and absorb it, PART keys at a time."""
    row_max, row_sum, bound, acc_main, acc_tail = state
    begin, end = _existing(first, span, MASKED, PART, BLOCK_N)
    for offset in range(begin, end, PART):
        s, keys = part_scores(
            query,
            cache,
            scoring,
            span,
            first + offset,
            PART,
            MASKED,
            SOFTCAP,
            HEAD_DIM,
            MAIN,
            TAIL,
            STREAM,
            NARROW,
        )
        row_max, row_sum, bound, acc_main, acc_tail = absorb(
            (row_max, row_sum, bound, acc_main, acc_tail), s, row_maximum(s), keys, cache, True, MASKED,
            MASKED, MASS, False, HEAD_DIM_V, MAIN_V, TAIL_V, NARROW, PART,
        )  # fmt: skip
    return row_max, row_sum, bound, acc_main, acc_tail


@triton.jit
def _bound_of_halves(s0, s1, row_max, BLOCK_M: tl.constexpr, PART: tl.constexpr):
    """Bound of a tile's mass relative to row_max."""
    base = finite_base(row_max)
    return group_bound(s0, base, BLOCK_M, PART)[0] + group_bound(s1, base, BLOCK_M, PART)[0]


@triton.jit
def _visit(
    tile,
    state,
    query,
    cache,
    scoring,
    span,
    log2_t,
    eps,
    kept,
    MASKED: tl.constexpr,
    SKIP: tl.constexpr,
    BUDGET: tl.constexpr,
    MASS: tl.constexpr,
    SOFTCAP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    MAIN: tl.constexpr,
    TAIL: tl.constexpr,
    HEAD_DIM_V: tl.constexpr,
    MAIN_V: tl.constexpr,
    TAIL_V: tl.constexpr,
    STREAM: tl.constexpr,
    NARROW: tl.constexpr,
    PART: tl.constexpr,
    EDGE_PART: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Vote on one key tile and absorb it if it is kept.

    Args:
        kept: (pointer to the kept map or None, offset of this query tile, tiles of its row).

    Returns:
        The new row_max, row_sum, bound, acc main part, acc tail part, and 1 if the tile was skipped, else 0.
    """
    row_max, row_sum, bound, acc_main, acc_tail = state
    first = tile * BLOCK_N
    # Both halves of the scores stay in registers; tiles with masks go by smaller parts, scored twice.
    HALVES: tl.constexpr = PART * 2 == BLOCK_N and not MASKED
    STEP: tl.constexpr = EDGE_PART if MASKED else PART
    if HALVES:
        s0, keys0 = part_scores(
            query, cache, scoring, span, first, PART, MASKED, SOFTCAP, HEAD_DIM, MAIN, TAIL, STREAM, NARROW
        )
        s1, keys1 = part_scores(
            query,
            cache,
            scoring,
            span,
            first + PART,
            PART,
            MASKED,
            SOFTCAP,
            HEAD_DIM,
            MAIN,
            TAIL,
            STREAM,
            NARROW,
        )
        tile_max = row_max
        tile_bound = bound
        if first >= 0:  # always: values that leave a branch end a walk in which Triton 3.6 fails on sm_100
            tile_max = max_or_nan(row_maximum(s0), row_maximum(s1))
            if BUDGET:
                tile_bound = _bound_of_halves(s0, s1, row_max, BLOCK_M, PART)
    elif SKIP:
        tile_max, tile_bound = _tile_maximum(
            first, row_max, query, cache, scoring, span, MASKED, MASS, SOFTCAP, HEAD_DIM, MAIN, TAIL, STREAM,
            NARROW, STEP, BLOCK_M, BLOCK_N,
        )  # fmt: skip
    if SKIP:
        agree = agrees(tile_max, row_max, log2_t)
        if BUDGET:
            agree = agree & ((bound + tile_bound <= eps * row_sum) | (tile_max == float("-inf")))
        skipped = all_of(agree).to(tl.int32)
    else:
        skipped = 0
    if skipped == 0:
        if HALVES:
            row_max, row_sum, bound, acc_main, acc_tail = absorb(
                (row_max, row_sum, bound, acc_main, acc_tail), s0, tile_max, keys0, cache, True, MASKED,
                MASKED, MASS, False, HEAD_DIM_V, MAIN_V, TAIL_V, NARROW, PART,
            )  # fmt: skip
            row_max, row_sum, bound, acc_main, acc_tail = absorb(
                (row_max, row_sum, bound, acc_main, acc_tail), s1, tile_max, keys1, cache, False, MASKED,
                MASKED, MASS, False, HEAD_DIM_V, MAIN_V, TAIL_V, NARROW, PART,
            )  # fmt: skip
        else:
            row_max, row_sum, bound, acc_main, acc_tail = _absorb_in_parts(
                first, (row_max, row_sum, bound, acc_main, acc_tail), query, cache, scoring, span, MASKED,
                MASS, SOFTCAP, HEAD_DIM, MAIN, TAIL, HEAD_DIM_V, MAIN_V, TAIL_V, STREAM, NARROW, STEP,
                BLOCK_N,
            )  # fmt: skip
    elif MASS:
        if HALVES and not BUDGET:
            tile_bound = _bound_of_halves(s0, s1, row_max, BLOCK_M, PART)
        bound += tile_bound
    if kept[0] is not None:
        tl.store(kept[0] + kept[1] + tile, 1, mask=(skipped == 0) & (tile < kept[2]))
    return row_max, row_sum, bound, acc_main, acc_tail, skipped


@triton.jit(do_not_specialize=LENGTHS)
def prefill_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    lse_ptr,
    mass_ptr,
    kept_ptr,
    skipped_ptr,
    visited_ptr,
    threshold_ptr,
    sinks_ptr,
    cu_q_ptr,
    cu_k_ptr,
    seqused_ptr,
    leftpad_ptr,
    table_ptr,
    k_descale_ptr,
    k_descale_stride_b,
    k_descale_stride_h,
    v_descale_ptr,
    v_descale_stride_b,
    v_descale_stride_h,
    q_stride_b,
    q_stride_s,
    q_stride_h,
    k_stride_b,
    k_stride_s,
    k_stride_h,
    v_stride_b,
    v_stride_s,
    v_stride_h,
    out_stride_b,
    out_stride_s,
    out_stride_h,
    lse_stride_b,
    lse_stride_h,
    table_stride,
    threshold_stride,
    page_size,
    batch,
    seqlen_q,
    seqlen_k,
    num_heads,
    group,
    slots,
    search_steps,
    query_tiles,
    key_tiles,
    window_left,
    window_right,
    dense_tail,
    scale,
    cap,
    eps,
    SKIP: tl.constexpr,
    BUDGET: tl.constexpr,
    MASS: tl.constexpr,
    SOFTCAP: tl.constexpr,
    LEFT_EDGE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    MAIN: tl.constexpr,
    TAIL: tl.constexpr,
    HEAD_DIM_V: tl.constexpr,
    MAIN_V: tl.constexpr,
    TAIL_V: tl.constexpr,
    STREAM: tl.constexpr,
    NARROW: tl.constexpr,
    PART: tl.constexpr,
    EDGE_PART: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """One query tile of one head; program order: long (late) query tiles of a head first."""
    program = tl.program_id(0)
    outer = program // slots
    slot = slots - 1 - (program - outer * slots)
    if cu_q_ptr is not None:
        head = outer
        b, query_tile = _find_sequence(slot, cu_q_ptr, batch, search_steps, BLOCK_M)
        q_first = tl.load(cu_q_ptr + b)
        rows_here = tl.load(cu_q_ptr + b + 1) - q_first
        q_batch = b * 0
    else:
        b = outer // num_heads
        head = outer - b * num_heads
        query_tile = slot
        q_first = 0
        rows_here = seqlen_q
        q_batch = b
    if query_tile * BLOCK_M >= rows_here:
        return
    base, pad, keys_here = key_extent(cu_k_ptr, seqused_ptr, leftpad_ptr, b, seqlen_k, table_ptr is not None)

    row = query_tile * BLOCK_M + tl.arange(0, BLOCK_M)
    row_ok = row < rows_here
    row_lo, row_hi = visible_rows(row, rows_here, keys_here, window_left, window_right)
    # The ranges of the rows slide by one key, so their union is one run of keys.
    shift = keys_here - rows_here
    row_first = query_tile * BLOCK_M
    row_last = tl.minimum(row_first + BLOCK_M, rows_here) - 1
    key_lo = tl.maximum(row_first + shift - window_left, 0)
    key_hi = tl.minimum(row_last + shift + window_right + 1, keys_here)
    first_tile = key_lo // BLOCK_N
    last_tile = tl.where(key_hi > key_lo, (key_hi - 1) // BLOCK_N, first_tile - 1)
    # What every row sees; tiles whole_from .. whole_to - 1 lie inside (none if a row is missing).
    common_lo = tl.maximum(row_last + shift - window_left, 0)
    common_hi = tl.maximum(tl.minimum(row_first + shift + window_right + 1, keys_here), 0)
    whole_from = (common_lo + BLOCK_N - 1) // BLOCK_N
    whole_to = common_hi // BLOCK_N
    whole_from = tl.minimum(tl.maximum(whole_from, first_tile), tl.maximum(last_tile, first_tile)) + 1
    whole_to = tl.where(row_first + BLOCK_M <= rows_here, tl.minimum(whole_to, last_tile + 1), whole_from)
    whole_to = tl.maximum(whole_to, whole_from)
    if visited_ptr is not None:
        tl.atomic_add(
            visited_ptr + b.to(tl.int64) * num_heads + head, (last_tile - first_tile + 1).to(tl.int64)
        )

    head64 = head.to(tl.int64)
    q_base = q_ptr + q_batch.to(tl.int64) * q_stride_b + head64 * q_stride_h
    q_offsets = (q_first + row).to(tl.int64) * q_stride_s
    q_main = 0.0
    q_tail = 0.0
    if STREAM == 0:
        q_main = load_rows(q_base, q_offsets, row_ok, True, 0, MAIN, HEAD_DIM)
        if TAIL > 0:
            q_tail = load_rows(q_base, q_offsets, row_ok, True, MAIN, TAIL, HEAD_DIM)
    query = (q_base, q_offsets, row_ok, q_main, q_tail)
    kv_head = head64 // group
    k_first, v_first, pad = sequence_storage(
        k_ptr, v_ptr, base, pad, b, kv_head, k_stride_b, k_stride_s, k_stride_h, v_stride_b, v_stride_s,
        v_stride_h, table_ptr is not None,
    )  # fmt: skip
    cache = (
        k_first, v_first, pad, table_ptr, b.to(tl.int64) * table_stride, page_size, k_stride_b, k_stride_s,
        v_stride_b, v_stride_s,
    )  # fmt: skip
    scoring = (scale * descale_of(k_descale_ptr, k_descale_stride_b, k_descale_stride_h, b, kv_head), cap)
    span = (key_lo, key_hi, row_lo, row_hi, common_lo, common_hi)
    kept = (kept_ptr, ((b.to(tl.int64) * num_heads + head) * query_tiles + query_tile) * key_tiles, key_tiles)

    row_max = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
    row_sum = tl.zeros([BLOCK_M], dtype=tl.float32)
    sink = float("-inf")
    if sinks_ptr is not None:
        sink = tl.load(sinks_ptr + head)
        row_max = tl.zeros([BLOCK_M], dtype=tl.float32) + sink * LOG2_E
        row_sum = tl.where(row_max > float("-inf"), 1.0, row_sum)
    bound = tl.zeros([BLOCK_M], dtype=tl.float32)
    acc_main = tl.zeros([BLOCK_M, MAIN_V], dtype=tl.float32)
    acc_tail = 0.0
    if TAIL_V > 0:
        acc_tail = tl.zeros([BLOCK_M, TAIL_V], dtype=tl.float32)
    log2_t = 0.0
    if SKIP:
        log2_t = log2_threshold(threshold_ptr, threshold_stride, b)
        log2_t = tl.where(row_last + 1 + dense_tail > rows_here, float("-inf"), log2_t)
    skipped = 0

    for i in tl.range(
        0, last_tile - whole_to + 2, num_stages=1, disable_licm=True
    ):  # the first tile, then the ragged ones at the right edge
        tile = tl.where(i == 0, first_tile, last_tile + 1 - i)
        row_max, row_sum, bound, acc_main, acc_tail, gone = _visit(
            tile, (row_max, row_sum, bound, acc_main, acc_tail), query, cache, scoring, span, log2_t, eps,
            kept, True, SKIP, BUDGET, MASS, SOFTCAP, HEAD_DIM, MAIN, TAIL, HEAD_DIM_V, MAIN_V, TAIL_V,
            STREAM, NARROW, PART, EDGE_PART, BLOCK_M, BLOCK_N,
        )  # fmt: skip
        skipped += gone
    for i in range(0, whole_to - whole_from):
        row_max, row_sum, bound, acc_main, acc_tail, gone = _visit(
            whole_to - 1 - i, (row_max, row_sum, bound, acc_main, acc_tail), query, cache, scoring, span,
            log2_t, eps, kept, False, SKIP, BUDGET, MASS, SOFTCAP, HEAD_DIM, MAIN, TAIL, HEAD_DIM_V, MAIN_V,
            TAIL_V, STREAM, NARROW, PART, EDGE_PART, BLOCK_M, BLOCK_N,
        )  # fmt: skip
        skipped += gone
    if LEFT_EDGE:
        for i in tl.range(0, whole_from - 1 - first_tile, num_stages=1, disable_licm=True):
            row_max, row_sum, bound, acc_main, acc_tail, gone = _visit(
                whole_from - 1 - i, (row_max, row_sum, bound, acc_main, acc_tail), query, cache, scoring,
                span, log2_t, eps, kept, True, SKIP, BUDGET, MASS, SOFTCAP, HEAD_DIM, MAIN, TAIL, HEAD_DIM_V,
                MAIN_V, TAIL_V, STREAM, NARROW, PART, EDGE_PART, BLOCK_M, BLOCK_N,
            )  # fmt: skip
            skipped += gone

    inverse = 1.0 / tl.where(row_sum == 0.0, 1.0, row_sum)
    inverse *= descale_of(v_descale_ptr, v_descale_stride_b, v_descale_stride_h, b, kv_head)
    out_rows = (q_first + row).to(tl.int64)
    out_base = out_ptr + q_batch.to(tl.int64) * out_stride_b + head64 * out_stride_h
    store_rows(out_base, out_rows * out_stride_s, row_ok, acc_main * inverse[:, None], 0, MAIN_V, HEAD_DIM_V)
    if TAIL_V > 0:
        store_rows(
            out_base, out_rows * out_stride_s, row_ok, acc_tail * inverse[:, None], MAIN_V, TAIL_V, HEAD_DIM_V
        )
    lse_place = q_batch.to(tl.int64) * lse_stride_b + head64 * lse_stride_h + out_rows
    lse = natural_lse(row_max, row_sum, sink * LOG2_E, sink)
    tl.store(lse_ptr + lse_place, lse, mask=row_ok)
    if mass_ptr is not None:
        tl.store(mass_ptr + lse_place, mass_share(bound, row_sum), mask=row_ok)
    if skipped_ptr is not None:
        tl.atomic_add(skipped_ptr + b.to(tl.int64) * num_heads + head, skipped.to(tl.int64))


def plan(problem: AttentionProblem, outputs: Outputs, arch: tuple[int, int]) -> list[Launch]:
    """The kernel launches of a problem, in order; empty when there is nothing to compute.

    Args:
        problem: a checked call.
        outputs: what the kernel fills.
        arch: compute capability to choose the configuration for.
    """
    block_m, block_n = PREFILL_TILE.query or 0, PREFILL_TILE.key
    batch, heads = problem.batch_size, problem.num_heads
    if problem.packed:  # sequence b starts at slot cu_q[b] // block_m + b
        slots, outer = problem.q.shape[0] // block_m + batch, heads
    else:
        slots, outer = num_tiles(problem.q.shape[1], block_m), batch * heads
    if slots * outer * batch == 0 or problem.q.numel() == 0:
        return []
    config = prefill_config(problem, arch)
    arguments = problem_arguments(problem, outputs)
    arguments |= {"slots": slots, "search_steps": batch.bit_length()}
    arguments |= {"dense_tail": problem.dense_tail}
    arguments |= {
        "query_tiles": num_tiles(problem.max_seqlen_q, block_m),
        "key_tiles": num_tiles(problem.max_seqlen_k, block_n),
    }
    constants = flags(problem) | dimensions(problem)
    constants |= {"LEFT_EDGE": problem.window_size[0] >= 0, "STREAM": config.stream, "PART": config.part}
    constants |= {"EDGE_PART": config.edge_part}
    constants |= {"BLOCK_M": block_m, "BLOCK_N": block_n, "NARROW": narrow(problem, config.part)}
    return [Launch(prefill_kernel, slots * outer, arguments, constants, config.options())]


def run(problem: AttentionProblem) -> AttentionOutput:
    """Attention of a checked problem by the prefill rule; no host sync, safe inside a CUDA graph."""
    outputs = allocate(problem, PREFILL_TILE)
    start(plan(problem, outputs, capability(problem.q.device)), problem.q.device)
    return outputs.result()
