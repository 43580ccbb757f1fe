"""The models that `blasst bench end-to-end` runs: random weights in the shape of a known one, or local ones.

Random weights spread attention almost evenly, and no threshold up to 1 would skip much. So a few channels of
the residual stream are set aside: one constant, and one per KV head for the level of a token. Embeddings
write them, no layer does, every q_proj reads the constant and every k_proj the level of its KV head, both
into the channels of the head that the position embedding turns slowest. Scores are then those of the
generated inputs of the other benchmarks: the level of the key plus noise. All else is normally distributed.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, LlamaConfig

from blasst.bench.inputs import COLD_NATS, HOT_FRACTION, NOISE
from blasst.calibrate.prompts import calibration_prompts
from blasst.core.types import PREFILL_TILE, num_tiles
from blasst.evals.models import load_model, load_smollm2

#: Shapes for random weights; the second is for trying the command without a GPU.
SHAPES: dict[str, dict[str, Any]] = {
    "llama-3.1-8b": {
        "vocab_size": 128256,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 500000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
        "tie_word_embeddings": False,
    },
    "tiny": {
        "vocab_size": 1024,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "max_position_embeddings": 8192,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
        "tie_word_embeddings": False,
    },
}

#: Kinds of tokens; all tokens of a kind have the same levels.
_KINDS = 1024
#: Variance that all layers together may add to a residual stream of variance 1 by their attention, and by
#: their MLPs. With an o_proj of gain 1 what all tokens share, which attention does not average out, would
#: double in each layer, and after the norms levels would shrink with it.
_ADDED_VARIANCE = 0.3
#: E[(silu(x) y)^2] for standard normal x and y.
_GATED_VARIANCE = 0.36
#: About what random weights give at gain 1 (32 layers, hidden_size 512, 4K tokens; a little more further on).
_CURVE = ((-30.0, 0.05), (-24.0, 0.2), (-18.0, 0.37), (-12.0, 0.58), (-8.0, 0.77))


@dataclass(frozen=True)
class BenchmarkModel:
    """A model and its prompts.

    Attributes:
        model: transformers causal language model, eval mode, no gradients.
        name: for rows.
        inputs: name of the input set, for rows.
        attention_gain: of random weights; None for a model of its own.
        curve: (ln threshold, sparsity) that may be expected, ascending; where the search begins.
        prompts: (batch, tokens) to token ids int64 (batch, tokens) on the device.
    """

    model: nn.Module
    name: str
    inputs: str
    attention_gain: float | None
    curve: tuple[tuple[float, float], ...]
    prompts: Callable[[int, int], Tensor]

    @property
    def config(self) -> Any:
        """Its transformers config."""
        return self.model.config

    @property
    def device(self) -> torch.device:
        """Where it is."""
        return next(self.model.parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        """Of its weights."""
        return next(self.model.parameters()).dtype


def _kinds(vocab_size: int) -> int:
    return min(_KINDS, vocab_size // 4)


def _fill(model: nn.Module, config: Any, gain: float, generator: torch.Generator) -> None:
    """Draw all weights in place."""
    hidden, layers, head_dim = config.hidden_size, config.num_hidden_layers, config.head_dim
    kv_heads = config.num_key_value_heads
    deviation = {
        "q_proj": math.sqrt(NOISE / hidden),  # scores: normal noise of NOISE nats
        "k_proj": math.sqrt(NOISE / hidden),
        "o_proj": math.sqrt(_ADDED_VARIANCE / (layers * hidden)),
        "down_proj": math.sqrt(_ADDED_VARIANCE / (_GATED_VARIANCE * layers * config.intermediate_size)),
        "embed_tokens": 1.0,
    }
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1:
            parameter.fill_(1.0)  # norms
        else:
            spread = deviation.get(name.split(".")[-2], hidden**-0.5)
            parameter.normal_(0.0, spread, generator=generator)
    # Reserved channels of the residual stream: 0 is the constant, 1 + h the level for KV head h.
    level = _levels(_kinds(config.vocab_size), kv_heads, generator) / COLD_NATS[1]
    embedding = model.get_input_embeddings().weight  # type: ignore[operator]
    kind = torch.arange(config.vocab_size, device=embedding.device) % len(level)
    embedding[:, 0] = 1.0
    embedding[:, 1 : 1 + kv_heads] = level[kind].to(embedding.dtype)
    # rotate_half pairs channel i with i + head_dim / 2; the pairs at the end turn slowest.
    slow = slice(head_dim // 2 - max(head_dim // 16, 1), head_dim // 2)
    size = math.sqrt(gain * COLD_NATS[1] * math.sqrt(head_dim) / (slow.stop - slow.start))
    for layer in model.model.layers:  # type: ignore[union-attr]
        layer.self_attn.o_proj.weight[: 1 + kv_heads] = 0.0
        layer.mlp.down_proj.weight[: 1 + kv_heads] = 0.0
        q = layer.self_attn.q_proj.weight.unflatten(0, (-1, head_dim))
        k = layer.self_attn.k_proj.weight.unflatten(0, (-1, head_dim))
        q[:, slow, 0] = size
        for head in range(kv_heads):
            k[head, slow, 1 + head] = size


def _levels(kinds: int, kv_heads: int, generator: torch.Generator) -> Tensor:
    """Nats (kinds, kv_heads), at most 0; kind 0 is hot for every head."""
    draw = torch.rand(2, kinds, kv_heads, generator=generator, device=generator.device)
    low, high = COLD_NATS
    level = torch.where(draw[0] < HOT_FRACTION["prefill"], 0.0, -(low + (high - low) * draw[1]))
    level[0] = 0.0
    return level


def random_model(
    shape: str, *, dtype: torch.dtype, device: torch.device, attention_gain: float = 1.0, seed: int = 0
) -> BenchmarkModel:
    """A Llama model with random weights made on the device, and prompts that give it heavy-tailed attention.

    A prompt is blocks of 128 tokens of one kind each. For each KV head a kind is hot with chance 5% (the
    first block always is), at level 0, or has a level drawn evenly from 8 to 40 nats lower, times
    attention_gain.

    Args:
        shape: one of SHAPES.
        dtype: of the weights.
        device: where they are drawn; CPU and GPU draw different numbers from one seed.
        attention_gain: factor on the levels.
        seed: of weights and prompts.
    """
    config = LlamaConfig(**SHAPES[shape])
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    model.eval().requires_grad_(False)
    generator = torch.Generator(device=device).manual_seed(seed)
    with torch.no_grad():
        _fill(model, config, attention_gain, generator)

    def prompts(batch: int, tokens: int) -> Tensor:
        own = torch.Generator(device=device).manual_seed(seed + 1)
        kinds, block = _kinds(config.vocab_size), PREFILL_TILE.key
        drawn = torch.randint(kinds, (batch, num_tiles(tokens, block)), generator=own, device=device)
        drawn[:, 0] = 0
        kind = drawn.repeat_interleave(block, dim=1)[:, :tokens]
        member = torch.randint(config.vocab_size // kinds, kind.shape, generator=own, device=device)
        return kind + kinds * member

    name = f"random weights, {HOT_FRACTION['prefill']:.0%} hot blocks of {PREFILL_TILE.key}, cold "
    name += f"{COLD_NATS[0] * attention_gain:g} to {COLD_NATS[1] * attention_gain:g} nats lower"
    curve = tuple((log * attention_gain, sparsity) for log, sparsity in _CURVE)
    return BenchmarkModel(model, shape, name, attention_gain, curve, prompts)


def local_model(path: str, *, dtype: torch.dtype, device: torch.device, seed: int = 0) -> BenchmarkModel:
    """A model of this machine's disk with prompts of held-out prose.

    Args:
        path: a model directory, a .gguf file, or "smollm2".
        dtype: of the weights.
        device: where it goes.
        seed: of the prompts.

    Raises:
        ValueError: the path is neither, or a layer has a sliding window.
    """
    packaged = path == "smollm2"
    loaded = (
        load_smollm2(dtype=dtype, device=device) if packaged else load_model(path, dtype=dtype, device=device)
    )
    kinds = set(getattr(loaded.model.config, "layer_types", None) or ["full_attention"])
    if kinds != {"full_attention"}:
        raise ValueError(f"model {loaded.name}: has layers of {sorted(kinds)}, wants full attention in all")

    def prompts(batch: int, tokens: int) -> Tensor:
        made = calibration_prompts(
            loaded.tokenizer, [tokens], kinds=["prose"], per_kind=batch, split="heldout", seed=seed
        )
        return torch.tensor([prompt.ids(loaded.tokenizer) for prompt in made], device=device)

    curve = ((-16.0, 0.1), (-2.0, 0.8))
    return BenchmarkModel(loaded.model, loaded.name, "held-out prose", None, curve, prompts)
