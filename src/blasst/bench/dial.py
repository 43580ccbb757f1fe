"""Find the threshold that gives a wanted sparsity, on the kernel's own counts."""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

#: ln of the smallest threshold tried (float32 has no normal number below e ** -87.3) and of the largest.
_LOG_RANGE = (-87.0, 0.0)

#: A search stops this close to the wanted sparsity, or when the bracket is this narrow (nats).
_TOLERANCE = 0.003
_NARROW = 1e-4


class DialledThreshold(NamedTuple):
    """A threshold and what it gave.

    Attributes:
        wanted: sparsity that was asked for.
        threshold: linear ratio in (0, 1].
        sparsity: what the kernel counted at it.
    """

    wanted: float
    threshold: float
    sparsity: float


def dial_sparsity(sparsity_of: Callable[[float], float], wanted: Sequence[float]) -> list[DialledThreshold]:
    """Bisect ln(threshold) for each wanted sparsity; what is learned for one narrows the next.

    Args:
        sparsity_of: runs the kernel at a threshold and returns skipped over visited; never falls as the
            threshold rises.
        wanted: sparsities in (0, 1).

    Returns:
        One entry per wanted sparsity, the closest that was met: for what no threshold reaches, that of the
        largest or smallest threshold.
    """
    known: list[tuple[float, float]] = [(log, sparsity_of(math.exp(log))) for log in _LOG_RANGE]
    found = []
    for goal in wanted:
        while True:
            best = min(known, key=lambda pair: abs(pair[1] - goal))
            above = bisect.bisect_left([sparsity for _, sparsity in known], goal)
            if abs(best[1] - goal) <= _TOLERANCE or above in (0, len(known)):
                break
            low, high = known[above - 1][0], known[above][0]
            if high - low <= _NARROW:
                break
            log = (low + high) / 2
            known.insert(above, (log, sparsity_of(math.exp(log))))
        found.append(DialledThreshold(goal, math.exp(best[0]), best[1]))
    return found
