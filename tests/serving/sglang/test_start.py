"""Mistakes end the start, with a message that says what came and what is wanted."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from serving_parts import PROFILE, cases_of
from sglang_parts import SERVER, environment

#: Resolves an engine's arguments once for each case and prints what it raised, or the backend it got.
ARGUMENTS = """
import json, os, sys
from sglang.srt.plugins import load_plugins

load_plugins()
from sglang.srt.arg_groups.overrides import resolved_view
from sglang.srt.server_args import ServerArgs

for name, case in json.load(open(sys.argv[1])).items():
    os.environ.update(case["variables"])
    try:
        plain = {"model_path": sys.argv[2], "device": "cpu", "dtype": "float32"}
        arguments = ServerArgs(**{**plain, **case["engine"]})
        arguments.resolve_once()
        said = "started with " + resolved_view(arguments).attention_backend
    except Exception as error:
        said = f"{type(error).__name__}: {error}"
    for variable in case["variables"]:
        del os.environ[variable]
    print("CASE", json.dumps([name, said]))
"""

#: Resolves each case's arguments before the plugin is there, as sglang.Runtime does, then once more with it.
LATE = """
import json, os, sys
from sglang.srt.arg_groups.overrides import resolved_view
from sglang.srt.plugins import load_plugins
from sglang.srt.server_args import ServerArgs

cases = json.load(open(sys.argv[1]))
plain = {"model_path": sys.argv[2], "device": "cpu", "dtype": "float32"}
found = {name: ServerArgs(**{**plain, **case["engine"]}) for name, case in cases.items()}
for arguments in found.values():
    arguments.resolve_once()
load_plugins()
for name, arguments in found.items():
    os.environ.update(cases[name]["variables"])
    said = []
    for _ in range(2):
        try:
            arguments.resolve_once()
            said.append("started with " + resolved_view(arguments).attention_backend)
        except Exception as error:
            said.append(f"{type(error).__name__}: {error}")
    assert said[0] == said[1], said
    for variable in cases[name]["variables"]:
        del os.environ[variable]
    print("CASE", json.dumps([name, said[0]]))
"""

#: The server of SGLang's own Runtime, which resolves its arguments without plugins.
RUNTIME = """
import sys

if __name__ == "__main__":
    from sglang.lang.backend.runtime_endpoint import Runtime

    Runtime(model_path=sys.argv[1], device="cpu", dtype="float32", log_level="info", max_total_tokens=1000)
"""

#: Makes a layer of each kind and asks what it needs; and looks at KV caches of other shapes.
LAYERS = """
import json, sys, torch
from sglang.srt.layers.radix_attention import AttentionType, RadixAttention

from blasst.integrations.sglang_backend import block_table, layer_options, split_pages

# requests of 6 and 9 tokens in pages of 4 slots: rows 2 and 0 of the table
slots = torch.zeros(3, 12, dtype=torch.int32)
slots[2, :6] = torch.tensor([8, 9, 10, 11, 20, 21])
slots[0, :9] = torch.tensor([4, 5, 6, 7, 28, 29, 30, 31, 12])
table = block_table(slots, torch.tensor([2, 0]), 9, 4)
assert table.dtype == torch.int32 and table[0, :2].tolist() == [2, 5] and table[1].tolist() == [1, 7, 3]
assert block_table(slots, torch.tensor([0]), 9, 1).tolist() == [[4, 5, 6, 7, 28, 29, 30, 31, 12]]

for name, case in json.load(open(sys.argv[1])).items():
    try:
        shape = case.pop("cache", None)
        temperature = case.pop("xai_temperature_len", -1)
        if "attn_type" in case:
            case["attn_type"] = AttentionType[case["attn_type"]]
        layer = RadixAttention(6, 64, 0.1, 2, 0, **case)
        layer.xai_temperature_len = temperature
        said = "made " + str(tuple(layer_options("layers.0", layer, "eager")))
        if shape:
            said = "made " + str(tuple(split_pages(torch.zeros(shape), 4, 2, 64).shape))
    except Exception as error:
        said = f"{type(error).__name__}: {error}"
    print("CASE", json.dumps([name, said]))
"""

#: Loads the plugin into an SGLang that lacks what it needs.
OTHER_VERSION = """
from sglang.srt import server_args
from sglang.srt.plugins import load_plugins

del server_args.add_attention_backend_choices
load_plugins()
print("RUNS ON")
"""

ON = {"BLASST_THRESHOLD": "0.01"}

#: Variables and arguments of an engine, and what is to be said of its start.
Start = tuple[dict[str, str], dict[str, Any], str]


def altered(model: Path, folder: Path, **changes: Any) -> str:
    """A copy of a model's folder without weights and with another configuration."""
    folder.mkdir()
    for path in model.iterdir():
        if path.suffix != ".safetensors":
            (folder / path.name).write_bytes(path.read_bytes())
    config = json.loads((model / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))
    return str(folder)


