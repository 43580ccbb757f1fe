"""The exponential fitted as ModelOpt fits it: to threshold * length itself, all points alike.

ModelOpt's calibrator (0.47) fits a * exp(b * sparsity) to threshold * length by unweighted least squares in
linear space, one point per prompt and threshold, so large thresholds decide. Ours regresses the logarithm.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from blasst.calibrate.counts import FITTED_SPARSITY, CountPoint, Floats
from blasst.core.errors import CalibrationError

#: Slopes that are tried first; the best is refined between its neighbours.
_SLOPES = np.linspace(0.5, 60.0, 239)
_REFINEMENTS = 4


def fit_linear_space(points: Sequence[CountPoint]) -> tuple[float, float]:
    """(a, b) of a * exp(b * sparsity) = threshold * length with the least squared error.

    Args:
        points: counts of single prompts; those with a sparsity of 0.1 to 0.9 enter.

    Raises:
        CalibrationError: fewer than 3 points enter.
    """
    sparsity, factor = [], []
    for point in points:
        share = point.skipped / point.visited
        keep = (share >= FITTED_SPARSITY[0]) & (share <= FITTED_SPARSITY[1])
        sparsity.append(share[keep])
        factor.append(point.threshold[keep] * point.seqlen)
    s, y = (np.concatenate(parts) if parts else np.zeros(0) for parts in (sparsity, factor))
    if len(s) < 3:
        raise CalibrationError(f"points: {len(s)} with a sparsity in {list(FITTED_SPARSITY)}, need 3")

    def best(slopes: Floats) -> tuple[int, float]:
        # For a given b the best a is a quotient of sums; exp is scaled so that it cannot overflow.
        grown = np.exp(slopes[:, None] * (s - 1.0))
        a = (grown @ y) / (grown**2).sum(1)
        errors = ((a[:, None] * grown - y) ** 2).sum(1)
        index = int(errors.argmin())
        return index, float(a[index])

    slopes = _SLOPES
    for _ in range(_REFINEMENTS):
        index, _ = best(slopes)
        slopes = np.linspace(slopes[max(index - 1, 0)], slopes[min(index + 1, len(slopes) - 1)], 41)
    index, scaled = best(slopes)
    b = float(slopes[index])
    return scaled * float(np.exp(-b)), b
