"""A calibration profile: what was counted, what was fitted, and the thresholds that follow from it."""

from __future__ import annotations

import hashlib
import json
import math
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, overload

import torch
from torch import Tensor

from blasst.core.errors import ProfileError
from blasst.core.int8_screen import check_screen_name
from blasst.core.phase_fit import SCREENED_FIT, SCREENED_RULE, SERVING_RULES, PhaseFit
from blasst.core.profile_json import Fields, phase_fit_from_json, phase_fit_to_json
from blasst.core.sparsity_model import MIN_MODEL_LENGTH, require_target
from blasst.core.threshold import threshold_from_log
from blasst.core.types import PHASES, Phase

PROFILE_FORMAT = "blasst-profile"
PROFILE_VERSION = 1


class ProfileWarning(UserWarning):
    """A request outside what was calibrated; it is served, but its sparsity is a guess."""


@dataclass(frozen=True)
class ModelInfo:
    """Which model was calibrated.

    Attributes:
        name: name or path, for people.
        fingerprint: `model_fingerprint` of its configuration.
    """

    name: str
    fingerprint: str


@dataclass(frozen=True)
class DataInfo:
    """What it was calibrated on.

    Attributes:
        hash: digest of the prompts.
        num_prompts: prompts counted.
        kinds: the kinds of prompt, sorted.
    """

    hash: str
    num_prompts: int
    kinds: tuple[str, ...]


