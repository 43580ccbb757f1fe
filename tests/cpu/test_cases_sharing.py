"""Cases from the field: geometry, comparisons, and the sharing of pages, prefixes, heads and lengths."""

import math

import pytest
import torch
from cases_parts import (
    DTYPE,
    FEW,
    ON_GPU,
    blasst_attn_func,
    blasst_attn_varlen_func,
    blasst_attn_with_kvcache,
    close,
    heavy_tailed_inputs,
    impls,
)

from blasst import merge_attention
from blasst.core.reference import reference_attention
from blasst.testing import assert_error_bound, assert_finite, assert_within_budget, max_error, pages_from

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy of the interpreter

MAPS = {"return_kept_tiles": True, "return_lse": True}


def attention_of(phase):
    return blasst_attn_with_kvcache if phase == "decode" else blasst_attn_func


def skipped(result):
    return int((~result.kept_tiles).sum())


@impls
@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_the_kept_map_depends_on_scores_alone(impl, phase):
    """Not on head_dim, dtype, the rest of the batch or its order: the tile shape never moves."""
    inputs = heavy_tailed_inputs(3, 3 if phase == "decode" else 130, 900, 4, 2, 32, seed=1, drop=(1.0, 12.0))
    inputs = [x.half().to(DTYPE) for x in inputs]
    options = {"threshold": 0.05, "softmax_scale": 0.2, "impl": impl, "causal": True, **MAPS}
    wanted = attention_of(phase)(*inputs, **options).kept_tiles
    assert not bool(wanted.all())
    wide = [torch.nn.functional.pad(x, (0, 128 - x.shape[-1])) for x in inputs]
    assert torch.equal(attention_of(phase)(*wide, **options).kept_tiles, wanted)
    halves = [x.half() for x in inputs]
    assert torch.equal(attention_of(phase)(*halves, **options).kept_tiles, wanted)
    flipped = attention_of(phase)(*(x.flip(0) for x in inputs), **options).kept_tiles
    assert torch.equal(flipped.flip(0), wanted)
    alone = attention_of(phase)(*(x[1:2] for x in inputs), **options).kept_tiles
    assert torch.equal(alone, wanted[1:2])


def test_comparisons_fail_on_a_nan_against_a_number():
    good = torch.ones(1, 2, 1, 4)
    for odd in (math.nan, math.inf):
        bad = good.clone()
        bad[0, 1, 0, 2] = odd
        assert max_error(bad, good) == max_error(good, bad) == math.inf
        for got, truth in ((bad, good), (good, bad)):
            with pytest.raises(AssertionError, match="differs in 1"):
                assert_within_budget(got, truth, truth)
            with pytest.raises(AssertionError, match="above 2"):
                assert_error_bound(got, truth, torch.ones(1, 1, 2), good)
        with pytest.raises(AssertionError, match="1 of 8"):
            assert_finite(bad)
        assert_within_budget(bad, bad, bad)


@impls
@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(40, 300), (300, 40), (130, 257)])
def test_lengths_of_queries_and_keys_may_differ_without_a_mask(impl, seqlen_q, seqlen_k):
    inputs = heavy_tailed_inputs(1, seqlen_q, seqlen_k, 4, 2, 96, seed=2, dtype=torch.float16)
    truth = reference_attention(*inputs)
    yardstick = reference_attention(*inputs, dtype=torch.float16)
    for threshold in (None, 0.0):
        got = blasst_attn_func(*inputs, threshold=threshold, impl=impl)
        assert_within_budget(got.out, truth.out, yardstick.out)


@impls
@pytest.mark.parametrize("window", [(20, 30), (0, 0), (-1, 5), (5, -1), (300, 1)])
def test_a_window_to_both_sides_equals_its_mask(impl, window):
    inputs = heavy_tailed_inputs(1, 150, 280, 2, 1, 16, seed=3, drop=(0.5, 2.0))
    position, key = torch.arange(150)[:, None] + 130, torch.arange(280)
    mask = torch.ones(150, 280, dtype=torch.bool)
    if window[0] >= 0:
        mask &= key >= position - window[0]
    if window[1] >= 0:
        mask &= key <= position + window[1]
    scores = inputs.q[0].transpose(0, 1).double() @ inputs.k[0, :, 0].T.double() * inputs.q.shape[-1] ** -0.5
    scores = scores.masked_fill(~mask, -math.inf)
    out = (scores.softmax(-1) @ inputs.v[0, :, 0].double()).transpose(0, 1)
    got = blasst_attn_func(*inputs, window_size=window, threshold=0.0, return_lse=True, impl=impl)
    close(got.out[0].double(), out, rtol=1e-4, atol=1e-5)
    close(got.lse[0].double(), scores.logsumexp(-1), rtol=1e-5, atol=1e-5)


