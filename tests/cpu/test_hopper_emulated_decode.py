"""The Hopper decode kernel, emulated: its CUDA text, byte for byte, against the rule in float64.

BLASST_EMULATED_BATCHES=300 draws that many random batches as tests/gpu/test_hopper_batches.py does; without
it these are a few.
"""

import os

import pytest
import torch
from run_hopper import emulated
from test_hopper_batches import CONFIGURATIONS, run

from blasst import blasst_attn_with_kvcache
from blasst.core.reference import reference_attention
from blasst.kernels import repeats
from blasst.kernels.hopper import decode
from blasst.testing import assert_matches_reference, heavy_tailed_inputs

EVERYTHING = {"return_lse": True, "return_counts": True, "return_kept_tiles": True, "impl": "hopper"}
ORDERS = [(1, 4), (2, 1), (4, 9), (6, 16)]
#: Of those that fix rows, head dim, dtype and fp8, some: 8 to 128 rows, with and without fp8.
FEW = (0, 13, 34, 41, 59, len(CONFIGURATIONS) + 10)
BATCHES = int(os.environ.get("BLASST_EMULATED_BATCHES", "0"))


def same(one, other):
    """Whether two calls gave the same bits."""
    assert torch.equal(one.out, other.out)
    assert torch.equal(one.lse, other.lse)
    assert torch.equal(one.kept_tiles, other.kept_tiles)
    assert torch.equal(one.counts.skipped, other.counts.skipped)
    assert torch.equal(one.counts.visited, other.counts.visited)


@pytest.mark.parametrize("number", range(BATCHES) if BATCHES else FEW)
def test_random_batches_of_the_device_tests(number):
    with emulated(number % 5, resident=1 + number % 4) as device:
        run([number], "cpu", "hopper", longest=700)
    assert device.launches > 0


@pytest.mark.parametrize("threshold", [None, 0.01])
def test_every_order_of_things_is_bit_identical(threshold):
    x = heavy_tailed_inputs(2, 1, 2000, 8, 2, 64, dtype=torch.float16, block=64, seed=1)
    lengths = torch.tensor([2000, 900], dtype=torch.int32)
    options = {"cache_seqlens": lengths, "threshold": threshold, **EVERYTHING}
    with emulated():
        want = blasst_attn_with_kvcache(*x, **options)
    truth = reference_attention(*x, seqused_k=lengths, threshold=threshold, phase="decode")
    yardstick = reference_attention(
        *x,
        seqused_k=lengths,
        threshold=threshold,
        phase="decode",
        kept_tiles=truth.kept_tiles,
        dtype=torch.float16,
    )
    assert_matches_reference(want, truth, yardstick, threshold)
    assert (int(want.counts.skipped.sum()) > 0) == (threshold is not None)
    for seed, resident in ORDERS:
        with emulated(seed, resident=resident):
            same(blasst_attn_with_kvcache(*x, **options), want)


def test_threshold_zero_is_dense():
    x = heavy_tailed_inputs(2, 3, 700, 8, 2, 64, dtype=torch.float16, block=64, seed=2, noise=2.0)
    with emulated(4):
        dense = blasst_attn_with_kvcache(*x, causal=True, **EVERYTHING)
        same(blasst_attn_with_kvcache(*x, causal=True, threshold=0.0, **EVERYTHING), dense)


def test_alone_and_in_a_batch_has_the_same_bits():
    x = heavy_tailed_inputs(7, 1, 1500, 4, 1, 64, dtype=torch.float16, block=64, seed=3)
    lengths = torch.linspace(0, 1500, 7).int()
    threshold = torch.linspace(0, 0.05, 7)
    with emulated(1, resident=8):
        batch = blasst_attn_with_kvcache(*x, cache_seqlens=lengths, threshold=threshold, **EVERYTHING)
    assert int(batch.counts.skipped.sum()) > 0
    for i in range(7):
        one = [t[i : i + 1] for t in x]
        with emulated(i):
            alone = blasst_attn_with_kvcache(
                *one, cache_seqlens=lengths[i : i + 1], threshold=threshold[i : i + 1], **EVERYTHING
            )
        assert torch.equal(alone.out[0], batch.out[i])
        assert torch.equal(alone.lse[0], batch.lse[i])
        assert torch.equal(alone.counts.skipped[0], batch.counts.skipped[i])


def test_values_of_skipped_tiles_are_not_used():
    x = heavy_tailed_inputs(1, 1, 1500, 8, 2, 64, dtype=torch.float16, block=64, seed=4)
    with emulated(3):
        clean = blasst_attn_with_kvcache(*x, threshold=0.01, **EVERYTHING)
    dead = ~clean.kept_tiles[:, :, 0]
    assert int(dead.sum()) > 0
    for b, head, tile in dead.nonzero().tolist():
        x.v[b, tile * 64 : (tile + 1) * 64, head] = torch.nan
    with emulated(3):
        again = blasst_attn_with_kvcache(*x, threshold=0.01, **EVERYTHING)
    same(again, clean)


def test_a_key_far_above_the_anchors_raises_the_base():
    x = heavy_tailed_inputs(1, 1, 1100, 4, 1, 64, dtype=torch.float16, block=64, seed=5)
    x.k[:, 500, :, 0] = 2.0 * 64**0.25 * 40  # some 100 nats above the rest
    with emulated(5):
        got = blasst_attn_with_kvcache(*x, threshold=0.01, **EVERYTHING)
    truth = reference_attention(*x, threshold=0.01, phase="decode")
    yardstick = reference_attention(
        *x, threshold=0.01, phase="decode", kept_tiles=truth.kept_tiles, dtype=torch.float16
    )
    assert_matches_reference(got, truth, yardstick, 0.01, near=2e-3)


@pytest.mark.parametrize("mass", [False, True])
def test_a_split_that_hears_nothing_finds_the_same(mass, monkeypatch):
    x = heavy_tailed_inputs(2, 1, 2000, 8, 2, 64, dtype=torch.float16, block=64, seed=6)
    options = {"threshold": 0.01, "return_mass_bound": mass, **EVERYTHING}
    with emulated(2, resident=9):
        heard = blasst_attn_with_kvcache(*x, **options)
    plain = decode.build
    monkeypatch.setattr(decode, "build", lambda *given, **more: {**plain(*given, **more), "PATIENCE": 0})
    monkeypatch.setattr(repeats, "_plans", {})
    with emulated(2, resident=9):
        alone = blasst_attn_with_kvcache(*x, **options)
    same(alone, heard)
    assert not mass or torch.equal(alone.mass_bound, heard.mass_bound)
