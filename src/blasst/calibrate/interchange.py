"""The `sparse_attention_config` of TensorRT-LLM and ModelOpt checkpoints: both generations read, one written.

The nested form keeps everything in `config_groups`; the older ones keep `threshold_scale_factor` beside the
groups, or have no groups at all. Anything that is not understood is an error, never silently dense.
"""

from __future__ import annotations

import fnmatch
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from blasst._version import __version__
from blasst.calibrate.formula import parse_formula
from blasst.core.errors import ProfileError
from blasst.core.profile import Profile
from blasst.core.sparsity_model import require_target
from blasst.core.threshold import scale_factor_from_target, threshold_from_scale_factor
from blasst.core.types import PHASES, Phase

EXPONENTIAL_FORMULA = "a * exp(b * target_sparsity)"

CONFIG_KEY = "sparse_attention_config"
_ALGORITHMS = ("skip_softmax", "softmax_skip")
_VERSIONS = (1, "1", "1.0")
_GROUP_FIELDS = {
    "algorithm",
    "sparse_algo",
    "targets",
    "ignore",
    "disabled_layers",
    "threshold_scale_factor",
    "target_sparsity",
    "disabled_until_timestep",
    "initial_disabled_steps",
}
_OUTER_FIELDS = {"config_groups", "producer", "version"}


@dataclass(frozen=True)
class SparseAttentionConfig:
    """A skip-softmax setting as checkpoints carry it.

    Attributes:
        formula: maps target_sparsity and the coefficients to a scale factor; None when factors are fixed.
        coefficients: named coefficients per phase; a phase without them runs dense.
        scale_factors: fixed scale factors per phase, where the file holds no formula.
        target_sparsity: default target per phase.
        targets: class names of the attention modules.
        ignore: fnmatch patterns of modules that stay dense.
        disabled_until_timestep: diffusion: normalised timestep below which skipping is on.
        initial_disabled_steps: diffusion: first steps that stay dense.
        producer: who wrote it.

    Raises:
        ProfileError: the formula is not allowed, or a phase lacks a coefficient.
    """

    formula: str | None = None
    coefficients: Mapping[Phase, Mapping[str, float]] = field(default_factory=dict)
    scale_factors: Mapping[Phase, float] = field(default_factory=dict)
    target_sparsity: Mapping[Phase, float] = field(default_factory=dict)
    targets: tuple[str, ...] = ()
    ignore: tuple[str, ...] = ()
    disabled_until_timestep: float | None = None
    initial_disabled_steps: int | None = None
    producer: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.formula is None:
            return
        names = parse_formula(self.formula).names
        if "target_sparsity" not in names:
            raise ProfileError(
                f"formula {self.formula!r}: found no target_sparsity, wanted it in the formula"
            )
        for phase, values in self.coefficients.items():
            missing = sorted(names - {"target_sparsity"} - set(values))
            if missing:
                raise ProfileError(
                    f"threshold_scale_factor.{phase}: found {sorted(values)}, wanted also {missing} "
                    f"(formula {self.formula!r})"
                )

    @property
    def phases(self) -> tuple[Phase, ...]:
        """Phases that can skip; the others run dense."""
        return tuple(phase for phase in PHASES if phase in self.coefficients or phase in self.scale_factors)

    def scale_factor(self, phase: Phase, target_sparsity: float | None = None) -> float:
        """Scale factor of a phase; threshold = min(1, scale_factor / kv_len).

        Args:
            phase: "prefill" or "decode".
            target_sparsity: in [0, 1]; None = the default of the file. 0 gives exactly 0.

        Raises:
            ProfileError: the phase has no coefficients, there is no target, or the formula gives no number
                of at least 0.
        """
        if phase in self.scale_factors and target_sparsity is None:
            return self.scale_factors[phase]
        if phase in self.scale_factors:
            raise ProfileError(
                f"threshold_scale_factor.{phase}: found the fixed factor "
                f"{self.scale_factors[phase]:g} and no coefficients, wanted them to aim at a target "
                f"sparsity of {target_sparsity:g}"
            )
        if phase not in self.coefficients or self.formula is None:
            raise ProfileError(
                f"threshold_scale_factor.{phase}: found no coefficients, wanted them; {phase} runs dense"
            )
        if target_sparsity is None:
            if phase not in self.target_sparsity:
                raise ProfileError(f"target_sparsity.{phase}: found nothing, wanted a target in [0, 1]")
            target_sparsity = self.target_sparsity[phase]
        target = require_target(target_sparsity)
        if target == 0.0:
            return 0.0
        values = self.coefficients[phase]
        formula = parse_formula(self.formula)
        if formula.same_as(EXPONENTIAL_FORMULA) and values["a"] > 0.0:
            return scale_factor_from_target(values["a"], values["b"], target)
        factor = formula.evaluate({**values, "target_sparsity": target})
        if factor < 0.0:
            raise ProfileError(f"formula {self.formula!r}: gives {factor} at {target}, wanted at least 0")
        return factor

    def threshold(self, phase: Phase, kv_len: int, target_sparsity: float | None = None) -> float:
        """Threshold of a phase at a length, in [0, 1]; raises like `scale_factor`."""
        return threshold_from_scale_factor(self.scale_factor(phase, target_sparsity), kv_len)

    def is_ignored(self, module_name: str) -> bool:
        """Whether a module stays dense."""
        return any(fnmatch.fnmatchcase(module_name, pattern) for pattern in self.ignore)

    def to_json(self) -> dict[str, Any]:
        """The nested form, without the enclosing `sparse_attention_config`."""
        factor: dict[str, Any] = {
            phase: self.scale_factors[phase] for phase in PHASES if phase in self.scale_factors
        }
        if self.formula is not None:
            factor = {"formula": self.formula}
            factor.update({p: dict(self.coefficients[p]) for p in PHASES if p in self.coefficients})
        group: dict[str, Any] = {"algorithm": _ALGORITHMS[0]}
        if self.targets:
            group["targets"] = list(self.targets)
        if self.ignore:
            group["ignore"] = list(self.ignore)
        group["threshold_scale_factor"] = factor
        if self.target_sparsity:
            group["target_sparsity"] = dict(self.target_sparsity)
        if self.disabled_until_timestep is not None:
            group["disabled_until_timestep"] = self.disabled_until_timestep
        if self.initial_disabled_steps is not None:
            group["initial_disabled_steps"] = self.initial_disabled_steps
        return {"config_groups": {"group_0": group}, "producer": dict(self.producer)}


