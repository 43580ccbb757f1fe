"""From counts to a fitted phase: both models, their errors on lengths left out, and which one is used.

Counts are summed and then divided; ratios are never averaged. All regressions run in log space, and points
are weighted so that least squares minimises the error in sparsity.
"""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from blasst.calibrate.counts import FITTED_SPARSITY, CountPoint, Floats, PooledCurve, group_by_length, pool
from blasst.core.errors import CalibrationError, ProfileError
from blasst.core.phase_fit import (
    SERVING_ORDERS,
    SERVING_TILES,
    CountingOrder,
    KindSpread,
    LengthResidual,
    ObservedRange,
    PhaseFit,
    SelectionReason,
    SparsityCurve,
)
from blasst.core.profile import ProfileWarning
from blasst.core.sparsity_model import ExponentialModel, LengthExponentModel, ModelName
from blasst.core.types import Phase, TileShape

Model = ExponentialModel | LengthExponentModel

#: Targets at which achieved sparsity is compared.
CHECKED_TARGETS = tuple(i / 10 for i in range(1, 10))
#: Our model replaces the exponential only when its error (in sparsity) is smaller by more than this, and a
#: larger member of the family a smaller one likewise.
SELECTION_MARGIN = 5e-4

#: Columns of the family, smallest member first; x = logit(s), l = ln(length / reference).
_MEMBERS: tuple[tuple[str, ...], ...] = (
    ("1", "x", "l"),
    ("1", "x", "x2", "l"),
    ("1", "x", "l", "xl"),
    ("1", "x", "x2", "l", "xl"),
)


def fit_phase(
    points: Sequence[CountPoint],
    *,
    phase: Phase,
    tile: TileShape | None = None,
    order: CountingOrder | None = None,
    splits: int = 1,
    dense_tail: int = 0,
    min_samples: int = 2,
    target_sparsity: float | None = None,
) -> PhaseFit:
    """Fit both models to counts, compare them on lengths left out, and select one.

    Args:
        points: counts of single prompts, all at the same thresholds.
        phase: "prefill" or "decode".
        tile: tile shape that was counted in; default the one this library serves.
        order: visiting order that was counted in; default the one this library serves.
        splits: parts of the key axis that were counted in, as for `CountingRule`.
        dense_tail: last rows that were counted as dense, as for `CountingRule`.
        min_samples: fewest prompts to accept.
        target_sparsity: a target that must be reachable at the longest length; None = not checked.

    Raises:
        CalibrationError: too few prompts, no skippable tile, too few points with sparsity in [0.1, 0.9], or a
            target out of reach (the message gives the reachable value).

    Source: BLASST section 3.3 for the exponential model.
    """
    if len(points) < min_samples:
        raise CalibrationError(
            f"{phase}: need at least {min_samples} samples at 2 or more lengths, got {len(points)}"
        )
    tile = tile or SERVING_TILES[phase]
    groups = group_by_length(points)
    curves = [pool(group) for group in groups]
    _require_usable(curves, phase, tile, target_sparsity)
    _warn_about_kinds(groups, phase)
    curves = [curve for curve in curves if curve.fitted().any()]
    exponential = _fit_exponential(curves)
    ours, ours_left_out = _fit_length_exponent(curves, phase)
    residuals = [_residual(curve, exponential, "exponential", False) for curve in curves]
    if ours is not None:
        residuals += [_residual(curve, ours, "length_exponent", False) for curve in curves]
    reason: SelectionReason = "single_length" if len(curves) == 1 else "fitted_lengths"
    if ours_left_out:
        reason = "held_out_lengths"
        residuals += _held_out(curves, _left_out(curves, _exponential_or_none), "exponential")
        residuals += _held_out(curves, ours_left_out, "length_exponent")
    selected = _select(residuals, reason == "held_out_lengths")
    fitted = [(curve, curve.fitted()) for curve in curves]
    sparsity = np.concatenate([curve.sparsity[keep] for curve, keep in fitted])
    threshold = np.concatenate([curve.threshold[keep] for curve, keep in fitted])
    fit = PhaseFit(
        phase=phase,
        tile=tile,
        order=order or SERVING_ORDERS[phase],
        exponential=exponential,
        length_exponent=ours,
        selected=selected,
        selected_by=reason,
        observed=ObservedRange(
            sparsity=(float(sparsity.min()), float(sparsity.max())),
            seqlen=(curves[0].seqlen, curves[-1].seqlen),
            threshold=(float(threshold.min()), float(threshold.max())),
        ),
        points=tuple(_as_record(pool(group)) for group in groups),
        residuals=tuple(residuals),
        splits=splits,
        dense_tail=dense_tail,
    )
    return _with_spread(fit, groups)


