"""The Hopper prefill kernel as its callers meet it: choice, graphs, streams, odd values, big tensors."""

from __future__ import annotations

import math

import pytest
import torch

from blasst import blasst_attn_func, blasst_attn_varlen_func, blasst_attn_with_kvcache
from blasst.core.errors import UnsupportedError
from blasst.core.reference import reference_attention
from blasst.kernels.select import backend_used
from blasst.testing import assert_error_bound, assert_finite, heavy_tailed_inputs, pages_from

EVERYTHING = {
    "return_lse": True,
    "return_counts": True,
    "return_mass_bound": True,
    "return_kept_tiles": True,
    "impl": "hopper",
}
HALF, BFLOAT = torch.float16, torch.bfloat16


def inputs_of(batch=2, rows=300, keys=1500, heads=8, kv_heads=2, dim=128, dtype=BFLOAT, **keywords):
    return heavy_tailed_inputs(
        batch, rows, keys, heads, kv_heads, dim, dtype=dtype, device="cuda", block=128, **keywords
    )


def test_auto_takes_this_kernel_where_it_can_and_says_when_not():
    def served(*args, call=blasst_attn_func, **options):
        out = call(*args, **({"threshold": 0.05, "causal": True} | options)).out
        assert_finite(out)
        return backend_used()

    assert served(*inputs_of()) == "hopper"
    assert served(*inputs_of(dim=64, dtype=HALF), threshold=None) == "hopper"
    assert served(*inputs_of(dim=96), max_skipped_mass=0.1, softcap=20.0, window_size=(500, 0)) == "hopper"
    assert served(*inputs_of(rows=9), call=blasst_attn_with_kvcache) == "hopper"
    others = {
        "head_dim 80": inputs_of(dim=80),
        "head_dim 256": inputs_of(dim=256),
        "float32": inputs_of(dim=64, dtype=torch.float32),
    }
    wide = inputs_of(dim=132)
    others["rows that begin 8 bytes apart"] = [x[..., 4:] for x in wide]
    one = inputs_of(batch=1)
    others["a batch of stride 0"] = [x.expand(2, -1, -1, -1) for x in one]
    for name, args in others.items():
        assert served(*args) == "triton", name
        with pytest.raises(UnsupportedError, match="hopper"):
            blasst_attn_func(*args, threshold=0.05, impl="hopper")
    q, k, v = inputs_of(rows=1)
    assert served(q, k, v, call=blasst_attn_with_kvcache) == "hopper", "decode"
    q, k, v = inputs_of(keys=1536)
    used = torch.tensor([1536, 700], dtype=torch.int32, device="cuda")
    for page_size, pad, name in (
        (16, None, "hopper"),
        (48, None, "triton"),
        (8, None, "triton"),
        (64, 1, "triton"),
    ):
        (pages_k, table), (pages_v, _) = (pages_from(x, page_size, fill=math.nan) for x in (k, v))
        options = {"cache_seqlens": used, "block_table": table, "call": blasst_attn_with_kvcache}
        if pad:
            options["cache_leftpad"] = torch.full_like(used, pad)
        assert served(q, pages_k, pages_v, **options) == name, page_size


def test_a_nan_query_row_keeps_tiles_and_stays_alone():
    inputs = inputs_of(batch=1, rows=128, seed=1)
    clean = blasst_attn_func(*inputs, threshold=0.05, **EVERYTHING)
    inputs.q[0, 3, 0, 5] = math.nan
    got = blasst_attn_func(*inputs, threshold=0.05, **EVERYTHING)
    assert int((~clean.kept_tiles[0, 0, 0]).sum()) > 0
    assert bool(got.kept_tiles[0, 0, 0].all())
    assert torch.equal(got.kept_tiles[0, 0, 1], clean.kept_tiles[0, 0, 1]), "the other half of the block"
    assert torch.equal(got.kept_tiles[0, 1:], clean.kept_tiles[0, 1:])
    assert bool(got.out[0, 3, 0].isnan().all())
    assert bool(got.lse[0, 0, 3].isnan())
    others = torch.ones(128, 8, dtype=torch.bool, device="cuda")
    others[3, 0] = False
    assert_finite(got.out[0][others])


