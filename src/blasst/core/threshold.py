"""Every formula that leads to a threshold, once, in log space.

A threshold is a linear ratio in [0, 1]: a tile is skipped when each of its keys would get a softmax weight
below it. A scale factor becomes a threshold by dividing by the number of keys of that sequence at that call.
"""

from __future__ import annotations

import math
from typing import overload

import torch
from torch import Tensor


def _positive_log(value: float) -> float:
    return math.log(value) if value > 0.0 else -math.inf


def _exp(value: float) -> float:
    """exp that saturates to inf instead of raising OverflowError."""
    return math.exp(value) if value < 709.0 else math.inf


@overload
def threshold_from_scale_factor(scale_factor: float, kv_len: int) -> float: ...
@overload
def threshold_from_scale_factor(scale_factor: float | Tensor, kv_len: Tensor) -> Tensor: ...
@overload
def threshold_from_scale_factor(scale_factor: Tensor, kv_len: int | Tensor) -> Tensor: ...
def threshold_from_scale_factor(scale_factor: float | Tensor, kv_len: int | Tensor) -> float | Tensor:
    """Threshold of a sequence: min(1, scale_factor / kv_len).

    Args:
        scale_factor: threshold times length, at least 0; float or float32 tensor (batch,).
        kv_len: keys of that sequence at that call, cache and new; int or integer tensor (batch,). A sequence
            without keys gets the threshold of one key (nothing is visited there).

    Returns:
        A float for two Python numbers, else a float32 tensor on the device of the tensor argument.

    Source: BLASST section 3.3; the clamp to 1 is SPEC section 2.
    """
    if isinstance(scale_factor, Tensor) or isinstance(kv_len, Tensor):
        device = scale_factor.device if isinstance(scale_factor, Tensor) else kv_len.device  # type: ignore[union-attr]
        factor = torch.as_tensor(scale_factor, dtype=torch.float32, device=device)
        length = torch.as_tensor(kv_len, device=device).clamp(min=1).to(torch.float32)
        return (factor / length).clamp(max=1.0)
    return min(1.0, scale_factor / max(kv_len, 1))


def scale_factor_from_target(a: float, b: float, target_sparsity: float) -> float:
    """Scale factor a * exp(b * target_sparsity), computed in log space; inf when it exceeds float64.

    Args:
        a: coefficient in keys, at least 0.
        b: slope of ln(scale factor) per unit of sparsity.
        target_sparsity: skipped over visited tiles, in [0, 1].

    Source: the exponential model of TensorRT-LLM and ModelOpt files.
    """
    return _exp(_positive_log(a) + b * target_sparsity)


def target_from_scale_factor(a: float, b: float, scale_factor: float) -> float:
    """Inverse of `scale_factor_from_target`; -inf for a factor of 0, and not clamped to [0, 1].

    Args:
        a: coefficient in keys, above 0.
        b: slope, not 0.
        scale_factor: threshold times length, at least 0.
    """
    return (_positive_log(scale_factor) - math.log(a)) / b


def threshold_log(threshold: float) -> float:
    """ln(threshold); -inf for 0."""
    return _positive_log(threshold)


def threshold_log2(threshold: float) -> float:
    """log2(threshold), the unit inside kernels; -inf for 0."""
    return math.log2(threshold) if threshold > 0.0 else -math.inf


def threshold_from_log(log_threshold: float) -> float:
    """exp(log_threshold), clamped to 1; the inverse of `threshold_log`."""
    return min(1.0, _exp(log_threshold))


def threshold_from_log2(log2_threshold: float) -> float:
    """2 ** log2_threshold, clamped to 1; the inverse of `threshold_log2`."""
    return threshold_from_log(log2_threshold * math.log(2.0))


def scale_factor_from_threshold(threshold: float, kv_len: int) -> float:
    """Scale factor that gives a threshold at a length: threshold * kv_len."""
    return threshold * kv_len


def effective_log_threshold(threshold: Tensor) -> Tensor:
    """ln of device thresholds as kernels read them: above 1 acts as 1, negative and NaN as 0 (-inf).

    Args:
        threshold: float32 (batch,).
    """
    safe = torch.where(threshold > 0.0, threshold, torch.zeros_like(threshold))
    return safe.clamp(max=1.0).log()


def max_speedup(sparsity: float) -> float:
    """Ideal speed-up 1 / (1 - s/2) when Q.K^T and P.V cost the same and only P.V is skipped."""
    return 1.0 / (1.0 - sparsity / 2.0)
