"""Options of a serving engine: from environment variables and from the engine's own configuration."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from blasst.core.errors import ProfileError
from blasst.core.types import PHASES, Phase
from blasst.integrations.threshold_rules import PerPhase, ThresholdRule, resolve_rules
from blasst.kernels.names import IMPLS

#: Environment variable of each option.
VARIABLES: Final[Mapping[str, str]] = {
    "profile": "BLASST_PROFILE",
    "target_sparsity": "BLASST_TARGET_SPARSITY",
    "threshold_scale_factor": "BLASST_SCALE_FACTOR",
    "threshold": "BLASST_THRESHOLD",
    "impl": "BLASST_IMPL",
    "log_interval": "BLASST_LOG_INTERVAL",
}

#: Variables of this prefix that belong to other parts of the library.
_OTHER_VARIABLES = ("BLASST_CACHE_DIR", "BLASST_COMMIT", "BLASST_COUNTS_FOLDER")

#: Said of what `blasst.enable` takes for a transformers model and no engine does.
_NO_SCREEN = 'screened prefill (screen="int8") is served in transformers models only, not in an engine'

#: The three ways to a threshold; one given in the configuration displaces another of the environment.
_WAYS = (("profile", "target_sparsity"), ("threshold_scale_factor",), ("threshold",))

#: Seconds between two lines of the log while requests are served.
LOG_INTERVAL = 60.0


@dataclass(frozen=True)
class ServingOptions:
    """What an engine is asked to do.

    Attributes:
        profile: path of a calibration file, or None.
        target_sparsity: skipped over visited tiles to aim at, with a profile; None = its own targets.
        threshold_scale_factor: threshold times number of keys.
        threshold: the same at every length, in [0, 1].
        impl: kernel, as in the public functions.
        log_interval: seconds between two lines of the log; 0 = none.
    """

    profile: str | None = None
    target_sparsity: PerPhase | None = None
    threshold_scale_factor: PerPhase | None = None
    threshold: PerPhase | None = None
    impl: str = "auto"
    log_interval: float = LOG_INTERVAL

    @staticmethod
    def read(config: object = None, environment: Mapping[str, str] | None = None) -> ServingOptions | None:
        """Options of a process; None = nothing was asked for, leave the engine alone.

        Args:
            config: value of the key "blasst" in the engine's configuration, a mapping of option names; it
                wins over the environment, option by option, and a way to a threshold that is named here
                displaces another way that is named there.
            environment: environment variables, default those of the process; empty ones count as unset.

        Raises:
            ValueError: an unknown option, a wrong value, or options that do not go together.
        """
        given = _from_environment(os.environ if environment is None else environment)
        if config is not None:
            chosen = _from_config(config)
            for way in _WAYS:
                if any(name in chosen for name in way):
                    others = [name for other in _WAYS if other is not way for name in other]
                    given = {name: value for name, value in given.items() if name not in others}
            given = {**given, **chosen}
        if not given:
            return None
        values: dict[str, Any] = {
            name: _value(name, value, source) for name, (value, source) in given.items()
        }
        if not any(name in values for way in _WAYS for name in way):
            named = ", ".join(source for _, source in given.values())
            wanted = ", ".join(VARIABLES[name] for way in _WAYS for name in way)
            raise ValueError(
                f"{named}: given without anything that decides what is skipped; want one of {wanted}"
            )
        return ServingOptions(**values)

    def as_config(self) -> dict[str, Any]:
        """The options as JSON values that `read` takes as config; the path of the profile is absolute."""
        values = {name: value for name, value in asdict(self).items() if value is not None}
        if self.profile is not None:
            values["profile"] = str(Path(self.profile).resolve())
        return values

    def rules(self, fingerprint: str | None = None, max_length: int | None = None) -> ServingRules:
        """The threshold rule of each phase.

        Args:
            fingerprint: of the served model; a profile of another one is refused. None = not compared.
            max_length: longest sequence that the engine serves; a target that is out of reach at every
                length up to it is refused. None = not compared.

        Raises:
            ValueError: options that conflict, are missing or out of range, or an unreachable target.
            ProfileError: the profile is broken, or belongs to another model, or lacks a phase.
        """
        try:
            rules = resolve_rules(
                self.profile, self.target_sparsity, self.threshold, self.threshold_scale_factor, fingerprint
            )
            if max_length is not None:
                for rule in rules.values():
                    _require_reachable(rule, max_length)
        except ProfileError as error:
            raise ProfileError(f"blasst: {error}") from error
        except ValueError as error:
            raise ValueError(f"blasst: {error}") from error
        return ServingRules(rules["prefill"], rules["decode"])


@dataclass(frozen=True)
class ServingRules:
    """The threshold rule of both phases."""

    prefill: ThresholdRule
    decode: ThresholdRule

    def of(self, phase: Phase) -> ThresholdRule:
        """The rule of a phase."""
        return self.prefill if phase == "prefill" else self.decode

    def __str__(self) -> str:
        return "; ".join(f"{phase}: {self.of(phase)}" for phase in PHASES)


def _require_reachable(rule: ThresholdRule, max_length: int) -> None:
    """Refuse a target above everything that was counted at the lengths that the engine serves."""
    if rule.profile is None or rule.value == 0.0:
        return
    fit = rule.profile.phase_fit(rule.phase)
    lengths = [max_length] + [curve.seqlen for curve in fit.points if curve.seqlen <= max_length]
    reach = max(fit.reachable_sparsity(length) for length in lengths)
    if rule.value > reach:
        raise ValueError(
            f"target_sparsity of {rule.phase}: got {rule.value:g}, wants at most {reach:.3f}, the largest "
            f"sparsity that was counted for sequences of up to {max_length} tokens"
        )


def _from_environment(environment: Mapping[str, str]) -> dict[str, tuple[object, str]]:
    known = (*VARIABLES.values(), *_OTHER_VARIABLES)
    for name in environment:
        if name == "BLASST_SCREEN":
            raise ValueError(f"{name}: {_NO_SCREEN}")
        if name.startswith("BLASST_") and name not in known:
            raise ValueError(f"{name}: unknown variable, known are {', '.join(VARIABLES.values())}")
    return {
        name: (environment[variable].strip(), variable)
        for name, variable in VARIABLES.items()
        if environment.get(variable, "").strip()
    }


def _from_config(config: object) -> dict[str, tuple[object, str]]:
    if not isinstance(config, Mapping):
        raise ValueError(f"blasst: got {config!r}, wants a mapping with keys of {', '.join(VARIABLES)}")
    unknown = sorted(str(name) for name in config if name not in VARIABLES)
    if "screen" in unknown:
        raise ValueError(f"blasst.screen: {_NO_SCREEN}")
    if unknown:
        raise ValueError(f"blasst: unknown option {', '.join(unknown)}, known are {', '.join(VARIABLES)}")
    return {name: (value, f"blasst.{name}") for name, value in config.items() if value is not None}


def _value(name: str, value: object, source: str) -> object:
    if name == "profile":
        path = os.fspath(value) if isinstance(value, str | os.PathLike) else None
        if path is None or "\0" in str(path):
            raise ValueError(f"{source}: got {value!r}, wants the path of a calibration file")
        return path
    if name == "impl":
        if value not in IMPLS:
            raise ValueError(f"{source}: got {value!r}, wants one of {', '.join(IMPLS)}")
        return value
    if name == "log_interval":
        seconds = _number(value, source, "a number of seconds, 0 = no log")
        if not 0.0 <= seconds < math.inf:
            raise ValueError(f"{source}: got {value!r}, wants a number of seconds, 0 = no log")
        return seconds
    return _per_phase(value, source)


def _number(value: object, source: str, wanted: str) -> float:
    if isinstance(value, int | float | str) and not isinstance(value, bool):
        try:
            number = float(value)
        except (ValueError, OverflowError):  # an integer may exceed every float
            number = math.nan
        if not math.isnan(number):
            return number
    raise ValueError(f"{source}: got {value!r}, wants {wanted}")


def _per_phase(value: object, source: str) -> PerPhase:
    """One number, prefill=0.5,decode=0.3, a JSON object, or a mapping of phases."""
    wanted = "one number, or prefill=<number>,decode=<number>"
    if isinstance(value, str) and value.startswith("{"):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{source}: got {value!r}, wants {wanted}") from error
    if isinstance(value, str) and "=" in value:
        parts = [part.partition("=") for part in value.split(",")]
        pairs = [(phase.strip(), number.strip()) for phase, _, number in parts]
        if len({phase for phase, _ in pairs}) < len(pairs):
            raise ValueError(f"{source}: got {value!r} with a phase twice, wants {wanted}")
        value = dict(pairs)
    if not isinstance(value, Mapping):
        return _number(value, source, wanted)
    unknown = [str(phase) for phase in value if phase not in PHASES]
    if unknown:
        raise ValueError(f"{source}: unknown phase {', '.join(unknown)}, the phases are {', '.join(PHASES)}")
    return {
        phase: None if number is None else _number(number, f"{source} of {phase}", wanted)
        for phase, number in value.items()
    }