@pytest.mark.parametrize("threshold", [None, 0.0, 0.05])
@pytest.mark.parametrize("key", [100, 127, 128, 299])
def test_a_nan_key_reaches_only_the_rows_that_see_it(key, threshold):
    inputs = inputs_of(batch=1, rows=300, keys=300, heads=2, kv_heads=1, seed=2)
    clean = blasst_attn_func(*inputs, threshold=threshold, causal=True, impl="hopper").out
    inputs.k[0, key] = math.nan
    out = blasst_attn_func(*inputs, threshold=threshold, causal=True, impl="hopper").out
    assert bool(out[0, key:].isnan().all())
    assert_finite(out[0, :key])
    if threshold in (None, 0.0):  # otherwise a tile that the NaN keeps may have been skipped before
        assert torch.equal(out[0, :key], clean[0, :key])


def test_a_nan_value_reaches_every_row_that_sees_it():
    inputs = inputs_of(batch=1, rows=300, keys=300, heads=2, kv_heads=1, seed=3)
    inputs.v[0, 200, 0, 7] = math.nan
    out = blasst_attn_func(*inputs, threshold=0.0, causal=True, impl="hopper").out
    assert bool(out[0, 200:, :, 7].isnan().all())
    assert_finite(out[0, :128])  # rows of tiles before it
    assert_finite(out[..., 8:])


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_values_of_skipped_tiles_do_not_matter(value):
    inputs = inputs_of(batch=1, seed=4)
    clean = blasst_attn_func(*inputs, threshold=0.05, **EVERYTHING)
    skipped_by_all = ~clean.kept_tiles[0].any(0).any(0)
    assert int(skipped_by_all.sum()) > 0
    inputs.v[:, skipped_by_all.repeat_interleave(128)[: inputs.v.shape[1]]] = value
    got = blasst_attn_func(*inputs, threshold=0.05, impl="hopper").out
    assert torch.equal(got, clean.out)


@pytest.mark.parametrize("threshold", [None, 0.5])
def test_scores_and_sums_beyond_the_range_of_float16(threshold):
    q = torch.full((1, 200, 2, 128), 100.0, dtype=HALF, device="cuda")
    k = torch.full((1, 4096, 1, 128), 100.0, dtype=HALF, device="cuda")
    v = torch.full_like(k, 6e4)
    got = blasst_attn_func(q, k, v, threshold=threshold, return_lse=True, return_counts=True, impl="hopper")
    # weights (2 to the rounding of an exponent of 163,200) and out are rounded to float16: 2**-11 each
    assert bool(((got.out.double() - 6e4).abs() <= 2 * 2**-11 * 6.1e4).all())
    assert int(got.counts.skipped.sum()) == 0
    score = 1.28e6 * 128**-0.5
    # the score is exact in float32, its factor and product are each rounded once (2**-24), and so is the sum
    assert bool(((got.lse.double() - score - math.log(4096)).abs() <= 4 * 2**-24 * score).all())


def test_one_tile_summed_many_times_does_not_drift():
    """1,000 tiles of the same maximum: what is kept of the first must weigh as much as the last."""
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(1, 128, 2, 128, generator=generator).mul(3.0).to("cuda", BFLOAT)
    tile = torch.randn(1, 128, 1, 128, generator=generator).mul(3.0).to("cuda", BFLOAT)
    k = tile.repeat(1, 1000, 1, 1)
    v = torch.randn(1, 128000, 1, 128, generator=generator).to("cuda", BFLOAT)
    for threshold in (None, 0.0):
        got = blasst_attn_func(q, k, v, threshold=threshold, return_lse=True, impl="hopper")
        want = reference_attention(q, tile, tile).lse + math.log(1000)
        # scores of up to 30 nats: 8 steps of the accumulation, 2**-23 of 30 each; the sum: 2**-24 a tile
        assert float((got.lse - want).abs().max()) <= 1e-4


