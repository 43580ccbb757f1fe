"""Options of serving engines: where they come from, what wins, what is refused. No engine is imported."""

from __future__ import annotations

import dataclasses
import json
import os
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from blasst.core.errors import ProfileError, UnsupportedError
from blasst.core.profile import load_profile
from blasst.integrations import vllm as plugin
from blasst.integrations.serving_options import LOG_INTERVAL, ServingOptions

PROFILE = Path(__file__).parents[2] / "benchmarks" / "results" / "h200_smollm2" / "profile.json"


def test_nothing_asked_for_is_none() -> None:
    assert ServingOptions.read(None, {}) is None
    assert ServingOptions.read({}, {"BLASST_THRESHOLD": " ", "BLASST_CACHE_DIR": "/tmp", "PATH": ""}) is None


def test_each_variable_sets_its_option() -> None:
    environment = {
        "BLASST_PROFILE": "p.json",
        "BLASST_TARGET_SPARSITY": "prefill=0.5, decode=0.3",
        "BLASST_IMPL": "eager",
        "BLASST_LOG_INTERVAL": "5",
    }
    assert ServingOptions.read(None, environment) == ServingOptions(
        profile="p.json", target_sparsity={"prefill": 0.5, "decode": 0.3}, impl="eager", log_interval=5.0
    )
    factors = ServingOptions.read(None, {"BLASST_SCALE_FACTOR": "prefill=40,decode=2e1"})
    assert factors == ServingOptions(threshold_scale_factor={"prefill": 40.0, "decode": 20.0})
    one = ServingOptions.read(None, {"BLASST_THRESHOLD": "0.01"})
    assert one == ServingOptions(threshold=0.01, impl="auto", log_interval=LOG_INTERVAL)


@pytest.mark.parametrize(
    "value", [0.25, "0.25", {"prefill": 0.25, "decode": "0.5"}, '{"prefill": 0.25, "decode": 0.5}']
)
def test_configuration_takes_numbers_texts_and_mappings(value: object) -> None:
    options = ServingOptions.read({"threshold": value}, {})
    assert options is not None
    assert options.rules().prefill.for_length(1000) == 0.25
    assert options.rules().decode.for_length(1000) == (0.25 if value in (0.25, "0.25") else 0.5)


def test_configuration_wins_option_by_option_and_way_by_way() -> None:
    environment = {"BLASST_PROFILE": "e", "BLASST_TARGET_SPARSITY": "0.5", "BLASST_IMPL": "eager"}
    assert ServingOptions.read({"target_sparsity": 0.3}, environment) == ServingOptions(
        profile="e", target_sparsity=0.3, impl="eager"
    )
    assert ServingOptions.read({"threshold": 0.1, "impl": "triton"}, environment) == ServingOptions(
        threshold=0.1, impl="triton"
    )
    # a wrong value that is displaced does no harm
    assert ServingOptions.read({"threshold": 0.1}, {"BLASST_SCALE_FACTOR": "x"}) == ServingOptions(
        threshold=0.1
    )


