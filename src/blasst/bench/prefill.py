"""Prefill times of one kernel, dense and at several sparsities, beside the dense kernel of torch."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from blasst.bench.check import SampledTiles, visited_tiles_of_head
from blasst.bench.inputs import Inputs
from blasst.bench.variants import (
    BenchmarkResult,
    OwnKernel,
    checked_variants,
    timed_rows,
    torch_baseline,
)
from blasst.functional import blasst_attn_func


def measure_prefill(
    inputs: Inputs,
    sparsities: Sequence[float],
    *,
    causal: bool = True,
    impl: str = "auto",
    repeats: int | None = None,
    seed: int = 0,
) -> BenchmarkResult:
    """Check, then time: torch's dense attention, ours dense, at threshold 0 and at each wanted sparsity.

    Args:
        inputs: what to run on.
        sparsities: wanted, in (0, 1); the thresholds are found on the kernel's own counts.
        causal: the mask.
        impl: kernel, as in `blasst_attn_func`; "auto" is resolved once, for the dense call.
        repeats: timed calls of each variant, interleaved; None = about 200 ms of each, 7 to 50 calls.
        seed: of the choice of query tiles that are compared with the reference.

    Raises:
        WrongResultError: an output, a count or a decision is wrong; nothing is timed then.
        UnsupportedError: the kernel cannot serve one of the calls.
    """
    attend = partial(
        blasst_attn_func, inputs.q, inputs.k, inputs.v, causal=causal, softmax_scale=inputs.softmax_scale
    )
    baseline = torch_baseline(inputs, causal)
    sampled = SampledTiles(inputs, causal, seed)
    own = OwnKernel(attend, impl, sampled, visited_tiles_of_head(inputs, causal, "prefill"))
    variants, notes = checked_variants(own, baseline, sampled, sparsities)
    return BenchmarkResult(timed_rows("prefill", variants, inputs, causal, repeats=repeats), notes)
