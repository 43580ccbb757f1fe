"""The Hopper prefill kernel on its GPU, against the reference in float64 on the same GPU."""

from __future__ import annotations

import math

import pytest
import torch

from blasst import blasst_attn_func, blasst_attn_varlen_func, blasst_attn_with_kvcache
from blasst.core.reference import reference_attention
from blasst.testing import assert_finite, assert_matches_reference, heavy_tailed_inputs, pages_from

EVERYTHING = {
    "return_lse": True,
    "return_counts": True,
    "return_mass_bound": True,
    "return_kept_tiles": True,
    "impl": "hopper",
}
#: Nats by which float32 and float64 scores of these inputs may differ.
NEAR = 2e-3
HALF, BFLOAT = torch.float16, torch.bfloat16

#: dtype, head dim, query heads, KV heads.
SHAPES = {
    "bf16-64": (BFLOAT, 64, 6, 2),
    "fp16-64": (HALF, 64, 6, 1),
    "bf16-96": (BFLOAT, 96, 4, 4),
    "fp16-96": (HALF, 96, 8, 2),
    "bf16-128": (BFLOAT, 128, 8, 2),
    "fp16-128": (HALF, 128, 7, 1),
}
shapes = pytest.mark.parametrize("shape", SHAPES)


def inputs_of(shape, batch=2, rows=300, keys=1500, **keywords):
    dtype, dim, heads, kv_heads = SHAPES[shape]
    return heavy_tailed_inputs(
        batch, rows, keys, heads, kv_heads, dim, dtype=dtype, device="cuda", **({"block": 128} | keywords)
    )


def compare(inputs, threshold, near=0.0, **options):
    """A call against the reference; returns its output."""
    options = {"causal": True} | options
    got = blasst_attn_func(*inputs, threshold=threshold, **options, **EVERYTHING)
    truth = reference_attention(*inputs, threshold=threshold, **options)
    yardstick = reference_attention(
        *inputs, threshold=threshold, kept_tiles=truth.kept_tiles, dtype=inputs[0].dtype, **options
    )
    assert_matches_reference(got._replace(mass_bound=None), truth, yardstick, threshold, near)
    if torch.equal(got.kept_tiles, truth.kept_tiles):
        # where a row sees one key of a group the bound is that key's weight, with the rounding of scores up
        # to 40 nats below the maximum: 8 steps of the accumulation, 2**-23 of 40 each
        assert bool((got.mass_bound.double() * (1 + 5e-5) + 1e-30 >= truth.skipped_mass).all())
    return got


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@shapes
def test_kernel_equals_the_reference(shape, causal):
    got = compare(inputs_of(shape, seed=1), 0.05, causal=causal)
    assert int(got.counts.skipped.sum()) > 0
    near_the_cut = inputs_of(shape, seed=2, noise=2.0, drop=(1.0, 12.0))
    for threshold in (None, 0.0, 0.1, 1.0):
        compare(near_the_cut, threshold, NEAR, causal=causal)


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize("shape", ["fp16-64", "fp16-96", "bf16-128"])
def test_every_length_of_queries_and_keys(shape, causal):
    lengths = [(1, 1), (1, 300), (63, 64), (64, 63), (65, 129), (127, 128), (128, 127), (129, 1000), (2, 5)]
    lengths += [(300, 65), (1000, 300), (1000, 1000), (300, 5), (8, 4), (64, 256), (128, 128), (192, 64)]
    skipped = 0
    for rows, keys in lengths:
        inputs = inputs_of(shape, 1, rows, keys, seed=rows + keys)
        compare(inputs, None, causal=causal)
        got = compare(inputs, 0.05, causal=causal)
        skipped += int(got.counts.skipped.sum())
        blind = rows - keys if causal and rows > keys else 0
        assert not bool(got.out[:, :blind].any())
        assert bool((got.lse[..., :blind] == -math.inf).all())
        assert_finite(got.lse[..., blind:], "lse")
    assert skipped > 0


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@shapes
def test_threshold_zero_and_a_second_run_are_bit_identical(shape, causal):
    for rows, keys in ((300, 1500), (200, 264), (500, 333)):
        inputs = inputs_of(shape, 2, rows, keys, seed=3, noise=3.0)
        dense = blasst_attn_func(*inputs, causal=causal, return_lse=True, impl="hopper")
        zero = blasst_attn_func(*inputs, threshold=0.0, causal=causal, return_lse=True, impl="hopper")
        measured = blasst_attn_func(*inputs, threshold=0.0, causal=causal, **EVERYTHING)
        for other in (zero, measured):
            assert torch.equal(other.out, dense.out)
            assert torch.equal(other.lse, dense.lse)
        assert int(measured.counts.skipped.sum()) == 0
        sparse = [blasst_attn_func(*inputs, threshold=0.05, causal=causal, **EVERYTHING) for _ in range(2)]
        plain = blasst_attn_func(*inputs, threshold=0.05, causal=causal, return_lse=True, impl="hopper")
        for other in (sparse[1], plain):
            assert torch.equal(other.out, sparse[0].out)
            assert torch.equal(other.lse, sparse[0].lse)
        assert torch.equal(sparse[1].kept_tiles, sparse[0].kept_tiles)


