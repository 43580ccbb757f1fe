"""blasst in transformers models: `enable`, `disable`, `sparse_attention`, and what they counted.

The model keeps its weights, its `generate()` and its caches; only the attention function of its causal
self-attention layers changes. transformers 5 or later.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from os import PathLike, fspath

from torch import Tensor, nn

from blasst.core import checks
from blasst.core.profile import Profile, model_fingerprint
from blasst.core.types import PHASES, Phase
from blasst.integrations.threshold_rules import PerPhase, ThresholdRule, resolve_rules
from blasst.integrations.transformers_attention import Session, session_of
from blasst.integrations.transformers_sparse import SparseHandler
from blasst.integrations.transformers_state import LayerMass, LayerStats
from blasst.kernels.names import IMPLS

__all__ = [
    "Enabled",
    "LayerMass",
    "LayerStats",
    "attention_stats",
    "disable",
    "enable",
    "mass_bound_summary",
    "reset_stats",
    "skipped_mass_by_layer",
    "skipped_mass_samples",
    "skipped_mass_summary",
    "sparse_attention",
]


@dataclass(frozen=True, eq=False)
class Enabled:
    """What `enable` did.

    Attributes:
        served: names of the attention modules that blasst serves.
        thresholds: the rule in force for each phase, with its origin.
        impl: backend asked for.
        max_skipped_mass: error budget, or None.
        dense_tail: rows at the end of a prefill call that skip nothing.
        screen: "int8" where prefill decides from 8-bit copies, or None.
    """

    served: tuple[str, ...]
    thresholds: dict[Phase, ThresholdRule]
    impl: str
    max_skipped_mass: float | None
    dense_tail: int
    screen: str | None
    _session: Session

    @property
    def unserved(self) -> tuple[tuple[str, str], ...]:
        """(module name, reason) of layers on the model's own attention, those met while running included."""
        fixed = [(layer.name, layer.reason) for _, layer in self._session.layers if layer.reason is not None]
        met = [(name, reason) for reason, names in self._session.runtime_reasons.items() for name in names]
        return tuple(fixed + [(name, f"{reason} (in some calls)") for name, reason in met])

    def __str__(self) -> str:
        lines = [f"blasst serves {len(self.served)} attention layers (impl={self.impl})"]
        lines += [f"  {phase}: {self.thresholds[phase]}" for phase in PHASES]
        if self.screen is not None:
            lines.append(f"  screen: prefill decides from {self.screen} copies of Q and K")
        if self.max_skipped_mass is not None:
            lines.append(
                f"  error budget: at most {self.max_skipped_mass:g} skipped mass per kept mass of a row"
            )
        if self.dense_tail and self.thresholds["prefill"].kind != "dense":
            lines.append(f"  dense tail: the last {self.dense_tail} rows of a prefill skip nothing")
        by_reason: dict[str, list[str]] = {}
        for name, reason in self.unserved:
            by_reason.setdefault(reason, []).append(name)
        for reason, names in by_reason.items():
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            lines.append(f"  own attention: {', '.join(names[:3])}{more}: {reason}")
        return "\n".join(lines)


def _fingerprint(model: nn.Module) -> str | None:
    config = getattr(model, "config", None)
    return None if config is None else model_fingerprint(config.to_dict())


def _make_session(
    model: nn.Module,
    *,
    profile: str | PathLike[str] | Profile | None = None,
    target_sparsity: PerPhase | None = None,
    threshold: PerPhase | None = None,
    threshold_scale_factor: PerPhase | None = None,
    max_skipped_mass: float | None = None,
    dense_tail: int | None = None,
    screen: str | None = None,
    ignore: Sequence[str] = (),
    impl: str = "auto",
    collect_counts: bool = False,
    measure_skipped_mass: bool = False,
) -> tuple[Session, Enabled]:
    checks.check_max_skipped_mass(max_skipped_mass, has_threshold=True)
    if screen is not None and max_skipped_mass is not None:
        raise ValueError("screen: got it beside max_skipped_mass, which needs the scores of every tile")
    if impl not in IMPLS:
        raise ValueError(f"impl: got {impl!r}, wants one of {', '.join(IMPLS)}")
    checks.check_flag("collect_counts", collect_counts)
    checks.check_flag("measure_skipped_mass", measure_skipped_mass)
    if isinstance(ignore, str):
        raise ValueError(f"ignore: got the string {ignore!r}, wants a sequence of patterns")
    if not all(isinstance(pattern, str) for pattern in ignore):
        raise TypeError(f"ignore: got {ignore!r}, wants a sequence of patterns")
    if profile is not None and not isinstance(profile, str | PathLike | Profile):
        raise TypeError(f"profile: got {profile!r}, wants a path or a Profile")
    path = fspath(profile) if isinstance(profile, PathLike) else profile
    fingerprint = _fingerprint(model) if profile is not None else None
    rules = resolve_rules(path, target_sparsity, threshold, threshold_scale_factor, fingerprint, screen)
    tail = checks.check_dense_tail(rules["prefill"].dense_tail if dense_tail is None else dense_tail)
    handler = SparseHandler(rules, impl, max_skipped_mass, tail, screen, collect_counts, measure_skipped_mass)
    session = Session.create(model, handler, ignore)
    return session, Enabled(session.served, rules, impl, max_skipped_mass, tail, screen, session)


