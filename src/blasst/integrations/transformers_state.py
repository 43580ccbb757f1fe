"""Thresholds in force and what a sparse session counts and measures."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from blasst.core.profile import Profile, load_profile
from blasst.core.threshold import threshold_from_scale_factor
from blasst.core.types import PHASES, Phase, SkipCounts

#: A value for both phases, or one per phase; a phase that is absent or None is dense.
PerPhase = float | Mapping[str, float | None]

#: Most values that `MassSamples` keeps per phase.
MAX_SAMPLES = 1 << 20

#: Most values taken from one call.
SAMPLES_PER_CALL = 1024


@dataclass(frozen=True, eq=False)
class ThresholdRule:
    """How the threshold of one phase follows from the length of a sequence.

    Attributes:
        phase: the phase it belongs to.
        kind: "dense" = no skipping in this phase.
        value: threshold, scale factor or target sparsity; 0 when dense.
        origin: where the value comes from, for people.
        profile: needed when kind is "profile".
    """

    phase: Phase
    kind: Literal["dense", "threshold", "scale_factor", "profile"]
    value: float
    origin: str
    profile: Profile | None = None

    def for_length(self, kv_len: int) -> float | None:
        """Threshold of a sequence with kv_len keys; None = dense."""
        if self.kind == "dense":
            return None
        if self.kind == "threshold":
            return self.value
        if self.kind == "scale_factor":
            return threshold_from_scale_factor(self.value, kv_len)
        assert self.profile is not None
        return self.profile.threshold(self.phase, self.value, kv_len)

    def check(self, kv_len: int | Tensor) -> None:
        """Warn, once, where a length lies outside what the profile was calibrated for."""
        if self.profile is not None:
            self.profile.check_request(self.phase, self.value, kv_len)

    def for_lengths(self, kv_len: Tensor) -> Tensor:
        """Thresholds float32 (batch,) of sequences with kv_len int (batch,) keys; stays on the device."""
        if self.kind == "scale_factor":
            return threshold_from_scale_factor(self.value, kv_len)
        if self.kind == "profile":
            assert self.profile is not None
            return self.profile.threshold(self.phase, self.value, kv_len)
        return torch.full(kv_len.shape, self.value, dtype=torch.float32, device=kv_len.device)

    def __str__(self) -> str:
        if self.kind == "dense":
            return f"dense ({self.origin})"
        if self.kind == "threshold":
            return f"threshold {self.value:g} at every length ({self.origin})"
        shown = ", ".join(f"{self.for_length(n):.3g} at {n}" for n in (4096, 32768))
        return f"threshold {shown} keys ({self.origin})"


def _number(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(
            f"{name}: got {value!r}, wants a number or a mapping of 'prefill' and 'decode' to numbers"
        )
    return float(value)


def _per_phase(name: str, value: PerPhase, low: float, high: float) -> dict[Phase, float | None]:
    if isinstance(value, Mapping):
        if unknown := set(value) - set(PHASES):
            raise ValueError(f"{name}: unknown phase {sorted(unknown)}, the phases are {list(PHASES)}")
        values = {p: None if value.get(p) is None else _number(f"{name}[{p!r}]", value[p]) for p in PHASES}
        if all(v is None for v in values.values()):
            raise ValueError(f"{name}: no phase has a value, so nothing would change")
    else:
        values = dict.fromkeys(PHASES, _number(name, value))
    for phase, number in values.items():
        if number is not None and not (low <= number <= high and math.isfinite(number)):
            hint = "; a value in log units is not a threshold" if name == "threshold" and number < 0 else ""
            limit = f"[{low:g}, {high:g}]" if math.isfinite(high) else f"at least {low:g} and finite"
            raise ValueError(f"{name} of {phase}: got {number:g}, wants {limit}{hint}")
    return values


def _rules_from_profile(
    profile: Profile, name: str, target_sparsity: PerPhase | None
) -> dict[Phase, ThresholdRule]:
    if target_sparsity is not None:
        _per_phase("target_sparsity", target_sparsity, 0.0, 1.0)
    rules: dict[Phase, ThresholdRule] = {}
    for phase, target in profile.resolve_targets(target_sparsity).items():  # type: ignore[arg-type]
        if target is None:
            known = phase in profile.phases
            origin = (
                "no target sparsity for this phase" if known else f"{name} has no calibration of this phase"
            )
            rules[phase] = ThresholdRule(phase, "dense", 0.0, origin)
        else:
            rules[phase] = ThresholdRule(
                phase, "profile", target, f"target sparsity {target:g}, {name}", profile
            )
    return rules


def resolve_rules(
    profile: Profile | str | None,
    target_sparsity: PerPhase | None,
    threshold: PerPhase | None,
    threshold_scale_factor: PerPhase | None,
    fingerprint: str | None = None,
) -> dict[Phase, ThresholdRule]:
    """One rule per phase from the arguments of `enable`.

    Args:
        profile: a profile or its path.
        target_sparsity: targets for the profile; None = the profile's own.
        threshold: thresholds.
        threshold_scale_factor: scale factors.
        fingerprint: of the model that the profile must belong to; None = not compared.

    Raises:
        ValueError: none or several of the three ways are used, half of one is missing, or a value is out
            of range.
        ProfileError: the profile cannot be read, belongs to another model or lacks a phase.
    """
    ways = {
        "profile and target_sparsity": profile is not None or target_sparsity is not None,
        "threshold": threshold is not None,
        "threshold_scale_factor": threshold_scale_factor is not None,
    }
    chosen = [name for name, used in ways.items() if used]
    if not chosen:
        raise ValueError(
            "nothing to enable: give profile= with target_sparsity=, or threshold=, or "
            "threshold_scale_factor= (without one of them the model would stay dense)"
        )
    if len(chosen) > 1:
        raise ValueError(f"{' and '.join(chosen)}: give one of them, not several")
    if threshold is not None:
        values, kind = _per_phase("threshold", threshold, 0.0, 1.0), "threshold"
    elif threshold_scale_factor is not None:
        values, kind = (
            _per_phase("threshold_scale_factor", threshold_scale_factor, 0.0, math.inf),
            "scale_factor",
        )
    elif profile is None:
        raise ValueError("target_sparsity: needs profile=, a target means nothing without a calibration")
    elif isinstance(profile, Profile):
        profile.require_match(fingerprint=fingerprint)
        return _rules_from_profile(profile, f"profile of {profile.model.name}", target_sparsity)
    else:
        loaded = load_profile(profile, fingerprint=fingerprint)
        return _rules_from_profile(loaded, f"profile {profile}", target_sparsity)
    rules: dict[Phase, ThresholdRule] = {}
    for phase, value in values.items():
        if value is None:
            rules[phase] = ThresholdRule(phase, "dense", 0.0, f"no {chosen[0]} for this phase")
        elif kind == "threshold":
            rules[phase] = ThresholdRule(phase, "threshold", value, "given as threshold")
        else:
            rules[phase] = ThresholdRule(
                phase, "scale_factor", value, f"given as threshold_scale_factor {value:g}"
            )
    return rules


@dataclass(frozen=True, eq=False)
class LayerStats:
    """Tiles of one layer and phase since `enable` or `reset_stats`.

    Attributes:
        layer: module name.
        phase: "prefill" or "decode".
        skipped: int64 on the CPU, (num_heads,) in prefill, (num_kv_heads,) in decode; summed over sequences.
        visited: the same shape.
    """

    layer: str
    phase: Phase
    skipped: Tensor
    visited: Tensor

    @property
    def sparsity(self) -> float:
        """Skipped over visited tiles of the layer; 0 when nothing was visited."""
        return int(self.skipped.sum()) / max(int(self.visited.sum()), 1)


@dataclass(eq=False)
class Counters:
    """Sums of tile counts per layer and phase, on the device, without a synchronisation."""

    sums: dict[tuple[int, Phase], SkipCounts] = field(default_factory=dict)

    def add(self, layer: int, phase: Phase, counts: SkipCounts) -> None:
        """Add the counts of one call."""
        skipped, visited = counts.skipped.sum(0), counts.visited.sum(0)
        known = self.sums.get((layer, phase))
        if known is None:
            self.sums[layer, phase] = SkipCounts(skipped, visited)
        else:
            known.skipped.add_(skipped)
            known.visited.add_(visited)

    def records(self, names: tuple[str, ...]) -> list[LayerStats]:
        """One record per layer and phase, in model order, prefill first."""
        ordered = sorted(self.sums.items(), key=lambda item: (PHASES.index(item[0][1]), item[0][0]))
        return [LayerStats(names[i], phase, c.skipped.cpu(), c.visited.cpu()) for (i, phase), c in ordered]


@dataclass(frozen=True, eq=False)
class LayerMass:
    """Skipped softmax mass of the rows of one layer and phase since `enable` or `reset_stats`.

    Attributes:
        layer: module name.
        phase: "prefill" or "decode".
        rows: number of rows, over heads and sequences.
        mean: over rows, 0..1.
        max: over rows, 0..1.
    """

    layer: str
    phase: Phase
    rows: int
    mean: float
    max: float


class MassTotals(NamedTuple):
    """Sums over rows, on the device: mass float64 (), number of rows int64 (), largest mass ()."""

    total: Tensor
    rows: Tensor
    largest: Tensor

    def plus(self, other: MassTotals) -> MassTotals:
        """Totals of the rows of both."""
        largest = torch.maximum(self.largest, other.largest.to(self.largest.device))
        return MassTotals(
            self.total + other.total.to(self.total.device),
            self.rows + other.rows.to(self.rows.device),
            largest,
        )

    def mean(self) -> float:
        """Mean mass of a row; 0 without rows."""
        return float(self.total) / max(int(self.rows), 1)


@dataclass(eq=False)
class MassSamples:
    """Skipped softmax mass of rows: exact mean and maximum per layer, and a bounded sample of all.

    Everything stays on the device until it is read. The sample takes evenly spaced rows of a call; when it is
    full, every second chunk is dropped and from then on every second call is sampled, and so on.
    """

    layers: dict[int, MassTotals] = field(default_factory=dict)
    chunks: list[Tensor] = field(default_factory=list)
    every: int = 1
    calls: int = 0

    def add(self, layer: int, mass: Tensor) -> None:
        """Add the mass of each row of a call of a layer; NaN marks rows that see nothing."""
        flat = mass.flatten()
        valid = ~flat.isnan()
        clean = flat.nan_to_num(nan=0.0)
        totals = MassTotals(clean.sum(dtype=torch.float64), valid.sum(), clean.amax())
        known = self.layers.get(layer)
        self.layers[layer] = totals if known is None else known.plus(totals)
        if self.calls % self.every == 0:
            step = max(1, flat.numel() // SAMPLES_PER_CALL)
            self.chunks.append(flat[self.calls % step :: step][:SAMPLES_PER_CALL].clone())
            if len(self.chunks) * SAMPLES_PER_CALL > MAX_SAMPLES:
                self.chunks, self.every = self.chunks[::2], self.every * 2
        self.calls += 1

    def samples(self) -> Tensor:
        """float32 (samples,) on the CPU, values in [0, 1]."""
        if not self.chunks:
            return torch.zeros(0)
        joined = torch.cat([chunk.cpu() for chunk in self.chunks])
        return joined[~joined.isnan()]

    def summary(self) -> dict[str, float]:
        """Mean and max over all rows, p99 from the sample, and the number of rows."""
        sample = self.samples()
        if not self.layers or not len(sample):
            return {"mean": 0.0, "p99": 0.0, "max": 0.0, "rows": 0}
        totals = functools.reduce(MassTotals.plus, self.layers.values())
        return {
            "mean": totals.mean(),
            "p99": float(torch.quantile(sample[: 1 << 23].double(), 0.99)),
            "max": float(totals.largest),
            "rows": int(totals.rows),
        }