@pytest.mark.parametrize(
    "options",
    [
        {"window_size": (300, 0)},
        {"window_size": (10, 0)},
        {"window_size": (100, 50), "causal": False},
        {"window_size": (-1, 70), "causal": False},
        {"window_size": (200, -1), "causal": False},
        {"softcap": 20.0},
        {"sinks": [-2.0, 6.0]},
        {"sinks": [-math.inf, 3.0]},
        {"softmax_scale": 0.03, "causal": False},
    ],
    ids=str,
)
@pytest.mark.parametrize("shape", ["fp16-64", "bf16-96", "bf16-128"])
def test_masks_softcap_sinks_and_scale(shape, options):
    heads = SHAPES[shape][2]
    options = dict(options)
    if "sinks" in options:
        low, high = options["sinks"]
        options["sinks"] = torch.linspace(max(low, -2.0), high, heads, device="cuda")
        options["sinks"][0] = low
    for rows, keys in ((333, 1111), (333, 200)):
        inputs = inputs_of(shape, 1, rows, keys, seed=4)
        for threshold in (None, 0.0, 0.01):
            compare(inputs, threshold, NEAR, **options)


def test_rows_that_see_only_the_sink():
    inputs = inputs_of("bf16-128", 1, 300, 100, seed=5)
    sinks = torch.linspace(-3, 20, 8, device="cuda")
    got = compare(inputs, 0.05, NEAR, sinks=sinks)
    assert not bool(got.out[:, :200].any())
    assert torch.equal(got.lse[0, :, :200], sinks[:, None].expand(-1, 200))


@shapes
def test_all_options_at_once(shape):
    inputs = inputs_of(shape, seed=6)
    sinks = torch.linspace(-2, 4, inputs.q.shape[2], device="cuda")
    options = {"window_size": (1100, 0), "softcap": 20.0, "sinks": sinks, "max_skipped_mass": 0.05}
    got = blasst_attn_func(*inputs, threshold=1.0, causal=True, **options, **EVERYTHING)
    truth = reference_attention(*inputs, threshold=1.0, causal=True, **options)
    assert int((got.kept_tiles != truth.kept_tiles).sum()) <= 2  # a budget decision near its own cut
    assert int(got.counts.skipped.sum()) > 0


@pytest.mark.parametrize("shape", ["bf16-64", "fp16-96", "bf16-128"])
def test_error_budget_and_mass_bound_hold_for_every_row(shape):
    inputs = inputs_of(shape, 2, 200, 3000, seed=7, drop=(2.0, 12.0), noise=1.0)
    free = blasst_attn_func(*inputs, threshold=1.0, **EVERYTHING)
    followed = reference_attention(*inputs, threshold=1.0, kept_tiles=free.kept_tiles)
    assert bool((free.mass_bound.double() * (1 + 1e-5) + 1e-30 >= followed.skipped_mass).all())
    assert float(followed.skipped_mass.max()) > 0.05
    for eps in (0.2, 0.05):
        got = blasst_attn_func(*inputs, threshold=1.0, max_skipped_mass=eps, **EVERYTHING)
        assert 0 < int(got.counts.skipped.sum()) < int(free.counts.skipped.sum())
        followed = reference_attention(*inputs, threshold=1.0, kept_tiles=got.kept_tiles)
        assert float(followed.skipped_mass.max()) <= eps / (1 + eps) * (1 + 1e-5)
        assert bool((got.mass_bound.double() * (1 + 1e-5) + 1e-30 >= followed.skipped_mass).all())


PATTERNS = {
    "none": lambda tile: True,
    "all but the first": lambda tile: tile == 0,
    "alternating": lambda tile: tile % 2 == 0,
    "the others": lambda tile: tile == 0 or tile % 2 == 1,
}