def enable(
    model: nn.Module,
    *,
    profile: str | PathLike[str] | Profile | None = None,
    target_sparsity: PerPhase | None = None,
    threshold: PerPhase | None = None,
    threshold_scale_factor: PerPhase | None = None,
    max_skipped_mass: float | None = None,
    dense_tail: int | None = None,
    screen: str | None = None,
    ignore: Sequence[str] = (),
    impl: str = "auto",
    collect_counts: bool = False,
    measure_skipped_mass: bool = False,
) -> Enabled:
    """Switch a transformers model to skipping attention; a model that is enabled already is switched over.

    Give exactly one of profile (with target_sparsity), threshold, or threshold_scale_factor. Each is a number
    for both phases or a mapping {"prefill": ..., "decode": ...} in which None or absence leaves a phase on
    the model's own attention. A call with 1 to 8 new tokens against more key slots is decode, any other is
    prefill (a prompt of at most 8 tokens cannot skip anything in either). Thresholds follow each sequence's
    own number of keys.

    Layers that are not causal self-attention, and calls with a mask that is not causal, sliding-window or
    padding, run on the model's own attention with their exact mask and are listed once with the reason.

    Args:
        model: a transformers model, or a module that contains one.
        profile: calibration file or `Profile`.
        target_sparsity: skipped over visited tiles to aim at, in [0, 1]; needs a profile. None = the default
            targets of the profile.
        threshold: in [0, 1], the same at every length.
        threshold_scale_factor: threshold times keys; clamped to threshold 1.
        max_skipped_mass: error budget in (0, 1) on top of the threshold, or None.
        dense_tail: rows at the end of a prompt (in chunked prefill of each chunk) that skip nothing; None =
            what the profile was counted with, 0 without a profile.
        screen: "int8": prefill decides from 8-bit copies of Q and K, a rule of its own with thresholds of its
            own (`blasst_attn_func`, docs/method.md): a profile must have been counted for it. Not beside
            max_skipped_mass; the reference and the eager kernel serve it, and nothing gets faster yet.
            Decode stays as it is. None (default) = the other rule.
        ignore: fnmatch patterns on module names, for example "model.layers.0.*".
        impl: backend of the public functions: "auto", "eager", "triton" or "reference".
        collect_counts: count skipped and visited tiles for `attention_stats`; changes no output.
        measure_skipped_mass: also run the dense kernel in every served call and record the softmax mass that
            was skipped (`skipped_mass_summary`); changes no output, costs a dense pass.

    Returns:
        Served layers, layers that are not served with reasons, and the thresholds in force.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: arguments are missing, conflict or are out of range, or no layer can be served.
        ProfileError: the profile is broken or does not fit.
    """
    session, enabled = _make_session(
        model,
        profile=profile,
        target_sparsity=target_sparsity,
        threshold=threshold,
        threshold_scale_factor=threshold_scale_factor,
        max_skipped_mass=max_skipped_mass,
        dense_tail=dense_tail,
        screen=screen,
        ignore=ignore,
        impl=impl,
        collect_counts=collect_counts,
        measure_skipped_mass=measure_skipped_mass,
    )
    disable(model)
    session.activate()
    return enabled


def disable(model: nn.Module) -> None:
    """Put the model's own attention back exactly as it was; does nothing to a model that is not enabled.

    Args:
        model: the model given to `enable`.
    """
    session = session_of(model)
    if session is not None:
        session.deactivate()