def require_said(program: str, cases: dict[str, Start], model: Path, folder: Path) -> None:
    """Run a program on all cases, and find in what it says of each what is to be said."""
    given = {name: {"variables": v, "engine": e} for name, (v, e, _) in cases.items()}
    said = cases_of(program, given, model, folder, environment())
    assert {name for name, (_, _, text) in cases.items() if text not in said[name]} == set(), said


def test_wrong_options_end_the_start(model_folder: Path, tmp_path: Path) -> None:
    other = json.loads(PROFILE.read_text())
    other["model"]["fingerprint"] = "0" * 32
    (tmp_path / "other.json").write_text(json.dumps(other))
    cases: dict[str, Start] = {
        "number": ({"BLASST_THRESHOLD": "abc"}, {}, "BLASST_THRESHOLD: got 'abc', wants one number"),
        "range": ({"BLASST_THRESHOLD": "1.5"}, {}, "threshold of prefill: got 1.5, wants [0, 1]"),
        "name": ({"BLASST_TRESHOLD": "0.1"}, {}, "BLASST_TRESHOLD: unknown variable"),
        "nothing": ({"BLASST_IMPL": "eager"}, {}, "given without anything that decides what is skipped"),
        "two": ({**ON, "BLASST_SCALE_FACTOR": "9"}, {}, "give one of them, not several"),
        "no profile": ({"BLASST_TARGET_SPARSITY": "0.5"}, {}, "needs profile="),
        "missing": (
            {"BLASST_PROFILE": "/nothing", "BLASST_TARGET_SPARSITY": "0.5"},
            {},
            "cannot be read",
        ),
        "other": (
            {"BLASST_PROFILE": str(tmp_path / "other.json"), "BLASST_TARGET_SPARSITY": "0.5"},
            {},
            "the profile belongs to another model",
        ),
        "reach": (
            {"BLASST_PROFILE": str(PROFILE), "BLASST_TARGET_SPARSITY": "prefill=0.95,decode=0.5"},
            {},
            "target_sparsity of prefill: got 0.95, wants at most",
        ),
        "reach at this length": (
            {"BLASST_PROFILE": str(PROFILE), "BLASST_TARGET_SPARSITY": "prefill=0.65"},
            {"context_length": 1024},
            "for sequences of up to 1024 tokens",
        ),
        "backend without options": ({}, {"attention_backend": "blasst"}, "chosen without an option"),
        "another backend": (ON, {"attention_backend": "torch_native"}, "attention_backend: got torch_native"),
        "another in decode": (ON, {"decode_attention_backend": "triton"}, "wants blasst or none"),
        "good": (ON, {}, "started with blasst"),
        "named": (ON, {"attention_backend": "blasst"}, "started with blasst"),
        "none": ({}, {"attention_backend": "torch_native"}, "started with torch_native"),
    }
    require_said(ARGUMENTS, cases, model_folder, tmp_path)


def test_arguments_resolved_without_the_plugin_do_not_run_dense(model_folder: Path, tmp_path: Path) -> None:
    named: dict[str, Any] = {"attention_backend": "blasst", "disable_cuda_graph": True}
    wanted = "resolved before SGLang loaded its plugins, to the attention backend torch_native; wants blasst"
    cases: dict[str, Start] = {
        "dense": (ON, {}, wanted),
        "dense by name": (ON, {"attention_backend": "torch_native"}, wanted),
        "named": (ON, named, "started with blasst"),
        "with graphs": (ON, {"attention_backend": "blasst"}, "CUDA graphs of decode were asked for"),
        "not served": (ON, {**named, "kv_cache_dtype": "fp8_e4m3"}, "kv_cache_dtype is fp8_e4m3"),
        "wrong option": ({"BLASST_THRESHOLD": "1.5"}, named, "got 1.5, wants [0, 1]"),
        "no options": ({}, {}, "started with torch_native"),
    }
    require_said(LATE, cases, model_folder, tmp_path)


