"""Times of the Hopper prefill kernel built with other macros, interleaved, beside cuDNN; needs a Hopper GPU.

python benchmarks/kernel_variants.py --seqlen 16384 '' PARTS=1 PARTS=2,STAGES=2

Each argument is a variant: macros that replace those of the build, comma separated ('' = as shipped). A macro
that only an older commit knows is tried in a checkout of that commit.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from blasst import blasst_attn_func
from blasst.bench.dial import dial_sparsity
from blasst.bench.inputs import hot_and_cold_inputs
from blasst.bench.timing import interleaved
from blasst.kernels.hopper import prefill

shipped = prefill.macros


def parse(variant: str) -> dict[str, int]:
    """'PARTS=2,STAGES=2' as a dictionary."""
    pairs = (part.split("=") for part in variant.split(",") if part)
    return {name: int(value) for name, value in pairs}


def main() -> None:
    """Check each variant against the first, then time all of them."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("variants", nargs="+", type=parse)
    parser.add_argument("--seqlen", type=int, default=16384)
    parser.add_argument("--heads", default="32/8")
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--sparsities", default="0.5,0.9")
    parser.add_argument("--repeats", type=int, default=15)
    options = parser.parse_args()
    heads, kv_heads = map(int, options.heads.split("/"))
    device = torch.device("cuda")
    inputs = hot_and_cold_inputs(
        1, options.seqlen, heads, kv_heads, options.head_dim, dtype=torch.bfloat16, device=device
    )

    def attend(variant: dict[str, int], threshold: float | None, counts: bool = False):
        prefill.macros = lambda problem: shipped(problem) | variant
        return blasst_attn_func(
            inputs.q, inputs.k, inputs.v, threshold=threshold, causal=True,
            softmax_scale=inputs.softmax_scale, return_counts=counts, impl="hopper",
        )  # fmt: skip

    def cudnn() -> torch.Tensor:
        q, k, v = (x.transpose(1, 2) for x in (inputs.q, inputs.k, inputs.v))
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return torch.nn.functional.scaled_dot_product_attention(
                q, k, v, is_causal=True, scale=inputs.softmax_scale, enable_gqa=True
            )

    wanted = [float(text) for text in options.sparsities.split(",") if text]
    dialled = dial_sparsity(lambda t: float(attend({}, t, counts=True).counts.sparsity), wanted)
    settings = {"dense": None, "0%": 0.0, **{f"{d.sparsity:.0%}": d.threshold for d in dialled}}
    calls: dict[str, Callable[[], object]] = {"cudnn|dense": cudnn}
    for variant in options.variants:
        label = ",".join(f"{name}={value}" for name, value in variant.items()) or "as shipped"
        for setting, threshold in settings.items():
            if not torch.equal(attend(variant, threshold).out, attend({}, threshold).out):
                print(f"{label}, {setting}: other bits than as shipped")
            calls[f"{label}|{setting}"] = lambda v=variant, t=threshold: attend(v, t)
    times = interleaved(calls, device, repeats=options.repeats, warmup=2)
    flops = 4.0 * inputs.visible_pairs(True) * options.head_dim
    base = times["cudnn|dense"].median
    for name, timing in times.items():
        label, setting = name.split("|")
        speed = flops / timing.median / 1e9
        ratio = base / timing.median
        print(f"{label:24s} {setting:6s} {timing.median:8.3f} ms {speed:7.1f} TFLOP/s {ratio:6.3f} x cudnn")


if __name__ == "__main__":
    main()