@contextmanager
def sparse_attention(
    model: nn.Module,
    *,
    profile: str | PathLike[str] | Profile | None = None,
    target_sparsity: PerPhase | None = None,
    threshold: PerPhase | None = None,
    threshold_scale_factor: PerPhase | None = None,
    max_skipped_mass: float | None = None,
    dense_tail: int | None = None,
    screen: str | None = None,
    ignore: Sequence[str] = (),
    impl: str = "auto",
    collect_counts: bool = False,
    measure_skipped_mass: bool = False,
) -> Iterator[Enabled]:
    """`enable` for the length of a with block; afterwards the model is as before, also after an exception.

    Args:
        model: see `enable`.
        profile: see `enable`.
        target_sparsity: see `enable`.
        threshold: see `enable`.
        threshold_scale_factor: see `enable`.
        max_skipped_mass: see `enable`.
        dense_tail: see `enable`.
        screen: see `enable`.
        ignore: see `enable`.
        impl: see `enable`.
        collect_counts: see `enable`.
        measure_skipped_mass: see `enable`.

    Yields:
        What `enable` returns.
    """
    previous = session_of(model)
    enabled = enable(
        model,
        profile=profile,
        target_sparsity=target_sparsity,
        threshold=threshold,
        threshold_scale_factor=threshold_scale_factor,
        max_skipped_mass=max_skipped_mass,
        dense_tail=dense_tail,
        screen=screen,
        ignore=ignore,
        impl=impl,
        collect_counts=collect_counts,
        measure_skipped_mass=measure_skipped_mass,
    )
    try:
        yield enabled
    finally:
        enabled._session.deactivate()
        if previous is not None:
            previous.activate()


def _handler(model: nn.Module) -> tuple[Session, SparseHandler]:
    session = session_of(model)
    if session is None or not isinstance(session.handler, SparseHandler):
        raise ValueError("model: blasst is not enabled on it, call blasst.enable(model, ...) first")
    return session, session.handler


def attention_stats(model: nn.Module) -> list[LayerStats]:
    """Skipped and visited tiles per layer, phase and head since `enable` or `reset_stats`.

    Args:
        model: enabled with collect_counts=True.

    Returns:
        One record per layer and phase that ran, prefill first; empty when nothing ran yet.

    Raises:
        ValueError: the model is not enabled, or without collect_counts.
    """
    session, handler = _handler(model)
    if not handler.collect_counts:
        raise ValueError("model: enabled without collect_counts=True, so nothing was counted")
    return handler.counters.records(session.served)


def reset_stats(model: nn.Module) -> None:
    """Forget the counts and the skipped mass of an enabled model.

    Args:
        model: an enabled model.
    """
    _handler(model)[1].reset()


def skipped_mass_by_layer(model: nn.Module) -> list[LayerMass]:
    """Softmax mass that the rows of each layer lost to skipping since `enable` or `reset_stats`.

    Args:
        model: enabled with measure_skipped_mass=True.

    Returns:
        One record per layer and phase that ran, prefill first.

    Raises:
        ValueError: the model is not enabled, or without measure_skipped_mass.
    """
    session, handler = _handler(model)
    if not handler.measure_skipped_mass:
        raise ValueError("model: enabled without measure_skipped_mass=True, so nothing was measured")
    return [
        LayerMass(
            session.served[layer],
            phase,
            int(mass.rows),
            mass.mean(),
            float(mass.largest),
            handler.masses[phase].head_means(layer),
        )
        for phase in PHASES
        if phase in handler.masses
        for layer, mass in sorted(handler.masses[phase].layers.items())
    ]


def _measuring_handler(model: nn.Module) -> SparseHandler:
    handler = _handler(model)[1]
    if not handler.measure_skipped_mass:
        raise ValueError("model: enabled without measure_skipped_mass=True, so nothing was measured")
    return handler


def skipped_mass_samples(model: nn.Module) -> dict[Phase, Tensor]:
    """A sample of the softmax mass that rows lost to skipping, per phase that ran.

    Args:
        model: enabled with measure_skipped_mass=True.

    Returns:
        float32 (samples,) on the CPU, values in [0, 1]; one value is one row of one head.
    """
    handler = _measuring_handler(model)
    return {phase: samples.samples() for phase, samples in handler.masses.items()}


def skipped_mass_summary(model: nn.Module) -> dict[Phase, dict[str, float]]:
    """Mean and maximum over all rows, p99 of the sample, and the number of rows, per phase that ran.

    Args:
        model: enabled with measure_skipped_mass=True.
    """
    handler = _measuring_handler(model)
    return {phase: samples.summary() for phase, samples in handler.masses.items()}


def mass_bound_summary(model: nn.Module) -> dict[Phase, dict[str, float]]:
    """What the kernels certify about the skipped mass of rows; fields of `skipped_mass_summary`, above them.

    Args:
        model: enabled with measure_skipped_mass=True.
    """
    handler = _measuring_handler(model)
    return {phase: samples.summary() for phase, samples in handler.bounds.items()}