@dataclass(frozen=True)
class Profile:
    """A calibration of one model, and the thresholds that follow from it.

    Attributes:
        library_version: version of the library that counted.
        model: which model was calibrated.
        data: what it was calibrated on.
        phases: the calibrated phases; one that is missing runs dense.
        target_sparsity: default target per phase; a phase without one runs dense unless a target is given.
        screened: prefill as it was counted for `screen="int8"`, or None.
    """

    library_version: str
    model: ModelInfo
    data: DataInfo
    phases: Mapping[Phase, PhaseFit]
    target_sparsity: Mapping[Phase, float] = field(default_factory=dict)
    screened: PhaseFit | None = None
    _warned: set[str] = field(default_factory=set, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        for phase, target in self.target_sparsity.items():
            self.phase_fit(phase)
            require_target(target)
        if self.screened is not None and self.screened.order != SCREENED_RULE.order:
            raise ProfileError(
                f"phases.{SCREENED_FIT}.order: found {self.screened.order!r}, wanted {SCREENED_RULE.order!r}"
            )

    @property
    def fits(self) -> dict[str, PhaseFit]:
        """Every fit, by its name in the file."""
        screened = {} if self.screened is None else {SCREENED_FIT: self.screened}
        return {str(phase): fit for phase, fit in self.phases.items()} | screened

    def for_screen(self, screen: str | None) -> Profile:
        """The profile whose prefill is that of calls with `screen=`; one rule never gets the other's curve.

        Args:
            screen: "int8", or None = this profile.

        Raises:
            ProfileError: prefill was not counted for it.
        """
        if not check_screen_name(screen):
            return self
        if self.screened is None:
            raise ProfileError(
                f"phases.{SCREENED_FIT}: found nothing (calibrated: {sorted(self.fits)}), wanted the counts "
                'of screen="int8", which has thresholds of its own: calibrate with --screen int8'
            )
        return replace(self, phases={**self.phases, "prefill": self.screened}, screened=None)

    def phase_fit(self, phase: Phase) -> PhaseFit:
        """The fit of a phase.

        Raises:
            ProfileError: the phase was not calibrated; it can only run dense.
        """
        if phase not in self.phases:
            raise ProfileError(
                f"phases.{phase}: found nothing (calibrated: {sorted(self.phases)}), wanted a calibrated "
                f"phase; {phase} runs dense with this profile: set its target to None or calibrate it"
            )
        return self.phases[phase]

    def coefficients(self, phase: Phase, target_sparsity: float) -> tuple[float, float]:
        """(log_scale, exponent): threshold = min(1, exp(log_scale) * max(kv_len, 128) ** exponent).

        Args:
            phase: "prefill" or "decode".
            target_sparsity: skipped over visited tiles, in [0, 1]; 0 gives (-inf, 0): threshold 0.

        Raises:
            ProfileError: the phase was not calibrated.
            ValueError: the target is not in [0, 1].
        """
        target = require_target(target_sparsity)
        fit = self.phase_fit(phase)
        return fit.model.coefficients(target) if target > 0.0 else (-math.inf, 0.0)

    @overload
    def threshold(self, phase: Phase, target_sparsity: float, kv_len: float) -> float: ...
    @overload
    def threshold(self, phase: Phase, target_sparsity: float, kv_len: Tensor) -> Tensor: ...
    def threshold(self, phase: Phase, target_sparsity: float, kv_len: float | Tensor) -> float | Tensor:
        """Threshold for a target at a length: rises with the target, never rises with the length.

        Args:
            phase: "prefill" or "decode".
            target_sparsity: skipped over visited tiles, in [0, 1]; 0 gives exactly 0.
            kv_len: keys of the sequence at that call, cache and new; a number, or a tensor of any shape,
                whose device is kept without a synchronisation. Below 128 acts as 128: nothing can be
                skipped there.

        Returns:
            A float, or a float32 tensor shaped like kv_len, in [0, 1].

        Raises:
            ProfileError: the phase was not calibrated.
            ValueError: the target is not in [0, 1].
        """
        log_scale, exponent = self.coefficients(phase, target_sparsity)
        if isinstance(kv_len, Tensor):
            log_len = kv_len.to(torch.float32).clamp(min=MIN_MODEL_LENGTH).log()
            return (log_len * exponent + log_scale).clamp(max=0.0).exp()
        return threshold_from_log(log_scale + exponent * math.log(max(kv_len, MIN_MODEL_LENGTH)))

    def resolve_targets(
        self, target_sparsity: float | Mapping[Phase, float | None] | None = None
    ) -> dict[Phase, float | None]:
        """The target of each phase; None means dense.

        Args:
            target_sparsity: one number for every calibrated phase (warns once about a phase that stays
                dense), a mapping (a phase that is not in it is dense), or None for the profile's own targets.

        Raises:
            ProfileError: a target for a phase that was not calibrated.
            ValueError: no target at all, an unknown phase, or a target outside [0, 1].
        """
        if target_sparsity is None:
            if not self.target_sparsity:
                raise ValueError("target_sparsity is missing: the profile holds no default target")
            target_sparsity = {**self.target_sparsity}
        if isinstance(target_sparsity, Mapping):
            unknown = set(target_sparsity) - set(PHASES)
            if unknown:
                raise ValueError(
                    f"target_sparsity: unknown phase {sorted(unknown)}, known are {list(PHASES)}"
                )
            targets: dict[Phase, float | None] = {phase: target_sparsity.get(phase) for phase in PHASES}
        else:
            target = require_target(target_sparsity)
            targets = {phase: target if phase in self.phases else None for phase in PHASES}
            for phase in PHASES:
                if phase not in self.phases:
                    self._warn(f"{phase} dense", f"{phase} was not calibrated and runs dense")
        for phase, value in targets.items():
            if value is not None:
                self.phase_fit(phase)
                require_target(value)
        return targets

    def sparse_targets(
        self, target_sparsity: float | Mapping[Phase, float | None] | None = None
    ) -> dict[Phase, float]:
        """The phases that are to skip, with their targets: what a file for another engine may hold.

        A target of 0 is dense and left out: engines put it into their formula, which gives a factor above 0.

        Args:
            target_sparsity: as for `resolve_targets`.

        Raises:
            ProfileError: a target for a phase that was not calibrated.
            ValueError: see `resolve_targets`; or no target is above 0.
        """
        wanted = {p: t for p, t in self.resolve_targets(target_sparsity).items() if t}
        if not wanted:
            raise ValueError("target_sparsity: got 0 for every phase, wants one above 0, else nothing skips")
        return wanted

    def check_request(
        self, phase: Phase, target_sparsity: float, kv_len: float | Tensor | None = None
    ) -> None:
        """Warn, once per profile and cause, where a request lies outside what was calibrated.

        Args:
            phase: "prefill" or "decode".
            target_sparsity: in [0, 1].
            kv_len: keys of the longest sequence; a tensor on a device is not read back, so not checked.

        Raises:
            ProfileError: the phase was not calibrated.
            ValueError: the target is not in [0, 1].
        """
        fit, target = self.phase_fit(phase), require_target(target_sparsity)
        if target == 0.0:
            return
        low, high = fit.observed.sparsity
        if not low <= target <= high:
            self._warn(
                f"{phase} sparsity {target}",
                f"{phase}: target sparsity {target:g} lies outside the calibrated range "
                f"{low:.3f} to {high:.3f}; its threshold is extrapolated",
            )
        if isinstance(kv_len, Tensor):
            kv_len = float(kv_len.max()) if kv_len.device.type == "cpu" and kv_len.numel() else None
        length = fit.observed.seqlen[1] if kv_len is None else kv_len
        shortest, longest = fit.observed.seqlen
        if not shortest <= length <= longest:
            self._warn(
                f"{phase} length",
                f"{phase}: length {length:g} lies outside the calibrated lengths {shortest} to {longest}; "
                "its threshold is extrapolated",
            )
        reachable = fit.reachable_sparsity(length)
        if target > reachable:
            self._warn(
                f"{phase} reach {target}",
                f"{phase}: target sparsity {target:g} is out of reach at length {length:g}; the largest "
                f"sparsity counted there is {reachable:.3f}",
            )

    def _warn(self, cause: str, message: str) -> None:
        if cause not in self._warned:
            self._warned.add(cause)
            warnings.warn(f"profile of {self.model.name}: {message}", ProfileWarning, stacklevel=3)

    def require_match(self, *, fingerprint: str | None = None, serving: bool = True) -> None:
        """Refuse a profile that was counted for something else.

        Args:
            fingerprint: `model_fingerprint` of the model to be served; None = not compared.
            serving: also require the tile shape and order of this library's kernels.

        Raises:
            ProfileError: names the first field that differs, what was found and what is wanted.
        """
        if fingerprint is not None and fingerprint != self.model.fingerprint:
            raise ProfileError(
                f"model.fingerprint: found {self.model.fingerprint!r} (of {self.model.name}), "
                f"wanted {fingerprint!r}: the profile belongs to another model"
            )
        for name, fit in self.fits.items() if serving else ():
            wanted = SCREENED_RULE if name == SCREENED_FIT else SERVING_RULES[fit.phase]
            if fit.tile != wanted.tile:
                raise ProfileError(
                    f"phases.{name}.tile: found {fit.tile}, wanted {wanted.tile}: a threshold counted in "
                    "other tiles means something else"
                )
            if fit.order != wanted.order:
                raise ProfileError(f"phases.{name}.order: found {fit.order!r}, wanted {wanted.order!r}")

    def to_json(self) -> dict[str, Any]:
        """The profile as JSON values; the schema is profile.schema.json beside this file."""
        return {
            "format": PROFILE_FORMAT,
            "version": PROFILE_VERSION,
            "library_version": self.library_version,
            "model": {"name": self.model.name, "fingerprint": self.model.fingerprint},
            "data": {
                "hash": self.data.hash,
                "num_prompts": self.data.num_prompts,
                "kinds": list(self.data.kinds),
            },
            "target_sparsity": dict(self.target_sparsity),
            "phases": {name: phase_fit_to_json(fit) for name, fit in self.fits.items()},
        }

    @classmethod
    def from_json(cls, value: Any) -> Profile:
        """Inverse of `to_json`.

        Raises:
            ProfileError: names the field, what was found and what is wanted.
        """
        top = Fields(value, "profile")
        top.choice("format", (PROFILE_FORMAT,))
        version = top.integer("version")
        if version != PROFILE_VERSION:
            raise ProfileError(f"version: found {version}, wanted {PROFILE_VERSION}")
        model, data = top.fields("model"), top.fields("data")
        phases, targets = top.fields("phases"), top.fields("target_sparsity")
        profile = cls(
            library_version=top.text("library_version"),
            model=ModelInfo(model.text("name"), model.text("fingerprint")),
            data=DataInfo(data.text("hash"), data.integer("num_prompts"), data.texts("kinds")),
            phases={p: phase_fit_from_json(p, phases.fields(p)) for p in PHASES if phases.has(p)},
            target_sparsity={p: targets.number(p, 0.0, 1.0) for p in PHASES if targets.has(p)},
            screened=phase_fit_from_json("prefill", phases.fields(SCREENED_FIT))
            if phases.has(SCREENED_FIT)
            else None,
        )
        for part in (top, model, data, phases, targets):
            part.close()
        if not profile.fits:
            raise ProfileError("phases: found nothing, wanted prefill, decode or both")
        return profile

    def save(self, path: str | Path) -> None:
        """Write the profile as JSON; `load_profile` gives an equal one back."""
        text = json.dumps(self.to_json(), indent=1, allow_nan=False) + "\n"
        Path(path).write_text(text, encoding="utf-8")


def load_profile(path: str | Path, *, fingerprint: str | None = None, serving: bool = True) -> Profile:
    """Read a profile and check it.

    Args:
        path: file written by `Profile.save`.
        fingerprint: `model_fingerprint` of the model to be served; None = not compared.
        serving: also require the tile shape and order of this library's kernels; False for a profile that was
            counted in the tiles of another engine.

    Raises:
        ProfileError: the file is missing, broken, of an unknown version, or does not match.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:  # ValueError: not UTF-8, or no name that a file can have
        raise ProfileError(f"{path!s:.200}: cannot be read: {error}") from error
    try:
        try:
            value = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ProfileError(f"not a JSON file: {error}") from error
        profile = Profile.from_json(value)
        profile.require_match(fingerprint=fingerprint, serving=serving)
    except ProfileError as error:
        raise ProfileError(f"{path}: {error}") from error
    return profile


def model_fingerprint(config: Mapping[str, Any]) -> str:
    """Digest of the parts of a model configuration that shape its attention.

    It tells architectures and sizes apart; it does not tell a model from its own fine-tune or quantisation.

    Args:
        config: a transformers configuration as a dict (`model.config.to_dict()`), or its `text_config`.

    Raises:
        ValueError: the configuration does not say how many layers or heads there are.
    """
    text: Mapping[str, Any] = config.get("text_config") or config
    heads, layers = text.get("num_attention_heads"), text.get("num_hidden_layers")
    if not heads or not layers:
        raise ValueError("config must hold num_hidden_layers and num_attention_heads")
    hidden = text.get("hidden_size")
    shape = {
        "model_type": text.get("model_type"),
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": text.get("num_key_value_heads") or heads,
        "head_dim": text.get("head_dim") or (hidden // heads if hidden else None),
        "hidden_size": hidden,
        "intermediate_size": text.get("intermediate_size"),
        "vocab_size": text.get("vocab_size"),
    }
    return hashlib.sha256(json.dumps(shape, sort_keys=True).encode()).hexdigest()[:32]
