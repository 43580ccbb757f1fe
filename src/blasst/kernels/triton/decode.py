"""Decode: all query heads of a KV head and all new tokens vote together, keys split over programs.

Work of a program (sequence, KV head, block of rows, split): score the anchor tiles (the first and the
last two visible key tiles of 64), then visit the tiles of its split in ascending order: Q.K^T, and unless
every row is below its anchor maximum by the threshold, V is loaded and absorbed. Nothing of the decision
depends on other splits. Split boundaries follow from the visited tiles of the sequence alone, so a
request gets the same bits alone and in any batch. `combine` merges the splits in order and adds the sink
once.
When the rows exceed one block (MLA: 128 heads x 8 tokens), a first launch writes one vote per block and tile,
and the second follows them. With V inside K (MLA, 576/512) a kept tile reads nothing more.
Registers: scores BLOCK_M x 64 fp32, acc BLOCK_M x head_dim_v fp32. fp16, bf16, fp32; with 16-bit q also an
fp8 cache (k's scale is part of the score scale); pages of any size.
Source: docs/method.md (anchors).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from blasst.core.problem import AttentionProblem
from blasst.core.types import DECODE_TILE, AttentionOutput, num_tiles
from blasst.kernels.triton.launch import (
    LENGTHS,
    Launch,
    Outputs,
    allocate,
    capability,
    combine_config,
    decode_config,
    dimensions,
    flags,
    narrow,
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

#: A split has at least this many tiles: each scores up to three anchor tiles besides its own.
MIN_SPLIT_TILES = 8
#: And a sequence at most this many splits: 8 KV heads x 32 fill the 132 SMs of an H200 at batch 1.
MAX_SPLITS = 32

# What a launch does with votes: take them itself, only write them, or follow what was written.
_VOTE, _WRITE, _FOLLOW = 0, 1, 2
VOTE = tl.constexpr(_VOTE)
WRITE = tl.constexpr(_WRITE)
FOLLOW = tl.constexpr(_FOLLOW)


@triton.jit
def _visited(rows_here, keys_here, window_left, window_right, BLOCK_N: tl.constexpr):
    """Key range, anchor limits and visited tiles of the query tile of a sequence.

    Returns:
        key_lo, key_hi (union of the rows' visible ranges), first_tile, last_tile (last < first: none), and
        the tiles up to which and from which on all are anchors.
    """
    shift = keys_here - rows_here
    # Rows before seen_from see nothing; later ones all do, and their ranges slide by one key.
    seen_from = tl.maximum(-(shift + window_right), 0)
    none = (seen_from >= rows_here) | (keys_here <= 0)
    key_lo = tl.maximum(seen_from + shift - window_left, 0)
    key_hi = keys_here
    first_tile = key_lo // BLOCK_N
    last_tile = tl.where(none, first_tile - 1, (key_hi - 1) // BLOCK_N)
    anchors_to = tl.maximum(keys_here - 1 - window_left, 0) // BLOCK_N
    anchors_from = (tl.minimum(seen_from + shift + window_right + 1, keys_here) - 1) // BLOCK_N - 1
    return key_lo, key_hi, first_tile, last_tile, anchors_to, anchors_from


@triton.jit
def _tiles_per_split(tiles, MIN_TILES: tl.constexpr, SPLIT_LIMIT: tl.constexpr):
    """Length of a split in tiles: a function of the visited tiles alone."""
    return tl.maximum((tiles + SPLIT_LIMIT - 1) // SPLIT_LIMIT, MIN_TILES)


@triton.jit
def _query_extent(cu_q_ptr, b, seqlen_q):
    """(first packed row, batch index or 0, number of rows) of a sequence's queries."""
    if cu_q_ptr is not None:
        first = tl.load(cu_q_ptr + b)
        count = tl.load(cu_q_ptr + b + 1) - first
        place = b * 0
    else:
        first = b * 0
        count = seqlen_q
        place = b
    return first, place, count


@triton.jit
def _score_anchors(
    anchors,
    top,
    total,
    query,
    cache,
    scoring,
    span,
    BUDGET: tl.constexpr,
    SOFTCAP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    MAIN: tl.constexpr,
    TAIL: tl.constexpr,
    STREAM: tl.constexpr,
    NARROW: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Maximum, and with BUDGET sum and number of visible keys, of the anchor tiles per row.

    Args:
        anchors: (first tile, tiles of the left run, first tile of the right run, tiles of it).
        top: (M,) where to start: sink logit in log2 units, or -inf.
        total: (M,) 1 with a finite sink, else 0.
    """
    left, num_left, right, num_right = anchors
    count = tl.zeros([BLOCK_M], dtype=tl.int32)
    for i in range(0, num_left + num_right):
        tile = tl.where(i < num_left, left + i, right + i - num_left)
        s, _ = part_scores(
            query,
            cache,
            scoring,
            span,
            tile * BLOCK_N,
            BLOCK_N,
            True,
            SOFTCAP,
            HEAD_DIM,
            MAIN,
            TAIL,
            STREAM,
            NARROW,
        )
        new_top = max_or_nan(top, row_maximum(s))
        if BUDGET:
            base = finite_base(new_top)
            total = total * tl.exp2(top - base) + tl.sum(tl.exp2(s - base[:, None]), axis=1)
            count += tl.sum(((s > float("-inf")) | (s != s)).to(tl.int32), axis=1)
        top = new_top
    return top, total, count


@triton.jit
def _visit(
    tile,
    state,
    query,
    cache,
    scoring,
    span,
    cut,
    votes,
    kept,
    MASKED: tl.constexpr,
    GUARD: tl.constexpr,
    MODE: tl.constexpr,
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
    V_IN_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    VOTE_BLOCKS: tl.constexpr,
):
    """Decide about one key tile and absorb it if it is kept.

    Args:
        cut: (anchor maximum, log2 threshold, budget per visible key, row exists, anchors_to, anchors_from).
        votes: (pointer to the votes of this KV head, row blocks, own block).
        kept: (pointer to the kept map or None, offset of this KV head, tiles of its row).

    Returns:
        The new row_max, row_sum, bound, acc main part, acc tail part, and 1 if the tile was skipped, else 0.
    """
    row_max, row_sum, bound, acc_main, acc_tail = state
    anchor_max, log2_t, share, row_ok, anchors_to, anchors_from = cut
    votes_ptr, row_blocks, row_block = votes
    LAZY: tl.constexpr = MODE == FOLLOW and not MASS  # a skipped tile is not even scored
    skipped = 0
    if MODE == FOLLOW:
        block = tl.arange(0, VOTE_BLOCKS)
        place = votes_ptr + tile * row_blocks + block
        skipped = tl.min(tl.load(place, mask=block < row_blocks, other=1).to(tl.int32), axis=0)
    if not LAZY:
        s, keys = part_scores(
            query, cache, scoring, span, tile * BLOCK_N, BLOCK_N, MASKED, SOFTCAP, HEAD_DIM, MAIN, TAIL,
            STREAM, NARROW,
        )  # fmt: skip
        tile_max = anchor_max
        tile_bound = bound
        count = row_ok
        if tile >= 0:  # always: see prefill
            tile_max = row_maximum(s)
            if MASS:
                tile_bound, count = group_bound(s, finite_base(anchor_max), BLOCK_M, BLOCK_N)
        if SKIP and MODE != FOLLOW:
            agree = agrees(tile_max, anchor_max, log2_t)
            if BUDGET:
                agree = agree & ((tile_bound <= share * count.to(tl.float32)) | (count == 0))
            inner = (tile > anchors_to) & (tile < anchors_from)
            skipped = (all_of(agree | (row_ok == 0)) & inner).to(tl.int32)
    if MODE == WRITE:
        tl.store(votes_ptr + tile * row_blocks + row_block, skipped.to(tl.int8))
    else:
        if skipped == 0:
            if LAZY:
                s, keys = part_scores(
                    query, cache, scoring, span, tile * BLOCK_N, BLOCK_N, MASKED, SOFTCAP, HEAD_DIM, MAIN,
                    TAIL, STREAM, NARROW,
                )  # fmt: skip
                tile_max = row_maximum(s)
            row_max, row_sum, _, acc_main, acc_tail = absorb(
                (row_max, row_sum, 0.0, acc_main, acc_tail), s, tile_max, keys, cache, True, MASKED, GUARD,
                False, V_IN_K, HEAD_DIM_V, MAIN_V, TAIL_V, NARROW, BLOCK_N,
            )  # fmt: skip
        elif MASS:
            bound += tile_bound
        if kept[0] is not None:
            tl.store(kept[0] + kept[1] + tile, 1, mask=(skipped == 0) & (row_block == 0) & (tile < kept[2]))
    return row_max, row_sum, bound, acc_main, acc_tail, skipped


@triton.jit(do_not_specialize=LENGTHS)
def decode_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    part_acc_ptr,
    part_max_ptr,
    part_sum_ptr,
    part_bound_ptr,
    part_base_ptr,
    votes_ptr,
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
    q_stride_b,
    q_stride_s,
    q_stride_h,
    k_stride_b,
    k_stride_s,
    k_stride_h,
    v_stride_b,
    v_stride_s,
    v_stride_h,
    table_stride,
    threshold_stride,
    page_size,
    seqlen_q,
    seqlen_k,
    num_heads,
    group,
    splits,
    rows,
    row_blocks,
    key_tiles,
    window_left,
    window_right,
    scale,
    cap,
    eps,
    MODE: tl.constexpr,
    SKIP: tl.constexpr,
    BUDGET: tl.constexpr,
    MASS: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SEVERAL_TOKENS: tl.constexpr,
    LEFT_EDGE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    MAIN: tl.constexpr,
    TAIL: tl.constexpr,
    HEAD_DIM_V: tl.constexpr,
    MAIN_V: tl.constexpr,
    TAIL_V: tl.constexpr,
    STREAM: tl.constexpr,
    NARROW: tl.constexpr,
    V_IN_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    VOTE_BLOCKS: tl.constexpr,
    MIN_TILES: tl.constexpr,
    SPLIT_LIMIT: tl.constexpr,
):
    """One split of one block of rows of one KV head."""
    program = tl.program_id(0)
    outer = program // splits
    split = program - outer * splits
    owner = outer // row_blocks  # sequence x KV head
    row_block = outer - owner * row_blocks
    num_kv_heads = num_heads // group
    b = owner // num_kv_heads
    kv_head = (owner - b * num_kv_heads).to(tl.int64)

    q_first, q_batch, rows_here = _query_extent(cu_q_ptr, b, seqlen_q)
    base, pad, keys_here = key_extent(cu_k_ptr, seqused_ptr, leftpad_ptr, b, seqlen_k, table_ptr is not None)
    key_lo, key_hi, first_tile, last_tile, anchors_to, anchors_from = _visited(
        rows_here, keys_here, window_left, window_right, BLOCK_N
    )
    length = _tiles_per_split(last_tile - first_tile + 1, MIN_TILES, SPLIT_LIMIT)
    tile_from = first_tile + split * length
    tile_to = tl.minimum(tile_from + length, last_tile + 1)
    if tile_from >= tile_to:
        return

    row = row_block * BLOCK_M + tl.arange(0, BLOCK_M)
    token = row // group
    row_ok = (token < rows_here) & (row < rows)
    row_lo, row_hi = visible_rows(token, rows_here, keys_here, window_left, window_right)
    head = kv_head * group + (row - token * group)
    q_base = q_ptr + q_batch.to(tl.int64) * q_stride_b
    q_offsets = (q_first + token).to(tl.int64) * q_stride_s + head * q_stride_h
    q_main = 0.0
    q_tail = 0.0
    if STREAM == 0:
        q_main = load_rows(q_base, q_offsets, row_ok, True, 0, MAIN, HEAD_DIM)
        if TAIL > 0:
            q_tail = load_rows(q_base, q_offsets, row_ok, True, MAIN, TAIL, HEAD_DIM)
    query = (q_base, q_offsets, row_ok, q_main, q_tail)
    k_first, v_first, pad = sequence_storage(
        k_ptr, v_ptr, base, pad, b, kv_head, k_stride_b, k_stride_s, k_stride_h, v_stride_b, v_stride_s,
        v_stride_h, table_ptr is not None,
    )  # fmt: skip
    cache = (
        k_first, v_first, pad, table_ptr, b.to(tl.int64) * table_stride, page_size, k_stride_b, k_stride_s,
        v_stride_b, v_stride_s,
    )  # fmt: skip
    scoring = (scale * descale_of(k_descale_ptr, k_descale_stride_b, k_descale_stride_h, b, kv_head), cap)
    # What every row that exists sees.
    common_lo = tl.maximum(keys_here - 1 - window_left, 0)
    common_hi = tl.maximum(tl.minimum(keys_here - rows_here + window_right + 1, keys_here), 0)
    span = (key_lo, key_hi, row_lo, row_hi, common_lo, common_hi)

    anchor_max = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
    share = tl.zeros([BLOCK_M], dtype=tl.float32)
    log2_t = 0.0
    if SKIP and (MODE != FOLLOW or MASS):
        log2_t = log2_threshold(threshold_ptr, threshold_stride, b)
        if sinks_ptr is not None:
            anchor_max = tl.load(sinks_ptr + head, mask=row_ok, other=float("-inf")) * LOG2_E
        # A split of anchors alone has nothing to decide.
        decides = (tl.maximum(tile_from, anchors_to + 1) < tl.minimum(tile_to, anchors_from)).to(tl.int32)
        left_to = tl.minimum(anchors_to, last_tile)
        right_from = tl.maximum(left_to + 1, anchors_from)
        anchors = (
            first_tile, (left_to - first_tile + 1) * decides, right_from,
            (last_tile - right_from + 1) * decides
        )  # fmt: skip
        anchor_max, anchor_sum, anchor_count = _score_anchors(
            anchors, anchor_max, tl.where(anchor_max > float("-inf"), 1.0, 0.0), query, cache, scoring, span,
            BUDGET, SOFTCAP, HEAD_DIM, MAIN, TAIL, STREAM, NARROW, BLOCK_M, BLOCK_N,
        )  # fmt: skip
        if BUDGET:
            rest = tl.maximum(row_hi - row_lo - anchor_count, 1)
            share = eps * anchor_sum / rest.to(tl.float32)

    cut = (anchor_max, log2_t, share, row_ok.to(tl.int32), anchors_to, anchors_from)
    owner64 = owner.to(tl.int64)
    votes = (votes_ptr, row_blocks, row_block)
    if votes_ptr is not None:
        votes = (votes_ptr + owner64 * key_tiles * row_blocks, row_blocks, row_block)
    kept = (kept_ptr, owner64 * key_tiles, key_tiles)
    row_max = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
    row_sum = tl.zeros([BLOCK_M], dtype=tl.float32)
    bound = tl.zeros([BLOCK_M], dtype=tl.float32)
    acc_main = tl.zeros([BLOCK_M, MAIN_V], dtype=tl.float32)
    acc_tail = 0.0
    if TAIL_V > 0:
        acc_tail = tl.zeros([BLOCK_M, TAIL_V], dtype=tl.float32)
    skipped = 0

    # Tiles whole_from .. whole_to - 1 are seen whole by every row.
    whole_from = tile_from
    if LEFT_EDGE:
        whole_from = tl.minimum(tl.maximum((common_lo + BLOCK_N - 1) // BLOCK_N, tile_from), tile_to)
        for tile in tl.range(tile_from, whole_from, num_stages=1, disable_licm=True):
            row_max, row_sum, bound, acc_main, acc_tail, gone = _visit(
                tile, (row_max, row_sum, bound, acc_main, acc_tail), query, cache, scoring, span, cut, votes,
                kept, True, SEVERAL_TOKENS, MODE, SKIP, BUDGET, MASS, SOFTCAP, HEAD_DIM, MAIN, TAIL,
                HEAD_DIM_V, MAIN_V, TAIL_V, STREAM, NARROW, V_IN_K, BLOCK_M, BLOCK_N, VOTE_BLOCKS,
            )  # fmt: skip
            skipped += gone
    whole_to = tl.minimum(tl.maximum(common_hi // BLOCK_N, whole_from), tile_to)
    for tile in range(whole_from, whole_to):
        row_max, row_sum, bound, acc_main, acc_tail, gone = _visit(
            tile, (row_max, row_sum, bound, acc_main, acc_tail), query, cache, scoring, span, cut, votes,
            kept, False, False, MODE, SKIP, BUDGET, MASS, SOFTCAP, HEAD_DIM, MAIN, TAIL, HEAD_DIM_V, MAIN_V,
            TAIL_V, STREAM, NARROW, V_IN_K, BLOCK_M, BLOCK_N, VOTE_BLOCKS,
        )  # fmt: skip
        skipped += gone
    for tile in tl.range(whole_to, tile_to, num_stages=1, disable_licm=True):
        row_max, row_sum, bound, acc_main, acc_tail, gone = _visit(
            tile, (row_max, row_sum, bound, acc_main, acc_tail), query, cache, scoring, span, cut, votes,
            kept, True, SEVERAL_TOKENS, MODE, SKIP, BUDGET, MASS, SOFTCAP, HEAD_DIM, MAIN, TAIL, HEAD_DIM_V,
            MAIN_V, TAIL_V, STREAM, NARROW, V_IN_K, BLOCK_M, BLOCK_N, VOTE_BLOCKS,
        )  # fmt: skip
        skipped += gone

    if MODE != WRITE:
        place = (owner64 * rows + row) * splits + split
        tl.store(part_max_ptr + place, row_max, mask=row_ok)
        tl.store(part_sum_ptr + place, row_sum, mask=row_ok)
        if MASS:
            tl.store(part_bound_ptr + place, bound, mask=row_ok)
            tl.store(part_base_ptr + place, anchor_max, mask=row_ok)
        store_rows(part_acc_ptr, place * HEAD_DIM_V, row_ok, acc_main, 0, MAIN_V, HEAD_DIM_V)
        if TAIL_V > 0:
            store_rows(part_acc_ptr, place * HEAD_DIM_V, row_ok, acc_tail, MAIN_V, TAIL_V, HEAD_DIM_V)
        if skipped_ptr is not None:
            first_block = row_block == 0
            tl.atomic_add(skipped_ptr + owner64, skipped.to(tl.int64), mask=first_block)
            tl.atomic_add(visited_ptr + owner64, (tile_to - tile_from).to(tl.int64), mask=first_block)


@triton.jit(do_not_specialize=LENGTHS)
def combine_kernel(
    part_acc_ptr,
    part_max_ptr,
    part_sum_ptr,
    part_bound_ptr,
    part_base_ptr,
    out_ptr,
    lse_ptr,
    mass_ptr,
    sinks_ptr,
    cu_q_ptr,
    cu_k_ptr,
    seqused_ptr,
    leftpad_ptr,
    v_descale_ptr,
    v_descale_stride_b,
    v_descale_stride_h,
    out_stride_b,
    out_stride_s,
    out_stride_h,
    lse_stride_b,
    lse_stride_h,
    seqlen_q,
    seqlen_k,
    num_heads,
    group,
    splits,
    rows,
    window_left,
    window_right,
    PAGED: tl.constexpr,
    HEAD_DIM_V: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    MIN_TILES: tl.constexpr,
    SPLIT_LIMIT: tl.constexpr,
):
    """Merge the splits of one row in ascending order; the sink and the scale of v enter here, once."""
    program = tl.program_id(0)
    owner = program // rows
    row = program - owner * rows
    num_kv_heads = num_heads // group
    b = owner // num_kv_heads
    kv_head = owner - b * num_kv_heads
    token = row // group
    head = (kv_head * group + row - token * group).to(tl.int64)
    q_first, q_batch, rows_here = _query_extent(cu_q_ptr, b, seqlen_q)
    if token >= rows_here:
        return
    _, _, keys_here = key_extent(cu_k_ptr, seqused_ptr, leftpad_ptr, b, seqlen_k, PAGED)
    _, _, first_tile, last_tile, _, _ = _visited(rows_here, keys_here, window_left, window_right, BLOCK_N)
    tiles = last_tile - first_tile + 1
    length = _tiles_per_split(tiles, MIN_TILES, SPLIT_LIMIT)
    count = (tiles + length - 1) // length

    column = tl.arange(0, BLOCK_D)
    inside = column < HEAD_DIM_V
    place = program.to(tl.int64) * splits
    sink = float("-inf")
    if sinks_ptr is not None:
        sink = tl.load(sinks_ptr + head)
    top = sink * LOG2_E
    total = tl.where(top > float("-inf"), 1.0, 0.0)
    bound = 0.0
    acc = tl.zeros([BLOCK_D], dtype=tl.float32)
    for split in range(0, count):
        split_max = tl.load(part_max_ptr + place + split)
        new_top = max_or_nan(top, split_max)
        base = finite_base(new_top)
        rescale = tl.exp2(top - base)
        weight = tl.exp2(split_max - base)
        total = total * rescale + tl.load(part_sum_ptr + place + split) * weight
        part = tl.load(part_acc_ptr + (place + split) * HEAD_DIM_V + column, mask=inside, other=0.0)
        acc = acc * rescale + part * weight
        if part_bound_ptr is not None:
            part_bound = tl.load(part_bound_ptr + place + split)
            added = part_bound * tl.exp2(tl.load(part_base_ptr + place + split) - base)
            bound = bound * rescale + tl.where(part_bound == 0.0, 0.0, added)
        top = new_top

    token_row = (q_first + token).to(tl.int64)
    batch_row = q_batch.to(tl.int64)
    out_place = out_ptr + batch_row * out_stride_b + token_row * out_stride_s + head * out_stride_h
    norm = tl.where(total == 0.0, 1.0, total)
    v_scale = descale_of(v_descale_ptr, v_descale_stride_b, v_descale_stride_h, b, kv_head)
    tl.store(out_place + column, (acc / norm * v_scale).to(out_ptr.dtype.element_ty), mask=inside)
    lse_place = batch_row * lse_stride_b + head * lse_stride_h + token_row
    tl.store(lse_ptr + lse_place, natural_lse(top, total, sink * LOG2_E, sink))
    if mass_ptr is not None:
        tl.store(mass_ptr + lse_place, mass_share(bound, total))


def plan(problem: AttentionProblem, outputs: Outputs, arch: tuple[int, int]) -> list[Launch]:
    """The kernel launches of a problem, in order; empty when there is nothing to compute.

    Args:
        problem: a checked call.
        outputs: what the kernels fill.
        arch: compute capability to choose the configuration for.
    """
    block_n = DECODE_TILE.key
    owners = problem.batch_size * problem.num_kv_heads
    rows = problem.num_heads // problem.num_kv_heads * problem.max_seqlen_q
    if owners * rows == 0 or problem.q.numel() == 0:
        return []
    config = decode_config(problem, arch, rows)
    key_tiles = num_tiles(problem.max_seqlen_k, block_n)
    splits = max(1, min(MAX_SPLITS, num_tiles(key_tiles, MIN_SPLIT_TILES)))
    row_blocks = num_tiles(rows, config.block_m)
    rule = flags(problem)
    follow = rule["SKIP"] and row_blocks > 1

    arguments = problem_arguments(problem, outputs)
    device, shape = problem.q.device, (owners, rows, splits)
    arguments |= {
        "part_acc_ptr": torch.empty(*shape, problem.head_dim_v, dtype=torch.float32, device=device),
        "part_max_ptr": torch.empty(shape, dtype=torch.float32, device=device),
        "part_sum_ptr": torch.empty(shape, dtype=torch.float32, device=device),
        "part_bound_ptr": torch.empty(shape, dtype=torch.float32, device=device) if rule["MASS"] else None,
        "part_base_ptr": torch.empty(shape, dtype=torch.float32, device=device) if rule["MASS"] else None,
        "votes_ptr": torch.empty(owners, key_tiles, row_blocks, dtype=torch.int8, device=device)
        if follow
        else None,
        "splits": splits,
        "rows": rows,
        "row_blocks": row_blocks,
        "key_tiles": key_tiles,
    }
    split_rule = {"BLOCK_N": block_n, "MIN_TILES": MIN_SPLIT_TILES, "SPLIT_LIMIT": MAX_SPLITS}
    constants = rule | dimensions(problem) | split_rule
    constants |= {
        "SEVERAL_TOKENS": problem.max_seqlen_q > 1,
        "LEFT_EDGE": problem.window_size[0] >= 0,
        "STREAM": config.stream,
        "NARROW": narrow(problem, block_n),
        "V_IN_K": config.stream == 0 and _v_is_main_part_of_k(problem, constants["MAIN"]),
        "BLOCK_M": config.block_m,
        "VOTE_BLOCKS": triton.next_power_of_2(row_blocks) if follow else 1,
    }
    modes = (_WRITE, _FOLLOW) if follow else (_VOTE,)
    programs = owners * row_blocks * splits
    launches = [
        Launch(decode_kernel, programs, arguments, constants | {"MODE": mode}, config.options())
        for mode in modes
    ]
    merge = split_rule | {
        "PAGED": problem.block_table is not None,
        "HEAD_DIM_V": problem.head_dim_v,
        "BLOCK_D": triton.next_power_of_2(problem.head_dim_v),
    }
    launches.append(
        Launch(combine_kernel, owners * rows, arguments, merge, combine_config(problem).options())
    )
    return launches


def _v_is_main_part_of_k(problem: AttentionProblem, main: int) -> bool:
    k, v = problem.k, problem.v
    return v.data_ptr() == k.data_ptr() and v.stride() == k.stride() and problem.head_dim_v == main


def run(problem: AttentionProblem) -> AttentionOutput:
    """Attention of a checked problem by the decode rule; no host sync, safe inside a CUDA graph."""
    outputs = allocate(problem, DECODE_TILE)
    start(plan(problem, outputs, capability(problem.q.device)), problem.q.device)
    return outputs.result()
