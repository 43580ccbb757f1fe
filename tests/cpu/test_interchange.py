"""Files of TensorRT-LLM and ModelOpt, and the settings of other engines."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from blasst.calibrate import export
from blasst.calibrate.checkpoint import checkpoint_config, write_sparse_attention_config
from blasst.calibrate.export import ENGINES, export_profile
from blasst.calibrate.interchange import (
    EXPONENTIAL_FORMULA,
    SparseAttentionConfig,
    read_sparse_attention_config,
    sparse_attention_config_from_profile,
)
from blasst.core.errors import ProfileError
from blasst.core.phase_fit import ObservedRange, PhaseFit, SparsityCurve
from blasst.core.profile import DataInfo, ModelInfo, Profile
from blasst.core.sparsity_model import ExponentialModel
from blasst.core.types import DECODE_TILE, PREFILL_TILE, Phase, TileShape

# Coefficients as published for Qwen3-30B-A3B; the files have the shapes of TensorRT-LLM and ModelOpt
# checkpoints, as their public documentation gives them.
PREFILL = {"a": 7.93, "b": 8.61}
DECODE = {"a": 0.12, "b": 9.85}

NESTED: dict[str, Any] = {
    "config_groups": {
        "group_0": {
            "algorithm": "skip_softmax",
            "targets": ["LlamaAttention"],
            "ignore": ["model.layers.0.*"],
            "threshold_scale_factor": {"formula": EXPONENTIAL_FORMULA, "prefill": PREFILL, "decode": DECODE},
            "target_sparsity": {"prefill": 0.5, "decode": 0.3},
        }
    },
    "producer": {"name": "modelopt", "version": "0.47.0"},
}
BESIDE_GROUPS: dict[str, Any] = {
    "config_groups": {"group_0": {"sparse_algo": "softmax_skip", "targets": ["LlamaAttention"]}},
    "threshold_scale_factor": {"prefill": PREFILL},
    "producer": {"name": "modelopt", "version": "0.37.0"},
}
FLAT_DIFFUSION: dict[str, Any] = {
    "algorithm": "skip_softmax",
    "threshold_scale_factor": {
        "formula": "exp(log_a + b * target_sparsity)",
        "coefficients": {"log_a": -14.14, "b": 36.64},
    },
    "target_sparsity": 0.6,
    "disabled_layers": ["blocks.0.attn1"],
    "disabled_until_timestep": 0.86,
}


def _profile(phases: tuple[Phase, ...] = ("prefill", "decode"), tile: TileShape | None = None) -> Profile:
    fits = {}
    for phase in phases:
        values = PREFILL if phase == "prefill" else DECODE
        fits[phase] = PhaseFit(
            phase=phase,
            tile=tile or (PREFILL_TILE if phase == "prefill" else DECODE_TILE),
            order="sink_first" if phase == "prefill" else "anchors",
            exponential=ExponentialModel(r2=0.99, **values),
            length_exponent=None,
            selected="exponential",
            selected_by="single_length",
            observed=ObservedRange((0.1, 0.9), (4096, 8192), (1e-4, 1.0)),
            points=(SparsityCurve(4096, 2, 100, (0.1, 1.0), (10, 90)),),
        )
    return Profile("0.1.0", ModelInfo("m", "f"), DataInfo("h", 2, ("prose",)), fits)


def test_nested_form_is_read() -> None:
    config = read_sparse_attention_config(NESTED)
    assert config.phases == ("prefill", "decode")
    assert config.coefficients == {"prefill": PREFILL, "decode": DECODE}
    assert config.target_sparsity == {"prefill": 0.5, "decode": 0.3}
    assert config.targets == ("LlamaAttention",)
    assert config.scale_factor("prefill") == pytest.approx(7.93 * math.exp(8.61 * 0.5))
    assert config.scale_factor("decode", 0.7) == pytest.approx(0.12 * math.exp(9.85 * 0.7))
    assert config.is_ignored("model.layers.0.self_attn")
    assert not config.is_ignored("model.layers.10.self_attn")


def test_older_form_beside_groups_is_read_and_decode_stays_dense() -> None:
    config = read_sparse_attention_config(BESIDE_GROUPS)
    assert config.phases == ("prefill",)
    assert config.scale_factor("prefill", 0.5) == pytest.approx(7.93 * math.exp(8.61 * 0.5))
    with pytest.raises(ProfileError, match="decode runs dense"):
        config.scale_factor("decode", 0.5)


def test_flat_form_with_shared_coefficients_is_read() -> None:
    config = read_sparse_attention_config({"sparse_attention_config": FLAT_DIFFUSION})
    assert config.scale_factor("prefill") == pytest.approx(math.exp(-14.14 + 36.64 * 0.6))
    assert config.scale_factor("decode", 0.5) == pytest.approx(math.exp(-14.14 + 36.64 * 0.5))
    assert config.ignore == ("blocks.0.attn1",)
    assert config.disabled_until_timestep == 0.86


def test_flat_form_without_an_algorithm_and_with_inline_coefficients_is_read() -> None:
    factor = {"formula": "exp(log_a + b * target_sparsity)", "log_a": -1.0, "b": 2.0}
    config = read_sparse_attention_config({"threshold_scale_factor": factor})
    assert config.scale_factor("prefill", 0.5) == pytest.approx(1.0)


def test_fixed_scale_factors_are_read() -> None:
    config = read_sparse_attention_config(
        {"algorithm": "skip_softmax", "threshold_scale_factor": {"prefill": 1000.0, "decode": 50}}
    )
    assert config.threshold("prefill", 4000) == 0.25
    assert config.threshold("decode", 10) == 1.0
    both = read_sparse_attention_config({"algorithm": "skip_softmax", "threshold_scale_factor": 8.0})
    assert both.threshold("decode", 16) == 0.5
    with pytest.raises(ProfileError, match="no coefficients"):
        config.scale_factor("prefill", 0.5)


def test_target_zero_gives_zero_and_a_huge_slope_clamps_to_one() -> None:
    config = SparseAttentionConfig(EXPONENTIAL_FORMULA, {"prefill": {"a": 1000.0, "b": 1600.0}})
    assert config.scale_factor("prefill", 0.0) == 0.0
    assert config.threshold("prefill", 10**9, 0.5) == 1.0


@pytest.mark.parametrize("form", [NESTED, BESIDE_GROUPS, FLAT_DIFFUSION])
def test_round_trip_of_every_form_through_the_nested_one(form: dict[str, Any]) -> None:
    config = read_sparse_attention_config(form)
    written = config.to_json()
    assert set(written) == {"config_groups", "producer"}
    assert read_sparse_attention_config(written) == config


def test_writing_into_a_checkpoint_keeps_its_other_fields(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": "llama", "sparse_attention_config": BESIDE_GROUPS}))
    config = read_sparse_attention_config(NESTED)
    write_sparse_attention_config(config, path)
    assert json.loads(path.read_text())["model_type"] == "llama"
    assert read_sparse_attention_config(path) == config
    assert read_sparse_attention_config(str(tmp_path)) == config  # the folder of the checkpoint


@pytest.mark.parametrize(
    "held", [{"config_groups": {"g": {"algorithm": "sparse_softmax"}}}, {"old": 1}, None]
)
def test_another_sparsity_scheme_in_a_checkpoint_is_not_written_over(tmp_path: Path, held: Any) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"sparse_attention_config": held}))
    before = path.read_text()
    with pytest.raises(ProfileError, match="not skip softmax alone"):
        write_sparse_attention_config(read_sparse_attention_config(NESTED), path)
    assert path.read_text() == before


def test_a_copy_of_a_checkpoint_leaves_the_original_alone(tmp_path: Path) -> None:
    source = tmp_path / "config.json"
    source.write_text('{"b": 1, "name": "größer", "a": [1e-05, null]}')
    before = source.read_text()
    config = read_sparse_attention_config(NESTED)
    write_sparse_attention_config(config, tmp_path / "new" / "config.json", source=tmp_path)
    written = (tmp_path / "new" / "config.json").read_text()
    assert written == checkpoint_config(config, source)
    assert list(json.loads(written)) == ["b", "name", "a", "sparse_attention_config"]
    assert "größer" in written
    assert source.read_text() == before
    assert read_sparse_attention_config(tmp_path / "new") == config
    assert sorted(p.name for p in (tmp_path / "new").iterdir()) == ["config.json"]


def test_a_linked_checkpoint_file_stays_a_link_with_its_rights(tmp_path: Path) -> None:
    stored, link = tmp_path / "stored.json", tmp_path / "config.json"
    stored.write_text("{}")
    stored.chmod(0o640)
    link.symlink_to(stored)
    write_sparse_attention_config(read_sparse_attention_config(NESTED), link)
    assert link.is_symlink() and "sparse_attention_config" in json.loads(stored.read_text())
    assert stored.stat().st_mode & 0o777 == 0o640


@pytest.mark.parametrize("text", ["{", "[1]", "3"])
def test_a_checkpoint_that_is_no_json_object_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ProfileError, match=r"config\.json"):
        checkpoint_config(read_sparse_attention_config(NESTED), tmp_path)


def test_prefill_only_export_comes_back_without_a_decode_target(tmp_path: Path) -> None:
    config = sparse_attention_config_from_profile(_profile(), target_sparsity={"prefill": 0.7})
    write_sparse_attention_config(config, tmp_path / "c.json")
    read = read_sparse_attention_config(tmp_path / "c.json")
    assert read.target_sparsity == {"prefill": 0.7}
    assert read.phases == ("prefill",)


def _changed(**changes: Any) -> dict[str, Any]:
    return {"config_groups": {"group_0": {**NESTED["config_groups"]["group_0"], **changes}}}


@pytest.mark.parametrize(
    ("source", "named"),
    [
        (_changed(algorithm="sparse_softmax"), "sparse_softmax"),
        (_changed(algorithm=None), "algorithm"),
        ({"config_groups": {}}, "config_groups"),
        ({"config_groups": {**NESTED["config_groups"], "group_1": {"algorithm": "rocket"}}}, "group_1"),
        ({"config_groups": [1]}, "config_groups"),
        ({**NESTED, "version": 3}, "version"),
        ({**NESTED, "sparse_softmax": {}}, "sparse_softmax"),
        (_changed(layer_overrides={}), "layer_overrides"),
        (_changed(threshold_scale_factor={"formula": EXPONENTIAL_FORMULA}), "without coefficients"),
        (_changed(threshold_scale_factor={"formula": EXPONENTIAL_FORMULA, "prefill": {"a": 1.0}}), "'b'"),
        (_changed(threshold_scale_factor={"formula": "a * 2", "prefill": {"a": 1.0}}), "target_sparsity"),
        (_changed(threshold_scale_factor={"coefficients": {"a": 1.0, "b": 2.0}}), "formula"),
        (_changed(threshold_scale_factor={"prefill": -1.0}), "-1.0"),
        (_changed(threshold_scale_factor=[1.0]), "threshold_scale_factor"),
        (_changed(threshold_scale_factor=True), "True"),
        (_changed(target_sparsity=[0.5]), "target_sparsity"),
        (_changed(target_sparsity={"prefill": 1.5}), "1.5"),
        (_changed(target_sparsity={"verify": 0.5}), "verify"),
        (_changed(ignore="model.layers.0"), "ignore"),
        (_changed(sparse_algo="vsa"), "sparse_algo.*vsa"),
        ({**NESTED, "sparse_algo": "vsa"}, "sparse_algo.*vsa"),
        ({**NESTED, "algorithm": "topk"}, "algorithm.*topk"),
        (_changed(initial_disabled_steps=1.5), "initial_disabled_steps.*1.5"),
        (_changed(threshold_scale_factor={"prefill": 10**400}), "threshold_scale_factor.prefill"),
        (
            _changed(
                threshold_scale_factor={"formula": EXPONENTIAL_FORMULA, "prefill": {"a": 10**400, "b": 1}}
            ),
            "threshold_scale_factor.prefill.a",
        ),
        (_changed(disabled_until_timestep="late"), "late"),
        ({"model_type": "llama"}, "sparse_attention_config"),
        ({"sparse_attention_config": None}, "sparse_attention_config"),
    ],
)
def test_what_is_not_understood_is_an_error_that_names_it(source: dict[str, Any], named: str) -> None:
    with pytest.raises(ProfileError, match=named):
        read_sparse_attention_config(source)


def test_missing_threshold_and_broken_files_are_errors(tmp_path: Path) -> None:
    group = {k: v for k, v in NESTED["config_groups"]["group_0"].items() if k != "threshold_scale_factor"}
    with pytest.raises(ProfileError, match="threshold_scale_factor"):
        read_sparse_attention_config({"config_groups": {"group_0": group}})
    with pytest.raises(ProfileError, match="cannot be read"):
        read_sparse_attention_config(tmp_path / "absent.json")
    (tmp_path / "broken.json").write_text("{")
    with pytest.raises(ProfileError, match="cannot be read"):
        read_sparse_attention_config(tmp_path / "broken.json")
    with pytest.raises(ProfileError, match="cannot be read"):
        write_sparse_attention_config(read_sparse_attention_config(NESTED), tmp_path / "broken.json")


def test_a_target_for_a_fixed_factor_is_refused_and_not_called_dense() -> None:
    config = read_sparse_attention_config(_changed(threshold_scale_factor={"prefill": 5.0}))
    assert config.scale_factor("prefill") == 5.0
    with pytest.raises(ProfileError, match="fixed factor 5"):
        config.scale_factor("prefill", 0.5)
    with pytest.raises(ProfileError, match="decode runs dense"):
        config.scale_factor("decode", 0.5)


def test_a_formula_that_gives_a_negative_factor_is_an_error() -> None:
    config = SparseAttentionConfig("a * target_sparsity", {"prefill": {"a": -1.0}})
    with pytest.raises(ProfileError, match="at least 0"):
        config.scale_factor("prefill", 0.5)


@pytest.mark.parametrize("engine", ENGINES)
def test_every_export_states_the_tiles_of_its_engine(engine: Any) -> None:
    setting = export_profile(_profile(), engine, target_sparsity=0.5)
    assert setting.scale_factors["prefill"] == pytest.approx(7.93 * math.exp(8.61 * 0.5))
    assert setting.scale_factors["decode"] == pytest.approx(0.12 * math.exp(9.85 * 0.5))
    wanted = "128 x 128 tiles" if engine == "modelopt" else "64 x 128 tiles"
    assert any(wanted in note and "differ" in note for note in setting.notes)


def test_modelopt_export_is_a_file_that_reads_back() -> None:
    setting = export_profile(
        _profile(), "modelopt", target_sparsity=0.5, targets=["LlamaAttention"], ignore=["model.layers.0.*"]
    )
    config = read_sparse_attention_config(json.loads(setting.text))
    assert config.coefficients == {"prefill": PREFILL, "decode": DECODE}
    assert config.producer["name"] == "blasst"
    assert config.is_ignored("model.layers.0.self_attn")


@pytest.mark.parametrize("engine", ENGINES)
def test_a_phase_with_a_target_of_0_is_left_out_as_dense(engine: Any) -> None:
    targets: dict[Phase, float | None] = {"prefill": 0.5, "decode": 0.0}
    setting = export_profile(_profile(), engine, target_sparsity=targets)
    alone = export_profile(_profile(), engine, target_sparsity={"prefill": 0.5})
    assert setting == alone
    assert set(setting.scale_factors) == {"prefill"}
    assert "decode: dense." in setting.notes
    with pytest.raises(ValueError, match="got 0 for every phase, wants one above 0"):
        export_profile(_profile(), engine, target_sparsity=0.0)


def test_a_file_without_a_phase_of_target_0_reads_back_as_dense() -> None:
    config = sparse_attention_config_from_profile(_profile(), target_sparsity={"prefill": 0.0, "decode": 0.3})
    assert set(config.coefficients) == set(config.target_sparsity) == {"decode"}
    read = read_sparse_attention_config({"sparse_attention_config": config.to_json()})
    assert read.phases == ("decode",)
    with pytest.raises(ProfileError, match="prefill runs dense"):
        read.scale_factor("prefill")
    with pytest.raises(ValueError, match="got 0 for every phase"):
        sparse_attention_config_from_profile(_profile(), target_sparsity={"decode": 0.0})


def test_tensorrt_llm_export_is_the_documented_yaml() -> None:
    text = export_profile(_profile(), "tensorrt-llm", target_sparsity={"prefill": 0.5}).text
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    factor = 7.93 * math.exp(8.61 * 0.5)
    assert lines[:3] == [
        "sparse_attention_config:",
        "  algorithm: skip_softmax",
        "  threshold_scale_factor:",
    ]
    assert len(lines) == 4
    name, value = lines[3].split(":")
    assert name == "    prefill"
    assert float(value) == pytest.approx(factor)
    assert "# decode: dense." in text


# TensorRT-LLM's published schema (llmapi/llm_args.py, SkipSoftmaxAttentionConfig; unknown fields are refused
# there), and what its loader takes from a checkpoint (attention_backend/sparse/skip_softmax.py): the numbers
# of a phase are coefficients by name, and every phase with a target must have them.
TENSORRT_LLM_YAML = {
    "type": "object",
    "additionalProperties": False,
    "required": ["algorithm"],
    "properties": {
        "algorithm": {"const": "skip_softmax"},
        "threshold_scale_factor": {"$ref": "#/$defs/per_phase"},
        "target_sparsity": {"$ref": "#/$defs/per_phase"},
    },
    "$defs": {
        "per_phase": {
            "anyOf": [
                {"type": "number"},
                {"type": "object", "additionalProperties": {"type": "number"}},
            ]
        }
    },
}
_COEFFICIENTS = {"type": "object", "minProperties": 1, "additionalProperties": {"type": "number"}}
TENSORRT_LLM_GROUP = {
    "type": "object",
    "required": ["algorithm", "threshold_scale_factor", "target_sparsity"],
    "properties": {
        "algorithm": {"enum": ["skip_softmax", "softmax_skip"]},
        "threshold_scale_factor": {
            "type": "object",
            "required": ["formula"],
            "properties": {
                "formula": {"type": "string", "pattern": "target_sparsity"},
                "prefill": _COEFFICIENTS,
                "decode": _COEFFICIENTS,
            },
        },
        "target_sparsity": {"type": "object", "additionalProperties": {"type": "number"}},
        "ignore": {"type": "array", "items": {"type": "string"}},
    },
}


@pytest.mark.parametrize("target", [0.5, {"prefill": 0.5}, {"decode": 0.25}])
def test_tensorrt_llm_yaml_has_the_published_schema(target: Any) -> None:
    yaml = pytest.importorskip("yaml")
    setting = export_profile(_profile(), "tensorrt-llm", target_sparsity=target)
    content = yaml.safe_load(setting.text)
    assert list(content) == ["sparse_attention_config"]
    jsonschema.validate(content["sparse_attention_config"], TENSORRT_LLM_YAML)
    assert content["sparse_attention_config"]["threshold_scale_factor"] == dict(setting.scale_factors)


@pytest.mark.parametrize("value", [1e-9, 3e22, 1000.0, 1.5e-7, 0.0])
def test_numbers_of_tensorrt_llm_yaml_stay_numbers_at_every_size(value: float) -> None:
    yaml = pytest.importorskip("yaml")
    text = export._tensorrt_llm({"prefill": value})
    read = yaml.safe_load(text)["sparse_attention_config"]["threshold_scale_factor"]["prefill"]
    assert isinstance(read, float) and read == value


@pytest.mark.parametrize("target", [0.5, {"prefill": 0.5}, {"decode": 0.25}])
def test_checkpoints_have_what_tensorrt_llm_reads(target: Any) -> None:
    config = sparse_attention_config_from_profile(
        _profile(), target_sparsity=target, ignore=["model.layers.0.*"]
    )
    (group,) = config.to_json()["config_groups"].values()
    jsonschema.validate(group, TENSORRT_LLM_GROUP)
    assert set(group["target_sparsity"]) == set(group["threshold_scale_factor"]) - {"formula"}


def test_sglang_and_flashinfer_exports_use_their_own_names() -> None:
    sglang = export_profile(_profile(), "sglang", target_sparsity=0.5).text
    assert "trtllm_mha, trtllm_mla, cutedsl_mla and dsa only" in sglang
    assert "export SGLANG_SKIP_SOFTMAX_PREFILL_THRESHOLD_SCALE_FACTOR=" in sglang
    assert "export SGLANG_SKIP_SOFTMAX_DECODE_THRESHOLD_SCALE_FACTOR=" in sglang
    flashinfer = export_profile(_profile(("prefill",)), "flashinfer", target_sparsity={"prefill": 0.5}).text
    code = [line for line in flashinfer.splitlines() if not line.startswith("#")]
    scope: dict[str, float] = {}
    exec("\n".join(code), scope)
    assert scope["skip_softmax_threshold_scale_factor"] == pytest.approx(7.93 * math.exp(8.61 * 0.5))


def test_a_profile_counted_in_the_tiles_of_the_engine_carries_no_warning() -> None:
    profile = _profile(("prefill",))
    fit = replace(profile.phases["prefill"], order="ascending")
    setting = export_profile(
        replace(profile, phases={"prefill": fit}), "tensorrt-llm", target_sparsity={"prefill": 0.5}
    )
    assert not any("differ" in note or "last" in note for note in setting.notes)
    counted = replace(profile, phases={"prefill": replace(fit, dense_tail=64)})
    notes = export_profile(counted, "tensorrt-llm", target_sparsity={"prefill": 0.5}).notes
    assert any("counted with the last 64 of them dense" in note for note in notes)


def test_a_target_out_of_reach_is_said() -> None:
    profile = _profile()  # 90 of 100 tiles at most
    assert not any("reach" in n for n in export_profile(profile, "sglang", target_sparsity=0.89).notes)
    notes = [n for n in export_profile(profile, "sglang", target_sparsity=0.95).notes if "out of reach" in n]
    assert len(notes) == 2 and "more than 0.900" in notes[0]


def test_arguments_that_an_engine_cannot_take_are_refused() -> None:
    with pytest.raises(ValueError, match="engine"):
        export_profile(_profile(), "onnx", target_sparsity=0.5)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="kv_len"):
        export_profile(_profile(), "modelopt", target_sparsity=0.5, kv_len=4096)
    with pytest.raises(ValueError, match="ignore"):
        export_profile(_profile(), "sglang", target_sparsity=0.5, ignore=["x"])
    with pytest.raises(ValueError, match="target_sparsity"):
        export_profile(_profile(), "sglang")
    with pytest.raises(ProfileError, match="decode"):
        export_profile(_profile(("prefill",)), "sglang", target_sparsity={"decode": 0.5})
