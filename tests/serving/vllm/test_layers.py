"""What is checked once layers are there, and when vLLM is another one: no layer runs dense unseen."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from serving_parts import cases_of
from vllm_parts import environment

#: Makes the builder of each kind of KV cache group, derived as vLLM's layers derive it.
BUILDERS = """
import dataclasses, json, sys, torch
from vllm.config import set_current_vllm_config
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.layers.attention import chunked_local_attention, encoder_only_attention
from vllm.v1.attention.backends.utils import create_fast_prefill_custom_backend
from vllm.v1.attention.selector import get_attn_backend
from vllm.v1.kv_cache_interface import ChunkedLocalAttentionSpec, FullAttentionSpec, SlidingWindowSpec

config = EngineArgs(model=sys.argv[2], dtype="float32", max_model_len=8192,
                    additional_config={"blasst": {"threshold": 0.01}}).create_engine_config()
sizes = dict(block_size=32, num_kv_heads=2, head_size=64, dtype=torch.float32)
full = FullAttentionSpec(**sizes)
chunks = ChunkedLocalAttentionSpec(**sizes, attention_chunk_size=512)
names = [f"model.layers.{i}.attn" for i in range(30)]
with set_current_vllm_config(config):
    ours = get_attn_backend(64, torch.float32, "auto")
    cases = {
        "full": (ours, full),
        "window": (ours, SlidingWindowSpec(**sizes, sliding_window=100)),
        "chunks": (chunked_local_attention.create_chunked_local_attention_backend(ours, 512), chunks),
        "chunks alone": (ours, chunks),
        "prefix": (ours, dataclasses.replace(full, non_causal=True)),
        "derived": (encoder_only_attention.create_encoder_only_attention_backend(ours), full),
        "fast prefill": (create_fast_prefill_custom_backend("Fast", ours), full),
    }
    for name, (backend, spec) in cases.items():
        try:
            backend.get_builder_cls()(spec, names, config, torch.device("cpu"))
            said = "made"
        except Exception as error:
            said = f"{type(error).__name__}: {error}"
        print("CASE", json.dumps([name, said]))
"""

#: Makes vLLM's own layers and goes through the step that follows the loading of a model.
LOADED = """
import json, sys, torch
from vllm.config import set_current_vllm_config
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.layers.attention import Attention
from vllm.platforms import current_platform
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

for name, (additional, kinds) in json.load(open(sys.argv[1])).items():
    config = EngineArgs(model=sys.argv[2], dtype="float32", max_model_len=8192,
                        additional_config=additional).create_engine_config()
    with set_current_vllm_config(config):
        for number, kind in enumerate(kinds):
            backend = {"own": None, "other": CPUAttentionBackend}[kind]
            Attention(6, 64, 0.1, num_kv_heads=2, cache_config=config.cache_config,
                      prefix=f"model.layers.{number}.attn", attn_backend=backend)
    try:
        current_platform.update_block_size_for_backend(config)
        said = "loaded"
    except Exception as error:
        said = f"{type(error).__name__}: {error}"
    print("CASE", json.dumps([name, said]))
"""

#: Starts an engine whose model gives a layer another backend than the one that was asked for; the engine's
#: process imports it too.
ENGINE = """
import sys
from vllm import LLM
from vllm.model_executor.models import llama
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

ours = llama.Attention
def choose(*args, prefix="", **others):
    backend = CPUAttentionBackend if ".1." in prefix else None
    return ours(*args, prefix=prefix, attn_backend=backend, **others)
llama.Attention = choose
if __name__ == "__main__":
    LLM(sys.argv[1], dtype="float32", max_model_len=512, enforce_eager=True, load_format="dummy",
        hf_overrides={"num_hidden_layers": 2}, additional_config={"blasst": {"threshold": 0.01}})
    print("STARTED")
"""

#: Loads the plugin into a vLLM that lacks a part of it, and asks for the attention of the CPU.
ANOTHER = """
import sys
from vllm.platforms import current_platform
from vllm.engine.arg_utils import EngineArgs
from blasst.integrations import vllm as plugin

