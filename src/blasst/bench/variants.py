"""What a benchmark of one kernel is made of: its checked variants beside torch, timed in turns, as rows.

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
from blasst.kernels.select import backend_used

#: The dense baseline: torch SDPA with its cuDNN backend forced, or whatever torch chooses.
CUDNN, TORCH_SDPA = "cudnn", "torch sdpa"

#: Timed milliseconds of each variant, and the least and most calls, unless told otherwise.
_MS_PER_VARIANT = 200.0
_REPEATS = (7, 50)

#: How far from the wanted sparsity a row may lie without a note.
_NOTED_DISTANCE = 0.01


class BenchmarkResult(NamedTuple):
    """What one input gave.

    Attributes:
        rows: the dense baseline, ours dense, ours at threshold 0, then by sparsity.
        notes: what a reader has to know, one sentence each.
    """

    rows: list[BenchmarkRow]
    notes: list[str]


class Variant(NamedTuple):
    """One call to be timed, checked.

    Attributes:
        kernel: name for the row.
        threshold: None = dense.
        sparsity: that the kernel counted.
        max_error: against the reference.
        call: the output alone.
    """

    kernel: str
    threshold: float | None
    sparsity: float
    max_error: float
    call: Callable[[], object]


class Baseline(NamedTuple):
    """Torch's dense attention on the inputs.

    Attributes:
        name: CUDNN or TORCH_SDPA.
        call: gives (batch, seqlen_q, heads, head_dim).
        notes: what a reader has to know.
    """

    name: str
    call: Callable[[], Tensor]
    notes: list[str]


#: A public attention function on the inputs of the benchmark; takes threshold, return_counts,
#: return_kept_tiles and impl by name.
Attend = Callable[..., AttentionOutput]


class OwnKernel:
    """The kernel under test on one input; "auto" is resolved once, by the dense call."""

    def __init__(self, attend: Attend, impl: str, sampled: SampledTiles, visited: int) -> None:
        self._attend, self.impl, self._sampled, self._visited = attend, impl, sampled, visited
        self.dense = self(None).out
        self.impl = backend_used() or impl  # "auto" must not choose another kernel for another variant

    def __call__(self, threshold: float | None, counts: bool = False, kept: bool = False) -> AttentionOutput:
        """The output at a threshold, with counts and the map of kept tiles if wanted."""
        return self._attend(threshold=threshold, return_counts=counts, return_kept_tiles=kept, impl=self.impl)

    def sparsity(self, threshold: float) -> float:
        """What the kernel counts at a threshold."""
        counts = self(threshold, counts=True).counts
        return 0.0 if counts is None else float(counts.sparsity)

    def checked_dense(self, other: Tensor) -> Variant:
        """The dense call, right beside another dense kernel's output and in the sampled tiles."""
        name = f"{self.impl}, dense"
        check_close(self.dense, other, name)
        return self._variant(None, 0.0, self._sampled.check(self.dense, None, None, name))

    def checked_zero(self, error: float) -> Variant:
        """The skipping kernel that skips nothing: the bits of the dense one, whose error is known."""
        name = f"{self.impl} at threshold 0"
        out, _, counts, _, _ = self(0.0, counts=True)
        if counts is None or bool(counts.skipped.any()):
            raise WrongResultError(f"{name}: skipped tiles")
        check_equal(out, self.dense, f"{name}: must be the output of the dense kernel, bit for bit")
        check_equal(self(0.0).out, out, f"{name}: counting must not change the output")
        return self._variant(0.0, 0.0, error)

    def checked(self, threshold: float) -> Variant:
        """A skipping variant whose counts, map and output were found right."""
        name = f"{self.impl} at threshold {threshold:.3g}"
        out, _, counts, _, kept = self(threshold, counts=True, kept=True)
        if counts is None or kept is None:
            raise WrongResultError(f"{name}: no counts or no map came back")
        check_counts(counts, kept, self._visited)
        check_equal(self(threshold).out, out, f"{name}: counting must not change the output")
        error = self._sampled.check(out, kept, threshold, name)
        return self._variant(threshold, float(counts.sparsity), error)

    def _variant(self, threshold: float | None, sparsity: float, error: float) -> Variant:
        return Variant(f"blasst {self.impl}", threshold, sparsity, error, lambda: self(threshold))


