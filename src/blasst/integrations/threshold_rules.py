"""Thresholds in force: how the threshold of a phase follows from a length, in every host."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from blasst.core.int8_screen import check_screen_name
from blasst.core.profile import Profile, load_profile
from blasst.core.threshold import threshold_from_scale_factor
from blasst.core.types import PHASES, Phase

#: A value for both phases, or one per phase; a phase that is absent or None is dense.
PerPhase = float | Mapping[str, float | None]


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

    @property
    def dense_tail(self) -> int:
        """Rows at the end of a call that stay dense; as the profile was counted."""
        return 0 if self.profile is None else self.profile.phase_fit(self.phase).dense_tail

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
    try:
        return float(value)
    except OverflowError:  # an integer beyond every float
        return math.inf if value > 0 else -math.inf


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
    screen: str | None = None,
) -> dict[Phase, ThresholdRule]:
    """One rule per phase from the arguments of `enable`.

    Args:
        profile: a profile or its path.
        target_sparsity: targets for the profile; None = the profile's own.
        threshold: thresholds.
        threshold_scale_factor: scale factors.
        fingerprint: of the model that the profile must belong to; None = not compared.
        screen: "int8" where prefill is screened, so that a profile gives the thresholds of that.

    Raises:
        TypeError: screen is no text.
        ValueError: none or several of the three ways are used, half of one is missing, a value is out of
            range, or a screen is wanted in a prefill that is dense.
        ProfileError: the profile cannot be read, belongs to another model or lacks a phase.
    """
    rules = _resolve(profile, target_sparsity, threshold, threshold_scale_factor, fingerprint, screen)
    if check_screen_name(screen) and rules["prefill"].kind == "dense":
        raise ValueError(f"screen: got {screen!r} for a prefill that is {rules['prefill']}")
    return rules


def _resolve(
    profile: Profile | str | None,
    target_sparsity: PerPhase | None,
    threshold: PerPhase | None,
    threshold_scale_factor: PerPhase | None,
    fingerprint: str | None,
    screen: str | None,
) -> dict[Phase, ThresholdRule]:
    """`resolve_rules`, whatever it says of a dense prefill."""
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
        name = f"profile of {profile.model.name}"
        return _rules_from_profile(profile.for_screen(screen), name, target_sparsity)
    else:
        loaded = load_profile(profile, fingerprint=fingerprint).for_screen(screen)
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