missing = sys.argv[2]
if missing == "registry":
    import vllm.v1.attention.backends.registry as registry
    sys.modules["vllm.v1.attention.backends.registry"] = None
else:
    sys.modules["blasst.integrations.vllm_backend"] = None
plugin.register()
print("REGISTERED")
if missing == "registry":
    sys.modules["vllm.v1.attention.backends.registry"] = registry
else:
    from vllm.v1.attention.backends.registry import AttentionBackendEnum
    print("BACKEND", AttentionBackendEnum.CPU_ATTN.get_class().__name__)
for additional in ({}, {"blasst": {"threshold": 0.01}}):
    try:
        EngineArgs(model=sys.argv[1], dtype="float32", max_model_len=512,
                   additional_config=additional).create_engine_config()
        print("MADE")
    except Exception as error:
        print("REFUSED", error)
"""


def test_builders_take_only_steps_of_whole_sequences(model_folder: Path, tmp_path: Path) -> None:
    said = cases_of(BUILDERS, {}, model_folder, tmp_path, environment())
    assert [name for name, text in said.items() if text == "made"] == ["full", "window"], said
    assert all(
        "UnsupportedError: blasst cannot serve layers that" in text for text in list(said.values())[2:]
    )
    for name in ("chunks", "chunks alone"):
        assert "attend in chunks of 512 tokens: model.layers.0.attn, " in said[name]
    assert said["prefix"].endswith(
        "are not causal: " + ", ".join(f"model.layers.{i}.attn" for i in range(3)) + ", ... (30)"
    )
    assert "have steps of their own" in said["derived"] and "have steps of their own" in said["fast prefill"]


def test_a_loaded_model_must_have_our_attention_and_no_other(model_folder: Path, tmp_path: Path) -> None:
    on: dict[str, object] = {"blasst": {"threshold": 0.01}}
    cases = {
        "ours": [on, ["own", "own"]],
        "mixed": [on, ["own", "other", "other", "other", "other"]],
        "another": [on, ["other"]],
        "nothing": [on, []],
        "without options": [{}, ["own", "other"]],
        "nothing without options": [{}, []],
    }
    said = cases_of(LOADED, cases, model_folder, tmp_path, environment())
    loaded = [name for name, text in said.items() if text == "loaded"]
    assert loaded == ["ours", "without options", "nothing without options"], said
    assert "model.layers.1.attn (CPUAttentionBackendImpl), " in said["mixed"]
    assert said["mixed"].endswith(", ... (4)")
    assert "layers with another attention backend: model.layers.0.attn" in said["another"]
    assert "it has no attention layer of vLLM's" in said["nothing"]


def test_an_engine_with_a_layer_of_another_backend_does_not_start(model_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "engine.py").write_text(ENGINE)
    done = subprocess.run(
        [sys.executable, str(tmp_path / "engine.py"), str(model_folder)],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode != 0 and "STARTED" not in done.stdout
    said = done.stdout + done.stderr
    assert "blasst cannot serve this model: layers with another attention backend: model.layers.1." in said


@pytest.mark.parametrize("missing", ["registry", "backend"])
def test_another_vllm_ends_only_starts_with_options(model_folder: Path, missing: str) -> None:
    def run(**variables: str) -> tuple[int, str]:
        done = subprocess.run(
            [sys.executable, "-c", ANOTHER, str(model_folder), missing],
            env=environment(VLLM_PLUGINS="", **variables),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=300,
            check=False,
        )
        return done.returncode, done.stdout

    said = "blasst cannot be loaded into this version of vLLM, wants 0.32"
    code, text = run()
    assert code == 0 and said in text and "REGISTERED" in text and "MADE" in text, text
    assert f"REFUSED {said}" in text
    assert missing == "registry" or "BACKEND CPUAttentionBackend\n" in text
    code, text = run(BLASST_THRESHOLD="0.01")
    assert code != 0 and f"UnsupportedError: {said}" in text, text
