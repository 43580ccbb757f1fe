"""The Triton kernels on a real GPU, against the reference in float64 on the same GPU."""

from __future__ import annotations

import math

import pytest
import torch

from blasst import blasst_attn_func, blasst_attn_varlen_func, blasst_attn_with_kvcache
from blasst.core.reference import reference_attention
from blasst.testing import (
    assert_finite,
    assert_matches_reference,
    heavy_tailed_inputs,
    pages_from,
)

EVERYTHING = {
    "return_lse": True,
    "return_counts": True,
    "return_mass_bound": True,
    "return_kept_tiles": True,
    "impl": "triton",
}
#: Nats by which float32 and float64 scores of these inputs may differ.
NEAR = 2e-3
HALF, BFLOAT, SINGLE = torch.float16, torch.bfloat16, torch.float32

phases = pytest.mark.parametrize("phase", ["prefill", "decode"])
#: dtype, head dims, query heads, KV heads: each is one compilation per option.
SHAPES = {
    "fp16-64": (HALF, (64, 64), 6, 2),
    "bf16-96": (BFLOAT, (96, 96), 4, 4),
    "bf16-128": (BFLOAT, (128, 128), 8, 2),
    "bf16-192-128": (BFLOAT, (192, 128), 4, 4),
    "fp16-256": (HALF, (256, 256), 4, 1),
    "fp32-64": (SINGLE, (64, 64), 4, 2),
    "bf16-576-512": (BFLOAT, (576, 512), 20, 1),
}
shapes = pytest.mark.parametrize("shape", SHAPES)


def attention_of(phase):
    return blasst_attn_with_kvcache if phase == "decode" else blasst_attn_func


def inputs_of(shape, phase, batch=2, rows=None, keys=None, **keywords):
    dtype, dims, heads, kv_heads = SHAPES[shape]
    rows = rows or (300 if phase == "prefill" else 2)
    keys = keys or (1500 if phase == "prefill" else 3000)
    block = 128 if phase == "prefill" else 64
    inputs = heavy_tailed_inputs(
        batch, rows, keys, heads, kv_heads, *dims, dtype=dtype, device="cuda", block=block, **keywords
    )
    return inputs._replace(v=inputs.k[..., :512]) if dims == (576, 512) else inputs


def compare(inputs, phase, threshold, near=0.0, **options):
    """A call against the reference; returns its output."""
    options = {"causal": True} | options
    got = attention_of(phase)(*inputs, threshold=threshold, **options, **EVERYTHING)
    truth = reference_attention(*inputs, threshold=threshold, phase=phase, **options)
    if options.get("max_skipped_mass") is not None and not torch.equal(got.kept_tiles, truth.kept_tiles):
        assert int((got.kept_tiles != truth.kept_tiles).sum()) <= 2  # a budget decision near its own cut
        return got
    yardstick = reference_attention(
        *inputs,
        threshold=threshold,
        phase=phase,
        kept_tiles=truth.kept_tiles,
        dtype=inputs.q.dtype,
        **options,
    )
    assert_matches_reference(got, truth, yardstick, threshold, near)
    return got


@phases
@shapes
def test_kernels_equal_the_reference(shape, phase):
    got = compare(inputs_of(shape, phase, seed=1), phase, 0.05)
    assert int(got.counts.skipped.sum()) > 0
    near_the_cut = inputs_of(shape, phase, seed=2, noise=2.0, drop=(1.0, 12.0))
    for threshold in (0.0, 0.1, 1.0):
        compare(near_the_cut, phase, threshold, NEAR)


@phases
@shapes
def test_threshold_zero_is_bit_identical_to_dense(shape, phase):
    inputs = inputs_of(shape, phase, seed=3, noise=2.0)
    attn = attention_of(phase)
    dense = attn(*inputs, causal=True, return_lse=True, impl="triton")
    zero = attn(*inputs, threshold=0.0, causal=True, **EVERYTHING)
    assert torch.equal(zero.out, dense.out)
    assert torch.equal(zero.lse, dense.lse)
    assert int(zero.counts.skipped.sum()) == 0


@phases
def test_measuring_changes_nothing(phase):
    inputs = inputs_of("bf16-128", phase, seed=4)
    plain = attention_of(phase)(*inputs, threshold=0.05, causal=True, return_lse=True, impl="triton")
    measured = attention_of(phase)(*inputs, threshold=0.05, causal=True, **EVERYTHING)
    assert torch.equal(plain.out, measured.out)
    assert torch.equal(plain.lse, measured.lse)


