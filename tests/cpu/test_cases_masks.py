"""Cases from the field, D to G and K: needles, masked rows, alignment, shapes, layout, merging."""

import math

import pytest
import torch
from cases_parts import (
    DIM,
    DTYPE,
    HOPPER,
    blasst_attn_func,
    blasst_attn_varlen_func,
    blasst_attn_with_kvcache,
    close,
    heavy_tailed_inputs,
    impls,
)

from blasst import merge_attention
from blasst.core.reference import reference_attention
from blasst.testing import assert_finite, assert_within_budget, max_error, pages_from

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy of Triton's interpreter
#: The smallest pages that the kernels serve.
PAGE = 16 if HOPPER else 4


def masked_softmax(q, k, v, mask):
    """Float64 attention with an explicit bool mask (rows, keys); rows that see nothing give 0, -inf."""
    group = q.shape[2] // k.shape[2]
    q, k, v = (x.double().transpose(1, 2) for x in (q, k, v))
    scores = q @ k.repeat_interleave(group, 1).transpose(-1, -2) * q.shape[-1] ** -0.5
    scores = scores.masked_fill(~mask, -math.inf)
    out = scores.softmax(-1).nan_to_num(0.0) @ v.repeat_interleave(group, 1)
    return out.transpose(1, 2), scores.logsumexp(-1)


def causal_mask(seqlen_q, seqlen_k):
    return torch.arange(seqlen_k) <= torch.arange(seqlen_q)[:, None] + seqlen_k - seqlen_q


@impls
@pytest.mark.parametrize("position", [0, 2048, 4094, 127, 128])
@pytest.mark.parametrize("threshold", [0.05, 1.0])
def test_a_needle_keeps_its_weight_wherever_it_lies(impl, position, threshold):
    length = 4096
    inputs = heavy_tailed_inputs(1, 64, length, 1, 1, 64, seed=1, hot_fraction=0.0, noise=0.3)
    direction = inputs.q[0, -1, 0].clone()
    direction[0] = 0.0
    inputs.k[0, position, 0] = direction / direction.norm() ** 2 * 8.0 * 12.0  # logit +12 for the last row
    inputs.v.fill_(0.0)
    inputs.v[0, position] = 1.0  # the output is the needle's weight
    got = blasst_attn_func(*inputs, threshold=threshold, return_counts=True, causal=True, impl=impl)
    weight = reference_attention(*inputs, causal=True).out[0, -1, 0, 0]
    assert int(got.counts.skipped.sum()) > 0
    assert float(weight) > 0.9
    assert abs(float(got.out[0, -1, 0, 0]) - float(weight)) <= 0.01 * float(weight)


@impls
@pytest.mark.parametrize("threshold", [None, 0.0, 0.5])
def test_rows_that_see_nothing_are_zero_and_change_nothing_else(impl, threshold):
    inputs = heavy_tailed_inputs(2, 10, 4, 2, 1, 8)
    got = blasst_attn_func(*inputs, threshold=threshold, causal=True, return_lse=True, impl=impl)
    assert bool((got.out[:, :6] == 0).all())
    assert bool((got.lse[..., :6] == -math.inf).all())
    rest = blasst_attn_func(inputs.q[:, 6:], inputs.k, inputs.v, threshold=threshold, causal=True, impl=impl)
    close(got.out[:, 6:], rest.out, rtol=1e-6, atol=1e-6)


