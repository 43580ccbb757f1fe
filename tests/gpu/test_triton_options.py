"""Triton kernels on a GPU against the reference; a missing GPU is a failure here, not a skip."""

import math

import pytest
import torch

from blasst import blasst_attn_func, blasst_attn_varlen_func, blasst_attn_with_kvcache
from blasst.core.cache import quantize
from blasst.core.reference import reference_attention
from blasst.testing import (
    assert_finite,
    assert_matches_reference,
    assert_same_kept_tiles,
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
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
HEAD_DIMS = (32, 40, 64, 72, 80, 96, 112, 120, 128, 160, 192, 224, 256)


def inputs(*shape, **options):
    return heavy_tailed_inputs(*shape, device="cuda", **options)


def check(got, args, threshold, **options):
    """Everything a call returned against the reference on the same device."""
    truth = reference_attention(*args, threshold=threshold, **options)
    yardstick = reference_attention(
        *args, threshold=threshold, kept_tiles=truth.kept_tiles, dtype=args[0].dtype, **options
    )
    assert_matches_reference(got, truth, yardstick, threshold)
    assert threshold in (None, 0.0) or int(got.counts.skipped.sum()) > 0


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_every_head_dim_in_prefill_and_decode(head_dim, dtype):
    wide = inputs(1, 200, 700, 6, 2, 256, dtype=dtype, seed=head_dim)
    for x in wide:
        x[..., head_dim:] = math.nan
    args = [x[..., :head_dim] for x in wide]
    scale = 1 / 16  # the level of these inputs lies in the first channel, at the scale of 256
    got = blasst_attn_func(*args, threshold=0.02, causal=True, softmax_scale=scale, **EVERYTHING)
    check(got, args, 0.02, causal=True, softmax_scale=scale)
    args[0] = args[0][:, :3]
    got = blasst_attn_with_kvcache(*args, threshold=0.02, causal=True, softmax_scale=scale, **EVERYTHING)
    check(got, args, 0.02, causal=True, softmax_scale=scale, phase="decode")


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"causal": False},
        {"window_size": (300, 0)},
        {"window_size": (100, 50), "causal": False},
        {"softcap": 20.0},
        {"sinks": True},
    ],
    ids=["causal", "full", "window", "two_sided", "softcap", "sinks"],
)
@pytest.mark.parametrize("tokens", [1, 8, 333])
def test_masks_softcap_and_sinks(tokens, options):
    args = inputs(2, tokens, 2111, 6, 2, 64, dtype=torch.bfloat16, seed=1)
    options = {"causal": True, **options}
    if "sinks" in options:
        options["sinks"] = torch.linspace(-2, 6, 6, device="cuda")
    phase = "decode" if tokens <= 8 else "prefill"
    for threshold in (0.0, 0.01):
        got = blasst_attn_with_kvcache(*args, threshold=threshold, **options, **EVERYTHING)
        truth = reference_attention(*args, threshold=threshold, phase=phase, **options)
        yardstick = reference_attention(
            *args,
            threshold=threshold,
            phase=phase,
            kept_tiles=truth.kept_tiles,
            dtype=torch.bfloat16,
            **options,
        )
        assert_matches_reference(got, truth, yardstick, threshold)


@pytest.mark.parametrize("tokens", [2, 130])
def test_error_budget_holds_for_every_row(tokens):
    args = inputs(2, tokens, 3000, 8, 2, 64, dtype=torch.bfloat16, seed=2, drop=(2.0, 12.0), noise=1.0)
    attn = blasst_attn_with_kvcache
    free = attn(*args, threshold=1.0, **EVERYTHING)
    got = attn(*args, threshold=1.0, max_skipped_mass=0.05, **EVERYTHING)
    assert 0 < int(got.counts.skipped.sum()) <= int(free.counts.skipped.sum())
    phase = "decode" if tokens <= 8 else "prefill"
    followed = reference_attention(*args, threshold=1.0, phase=phase, kept_tiles=got.kept_tiles)
    assert float(followed.skipped_mass.max()) <= 0.05 / 1.05 * (1 + 1e-5)
    assert bool((got.mass_bound.double() * (1 + 1e-5) + 1e-30 >= followed.skipped_mass).all())