@pytest.mark.parametrize("lower", PATTERNS)
@pytest.mark.parametrize("upper", PATTERNS)
@pytest.mark.parametrize("shape", ["fp16-64", "bf16-128"])
def test_each_half_of_a_block_skips_its_own_tiles(shape, upper, lower):
    dtype, dim = SHAPES[shape][:2]
    tiles, rows = 9, 384
    q, k, v = inputs_of(shape, 1, rows, tiles * 128, seed=8, hot_fraction=1.0)
    level = dim**0.25
    half = torch.arange(rows, device="cuda") // 64 % 2
    for channel, pattern in enumerate((PATTERNS[upper], PATTERNS[lower])):
        hot = torch.tensor([pattern(tile) for tile in range(tiles)], device="cuda")
        # rows of this half read their level, 0 or -30 nats, in a channel of their own
        q[..., channel] = torch.where(half == channel, level, 0.0).to(dtype)[None, :, None]
        k[..., channel] = torch.where(hot, 0.0, -30.0 * level).to(dtype).repeat_interleave(128)[None, :, None]
    got = compare((q, k, v), 0.05, causal=False)
    for channel, pattern in enumerate((PATTERNS[upper], PATTERNS[lower])):
        want = torch.tensor([pattern(tile) for tile in range(tiles)], device="cuda")
        assert bool((got.kept_tiles[0, :, channel::2] == want).all())


def test_thresholds_per_sequence_are_read_on_the_device():
    inputs = inputs_of("bf16-128", batch=5, seed=9, noise=2.0, drop=(1.0, 12.0))
    raw = torch.tensor([0.05, 7.0, math.nan, -1.0, 0.0], device="cuda")
    got = blasst_attn_func(*inputs, threshold=raw, causal=True, **EVERYTHING)
    for i, value in enumerate((0.05, 1.0, 0.0, 0.0, 0.0)):
        one = blasst_attn_func(*(x[i : i + 1] for x in inputs), threshold=value, causal=True, **EVERYTHING)
        assert torch.equal(got.out[i], one.out[0])
        assert torch.equal(got.kept_tiles[i], one.kept_tiles[0])
        assert (int(one.counts.skipped.sum()) > 0) == (value > 0)
    shared = torch.tensor(0.05, device="cuda")  # one value for all: stride 0
    same = blasst_attn_func(*inputs, threshold=shared, causal=True, **EVERYTHING)
    assert torch.equal(same.out[0], got.out[0])


def test_strided_inputs_equal_their_contiguous_copies():
    plain = inputs_of("bf16-128", seed=10)
    want = blasst_attn_func(*plain, threshold=0.05, causal=True, **EVERYTHING)

    def strided(x, how):
        if how == "transposed":
            return x.transpose(1, 2).contiguous().transpose(1, 2)
        wide = x.new_full((x.shape[0], 2 * x.shape[1], x.shape[2] + 3, x.shape[3] + 64), math.nan)
        view = wide[:, 1::2, 2:-1, 32:-32]
        view.copy_(x)
        return view

    for how in ("transposed", "sliced"):
        args = [strided(x, how) for x in plain]
        assert not any(x.is_contiguous() for x in args)
        got = blasst_attn_func(*args, threshold=0.05, causal=True, **EVERYTHING)
        assert torch.equal(got.out, want.out)
        assert torch.equal(got.kept_tiles, want.kept_tiles)
    assert int(want.counts.skipped.sum()) > 0


def packed_of(shape, lengths, seed, spare=0):
    """Sequences packed one after the other, NaN behind the last; and the single ones."""
    singles = [inputs_of(shape, 1, max(a, 1), max(b, 1), seed=seed + i) for i, (a, b) in enumerate(lengths)]
    singles = [(s.q[:, :a], s.k[:, :b], s.v[:, :b]) for s, (a, b) in zip(singles, lengths)]
    packed = [torch.cat([s[i][0] for s in singles]) for i in range(3)]
    packed = [torch.cat([x, x.new_full((spare, *x.shape[1:]), math.nan)]) for x in packed]
    cu_q, cu_k = (
        torch.tensor([0, *torch.tensor([n[i] for n in lengths]).cumsum(0)], dtype=torch.int32, device="cuda")
        for i in range(2)
    )
    return packed, cu_q, cu_k, singles


@pytest.mark.parametrize("shape", ["fp16-64", "bf16-96", "bf16-128"])
def test_packed_sequences_equal_their_own_calls(shape):
    lengths = [(0, 0), (64, 64), (1, 900), (0, 100), (300, 0), (257, 1300), (1, 1), (129, 127), (0, 0)]
    packed, cu_q, cu_k, singles = packed_of(shape, lengths, 11, spare=200)
    for threshold in (None, 0.02):
        options = {"threshold": threshold, "causal": True, **EVERYTHING}
        got = blasst_attn_varlen_func(*packed, cu_q, cu_k, 300, 1300, **options)
        assert threshold is None or int(got.counts.skipped.sum()) > 0
        for i, (single, (rows, keys)) in enumerate(zip(singles, lengths)):
            place = slice(int(cu_q[i]), int(cu_q[i + 1]))
            if rows and keys:
                one = blasst_attn_func(*single, **options)
                assert torch.equal(got.out[place], one.out[0])
                assert torch.equal(got.lse[:, place], one.lse[0])
                assert torch.equal(got.counts.skipped[i], one.counts.skipped[0])
                assert torch.equal(got.mass_bound[:, place], one.mass_bound[0])
                small = one.kept_tiles[0]
                assert torch.equal(got.kept_tiles[i, :, : small.shape[1], : small.shape[2]], small)
                assert int(got.kept_tiles[i].sum()) == int(small.sum())
            else:
                assert not bool(got.out[place].any())
                assert bool((got.lse[:, place] == -math.inf).all())
                assert int(got.counts.visited[i].sum()) == 0
        behind = slice(int(cu_q[-1]), None)
        assert not bool(got.out[behind].any())
        assert bool((got.lse[:, behind] == -math.inf).all())


