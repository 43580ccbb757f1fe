"""Settings of other engines from a profile, each with what that engine votes in.

A threshold means something only together with the tile shape and the order it was counted in, so every export
says where the engine differs from the profile.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from blasst.calibrate.checkpoint import checkpoint_config
from blasst.calibrate.engines import ENGINES, Engine
from blasst.calibrate.interchange import sparse_attention_config_from_profile
from blasst.calibrate.tiles import ENGINE_RULES
from blasst.core.phase_fit import CountingOrder
from blasst.core.profile import Profile
from blasst.core.threshold import scale_factor_from_target, scale_factor_from_threshold
from blasst.core.types import PHASES, Phase, TileShape


@dataclass(frozen=True)
class EngineSetting:
    """What to hand to an engine.

    Attributes:
        engine: whose setting.
        text: JSON, YAML, shell or Python text, ready to paste.
        scale_factors: the factor of each phase that skips, in keys.
        notes: what the user must know, one sentence each.
    """

    engine: Engine
    text: str
    scale_factors: Mapping[Phase, float]
    notes: tuple[str, ...]


def export_profile(
    profile: Profile,
    engine: Engine,
    *,
    target_sparsity: float | Mapping[Phase, float | None] | None = None,
    kv_len: int | None = None,
    targets: Sequence[str] = (),
    ignore: Sequence[str] = (),
    model_config: str | Path | None = None,
) -> EngineSetting:
    """Turn a profile into the setting of an engine.

    Args:
        profile: any calibration.
        engine: one of `ENGINES`.
        target_sparsity: as for `Profile.resolve_targets`; a phase with a target of 0 is dense and left out.
        kv_len: length at which the scale factors shall be exact by the selected model; None = the exponential
            model, the same at every length. Not for modelopt, which takes the formula.
        targets: class names of the attention modules; modelopt only.
        ignore: fnmatch patterns of modules that stay dense; modelopt only, the others have no such setting.
        model_config: config.json of the model, or its folder; the text is then a copy of it that holds the
            setting; modelopt only.

    Raises:
        ProfileError: a target for a phase that was not calibrated, or a config.json that cannot take it.
        ValueError: an unknown engine, no target, nothing but targets of 0, or an argument that the engine
            cannot take.
    """
    if engine not in ENGINES:
        raise ValueError(f"engine must be one of {list(ENGINES)}, got {engine!r}")
    if engine == "modelopt" and kv_len is not None:
        raise ValueError("kv_len is not for modelopt: its file holds the formula for every length")
    if engine != "modelopt" and (targets or ignore or model_config):
        raise ValueError(
            f"targets, ignore and model_config are not for {engine}: only a modelopt file can hold them"
        )
    if kv_len is not None and kv_len < 1:
        raise ValueError(f"kv_len must be at least 1, got {kv_len}")
    wanted = profile.sparse_targets(target_sparsity)
    factors = {phase: _scale_factor(profile, phase, target, kv_len) for phase, target in wanted.items()}
    notes = _notes(profile, engine, wanted, kv_len)
    if engine == "modelopt":
        config = sparse_attention_config_from_profile(
            profile, target_sparsity=wanted, targets=targets, ignore=ignore
        )
        if model_config is not None:
            text = checkpoint_config(config, model_config)
        else:
            text = json.dumps({"sparse_attention_config": config.to_json()}, indent=2) + "\n"
    else:
        text = "".join(f"# {note}\n" for note in notes) + _TEXT[engine](factors)
    return EngineSetting(engine, text, factors, notes)


def _scale_factor(profile: Profile, phase: Phase, target: float, kv_len: int | None) -> float:
    if kv_len is not None:
        return scale_factor_from_threshold(profile.threshold(phase, target, kv_len), kv_len)
    model = profile.phase_fit(phase).exponential
    return scale_factor_from_target(model.a, model.b, target)


def _notes(
    profile: Profile, engine: Engine, wanted: Mapping[Phase, float], kv_len: int | None
) -> tuple[str, ...]:
    notes = []
    for phase in PHASES:
        if phase not in wanted:
            notes.append(f"{phase}: dense.")
            continue
        fit = profile.phase_fit(phase)
        source = "a * exp(b * target)" if kv_len is None else f"the {fit.selected} model at {kv_len} keys"
        notes.append(f"{phase}: target sparsity {wanted[phase]:g} by {source}.")
        rule = ENGINE_RULES[engine][phase]
        if (fit.tile, fit.order) != (rule.tile, rule.order):
            notes.append(
                f"{phase}: {engine} votes in {_tile_text(rule.tile)}, {_ORDER_TEXT[rule.order]}; this "
                f"profile was counted in {_tile_text(fit.tile)}, {_ORDER_TEXT[fit.order]}. Its sparsity will "
                "differ from the target: count in the engine's tiles to meet it (blasst calibrate --tiles)."
            )
        elif phase == "decode" and engine != "modelopt":
            notes.append(
                f"decode: counted with {fit.splits} KV split(s). These kernels restart the maximum in every "
                "split, and their number depends on the batch, the KV heads and the GPU."
            )
        if fit.dense_tail:
            notes.append(
                f"{phase}: {engine} skips in the last rows of a prompt too; this profile was counted with "
                f"the last {fit.dense_tail} of them dense. Answers are read from them: compare with dense."
            )
        longest = fit.observed.seqlen[1]
        if wanted[phase] > (reach := fit.reachable_sparsity(longest)):
            notes.append(
                f"{phase}: the target is out of reach: at {longest} keys no threshold skipped more than "
                f"{reach:.3f}."
            )
        if kv_len is None and fit.selected != "exponential":
            notes.append(
                f"{phase}: the {fit.selected} model fits better here; engines divide by the length only."
                + ("" if engine == "modelopt" else " Give a length to get the factor that is exact there.")
            )
    if engine == "sglang":
        notes.append(
            "SGLang reads these variables in the backends trtllm_mha, trtllm_mla, cutedsl_mla and dsa only, "
            "and is dense in every other one: start it with one of them (--attention-backend trtllm_mha)."
        )
    if engine in ("sglang", "flashinfer"):
        notes.append("Blackwell kernels vote in other tiles, which are not documented.")
    return tuple(notes)


_ORDER_TEXT: Mapping[CountingOrder, str] = {
    "sink_first": "first tile first, then from the last one backwards",
    "descending": "from the last tile backwards",
    "ascending": "from the first tile on",
    "anchors": "against the first and the last two tiles",
}


def _tile_text(tile: TileShape) -> str:
    if tile.query is None:
        return f"all query heads of a KV head x {tile.key} keys"
    return f"{tile.query} x {tile.key} tiles"


def _tensorrt_llm(factors: Mapping[Phase, float]) -> str:
    lines = ["sparse_attention_config:", "  algorithm: skip_softmax", "  threshold_scale_factor:"]
    lines += [f"    {phase}: {_yaml_number(factor)}" for phase, factor in factors.items()]
    return "\n".join(lines) + "\n"


def _yaml_number(value: float) -> str:
    """Every digit of a float; YAML 1.1 reads "1e-09" as a string, "1.0e-09" as a number."""
    text = repr(value)
    return text if "." in text else text.replace("e", ".0e")


def _sglang(factors: Mapping[Phase, float]) -> str:
    return "".join(
        f"export SGLANG_SKIP_SOFTMAX_{phase.upper()}_THRESHOLD_SCALE_FACTOR={factor!r}\n"
        for phase, factor in factors.items()
    )


def _flashinfer(factors: Mapping[Phase, float]) -> str:
    return "".join(
        f"skip_softmax_threshold_scale_factor = {factor!r}  # {phase} calls\n"
        for phase, factor in factors.items()
    )


_TEXT = {"tensorrt-llm": _tensorrt_llm, "sglang": _sglang, "flashinfer": _flashinfer}