@pytest.mark.parametrize("head_dims", [(192, 128), (128, 64)])
def test_latent_and_unequal_head_dims_in_prefill(head_dims):
    args = inputs(1, 300, 900, 4, 4, *head_dims, dtype=torch.bfloat16, seed=3)
    got = blasst_attn_func(*args, threshold=0.02, causal=True, **EVERYTHING)
    check(got, args, 0.02, causal=True)


@pytest.mark.parametrize(("heads", "tokens"), [(16, 1), (128, 1), (128, 3)])
def test_latent_decode_with_values_inside_keys(heads, tokens):
    q, k, _ = inputs(1, tokens, 1500, heads, 1, 576, dtype=torch.bfloat16, seed=4)
    args = (q, k, k[..., :512])
    got = blasst_attn_with_kvcache(*args, threshold=0.02, causal=True, **EVERYTHING)
    check(got, args, 0.02, causal=True, phase="decode")


@pytest.mark.parametrize("tokens", [1, 200])
def test_threshold_zero_is_bit_identical_to_dense(tokens):
    args = inputs(2, tokens, 1111, 8, 2, 128, dtype=torch.bfloat16, seed=5)
    dense = blasst_attn_with_kvcache(*args, causal=True, return_lse=True, impl="triton")
    zero = blasst_attn_with_kvcache(*args, threshold=0.0, causal=True, **EVERYTHING)
    assert torch.equal(dense.out, zero.out)
    assert torch.equal(dense.lse, zero.lse)
    plain = blasst_attn_with_kvcache(*args, threshold=0.02, causal=True, impl="triton")
    measured = blasst_attn_with_kvcache(*args, threshold=0.02, causal=True, **EVERYTHING)
    assert torch.equal(plain.out, measured.out)
    assert int(measured.counts.skipped.sum()) > 0


def test_decode_alone_and_in_a_ragged_batch_of_33_has_the_same_bits():
    args = inputs(33, 1, 6000, 8, 2, 64, dtype=torch.bfloat16, seed=6)
    lengths = torch.linspace(1, 6000, 33).int().cuda()
    threshold = torch.linspace(0, 0.05, 33).cuda()
    options = {"return_lse": True, "return_counts": True, "impl": "triton"}
    batch = blasst_attn_with_kvcache(*args, cache_seqlens=lengths, threshold=threshold, **options)
    assert int(batch.counts.skipped.sum()) > 0
    for i in range(33):
        one = blasst_attn_with_kvcache(
            *(x[i : i + 1] for x in args),
            cache_seqlens=lengths[i : i + 1],
            threshold=threshold[i : i + 1],
            **options,
        )
        assert torch.equal(one.out[0], batch.out[i])
        assert torch.equal(one.lse[0], batch.lse[i])
        assert torch.equal(one.counts.skipped[0], batch.counts.skipped[i])


