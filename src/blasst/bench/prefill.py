"""Prefill times of one kernel, dense and at several sparsities, beside the dense kernel of torch.

Everything runs on the same inputs in one interleaved run, and nothing is timed before every output was found
right.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from blasst.bench.check import SampledTiles, WrongResultError, check_close, check_counts, check_equal
from blasst.bench.dial import DialledThreshold, dial_sparsity
from blasst.bench.inputs import Inputs
from blasst.bench.record import BenchmarkRow, command_line
from blasst.bench.timing import Timing, interleaved
from blasst.core.types import AttentionOutput
from blasst.functional import blasst_attn_func
from blasst.kernels.select import backend_used

#: The dense baseline: torch SDPA with its cuDNN backend forced, or whatever torch chooses.
CUDNN, TORCH_SDPA = "cudnn", "torch sdpa"

#: Timed milliseconds of each variant, and the least and most calls, unless told otherwise.
_MS_PER_VARIANT = 200.0
_REPEATS = (7, 50)

#: How far from the wanted sparsity a row may lie without a note.
_NOTED_DISTANCE = 0.01


class PrefillResult(NamedTuple):
    """What one input gave.

    Attributes:
        rows: the dense baseline, ours dense, ours at threshold 0, then by sparsity.
        notes: what a reader has to know, one sentence each.
    """

    rows: list[BenchmarkRow]
    notes: list[str]


class _Variant(NamedTuple):
    """One timed call, checked."""

    kernel: str
    threshold: float | None
    sparsity: float
    max_error: float
    call: Callable[[], object]


class _Ours:
    """The kernel under test on one input."""

    def __init__(self, inputs: Inputs, causal: bool, impl: str) -> None:
        self.inputs, self.causal, self.impl = inputs, causal, impl
        self.dense = self(None).out
        self.impl = backend_used() or impl  # "auto" must not choose another kernel for another variant

    def __call__(self, threshold: float | None, counts: bool = False, kept: bool = False) -> AttentionOutput:
        return blasst_attn_func(
            self.inputs.q,
            self.inputs.k,
            self.inputs.v,
            threshold=threshold,
            causal=self.causal,
            softmax_scale=self.inputs.softmax_scale,
            return_counts=counts,
            return_kept_tiles=kept,
            impl=self.impl,
        )

    def sparsity(self, threshold: float) -> float:
        """What the kernel counts at a threshold."""
        counts = self(threshold, counts=True).counts
        return 0.0 if counts is None else float(counts.sparsity)

    def checked_zero(self, error: float) -> _Variant:
        """The skipping kernel that skips nothing: the bits of the dense one, whose error is known."""
        name = f"{self.impl} at threshold 0"
        out, _, counts, _, _ = self(0.0, counts=True)
        if counts is None or bool(counts.skipped.any()):
            raise WrongResultError(f"{name}: skipped tiles")
        check_equal(out, self.dense, f"{name}: must be the output of the dense kernel, bit for bit")
        check_equal(self(0.0).out, out, f"{name}: counting must not change the output")
        return self.variant(0.0, 0.0, error)

    def checked(self, threshold: float, sampled: SampledTiles) -> _Variant:
        """A skipping variant whose counts, map and output were found right."""
        name = f"{self.impl} at threshold {threshold:.3g}"
        out, _, counts, _, kept = self(threshold, counts=True, kept=True)
        if counts is None or kept is None:
            raise WrongResultError(f"{name}: no counts or no map came back")
        check_counts(counts, kept, self.inputs.q.shape[1], self.causal)
        check_equal(self(threshold).out, out, f"{name}: counting must not change the output")
        error = sampled.check(out, kept, threshold, name)
        return self.variant(threshold, float(counts.sparsity), error)

    def variant(self, threshold: float | None, sparsity: float, error: float) -> _Variant:
        """What is timed: the output alone."""
        return _Variant(f"blasst {self.impl}", threshold, sparsity, error, lambda: self(threshold))


def _baseline(inputs: Inputs, causal: bool) -> tuple[str, Callable[[], Tensor], list[str]]:
    """Name, call and notes of torch's dense attention; outputs are (batch, seqlen, heads, head_dim)."""
    q, k, v = (x.transpose(1, 2) for x in (inputs.q, inputs.k, inputs.v))

    def plain() -> Tensor:
        return torch.nn.functional.scaled_dot_product_attention(
            q, k, v, is_causal=causal, scale=inputs.softmax_scale, enable_gqa=True
        ).transpose(1, 2)

    def cudnn() -> Tensor:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return plain()

    if inputs.q.device.type != "cuda":
        return TORCH_SDPA, plain, []
    try:
        cudnn()
    except RuntimeError as error:
        return TORCH_SDPA, plain, [f"cuDNN does not serve this call, torch chose its dense kernel: {error}"]
    return CUDNN, cudnn, []


