"""A tiny model in a folder, with a real tokenizer, for the scripts that measure quality."""

import functools
import importlib.util
import sys
from pathlib import Path

import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from blasst.evals.models import find_smollm2

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@functools.cache
def real_tokenizer():
    """SmolLM2's; reading it from the GGUF file takes seconds."""
    path = find_smollm2()
    return AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name, local_files_only=True)


def write_tiny_model(folder, tie=True):
    """Two layers of 4 query and 2 KV heads with random weights; attention looks at near keys."""
    torch.manual_seed(0)
    tokenizer = real_tokenizer()
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=4096,
        tie_word_embeddings=tie,
        attention_bias=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith(("q_proj.bias", "k_proj.bias")):  # rotated, they favour near keys
                weight.fill_(1.5)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def run_script(name, monkeypatch, *arguments):
    """main() of a script in benchmarks/, with a command line, in this process."""
    spec = importlib.util.spec_from_file_location(f"benchmark_{name}", BENCHMARKS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    monkeypatch.setattr(sys, "argv", [f"{name}.py", *map(str, arguments)])
    module.main()
    return module
