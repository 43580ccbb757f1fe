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


def _expected_log(curve: Sequence[tuple[float, float]], sparsity: float) -> float:
    """ln(threshold) of a sparsity on a curve that rises, continued straight beyond its ends."""
    above = bisect.bisect_left([s for _, s in curve], sparsity)
    (log, low), (next_log, high) = curve[min(max(above, 1), len(curve) - 1) - 1 :][:2]
    return log + (sparsity - low) * (next_log - log) / max(high - low, 1e-6)


def _next_log(
    known: dict[float, float], curve: Sequence[tuple[float, float]], goal: float, tries: int
) -> float:
    """Where to look next for a sparsity, given what was counted, what may be expected, and tries so far."""
    below = max((log for log, sparsity in known.items() if sparsity < goal), default=None)
    above = min((log for log, sparsity in known.items() if sparsity >= goal), default=None)
    if below is not None and above is not None and below < above:
        share = (goal - known[below]) / max(known[above] - known[below], 1e-6)
        return below + min(max(share, 0.1), 0.9) * (above - below)
    log = _expected_log(curve, goal)
    nearest = below if below is not None else above
    if nearest is not None:  # the curve, moved to what was counted
        step = log - _expected_log(curve, known[nearest])
        least = 0.25 * 2**tries
        log = nearest + (max(step, least) if nearest == below else min(step, -least))
    return min(max(log, _LOG_RANGE[0]), _LOG_RANGE[1])


def dial_sparsity_from(
    sparsity_of: Callable[[float], float],
    wanted: Sequence[float],
    curve: Sequence[tuple[float, float]],
    *,
    tolerance: float = 0.01,
    most: int = 8,
) -> tuple[list[DialledThreshold], list[tuple[float, float]]]:
    """`dial_sparsity` for a call that takes seconds: begin where the answer is expected, and stop early.

    Args:
        sparsity_of: runs the model at a threshold and returns skipped over visited.
        wanted: sparsities in (0, 1).
        curve: at least two expected (ln threshold, sparsity), both ascending; a wrong one costs calls only.
        tolerance: distance from the wanted sparsity that will do.
        most: calls for each wanted sparsity.

    Returns:
        One entry per wanted sparsity, the closest that was met; and all (ln threshold, sparsity) counted,
        ascending.
    """
    known: dict[float, float] = {}
    found = []
    for goal in wanted:
        for tries in range(most):
            if any(abs(sparsity - goal) <= tolerance for sparsity in known.values()):
                break
            log = _next_log(known, curve, goal, tries)
            if log in known:  # an end of the range
                break
            known[log] = sparsity_of(math.exp(log))
        best = min(known, key=lambda log: abs(known[log] - goal))
        found.append(DialledThreshold(goal, math.exp(best), known[best]))
    return found, sorted(known.items())