@impls
def test_every_number_of_query_rows_works(impl):
    inputs = heavy_tailed_inputs(1, 127, 200, 1, 1, 16, seed=4)
    whole = blasst_attn_func(*inputs, threshold=0.0, causal=True, impl=impl).out
    for rows in (1, 2, 7, 8, 9, 100, 126) if FEW else range(1, 127):
        for attn in (blasst_attn_func, blasst_attn_with_kvcache):
            got = attn(inputs.q[:, -rows:], inputs.k, inputs.v, threshold=0.0, causal=True, impl=impl).out
            close(got, whole[:, -rows:], rtol=1e-5, atol=1e-6)


@impls
@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_pages_may_be_shared_and_named_twice(impl, phase):
    page, rows = 32, 2 if phase == "decode" else 70
    inputs = heavy_tailed_inputs(1, 2 * rows, 12 * page, 4, 2, 16, seed=5, block=page)
    pages_k, pages_v = (x[0].unflatten(0, (12, page)) for x in inputs[1:])
    table = torch.tensor([[7, 3, 3, 0, 11, 2, 5, 7, 1, 4], [7, 3, 9, 6, 8, 8, 8, 10, -1, 2**31 - 1]])
    lengths = [10 * page - 5, 8 * page]
    options = {"threshold": 0.05, "causal": True, "impl": impl, **MAPS}
    q = inputs.q.view(2, rows, 4, -1)
    got = blasst_attn_with_kvcache(
        q,
        pages_k,
        pages_v,
        cache_seqlens=torch.tensor(lengths, dtype=torch.int32),
        block_table=table.int(),
        **options,
    )
    assert skipped(got) > 0
    for b, length in enumerate(lengths):
        own = table[b, : -(-length // page)]
        k, v = (x[own].flatten(0, 1)[None, :length] for x in (pages_k, pages_v))
        alone = blasst_attn_with_kvcache(q[b : b + 1], k, v, **options)
        close(got.out[b], alone.out[0], rtol=1e-5, atol=1e-6)
        tiles = alone.kept_tiles.shape[-1]
        assert torch.equal(got.kept_tiles[b, ..., :tiles], alone.kept_tiles[0])


@impls
def test_a_spike_in_the_first_page_decides_for_all_of_a_long_cache(impl):
    """However many splits there are and whoever shares the batch: tiles compare with the same anchors."""
    length, page = 16384 if ON_GPU else 4096, 16
    generator = torch.Generator().manual_seed(11)
    q, k, v = (torch.randn(2, n, h, 64, generator=generator) for n, h in ((1, 8), (length, 2), (length, 2)))
    q[..., 0] = 8.0
    k[:, 5, :, 0] = 40.0  # 40 nats, in the first page; the others lie within some 6 of 0
    q, k, v = (x.to(DTYPE) for x in (q, k, v))
    (pages_k, table), (pages_v, _) = (pages_from(x, page, fill=math.nan) for x in (k, v))
    used = torch.tensor([length, length // 2 + 7], dtype=torch.int32)
    options = {"threshold": 0.05, "impl": impl, **MAPS}
    got = blasst_attn_with_kvcache(q, pages_k, pages_v, cache_seqlens=used, block_table=table, **options)
    for b, n in enumerate(used.tolist()):
        tiles = -(-n // 64)
        kept = torch.zeros(got.kept_tiles.shape[-1], dtype=torch.bool)
        kept[[0, tiles - 2, tiles - 1]] = True
        assert bool((got.kept_tiles[b] == kept).all())
        alone = blasst_attn_with_kvcache(
            q[b : b + 1],
            pages_k,
            pages_v,
            cache_seqlens=used[b : b + 1],
            block_table=table[b : b + 1, : -(-n // page)].contiguous(),
            **options,
        )
        assert torch.equal(alone.out[0], got.out[b])
        assert torch.equal(alone.lse[0], got.lse[b])


def check_dropped(got_out, got_lse, dense, threshold, keys, v):
    """Every dropped key weighs less than the threshold times the largest: so much may be missing."""
    dropped = (dense.lse - got_lse).double()
    assert bool((dropped >= -1e-5).all())
    assert bool((dropped <= math.log1p(threshold * keys) + 1e-5).all())
    share = threshold * keys / (1 + threshold * keys)
    assert max_error(got_out, dense.out) <= 2 * float(v.abs().max()) * share


@impls
def test_a_shared_prefix_merges_with_the_suffixes(impl):
    suffixes, prefix, page = [1, 17, 50], 640, 64
    inputs = heavy_tailed_inputs(3, 1, prefix + 50, 4, 2, 16, seed=6)
    k, v = inputs.k.clone(), inputs.v.clone()
    k[:, :prefix], v[:, :prefix] = k[:1, :prefix], v[:1, :prefix]
    lengths = torch.tensor([prefix + n for n in suffixes], dtype=torch.int32)
    dense = blasst_attn_with_kvcache(inputs.q, k, v, cache_seqlens=lengths, return_lse=True, impl=impl)
    pages = [x[0, :prefix].unflatten(0, (-1, page)) for x in (k, v)]
    table = torch.arange(prefix // page, dtype=torch.int32).expand(3, -1).contiguous()
    for threshold in (0.0, 1e-3):
        options = {"threshold": threshold, "impl": impl, **MAPS}
        first = blasst_attn_with_kvcache(inputs.q, *pages, cache_seqlens=prefix, block_table=table, **options)
        rest = blasst_attn_with_kvcache(
            inputs.q, k[:, prefix:], v[:, prefix:], cache_seqlens=lengths - prefix, **options
        )
        out, lse = merge_attention([first.out, rest.out], [first.lse, rest.lse])
        if threshold == 0.0:
            close(out, dense.out, rtol=1e-4, atol=1e-5)
            close(lse, dense.lse, rtol=1e-5, atol=1e-5)
        else:
            assert skipped(first) > 0
            check_dropped(out, lse, dense, threshold, prefix + 50, v)


@pytest.fixture
def one_thread():
    """On a CPU torch cuts products among its threads by size, so the eager kernel's bits know other heads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@impls
@pytest.mark.parametrize("phase", ["prefill", "decode"])
@pytest.mark.usefixtures("one_thread")
def test_whole_groups_of_heads_on_each_rank_give_the_bits_of_one_device(impl, phase):
    inputs = heavy_tailed_inputs(1, 1 if phase == "decode" else 70, 640, 28, 4, 16, seed=7)
    options = {"threshold": 0.05, "causal": True, "impl": impl, **MAPS}
    whole = attention_of(phase)(*inputs, **options)
    assert skipped(whole) > 0
    for ranks in (2, 4):
        parts = [
            attention_of(phase)(*(x.chunk(ranks, dim=2)[rank] for x in inputs), **options)
            for rank in range(ranks)
        ]
        assert torch.equal(torch.cat([part.out for part in parts], 2), whole.out)
        assert torch.equal(torch.cat([part.lse for part in parts], 1), whole.lse)
        assert torch.equal(torch.cat([part.kept_tiles for part in parts], 1), whole.kept_tiles)


@impls
def test_a_kv_head_on_several_ranks_decides_on_each_and_keeps_the_bound(impl):
    inputs = heavy_tailed_inputs(1, 1, 1280, 16, 2, 16, seed=8, noise=2.0, drop=(4.0, 12.0))
    threshold = 3e-3
    whole = blasst_attn_with_kvcache(*inputs, threshold=threshold, impl=impl, **MAPS)
    dense = blasst_attn_with_kvcache(*inputs, return_lse=True, impl=impl)
    parts = []
    for rank in range(4):  # half of a group each
        kv = slice(rank // 2, rank // 2 + 1)
        part = inputs.q[:, :, 4 * rank : 4 * rank + 4], inputs.k[:, :, kv], inputs.v[:, :, kv]
        parts.append(blasst_attn_with_kvcache(*part, threshold=threshold, impl=impl, **MAPS))
        # fewer heads must agree, so at least what the whole group skips is skipped
        assert not bool((parts[-1].kept_tiles[:, 0] & ~whole.kept_tiles[:, rank // 2]).any())
    assert sum(map(skipped, parts)) > 2 * skipped(whole) > 0
    out, lse = torch.cat([p.out for p in parts], 2), torch.cat([p.lse for p in parts], 1)
    check_dropped(out, lse, dense, threshold, 1280, inputs.v)


@impls
def test_a_ring_of_two_divides_by_the_global_length(impl):
    length, factor = 1024, 3.0
    inputs = heavy_tailed_inputs(1, 64, length, 2, 1, 16, seed=9, drop=(3.0, 12.0))
    dense = blasst_attn_func(*inputs, return_lse=True, impl=impl)
    parts = [
        blasst_attn_func(
            inputs.q, inputs.k[:, keys], inputs.v[:, keys], threshold=factor / length, impl=impl, **MAPS
        )
        for keys in (slice(0, 512), slice(512, 1024))
    ]
    assert sum(map(skipped, parts)) > 0
    out, lse = merge_attention([p.out for p in parts], [p.lse for p in parts])
    check_dropped(out, lse, dense, factor / length, length, inputs.v)


@impls
def test_fewer_keys_than_queries_in_packed_sequences(impl):
    lengths_q, lengths_k = [8, 90, 70], [4, 5, 70]
    q, k, v = heavy_tailed_inputs(1, 168, 79, 2, 1, 16, seed=10)
    cu_q, cu_k = (torch.tensor([0, *torch.tensor(n).cumsum(0)]).int() for n in (lengths_q, lengths_k))
    got = blasst_attn_varlen_func(
        q[0], k[0], v[0], cu_q, cu_k, 90, 70, threshold=0.1, causal=True, impl=impl, return_lse=True
    )
    for i, (rows, keys) in enumerate(zip(lengths_q, lengths_k, strict=True)):
        here = slice(int(cu_q[i]), int(cu_q[i + 1]))
        blind = max(rows - keys, 0)
        assert bool((got.out[here][:blind] == 0).all())
        assert bool((got.lse[:, here][:, :blind] == -math.inf).all())
        assert_finite(got.lse[:, here][:, blind:])