def _require_usable(
    curves: Sequence[PooledCurve], phase: Phase, tile: TileShape, target_sparsity: float | None
) -> None:
    longest = curves[-1].seqlen
    if all(curve.skipped[-1] == 0 for curve in curves):
        tiles = "more than one key tile" if phase == "prefill" else "more than three key tiles"
        raise CalibrationError(
            f"{phase}: no skippable tile: the longest samples have about {longest} keys, and skipping needs "
            f"{tiles} of {tile.key} keys; use longer samples"
        )
    reach = max(float(curve.sparsity[-1]) for curve in curves)
    usable = [int(curve.fitted().sum()) for curve in curves]
    if sum(usable) < 3 or max(usable) < 2:
        raise CalibrationError(
            f"{phase}: need at least 3 points with sparsity in {list(FITTED_SPARSITY)}, got {sum(usable)}; "
            f"the counted thresholds reach a sparsity of {reach:.3f} at about {longest} keys: use longer "
            "samples or more thresholds"
        )
    at_longest = float(curves[-1].sparsity[-1])
    if target_sparsity is not None and target_sparsity > at_longest:
        raise CalibrationError(
            f"{phase}: target sparsity {target_sparsity:g} is out of reach; the largest sparsity counted at "
            f"about {longest} keys is {at_longest:.3f}"
        )


def _warn_about_kinds(groups: Sequence[Sequence[CountPoint]], phase: Phase) -> None:
    """Content moves sparsity as much as length does, so every length needs the same kinds of prompt."""
    kinds = {pool(group).seqlen: sorted({point.kind for point in group}) for group in groups}
    if len({tuple(found) for found in kinds.values()}) > 1:
        warnings.warn(
            f"{phase}: the lengths hold different kinds of prompt {kinds}: the fit takes the difference in "
            "content for one in length",
            ProfileWarning,
            stacklevel=3,
        )


def _as_record(curve: PooledCurve) -> SparsityCurve:
    return SparsityCurve(
        seqlen=curve.seqlen,
        samples=curve.samples,
        visited=curve.visited,
        threshold=tuple(float(value) for value in curve.threshold),
        skipped=tuple(int(value) for value in curve.skipped),
    )


def _with_spread(fit: PhaseFit, groups: Sequence[Sequence[CountPoint]], target: float = 0.5) -> PhaseFit:
    """Add the achieved sparsity of each kind at the threshold of one target."""
    log_scale, exponent = fit.model.coefficients(target)
    rows = []
    for group in groups:
        seqlen = pool(group).seqlen
        threshold_log = min(0.0, log_scale + exponent * math.log(seqlen))
        for kind in sorted({point.kind for point in group}):
            achieved = pool([point for point in group if point.kind == kind]).sparsity_at(threshold_log)
            rows.append(KindSpread(kind=kind, seqlen=seqlen, target=target, achieved=achieved))
    return replace(fit, kind_spread=tuple(rows))


def _logit(sparsity: Floats) -> Floats:
    return np.log(sparsity) - np.log1p(-sparsity)


def _least_squares(columns: Floats, y: Floats, weight: Floats) -> tuple[Floats, float]:
    """Weighted least squares; (coefficients, r2)."""
    root = np.sqrt(weight)
    solution = np.linalg.lstsq(columns * root[:, None], y * root, rcond=None)[0]
    mean = float((weight * y).sum() / weight.sum())
    total = float((weight * (y - mean) ** 2).sum())
    rest = float((weight * (y - columns @ solution) ** 2).sum())
    return solution, 1.0 - rest / total if total > 0.0 else 0.0


def _fit_exponential(curves: Sequence[PooledCurve]) -> ExponentialModel:
    """ln(threshold * length) = ln(a) + b * s; every length weighs the same."""
    s, y, weight = [], [], []
    for curve in curves:
        keep = curve.fitted()
        s.append(curve.sparsity[keep])
        y.append(np.log(curve.threshold[keep]) + math.log(curve.seqlen))
        weight.append(np.full(int(keep.sum()), 1.0 / keep.sum()))
    sparsity = np.concatenate(s)
    columns = np.stack([np.ones_like(sparsity), sparsity], axis=1)
    (log_a, b), r2 = _least_squares(columns, np.concatenate(y), np.concatenate(weight))
    try:
        return ExponentialModel(a=math.exp(log_a), b=float(b), r2=r2)
    except (ProfileError, OverflowError) as error:
        raise CalibrationError(f"the counts do not follow a * exp(b * s): {error}") from error


def _exponential_or_none(curves: Sequence[PooledCurve]) -> ExponentialModel | None:
    try:
        return _fit_exponential(curves)
    except CalibrationError:
        return None


