"""The Hopper prefill kernel, emulated: its CUDA text, byte for byte, against the reference in float64.

BLASST_EMULATED_CALLS=200 draws that many random calls as tests/gpu/test_hopper_random.py does; 2 without it.
"""

import math
import os
import random

import pytest
import test_hopper_random
import torch
from run_hopper import cuda_is_the_cpu, emulated

from blasst import blasst_attn_func, blasst_attn_varlen_func
from blasst.core.reference import reference_attention
from blasst.testing import assert_matches_reference, heavy_tailed_inputs, pages_from

CALLS = int(os.environ.get("BLASST_EMULATED_CALLS", "2"))
HALF, BFLOAT = torch.float16, torch.bfloat16
#: dtype, head dim, query heads, KV heads.
SHAPES = {"fp16-64": (HALF, 64, 4, 2), "bf16-96": (BFLOAT, 96, 2, 2), "bf16-128": (BFLOAT, 128, 3, 1)}
EVERYTHING = {
    "return_lse": True,
    "return_counts": True,
    "return_mass_bound": True,
    "return_kept_tiles": True,
    "impl": "hopper",
}
#: Nats by which float32 and float64 scores of these inputs may differ.
NEAR = 2e-3
#: Orders of things that must not change a bit, CTAs at the same time, processors.
ORDERS = [(1, 4, 2), (2, 1, 1), (4, 4, 4), (5, 3, 1)]


def inputs_of(shape, rows=200, keys=700, batch=1, **options):
    dtype, dim, heads, kv_heads = SHAPES[shape]
    return heavy_tailed_inputs(
        batch, rows, keys, heads, kv_heads, dim, dtype=dtype, **({"block": 128} | options)
    )


def compare(inputs, threshold, near=0.0, seed=0, **options):
    """An emulated call against the reference; returns its output."""
    options = {"causal": True} | options
    with emulated(seed) as device:
        got = blasst_attn_func(*inputs, threshold=threshold, **options, **EVERYTHING)
    assert device.launches == 1
    truth = reference_attention(*inputs, threshold=threshold, **options)
    yardstick = reference_attention(
        *inputs, threshold=threshold, kept_tiles=truth.kept_tiles, dtype=inputs[0].dtype, **options
    )
    assert_matches_reference(got._replace(mass_bound=None), truth, yardstick, threshold, near)
    if torch.equal(got.kept_tiles, truth.kept_tiles):
        # the tolerance is that of tests/gpu/test_hopper.py
        assert bool((got.mass_bound.double() * (1 + 5e-5) + 1e-30 >= truth.skipped_mass).all())
    return got


@pytest.mark.parametrize(
    ("shape", "causal"), [("fp16-64", True), ("fp16-64", False), ("bf16-96", True), ("bf16-128", True)]
)
def test_kernel_equals_the_reference(shape, causal):
    got = compare(inputs_of(shape, seed=1), 0.05, causal=causal)
    assert int(got.counts.skipped.sum()) > 0
    near_the_cut = inputs_of(shape, seed=2, noise=2.0, drop=(1.0, 12.0))
    for seed, threshold in enumerate((None, 0.1)):
        compare(near_the_cut, threshold, NEAR, seed, causal=causal)


def test_every_length_of_queries_and_keys():
    skipped = 0
    for rows, keys in [(1, 1), (1, 300), (63, 64), (65, 129), (128, 127), (129, 600), (300, 65), (192, 64)]:
        inputs = inputs_of("fp16-64", rows, keys, seed=rows + keys)
        for causal in (True, False):
            skipped += int(compare(inputs, 0.05, causal=causal, seed=rows).counts.skipped.sum())
    assert skipped > 0


@pytest.mark.parametrize(
    "options",
    [
        {"window_size": (150, 0)},
        {"window_size": (100, 60), "causal": False},
        {"softcap": 20.0},
        {"sinks": True},
        {"dense_tail": 70},
    ],
    ids=str,
)
def test_options(options):
    inputs = inputs_of("fp16-64", seed=5)
    if "sinks" in options:
        options = {"sinks": torch.linspace(-2, 6, inputs.q.shape[2])}
    got = compare(inputs, 0.05, NEAR, **options)
    assert int(got.counts.skipped.sum()) > 0


def test_threshold_zero_and_every_order_of_things_are_bit_identical():
    inputs = inputs_of("fp16-64", 300, 600, seed=3, noise=3.0)
    plain = {"causal": True, "return_lse": True, "impl": "hopper"}
    with emulated():
        dense = blasst_attn_func(*inputs, **plain)
        zero = blasst_attn_func(*inputs, threshold=0.0, **plain)
        measured = blasst_attn_func(*inputs, threshold=0.0, causal=True, **EVERYTHING)
        sparse = blasst_attn_func(*inputs, threshold=0.05, causal=True, **EVERYTHING)
    for other in (zero, measured):
        assert torch.equal(other.out, dense.out)
        assert torch.equal(other.lse, dense.lse)
    assert int(measured.counts.skipped.sum()) == 0 < int(sparse.counts.skipped.sum())
    for seed, resident, processors in ORDERS:
        with emulated(seed, resident=resident, processors=processors):
            other = blasst_attn_func(*inputs, threshold=0.05, causal=True, **EVERYTHING)
            again = blasst_attn_func(*inputs, **plain)
        for name in ("out", "lse", "mass_bound", "kept_tiles"):
            assert torch.equal(getattr(other, name), getattr(sparse, name)), (seed, name)
        assert torch.equal(other.counts.skipped, sparse.counts.skipped)
        assert torch.equal(again.out, dense.out)


