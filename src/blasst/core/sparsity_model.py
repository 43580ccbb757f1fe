"""The two fitted models that turn a target sparsity into a threshold, reduced to two scalars per target.

Both answer `coefficients(target)` with (log_scale, exponent), and the run time computes
threshold = min(1, exp(log_scale) * max(kv_len, 128) ** exponent). Construction refuses any values for which a
threshold would fall when the target rises, or rise with the length, so a profile cannot hold such a model.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from blasst.core.errors import ProfileError

ModelName = Literal["exponential", "length_exponent"]

MODEL_NAMES: tuple[ModelName, ...] = ("exponential", "length_exponent")

#: Lengths that the models cover; thresholds are guaranteed to rise with the target between them. With fewer
#: keys than the lower one no tile can be skipped (one key tile in prefill, only anchors in decode), so
#: shorter lengths act as that.
MIN_MODEL_LENGTH = 128
MAX_MODEL_LENGTH = 2**27

#: Targets nearer to 0 or 1 than this act as this far away, so that their logit stays finite.
TARGET_MARGIN = 1e-6

#: Any coefficient above this is taken for a broken fit.
MAX_COEFFICIENT = 1e6


def logit(sparsity: float) -> float:
    """ln(s / (1 - s)), with s held `TARGET_MARGIN` away from 0 and 1."""
    inside = min(max(sparsity, TARGET_MARGIN), 1.0 - TARGET_MARGIN)
    return math.log(inside) - math.log1p(-inside)


def require_target(target_sparsity: float) -> float:
    """Return a target sparsity as a float, or say what is wrong with it.

    Raises:
        TypeError: it is not a number.
        ValueError: it is not in [0, 1].
    """
    if isinstance(target_sparsity, bool) or not isinstance(target_sparsity, (int, float)):
        raise TypeError(f"target_sparsity must be a number in [0, 1], got {target_sparsity!r}")
    if not 0.0 <= target_sparsity <= 1.0:
        raise ValueError(f"target_sparsity must be in [0, 1], got {target_sparsity!r}")
    return float(target_sparsity)


def _require(condition: bool, field: str, found: object, wanted: str) -> None:
    if not condition:
        raise ProfileError(f"{field}: found {found!r}, wanted {wanted}")


def _require_bounded(model: str, **values: float) -> None:
    for name, value in values.items():
        _require(
            math.isfinite(value) and abs(value) <= MAX_COEFFICIENT,
            f"{model}.{name}",
            value,
            f"a finite number of at most {MAX_COEFFICIENT:g} in size",
        )


@dataclass(frozen=True)
class ExponentialModel:
    """threshold * kv_len = a * exp(b * target): what TensorRT-LLM and ModelOpt files hold.

    Attributes:
        a: scale factor at target 0, in keys, above 0.
        b: slope of ln(threshold) per unit of sparsity, above 0.
        r2: share of the variance of ln(threshold * kv_len) that the fit explains, at most 1.

    Raises:
        ProfileError: a or b would give thresholds that do not rise with the target.

    Source: BLASST section 3.3.
    """

    a: float
    b: float
    r2: float

    def __post_init__(self) -> None:
        _require(math.isfinite(self.a) and self.a > 0.0, "exponential.a", self.a, "a finite number above 0")
        _require_bounded("exponential", b=self.b, r2=self.r2)
        _require(self.b > 0.0, "exponential.b", self.b, "a number above 0")
        _require(self.r2 <= 1.0, "exponential.r2", self.r2, "at most 1")

    def coefficients(self, target_sparsity: float) -> tuple[float, float]:
        """(log_scale, exponent) at one target; the exponent is always -1."""
        return math.log(self.a) + self.b * target_sparsity, -1.0


@dataclass(frozen=True)
class LengthExponentModel:
    """A curve in logit(target) whose exponent of the length is fitted, not fixed at -1.

    With x = logit(target) and l = ln(kv_len / reference_length):
    ln(threshold) = c0 + c1 * x + c2 * x^2 + (c3 + c4 * x) * l. Outside `logit_range` the c2 part goes on as
    its tangent and the exponent stays what it is at the border, so extrapolation is monotone too.

    Attributes:
        c0: ln(threshold) at target 0.5 and the reference length.
        c1: slope in x at x = 0.
        c2: curvature in x.
        c3: exponent of the length at target 0.5; 0 or below at every target.
        c4: change of the exponent with x.
        reference_length: kv_len at which l is 0.
        logit_range: (lowest, highest) logit of the sparsities that were fitted.
        r2: share of the variance of ln(threshold) that the fit explains, at most 1.

    Raises:
        ProfileError: thresholds would fall with the target or rise with the length somewhere between 128
            and 2^27 keys.
    """

    c0: float
    c1: float
    c2: float
    c3: float
    c4: float
    reference_length: float
    logit_range: tuple[float, float]
    r2: float

    def __post_init__(self) -> None:
        low, high = self.logit_range
        _require_bounded(
            "length_exponent", c0=self.c0, c1=self.c1, c2=self.c2, c3=self.c3, c4=self.c4, r2=self.r2
        )
        _require(self.r2 <= 1.0, "length_exponent.r2", self.r2, "at most 1")
        _require(
            1.0 <= self.reference_length <= MAX_MODEL_LENGTH,
            "length_exponent.reference_length",
            self.reference_length,
            f"a length in [1, {MAX_MODEL_LENGTH}]",
        )
        bound = logit(1.0)
        _require(
            -bound <= low <= high <= bound,
            "length_exponent.logit_range",
            list(self.logit_range),
            f"[low, high] within +-{bound:.4g}",
        )
        for x in (low, high):
            exponent = self.c3 + self.c4 * x
            _require(
                exponent <= 0.0,
                f"length_exponent: the exponent c3 + c4 * {x:.4g}",
                exponent,
                "at most 0 (a threshold must not rise with the length)",
            )
            for length in (float(MIN_MODEL_LENGTH), float(MAX_MODEL_LENGTH)):
                slope = self.c1 + 2.0 * self.c2 * x + self.c4 * math.log(length / self.reference_length)
                _require(
                    slope > 0.0,
                    f"length_exponent: the slope in logit(target) at {x:.4g} and {length:g} keys",
                    slope,
                    "above 0 (a threshold must rise with the target)",
                )

    def coefficients(self, target_sparsity: float) -> tuple[float, float]:
        """(log_scale, exponent) at one target."""
        x = logit(target_sparsity)
        inside = min(max(x, self.logit_range[0]), self.logit_range[1])
        exponent = self.c3 + self.c4 * inside
        curve = self.c0 + self.c1 * x + self.c2 * inside * (2.0 * x - inside)
        return curve - exponent * math.log(self.reference_length), exponent


def solve_target(model: ExponentialModel | LengthExponentModel, threshold: float, kv_len: float) -> float:
    """The target for which a model gives a threshold: the inverse of its curve, which rises, by bisection.

    Args:
        model: either model.
        threshold: linear, in [0, 1].
        kv_len: keys of the sequence; below 128 acts as 128.

    Returns:
        In [0, 1]; 1 where every target has a smaller threshold, 0 where every target has a larger one.
    """
    if threshold <= 0.0:
        return 0.0
    wanted, log_length = math.log(threshold), math.log(max(kv_len, MIN_MODEL_LENGTH))
    low, high = 0.0, 1.0
    for _ in range(50):
        middle = (low + high) / 2
        log_scale, exponent = model.coefficients(middle)
        low, high = (middle, high) if log_scale + exponent * log_length <= wanted else (low, middle)
    return low
