"""Two GPUs: tensors off the current one, heads and keys spread over both, a model split between them."""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from blasst import (
    blasst_attn_func,
    blasst_attn_varlen_func,
    blasst_attn_with_kvcache,
    merge_attention,
)
from blasst.core.types import AttentionOutput
from blasst.testing import Inputs, heavy_tailed_inputs, pages_from

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")

HERE, THERE = "cuda:0", "cuda:1"
BFLOAT = torch.bfloat16
MEASURES = {"return_lse": True, "return_counts": True, "return_mass_bound": True, "return_kept_tiles": True}

impls = pytest.mark.parametrize("impl", ["hopper", "triton"])
#: New tokens of a call: 1 and 4 follow the decode rule, 300 the prefill rule.
tokens = pytest.mark.parametrize("tokens", [1, 4, 300])


def inputs_of(tokens: int, heads: int = 8, kv_heads: int = 2, keys: int = 6000, seed: int = 0) -> Inputs:
    block = 128 if tokens > 8 else 64
    return heavy_tailed_inputs(2, tokens, keys, heads, kv_heads, 128, dtype=BFLOAT, block=block, seed=seed)


def attention(x: list[torch.Tensor] | Inputs, impl: str, **options: object) -> AttentionOutput:
    """By the rule of its number of new tokens, with all measures."""
    attend = blasst_attn_func if x[0].shape[1] > 8 else blasst_attn_with_kvcache
    return attend(*x, **({"threshold": 0.05, "causal": True, "impl": impl} | MEASURES | options))


def on(device: str, *tensors: torch.Tensor) -> list[torch.Tensor]:
    return [x.to(device) for x in tensors]


def parts(got: AttentionOutput) -> list[torch.Tensor]:
    return [got.out, got.lse, got.counts.skipped, got.counts.visited, got.mass_bound, got.kept_tiles]


def assert_same(a: AttentionOutput, b: AttentionOutput) -> None:
    for x, y in zip(parts(a), parts(b), strict=True):
        assert torch.equal(x.cpu(), y.cpu())


@impls
@tokens
def test_tensors_on_another_device_leave_the_current_one(tokens: int, impl: str) -> None:
    x = inputs_of(tokens, seed=1)
    lengths = torch.tensor([6000, 3001], dtype=torch.int32)
    for turn in range(3):  # the first prepares; calls of both devices take turns
        for threshold in (0.05, torch.tensor([0.05, 0.01])):
            results = []
            for device in (HERE, THERE):
                options = {"threshold": threshold}
                if isinstance(threshold, torch.Tensor):
                    options["threshold"] = threshold.to(device)
                if tokens <= 8:
                    options["cache_seqlens"] = lengths.to(device)
                results.append(attention(on(device, *x), impl, **options))
                assert all(part.device == torch.device(device) for part in parts(results[-1]))
                assert torch.cuda.current_device() == 0, turn
            assert int(results[0].counts.skipped.sum()) > 0
            assert_same(*results)


@impls
def test_packed_and_paged_calls_on_another_device(impl: str) -> None:
    x = inputs_of(300, keys=2048, seed=2)
    cu_q, cu_k = (torch.tensor([0, n, 2 * n], dtype=torch.int32) for n in (300, 2048))
    (pages_k, table), (pages_v, _) = (pages_from(t, 64, fill=math.nan) for t in x[1:])
    new_k, new_v = (t[:, 2000:2003].clone() for t in x[1:])
    results = []
    for device in (HERE, THERE):
        q, k, v, q_ends, k_ends = on(device, *(t.flatten(0, 1) for t in x), cu_q, cu_k)
        options = {"threshold": 0.05, "causal": True, "impl": impl, **MEASURES}
        packed = blasst_attn_varlen_func(q, k, v, q_ends, k_ends, 300, 2048, **options)
        q, k, v, pages, new, more = on(device, x.q, pages_k, pages_v, table, new_k, new_v)
        used = torch.full((2,), 2000, dtype=torch.int32, device=device)
        chunk = blasst_attn_with_kvcache(q, k, v, cache_seqlens=2048, block_table=pages, **options)
        step = blasst_attn_with_kvcache(
            q[:, :3], k, v, new, more, cache_seqlens=used, block_table=pages, **options
        )
        assert torch.cuda.current_device() == 0
        results.append((packed, chunk, step))
    for here, there in zip(*results, strict=True):
        assert int(here.counts.skipped.sum()) > 0
        assert_same(here, there)