@phases
@pytest.mark.parametrize("shape", ["fp16-64", "bf16-128"])
def test_all_options_at_once(shape, phase):
    inputs = inputs_of(shape, phase, seed=5)
    sinks = torch.linspace(-2, 4, inputs.q.shape[2], device="cuda")
    options = {"window_size": (1100, 0), "softcap": 20.0, "sinks": sinks, "max_skipped_mass": 0.05}
    got = compare(inputs, phase, 1.0, NEAR, **options)
    assert int(got.counts.skipped.sum()) > 0
    if phase == "prefill":
        tail = compare(inputs, phase, 1.0, NEAR, dense_tail=70)
        assert (
            0 < int(tail.counts.skipped.sum()) < int(compare(inputs, phase, 1.0, NEAR).counts.skipped.sum())
        )
    both_sides = {"window_size": (300, 40), "softcap": 20.0, "sinks": sinks, "max_skipped_mass": 0.05}
    compare(inputs, phase, 0.05, NEAR, causal=False, **both_sides)


def test_all_rows_vote_together_beyond_one_block():
    inputs = heavy_tailed_inputs(1, 8, 2000, 128, 1, 576, dtype=BFLOAT, device="cuda", seed=6)
    inputs = inputs._replace(v=inputs.k[..., :512])
    got = compare(inputs, "decode", 0.05)
    skipped = ~got.kept_tiles[0, 0, 0]
    assert int(skipped.sum()) > 0
    tile = int(skipped.nonzero()[0])
    row = inputs.q[0, 7, 127].float()
    row[0] = 0.0
    inputs.k[0, tile * 64 + 9, 0] = (row / row.norm() ** 2 * 24.0 * 30.0).to(BFLOAT)  # logit +30, one row
    again = compare(inputs, "decode", 0.05, NEAR)
    assert bool(again.kept_tiles[0, 0, 0, tile])
    assert int(again.counts.skipped.sum()) > 0


@phases
def test_values_of_skipped_tiles_are_not_touched(phase):
    inputs = inputs_of("bf16-128", phase, batch=1, seed=7)
    clean = attention_of(phase)(*inputs, threshold=0.05, **EVERYTHING)
    skipped_by_all = ~clean.kept_tiles[0].any(0).any(0)
    assert int(skipped_by_all.sum()) > 0
    size = 128 if phase == "prefill" else 64
    inputs.v[:, skipped_by_all.repeat_interleave(size)[: inputs.v.shape[1]]] = math.nan
    got = attention_of(phase)(*inputs, threshold=0.05, impl="triton").out
    assert_finite(got)
    assert torch.equal(got, clean.out)