def read_config(path: str | Path) -> dict[str, Any]:
    """What a config.json holds.

    Args:
        path: the file, or its folder.

    Raises:
        ProfileError: it cannot be read, or is no JSON object.
    """
    path = Path(path)
    try:
        path = path / "config.json" if path.is_dir() else path
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ProfileError(f"{path}: cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise ProfileError(f"{path}: found {content!r:.60}, wanted a JSON object")
    return content


def read_sparse_attention_config(source: Mapping[str, Any] | str | Path) -> SparseAttentionConfig:
    """Read either generation of `sparse_attention_config`.

    Args:
        source: a checkpoint's config.json or its folder, or the parsed dict, with or without the enclosing
            `sparse_attention_config` key.

    Raises:
        ProfileError: the file cannot be read, or an algorithm, version or field is unknown, or coefficients
            are missing.
    """
    if not isinstance(source, Mapping):
        source = read_config(source)
    outer = _object(source, "file")
    outer = _object(outer.get(CONFIG_KEY, outer), CONFIG_KEY)
    if not set(outer) & {"config_groups", "threshold_scale_factor", "algorithm", "sparse_algo"}:
        raise ProfileError(
            f"{CONFIG_KEY}: found none (fields {sorted(outer)[:6]}), wanted a sparse attention config"
        )
    version = outer.get("version", 1)
    if version not in _VERSIONS:
        raise ProfileError(f"{CONFIG_KEY}.version: found {version!r}, wanted 1")
    _only(outer, _GROUP_FIELDS | _OUTER_FIELDS, CONFIG_KEY)
    group = _skip_group(outer)
    merged = {**{k: v for k, v in outer.items() if k in _GROUP_FIELDS}, **group}
    ignore = [*_patterns(outer), *_patterns(group)] if group is not outer else _patterns(outer)
    if "threshold_scale_factor" not in merged:
        raise ProfileError(
            "threshold_scale_factor: found nothing, wanted a formula with coefficients or numbers"
        )
    formula, coefficients, factors = _scale_factor(merged["threshold_scale_factor"])
    steps = merged.get("initial_disabled_steps")
    timestep = merged.get("disabled_until_timestep")
    return SparseAttentionConfig(
        formula=formula,
        coefficients=coefficients,
        scale_factors=factors,
        target_sparsity=_targets(merged.get("target_sparsity", {})),
        targets=_strings(merged.get("targets", []), "targets"),
        ignore=tuple(dict.fromkeys(ignore)),
        disabled_until_timestep=None if timestep is None else _number(timestep, "disabled_until_timestep"),
        initial_disabled_steps=None if steps is None else _whole(steps, "initial_disabled_steps"),
        producer={str(k): str(v) for k, v in _object(outer.get("producer", {}), "producer").items()},
    )


def sparse_attention_config_from_profile(
    profile: Profile,
    *,
    target_sparsity: float | Mapping[Phase, float | None] | None = None,
    targets: Sequence[str] = (),
    ignore: Sequence[str] = (),
) -> SparseAttentionConfig:
    """The exponential model of a profile in checkpoint form; a dense phase is left out.

    Args:
        profile: any calibration.
        target_sparsity: as for `Profile.resolve_targets`; a phase with a target of 0 is dense.
        targets: class names of the attention modules, for example ("LlamaAttention",).
        ignore: fnmatch patterns of modules that stay dense.

    Raises:
        ProfileError: a target for a phase that was not calibrated.
        ValueError: no target, one outside [0, 1], or none above 0.
    """
    wanted = profile.sparse_targets(target_sparsity)
    models = {phase: profile.phase_fit(phase).exponential for phase in wanted}
    return SparseAttentionConfig(
        formula=EXPONENTIAL_FORMULA,
        coefficients={phase: {"a": model.a, "b": model.b} for phase, model in models.items()},
        target_sparsity=wanted,
        targets=tuple(targets),
        ignore=tuple(ignore),
        producer={"name": "blasst", "version": __version__},
    )


def _object(value: Any, name: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise ProfileError(f"{name}: found {value!r}, wanted an object")
    return value


def _only(value: Mapping[str, Any], known: set[str], name: str) -> None:
    unknown = sorted(set(value) - known)
    if unknown:
        raise ProfileError(f"{name}.{unknown[0]}: found an unknown field, wanted {sorted(known)}")


def _number(value: Any, name: str) -> float:
    if (
        isinstance(value, bool)
        or not isinstance(value, (int, float))
        or not 0.0 <= value <= sys.float_info.max
    ):
        raise ProfileError(f"{name}: found {value!r}, wanted a number of at least 0")
    return float(value)


def _whole(value: Any, name: str) -> int:
    number = _number(value, name)
    if not number.is_integer():
        raise ProfileError(f"{name}: found {value!r}, wanted a whole number")
    return int(number)


def _strings(value: Any, name: str) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise ProfileError(f"{name}: found {value!r}, wanted a list of strings")
    return tuple(value)


def _patterns(value: Mapping[str, Any]) -> list[str]:
    return [p for name in ("ignore", "disabled_layers") for p in _strings(value.get(name, []), name)]


def _skip_group(outer: Mapping[str, Any]) -> Mapping[str, Any]:
    """The one skip-softmax group; the outer object itself in the flat form."""
    if "config_groups" not in outer:
        if "algorithm" in outer or "sparse_algo" in outer:
            _algorithm(outer, CONFIG_KEY)
        return outer
    groups = _object(outer["config_groups"], "config_groups")
    if len(groups) != 1:
        raise ProfileError(
            f"config_groups: found {sorted(groups)}, wanted one skip_softmax group (several sparsity "
            "schemes are never combined)"
        )
    if "algorithm" in outer or "sparse_algo" in outer:
        _algorithm(outer, CONFIG_KEY)
    name, value = next(iter(groups.items()))
    group = _object(value, f"config_groups.{name}")
    _algorithm(group, f"config_groups.{name}")
    _only(group, _GROUP_FIELDS, f"config_groups.{name}")
    return group


def _algorithm(group: Mapping[str, Any], name: str) -> None:
    fields = [key for key in ("algorithm", "sparse_algo") if key in group] or ["algorithm"]
    for field_name in fields:
        if (found := group.get(field_name)) not in _ALGORITHMS:
            raise ProfileError(f"{name}.{field_name}: found {found!r}, wanted 'skip_softmax'")


def _scale_factor(
    value: Any,
) -> tuple[str | None, dict[Phase, Mapping[str, float]], dict[Phase, float]]:
    """(formula, coefficients per phase, fixed factors per phase)."""
    name = "threshold_scale_factor"
    if isinstance(value, (int, float)):
        factor = _number(value, name)
        return None, {}, dict.fromkeys(PHASES, factor)
    content = _object(value, name)
    formula = content.get("formula")
    rest = {key: item for key, item in content.items() if key != "formula"}
    if formula is None and rest and set(rest) <= set(PHASES):
        if not any(isinstance(item, Mapping) for item in rest.values()):
            return None, {}, {p: _number(rest[p], f"{name}.{p}") for p in PHASES if p in rest}
        formula = EXPONENTIAL_FORMULA
    if formula is None:
        raise ProfileError(f"{name}.formula: found nothing, wanted a formula or numbers per phase")
    shared = rest.pop("coefficients", None)
    if shared is None and not set(rest) & set(PHASES):
        shared, rest = rest, {}
    _only(rest, set(PHASES), name)
    found = {p: rest.get(p, shared) for p in PHASES if rest.get(p, shared) is not None}
    if not any(found.values()):
        raise ProfileError(f"{name}: found a formula without coefficients, wanted them per phase")
    return formula, {p: _coefficients(item, f"{name}.{p}") for p, item in found.items()}, {}


def _coefficients(value: Any, name: str) -> dict[str, float]:
    result = {}
    for key, item in _object(value, name).items():
        if (
            isinstance(item, bool)
            or not isinstance(item, (int, float))
            or not abs(item) <= sys.float_info.max
        ):
            raise ProfileError(f"{name}.{key}: found {item!r}, wanted a finite number")
        result[key] = float(item)
    return result


def _targets(value: Any) -> dict[Phase, float]:
    if isinstance(value, (int, float)):
        value = dict.fromkeys(PHASES, value)
    content = _object(value, "target_sparsity")
    _only(content, set(PHASES), "target_sparsity")
    targets: dict[Phase, float] = {}
    for phase in PHASES:
        if (value := content.get(phase)) is None:
            continue
        try:
            targets[phase] = require_target(value)
        except (TypeError, ValueError) as error:
            raise ProfileError(
                f"target_sparsity.{phase}: found {value!r}, wanted a number in [0, 1]"
            ) from error
    return targets