@impls
@tokens
def test_the_stream_of_the_other_device_is_used(tokens: int, impl: str) -> None:
    q, k, v = on(THERE, *inputs_of(tokens, seed=3))
    expected = attention([q, k, v], impl)
    torch.cuda.synchronize(THERE)
    side, usual = torch.cuda.Stream(THERE), torch.cuda.current_stream(THERE)
    late = torch.zeros_like(q)
    side.wait_stream(usual)
    with torch.cuda.device(THERE):
        torch.cuda.set_stream(side)
        torch.cuda._sleep(50_000_000)
        late.copy_(q)
    try:
        assert torch.cuda.current_device() == 0
        got = attention([late, k, v], impl)
        side.synchronize()
    finally:
        with torch.cuda.device(THERE):
            torch.cuda.set_stream(usual)
    assert torch.cuda.current_device() == 0
    assert_same(got, expected)


@impls
@tokens
def test_a_graph_of_the_other_device_follows_values(tokens: int, impl: str) -> None:
    q, k, v = on(THERE, *inputs_of(tokens, seed=4))
    lengths = torch.tensor([6000, 100], dtype=torch.int32, device=THERE)
    threshold = torch.tensor([0.05, 0.0], device=THERE)

    def step() -> AttentionOutput:
        options = {"threshold": threshold, "causal": True, "impl": impl, **MEASURES}
        return blasst_attn_with_kvcache(q, k, v, cache_seqlens=lengths, **options)

    with torch.cuda.device(THERE):
        step()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        # The stream that torch captures on unless told belongs to the device of its first capture.
        with torch.cuda.graph(graph, stream=torch.cuda.Stream(THERE)):
            replayed = step()
    for new_lengths, new_threshold in (([700, 5999], [0.0, 0.05]), ([6000, 4000], [1.0, 0.01])):
        lengths.copy_(torch.tensor(new_lengths, dtype=torch.int32))
        threshold.copy_(torch.tensor(new_threshold))
        with torch.cuda.device(THERE):
            graph.replay()
        assert_same(replayed, step())
        assert int(replayed.counts.skipped.sum()) > 0
    assert torch.cuda.current_device() == 0


@impls
@tokens
def test_whole_groups_of_heads_on_each_gpu_give_the_bits_of_one(tokens: int, impl: str) -> None:
    x = inputs_of(tokens, heads=28, kv_heads=4, keys=9000, seed=5)
    whole = attention(on(HERE, *x), impl)
    assert int(whole.counts.skipped.sum()) > 0
    ranks = [
        attention(on(device, *(t.chunk(2, dim=2)[rank] for t in x)), impl)
        for rank, device in enumerate((HERE, THERE))
    ]
    for name, axis in (("out", 2), ("lse", 1), ("mass_bound", 1), ("kept_tiles", 1)):
        together = torch.cat([getattr(rank, name).cpu() for rank in ranks], axis)
        assert torch.equal(together, getattr(whole, name).cpu()), name
    together = torch.cat([rank.counts.skipped.cpu() for rank in ranks], 1)
    assert torch.equal(together, whole.counts.skipped.cpu())