def test_many_short_works_in_every_order():
    inputs = inputs_of("fp16-64", 130, 200, batch=3, seed=4)
    truth = reference_attention(*inputs, threshold=0.05, causal=True)
    want = None
    for seed, resident, processors in [(0, 4, 2), *ORDERS]:
        with emulated(seed, resident=resident, processors=processors):
            got = blasst_attn_func(*inputs, threshold=0.05, causal=True, **EVERYTHING)
        want = want or got
        assert torch.equal(got.kept_tiles, truth.kept_tiles)
        assert torch.equal(got.out, want.out)
        assert torch.equal(got.lse, want.lse)
    assert float((want.out.double() - truth.out).abs().max()) < 0.01


def test_values_of_skipped_tiles_are_not_used():
    inputs = inputs_of("bf16-128", 128, 900, seed=6)
    with emulated(2):
        clean = blasst_attn_func(*inputs, threshold=0.05, **EVERYTHING)
    dead = ~clean.kept_tiles.any(2)  # (batch, heads, key tiles): by no query tile
    dead = dead.all(1)  # nor by another head of the one KV head
    assert int(dead.sum()) > 0
    for b, tile in dead.nonzero().tolist():
        inputs.v[b, tile * 128 : (tile + 1) * 128] = torch.nan
    with emulated(2):
        again = blasst_attn_func(*inputs, threshold=0.05, **EVERYTHING)
    assert torch.equal(clean.out, again.out)


def test_error_budget_and_mass_bound_hold_for_every_row():
    inputs = inputs_of("fp16-64", 130, 900, seed=7, drop=(2.0, 12.0), noise=1.0)
    with emulated(1):
        free = blasst_attn_func(*inputs, threshold=1.0, **EVERYTHING)
        got = blasst_attn_func(*inputs, threshold=1.0, max_skipped_mass=0.05, **EVERYTHING)
    assert 0 < int(got.counts.skipped.sum()) < int(free.counts.skipped.sum())
    for one in (free, got):
        followed = reference_attention(*inputs, threshold=1.0, kept_tiles=one.kept_tiles)
        assert bool((one.mass_bound.double() * (1 + 1e-5) + 1e-30 >= followed.skipped_mass).all())
        eps = 0.05 if one is got else 1.0
        assert float(followed.skipped_mass.max()) <= eps / (1 + eps) * (1 + 1e-5)


def test_packed_and_paged_sequences_equal_their_own_calls():
    lengths = [(0, 0), (64, 64), (1, 300), (0, 100), (130, 0), (257, 500), (129, 127)]
    singles = [inputs_of("fp16-64", max(a, 1), max(b, 1), seed=11 + i) for i, (a, b) in enumerate(lengths)]
    singles = [(s.q[:, :a], s.k[:, :b], s.v[:, :b]) for s, (a, b) in zip(singles, lengths)]
    q, k, v = (torch.cat([s[i][0] for s in singles]) for i in range(3))
    cu_q, cu_k = (
        torch.tensor([0, *(n[i] for n in lengths)], dtype=torch.int32).cumsum(0).int() for i in range(2)
    )
    cache = [x.new_full((len(lengths), 512, *x.shape[1:]), math.nan) for x in (k, v)]
    for b, (single, (_, n)) in enumerate(zip(singles, lengths)):
        for x, y in zip(cache, single[1:]):
            x[b, :n] = y[0]
    (pages_k, table), (pages_v, _) = (pages_from(x, 32, fill=math.nan) for x in cache)
    for b, (_, n) in enumerate(lengths):
        table[b, -(-n // 32) :] = -1  # never read
    options = {"threshold": 0.02, "causal": True, **EVERYTHING}
    with emulated(3, processors=3):
        got = blasst_attn_varlen_func(q, k, v, cu_q, cu_k, 257, 500, **options)
        paged = blasst_attn_varlen_func(
            q, pages_k, pages_v, cu_q, cu_k, 257, 500, block_table=table, **options
        )
        alone = [blasst_attn_func(*s, **options) if all(n) else None for s, n in zip(singles, lengths)]
    assert torch.equal(paged.out, got.out)
    assert torch.equal(paged.lse, got.lse)
    assert torch.equal(paged.kept_tiles, got.kept_tiles)
    assert int(got.counts.skipped.sum()) > 0
    for i, one in enumerate(alone):
        place = slice(int(cu_q[i]), int(cu_q[i + 1]))
        if one is None:
            assert not bool(got.out[place].any())
            assert bool((got.lse[:, place] == -math.inf).all())
            continue
        assert torch.equal(got.out[place], one.out[0])
        assert torch.equal(got.lse[:, place], one.lse[0])
        assert torch.equal(got.mass_bound[:, place], one.mass_bound[0])
        assert torch.equal(got.counts.skipped[i], one.counts.skipped[0])


@pytest.mark.parametrize("number", range(CALLS))
def test_random_calls_of_the_device_tests(number):
    with emulated(number), cuda_is_the_cpu():
        test_hopper_random.check(random.Random(number))
