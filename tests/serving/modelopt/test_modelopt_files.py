"""Files that we write, read by ModelOpt; files that it writes, read by us; and what its calibrator counts."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import modelopt
import modelopt.torch.sparsity.attention_sparsity as mtsa
import pytest
import torch
from modelopt.torch.sparsity.attention_sparsity.conversion import export_sparse_attention_config
from modelopt.torch.sparsity.attention_sparsity.methods.flash_skip_softmax import FlashSkipSoftmax
from modelopt.torch.sparsity.attention_sparsity.methods.triton_skip_softmax import TritonSkipSoftmaxMethod
from modelopt.torch.sparsity.attention_sparsity.plugins.sparse_attn_config import (
    load_from_checkpoint_metadata,
    match_sparse_config,
)
from modelopt.torch.sparsity.attention_sparsity.sparse_attention import SparseAttentionModule
from transformers import AutoConfig, LlamaConfig, LlamaForCausalLM

from blasst.calibrate.checkpoint import write_sparse_attention_config
from blasst.calibrate.interchange import read_sparse_attention_config
from blasst.calibrate.tiles import TILES
from blasst.core.phase_fit import ObservedRange, PhaseFit, SparsityCurve
from blasst.core.profile import DataInfo, ModelInfo, Profile
from blasst.core.sparsity_model import ExponentialModel
from blasst.core.types import PHASES, Phase
from blasst.kernels.eager import prefill_margins

COEFFICIENTS: dict[Phase, dict[str, float]] = {
    "prefill": {"a": 7.93, "b": 8.61},
    "decode": {"a": 0.12, "b": 9.85},
}
LENGTHS = (512, 8192, 131072)


def tiny_llama() -> LlamaConfig:
    return LlamaConfig(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
    )


def save_profile(path: Path) -> Path:
    fits = {
        phase: PhaseFit(
            phase=phase,
            tile=TILES["modelopt"][phase].tile,
            order=TILES["modelopt"][phase].order,
            exponential=ExponentialModel(r2=0.99, **COEFFICIENTS[phase]),
            length_exponent=None,
            selected="exponential",
            selected_by="single_length",
            observed=ObservedRange((0.1, 0.9), (4096, 8192), (1e-4, 1.0)),
            points=(SparsityCurve(4096, 2, 100, (0.1, 1.0), (10, 90)),),
        )
        for phase in PHASES
    }
    targets: dict[Phase, float] = {"prefill": 0.5, "decode": 0.3}
    Profile("0.1.0", ModelInfo("m", "f"), DataInfo("h", 2, ("prose",)), fits, targets).save(path)
    return path


def export(profile: Path, model: Path, out: Path, *extra: str) -> None:
    command = ["export", str(profile), "--to", "modelopt", "--config", str(model), "--out", str(out), *extra]
    done = subprocess.run([sys.executable, "-m", "blasst", *command], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "note:" in done.stderr and "differ" not in done.stderr


def loaded(folder: Path) -> dict[str, Any]:
    """What ModelOpt's serving code makes of a checkpoint's config.json."""
    found = load_from_checkpoint_metadata(AutoConfig.from_pretrained(folder))
    assert found is not None
    config, preset = found
    assert preset == "CHECKPOINT_CALIBRATED_SOFTMAX_SKIP"
    return config


def method_of(layer: dict[str, Any]) -> TritonSkipSoftmaxMethod:
    """ModelOpt's method that turns a target into the threshold of a call, set up as its checkpoints do."""
    method = TritonSkipSoftmaxMethod({"skip_softmax_threshold": 0.0})
    method.calibration_params = layer["threshold_scale_factor"]
    method.target_sparse_ratio = layer["target_sparse_ratio"]
    return method


def seq_q(phase: Phase) -> int:
    return 1 if phase == "decode" else 128


def test_modelopt_loads_an_exported_checkpoint_with_our_thresholds(tmp_path: Path) -> None:
    model, copy = tmp_path / "model", tmp_path / "copy"
    tiny_llama().save_pretrained(model)
    before = (model / "config.json").read_text()
    profile = save_profile(tmp_path / "profile.json")
    export(profile, model, copy / "config.json", "--ignore", "model.layers.0.*")
    assert (model / "config.json").read_text() == before
    config = loaded(copy)
    ignored = match_sparse_config("model.layers.0.self_attn", config)
    assert ignored is not None and ignored["enable"] is False
    layer = match_sparse_config("model.layers.1.self_attn", config)
    assert layer is not None and layer["enable"] is True
    assert layer["target_sparse_ratio"] == {"prefill": 0.5, "decode": 0.3}
    ours = read_sparse_attention_config(copy)
    compared = 0
    for phase in PHASES:
        for kv_len in LENGTHS:
            theirs = method_of(layer).get_inference_threshold(seq_q(phase), kv_len)
            assert theirs is not None
            # ModelOpt does not clamp; where its threshold is at most 1 the two are the same number
            assert ours.threshold(phase, kv_len) == pytest.approx(min(1.0, theirs), rel=1e-12)
            compared += theirs < 1.0
    assert compared >= 4


def test_a_phase_that_is_left_out_stays_dense_in_modelopt(tmp_path: Path) -> None:
    tiny_llama().save_pretrained(tmp_path)
    profile = json.loads(save_profile(tmp_path / "profile.json").read_text())
    del profile["phases"]["decode"], profile["target_sparsity"]["decode"]
    (tmp_path / "profile.json").write_text(json.dumps(profile))
    export(tmp_path / "profile.json", tmp_path, tmp_path / "copy" / "config.json")
    layer = match_sparse_config("model.layers.1.self_attn", loaded(tmp_path / "copy"))
    assert layer is not None
    assert method_of(layer).get_inference_threshold(1, 8192) is None
    assert method_of(layer).get_inference_threshold(128, 8192) is not None