@pytest.mark.parametrize("page_size", [1, 16, 48, 64, 256])
@pytest.mark.parametrize("tokens", [1, 130])
def test_pages_with_nan_in_unused_slots_equal_the_contiguous_cache(tokens, page_size):
    args = inputs(3, tokens, 1500, 6, 2, 64, dtype=torch.bfloat16, seed=7)
    lengths = torch.tensor([1500, 777, 200], dtype=torch.int32, device="cuda")
    k, v = args.k.clone(), args.v.clone()
    for b, n in enumerate(lengths.tolist()):
        k[b, n:] = v[b, n:] = math.nan
    (pages_k, table), (pages_v, _) = (pages_from(x, page_size, fill=math.nan) for x in (k, v))
    for b, n in enumerate(lengths.tolist()):
        table[b, -(-n // page_size) :] = -1 if b else 10**8
    options = {"threshold": 0.02, "causal": True, "return_counts": True, "return_lse": True, "impl": "triton"}
    plain = blasst_attn_with_kvcache(*args, cache_seqlens=lengths, **options)
    got = blasst_attn_with_kvcache(
        args.q, pages_k, pages_v, cache_seqlens=lengths, block_table=table, **options
    )
    assert torch.equal(got.out, plain.out)
    assert torch.equal(got.lse, plain.lse)
    assert int(got.counts.skipped.sum()) == int(plain.counts.skipped.sum()) > 0


def fp8_inputs(tokens, head_dim, dtype, **options):
    """q, and k and v in fp8 with a scale for each sequence and KV head."""
    q, k, v = inputs(2, tokens, 2111, 8, 2, head_dim, dtype=dtype, **options)
    scales = torch.tensor([[0.3, 0.5], [0.7, 1.3]], device="cuda"), torch.tensor([0.01, 0.02], device="cuda")
    k_scale, v_scale = (scale.expand(2, 2) for scale in scales)
    return (q, quantize(k, k_scale), quantize(v, v_scale)), {"k_descale": k_scale, "v_descale": v_scale}


@pytest.mark.parametrize("options", [{}, {"softcap": 20.0}, {"window_size": (900, 0)}, {"budget": True}])
@pytest.mark.parametrize("tokens", [1, 8, 130])
@pytest.mark.parametrize("head_dim", [64, 192])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_an_fp8_cache_with_scales(dtype, head_dim, tokens, options):
    args, scales = fp8_inputs(tokens, head_dim, dtype, seed=13)
    options = {"causal": True, **options}
    if options.pop("budget", False):
        options["max_skipped_mass"] = 0.1
    got = blasst_attn_with_kvcache(*args, threshold=0.02, **scales, **options, **EVERYTHING)
    assert got.out.dtype == dtype
    check(got, args, 0.02, phase="decode" if tokens <= 8 else "prefill", **scales, **options)


@pytest.mark.parametrize("tokens", [1, 130])
def test_new_keys_are_rounded_into_fp8_pages(tokens):
    args, scales = fp8_inputs(tokens, 128, torch.bfloat16, seed=14)
    lengths = torch.tensor([2111, 777], dtype=torch.int32, device="cuda")
    options = {"threshold": 0.02, "causal": True, "return_counts": True, "impl": "triton"}
    plain = blasst_attn_with_kvcache(*args, cache_seqlens=lengths, **scales, **options)
    new, pages = [], []
    for cache, scale in zip(args[1:], scales.values(), strict=True):
        values = cache.float() * scale[:, None, :, None]
        rows = (lengths.long() - tokens)[:, None] + torch.arange(tokens, device="cuda")
        batch = torch.arange(2, device="cuda")[:, None]
        new.append(values[batch, rows].bfloat16())
        stored = cache.float()
        for b, n in enumerate(lengths.tolist()):
            stored[b, n - tokens :] = math.nan
        paged, table = pages_from(stored, 64, fill=math.nan)
        pages.append(paged.to(cache.dtype))
    got = blasst_attn_with_kvcache(
        args[0], *pages, *new, cache_seqlens=lengths - tokens, block_table=table, **scales, **options
    )
    # fp8 values times a scale, rounded to bfloat16 and divided again, lie closest to the same fp8 values
    assert torch.equal(got.out, plain.out)
    assert int(got.counts.skipped.sum()) == int(plain.counts.skipped.sum()) > 0


@pytest.mark.parametrize("tokens", [1, 3, 130])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_nan_in_fp8_values_reaches_only_the_rows_that_see_it(dtype, tokens):
    args, scales = fp8_inputs(tokens, 64, dtype, seed=15)
    args[2].view(torch.uint8)[0, 2110, 0] = 0x7F  # the last key: only the last row sees it
    out = blasst_attn_with_kvcache(*args, threshold=0.02, causal=True, impl="triton", **scales).out
    bad = torch.zeros(out.shape[:3], dtype=torch.bool)
    bad[0, -1, :4] = True
    assert torch.equal(out.isnan().all(-1).cpu(), bad) and torch.equal(out.isnan().any(-1).cpu(), bad)


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
def test_an_fp8_cache_is_served_in_a_graph_without_waiting():
    args, scales = fp8_inputs(1, 128, torch.bfloat16, seed=16)
    new = [x[:, :1].bfloat16() for x in args[1:]]
    lengths = torch.tensor([2000, 777], dtype=torch.int32, device="cuda")

    def call():
        return blasst_attn_with_kvcache(
            *args, *new, cache_seqlens=lengths, threshold=0.02, k_descale=scales["k_descale"], v_descale=0.02
        ).out

    eager = call()
    torch.cuda.set_sync_debug_mode("error")
    try:
        call()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = call()
    graph.replay()
    assert torch.equal(captured, eager)


def test_packed_sequences_equal_their_own_calls():
    lengths = [(64, 64), (1, 900), (0, 100), (300, 0), (257, 1300)]
    singles = [
        inputs(1, max(a, 1), max(b, 1), 6, 2, 64, dtype=torch.bfloat16, seed=8 + a) for a, b in lengths
    ]
    singles = [(s.q[:, :a], s.k[:, :b], s.v[:, :b]) for s, (a, b) in zip(singles, lengths, strict=True)]
    packed = [torch.cat([s[i][0] for s in singles]) for i in range(3)]
    cu_q, cu_k = (
        torch.tensor([0, *torch.tensor([n[i] for n in lengths]).cumsum(0)], dtype=torch.int32, device="cuda")
        for i in range(2)
    )
    options = {"threshold_scale_factor": 20.0, "causal": True, "return_counts": True, "impl": "triton"}
    got = blasst_attn_varlen_func(*packed, cu_q, cu_k, 300, 1300, **options)
    assert int(got.counts.skipped.sum()) > 0
    for i, single in enumerate(singles):
        one = blasst_attn_func(*single, **options)
        assert torch.equal(got.out[cu_q[i] : cu_q[i + 1]], one.out[0])
        assert torch.equal(got.counts.skipped[i], one.counts.skipped[0])


@pytest.mark.parametrize("tokens", [1, 130])
def test_values_of_skipped_tiles_are_not_loaded(tokens):
    args = inputs(1, tokens, 4096, 4, 2, 64, dtype=torch.bfloat16, seed=9)
    phase = "decode" if tokens <= 8 else "prefill"
    truth = reference_attention(*args, threshold=0.02, phase=phase)
    gone = ~truth.kept_tiles[0].any(0).any(0)
    assert int(gone.sum()) > 0
    args.v[:, gone.repeat_interleave(64 if tokens <= 8 else 128)] = math.nan
    assert_finite(blasst_attn_with_kvcache(*args, threshold=0.02, impl="triton").out)


@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_a_nan_reaches_only_the_rows_that_see_it(name):
    args = inputs(1, 200, 200, 2, 1, 64, dtype=torch.bfloat16, seed=10)
    clean = blasst_attn_func(*args, threshold=0.0, causal=True, impl="triton").out
    getattr(args, name)[0, 100] = math.nan
    out = blasst_attn_func(*args, threshold=0.0, causal=True, impl="triton").out
    bad = torch.zeros(200, dtype=torch.bool)
    bad[100 if name == "q" else slice(100, None)] = True
    assert torch.equal(out.isnan().any(-1)[0, :, 0].cpu(), bad)
    torch.testing.assert_close(out[:, ~bad], clean[:, ~bad])


def test_graph_replay_reads_lengths_tables_and_thresholds_on_the_device():
    args = inputs(2, 1, 4096, 8, 2, 64, dtype=torch.bfloat16, seed=11)
    (pages_k, table), (pages_v, _) = (pages_from(x, 64, fill=math.nan) for x in args[1:])
    lengths = torch.tensor([4096, 2000], dtype=torch.int32, device="cuda")
    threshold = torch.tensor([0.02, 0.02], device="cuda")

    def call():
        return blasst_attn_with_kvcache(
            args.q,
            pages_k,
            pages_v,
            cache_seqlens=lengths,
            block_table=table,
            threshold=threshold,
            return_counts=True,
            impl="triton",
        )

    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = call()
    seen = []
    for new_lengths, new_threshold in (([4096, 2000], 0.02), ([77, 3999], 0.0), ([1000, 4096], 0.5)):
        lengths.copy_(torch.tensor(new_lengths))
        threshold.fill_(new_threshold)
        graph.replay()
        eager = call()
        assert torch.equal(captured.out, eager.out)
        assert torch.equal(captured.counts.skipped, eager.counts.skipped)
        seen.append(int(captured.counts.skipped.sum()))
    assert seen[1] == 0 < seen[0] and seen[2] > 0


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
def test_no_call_waits_for_the_device():
    args = inputs(2, 1, 4096, 8, 2, 64, dtype=torch.bfloat16, seed=12)
    prompt = inputs(1, 300, 300, 8, 2, 64, dtype=torch.bfloat16, seed=12)
    lengths = torch.tensor([4096, 2000], dtype=torch.int32, device="cuda")

    def calls():
        blasst_attn_with_kvcache(
            *args, cache_seqlens=lengths, threshold_scale_factor=20.0, return_counts=True
        )
        blasst_attn_func(*prompt, threshold=0.02, causal=True, return_counts=True)

    calls()
    torch.cuda.set_sync_debug_mode("error")
    try:
        calls()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_skip_sets_are_nested_on_random_inputs():
    args = [
        torch.randn(1, n, h, 64, dtype=torch.float16, device="cuda") * 3
        for n, h in ((500, 4), (3000, 2), (3000, 2))
    ]
    before = None
    for threshold in (0.0, 0.001, 0.05, 1.0):
        got = blasst_attn_func(*args, threshold=threshold, return_kept_tiles=True, impl="triton")
        truth = reference_attention(*args, threshold=threshold)
        # fp32 scores of about 60 nats: rounding moves a margin by less than 1e-3
        assert_same_kept_tiles(got.kept_tiles, truth, threshold, near=1e-3)
        assert before is None or not bool((got.kept_tiles & ~before).any())
        before = got.kept_tiles
    assert not bool(before.all())


def test_padded_decode_through_transformers_waits_once_per_forward_at_most():
    pytest.importorskip("transformers")
    from transformers import LlamaConfig, LlamaForCausalLM

    from blasst import attention_stats, sparse_attention

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=100,
        hidden_size=256,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=4096,
    )
    model = LlamaForCausalLM(config).cuda().bfloat16().eval()
    ids = torch.randint(100, (3, 1500), device="cuda")
    mask = torch.ones_like(ids)
    mask[0, :700] = mask[1, :3] = 0
    settings = {"attention_mask": mask, "max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
    with torch.no_grad():
        dense = model.generate(ids, **settings, output_logits=True, return_dict_in_generate=True)
        with sparse_attention(model, threshold=0.0):
            zero = model.generate(ids, **settings, output_logits=True, return_dict_in_generate=True)
        error = (zero.logits[0].float() - dense.logits[0].float()).abs().max()
        assert float(error) <= 0.05 * float(dense.logits[0].float().abs().max())
        with sparse_attention(model, threshold=0.3, collect_counts=True):
            model.generate(ids, **settings)
            stats = attention_stats(model)
    assert {record.phase for record in stats} == {"prefill", "decode"}
    assert sum(int(record.visited.sum()) for record in stats) > 0
