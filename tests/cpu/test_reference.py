"""The oracle against plain softmax, and the promises of docs/method.md as properties."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from blasst.core.reference import reference_attention
from blasst.core.types import TileShape, group_of_key
from blasst.testing import assert_error_bound, heavy_tailed_inputs


def dense_softmax(q, k, v, causal=False, window=(-1, -1), softcap=0.0, sinks=None):
    """Attention by an explicit mask in float64: (out, lse)."""
    seqlen_q, seqlen_k, group = q.shape[1], k.shape[1], q.shape[2] // k.shape[2]
    q, k, v = (x.double().transpose(1, 2) for x in (q, k, v))
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
    if softcap:
        scores = torch.tanh(scores / softcap) * softcap
    position = torch.arange(seqlen_q)[:, None] + seqlen_k - seqlen_q
    key = torch.arange(seqlen_k)
    mask = torch.ones(seqlen_q, seqlen_k, dtype=torch.bool)
    if causal:
        mask &= key <= position
    if window[0] >= 0:
        mask &= key >= position - window[0]
    if window[1] >= 0:
        mask &= key <= position + window[1]
    scores = scores.masked_fill(~mask, -math.inf)
    if sinks is not None:
        column = sinks.double().view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, column], -1)
    weight = scores.softmax(-1).nan_to_num(0.0)[..., :seqlen_k]
    return (weight @ v).transpose(1, 2), scores.logsumexp(-1)


@st.composite
def calls(draw):
    decode = draw(st.booleans())
    kv_heads, group = draw(st.sampled_from([1, 2])), draw(st.sampled_from([1, 2, 3]))
    seqlen_q = draw(st.sampled_from([1, 2, 8]) if decode else st.sampled_from([1, 63, 64, 65, 130]))
    inputs = heavy_tailed_inputs(
        draw(st.sampled_from([1, 2])),
        seqlen_q,
        draw(st.sampled_from([1, 40, 128, 129, 400, 700])),
        kv_heads * group,
        kv_heads,
        draw(st.sampled_from([8, 24])),
        draw(st.sampled_from([8, 16])),
        seed=draw(st.integers(0, 10**6)),
        noise=draw(st.sampled_from([0.5, 2.0])),
        drop=(1.0, 12.0),
    )
    options = {
        "phase": "decode" if decode else "prefill",
        "causal": draw(st.booleans()),
        "window_size": draw(st.sampled_from([(-1, -1), (-1, -1), (100, 0), (50, 30)])),
        "softcap": draw(st.sampled_from([0.0, 0.0, 10.0])),
    }
    if draw(st.booleans()):
        options["sinks"] = torch.linspace(-2, 6, kv_heads * group)
    return inputs, options


@settings(max_examples=40)
@given(calls())
def test_without_skipping_it_is_softmax_attention(call):
    inputs, options = call
    wanted = {key: value for key, value in options.items() if key != "phase"}
    out, lse = dense_softmax(
        *inputs, wanted["causal"], wanted["window_size"], wanted["softcap"], wanted.get("sinks")
    )
    for threshold in (None, 0.0):
        got = reference_attention(*inputs, threshold=threshold, **options)
        torch.testing.assert_close(got.out, out, rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(got.lse, lse, rtol=1e-9, atol=1e-9)
        assert int(got.counts.skipped.sum()) == 0
        assert int(got.counts.visited.sum()) == int(got.kept_tiles.sum())


@settings(max_examples=60)
@given(calls(), st.sampled_from([1e-3, 0.02, 0.3, 1.0]))
def test_promises_of_the_rule_hold_for_every_row(call, threshold):
    inputs, options = call
    dense = reference_attention(*inputs, **options)
    sparse = reference_attention(*inputs, threshold=threshold, **options)
    # every skipped key has weight < threshold, so a row that drops n keys loses less than threshold * n
    assert bool((sparse.skipped_mass <= threshold * inputs.k.shape[1]).all())
    # the identity behind the error bound, and the bound on the mass
    delta = -torch.expm1(sparse.lse - dense.lse).nan_to_num(0.0)
    torch.testing.assert_close(delta, sparse.skipped_mass, rtol=1e-9, atol=1e-12)
    assert_error_bound(sparse.out, dense.out, sparse.skipped_mass, inputs.v, slack=1e-12)
    assert bool((sparse.mass_bound * (1 + 1e-5) + 1e-30 >= sparse.skipped_mass).all())
    # the same tiles at any threshold by margin, and nested
    cut = sparse.margin < math.log(threshold)
    assert torch.equal(cut, dense.kept_tiles & ~sparse.kept_tiles)
    larger = reference_attention(*inputs, threshold=min(1.0, threshold * 3), **options)
    assert not bool((larger.kept_tiles & ~sparse.kept_tiles).any())


@settings(max_examples=40)
@given(calls(), st.sampled_from([0.01, 0.1, 0.5]))
def test_budget_bounds_the_skipped_mass_of_every_row(call, budget):
    inputs, options = call
    got = reference_attention(*inputs, threshold=1.0, max_skipped_mass=budget, **options)
    assert bool((got.skipped_mass <= budget / (1 + budget) * (1 + 1e-9)).all())
    assert bool((got.mass_bound <= budget / (1 + budget) * (1 + 1e-9)).all())


def test_budget_still_skips_what_it_can_afford():
    inputs = heavy_tailed_inputs(1, 128, 1024, 2, 1, 16, seed=3)
    for phase, rows in (("prefill", 128), ("decode", 2)):
        got = reference_attention(
            inputs.q[:, :rows], inputs.k, inputs.v, threshold=1.0, max_skipped_mass=0.1, phase=phase
        )
        free = reference_attention(inputs.q[:, :rows], inputs.k, inputs.v, threshold=1.0, phase=phase)
        assert 0 < int(got.counts.skipped.sum()) <= int(free.counts.skipped.sum())


def test_visiting_order_changes_what_is_skipped_but_not_the_promises():
    generator = torch.Generator().manual_seed(1)
    inputs = heavy_tailed_inputs(1, 256, 1024, 1, 1, 16, seed=5, hot_fraction=0.0)
    inputs.k[
        :, 128:256, :, 0
    ] = -24.0  # a tile that only the sink makes skippable before the diagonal is seen
    inputs.v.copy_(torch.randn(inputs.v.shape, generator=generator))
    skipped = {
        order: int(
            reference_attention(*inputs, threshold=0.05, causal=True, order=order).counts.skipped.sum()
        )
        for order in ("sink_first", "descending", "ascending")
    }
    assert skipped["sink_first"] >= skipped["descending"] > 0
    assert skipped["sink_first"] >= skipped["ascending"] > 0


def test_a_given_map_is_followed():
    inputs = heavy_tailed_inputs(1, 64, 512, 1, 1, 16, seed=2)
    kept = torch.tensor([True, False, True, True]).view(1, 1, 1, 4)
    got = reference_attention(*inputs, threshold=0.0, kept_tiles=kept)
    assert torch.equal(got.kept_tiles, kept)
    rest = (
        torch.cat([inputs.k[:, :128], inputs.k[:, 256:]], 1),
        torch.cat([inputs.v[:, :128], inputs.v[:, 256:]], 1),
    )
    torch.testing.assert_close(got.out, reference_attention(inputs.q, *rest).out)


@pytest.mark.parametrize("tokens", [1, 3, 8])
def test_decode_keeps_the_first_and_the_last_two_tiles_of_every_row(tokens):
    inputs = heavy_tailed_inputs(1, tokens, 64 * 9 + 3, 4, 2, 16, seed=4)
    inputs.k[..., 0] = torch.linspace(0, 1, inputs.k.shape[1])[None, :, None] * 200 - 200.0
    kept = reference_attention(*inputs, threshold=1.0, phase="decode", causal=True).kept_tiles[0, :, 0]
    assert bool(kept[:, [0, -2, -1]].all())
    # with 8 tokens the rows end in tiles 8 and 9, so the union holds three tiles at the end
    assert bool(kept[:, -3].all()) == (tokens > 3)
    assert not bool(kept[:, 1:-3].any())


def test_decode_of_three_tiles_skips_nothing():
    inputs = heavy_tailed_inputs(1, 1, 192, 2, 1, 16, seed=4)
    inputs.k[..., 0] = -torch.arange(192.0)[None, :, None]
    assert int(reference_attention(*inputs, threshold=1.0, phase="decode").counts.skipped.sum()) == 0


def test_decode_rows_of_one_kv_head_must_all_agree():
    inputs = heavy_tailed_inputs(1, 1, 640, 4, 2, 16, seed=6, hot_fraction=0.0)
    alone = reference_attention(*inputs, threshold=0.05, phase="decode").kept_tiles
    inputs.q[0, 0, 1, 1] = 60.0  # one head of the first group finds a spike in tile 5
    inputs.k[0, 330, 0, 1] = 60.0
    together = reference_attention(*inputs, threshold=0.05, phase="decode").kept_tiles
    assert not bool(alone[0, 0, 0, 5])
    assert bool(together[0, 0, 0, 5])
    assert torch.equal(alone[0, 1], together[0, 1])


def test_groups_of_the_mass_bound_are_the_lanes_of_an_accumulator_row():
    group = group_of_key(128)
    assert group[:10].tolist() == [0, 0, 1, 1, 2, 2, 3, 3, 0, 0]
    assert group[32:34].tolist() == [4, 4]
    assert torch.bincount(group).tolist() == [8] * 16


def test_other_tile_shapes_are_arguments():
    inputs = heavy_tailed_inputs(1, 256, 1024, 1, 1, 16, seed=7)
    got = reference_attention(*inputs, threshold=0.05, tile=TileShape(128, 64))
    assert got.kept_tiles.shape == (1, 1, 2, 16)
    assert int(got.counts.skipped.sum()) > 0


def test_paged_varlen_and_batched_calls_agree():
    inputs = heavy_tailed_inputs(2, 96, 400, 2, 1, 16, seed=8)
    lengths_q, lengths_k = [96, 40], [400, 250]
    packed = [
        torch.cat([x[0, :a], x[1, :b]])
        for x, (a, b) in zip(inputs, [lengths_q, lengths_k, lengths_k], strict=True)
    ]
    cu_q, cu_k = torch.tensor([0, 96, 136]), torch.tensor([0, 400, 650])
    got = reference_attention(*packed, threshold=0.05, causal=True, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k)
    assert int(got.counts.skipped.sum()) > 0
    for i, rows in enumerate((slice(0, 96), slice(96, 136))):
        single = reference_attention(
            inputs.q[i : i + 1, : lengths_q[i]],
            inputs.k[i : i + 1, : lengths_k[i]],
            inputs.v[i : i + 1, : lengths_k[i]],
            threshold=0.05,
            causal=True,
        )
        torch.testing.assert_close(got.out[rows], single.out[0])
        torch.testing.assert_close(got.lse[:, rows], single.lse[0])
        assert torch.equal(got.counts.skipped[i], single.counts.skipped[0])
