"""From a table of counts to a profile, and from a profile to the sparsity it achieves on held-out prompts."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol, TypedDict, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from blasst._version import __version__
from blasst.calibrate.counts import CountPoint, group_by_length
from blasst.calibrate.fit import fit_phase
from blasst.core.errors import CalibrationError
from blasst.core.phase_fit import SCREENED_RULE, SERVING_RULES, CountingRule, PhaseFit
from blasst.core.profile import DataInfo, ModelInfo, Profile
from blasst.core.types import PHASES, Phase


class CountRecord(Protocol):
    """Counts of one prompt in one phase, as collected.

    Attributes:
        phase: "prefill" or "decode".
        kind: kind of prompt.
        kv_len: keys by which the kernel will divide.
        thresholds: rising linear thresholds, float64 (T,).
        skipped: int64 (T, layers, heads).
        visited: int64 (layers, heads).
    """

    @property
    def phase(self) -> Phase: ...  # noqa: D102
    @property
    def kind(self) -> str: ...  # noqa: D102
    @property
    def kv_len(self) -> int: ...  # noqa: D102
    @property
    def thresholds(self) -> NDArray[np.float64]: ...  # noqa: D102
    @property
    def skipped(self) -> NDArray[np.int64]: ...  # noqa: D102
    @property
    def visited(self) -> NDArray[np.int64]: ...  # noqa: D102


@runtime_checkable
class CountSource(Protocol):
    """A table that sums its own records, such as `collect.CountTable`."""

    def points(self, phase: Phase) -> list[CountPoint]:
        """Counts per prompt of one phase, summed over layers and heads; empty when it was not counted."""
        ...


class AchievedRow(TypedDict):
    """Sparsity achieved on prompts of about one length at the profile's thresholds for one target."""

    phase: Phase
    seqlen: int
    target: float
    achieved: float


def point_of_record(record: CountRecord) -> CountPoint:
    """Sum a record over its layers and heads.

    Raises:
        CalibrationError: shapes or values that no count can have.
    """
    if record.skipped.ndim != 3 or record.skipped.shape[1:] != record.visited.shape:
        raise CalibrationError(
            f"count of a {record.kind!r} prompt of length {record.kv_len}: skipped {record.skipped.shape} "
            f"must be (T, layers, heads) with visited {record.visited.shape} as (layers, heads)"
        )
    return CountPoint(
        kind=record.kind,
        seqlen=int(record.kv_len),
        threshold=np.asarray(record.thresholds, dtype=np.float64),
        skipped=record.skipped.sum(axis=(1, 2), dtype=np.int64),
        visited=int(record.visited.sum()),
    )


def _points_by_phase(counts: CountSource | Iterable[CountRecord]) -> dict[Phase, list[CountPoint]]:
    if isinstance(counts, CountSource):
        return {phase: found for phase in PHASES if (found := counts.points(phase))}
    points: dict[Phase, list[CountPoint]] = {}
    for record in counts:
        points.setdefault(record.phase, []).append(point_of_record(record))
    return points


def build_profile(
    counts: CountSource | Iterable[CountRecord],
    *,
    model_info: ModelInfo,
    data_info: DataInfo,
    target_sparsity: float | Mapping[Phase, float | None] | None = None,
    rules: Mapping[Phase, CountingRule] | None = None,
    min_samples: int = 2,
    screened: CountSource | Iterable[CountRecord] | None = None,
) -> Profile:
    """Fit every phase that was counted.

    Args:
        counts: a table, or its records, one per prompt and phase.
        model_info: which model was counted.
        data_info: on what.
        target_sparsity: default targets to keep in the profile: a number for every counted phase or a
            mapping; a target out of reach at the longest length is an error. None = no default.
        rules: tile shape and order that was counted in, per phase; None = what the table says, or ours.
        min_samples: fewest prompts per phase.
        screened: prefill of the same prompts as `screen="int8"` skips in it (`SCREENED_RULE`); None = not
            counted.

    Raises:
        CalibrationError: no records, or counts that cannot be fitted (see `fit_phase`).
        ProfileError: a default target for a phase that was not counted, or screened was counted otherwise.
    """
    if rules is None:
        rules = getattr(counts, "rules", SERVING_RULES)
    points = _points_by_phase(counts)
    if not points:
        raise CalibrationError(f"need at least {min_samples} samples at 2 or more lengths, got 0")
    if target_sparsity is None:
        targets: dict[Phase, float] = {}
    elif isinstance(target_sparsity, Mapping):
        targets = {phase: value for phase, value in target_sparsity.items() if value is not None}
    else:
        targets = dict.fromkeys(points, float(target_sparsity))

    def fit(phase: Phase, points: Sequence[CountPoint], rule: CountingRule) -> PhaseFit:
        return fit_phase(
            points,
            phase=phase,
            **vars(rule),
            min_samples=min_samples,
            target_sparsity=targets.get(phase),
        )

    screened_rule = getattr(screened, "rules", {}).get("prefill", SCREENED_RULE)
    return Profile(
        library_version=__version__,
        model=model_info,
        data=data_info,
        phases={phase: fit(phase, points[phase], rules[phase]) for phase in PHASES if phase in points},
        target_sparsity=targets,
        screened=None
        if screened is None
        else fit("prefill", _points_by_phase(screened).get("prefill", []), screened_rule),
    )


def achieved_on(
    profile: Profile,
    counts: CountSource | Iterable[CountRecord],
    targets: Sequence[float] = (0.5, 0.7),
) -> list[AchievedRow]:
    """Sparsity that the profile's thresholds achieve on other prompts, per phase, length and target.

    Every prompt gets the threshold of its own length; counts are summed, then divided; between two counted
    thresholds the count is interpolated in ln(threshold).

    Args:
        profile: with every phase that was counted; `Profile.for_screen` where prefill was screened.
        counts: of held-out prompts.
        targets: in (0, 1].

    Raises:
        ProfileError: a phase was not calibrated.
        CalibrationError: shapes or values that no count can have, or a table that was counted by another
            rule than the profile.
    """
    points = _points_by_phase(counts)
    for phase, rule in getattr(counts, "rules", {}).items():
        if phase in points and (known := profile.phase_fit(phase).rule) != rule:
            raise CalibrationError(f"counts of {phase}: counted by {rule}, the profile by {known}")
    rows: list[AchievedRow] = []
    for phase in PHASES:
        for group in group_by_length(points.get(phase, [])):
            visited = sum(point.visited for point in group)
            seqlen = round(math.exp(sum(point.visited * math.log(point.seqlen) for point in group) / visited))
            for target in targets:
                skipped = 0.0
                for point in group:
                    threshold = profile.threshold(phase, target, point.seqlen)
                    log_threshold = math.log(threshold) if threshold > 0.0 else -math.inf
                    skipped += float(np.interp(log_threshold, np.log(point.threshold), point.skipped))
                rows.append(
                    AchievedRow(phase=phase, seqlen=seqlen, target=target, achieved=skipped / visited)
                )
    return rows