def _note_distance(dialled: Sequence[DialledThreshold]) -> list[str]:
    return [
        f"sparsity {wanted:g} was not met; the closest is {sparsity:.3f} at threshold {threshold:.3g}"
        for wanted, threshold, sparsity in dialled
        if abs(sparsity - wanted) > _NOTED_DISTANCE
    ]


def _choose_repeats(call: Callable[[], object], device: torch.device) -> int:
    once = interleaved({"dense": call}, device, repeats=1, warmup=1)["dense"].median
    return min(max(round(_MS_PER_VARIANT / max(once, 1e-6)), _REPEATS[0]), _REPEATS[1])


def _row(
    variant: _Variant, timing: Timing, inputs: Inputs, causal: bool, cudnn_ms: float | None, own_ms: float
) -> BenchmarkRow:
    batch, seqlen, num_heads, head_dim = inputs.q.shape
    return BenchmarkRow(
        bench="prefill",
        kernel=variant.kernel,
        inputs=inputs.name,
        dtype=str(inputs.q.dtype).removeprefix("torch."),
        batch=batch,
        num_heads=num_heads,
        num_kv_heads=inputs.k.shape[2],
        head_dim=head_dim,
        seqlen_q=seqlen,
        seqlen_k=seqlen,
        causal=causal,
        threshold=variant.threshold,
        sparsity=variant.sparsity,
        ms=timing.median,
        ms_low=timing.low,
        ms_high=timing.high,
        repeats=timing.repeats,
        tflops=4.0 * inputs.visible_pairs(causal) * head_dim / timing.median / 1e9,
        ratio_to_cudnn=None if cudnn_ms is None else cudnn_ms / timing.median,
        ratio_to_own_dense=own_ms / timing.median,
        max_error=variant.max_error,
        command=command_line(),
    )


def measure_prefill(
    inputs: Inputs,
    sparsities: Sequence[float],
    *,
    causal: bool = True,
    impl: str = "auto",
    repeats: int | None = None,
    seed: int = 0,
) -> PrefillResult:
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
    device = inputs.q.device
    baseline, sdpa, notes = _baseline(inputs, causal)
    ours = _Ours(inputs, causal, impl)
    dense = sdpa()
    check_close(ours.dense, dense, f"{ours.impl}, dense")
    sampled = SampledTiles(inputs, causal, seed)
    error = sampled.check(ours.dense, None, None, f"{ours.impl}, dense")
    variants = [
        _Variant(baseline, None, 0.0, sampled.dense_error(dense), sdpa),
        ours.variant(None, 0.0, error),
        ours.checked_zero(error),
    ]
    del dense
    dialled = dial_sparsity(ours.sparsity, sorted(sparsities))
    notes += _note_distance(dialled)
    thresholds = dict.fromkeys(entry.threshold for entry in dialled)  # two goals may have one answer
    variants += [ours.checked(threshold, sampled) for threshold in thresholds]
    repeats = repeats or _choose_repeats(variants[1].call, device)
    calls = {str(number): variant.call for number, variant in enumerate(variants)}
    timings = interleaved(calls, device, repeats=repeats, warmup=2 if device.type == "cuda" else 1)
    own_ms = timings["1"].median
    cudnn_ms = timings["0"].median if baseline == CUDNN else None
    rows = [
        _row(variant, timings[str(number)], inputs, causal, cudnn_ms, own_ms)
        for number, variant in enumerate(variants)
    ]
    return PrefillResult(rows, notes)