@impls
@pytest.mark.parametrize("fill", [math.nan, math.inf, 1e30])
def test_unused_cache_slots_never_leak(impl, fill):
    inputs = heavy_tailed_inputs(2, 3, 40, 4, 2, 16, seed=2)
    used = torch.tensor([13, 30], dtype=torch.int32)
    outputs = []
    fill = 6e4 if HOPPER and fill == 1e30 else fill
    for value in (0.0, fill):
        k, v = inputs.k.clone(), inputs.v.clone()
        for b in range(2):
            k[b, used[b] :] = v[b, used[b] :] = value
        pages_k, table = pages_from(k, PAGE, fill=value)
        pages_v, _ = pages_from(v, PAGE, fill=value)
        for b in range(2):  # entries past need are never read
            table[b, -(-int(used[b]) // PAGE) :] = -1 if b else 10**6
        for cache in ((k, v, None), (pages_k, pages_v, table)):
            got = blasst_attn_with_kvcache(
                inputs.q,
                *cache[:2],
                cache_seqlens=used,
                block_table=cache[2],
                threshold=0.1,
                causal=True,
                impl=impl,
            )
            outputs.append(got.out)
    for out in outputs[1:]:
        assert torch.equal(out, outputs[0])


@impls
@pytest.mark.parametrize("fill", [math.nan, math.inf])
def test_tokens_behind_the_last_sequence_are_not_read(impl, fill):
    inputs = heavy_tailed_inputs(1, 90, 90, 2, 1, 16)
    cu = torch.tensor([0, 30, 70], dtype=torch.int32)
    clean = blasst_attn_varlen_func(
        *(x[0] for x in inputs), cu, cu, 40, 40, threshold=0.1, causal=True, impl=impl
    )
    for x in inputs[1:]:
        x[:, 70:] = fill
    got = blasst_attn_varlen_func(
        *(x[0] for x in inputs), cu, cu, 40, 40, threshold=0.1, causal=True, impl=impl
    )
    assert torch.equal(got.out[:70], clean.out[:70])
    assert bool((got.out[70:] == 0).all())


@impls
def test_a_nan_reaches_only_the_rows_that_see_it(impl):
    inputs = heavy_tailed_inputs(1, 128, 128, 1, 1, 16)
    clean = blasst_attn_func(*inputs, threshold=0.0, causal=True, impl=impl).out
    for name, index in (("k", 100), ("v", 100), ("q", 50)):
        if HOPPER and name == "v":
            continue  # their own rule: docs/support.md and tests/gpu/test_hopper_host.py
        poisoned = inputs._replace(**{name: getattr(inputs, name).clone()})
        getattr(poisoned, name)[0, index] = math.nan
        out = blasst_attn_func(*poisoned, threshold=0.0, causal=True, impl=impl).out
        bad = torch.zeros(128, dtype=torch.bool)
        bad[index if name == "q" else slice(index, None)] = True
        assert torch.equal(out.isnan().any(-1)[0, :, 0], bad)
        close(out[:, ~bad], clean[:, ~bad], rtol=1e-5, atol=1e-6)


@impls
def test_windows_that_miss_whole_first_tiles_equal_dense(impl):
    inputs = heavy_tailed_inputs(1, 256, 1024, 2, 1, 16, seed=3)
    position = torch.arange(256)[:, None] + 768
    mask = causal_mask(256, 1024) & (torch.arange(1024) >= position - 63)
    out, lse = masked_softmax(*inputs, mask)
    got = blasst_attn_func(
        *inputs, threshold=0.0, causal=True, window_size=(63, 0), return_lse=True, impl=impl
    )
    close(got.out.double(), out, rtol=1e-4, atol=1e-5)
    close(got.lse.double(), lse, rtol=1e-4, atol=1e-5)
    assert_finite(blasst_attn_func(*inputs, threshold=0.1, causal=True, window_size=(63, 0), impl=impl).out)


@impls
def test_left_padding_shifts_the_tile_grid_not_the_result(impl):
    inputs = heavy_tailed_inputs(1, 1, 700, 2, 1, 16, seed=4)
    pad = torch.full_like(inputs.k[:, :200], math.nan)
    padded = [torch.cat([pad, x], 1) for x in inputs[1:]]
    options = {"threshold": 0.05, "return_kept_tiles": True, "return_counts": True, "impl": impl}
    plain = blasst_attn_with_kvcache(*inputs, **options)
    got = blasst_attn_with_kvcache(
        inputs.q, *padded, cache_leftpad=torch.tensor([200], dtype=torch.int32), **options
    )
    assert torch.equal(got.out, plain.out)
    assert torch.equal(got.kept_tiles[..., :11], plain.kept_tiles)
    assert int(got.counts.skipped.sum()) == int(plain.counts.skipped.sum()) > 0


@impls
def test_large_halves_do_not_overflow(impl):
    q = k = torch.full((1, 64, 1, 128), 100.0, dtype=torch.float16)
    v = torch.full((1, 64, 1, 128), 6e4, dtype=torch.float16)
    k, v = k.repeat(1, 64, 1, 1), v.repeat(1, 64, 1, 1)
    got = blasst_attn_func(q, k, v, threshold=0.5, impl=impl).out
    close(got, torch.full_like(got, 6e4))


@impls
@pytest.mark.parametrize(
    ("seqlen_q", "seqlen_k"), [(2, 5), (5, 6), (1, 300), (127, 129), (128, 2000), (8, 4), (300, 5)]
)
def test_causal_is_bottom_right_aligned(impl, seqlen_q, seqlen_k):
    inputs = heavy_tailed_inputs(1, seqlen_q, seqlen_k, 2, 1, 16, seed=5)
    out, lse = masked_softmax(*inputs, causal_mask(seqlen_q, seqlen_k))
    got = blasst_attn_func(*inputs, threshold=0.0, causal=True, return_lse=True, impl=impl)
    close(got.out.double(), out, rtol=1e-4, atol=1e-5)
    close(got.lse.double(), lse, rtol=1e-4, atol=1e-5)
    decode = blasst_attn_with_kvcache(*inputs, threshold=0.0, causal=True, impl=impl)
    close(decode.out.double(), out, rtol=1e-4, atol=1e-5)


@impls
@pytest.mark.parametrize("chunk", [128, 100, 512])
def test_chunked_prefill_equals_one_shot(impl, chunk):
    length = 1100
    inputs = heavy_tailed_inputs(1, length, length, 1, 1, 16, seed=6)
    for threshold in (0.0, 0.05):
        whole = blasst_attn_func(*inputs, threshold=threshold, causal=True, return_kept_tiles=True, impl=impl)
        dense = reference_attention(*inputs, causal=True)
        parts = []
        for begin in range(0, length, chunk):
            end = min(begin + chunk, length)
            part = blasst_attn_func(
                inputs.q[:, begin:end],
                inputs.k[:, :end],
                inputs.v[:, :end],
                threshold=threshold,
                causal=True,
                return_kept_tiles=True,
                impl=impl,
            )
            parts.append(part.out)
            if threshold and chunk % 64 == 0:
                tiles = part.kept_tiles.shape[2:]
                expected = whole.kept_tiles[:, :, begin // 64 : begin // 64 + tiles[0], : tiles[1]]
                assert torch.equal(part.kept_tiles, expected)
                assert begin < 512 or not bool(part.kept_tiles.all())
        if threshold == 0.0 or chunk % 64 == 0:
            close(torch.cat(parts, 1), whole.out, rtol=1e-5, atol=1e-6)
        else:
            dropped = threshold * length
            limit = 2 * float(inputs.v.abs().max()) * dropped / (1 + dropped)
            assert max_error(torch.cat(parts, 1), dense.out) <= limit


@impls
@pytest.mark.parametrize(
    ("cu_q", "cu_k"),
    [
        ([0, 0, 120, 200, 200], [0, 250, 420, 512, 800]),
        ([0, 50, 50, 90], [0, 0, 60, 100]),
        ([0, 0, 0], [0, 0, 0]),
        ([0], [0]),
    ],
)
def test_sequences_of_length_zero(impl, cu_q, cu_k):
    total_q, total_k = cu_q[-1] + 7, cu_k[-1] + 7
    inputs = heavy_tailed_inputs(1, total_q, total_k, 4, 1, 32)
    q, k, v = (x[0] for x in inputs)
    cu = [torch.tensor(c, dtype=torch.int32) for c in (cu_q, cu_k)]
    got = blasst_attn_varlen_func(
        q, k, v, *cu, 130, 300, threshold=0.1, return_lse=True, return_counts=True, impl=impl
    )
    assert_finite(got.out)
    assert got.counts.visited.shape == (len(cu_q) - 1, 4)
    for i in range(len(cu_q) - 1):
        rows, keys = slice(cu_q[i], cu_q[i + 1]), slice(cu_k[i], cu_k[i + 1])
        if cu_q[i] < cu_q[i + 1] and cu_k[i] == cu_k[i + 1]:
            assert bool((got.out[rows] == 0).all())
            assert bool((got.lse[:, rows] == -math.inf).all())
        elif cu_q[i] < cu_q[i + 1]:
            single = blasst_attn_func(q[None, rows], k[None, keys], v[None, keys], threshold=0.1, impl=impl)
            close(got.out[rows], single.out[0], rtol=1e-5, atol=1e-6)


@impls
@pytest.mark.parametrize("shape", [(0, 20, 20), (2, 0, 20), (2, 20, 0), (2, 0, 0)])
def test_empty_batches_rows_and_keys(impl, shape):
    batch, seqlen_q, seqlen_k = shape
    inputs = [torch.randn(batch, n, 2, 8) for n in (seqlen_q, seqlen_k, seqlen_k)]
    everything = {
        "return_lse": True,
        "return_counts": True,
        "return_mass_bound": True,
        "return_kept_tiles": True,
    }
    for attn in (blasst_attn_func, blasst_attn_with_kvcache):
        got = attn(*inputs, threshold=0.1, causal=True, impl=impl, **everything)
        assert got.out.shape == (batch, seqlen_q, 2, 8)
        assert got.lse.shape == (batch, 2, seqlen_q)
        assert bool((got.out == 0).all())
        assert bool((got.lse == -math.inf).all())


@impls
@pytest.mark.parametrize("length", [1, 15, 16, 17, 63, 65, 127, 129, 255])
def test_lengths_that_are_no_multiple_of_a_tile(impl, length):
    inputs = heavy_tailed_inputs(1, length, length, 2, 1, 16, seed=length)
    inputs.k[..., 0] -= 100.0  # all logits far below 0: a stray 0 of a padded key would dominate
    for causal in (False, True):
        mask = causal_mask(length, length) if causal else torch.ones(length, length, dtype=torch.bool)
        out, lse = masked_softmax(*inputs, mask)
        for attn in (blasst_attn_func, blasst_attn_with_kvcache):
            got = attn(*inputs, threshold=0.0, causal=causal, return_lse=True, impl=impl)
            close(got.out.double(), out, rtol=1e-3, atol=1e-4)
            close(got.lse.double(), lse, rtol=1e-4, atol=1e-4)


@impls
@pytest.mark.parametrize("head_dim", [32, 40, 64, 72, 80, 96, 112, 120, 128, 160, 192, 224, 256])
def test_head_dims_with_nan_in_the_lanes_beyond(impl, head_dim):
    wide = heavy_tailed_inputs(1, 70, 200, 2, 1, 256, seed=head_dim, dtype=torch.float16)
    for x in wide:
        x[..., head_dim:] = math.nan
    q, k, v = (x[..., :head_dim] for x in wide)
    truth = reference_attention(q, k, v, causal=True)
    yardstick = reference_attention(q, k, v, causal=True, dtype=torch.float16)
    got = blasst_attn_func(q, k, v, threshold=0.0, causal=True, impl=impl)
    assert_within_budget(got.out, truth.out, yardstick.out)
    step = blasst_attn_with_kvcache(q[:, -1:], k, v, threshold=0.0, impl=impl)
    assert_within_budget(step.out, truth.out[:, -1:], yardstick.out[:, -1:])


@impls
@pytest.mark.parametrize(("dims", "heads"), [((192, 128), (4, 4)), ((64, 128), (2, 1)), ((32, 64), (2, 1))])
def test_value_head_dim_may_differ(impl, dims, heads):
    inputs = heavy_tailed_inputs(1, 65, 300, *heads, *dims, seed=9)
    got = blasst_attn_func(*inputs, threshold=0.05, causal=True, return_counts=True, impl=impl)
    truth = reference_attention(*inputs, threshold=0.05, causal=True)
    assert got.out.shape[-1] == dims[1]
    close(got.out.double(), truth.out, rtol=1e-4, atol=1e-5)
    scaled = blasst_attn_func(*inputs, threshold=0.0, softmax_scale=0.01, impl=impl)
    assert not torch.allclose(scaled.out, got.out)


@impls
@pytest.mark.parametrize("heads", [16, 128])
def test_mla_decode_shares_storage_between_keys_and_values(impl, heads):
    inputs = heavy_tailed_inputs(1, 1, 640, heads, 1, 576, seed=10, dtype=torch.bfloat16)
    cache = inputs.k
    got = blasst_attn_with_kvcache(
        inputs.q, cache, cache[..., :512], threshold=0.05, return_counts=True, impl=impl
    )
    truth = reference_attention(inputs.q, cache, cache[..., :512], threshold=0.05, phase="decode")
    assert got.out.shape == (1, 1, heads, 512)
    assert int(got.counts.skipped.sum()) == int(truth.counts.skipped.sum()) > 0
    close(got.out.double(), truth.out, rtol=2e-2, atol=2e-2)


@impls
@pytest.mark.parametrize("page_size", [1, 4, 16, 48, 128, 512])
def test_pages_of_any_size_equal_the_contiguous_cache(impl, page_size):
    inputs = heavy_tailed_inputs(3, 2, 700, 2, 1, 16, seed=11)
    used = torch.tensor([700, 129, 300], dtype=torch.int32)
    pages_k, table = pages_from(inputs.k, page_size, fill=math.nan)
    pages_v, _ = pages_from(inputs.v, page_size, fill=math.nan)
    options = {"threshold": 0.05, "causal": True, "return_counts": True, "return_lse": True, "impl": impl}
    plain = blasst_attn_with_kvcache(*inputs, cache_seqlens=used, **options)
    got = blasst_attn_with_kvcache(
        inputs.q, pages_k, pages_v, cache_seqlens=used, block_table=table, **options
    )
    assert torch.equal(got.out, plain.out)
    assert torch.equal(got.lse, plain.lse)
    assert int(got.counts.skipped.sum()) == int(plain.counts.skipped.sum()) > 0


@impls
def test_paged_varlen_equals_packed(impl):
    inputs = heavy_tailed_inputs(2, 200, 600, 2, 1, 16, seed=12)
    lengths_k = [600, 330]
    cu_q = torch.tensor([0, 200, 400], dtype=torch.int32)
    cu_k = torch.tensor([0, 600, 930], dtype=torch.int32)
    k, v = (torch.cat([x[i, :n] for i, n in enumerate(lengths_k)]) for x in inputs[1:])
    pages_k, table = pages_from(inputs.k, 16, fill=math.nan)
    pages_v, _ = pages_from(inputs.v, 16, fill=math.nan)
    q = inputs.q.flatten(0, 1)
    options = {"threshold": 0.05, "causal": True, "return_counts": True, "impl": impl}
    packed = blasst_attn_varlen_func(q, k, v, cu_q, cu_k, 200, 600, **options)
    paged = blasst_attn_varlen_func(q, pages_k, pages_v, cu_q, cu_k, 200, 600, block_table=table, **options)
    assert torch.equal(packed.out, paged.out)
    assert int(packed.counts.skipped.sum()) == int(paged.counts.skipped.sum()) > 0


@impls
def test_new_keys_are_written_behind_the_cached_ones(impl):
    inputs = heavy_tailed_inputs(2, 3, 100, 2, 1, 16, seed=13)
    lengths = torch.tensor([50, 97], dtype=torch.int32)
    truth_k, truth_v = inputs.k.clone(), inputs.v.clone()
    new_k, new_v = (
        torch.stack([x[b, n : n + 3] for b, n in enumerate(lengths.tolist())]) for x in inputs[1:]
    )
    for paged in (False, True):
        k, v, table = inputs.k.clone(), inputs.v.clone(), None
        for b, n in enumerate(lengths.tolist()):
            k[b, n:] = v[b, n:] = math.nan
        if paged:
            (k, table), (v, _) = pages_from(k, 16, fill=math.nan), pages_from(v, 16, fill=math.nan)
        got = blasst_attn_with_kvcache(
            inputs.q,
            k,
            v,
            new_k,
            new_v,
            cache_seqlens=lengths,
            block_table=table,
            causal=True,
            threshold=0.1,
            impl=impl,
        )
        expected = blasst_attn_with_kvcache(
            inputs.q, truth_k, truth_v, cache_seqlens=lengths + 3, causal=True, threshold=0.1, impl=impl
        )
        close(got.out, expected.out)


@impls
def test_strided_inputs_equal_their_contiguous_copies(impl):
    base = torch.randn(2, 3, 90, 5, DIM, generator=torch.Generator().manual_seed(14)).to(DTYPE)
    plain = [base[:, i].contiguous() for i in range(3)]
    transposed = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in plain]  # (B, H, S, D) storage
    every_second = torch.randn(2, 180, 5, DIM).to(DTYPE)
    every_second[:, ::2] = plain[1]
    wide = torch.zeros(2, 90, 5, 2 * DIM, dtype=DTYPE)
    wide[..., ::2] = plain[2]
    views = [
        transposed,
        [plain[0], every_second[:, ::2], plain[2]],
        [plain[0], plain[1], wide[..., ::2]],
        list(base.unbind(1)),
    ]
    expected = blasst_attn_func(*plain, threshold=0.1, causal=True, impl=impl).out
    for inputs in views:
        copies = [x.clone() for x in inputs]
        close(blasst_attn_func(*inputs, threshold=0.1, causal=True, impl=impl).out, expected)
        assert all(torch.equal(a, b) for a, b in zip(inputs, copies, strict=True))
    expanded = [x[:1].expand(2, -1, -1, -1) for x in plain]
    got = blasst_attn_func(*expanded, threshold=0.1, causal=True, impl=impl).out
    close(got[1], expected[0])


@impls
def test_softcap_acts_before_the_mask_and_on_the_vote(impl):
    inputs = heavy_tailed_inputs(1, 64, 640, 2, 1, 16, seed=15, hot_fraction=0.0)
    outs = [
        blasst_attn_func(*inputs, softcap=c, threshold=0.003, causal=True, return_counts=True, impl=impl)
        for c in (0.0, 5.0, 50.0)
    ]
    assert not torch.allclose(outs[0].out, outs[1].out)
    assert not torch.allclose(outs[1].out, outs[2].out)
    assert int(outs[0].counts.skipped.sum()) > int(outs[1].counts.skipped.sum())  # capped gaps are smaller
    for bad in (-1.0, math.nan, math.inf):
        with pytest.raises(ValueError, match="softcap"):
            blasst_attn_func(*inputs, softcap=bad, impl=impl)


@impls
@pytest.mark.parametrize("sink", [-math.inf, 0.0, 20.0])
@pytest.mark.parametrize("tokens", [1, 70])
def test_sinks_join_the_denominator_once(impl, sink, tokens):
    inputs = heavy_tailed_inputs(1, tokens, 300, 2, 1, 16, seed=16)
    sinks = torch.full((2,), sink, dtype=torch.bfloat16)
    got = blasst_attn_with_kvcache(
        *inputs, sinks=sinks, threshold=0.0, softmax_scale=0.1, return_lse=True, impl=impl
    )
    scores = inputs.q[0].transpose(0, 1).double() @ inputs.k[0, :, 0].T.double() * 0.1
    lse = torch.logaddexp(scores.logsumexp(-1), torch.tensor(sink, dtype=torch.float64))
    out = (scores - lse[..., None]).exp() @ inputs.v[0, :, 0].double()
    close(got.lse[0].double(), lse, rtol=1e-5, atol=1e-5)
    close(got.out[0].transpose(0, 1).double(), out, rtol=1e-4, atol=1e-5)
    empty = blasst_attn_func(
        inputs.q, inputs.k[:, :0], inputs.v[:, :0], sinks=sinks, return_lse=True, impl=impl
    )
    assert bool((empty.out == 0).all())
    assert bool((empty.lse == sink).all())
    with pytest.raises(ValueError, match="sinks: got shape"):
        blasst_attn_func(*inputs, sinks=torch.zeros(3), impl=impl)


@impls
def test_lse_is_the_natural_logarithm_in_float32_and_its_layout_is_fixed(impl):
    inputs = heavy_tailed_inputs(2, 30, 70, 4, 2, 16, seed=17, dtype=torch.float16)
    got = blasst_attn_func(*inputs, return_lse=True, impl=impl)
    scores = (
        torch.einsum("bqhd,bkhd->bhqk", inputs.q.double(), inputs.k.double().repeat_interleave(2, 2))
        * inputs.q.shape[-1] ** -0.5
    )
    assert got.lse.shape == (2, 4, 30)
    assert got.lse.dtype == torch.float32
    close(got.lse.double(), scores.logsumexp(-1), rtol=1e-5, atol=1e-5)
    cu_q, cu_k = (torch.tensor([0, n, 2 * n], dtype=torch.int32) for n in (30, 70))
    packed = blasst_attn_varlen_func(
        *(x.flatten(0, 1) for x in inputs), cu_q, cu_k, 30, 70, return_lse=True, impl=impl
    )
    assert packed.lse.shape == (4, 60)
    close(packed.lse[:, 30:], got.lse[1])


def test_two_shards_merge_by_natural_weights():
    lse = [torch.full((1, 1, 1), math.log(z)) for z in (2.0, 8.0)]
    out, total = merge_attention([torch.zeros(1, 1, 1, 4), torch.ones(1, 1, 1, 4)], lse)
    close(out, torch.full((1, 1, 1, 4), 0.8))
    assert float(total) == pytest.approx(math.log(10.0))


def test_empty_parts_merge_to_nothing_and_their_garbage_is_ignored():
    empty = torch.full((1, 1, 1), -math.inf)
    nothing = torch.zeros(1, 1, 1, 4)
    out, lse = merge_attention([nothing, nothing], [empty, empty])
    assert bool((out == 0).all())
    assert float(lse) == -math.inf
    for garbage in (math.nan, math.inf):
        out, lse = merge_attention(
            [torch.full_like(nothing, garbage), nothing + 3], [empty, torch.ones(1, 1, 1)]
        )
        assert torch.equal(out, nothing + 3)
        assert float(lse) == 1.0


@impls
def test_attention_over_two_shards_merges_to_the_whole(impl):
    inputs = heavy_tailed_inputs(1, 70, 500, 2, 1, 16, seed=18)
    whole = blasst_attn_func(*inputs, return_lse=True, impl=impl)
    parts = [
        blasst_attn_func(inputs.q, inputs.k[:, keys], inputs.v[:, keys], return_lse=True, impl=impl)
        for keys in (slice(0, 300), slice(300, 500))
    ]
    out, lse = merge_attention([p.out for p in parts], [p.lse for p in parts])
    close(out, whole.out, rtol=1e-4, atol=1e-5)
    close(lse, whole.lse, rtol=1e-5, atol=1e-5)
    with pytest.raises(ValueError, match="outs, lses"):
        merge_attention([whole.out], [whole.lse[:, :1]])