def test_a_phase_with_a_target_of_0_is_dense_in_modelopt_too(tmp_path: Path) -> None:
    """Its formula gives a factor above 0 at a target of 0, so the file must not hold the phase."""
    tiny_llama().save_pretrained(tmp_path)
    profile = save_profile(tmp_path / "profile.json")
    export(profile, tmp_path, tmp_path / "copy" / "config.json", "--target", "0.5", "--decode-target", "0")
    layer = match_sparse_config("model.layers.1.self_attn", loaded(tmp_path / "copy"))
    assert layer is not None
    for kv_len in (64, *LENGTHS):
        assert method_of(layer).get_inference_threshold(1, kv_len) is None
    assert method_of(layer).get_inference_threshold(128, 8192) is not None
    assert read_sparse_attention_config(tmp_path / "copy").phases == ("prefill",)


def test_the_older_generation_is_read_by_us_alone_and_rewritten_for_modelopt(tmp_path: Path) -> None:
    tiny_llama().save_pretrained(tmp_path)
    older = {
        "config_groups": {"group_0": {"sparse_algo": "softmax_skip", "targets": ["LlamaAttention"]}},
        "threshold_scale_factor": {"formula": "a * exp(b * target_sparsity)", **COEFFICIENTS},
        "target_sparsity": {"prefill": 0.5, "decode": 0.3},
        "producer": {"name": "modelopt", "version": "0.37.0"},
    }
    path = tmp_path / "config.json"
    content = json.loads(path.read_text())
    path.write_text(json.dumps({**content, "sparse_attention_config": older}))
    assert load_from_checkpoint_metadata(AutoConfig.from_pretrained(tmp_path)) is None
    config = read_sparse_attention_config(path)
    write_sparse_attention_config(config, path)
    layer = match_sparse_config("model.layers.1.self_attn", loaded(tmp_path))
    assert layer is not None
    theirs = method_of(layer).get_inference_threshold(128, 8192)
    assert theirs == pytest.approx(config.threshold("prefill", 8192), rel=1e-12)
    assert read_sparse_attention_config(path) == config


def test_we_read_what_modelopt_exports() -> None:
    layer = {"method": "flash_skip_softmax", "backend": "pytorch", "enable": True}
    torch.manual_seed(0)
    config = tiny_llama()
    config._attn_implementation = "eager"
    model = mtsa.sparsify(
        LlamaForCausalLM(config),
        {"sparse_cfg": {"*layers.0.*": {"enable": False}, "*attn*": layer, "default": {"enable": False}}},
    )
    modules = [module for module in model.modules() if isinstance(module, SparseAttentionModule)]
    assert len(modules) == 3
    for module in modules:
        if module.is_enabled:
            module._sparse_method_instance.calibration_params = COEFFICIENTS
            module._sparse_method_instance.target_sparse_ratio = {"prefill": 0.5, "decode": 0.3}
    written = export_sparse_attention_config(model)
    assert written is not None
    read = read_sparse_attention_config(json.loads(json.dumps({"sparse_attention_config": written})))
    assert read.producer == {"name": "modelopt", "version": modelopt.__version__}
    assert read.targets == ("LlamaAttention",)
    assert read.coefficients == COEFFICIENTS
    assert read.scale_factor("decode") == pytest.approx(0.12 * math.exp(9.85 * 0.3), rel=1e-12)
    assert [read.is_ignored(f"model.layers.{i}.self_attn") for i in range(3)] == [
        not module.is_enabled for module in modules
    ]


@pytest.mark.parametrize("phase", PHASES)
def test_our_counts_in_modelopt_tiles_are_those_of_its_calibrator(phase: Phase) -> None:
    """Whole tiles only: in ModelOpt the padding rows of a partial query tile vote, which keeps its tiles."""
    torch.manual_seed(0)
    rows, keys = (512, 512) if phase == "prefill" else (1, 1024)
    q = torch.randn(rows, 4, 32) + 1.0
    k = (torch.randn(keys, 4, 32) + 1.0) * torch.linspace(1.5, 0.1, keys)[:, None, None]
    thresholds = [1e-4, 1e-2, 0.1, 0.5]
    rule = TILES["modelopt"][phase]
    margins = prefill_margins(q, k, softmax_scale=32**-0.5, causal=True, tile=rule.tile, order=rule.order)
    ours = torch.cat([margin for _, _, margin in margins], dim=1)

    scores = torch.einsum("qhd,khd->hqk", q * 32**-0.5, k)[None]
    row, key = torch.arange(rows)[:, None] + keys - rows, torch.arange(keys)
    scores = scores.masked_fill(key > row, torch.finfo(scores.dtype).min)
    trials = dict.fromkeys(PHASES, thresholds)
    method = FlashSkipSoftmax(
        {"thresholds": trials, "br": 128, "bc": 128, "backend": "pytorch", "is_causal": True}
    )
    method.set_calibration_mode(True)
    method._update_thresholds(phase)
    _, stats = method.calc_correction_factor_and_p(scores, phase)
    visited = stats["total_blocks"] * 4
    assert ours.numel() == visited
    skipped = [int((ours < math.log(t)).sum()) for t in thresholds]
    assert skipped == [round(s * visited) for s in stats["sparsity"]]
    assert 0 < skipped[1] < skipped[-1] < visited
