"""Mistakes end the start, with a message that says what came and what is wanted."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

from serving_parts import PROFILE, cases_of
from vllm_parts import SERVER, environment

#: Makes the engine's configuration once for each case and prints what it raised.
CONFIGURATIONS = """
import json, os, sys
from vllm.engine.arg_utils import EngineArgs

for name, case in json.load(open(sys.argv[1])).items():
    os.environ.update(case["variables"])
    try:
        common = {"model": sys.argv[2], "dtype": "float32", "max_model_len": 8192}
        config = EngineArgs(**{**common, **case["engine"]}).create_engine_config()
        said = f"started {config.compute_hash()}"
    except Exception as error:
        said = f"{type(error).__name__}: {error}"
    for variable in case["variables"]:
        del os.environ[variable]
    print("CASE", json.dumps([name, said]))
"""

#: Makes a layer of each kind under a configuration with options.
LAYERS = """
import json, sys, torch
from vllm.config import set_current_vllm_config
from vllm.engine.arg_utils import EngineArgs

config = EngineArgs(model=sys.argv[2], dtype="float32", max_model_len=8192,
                    additional_config={"blasst": {"threshold": 0.01}}).create_engine_config()
from blasst.integrations.vllm_backend import BlasstImpl, split_cache

for name, case in json.load(open(sys.argv[1])).items():
    try:
        with set_current_vllm_config(config):
            shape = case.pop("cache", None)
            impl = BlasstImpl(num_heads=6, scale=0.1, num_kv_heads=2, **{"head_size": 64, **case})
            if shape:
                split_cache(torch.zeros(shape), 2, 64, 128, torch.float32)
        key, value = torch.randn(2, 4, 2, 64)
        cache = torch.full((3, 2, 128, 128), torch.nan)
        impl.do_kv_cache_update(None, key, value, cache, torch.tensor([5, -1, 130, 0]))
        k, v = split_cache(cache, 2, 64, 128, torch.float32)
        for new, pages in ((key, k), (value, v)):
            assert all(torch.equal(pages[p, s], new[i]) for i, p, s in ((0, 0, 5), (2, 1, 2), (3, 0, 0)))
        assert int(cache.isfinite().sum()) == 3 * 2 * 128
        said = "made"
    except Exception as error:
        said = f"{type(error).__name__}: {error}"
    print("CASE", json.dumps([name, said]))
"""

#: What happens on a platform that is not the CPU, as far as it can be asked without one.
ELSEWHERE = """
import json, sys, torch
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

from blasst.integrations import vllm as plugin

config = EngineArgs(model=sys.argv[2], dtype="float32", max_model_len=8192).create_engine_config()
for name, backend in json.load(open(sys.argv[1])).items():
    config.additional_config = {"blasst": {"threshold": 0.01}}
    config.attention_config.backend = backend and AttentionBackendEnum[backend]
    try:
        plugin.prepare(config, on_cpu=False)
        said = config.attention_config.backend.name
    except Exception as error:
        said = f"{type(error).__name__}: {error}"
    print("CASE", json.dumps([name, said]))
register_backend(AttentionBackendEnum.CUSTOM, "blasst.integrations.vllm_backend.BlasstBackend")
backend = AttentionBackendEnum.CUSTOM.get_class()
common = dict(head_size=64, dtype=torch.bfloat16, block_size=16, has_sink=True, use_sparse=False,
              use_mm_prefix=False, use_per_head_quant_scales=False, device_capability=None,
              attn_type="decoder", has_sliding_window=True)
print("CASE", json.dumps(["valid", str(backend.validate_configuration(
    kv_cache_dtype="auto", use_mla=False, **common))]))
print("CASE", json.dumps(["refused", str(backend.validate_configuration(
    kv_cache_dtype="fp8", use_mla=True, **common))]))
