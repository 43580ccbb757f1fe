"""Sparse attention in a transformers model: here a tiny random one; any causal model is used alike."""

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import blasst


def main() -> None:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
    )
    model = LlamaForCausalLM(config).eval()  # for a real one: AutoModelForCausalLM.from_pretrained(folder)
    for layer in model.model.layers:  # random weights give flat attention; sharpen it so that tiles can go
        layer.self_attn.q_proj.weight.data *= 30.0
        layer.self_attn.k_proj.weight.data *= 30.0
    prompt = torch.randint(0, 256, (1, 1024))

    # Rows of random weights want random keys, so 64 of them rarely agree: prefill skips next to nothing here.
    # With a calibration: sparse_attention(model, profile="profile.json", target_sparsity=0.5)
    with blasst.sparse_attention(model, threshold=0.01, collect_counts=True) as enabled:
        print(enabled)
        tokens = model.generate(prompt, max_new_tokens=4, do_sample=False, pad_token_id=0)
        for record in blasst.attention_stats(model):
            print(f"{record.layer}, {record.phase}: {record.sparsity:.1%} of the tiles skipped")
    print("new tokens:", tokens[0, -4:].tolist())


if __name__ == "__main__":
    main()