def captured(call):
    """A CUDA graph of a call, after one run on a side stream, and the output it fills."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call()
    return graph, out


def assert_same(a, b):
    assert torch.equal(a.out, b.out)
    assert torch.equal(a.lse, b.lse)
    assert torch.equal(a.mass_bound, b.mass_bound)
    assert torch.equal(a.kept_tiles, b.kept_tiles)
    assert torch.equal(a.counts.skipped, b.counts.skipped)
    assert torch.equal(a.counts.visited, b.counts.visited)


def test_a_graph_follows_contents_packed_lengths_and_thresholds():
    q, k, v = (x[0] for x in inputs_of(batch=1, rows=1000, keys=2000, seed=5))
    cu_q = torch.tensor([0, 500, 1000], dtype=torch.int32, device="cuda")
    cu_k = torch.tensor([0, 1000, 2000], dtype=torch.int32, device="cuda")
    threshold = torch.tensor([0.05, 0.05], device="cuda")

    def call():
        return blasst_attn_varlen_func(
            q, k, v, cu_q, cu_k, 1000, 2000, threshold=threshold, causal=True, **EVERYTHING
        )

    graph, out = captured(call)
    settings = [
        (70, 1800, [0.05, 0.0]),
        (1000, 2000, [0.2, 0.05]),
        (0, 0, [0.05, 7.0]),
        (999, 1, [1.0, 0.05]),
    ]
    for turn, (q_cut, k_cut, thresholds) in enumerate(settings):
        cu_q[1], cu_k[1] = q_cut, k_cut
        threshold.copy_(torch.tensor(thresholds))
        for x, new in zip((q, k, v), inputs_of(batch=1, rows=1000, keys=2000, seed=50 + turn)):
            x.copy_(new[0])
        graph.replay()
        assert_same(out, call())
        assert int(out.counts.skipped.sum()) > 0


def test_a_graph_follows_cache_lengths_pages_and_thresholds():
    inputs = inputs_of(batch=3, rows=100, keys=2000, seed=6)
    (pages_k, table), (pages_v, _) = (pages_from(x, 64, fill=math.nan) for x in inputs[1:])
    used = torch.tensor([2000, 1000, 64], dtype=torch.int32, device="cuda")
    threshold = torch.tensor([0.05, 0.0, 1.0], device="cuda")

    def call():
        return blasst_attn_with_kvcache(
            inputs.q, pages_k, pages_v, cache_seqlens=used, block_table=table, threshold=threshold,
            causal=True, **EVERYTHING,
        )  # fmt: skip

    graph, out = captured(call)
    for lengths, thresholds in (
        ([300, 1999, 2000], [0.05, 7.0, math.nan]),
        ([0, 2000, 129], [1.0, 0.05, -1.0]),
    ):
        used.copy_(torch.tensor(lengths))
        threshold.copy_(torch.tensor(thresholds))
        table.copy_(table.roll(1, 0))
        graph.replay()
        assert_same(out, call())
        assert_finite(out.out)
        assert int(out.counts.skipped.sum()) > 0
        assert int(out.counts.skipped[2].sum()) == 0


def test_the_compiler_sees_one_graph():
    inputs = inputs_of(seed=7)

    def call(q, k, v):
        got = blasst_attn_func(q * 1, k, v, threshold=0.05, causal=True, return_lse=True, return_counts=True)
        return got.out * 2, got.lse, got.counts.skipped

    want = call(*inputs)
    assert backend_used() == "hopper"
    got = torch.compile(call, fullgraph=True, backend="aot_eager")(*inputs)
    assert backend_used() == "hopper"
    assert all(torch.equal(a, b) for a, b in zip(got, want))
    assert int(want[2].sum()) > 0


def test_the_current_stream_is_used():
    inputs = inputs_of(seed=8)
    expected = blasst_attn_func(*inputs, threshold=0.05, causal=True, impl="hopper").out
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    late = torch.empty_like(inputs.q)
    late.zero_()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        late.copy_(inputs.q)
        got = blasst_attn_func(late, inputs.k, inputs.v, threshold=0.05, causal=True, impl="hopper").out
    stream.synchronize()
    assert torch.equal(got, expected)


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
def test_no_call_waits_for_the_device():
    inputs = inputs_of(seed=9)
    used = torch.tensor([1500, 900], dtype=torch.int32, device="cuda")

    def calls():
        blasst_attn_func(*inputs, threshold=0.02, causal=True, **EVERYTHING)
        blasst_attn_with_kvcache(*inputs, cache_seqlens=used, threshold_scale_factor=20.0, impl="hopper")

    calls()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        calls()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_more_work_than_65535_blocks_writes_every_row():
    many = torch.randn(16384, 9, 8, 64, dtype=HALF, device="cuda")
    got = blasst_attn_func(many, many, torch.ones_like(many), threshold=0.0, causal=True, impl="hopper").out
    assert bool((got == 1).all())
    cu = torch.arange(80001, dtype=torch.int32, device="cuda") * 16
    q = torch.randn(80000 * 16, 1, 64, dtype=HALF, device="cuda")
    got = blasst_attn_varlen_func(q, q, torch.ones_like(q), cu, cu, 16, 16, threshold=0.0, impl="hopper").out
    assert bool((got == 1).all())


def test_caches_beyond_two_billion_elements_are_reached():
    pages = torch.empty(36000, 64, 8, 128, dtype=HALF, device="cuda")
    assert pages.numel() > 2**31
    values = torch.empty_like(pages)
    inputs = inputs_of(batch=1, rows=20, keys=640, heads=8, kv_heads=8, dtype=HALF, seed=11)
    place = torch.arange(35990, 36000, device="cuda")
    pages[place] = inputs.k[0].unflatten(0, (10, 64))
    values[place] = inputs.v[0].unflatten(0, (10, 64))
    plain = blasst_attn_with_kvcache(*inputs, threshold=0.05, impl="hopper")
    got = blasst_attn_with_kvcache(
        inputs.q,
        pages,
        values,
        cache_seqlens=torch.tensor([640], dtype=torch.int32, device="cuda"),
        block_table=place.int()[None],
        threshold=0.05,
        impl="hopper",
    )
    assert torch.equal(got.out, plain.out)


def test_long_sequences_agree_with_sdpa():
    """Many tiles a row and more work than processors: 16,384 keys."""
    q, k, v = inputs_of(batch=1, rows=16384, keys=16384, seed=12, noise=2.0)
    got = blasst_attn_func(q, k, v, threshold=0.0, causal=True, impl="hopper").out
    full = [x.transpose(1, 2).float().repeat_interleave(8 // x.shape[2], 1) for x in (q, k, v)]
    truth = torch.nn.functional.scaled_dot_product_attention(*full, is_causal=True).transpose(1, 2)
    # P and out are rounded to bfloat16 (2**-9 each) against rows of unit normal values
    assert float((got.float() - truth).abs().max()) <= 2**-7 * float(v.float().abs().max())
    sparse = blasst_attn_func(q, k, v, threshold=1e-4, causal=True, **EVERYTHING)
    assert 0.1 < float(sparse.counts.sparsity) < 0.95
    assert_error_bound(sparse.out, got, sparse.mass_bound, v, slack=2**-8 * float(v.float().abs().max()))


def test_a_repeated_decode_call_is_checked_by_its_form_and_follows_new_values():
    from blasst.kernels import repeats

    x = inputs_of(rows=1)
    lengths = torch.tensor([1000, 1], dtype=torch.int32, device="cuda")
    repeats._plans.clear()
    options = {"cache_seqlens": lengths, "return_counts": True, "return_lse": True}
    first = blasst_attn_with_kvcache(*x, threshold=0.05, **options)
    assert len(repeats._plans) == 1 and backend_used() == "hopper"
    again = blasst_attn_with_kvcache(*x, threshold=0.05, **options)
    assert len(repeats._plans) == 1
    assert torch.equal(first.out, again.out) and torch.equal(first.lse, again.lse)
    assert torch.equal(first.counts.skipped, again.counts.skipped)
    # new values: other lengths, another threshold, another cache
    lengths.copy_(torch.tensor([3, 1400], dtype=torch.int32))
    other = inputs_of(rows=1, seed=9)
    for threshold in (0.5, 0.0):
        got = blasst_attn_with_kvcache(*other, threshold=threshold, **options)
        assert len(repeats._plans) == 1
        want = blasst_attn_with_kvcache(
            *other, threshold=torch.full((2,), threshold, device="cuda"), **options
        )
        assert torch.equal(got.out, want.out) and torch.equal(got.counts.skipped, want.counts.skipped)
        repeats._plans.popitem()
    # what the checks refuse stays refused
    for bad in ({"threshold": 1.5}, {"threshold": 0.5, "softmax_scale": True}, {"threshold": True}):
        with pytest.raises((TypeError, ValueError)):
            blasst_attn_with_kvcache(*x, **(options | bad))
    with pytest.raises(NotImplementedError):
        blasst_attn_with_kvcache(x[0].clone().requires_grad_(), *x[1:], threshold=0.05, **options)
    # a shape that was not prepared
    assert blasst_attn_with_kvcache(*inputs_of(rows=2), threshold=0.05, **options).out.shape[1] == 2
    compiled = torch.compile(blasst_attn_with_kvcache, fullgraph=True, backend="aot_eager")
    assert torch.equal(
        compiled(*x, threshold=0.05, **options).out,
        blasst_attn_with_kvcache(*x, threshold=0.05, **options).out,
    )
