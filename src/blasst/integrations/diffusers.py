"""blasst in diffusers models (video and image transformers): self-attention without a mask, at any step.

diffusers 0.42 keeps its attention backends in a closed enum; `enable` adds the member "blasst" to it and
gives that to the self-attention layers alone. All other layers, and denoising steps that stay dense, run on
the backend that the model had. Importing this file does not import diffusers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from os import PathLike, fspath
from typing import Any, get_args

from torch import Tensor, nn

from blasst.core.profile import Profile, model_fingerprint
from blasst.functional import blasst_attn_func
from blasst.integrations.diffusers_session import (
    SESSION_ATTRIBUTE,
    DiffusersCall,
    DiffusersSession,
    Unsupported,
    find_layers,
)
from blasst.integrations.threshold_rules import ThresholdRule, resolve_rules
from blasst.integrations.transformers_state import Counters, LayerStats
from blasst.kernels.names import IMPLS

__all__ = ["Enabled", "attention_stats", "disable", "enable", "fingerprint_of", "reset_stats"]


@dataclass(eq=False)
class _SparseHandler:
    """Serves calls with skipping attention."""

    rule: ThresholdRule
    impl: str
    collect_counts: bool
    counters: Counters = field(default_factory=Counters)

    def __call__(self, call: DiffusersCall) -> Tensor:
        kv_len = call.k.shape[1]
        self.rule.check(kv_len)
        result = blasst_attn_func(
            call.q,
            call.k,
            call.v,
            threshold=self.rule.for_length(kv_len),
            softmax_scale=call.softmax_scale,
            return_counts=self.collect_counts,
            impl=self.impl,
        )
        if result.counts is not None:
            self.counters.add(call.layer, "prefill", result.counts)
        return result.out


def fingerprint_of(model: nn.Module) -> str | None:
    """Digest of the shape of a diffusers transformer's attention; None when its configuration names none."""
    config: Any = getattr(model, "config", {})
    heads, layers = config.get("num_attention_heads"), config.get("num_layers")
    if not heads or not layers:
        return None
    shape = {"num_attention_heads": heads, "num_hidden_layers": layers, "model_type": type(model).__name__}
    return model_fingerprint({**shape, "head_dim": config.get("attention_head_dim")})


@dataclass(frozen=True, eq=False)
class Enabled:
    """What `enable` did.

    Attributes:
        served: names of the attention modules that blasst serves.
        threshold: the rule in force, with its origin.
    """

    served: tuple[str, ...]
    threshold: ThresholdRule
    _session: DiffusersSession

    @property
    def unserved(self) -> tuple[tuple[str, str], ...]:
        """(module name, reason) of layers on their own backend, those met while running included."""
        met = [(name, f"{why} (in some calls)") for why, names in self._session.met.items() for name in names]
        return (*self._session.unserved, *met)

    @property
    def steps(self) -> tuple[int, int]:
        """Forward passes that stayed dense, and those that did not."""
        return self._session.dense_steps, self._session.sparse_steps