@pytest.mark.parametrize(
    "environment, message",
    [
        ({"BLASST_TRESHOLD": "0.1"}, "BLASST_TRESHOLD: unknown variable"),
        ({"BLASST_SCREEN": "int8", "BLASST_THRESHOLD": "0"}, "BLASST_SCREEN: screened prefill"),
        ({"BLASST_THRESHOLD": "often"}, "BLASST_THRESHOLD: got 'often', wants one number"),
        ({"BLASST_THRESHOLD": "nan"}, "BLASST_THRESHOLD: got 'nan'"),
        ({"BLASST_THRESHOLD": "{"}, "BLASST_THRESHOLD: got '{'"),
        ({"BLASST_THRESHOLD": "prefill=0.1,prefill=0.2"}, "with a phase twice"),
        ({"BLASST_THRESHOLD": "prefil=0.1"}, "unknown phase prefil"),
        ({"BLASST_THRESHOLD": "prefill="}, "BLASST_THRESHOLD of prefill: got ''"),
        ({"BLASST_IMPL": "cuda", "BLASST_THRESHOLD": "0"}, "BLASST_IMPL: got 'cuda', wants one of auto"),
        ({"BLASST_IMPL": "eager"}, "BLASST_IMPL: given without anything that decides"),
        ({"BLASST_THRESHOLD": "0", "BLASST_LOG_INTERVAL": "-1"}, "BLASST_LOG_INTERVAL: got '-1'"),
        ({"BLASST_THRESHOLD": "0", "BLASST_LOG_INTERVAL": "inf"}, "BLASST_LOG_INTERVAL: got 'inf'"),
    ],
)
def test_wrong_variables_are_refused(environment: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        ServingOptions.read(None, environment)


@pytest.mark.parametrize(
    "config, message",
    [
        ([], "wants a mapping"),
        ({"treshold": 0.1}, "unknown option treshold"),
        ({"threshold": 0.1, "screen": "int8"}, "blasst.screen: screened prefill"),
        ({"threshold": True}, "blasst.threshold: got True"),
        ({"threshold": [0.1]}, "blasst.threshold: got [0.1]"),
        ({"profile": 3}, "blasst.profile: got 3"),
    ],
)
def test_wrong_configuration_is_refused(config: object, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        ServingOptions.read(config, {})


@pytest.mark.parametrize(
    "options, message",
    [
        (ServingOptions(threshold=1.5), "threshold of prefill: got 1.5, wants [0, 1]"),
        (ServingOptions(threshold=0.1, threshold_scale_factor=3.0), "give one of them, not several"),
        (ServingOptions(target_sparsity=0.5), "needs profile="),
        (ServingOptions(profile=str(PROFILE)), "holds no default target"),
        (ServingOptions(threshold={"prefill": None}), "no phase has a value"),
    ],
)
def test_options_that_do_not_go_together_are_refused(options: ServingOptions, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        options.rules()


def test_options_survive_the_way_through_a_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(PROFILE.parent)
    options = ServingOptions(profile=PROFILE.name, target_sparsity={"prefill": 0.5}, log_interval=3.0)
    config = json.loads(json.dumps(options.as_config()))
    assert ServingOptions.read(config, {}) == dataclasses.replace(options, profile=str(PROFILE.resolve()))


def test_a_phase_without_a_value_is_dense() -> None:
    rules = ServingOptions(threshold={"decode": 0.1}).rules()
    assert rules.prefill.kind == "dense" and rules.of("decode").value == 0.1


def test_profile_is_checked_against_model_and_length() -> None:
    options = ServingOptions(profile=str(PROFILE), target_sparsity={"prefill": 0.8, "decode": 0.5})
    profile = load_profile(PROFILE)
    rules = options.rules(profile.model.fingerprint, 8192)
    assert rules.prefill.for_length(6000) == profile.threshold("prefill", 0.8, 6000)
    with pytest.raises(ProfileError, match="belongs to another model"):
        options.rules("0" * 32, 8192)
    most = profile.phase_fit("prefill").reachable_sparsity(2048)
    assert most < 0.8
    with pytest.raises(ValueError, match=f"target_sparsity of prefill: got 0.8, wants at most {most:.3f}"):
        options.rules(profile.model.fingerprint, 2048)


def engine(**changes: Any) -> SimpleNamespace:
    """The parts of vLLM's configuration that the plugin looks at."""
    model = SimpleNamespace(
        use_mla=False,
        is_encoder_decoder=False,
        is_mm_prefix_lm=False,
        is_attention_free=False,
        attention_chunk_size=None,
        hf_text_config=SimpleNamespace(head_dim=64),
        max_model_len=8192,
        hf_config=SimpleNamespace(to_dict=dict),
    )
    parts: dict[str, Any] = {
        "model_config": model,
        "cache_config": SimpleNamespace(cache_dtype="auto", kv_sharing_fast_prefill=False),
        "parallel_config": SimpleNamespace(decode_context_parallel_size=1, prefill_context_parallel_size=1),
        "attention_config": SimpleNamespace(use_non_causal=False),
        "kv_transfer_config": None,
        "speculative_config": None,
        "diffusion_config": None,
        "additional_config": {"blasst": {"threshold": 0.1}},
    }
    for name, value in changes.items():
        part, _, field = name.partition("__")
        if field:
            setattr(parts[part], field, value)
        else:
            parts[part] = value
    return SimpleNamespace(**parts)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"model_config__use_mla": True}, "MLA"),
        ({"model_config__is_encoder_decoder": True}, "cross-attention"),
        ({"model_config__is_mm_prefix_lm": True}, "not causal"),
        ({"attention_config__use_non_causal": True}, "not causal"),
        ({"model_config__rswa_window": 5}, "R-SWA"),
        ({"cache_config__cache_dtype": "fp8_e4m3"}, "kv_cache_dtype is fp8_e4m3"),
        ({"parallel_config__decode_context_parallel_size": 2}, "context parallelism"),
        ({"kv_transfer_config": object()}, "KV connector"),
        ({"model_config__is_attention_free": True}, "no attention layers"),
        ({"model_config__attention_chunk_size": 8192}, "attention_chunk_size is 8192"),
        (
            {"model_config__hf_text_config": SimpleNamespace(head_dim=192, v_head_dim=128)},
            "v_head_dim is 128",
        ),
        (
            {"model_config__hf_text_config": SimpleNamespace(swa_head_dim=192, swa_v_head_dim=128)},
            "swa_v_head_dim is 128 beside keys of 192",
        ),
        (
            {
                "model_config__hf_text_config": SimpleNamespace(
                    qk_nope_dim=128, qk_rope_dim=64, v_channels=128
                )
            },
            "v_channels is 128 beside keys of 192",
        ),
        ({"cache_config__kv_sharing_fast_prefill": True}, "kv_sharing_fast_prefill"),
        ({"diffusion_config": object()}, "both directions"),
        ({"speculative_config": SimpleNamespace(method="eagle3")}, "speculative decoding by eagle3"),
        ({"speculative_config": SimpleNamespace(method="ngram", num_speculative_tokens=8)}, "at most 7"),
    ],
)
def test_engines_that_cannot_be_served_are_refused(
    changes: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plugin, "open_metrics", lambda: None)
    config = engine(**changes)
    with pytest.raises(UnsupportedError, match=message):
        plugin.prepare(config, on_cpu=True)
    plugin.prepare(engine(), on_cpu=True)  # the same without the change


