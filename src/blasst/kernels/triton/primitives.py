"""Device functions that prefill and decode share: lengths, addresses, scores, the vote, the mass bound, P.V.

Units: scores and maxima are in log2 units (natural-log score times log2(e)), so one exp2 per element is
enough; lse leaves in natural-log units. The kernels are launched without floating-point contraction: only
then do builds that differ in constexpr options (dense, skipping, counting) round every value alike.
"""

from __future__ import annotations

import triton
import triton.language as tl

#: Whether the functions below run in Triton's CPU interpreter (fixed when this module is imported).
INTERPRETED: tl.constexpr = tl.constexpr(bool(triton.knobs.runtime.interpret))

LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)
LN_2: tl.constexpr = tl.constexpr(0.6931471805599453)


@triton.jit
def _max_or_nan(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def max_or_nan(a, b):
    """Elementwise maximum that keeps NaN (tl.maximum drops it by default)."""
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def row_maximum(s):
    """Maximum of each row, NaN if the row holds one (tl.max drops it, and a vote must see it).  # [M, N]"""
    if INTERPRETED:  # the interpreter would run a custom reduction element by element
        has_nan = tl.sum((s != s).to(tl.int32), axis=1) > 0
        top = tl.where(has_nan, float("nan"), tl.max(s, axis=1))
    else:
        top = tl.reduce(s, 1, _max_or_nan)
    return top


@triton.jit
def finite_base(row_max):
    """What to subtract in an exponent: row_max, and 0 for a row that has seen nothing (-inf - -inf = NaN)."""
    return tl.where(row_max == float("-inf"), 0.0, row_max)


@triton.jit
def log2_threshold(threshold_ptr, threshold_stride, b):
    """log2 of the sequence's threshold: above 1 acts as 1, NaN and negative as 0 (-inf)."""
    t = tl.load(threshold_ptr + b.to(tl.int64) * threshold_stride)
    t = tl.where(t > 0.0, t, 0.0)
    return tl.where(t >= 1.0, 0.0, tl.log2(t))


@triton.jit
def key_extent(cu_k_ptr, seqused_ptr, leftpad_ptr, b, seqlen_k, PAGED: tl.constexpr):
    """(first row of the sequence in packed k, first slot in use, number of keys) of a sequence."""
    base = b * 0
    used = seqlen_k
    if cu_k_ptr is not None:
        begin = tl.load(cu_k_ptr + b)
        used = tl.load(cu_k_ptr + b + 1) - begin
        if not PAGED:
            base = begin
    if seqused_ptr is not None:
        used = tl.load(seqused_ptr + b)
    pad = b * 0
    if leftpad_ptr is not None:
        pad = tl.load(leftpad_ptr + b)
    return base, pad, tl.maximum(used - pad, 0)


@triton.jit
def sequence_storage(
    k_ptr, v_ptr, base, pad, b, kv_head, ks_b, ks_s, ks_h, vs_b, vs_s, vs_h, PAGED: tl.constexpr
):
    """(k pointer, v pointer, first slot) of one sequence and KV head.

    Without pages the pointers are at the first key and the slot is 0.
    """
    k_ptr += kv_head * ks_h
    v_ptr += kv_head * vs_h
    if not PAGED:
        row = (base + pad).to(tl.int64)
        k_ptr += b.to(tl.int64) * ks_b + row * ks_s
        v_ptr += b.to(tl.int64) * vs_b + row * vs_s
        pad = pad * 0
    return k_ptr, v_ptr, pad


@triton.jit
def descale_of(descale_ptr, stride_b, stride_h, b, kv_head):
    """What a sequence's keys or values of a KV head are to be multiplied with."""
    scale = 1.0
    if descale_ptr is not None:
        scale = tl.load(descale_ptr + b.to(tl.int64) * stride_b + kv_head.to(tl.int64) * stride_h)
    return scale


@triton.jit
def widened(x):
    """fp8 as fp16, which holds each of its values; anything else as it is."""
    if x.dtype == tl.float8e4nv:
        x = x.to(tl.float16)
        if INTERPRETED:  # the interpreter reads NaN as 480, beyond the largest fp8 value
            x = tl.where(tl.abs(x) > 448.0, float("nan"), x)
    return x


@triton.jit
def key_places(ptr, stride_b, stride_s, cache, start, ok, PART: tl.constexpr, NARROW: tl.constexpr):
    """Pointer and offsets from it of PART keys (or values) from position `start`.

    Entries of the block table past need are not read.

    Args:
        ptr: of k or v, from `cache`.
        stride_b: its stride from page to page.
        stride_s: its stride from slot to slot.
        cache: see `part_scores`.
        ok: (PART,) which of the keys are wanted.
        NARROW: the keys lie at one stride (no pages, or pages that hold whole parts) and within 2**31
            elements, so that the offsets inside the part fit int32.
    """
    _, _, pad, table_ptr, table_row, page_size, _, _, _, _ = cache
    if NARROW:
        offsets = tl.arange(0, PART) * stride_s
        slot = pad + start
        if table_ptr is not None:
            wanted = tl.max(ok.to(tl.int32), axis=0) != 0
            page = tl.load(table_ptr + table_row + slot // page_size, mask=wanted, other=0)
            place = ptr + page.to(tl.int64) * stride_b + (slot % page_size).to(tl.int64) * stride_s
        else:
            place = ptr + slot.to(tl.int64) * stride_s
    else:
        place = ptr
        slot = pad + start + tl.arange(0, PART)
        if table_ptr is not None:
            page = tl.load(table_ptr + table_row + slot // page_size, mask=ok, other=0)
            offsets = page.to(tl.int64) * stride_b + (slot % page_size).to(tl.int64) * stride_s
        else:
            offsets = slot.to(tl.int64) * stride_s
    return place, offsets


@triton.jit
def load_rows(
    ptr, offsets, ok, CHECK: tl.constexpr, FIRST: tl.constexpr, WIDTH: tl.constexpr, LIMIT: tl.constexpr
):
    """Columns FIRST .. FIRST + WIDTH of rows at offsets; 0 beyond LIMIT (may be NaN there) and where not ok.

    fp8 becomes fp16.

    CHECK = False: every row exists. Without a row mask the load pipeline has nothing to carry along.
    """
    column = FIRST + tl.arange(0, WIDTH)
    place = ptr + offsets[:, None] + column[None, :]
    if FIRST + WIDTH <= LIMIT:
        if CHECK:
            rows = tl.load(place, mask=ok[:, None], other=0.0)
        else:
            rows = tl.load(place)
    else:
        inside = (column < LIMIT)[None, :]
        if CHECK:
            inside = ok[:, None] & inside
        rows = tl.load(place, mask=inside, other=0.0)
    return widened(rows)


@triton.jit
def store_rows(ptr, offsets, ok, value, FIRST: tl.constexpr, WIDTH: tl.constexpr, LIMIT: tl.constexpr):
    """Store columns FIRST .. FIRST + WIDTH of rows at offsets where ok and below LIMIT."""
    column = FIRST + tl.arange(0, WIDTH)
    place = ptr + offsets[:, None] + column[None, :]
    tl.store(place, value.to(ptr.dtype.element_ty), mask=ok[:, None] & (column < LIMIT)[None, :])


@triton.jit
def _tanh(x):
    """tanh within 2 units in the last place everywhere: its series near 0, exp2 beyond."""
    e = tl.exp2(-2.0 * LOG2_E * tl.abs(x))
    far = 1.0 - 2.0 * (e / (1.0 + e))
    far = tl.where(x < 0.0, -far, far)
    x2 = x * x
    series = -1382.0 / 155925 + x2 * (21844.0 / 6081075 + x2 * (-929569.0 / 638512875))
    series = -1.0 / 3 + x2 * (2.0 / 15 + x2 * (-17.0 / 315 + x2 * (62.0 / 2835 + x2 * series)))
    return tl.where(tl.abs(x) < 0.5, x + x * (x2 * series), far)


@triton.jit
def scale_and_cap(qk, scale, cap, SOFTCAP: tl.constexpr):
    """Scores in log2 units.

    Args:
        scale: softmax_scale * log2(e), or softmax_scale / softcap with SOFTCAP.
        cap: softcap * log2(e), unused without SOFTCAP.
    """
    if SOFTCAP:
        return _tanh(qk * scale) * cap
    return qk * scale


@triton.jit
def part_scores(
    query,
    cache,
    scoring,
    span,
    start,
    PART: tl.constexpr,
    MASKED: tl.constexpr,
    SOFTCAP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    MAIN: tl.constexpr,
    TAIL: tl.constexpr,
    STREAM: tl.constexpr,
    NARROW: tl.constexpr,
):
    """Scores of PART keys from position `start`, and what is needed to fetch their values.

    STREAM = 0: q is at hand as a main part and, if TAIL, a tail of the head dimension, and k is read
    likewise. Otherwise both are read in chunks of STREAM columns: fewer registers and less shared memory.

    Args:
        query: (q_ptr, row offsets, row exists, main part, tail part).
        cache: (k pointer, v pointer, first slot, see `sequence_storage`; block table or None, offset of its
            row, page size; strides of k (page, slot), strides of v).
        scoring: (scale, cap) of `scale_and_cap`, the scale with that of the keys.
        span: (first and last + 1 key that any row sees, the same per row, and of what all rows see).

    Returns:
        Scores [M, PART] (log2 units, invisible = -inf with MASKED), and what `absorb` needs to find the
        values: (start, which keys exist, main part of k, whether some row misses one of the keys).
    """
    q_ptr, q_offsets, q_ok, q_main, q_tail = query
    scale, cap = scoring
    key_lo, key_hi, row_lo, row_hi, common_lo, common_hi = span
    key = start + tl.arange(0, PART)
    ok = (key >= key_lo) & (key < key_hi)
    k_place, k_offsets = key_places(cache[0], cache[6], cache[7], cache, start, ok, PART, NARROW)
    if STREAM == 0:
        k_main = load_rows(k_place, k_offsets, ok, MASKED, 0, MAIN, HEAD_DIM)
        k_main = k_main.to(q_main.dtype)
        qk = tl.dot(q_main, tl.trans(k_main), input_precision="ieee")
        if TAIL > 0:
            k_tail = load_rows(k_place, k_offsets, ok, MASKED, MAIN, TAIL, HEAD_DIM)
            qk = tl.dot(q_tail, tl.trans(k_tail.to(q_tail.dtype)), qk, input_precision="ieee")
    else:
        k_main = 0.0
        qk = tl.zeros([q_offsets.shape[0], PART], dtype=tl.float32)
        for first in range(0, HEAD_DIM, STREAM):
            column = first + tl.arange(0, STREAM)
            inside = (column < HEAD_DIM)[None, :]
            q = tl.load(q_ptr + q_offsets[:, None] + column[None, :], mask=q_ok[:, None] & inside, other=0.0)
            inside = inside & ok[:, None] if MASKED else inside
            k = tl.load(k_place + k_offsets[:, None] + column[None, :], mask=inside, other=0.0)
            qk = tl.dot(q, tl.trans(widened(k).to(q.dtype)), qk, input_precision="ieee")
    s = scale_and_cap(qk, scale, cap, SOFTCAP)
    if MASKED:
        s = hide(s, row_lo, row_hi, key)
    ragged = (tl.maximum(start, key_lo) < common_lo) | (tl.minimum(start + PART, key_hi) > common_hi)
    return s, (start, ok, k_main, ragged)


@triton.jit
def visible_rows(row, seqlen_q, seqlen_k, window_left, window_right):
    """Visible key range [lo, hi) of rows; hi <= lo for rows past the end and rows that see nothing."""
    position = row + (seqlen_k - seqlen_q)
    lo = tl.maximum(position - window_left, 0)
    hi = tl.minimum(position + window_right + 1, seqlen_k)
    return lo, tl.where(row < seqlen_q, hi, 0)


@triton.jit
def hide(s, row_lo, row_hi, key):
    """-inf where a key is outside its row's visible range [row_lo, row_hi).  # [M, N]"""
    seen = (key[None, :] >= row_lo[:, None]) & (key[None, :] < row_hi[:, None])
    return tl.where(seen, s, float("-inf"))


@triton.jit
def agrees(tile_max, compare, log2_t):
    """Which rows agree to skip: strictly below the cut, or nothing visible. NaN on either side disagrees."""
    return (tile_max < compare + log2_t) | (tile_max == float("-inf"))


@triton.jit
def all_of(agree):
    """Whether every row agrees, as a scalar."""
    return tl.min(agree.to(tl.int32), axis=0) != 0


@triton.jit
def group_bound(s, base, M: tl.constexpr, N: tl.constexpr):
    """Bound of a tile's mass and its visible keys per row: sum over groups of n * exp2(group_max - base).

    Key c belongs to group (c // 32) * 4 + (c % 8) // 2 (8 keys), so its axes are the third and the last.
    """
    parts = tl.reshape(s, [M, N // 32, 4, 4, 2])
    seen = (parts > float("-inf")) | (parts != parts)
    count = tl.sum(tl.sum(seen.to(tl.int32), axis=4), axis=2)  # [M, N // 32, 4]
    group_max = tl.max(tl.max(parts, axis=4), axis=2)
    term = tl.where(count > 0, count.to(tl.float32) * tl.exp2(group_max - base[:, None, None]), 0.0)
    return tl.sum(tl.sum(term, axis=2), axis=1), tl.sum(tl.sum(count, axis=2), axis=1)


@triton.jit
def odd_keys(v_place, v_offsets, ok, columns, HEAD_DIM_V: tl.constexpr, PART: tl.constexpr):
    """1 for each key whose value holds an entry that is not finite, else 0.  # [PART]

    Args:
        columns: how many to look at, HEAD_DIM_V or none; a runtime value also keeps the loop from unrolling.
    """
    odd = tl.zeros([PART], dtype=tl.int32)
    for first in range(0, columns, 16):
        column = first + tl.arange(0, 16)
        inside = ok[:, None] & (column < HEAD_DIM_V)[None, :]
        v = widened(tl.load(v_place + v_offsets[:, None] + column[None, :], mask=inside, other=0.0))
        odd = tl.maximum(odd, tl.max(((v - v) != 0).to(tl.int32), axis=1))
    return odd


@triton.jit
def add_odd_keys(
    acc,
    p,
    s,
    odd,
    v_place,
    v_offsets,
    FIRST: tl.constexpr,
    WIDTH: tl.constexpr,
    LIMIT: tl.constexpr,
    PART: tl.constexpr,
):
    """Add p * v of the odd keys one by one, each only to the rows that see it."""
    index = tl.arange(0, PART)
    column = FIRST + tl.arange(0, WIDTH)
    for c in range(0, PART * tl.max(odd, axis=0)):
        here = index == c
        if tl.max(tl.where(here, odd, 0), axis=0) != 0:
            seen = ((s > float("-inf")) | (s != s)).to(tl.int32)
            sees = tl.max(tl.where(here[None, :], seen, 0), axis=1)
            weight = tl.sum(tl.where(here[None, :], p, 0.0), axis=1)
            offset = tl.sum(tl.where(here, v_offsets, 0), axis=0)
            v = widened(tl.load(v_place + offset + column, mask=column < LIMIT, other=0.0)).to(tl.float32)
            acc += tl.where(sees[:, None] != 0, weight[:, None] * v[None, :], 0.0)
    return acc


@triton.jit
def absorb(
    state,
    s,
    tile_max,
    keys,
    cache,
    FIRST_PART: tl.constexpr,
    MASKED: tl.constexpr,
    GUARD: tl.constexpr,
    MASS: tl.constexpr,
    V_IN_K: tl.constexpr,
    HEAD_DIM_V: tl.constexpr,
    MAIN_V: tl.constexpr,
    TAIL_V: tl.constexpr,
    NARROW: tl.constexpr,
    PART: tl.constexpr,
):
    """The online-softmax update of kept keys.

    Args:
        state: (row_max, row_sum, bound, acc main part, acc tail part).
        tile_max: row maxima of everything that is absorbed until the next FIRST_PART.
        keys: see `part_scores`; the places of the values are found only now, which saves registers.
        cache: see `part_scores`.
        FIRST_PART: whether row_max may move (else tile_max is already in it).
        MASKED: some of the keys may not exist.
        GUARD: rows may miss some of the keys; a value that is not finite then reaches only the rows that see
            it (a plain product turns 0 x NaN of an invisible key into NaN for every row).
        V_IN_K: v is the main part of k (MLA), nothing is read.
    """
    row_max, row_sum, bound, acc_main, acc_tail = state
    start, ok, k_main, ragged = keys
    v_place, v_offsets = key_places(cache[1], cache[8], cache[9], cache, start, ok, PART, NARROW)
    if FIRST_PART:
        new_max = max_or_nan(row_max, tile_max)
        rescale = tl.exp2(row_max - finite_base(new_max))
        row_max = new_max
        row_sum = row_sum * rescale
        acc_main = acc_main * rescale[:, None]
        if TAIL_V > 0:
            acc_tail = acc_tail * rescale[:, None]
        if MASS:
            bound = bound * rescale
    p = tl.exp2(s - finite_base(row_max)[:, None])
    row_sum += tl.sum(p, axis=1)
    if GUARD:
        odd = odd_keys(v_place, v_offsets, ok, HEAD_DIM_V * ragged.to(tl.int32), HEAD_DIM_V, PART)
        acc_main = add_odd_keys(acc_main, p, s, odd, v_place, v_offsets, 0, MAIN_V, HEAD_DIM_V, PART)
        if TAIL_V > 0:
            acc_tail = add_odd_keys(acc_tail, p, s, odd, v_place, v_offsets, MAIN_V, TAIL_V, HEAD_DIM_V, PART)
        ok = ok & (odd == 0)
    if V_IN_K and not GUARD:
        v_main = k_main
    else:
        v_main = load_rows(v_place, v_offsets, ok, MASKED, 0, MAIN_V, HEAD_DIM_V)
    acc_main = tl.dot(p.to(v_main.dtype), v_main, acc_main, input_precision="ieee")
    if TAIL_V > 0:
        v_tail = load_rows(v_place, v_offsets, ok, MASKED, MAIN_V, TAIL_V, HEAD_DIM_V)
        acc_tail = tl.dot(p.to(v_tail.dtype), v_tail, acc_tail, input_precision="ieee")
    return row_max, row_sum, bound, acc_main, acc_tail


@triton.jit
def mass_share(bound, row_sum):
    """bound / (bound + row_sum), 0 where nothing was left out."""
    return tl.where(bound == 0.0, 0.0, bound / (bound + row_sum))


@triton.jit
def natural_lse(row_max, row_sum, sink_log2, sink):
    """Natural-log lse; exactly the sink where nothing else was seen, -inf where there is nothing at all."""
    lse = row_max * LN_2 + tl.log2(row_sum) * LN_2
    lse = tl.where(row_sum == 0.0, float("-inf"), lse)
    return tl.where((row_max == sink_log2) & (row_sum == 1.0), sink, lse)
