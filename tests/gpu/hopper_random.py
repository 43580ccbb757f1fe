"""Random packed and paged calls of the Hopper kernel against the reference; run by test_hopper_host.py.

A script, so that a kernel that hangs can be stopped:  python3 tests/gpu/hopper_random.py SEQUENCES
"""

from __future__ import annotations

import math
import random
import sys
from typing import Any

import torch

from blasst import blasst_attn_varlen_func
from blasst.core.reference import ReferenceOutput, reference_attention
from blasst.core.types import AttentionOutput
from blasst.testing import assert_same_kept_tiles, assert_within_budget, heavy_tailed_inputs, pages_from

#: dtype, head dim, softcap, error budget, page size: each row is a build, compiled once.
BUILDS: list[tuple[torch.dtype, int, float, float | None, int | None]] = [
    (torch.bfloat16, 64, 0.0, None, None),
    (torch.float16, 96, 0.0, None, None),
    (torch.bfloat16, 128, 0.0, None, None),
    (torch.bfloat16, 128, 0.0, None, 16),
    (torch.bfloat16, 128, 0.0, None, 64),
    (torch.bfloat16, 128, 0.0, None, 256),
    (torch.float16, 128, 15.0, 0.1, None),
]
HEADS = [(1, 1), (3, 1), (6, 1), (7, 1), (8, 2), (4, 4), (6, 2)]
EDGES = [0, 1, 2, 63, 64, 65, 127, 128, 129, 191, 192, 193]
SEQUENCES = 8  # of a call


def draw(dice: random.Random) -> tuple[dict[str, Any], tuple[Any, ...], list[tuple[int, int]]]:
    """Options of a call, its build and the lengths (rows, keys) of its sequences."""
    lengths = []
    for _ in range(SEQUENCES):
        rows = dice.choice(EDGES) if dice.random() < 0.5 else dice.randrange(200)
        keys = dice.choice([*EDGES, 256, 257, 383, 384]) if dice.random() < 0.5 else dice.randrange(500)
        lengths.append((rows, keys))
    lengths[dice.randrange(SEQUENCES)] = (
        dice.randrange(1, 200),
        dice.randrange(1, 500),
    )  # never nothing at all
    options = {
        "causal": dice.random() < 0.6,
        "window_size": dice.choice([(-1, -1)] * 3 + [(100, 0), (70, 30), (0, 0), (-1, 5), (200, -1)]),
    }
    return options, dice.choice(BUILDS), lengths


def check(
    got: AttentionOutput, inputs: list[torch.Tensor], threshold: torch.Tensor, options: dict[str, Any]
) -> int:
    """A call's output against the reference; returns how many decisions near a cut differ."""
    truth = reference_attention(*inputs, threshold=threshold, **options)
    differ = int((got.kept_tiles != truth.kept_tiles).sum())
    if differ:
        if options.get("max_skipped_mass") is None:
            assert_same_kept_tiles(got.kept_tiles, truth, threshold, near=2e-3)
        elif differ > 2:  # a budget decision near its own cut moves the later ones of its query tile
            raise AssertionError(f"{differ} tiles differ under a budget")
        truth = reference_attention(*inputs, threshold=threshold, kept_tiles=got.kept_tiles, **options)
    yardstick: ReferenceOutput = reference_attention(
        *inputs, threshold=threshold, kept_tiles=got.kept_tiles, dtype=inputs[0].dtype, **options
    )
    assert_within_budget(got.out, truth.out, yardstick.out, "out")
    assert_within_budget(got.lse, truth.lse, yardstick.lse, "lse", magnitude=8.0)
    for name in ("skipped", "visited"):
        if not torch.equal(getattr(got.counts, name), getattr(truth.counts, name)):
            raise AssertionError(f"counts.{name}")
    # rounding of scores up to 12 nats below the maximum, 8 steps of the accumulation, 2**-23 each
    if not bool((got.mass_bound.double() * (1 + 2e-5) + 1e-30 >= truth.skipped_mass).all()):
        raise AssertionError("mass_bound lies below the skipped mass")
    return differ


def one_call(seed: int) -> tuple[int, int, int]:
    """Decisions that differ, tiles skipped and visited of the call with this seed."""
    dice = random.Random(seed)
    options, (dtype, dim, softcap, budget, page_size), lengths = draw(dice)
    heads, kv_heads = dice.choice(HEADS)
    rows, keys = (sum(n[i] for n in lengths) for i in (0, 1))
    q, k, v = (
        x[0]
        for x in heavy_tailed_inputs(
            1, rows, keys, heads, kv_heads, dim, dtype=dtype, device="cuda", seed=seed,
            block=dice.choice([64, 128]), noise=dice.choice([0.5, 2.0]), drop=(1.0, 12.0),
        )
    )  # fmt: skip
    cu_q, cu_k = (
        torch.tensor([0, *torch.tensor([n[i] for n in lengths]).cumsum(0)], dtype=torch.int32, device="cuda")
        for i in (0, 1)
    )
    options |= {"softcap": softcap, "max_skipped_mass": budget, "cu_seqlens_q": cu_q, "cu_seqlens_k": cu_k}
    if dice.random() < 0.3:
        options["sinks"] = torch.linspace(-2, 6, heads, device="cuda")
        if dice.random() < 0.5:
            options["sinks"][0] = -math.inf
    threshold = torch.tensor([dice.choice([0.0, 0.02, 0.1, 1.0]) for _ in lengths], device="cuda")
    longest = [max(n[i] for n in lengths) for i in (0, 1)]
    cache, more = (k, v), {}
    if page_size:
        padded = [x.new_full((SEQUENCES, longest[1], kv_heads, dim), math.nan) for x in cache]
        for b, (_, n) in enumerate(lengths):
            for x, y in zip(padded, cache, strict=True):
                x[b, :n] = y[int(cu_k[b]) : int(cu_k[b]) + n]
        (pages_k, table), (pages_v, _) = (pages_from(x, page_size, fill=math.nan, seed=seed) for x in padded)
        cache, more = (pages_k, pages_v), {"block_table": table}
    got = blasst_attn_varlen_func(
        q,
        *cache,
        max_seqlen_q=longest[0],
        max_seqlen_k=longest[1],
        threshold=threshold,
        return_lse=True,
        return_counts=True,
        return_mass_bound=True,
        return_kept_tiles=True,
        impl="hopper",
        **options,
        **more,
    )
    differ = check(got, [q, k, v], threshold, options)
    return differ, int(got.counts.skipped.sum()), int(got.counts.visited.sum())


def main() -> None:
    """Run as many calls as the command line asks for."""
    calls = int(sys.argv[1]) // SEQUENCES
    totals = [0, 0, 0]
    for seed in range(calls):
        try:
            result = one_call(seed)
        except Exception as error:
            raise SystemExit(f"seed {seed}: {type(error).__name__}: {error}") from error
        totals = [a + b for a, b in zip(totals, result, strict=True)]
    print(
        f"{calls * SEQUENCES} sequences, {totals[1]} of {totals[2]} tiles skipped, {totals[0]} near the cut"
    )
    if not 0 < totals[1] < totals[2]:
        raise SystemExit("nothing was skipped")


if __name__ == "__main__":
    main()
