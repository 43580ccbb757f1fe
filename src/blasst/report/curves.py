"""Rows for the calibration figure, taken from a profile."""

from __future__ import annotations

from typing import Any

from blasst.core.profile import Profile

#: Targets at which a fitted curve is drawn.
_DRAWN_TARGETS = tuple(step / 50 for step in range(1, 50))


def calibration_rows(profile: Profile) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Measured points and fitted curves of every phase of a profile.

    Args:
        profile: what calibration made.

    Returns:
        Points (phase, seqlen, threshold, sparsity) and curves (phase, seqlen, and the lists threshold and
        sparsity). Thresholds of 0 are left out, since the axis is logarithmic.
    """
    points, curves = [], []
    for phase, fit in profile.phases.items():
        for counted in fit.points:
            pairs = [pair for pair in zip(counted.threshold, counted.sparsity) if pair[0] > 0.0]
            points += [
                {"phase": phase, "seqlen": counted.seqlen, "threshold": threshold, "sparsity": sparsity}
                for threshold, sparsity in pairs
            ]
            drawn = [(profile.threshold(phase, target, counted.seqlen), target) for target in _DRAWN_TARGETS]
            lowest = min((threshold for threshold, _ in pairs), default=0.0)
            shown = [pair for pair in drawn if lowest <= pair[0] < 1.0]
            curves.append(
                {
                    "phase": phase,
                    "seqlen": counted.seqlen,
                    "threshold": [threshold for threshold, _ in shown],
                    "sparsity": [target for _, target in shown],
                }
            )
    return points, curves


def kind_rows(profile: Profile) -> list[dict[str, Any]]:
    """Achieved sparsity of each kind of calibration prompt at the threshold of a target.

    Args:
        profile: what calibration made.
    """
    return [
        {
            "phase": phase,
            "seqlen": spread.seqlen,
            "target": spread.target,
            "kind": spread.kind,
            "achieved": spread.achieved,
        }
        for phase, fit in profile.phases.items()
        for spread in fit.kind_spread
    ]
