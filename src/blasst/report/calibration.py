"""Calibrate a model on the packaged mix of prompts, and check the profile on prompts it has not seen."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from blasst.calibrate.assemble import build_profile
from blasst.calibrate.collect import CountTable, collect
from blasst.calibrate.prompts import calibration_prompts
from blasst.core.int8_screen import check_screen_name
from blasst.core.phase_fit import SCREENED_RULE, SERVING_RULES, CountingRule
from blasst.core.profile import DataInfo, ModelInfo, Profile, model_fingerprint
from blasst.core.types import PHASES, Phase
from blasst.evals.models import LoadedModel

Progress = Callable[[int, int, str], None]


@dataclass(frozen=True)
class CalibrationPlan:
    """What is run to calibrate.

    Attributes:
        lengths: tokens of the prompts; at least two for a fit that knows about length.
        per_kind: prompts of each kind (prose, code, noise, retrieval) and length.
        decode_tokens: decode steps after each prompt; 0 = prefill only.
        seed: of the prompts.
        target_sparsity: default target to keep in the profile, checked to be reachable; None = no default.
        rules: tile shape and order to count in; a phase that is not there is not calibrated.
        screen: "int8": count prefill for `screen="int8"` too, in another pass, with the same dense tail.
    """

    lengths: tuple[int, ...]
    per_kind: int = 1
    decode_tokens: int = 16
    seed: int = 0
    target_sparsity: float | None = None
    rules: Mapping[Phase, CountingRule] = field(default_factory=lambda: SERVING_RULES)
    screen: str | None = None

    def __post_init__(self) -> None:
        order = getattr(self.rules.get("prefill"), "order", None)
        if check_screen_name(self.screen) and order != SERVING_RULES["prefill"].order:
            raise ValueError('screen: got "int8" beside the tiles of another engine, want those of blasst')

    @property
    def phases(self) -> tuple[Phase, ...]:
        """Phases that get calibrated."""
        return tuple(p for p in PHASES if p in self.rules and (p == "prefill" or self.decode_tokens))


def calibrate_model(loaded: LoadedModel, plan: CalibrationPlan, progress: Progress | None = None) -> Profile:
    """One dense forward pass per prompt, a second one for a screen, then the fit.

    Args:
        loaded: model and tokenizer.
        plan: what to run.
        progress: called with prompts done, prompts in all, and what comes next.

    Raises:
        CalibrationError: the prompts cannot support a calibration, or the target is out of reach.
        ValueError: a length that the model cannot take.
    """
    limit = getattr(loaded.model.config, "max_position_embeddings", None)
    if limit is not None and max(plan.lengths) > limit:
        raise ValueError(f"lengths: {max(plan.lengths)} tokens asked for, the model takes {limit}")
    lengths = _fitting(plan.lengths, plan.decode_tokens, limit)
    prompts = calibration_prompts(loaded.tokenizer, lengths, per_kind=plan.per_kind, seed=plan.seed)

    def count(phases: Sequence[Phase], rules: Mapping[Phase, CountingRule]) -> CountTable:
        return collect(
            loaded.model,
            loaded.tokenizer,
            prompts,
            phases=phases,
            decode_tokens=plan.decode_tokens,
            rules=rules,
            progress=progress,
        )

    screened = None
    if check_screen_name(plan.screen):
        rule = replace(SCREENED_RULE, dense_tail=plan.rules["prefill"].dense_tail)
        screened = count(["prefill"], {"prefill": rule})
    kinds = {prompt.kind for prompt in prompts}
    return fit_table(count(plan.phases, plan.rules), loaded, sorted(kinds), plan.target_sparsity, screened)


def fit_table(
    table: CountTable,
    loaded: LoadedModel,
    kinds: Sequence[str],
    target_sparsity: float | None = None,
    screened: CountTable | None = None,
) -> Profile:
    """The profile of a model from its counts.

    Args:
        table: counts of all prompts.
        loaded: the model they were counted on.
        kinds: kinds of the prompts.
        target_sparsity: default target to keep in the profile; None = no default.
        screened: counts of the same prompts for `screen="int8"`, or None.

    Raises:
        CalibrationError: the counts cannot be fitted, or the target is out of reach.
    """
    return build_profile(
        table,
        model_info=ModelInfo(loaded.name, model_fingerprint(loaded.model.config.to_dict())),
        data_info=DataInfo(table.data_hash, table.num_prompts, tuple(sorted(kinds))),
        target_sparsity=target_sparsity,
        screened=screened,
    )


def _fitting(lengths: Sequence[int], decode_tokens: int, limit: int | None) -> list[int]:
    """Lengths that leave room for the decode steps within the positions that the model knows."""
    return [length if limit is None else min(length, limit - decode_tokens) for length in lengths]


def profile_summary(profile: Profile) -> list[dict[str, Any]]:
    """One row per fit for a table: selected model, its fit, and what was observed.

    Args:
        profile: what calibration made.
    """
    rows = []
    for name, fit in profile.fits.items():
        held_out = [r for r in fit.residuals if r.model == fit.selected and r.held_out]
        rows.append(
            {
                "phase": name,
                "model": fit.selected,
                "chosen by": fit.selected_by,
                "r2": fit.model.r2,
                "largest held-out error": max(
                    (abs(value) for r in held_out for value in r.residual), default=None
                ),
                "lengths": f"{fit.observed.seqlen[0]} to {fit.observed.seqlen[1]}",
                "sparsities": f"{fit.observed.sparsity[0]:.2f} to {fit.observed.sparsity[1]:.2f}",
            }
        )
    return rows