def torch_baseline(inputs: Inputs, causal: bool) -> Baseline:
    """Torch's dense attention with the cuDNN backend, or with what torch chooses where cuDNN cannot serve.

    Args:
        inputs: what to run on.
        causal: bottom-right aligned; with as many rows as keys, or one row, torch's own mask serves.
    """
    q, k, v = (x.transpose(1, 2) for x in (inputs.q, inputs.k, inputs.v))
    rows, keys = q.shape[2], k.shape[2]
    notes, mask = [], None
    if causal and 1 < rows < keys:
        mask = torch.ones(rows, keys, dtype=torch.bool, device=q.device).tril_(keys - rows)
        notes.append("the dense baseline reads its causal mask from memory; torch's own is aligned top left")

    def plain() -> Tensor:
        return torch.nn.functional.scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=mask,
            is_causal=causal and rows == keys,
            scale=inputs.softmax_scale,
            enable_gqa=True,
        ).transpose(1, 2)

    def cudnn() -> Tensor:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return plain()

    if inputs.q.device.type != "cuda":
        return Baseline(TORCH_SDPA, plain, notes)
    try:
        cudnn()
    except RuntimeError as error:
        notes.append(f"cuDNN does not serve this call, torch chose its dense kernel: {error}")
        return Baseline(TORCH_SDPA, plain, notes)
    return Baseline(CUDNN, cudnn, notes)


def _note_distance(dialled: Sequence[DialledThreshold]) -> list[str]:
    return [
        f"sparsity {wanted:g} was not met; the closest is {sparsity:.3f} at threshold {threshold:.3g}"
        for wanted, threshold, sparsity in dialled
        if abs(sparsity - wanted) > _NOTED_DISTANCE
    ]


def checked_variants(
    own: OwnKernel, baseline: Baseline, sampled: SampledTiles, sparsities: Sequence[float]
) -> tuple[list[Variant], list[str]]:
    """The baseline, ours dense, at threshold 0 and at each wanted sparsity, all found right; and notes.

    Args:
        own: the kernel under test.
        baseline: of the same inputs.
        sampled: their reference.
        sparsities: wanted, in (0, 1); the thresholds are found on the kernel's own counts.

    Raises:
        WrongResultError: an output, a count or a decision is wrong.
    """
    other = baseline.call()
    dense = own.checked_dense(other)
    foreign = Variant(baseline.name, None, 0.0, sampled.dense_error(other), baseline.call)
    variants = [foreign, dense, own.checked_zero(dense.max_error)]
    del other
    dialled = dial_sparsity(own.sparsity, sorted(sparsities))
    thresholds = dict.fromkeys(entry.threshold for entry in dialled)  # two goals may have one answer
    variants += [own.checked(threshold) for threshold in thresholds]
    return variants, baseline.notes + _note_distance(dialled)


def _choose_repeats(call: Callable[[], object], device: torch.device) -> int:
    once = interleaved({"dense": call}, device, repeats=1, warmup=1)["dense"].median
    return min(max(round(_MS_PER_VARIANT / max(once, 1e-6)), _REPEATS[0]), _REPEATS[1])


def _row(
    bench: str,
    variant: Variant,
    timing: Timing,
    inputs: Inputs,
    causal: bool,
    cudnn_ms: float | None,
    own_ms: float,
) -> BenchmarkRow:
    batch, seqlen_q, num_heads, head_dim = inputs.q.shape
    return BenchmarkRow(
        bench=bench,
        kernel=variant.kernel,
        inputs=inputs.name,
        dtype=str(inputs.q.dtype).removeprefix("torch."),
        batch=batch,
        num_heads=num_heads,
        num_kv_heads=inputs.k.shape[2],
        head_dim=head_dim,
        seqlen_q=seqlen_q,
        seqlen_k=inputs.k.shape[1],
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


def timed_rows(
    bench: str,
    variants: Sequence[Variant],
    inputs: Inputs,
    causal: bool,
    *,
    repeats: int | None,
    cold_l2: bool = False,
) -> list[BenchmarkRow]:
    """Time variants in turns, one row each.

    Args:
        bench: name of the benchmark.
        variants: as checked_variants gives them: the baseline, ours dense, the others.
        inputs: what they run on.
        causal: the mask.
        repeats: timed calls of each; None = about 200 ms of each, 7 to 50 calls.
        cold_l2: as in `interleaved`.
    """
    device = inputs.q.device
    repeats = repeats or _choose_repeats(variants[1].call, device)
    calls = {str(number): variant.call for number, variant in enumerate(variants)}
    warmup = 2 if device.type == "cuda" else 1
    timings = interleaved(calls, device, repeats=repeats, warmup=warmup, cold_l2=cold_l2)
    cudnn_ms = timings["0"].median if variants[0].kernel == CUDNN else None
    own_ms = timings["1"].median
    return [
        _row(bench, variant, timings[str(number)], inputs, causal, cudnn_ms, own_ms)
        for number, variant in enumerate(variants)
    ]
