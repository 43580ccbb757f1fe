"""The eager backend against the reference: kept tiles as sets, outputs within the error budget."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from blasst import blasst_attn_func, blasst_attn_varlen_func, blasst_attn_with_kvcache
from blasst.core.reference import reference_attention
from blasst.kernels import eager
from blasst.testing import (
    assert_finite,
    assert_matches_reference,
    assert_same_kept_tiles,
    assert_within_budget,
    attention_calls,
    heavy_tailed_inputs,
)

EVERYTHING = {
    "return_lse": True,
    "return_counts": True,
    "return_mass_bound": True,
    "return_kept_tiles": True,
    "impl": "eager",
}
#: Nats by which float32 and float64 scores of these inputs may differ.
NEAR = 1e-3


@settings(max_examples=80)
@given(
    attention_calls([torch.float16, torch.bfloat16, torch.float32]), st.sampled_from([0.0, 0.003, 0.1, 1.0])
)
def test_eager_equals_the_reference(call, threshold):
    phase, inputs, options = call
    truth = reference_attention(*inputs, threshold=threshold, phase=phase, **options)
    attn = blasst_attn_with_kvcache if phase == "decode" else blasst_attn_func
    got = attn(*inputs, threshold=threshold, **options, **EVERYTHING)
    if options["max_skipped_mass"] is not None and not torch.equal(got.kept_tiles, truth.kept_tiles):
        return  # a budget decision near its own cut; the promise itself is tested in test_reference.py
    yardstick = reference_attention(
        *inputs,
        threshold=threshold,
        phase=phase,
        kept_tiles=truth.kept_tiles,
        dtype=inputs.q.dtype,
        **options,
    )
    # One row of a few values may come out small, and its yardstick exact, by chance.
    assert_matches_reference(got, truth, yardstick, threshold, NEAR, float(inputs.v.abs().max()))


@pytest.mark.parametrize("decode", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_skip_sets_are_equal_away_from_the_cut_and_nested(dtype, decode):
    inputs = heavy_tailed_inputs(2, 2 if decode else 200, 1500, 6, 2, 40, dtype=dtype, seed=11)
    phase, attn = ("decode", blasst_attn_with_kvcache) if decode else ("prefill", blasst_attn_func)
    before = None
    for threshold in (0.0, 0.01, 0.05, 1.0):
        got = attn(*inputs, threshold=threshold, causal=True, **EVERYTHING)
        truth = reference_attention(*inputs, threshold=threshold, causal=True, phase=phase)
        near = 0.0 if threshold < 1 else NEAR
        assert assert_same_kept_tiles(got.kept_tiles, truth, threshold, near) == 0
        assert threshold == 0.0 or int(got.counts.skipped.sum()) > 0
        assert before is None or not bool((got.kept_tiles & ~before).any())
        before = got.kept_tiles


@pytest.mark.parametrize("decode", [False, True])
def test_values_of_skipped_tiles_are_not_touched(decode):
    inputs = heavy_tailed_inputs(1, 1 if decode else 130, 1280, 2, 1, 16, seed=12)
    phase, attn = ("decode", blasst_attn_with_kvcache) if decode else ("prefill", blasst_attn_func)
    size = 64 if decode else 128
    truth = reference_attention(*inputs, threshold=0.05, phase=phase)
    skipped_by_all = ~truth.kept_tiles[0].any(0).any(0)
    assert int(skipped_by_all.sum()) > 0
    poison = skipped_by_all.repeat_interleave(size)
    clean = attn(*inputs, threshold=0.05, impl="eager").out
    inputs.v[:, poison] = math.nan
    got = attn(*inputs, threshold=0.05, impl="eager").out
    assert_finite(got)
    assert_within_budget(got, clean.double(), clean)


def test_margins_say_what_is_skipped_at_any_threshold():
    inputs = heavy_tailed_inputs(1, 200, 700, 6, 2, 16, seed=13, noise=2.0, drop=(1.0, 12.0))
    truth = reference_attention(*inputs, causal=True)
    scale = 16**-0.5
    for i, first, margin in eager.prefill_margins(inputs.q[0], inputs.k[0], softmax_scale=scale, causal=True):
        tiles = slice(first, first + margin.shape[1])
        torch.testing.assert_close(margin, truth.margin[0, :, i, tiles].float(), rtol=1e-4, atol=1e-4)
    step = inputs.q[:, :1]
    truth = reference_attention(step, inputs.k, inputs.v, phase="decode")
    first, margin = eager.decode_margins(step[0], inputs.k[0], softmax_scale=scale)
    assert first == 0
    torch.testing.assert_close(margin, truth.margin[0, :, 0].float(), rtol=1e-4, atol=1e-4)


def test_margins_of_a_row_with_nan_are_infinite():
    inputs = heavy_tailed_inputs(1, 64, 640, 1, 1, 16, seed=13)
    clean = next(eager.prefill_margins(inputs.q[0], inputs.k[0], softmax_scale=0.25, causal=False))[2]
    assert bool(clean.isfinite().any())
    inputs.q[0, 1, 0, 3] = math.nan
    odd = next(eager.prefill_margins(inputs.q[0], inputs.k[0], softmax_scale=0.25, causal=False))[2]
    assert bool((odd == math.inf).all())
    assert bool((eager.decode_margins(inputs.q[0, :2], inputs.k[0], softmax_scale=0.25)[1] == math.inf).all())


def test_three_counters_agree_when_padding_rows_end_a_tile():
    inputs = heavy_tailed_inputs(1, 130, 4096, 2, 2, 16, seed=14)
    threshold = 0.05
    got = blasst_attn_func(*inputs, threshold=threshold, return_counts=True, impl="eager").counts
    truth = reference_attention(*inputs, threshold=threshold).counts
    counted = torch.zeros(2, dtype=torch.int64)
    for _, _, margin in eager.prefill_margins(inputs.q[0], inputs.k[0], softmax_scale=0.25, causal=False):
        counted += (margin < math.log(threshold)).sum(1)
    assert got.skipped.tolist() == truth.skipped.tolist() == [counted.tolist()]
    assert got.visited.tolist() == [[3 * 32] * 2]
    assert int(counted.sum()) > 0


def test_memory_does_not_grow_with_the_square_of_the_length():
    from torch.utils._python_dispatch import TorchDispatchMode

    class LargestTensor(TorchDispatchMode):
        largest = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            for tensor in out if isinstance(out, tuple | list) else (out,):
                if isinstance(tensor, torch.Tensor):
                    self.largest = max(self.largest, tensor.numel())
            return out

    length = 2048
    inputs = heavy_tailed_inputs(1, length, length, 2, 1, 16, seed=15)
    with LargestTensor() as watch:
        eager.run(_problem(inputs))
    assert 0 < watch.largest <= 2 * 64 * length  # heads x rows of a query tile x keys


def _problem(inputs):
    from blasst.core.problem import AttentionProblem

    length = inputs.q.shape[1]
    return AttentionProblem(
        q=inputs.q,
        k=inputs.k,
        v=inputs.v,
        phase="prefill",
        threshold=torch.tensor([0.05]),
        softmax_scale=0.25,
        causal=True,
        window_size=(-1, -1),
        softcap=0.0,
        sinks=None,
        max_skipped_mass=None,
        cu_seqlens_q=None,
        cu_seqlens_k=None,
        seqused_k=None,
        leftpad_k=None,
        block_table=None,
        max_seqlen_q=length,
        max_seqlen_k=length,
    )


def test_each_sequence_of_a_packed_batch_equals_its_own_call():
    lengths = [256, 700, 1300]
    singles = [heavy_tailed_inputs(1, n, n, 4, 2, 16, seed=20 + n) for n in lengths]
    packed = [torch.cat([getattr(s, name)[0] for s in singles]) for name in ("q", "k", "v")]
    cu = torch.tensor([0, 256, 956, 2256], dtype=torch.int32)
    got = blasst_attn_varlen_func(
        *packed,
        cu,
        cu,
        1300,
        1300,
        threshold_scale_factor=30.0,
        causal=True,
        return_lse=True,
        return_counts=True,
    )
    assert int(got.counts.skipped.sum()) > 0
    for i, (single, n) in enumerate(zip(singles, lengths, strict=True)):
        one = blasst_attn_func(
            *single, threshold_scale_factor=30.0, causal=True, return_lse=True, return_counts=True
        )
        rows = slice(int(cu[i]), int(cu[i]) + n)
        assert torch.equal(got.out[rows], one.out[0])
        assert torch.equal(got.lse[:, rows], one.lse[0])
        assert torch.equal(got.counts.skipped[i], one.counts.skipped[0])


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("order", ["sink_first", "ascending", "descending"])
def test_margins_of_several_query_tiles_at_once_are_the_same(order, causal, monkeypatch):
    inputs = heavy_tailed_inputs(1, 700, 900, 6, 2, 16, noise=2.0, drop=(1.0, 12.0))
    options = {"softmax_scale": 0.25, "causal": causal, "order": order}
    one = list(eager.prefill_margins(inputs.q[0], inputs.k[0], **options))
    monkeypatch.setattr(eager, "_query_tiles_at_once", lambda *_: 3)
    several = list(eager.prefill_margins(inputs.q[0], inputs.k[0], **options))
    assert [m[:2] for m in one] == [m[:2] for m in several]
    for a, b in zip(one, several, strict=True):
        torch.testing.assert_close(a[2], b[2])