@pytest.mark.parametrize(
    "changes",
    [
        {"speculative_config": SimpleNamespace(method="ngram", num_speculative_tokens=7)},
        {"model_config__hf_text_config": SimpleNamespace(head_dim=64, v_head_dim=64)},
        # MLA switched off: vLLM pads the values
        {"model_config__hf_text_config": SimpleNamespace(kv_lora_rank=512, head_dim=192, v_head_dim=128)},
    ],
)
def test_engines_close_to_those_that_are_refused_are_served(
    changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plugin, "open_metrics", lambda: None)
    plugin.prepare(engine(**changes), on_cpu=True)


def test_an_engine_without_options_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("BLASST_THRESHOLD", "BLASST_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    config = engine(additional_config={}, model_config__use_mla=True)
    plugin.prepare(config, on_cpu=True)
    assert config.additional_config == {}


def test_options_of_the_environment_reach_workers_through_the_configuration(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(plugin, "open_metrics", lambda: tmp_path)
    monkeypatch.setenv(plugin.FOLDER_VARIABLE, "")  # put back at the end
    monkeypatch.setenv("BLASST_THRESHOLD", "prefill=0.5")
    config = engine(additional_config={"other": 1})
    plugin.prepare(config, on_cpu=True)
    monkeypatch.delenv("BLASST_THRESHOLD")
    assert config.additional_config["other"] == 1
    options = plugin.options_of(config)
    assert options is not None and options.threshold == {"prefill": 0.5}


def test_the_configuration_is_the_same_at_each_start_and_checked_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folders = [tmp_path / "first", tmp_path / "second"]
    monkeypatch.setattr(plugin, "open_metrics", lambda: folders.pop(0))
    monkeypatch.setenv(plugin.FOLDER_VARIABLE, "of another engine")
    given = {"blasst": {"threshold": 0.1}}
    first, second = engine(additional_config=given), engine(additional_config=given)
    plugin.prepare(first, on_cpu=True)
    assert os.environ[plugin.FOLDER_VARIABLE] == str(tmp_path / "first")
    plugin.prepare(second, on_cpu=True)
    assert os.environ[plugin.FOLDER_VARIABLE] == str(tmp_path / "second")
    assert first.additional_config == second.additional_config
    assert given == {"blasst": {"threshold": 0.1}}
    plugin.prepare(first, on_cpu=True)  # a copy that vLLM makes in a worker opens no third folder
    assert ServingOptions.read(None, {plugin.FOLDER_VARIABLE: "x"}) is None