def _fit_length_exponent(
    curves: Sequence[PooledCurve], phase: Phase
) -> tuple[LengthExponentModel | None, Sequence[Model | None]]:
    """The best member of our family, and its fits without each length (empty below three lengths)."""
    if len(curves) == 1:
        warnings.warn(
            f"{phase}: all usable samples have about {curves[0].seqlen} keys: the exponent of the length "
            "cannot be fitted, and thresholds follow a * exp(b * s) / length at every other length",
            ProfileWarning,
            stacklevel=3,
        )
        return None, []
    if len(curves) == 2:
        return _fit_member(curves, _MEMBERS[0]), []
    best: LengthExponentModel | None = None
    best_left_out: Sequence[Model | None] = []
    best_error = math.inf
    for member in _MEMBERS:
        model = _fit_member(curves, member)
        left_out = _left_out(curves, functools.partial(_fit_member, member=member))
        if model is None or None in left_out:
            continue
        error = _rms(_held_out(curves, left_out, "length_exponent"))
        if error < best_error - SELECTION_MARGIN:
            best, best_left_out, best_error = model, left_out, error
    return best, best_left_out


def _fit_member(curves: Sequence[PooledCurve], member: tuple[str, ...]) -> LengthExponentModel | None:
    """One member of the family, or None when its thresholds would not be monotone."""
    s = np.concatenate([curve.sparsity[curve.fitted()] for curve in curves])
    y = np.concatenate([np.log(curve.threshold[curve.fitted()]) for curve in curves])
    log_length = np.concatenate([np.full(curve.fitted().sum(), math.log(curve.seqlen)) for curve in curves])
    weight = np.concatenate([np.full(curve.fitted().sum(), 1.0 / curve.fitted().sum()) for curve in curves])
    weight = weight * (s * (1.0 - s)) ** 2  # a step in logit(s) moves s by s * (1 - s)
    center = sum(math.log(curve.seqlen) for curve in curves) / len(curves)
    x, length = _logit(s), log_length - center
    terms = {"1": np.ones_like(x), "x": x, "x2": x * x, "l": length, "xl": x * length}
    for names in (member, tuple(name for name in member if name not in ("l", "xl"))):
        solution, r2 = _least_squares(np.stack([terms[name] for name in names], axis=1), y, weight)
        c = {name: float(value) for name, value in zip(names, solution)}
        try:
            return LengthExponentModel(
                c0=c["1"],
                c1=c["x"],
                c2=c.get("x2", 0.0),
                c3=c.get("l", 0.0),
                c4=c.get("xl", 0.0),
                reference_length=math.exp(center),
                logit_range=(float(x.min()), float(x.max())),
                r2=r2,
            )
        except ProfileError:
            continue
    return None


def _residual(curve: PooledCurve, model: Model, name: ModelName, held_out: bool) -> LengthResidual:
    """Achieved minus target of a model on a measured curve, at the targets that the curve reaches."""
    low, high = float(curve.sparsity[0]), float(curve.sparsity[-1])
    targets = tuple(target for target in CHECKED_TARGETS if low <= target <= high)
    achieved = []
    for target in targets:
        log_scale, exponent = model.coefficients(target)
        achieved.append(curve.sparsity_at(min(0.0, log_scale + exponent * math.log(curve.seqlen))))
    residual = tuple(got - target for got, target in zip(achieved, targets))
    return LengthResidual(name, curve.seqlen, held_out, targets, residual)


def _left_out(
    curves: Sequence[PooledCurve], fit: Callable[[Sequence[PooledCurve]], Model | None]
) -> Sequence[Model | None]:
    """Fits without each length in turn."""
    return [fit([*curves[:i], *curves[i + 1 :]]) for i in range(len(curves))]


def _held_out(
    curves: Sequence[PooledCurve], models: Sequence[Model | None], name: ModelName
) -> list[LengthResidual]:
    """Residuals of each fit at the length it was made without."""
    return [_residual(curve, model, name, True) for curve, model in zip(curves, models) if model is not None]


def _rms(rows: Sequence[LengthResidual]) -> float:
    """Root mean square over all targets of all rows; inf without any."""
    squares = [r * r for row in rows for r in row.residual]
    return math.sqrt(sum(squares) / len(squares)) if squares else math.inf


def _select(residuals: Sequence[LengthResidual], held_out: bool) -> ModelName:
    """The model with the smaller error; the exponential one when they are about equal."""
    rows = [row for row in residuals if row.held_out == held_out]
    theirs = _rms([row for row in rows if row.model == "exponential"])
    ours = _rms([row for row in rows if row.model == "length_exponent"])
    return "length_exponent" if ours < theirs - SELECTION_MARGIN else "exponential"