"""


#: A model without attention.
MAMBA = {
    "architectures": ["MambaForCausalLM"],
    "model_type": "mamba",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "state_size": 16,
    "vocab_size": 256,
    "conv_kernel": 4,
    "expand": 2,
    "intermediate_size": 128,
    "time_step_rank": 4,
}


def test_wrong_options_end_the_start(model_folder: Path, tmp_path: Path) -> None:
    other = json.loads(PROFILE.read_text())
    other["model"]["fingerprint"] = "0" * 32
    (tmp_path / "other.json").write_text(json.dumps(other))
    variables = {
        "number": ({"BLASST_THRESHOLD": "abc"}, "BLASST_THRESHOLD: got 'abc', wants one number"),
        "range": ({"BLASST_THRESHOLD": "1.5"}, "threshold of prefill: got 1.5, wants [0, 1]"),
        "name": ({"BLASST_TRESHOLD": "0.1"}, "BLASST_TRESHOLD: unknown variable"),
        "impl": ({"BLASST_IMPL": "fast", "BLASST_THRESHOLD": "0"}, "BLASST_IMPL: got 'fast', wants one of"),
        "nothing": ({"BLASST_IMPL": "eager"}, "given without anything that decides what is skipped"),
        "two": ({"BLASST_THRESHOLD": "0", "BLASST_SCALE_FACTOR": "9"}, "give one of them, not several"),
        "no profile": ({"BLASST_TARGET_SPARSITY": "0.5"}, "needs profile="),
        "missing": ({"BLASST_PROFILE": "/nothing", "BLASST_TARGET_SPARSITY": "0.5"}, "cannot be read"),
        "other": (
            {"BLASST_PROFILE": str(tmp_path / "other.json"), "BLASST_TARGET_SPARSITY": "0.5"},
            "the profile belongs to another model",
        ),
        "reach": (
            {"BLASST_PROFILE": str(PROFILE), "BLASST_TARGET_SPARSITY": "prefill=0.95,decode=0.5"},
            "target_sparsity of prefill: got 0.95, wants at most",
        ),
    }
    mamba = tmp_path / "mamba"
    mamba.mkdir()
    (mamba / "config.json").write_text(json.dumps(MAMBA))
    without_attention = {"model": str(mamba), "skip_tokenizer_init": True, "max_model_len": 1024}
    draft = {"method": "draft_model", "model": str(model_folder), "num_speculative_tokens": 3}
    ngram = {"method": "ngram", "prompt_lookup_max": 4, "num_speculative_tokens": 7}
    on = {"BLASST_THRESHOLD": "0.01"}
    engines = {
        "mamba": (on, without_attention, "cannot serve this engine: the model has no attention layers"),
        "chunks": (on, {"hf_overrides": {"attention_chunk_size": 512}}, "the model attends in chunks"),
        "values": (on, {"hf_overrides": {"v_head_dim": 32}}, "v_head_dim is 32 beside keys of 64"),
        "fast prefill": (on, {"kv_sharing_fast_prefill": True}, "engine: kv_sharing_fast_prefill"),
        "draft": (on, {"speculative_config": draft}, "engine: speculative decoding by draft_model"),
        "ngram": (on, {"speculative_config": ngram}, "started"),
        "long ngram": (on, {"speculative_config": {**ngram, "num_speculative_tokens": 8}}, "at most 7"),
        "key": ({}, {"additional_config": {"blasst": {"treshold": 1}}}, "unknown option treshold"),
        "list": ({}, {"additional_config": {"blasst": [1]}}, "wants a mapping"),
        "fp8": (on, {"kv_cache_dtype": "fp8"}, "cannot serve this engine: kv_cache_dtype is fp8"),
        "good": (on, {}, "started"),
        "again": (on, {}, "started"),
        "wins": ({"BLASST_THRESHOLD": "2"}, {"additional_config": {"blasst": {"threshold": 0.5}}}, "started"),
    }
    cases: dict[str, object] = {n: {"variables": v, "engine": {}} for n, (v, _) in variables.items()}
    cases |= {n: {"variables": v, "engine": e} for n, (v, e, _) in engines.items()}
    cases |= {"none": {"variables": {}, "engine": {}}}
    said = cases_of(CONFIGURATIONS, cases, model_folder, tmp_path, environment())
    assert said["none"].startswith("started")
    assert said["good"] == said["again"] != said["none"]  # the key of vLLM's compile cache
    wanted = {name: text for name, (_, text) in variables.items()}
    wanted |= {name: text for name, (_, _, text) in engines.items()}
    assert {name for name, text in wanted.items() if text not in said[name]} == set(), said


def test_layers_that_cannot_be_served_end_the_start(model_folder: Path, tmp_path: Path) -> None:
    cases = {
        "plain": {},
        "window": {"sliding_window": 100, "logits_soft_cap": 30.0},
        "alibi": {"alibi_slopes": [0.5] * 6},
        "cross": {"attn_type": "encoder_decoder"},
        "fp8": {"kv_cache_dtype": "fp8_e4m3"},
        "unknown": {"chunk_lookback": 2},
        "cache": {"cache": [3, 2, 128, 128]},
        "cache of an older vLLM": {"cache": [2, 3, 128, 2, 64]},
        "cache with heads inside": {"cache": [3, 128, 2, 128]},
    }
    said = cases_of(LAYERS, cases, model_folder, tmp_path, environment())
    assert [name for name, text in said.items() if text == "made"] == ["plain", "window", "cache"], said
    assert all("UnsupportedError" in text for text in said.values() if text != "made")
    assert "ALiBi" in said["alibi"] and "wants (blocks, 2, 128, 128)" in said["cache of an older vLLM"]


def test_the_server_does_not_start_with_a_wrong_variable(model_folder: Path) -> None:
    done = subprocess.run(
        [*SERVER, "--model", str(model_folder), "--host", "127.0.0.1"],
        env=environment(BLASST_TARGET_SPARSITY="half"),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode != 0
    assert "BLASST_TARGET_SPARSITY: got 'half', wants one number" in done.stdout + done.stderr


def test_elsewhere_options_select_the_backend_custom(model_folder: Path, tmp_path: Path) -> None:
    cases: dict[str, object] = {"none": None, "custom": "CUSTOM", "other": "FLASH_ATTN"}
    said = cases_of(ELSEWHERE, cases, model_folder, tmp_path, environment())
    assert said["none"] == said["custom"] == "CUSTOM"
    assert "wants CUSTOM or none" in said["other"]
    assert said["valid"] == "[]"
    assert "kv_cache_dtype not supported" in said["refused"] and "MLA" in said["refused"]