def test_a_runtime_with_options_does_not_run_dense(model_folder: Path, tmp_path: Path) -> None:
    program = tmp_path / "runtime.py"  # its server imports it again
    program.write_text(RUNTIME)
    done = subprocess.run(
        [sys.executable, str(program), str(model_folder)],
        env=environment(**ON),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode != 0
    assert "resolved before SGLang loaded its plugins, to the attention backend torch_native" in done.stderr


def test_engines_that_cannot_be_served_do_not_start(model_folder: Path, tmp_path: Path) -> None:
    chunked = altered(model_folder, tmp_path / "chunked", attention_chunk_size=512)
    mla = altered(
        model_folder,
        tmp_path / "mla",
        architectures=["DeepseekV2ForCausalLM"],
        model_type="deepseek_v2",
        kv_lora_rank=64,
        q_lora_rank=None,
        qk_nope_head_dim=64,
        qk_rope_head_dim=32,
        v_head_dim=64,
        n_routed_experts=2,
        first_k_dense_replace=30,
    )
    gemma = altered(
        model_folder,
        tmp_path / "gemma",
        architectures=["Gemma3ForConditionalGeneration"],
        model_type="gemma3",
        text_config={"model_type": "gemma3_text", "num_hidden_layers": 6},
        vision_config={},
    )
    text = {"model_path": gemma, "disable_hybrid_swa_memory": True}
    cases: dict[str, tuple[dict[str, Any], str]] = {
        "images": (
            {**text, "enable_multimodal": True},
            "image tokens of Gemma3ForConditionalGeneration attend in both directions; want it without",
        ),
        "no images": (text, "started with blasst"),
        "mla": ({"model_path": mla}, "its attention is MLA, wants MHA"),
        "chunked": ({"model_path": chunked}, "the model attends in chunks"),
        "fp8": ({"kv_cache_dtype": "fp8_e4m3"}, "kv_cache_dtype is fp8_e4m3; wants auto"),
        "speculation": ({"speculative_algorithm": "NGRAM"}, "speculative_algorithm is NGRAM"),
        "compiled": ({"enable_torch_compile": True}, "enable_torch_compile is True"),
        "batches": ({"enable_two_batch_overlap": True}, "enable_two_batch_overlap is True"),
        "graphs": ({"cuda_graph_backend_decode": "full"}, "CUDA graphs of decode were asked for"),
        "chunks": ({"enable_mixed_chunk": True, "chunked_prefill_size": 512}, "started with blasst"),
    }
    all_on = {name: (ON, engine, text) for name, (engine, text) in cases.items()}
    require_said(ARGUMENTS, all_on, model_folder, tmp_path)


def test_layers_that_cannot_be_served_end_the_start(model_folder: Path, tmp_path: Path) -> None:
    cases: dict[str, dict[str, Any]] = {
        "plain": {},
        "window": {"sliding_window_size": 100, "logit_cap": 30.0},
        "cross": {"is_cross_attention": True},
        "encoder": {"attn_type": "ENCODER_ONLY"},
        "both ways": {"attn_type": "DECODER_BIDIRECTIONAL"},
        "chunks": {"use_irope": True},
        "positions": {"pos_encoding_mode": "ROPE_LLAMA"},
        "cap": {"logit_cap": 30.0, "logit_capping_method": "sigmoid"},
        "temperature": {"xai_temperature_len": 1024},
        "cache": {"cache": [10, 2, 64]},
        "cache of pages": {"cache": [3, 4, 2, 64]},
        "cache with heads first": {"cache": [2, 10, 64]},
    }
    said = cases_of(LAYERS, cases, model_folder, tmp_path, environment())
    assert {name: text for name, text in said.items() if text.startswith("made")} == {
        "plain": "made (0.1, (-1, -1), 0.0, None, 'eager')",
        "window": "made (0.1, (100, 0), 30.0, None, 'eager')",
        "cache": "made (2, 4, 2, 64)",
    }
    assert all("UnsupportedError" in text for text in said.values() if not text.startswith("made"))
    assert "attention type encoder_only" in said["encoder"] and "layers.0" in said["encoder"]
    assert "wants (slots, 2, 64)" in said["cache of pages"]


@pytest.mark.parametrize(
    "variables, arguments, text",
    [
        ({"BLASST_TARGET_SPARSITY": "half"}, [], "BLASST_TARGET_SPARSITY: got 'half', wants one number"),
        # found by the worker, when the KV cache is there
        (ON, ["--kv-cache-dtype", "bfloat16"], "blasst cannot serve a KV cache of the kind MHATokenToKVPool"),
    ],
    ids=["variable", "cache"],
)
def test_the_server_does_not_start(
    variables: dict[str, str], arguments: list[str], text: str, model_folder: Path
) -> None:
    common = ["--device", "cpu", "--dtype", "float32", "--host", "127.0.0.1", "--max-total-tokens", "1000"]
    done = subprocess.run(
        [*SERVER, "--model-path", str(model_folder), *common, *arguments],
        env=environment(**variables),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode != 0
    assert text in done.stdout + done.stderr


@pytest.mark.parametrize("asked", [True, False])
def test_another_version_ends_the_start_only_where_blasst_was_asked_for(asked: bool) -> None:
    done = subprocess.run(
        [sys.executable, "-c", OTHER_VERSION],
        env=environment(**(ON if asked else {})),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert (done.returncode != 0) == asked
    assert ("RUNS ON" in done.stdout) != asked
    assert ("blasst cannot be loaded into this version of SGLang" in done.stderr) == asked
