"""Dense and sparse times of the portable kernels on this device, correctness first."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from blasst.bench.check import WrongResultError
from blasst.bench.record import BenchmarkRow, command_line
from blasst.bench.timing import interleaved
from blasst.core.reference import reference_attention
from blasst.core.types import AttentionOutput, Phase
from blasst.functional import blasst_attn_func, blasst_attn_with_kvcache
from blasst.kernels.select import backend_used
from blasst.testing import assert_within_budget, heavy_tailed_inputs, max_error

DENSE_BASELINE = "torch sdpa"

#: Share of hot key blocks and how far the others lie below them: thresholds from 0.1 to 1e-6 skip more and
#: more, so that one run shows several sparsities.
_HOT_FRACTION = 0.1
_COLD_NATS = (2.0, 14.0)


@dataclass(frozen=True)
class Setting:
    """One shape to time.

    Attributes:
        phase: "prefill" (causal, seqlen rows) or "decode" (one new row).
        seqlen: keys of a sequence.
        batch: sequences.
        num_heads: query heads.
        num_kv_heads: key and value heads.
        head_dim: size of a vector.
    """

    phase: Phase
    seqlen: int
    batch: int = 1
    num_heads: int = 8
    num_kv_heads: int = 2
    head_dim: int = 64

    @property
    def seqlen_q(self) -> int:
        """Query rows."""
        return self.seqlen if self.phase == "prefill" else 1

    @property
    def operations(self) -> float:
        """Multiplications and additions of dense attention under this mask."""
        visible = self.seqlen * (self.seqlen + 1) / 2 if self.phase == "prefill" else float(self.seqlen)
        return 4.0 * self.batch * self.num_heads * visible * self.head_dim


def _run(setting: Setting, qkv: tuple[Tensor, Tensor, Tensor], threshold: float | None) -> AttentionOutput:
    """Our attention, for checking: with counts and kept tiles."""
    if setting.phase == "prefill":
        return blasst_attn_func(
            *qkv, threshold=threshold, causal=True, return_counts=True, return_kept_tiles=True
        )
    return blasst_attn_with_kvcache(*qkv, threshold=threshold, return_counts=True, return_kept_tiles=True)


def _call(
    setting: Setting, qkv: tuple[Tensor, Tensor, Tensor], threshold: float | None
) -> Callable[[], object]:
    """Our attention, for timing: the output alone."""
    if setting.phase == "prefill":
        return lambda: blasst_attn_func(*qkv, threshold=threshold, causal=True)
    return lambda: blasst_attn_with_kvcache(*qkv, threshold=threshold)


def _sdpa(setting: Setting, qkv: tuple[Tensor, Tensor, Tensor]) -> Callable[[], Tensor]:
    """torch's dense attention on the same tensors and mask."""
    q, k, v = (x.transpose(1, 2) for x in qkv)
    causal = setting.phase == "prefill"
    return lambda: torch.nn.functional.scaled_dot_product_attention(
        q, k, v, is_causal=causal, enable_gqa=True
    )


def check_output(
    setting: Setting, qkv: tuple[Tensor, Tensor, Tensor], got: AttentionOutput, threshold: float | None
) -> float:
    """Compare with the reference that follows the same kept tiles.

    Args:
        setting: the shape.
        qkv: the inputs.
        got: output with kept_tiles and counts.
        threshold: the threshold it was computed with.

    Returns:
        max|out - truth|.

    Raises:
        WrongResultError: outside the error budget of blasst.testing.assert_within_budget.
    """
    q, k, v = qkv

    def reference(values: Tensor, dtype: torch.dtype) -> Tensor:
        return reference_attention(
            q,
            k,
            values,
            threshold=threshold,
            phase=setting.phase,
            causal=setting.phase == "prefill",
            kept_tiles=got.kept_tiles,
            dtype=dtype,
        ).out

    truth = reference(v, torch.float64)
    # Values of both signs cancel; rounding is relative to the sum of their sizes.
    magnitude = float(reference(v.abs(), torch.float64).max())
    try:
        assert_within_budget(got.out, truth, reference(v, q.dtype), magnitude=magnitude)
    except AssertionError as error:
        raise WrongResultError(f"{setting}: {error}") from error
    return max_error(got.out, truth)


def measure(
    setting: Setting,
    thresholds: Sequence[float],
    *,
    device: torch.device,
    dtype: torch.dtype,
    seed: int = 0,
    repeats: int = 5,
) -> list[BenchmarkRow]:
    """Check, then time, torch's dense attention, ours at threshold 0, and ours at each threshold.

    Args:
        setting: shape and phase.
        thresholds: linear ratios in (0, 1]; 0 is always measured as well.
        device: where to run.
        dtype: of q, k and v.
        seed: of the generated inputs.
        repeats: timed calls of each variant, interleaved.

    Returns:
        One row per variant, the dense baseline first.

    Raises:
        WrongResultError: an output is outside its error budget; nothing is timed then.
    """
    qkv = heavy_tailed_inputs(
        setting.batch,
        setting.seqlen_q,
        setting.seqlen,
        setting.num_heads,
        setting.num_kv_heads,
        setting.head_dim,
        dtype=dtype,
        device=device,
        seed=seed,
        hot_fraction=_HOT_FRACTION,
        drop=_COLD_NATS,
    )
    calls: dict[str, Callable[[], object]] = {DENSE_BASELINE: _sdpa(setting, qkv)}
    found: dict[str, tuple[float | None, float, float]] = {DENSE_BASELINE: (None, 0.0, 0.0)}
    for threshold in sorted({0.0, *thresholds}):
        got = _run(setting, qkv, threshold)
        name = f"blasst {backend_used()} {threshold:g}"
        error = check_output(setting, qkv, got, threshold)
        sparsity = float(got.counts.sparsity) if got.counts is not None else 0.0
        calls[name], found[name] = _call(setting, qkv, threshold), (threshold, sparsity, error)
    timings = interleaved(calls, device, repeats=repeats, cold_l2=setting.phase == "decode")
    return [
        BenchmarkRow(
            kernel=" ".join(name.split(" ")[:2]),
            bench=f"portable {setting.phase}",
            inputs=f"heavy-tailed, hot {_HOT_FRACTION:g}, cold {_COLD_NATS[0]:g} to {_COLD_NATS[1]:g} nats",
            dtype=str(dtype).removeprefix("torch."),
            batch=setting.batch,
            seqlen_q=setting.seqlen_q,
            seqlen_k=setting.seqlen,
            num_heads=setting.num_heads,
            num_kv_heads=setting.num_kv_heads,
            head_dim=setting.head_dim,
            causal=setting.phase == "prefill",
            threshold=found[name][0],
            sparsity=found[name][1],
            ms=timing.median,
            ms_low=timing.low,
            ms_high=timing.high,
            repeats=timing.repeats,
            tflops=setting.operations / timing.median / 1e9,
            ratio_to_cudnn=None,
            ratio_to_own_dense=None,
            max_error=found[name][2],
            command=command_line(),
        )
        for name, timing in timings.items()
    ]