def enable(
    model: nn.Module,
    *,
    profile: str | PathLike[str] | Profile | None = None,
    target_sparsity: float | None = None,
    threshold: float | None = None,
    threshold_scale_factor: float | None = None,
    disabled_until_timestep: float | None = None,
    num_train_timesteps: float = 1000.0,
    unsupported: Unsupported = "error",
    ignore: Sequence[str] = (),
    impl: str = "auto",
    collect_counts: bool = False,
) -> Enabled:
    """Switch the self-attention of a diffusers transformer to skipping; one that is enabled is switched over.

    Give exactly one of profile (with target_sparsity), threshold, or threshold_scale_factor. The rule is that
    of prefill without a causal mask: 64 rows x 128 keys, the first tile first, then from the last backwards.

    Args:
        model: a diffusers transformer, for example `pipe.transformer`; a pipeline with two has two calls.
        profile: calibration of this model (`blasst.calibrate.collect_diffusers`); its prefill phase is used.
        target_sparsity: skipped over visited tiles to aim at, in [0, 1]; needs a profile.
        threshold: in [0, 1]; 0 = the skipping kernel that skips nothing.
        threshold_scale_factor: threshold times keys; clamped to threshold 1.
        disabled_until_timestep: in [0, 1]: steps whose timestep / num_train_timesteps is not below it stay
            dense, as timesteps fall from 1 to 0. Reads the timestep once per forward pass. None = all skip.
        num_train_timesteps: the timestep of pure noise; 1 for models that are given it already divided.
        unsupported: what happens to a call with a mask, causal, with dropout, context parallel, or with other
            keys than rows: "error", or "native" = the backend that the layer had, one warning per reason.
        ignore: fnmatch patterns on module names that stay on their own backend.
        impl: backend of the public functions.
        collect_counts: count skipped and visited tiles for `attention_stats`; changes no output.

    Returns:
        Served layers, layers that are not with reasons, and the threshold in force.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: arguments are missing, conflict or are out of range, or no layer can be served.
        ProfileError: the profile is broken or does not fit.
        UnsupportedError: a diffusers whose backends cannot be added to.
    """
    if unsupported not in get_args(Unsupported):
        raise ValueError(f'unsupported: got {unsupported!r}, wants "error" or "native"')
    if impl not in IMPLS:
        raise ValueError(f"impl: got {impl!r}, wants one of {', '.join(IMPLS)}")
    if disabled_until_timestep is not None and not 0.0 <= disabled_until_timestep <= 1.0:
        raise ValueError(f"disabled_until_timestep: got {disabled_until_timestep!r}, wants [0, 1] or None")
    if not num_train_timesteps > 0.0:
        raise ValueError(f"num_train_timesteps: got {num_train_timesteps!r}, wants a positive number")
    if isinstance(ignore, str):
        raise ValueError(f"ignore: got the string {ignore!r}, wants a sequence of patterns")
    given = {"target_sparsity": target_sparsity, "threshold": threshold, "factor": threshold_scale_factor}
    target, direct, factor = (None if v is None else {"prefill": v} for v in given.values())
    path = fspath(profile) if isinstance(profile, PathLike) else profile
    fingerprint = None if profile is None else fingerprint_of(model)
    rule = resolve_rules(path, target, direct, factor, fingerprint)["prefill"]
    if rule.dense_tail:
        raise ValueError(
            f"profile: was counted with the last {rule.dense_tail} rows dense, as for text; wants one that "
            "collect_diffusers counted"
        )
    layers, others = find_layers(model, ignore)
    if not layers:
        raise ValueError(f"model: no attention layer can be served: {others[:3]}")
    disable(model)
    handler = _SparseHandler(rule, impl, collect_counts)
    session = DiffusersSession(
        model,
        handler,
        find_layers(model, ignore)[0],
        others,
        unsupported,
        disabled_until_timestep,
        num_train_timesteps,
    )
    session.activate()
    return Enabled(tuple(layer.name for layer in session.layers), rule, session)


def disable(model: nn.Module) -> None:
    """Put the processors and backends back as they were; does nothing to a model that is not enabled.

    Args:
        model: the model given to `enable`.
    """
    session = getattr(model, SESSION_ATTRIBUTE, None)
    if session is not None:
        session.deactivate()


def _enabled(model: nn.Module) -> tuple[DiffusersSession, _SparseHandler]:
    session = getattr(model, SESSION_ATTRIBUTE, None)
    if session is None or not isinstance(session.handler, _SparseHandler):
        raise ValueError("model: blasst is not enabled on it, call enable(model, ...) first")
    return session, session.handler


def attention_stats(model: nn.Module) -> list[LayerStats]:
    """Skipped and visited tiles per layer and head since `enable` or `reset_stats`; the phase is "prefill".

    Args:
        model: enabled with collect_counts=True.

    Raises:
        ValueError: the model is not enabled, or without collect_counts.
    """
    session, handler = _enabled(model)
    if not handler.collect_counts:
        raise ValueError("model: enabled without collect_counts=True, so nothing was counted")
    return handler.counters.records(tuple(layer.name for layer in session.layers))


def reset_stats(model: nn.Module) -> None:
    """Forget the counts and the numbers of steps of an enabled model.

    Args:
        model: an enabled model.
    """
    session, handler = _enabled(model)
    handler.counters = Counters()
    session.dense_steps = session.sparse_steps = 0