@pytest.mark.parametrize("fill", [math.nan, math.inf, 1e30])
@pytest.mark.parametrize("page_size", [16, 32, 64, 128, 256, 512])
def test_pages_equal_the_packed_keys(page_size, fill):
    lengths = [(200, 1500), (200, 129), (200, 700), (200, 1)]
    (q, k, v), cu_q, cu_k, singles = packed_of("bf16-128", lengths, 12)
    cache = [q.new_full((4, 1536, *x.shape[1:]), fill) for x in (k, v)]
    for b, (single, (_, n)) in enumerate(zip(singles, lengths)):
        for x, y in zip(cache, single[1:]):
            x[b, :n] = y[0]
    pages_k, table = pages_from(cache[0], page_size, fill=fill)
    pages_v, _ = pages_from(cache[1], page_size, fill=fill)
    for b, (_, n) in enumerate(lengths):
        table[b, -(-n // page_size) :] = 2**31 - 1 if b == 1 else -1  # entries past need are never read
    for threshold in (None, 0.05):
        options = {"threshold": threshold, "causal": True, **EVERYTHING}
        plain = blasst_attn_varlen_func(q, k, v, cu_q, cu_k, 200, 1500, **options)
        got = blasst_attn_varlen_func(
            q, pages_k, pages_v, cu_q, cu_k, 200, 1500, block_table=table, **options
        )
        used = torch.tensor([n for _, n in lengths], dtype=torch.int32, device="cuda")
        cached = blasst_attn_with_kvcache(
            q.view(4, 200, *q.shape[1:]), pages_k, pages_v, cache_seqlens=used, block_table=table, **options
        )
        assert_finite(got.out)
        assert torch.equal(got.out, plain.out)
        assert torch.equal(cached.out.flatten(0, 1), plain.out)
        assert torch.equal(got.lse, plain.lse)
        assert torch.equal(got.kept_tiles, plain.kept_tiles)
        assert torch.equal(got.counts.skipped, plain.counts.skipped)
        assert threshold is None or int(got.counts.skipped.sum()) > 0


@pytest.mark.parametrize("fill", [math.nan, math.inf, 1e30])
def test_slots_before_and_behind_a_sequence_do_not_count(fill):
    inputs = inputs_of("bf16-128", batch=4, rows=200, keys=1500, seed=13)
    pad = torch.tensor([0, 3, 700, 129], dtype=torch.int32, device="cuda")
    used = torch.tensor([1500, 1400, 1300, 129], dtype=torch.int32, device="cuda")  # the last one is empty
    for b in range(4):
        for x in (inputs.k, inputs.v):
            x[b, : pad[b]] = x[b, used[b] :] = fill
    options = {"threshold": 0.05, "causal": True}
    got = blasst_attn_with_kvcache(*inputs, cache_seqlens=used, cache_leftpad=pad, **options, **EVERYTHING)
    lengths = {"seqused_k": used, "leftpad_k": pad}
    truth = reference_attention(*inputs, **lengths, **options)
    yardstick = reference_attention(
        *inputs, **lengths, **options, kept_tiles=truth.kept_tiles, dtype=torch.bfloat16
    )
    assert_matches_reference(got, truth, yardstick, 0.05)
    assert int(got.counts.skipped.sum()) > 0
    assert not bool(got.out[3].any())


@pytest.mark.parametrize("chunk", [64, 128, 384])
def test_chunked_prefill_keeps_the_tiles_of_one_call(chunk):
    q, k, v = inputs_of("bf16-128", 1, 1000, 1000, seed=14)
    whole = blasst_attn_func(q, k, v, threshold=0.05, causal=True, **EVERYTHING)
    assert int(whole.counts.skipped.sum()) > 0
    for begin in range(0, 1000, chunk):
        end = min(begin + chunk, 1000)
        part = blasst_attn_func(
            q[:, begin:end], k[:, :end], v[:, :end], threshold=0.05, causal=True, **EVERYTHING
        )
        small = part.kept_tiles[0]
        tiles = whole.kept_tiles[0, :, begin // 64 : -(-end // 64), : small.shape[2]]
        assert torch.equal(small, tiles)
        assert torch.equal(part.out, whole.out[:, begin:end])
        assert torch.equal(part.lse, whole.lse[..., begin:end])