@phases
@pytest.mark.parametrize("page_size", [16, 48, 64, 256])
def test_pages_equal_the_contiguous_cache(phase, page_size):
    inputs = inputs_of("bf16-128", phase, batch=3, rows=200 if phase == "prefill" else 1, keys=1500, seed=8)
    lengths = [1500, 129, 700]
    used = torch.tensor(lengths, dtype=torch.int32, device="cuda")
    for b, n in enumerate(lengths):
        inputs.k[b, n:] = inputs.v[b, n:] = math.nan
    pages_k, table = pages_from(inputs.k, page_size, fill=math.nan)
    pages_v, _ = pages_from(inputs.v, page_size, fill=math.inf)
    for b, n in enumerate(lengths):
        table[b, -(-n // page_size) :] = 2**31 - 1 if b == 1 else -1  # entries past need are never read
    options = {"threshold": 0.05, "causal": True, **EVERYTHING}
    if phase == "decode":
        plain = blasst_attn_with_kvcache(*inputs, cache_seqlens=used, **options)
        got = blasst_attn_with_kvcache(
            inputs.q, pages_k, pages_v, cache_seqlens=used, block_table=table, **options
        )
    else:
        q = inputs.q.flatten(0, 1)
        cu_q = torch.arange(4, dtype=torch.int32, device="cuda") * 200
        cu_k = torch.nn.functional.pad(used.cumsum(0), (1, 0)).int()
        packed = [torch.cat([x[b, :n] for b, n in enumerate(lengths)]) for x in (inputs.k, inputs.v)]
        plain = blasst_attn_varlen_func(q, *packed, cu_q, cu_k, 200, 1500, **options)
        got = blasst_attn_varlen_func(
            q, pages_k, pages_v, cu_q, cu_k, 200, 1500, block_table=table, **options
        )
    assert_finite(got.out)
    assert torch.equal(got.out, plain.out)
    assert torch.equal(got.lse, plain.lse)
    assert torch.equal(got.kept_tiles, plain.kept_tiles)
    assert int(got.counts.skipped.sum()) > 0


@pytest.mark.parametrize("shape", ["fp16-64", "bf16-128"])
def test_a_request_decodes_to_the_same_bits_alone_and_in_a_batch_of_33(shape):
    inputs = inputs_of(shape, "decode", batch=33, keys=4000, seed=9)
    used = torch.randint(2, 4001, (33,), generator=torch.Generator().manual_seed(9)).int().cuda()
    used[0], used[1], used[2] = 4000, 2, 513
    options = {"threshold": 0.05, "causal": True, **EVERYTHING}
    batch = blasst_attn_with_kvcache(*inputs, cache_seqlens=used, **options)
    assert int(batch.counts.skipped.sum()) > 0
    for i in (0, 1, 2, 17, 32):
        n = int(used[i])
        alone = blasst_attn_with_kvcache(
            inputs.q[i : i + 1], inputs.k[i : i + 1, :n], inputs.v[i : i + 1, :n], **options
        )
        assert torch.equal(batch.out[i], alone.out[0])
        assert torch.equal(batch.lse[i], alone.lse[0])
        assert torch.equal(batch.kept_tiles[i, ..., : alone.kept_tiles.shape[-1]], alone.kept_tiles[0])


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


def test_a_decode_graph_follows_lengths_thresholds_and_pages():
    inputs = inputs_of("bf16-128", "decode", batch=4, rows=1, keys=2000, seed=10)
    pages_k, table = pages_from(inputs.k, 64, fill=math.nan)
    pages_v, _ = pages_from(inputs.v, 64, fill=math.nan)
    used = torch.tensor([2000, 1000, 64, 1], dtype=torch.int32, device="cuda")
    threshold = torch.tensor([0.05, 0.0, 1.0, 0.5], device="cuda")

    def call():
        return blasst_attn_with_kvcache(
            inputs.q,
            pages_k,
            pages_v,
            cache_seqlens=used,
            block_table=table,
            threshold=threshold,
            causal=True,
            **EVERYTHING,
        )

    graph, out = captured(call)
    settings = [
        ([300, 1999, 2000, 700], [0.05, 7.0, math.nan, -1.0]),
        ([0, 5, 128, 2000], [1.0, 0.05, 0.0, 0.05]),
    ]
    for lengths, thresholds in settings:
        used.copy_(torch.tensor(lengths))
        threshold.copy_(torch.tensor(thresholds))
        table.copy_(table.roll(1, 0))
        graph.replay()
        fresh = call()
        assert torch.equal(out.out, fresh.out)
        assert torch.equal(out.lse, fresh.lse)
        assert torch.equal(out.kept_tiles, fresh.kept_tiles)
        assert torch.equal(out.counts.skipped, fresh.counts.skipped)
        assert int(out.counts.skipped.sum()) > 0
    assert int(out.counts.skipped[2].sum()) == 0


def test_a_prefill_graph_follows_packed_lengths_and_thresholds():
    inputs = inputs_of("bf16-128", "prefill", batch=1, rows=1000, keys=2000, seed=11)
    q, k, v = (x[0] for x in inputs)
    cu_q = torch.tensor([0, 500, 1000], dtype=torch.int32, device="cuda")
    cu_k = torch.tensor([0, 1000, 2000], dtype=torch.int32, device="cuda")
    threshold = torch.tensor([0.05, 0.05], device="cuda")

    def call():
        return blasst_attn_varlen_func(
            q, k, v, cu_q, cu_k, 1000, 2000, threshold=threshold, causal=True, **EVERYTHING
        )

    graph, out = captured(call)
    for q_cut, k_cut, thresholds in (
        (70, 1800, [0.05, 0.0]),
        (1000, 2000, [0.2, 0.05]),
        (0, 0, [0.05, 0.05]),
    ):
        cu_q[1], cu_k[1] = q_cut, k_cut
        threshold.copy_(torch.tensor(thresholds))
        graph.replay()
        fresh = call()
        assert torch.equal(out.out, fresh.out)
        assert torch.equal(out.counts.skipped, fresh.counts.skipped)
        assert torch.equal(out.kept_tiles, fresh.kept_tiles)
        assert int(out.counts.skipped.sum()) > 0


@phases
def test_lengths_thresholds_and_batches_compile_once(phase):
    from blasst.kernels.triton import decode, prefill

    kernel = decode.decode_kernel if phase == "decode" else prefill.prefill_kernel

    def compiled():
        return len(kernel.device_caches[torch.cuda.current_device()][0])

    attn = attention_of(phase)
    rows = 1 if phase == "decode" else 70
    attn(*inputs_of("bf16-128", phase, rows=rows, keys=1000), threshold=0.05, causal=True, impl="triton")
    before = compiled()
    for batch, more, keys, threshold in (
        (1, 0, 1, 0.05),
        (3, 1, 16, 1.0),
        (2, 57, 2049, 0.0),
        (5, 58, 4096, 0.3),
    ):
        more = 0 if phase == "decode" else more
        inputs = inputs_of("bf16-128", phase, batch=batch, rows=rows + more, keys=keys)
        attn(*inputs, threshold=threshold, causal=True, impl="triton")
    assert compiled() == before


@phases
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_odd_values_reach_only_the_rows_that_see_them(phase, value):
    rows = 5 if phase == "decode" else 200
    inputs = inputs_of("bf16-128", phase, batch=1, rows=rows, keys=900, seed=12)
    inputs.v[0, 897, 0, 3] = value
    got = compare(inputs, phase, 0.0, NEAR)
    seen = torch.arange(rows, device="cuda") + 900 - rows >= 897
    assert torch.equal(~got.out[0, :, 0, 3].isfinite(), seen)


@phases
def test_a_nan_row_keeps_tiles_and_stays_alone(phase):
    inputs = inputs_of("bf16-128", phase, batch=1, rows=2 if phase == "decode" else 64, seed=13)
    clean = attention_of(phase)(*inputs, threshold=0.05, causal=True, **EVERYTHING)
    inputs.q[0, 0, 0, 5] = math.nan
    got = attention_of(phase)(*inputs, threshold=0.05, causal=True, **EVERYTHING)
    assert int(clean.counts.skipped[0, 0]) > 0
    assert int(got.counts.skipped[0, 0]) == 0
    assert bool(got.out[0, 0, 0].isnan().all())
    assert_finite(got.out[0, 1:])


def test_grids_beyond_65535_write_every_row():
    many = torch.randn(65536, 4, 8, 64, dtype=HALF, device="cuda")
    one = torch.ones_like(many)
    for attn in (blasst_attn_func, blasst_attn_with_kvcache):
        got = attn(many, many, one, threshold=0.0, causal=True, impl="triton").out
        assert bool((got == 1).all())
    cu = torch.arange(80001, dtype=torch.int32, device="cuda") * 16
    q = torch.randn(80000 * 16, 1, 64, dtype=HALF, device="cuda")
    got = blasst_attn_varlen_func(q, q, torch.ones_like(q), cu, cu, 16, 16, threshold=0.0, impl="triton").out
    assert bool((got == 1).all())


def test_caches_beyond_two_billion_elements_are_reached():
    pages = torch.empty(36000, 64, 8, 128, dtype=HALF, device="cuda")
    assert pages.numel() > 2**31
    inputs = heavy_tailed_inputs(1, 1, 640, 8, 8, 128, dtype=HALF, device="cuda", seed=14)
    place = torch.arange(35990, 36000, device="cuda")
    values = torch.empty_strided(pages.shape, pages.stride(), dtype=HALF, device="cuda")
    pages[place] = inputs.k[0].unflatten(0, (10, 64))
    values[place] = inputs.v[0].unflatten(0, (10, 64))
    plain = blasst_attn_with_kvcache(*inputs, threshold=0.05, impl="triton")
    got = blasst_attn_with_kvcache(
        inputs.q,
        pages,
        values,
        cache_seqlens=torch.tensor([640], dtype=torch.int32, device="cuda"),
        block_table=place.int()[None],
        threshold=0.05,
        impl="triton",
    )
    assert torch.equal(got.out, plain.out)


def test_the_current_stream_is_used():
    inputs = inputs_of("bf16-128", "prefill", seed=16)
    expected = blasst_attn_func(*inputs, threshold=0.05, causal=True, impl="triton").out
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    late = torch.empty_like(inputs.q)
    late.zero_()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        late.copy_(inputs.q)
        got = blasst_attn_func(late, inputs.k, inputs.v, threshold=0.05, causal=True, impl="triton").out
    stream.synchronize()
    assert torch.equal(got, expected)