@impls
def test_a_ring_of_two_merges_to_causal_attention_of_the_whole(impl: str) -> None:
    """Each GPU holds half of the queries and keys; keys go round, thresholds divide by the global length."""
    length, factor = 4096, 3.0
    x = heavy_tailed_inputs(1, length, length, 8, 2, 128, dtype=BFLOAT, block=128, seed=6, drop=(3.0, 12.0))
    first, second = slice(0, length // 2), slice(length // 2, length)
    halves = [on(device, *(t[:, half] for t in x)) for device, half in ((HERE, first), (THERE, second))]
    for threshold in (0.0, factor / length):
        dense = attention(on(HERE, *x), impl, threshold=None)
        options = {"threshold": threshold, "return_mass_bound": False}
        upper = attention(halves[0], impl, **options)
        own = attention(halves[1], impl, **options)
        before = attention([halves[1][0], *on(THERE, *halves[0][1:])], impl, causal=False, **options)
        lower_out, lower_lse = merge_attention([before.out, own.out], [before.lse, own.lse])
        assert lower_out.device == torch.device(THERE)
        out = torch.cat([upper.out.to(HERE), lower_out.to(HERE)], 1).double()
        lse = torch.cat([upper.lse.to(HERE), lower_lse.to(HERE)], 2).double()
        skipped = sum(int(part.counts.skipped.sum()) for part in (upper, own, before))
        assert (skipped > 0) == (threshold > 0)
        dropped = dense.lse.double() - lse
        # float32 sums of up to 4,096 weights: well within 1e-4
        assert bool((dropped >= -1e-4).all())
        assert bool((dropped <= math.log1p(threshold * length) + 1e-4).all())
        share = threshold * length / (1 + threshold * length)
        largest = float(x.v.abs().max())
        # weights, partial results and results are rounded to bfloat16: 2**-8 each
        error = (out - dense.out.double()).abs().max()
        assert float(error) <= 2 * largest * share + 3 * 2**-8 * largest


@impls
def test_both_gpus_at_once_from_two_threads(impl: str) -> None:
    x = {n: inputs_of(n, seed=7) for n in (1, 300)}
    want = {n: attention(on(HERE, *x[n]), impl) for n in x}

    def work(device: str) -> None:
        mine = {n: on(device, *x[n]) for n in x}
        for _ in range(10):
            for n in x:
                assert_same(attention(mine[n], impl), want[n])

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(work, (HERE, THERE)))


@pytest.mark.parametrize("name", ["k", "v", "cache_seqlens", "block_table", "threshold", "sinks"])
def test_a_tensor_on_the_wrong_gpu_is_named(name: str) -> None:
    q, k, v = on(HERE, *inputs_of(1, keys=640))
    pages_k, table = pages_from(k, 64, fill=math.nan)
    pages_v, _ = pages_from(v, 64, fill=math.nan)
    arguments = {
        "k": pages_k,
        "v": pages_v,
        "cache_seqlens": torch.tensor([640, 3], dtype=torch.int32, device=HERE),
        "block_table": table,
        "threshold": torch.tensor([0.0, 0.1], device=HERE),
        "sinks": torch.zeros(8, device=HERE),
    }
    arguments[name] = arguments[name].to(THERE)
    k, v = arguments.pop("k"), arguments.pop("v")
    with pytest.raises(ValueError, match=rf"{name}.*{THERE}"):
        blasst_attn_with_kvcache(q, k, v, **arguments)


def test_a_model_split_over_both_gpus_gives_the_logits_of_one() -> None:
    accelerate = pytest.importorskip("accelerate")
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
        head_dim=64,
        max_position_embeddings=4096,
    )
    model = LlamaForCausalLM(config).to(BFLOAT).eval()
    ids = torch.randint(100, (2, 1500))
    mask = torch.ones_like(ids)
    mask[0, :700] = 0

    def logits() -> tuple[torch.Tensor, int]:
        with torch.no_grad(), sparse_attention(model, threshold=1.0, collect_counts=True):
            got = model.generate(
                ids.to(HERE),
                attention_mask=mask.to(HERE),
                max_new_tokens=4,
                min_new_tokens=4,
                do_sample=False,
                pad_token_id=0,
                output_logits=True,
                return_dict_in_generate=True,
            )
            skipped = sum(int(record.skipped.sum()) for record in attention_stats(model))
        return torch.stack([x.cpu() for x in got.logits]), skipped

    model.to(HERE)
    want, skipped = logits()
    places = {"model.embed_tokens": 0, "model.rotary_emb": 0, "model.norm": 1, "lm_head": 1}
    places |= {f"model.layers.{i}": i // 2 for i in range(4)}
    model = accelerate.dispatch_model(model, device_map=places)
    assert {p.device.index for p in model.parameters()} == {0, 1}
    got, again = logits()
    assert skipped == again > 0
    assert torch.equal(got, want)
