"""Times of a Hopper kernel built with other macros or from other sources, beside cuDNN; needs a Hopper GPU.

python benchmarks/kernel_variants.py prefill 1x16384 '' PARTS=1 PARTS=2,STAGES=2
python benchmarks/kernel_variants.py decode 4x65536 '' SLOTS=4 FROM=../other/src/blasst/kernels/hopper

Sequences x keys, then the variants, timed in turns: macros that replace those of the build, comma separated
('' = as shipped). FROM is a folder with the CUDA files of another commit whose arguments are the same.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from blasst import blasst_attn_func, blasst_attn_with_kvcache
from blasst.bench.dial import dial_sparsity
from blasst.bench.inputs import Inputs, hot_and_cold_inputs
from blasst.bench.timing import interleaved
from blasst.bench.variants import torch_baseline
from blasst.kernels import repeats
from blasst.kernels.hopper import compile as compiler
from blasst.kernels.hopper import decode, prefill

KERNELS: dict[str, Any] = {"prefill": prefill, "decode": decode}
SHIPPED = {name: module.macros for name, module in KERNELS.items()}
FOLDER = compiler.FOLDER


@dataclass
class Variant:
    """A build: what to call it, its macros, where its sources lie, and the decode calls prepared with it."""

    label: str
    macros: dict[str, int]
    folder: Path
    plans: dict[Any, Any] = field(default_factory=dict)

    def choose(self, kernel: str, number: int) -> None:
        """The next calls are built so. The unused macro VARIANT keeps kernels of one name apart."""
        own = self.macros | {"VARIANT": number}
        KERNELS[kernel].macros = lambda *call: SHIPPED[kernel](*call) | own
        compiler.FOLDER = self.folder
        repeats._plans = self.plans


def parse(text: str) -> Variant:
    """'PARTS=2,FROM=folder' as a variant."""
    pairs = dict(part.split("=", 1) for part in text.split(",") if part)
    folder = Path(pairs.pop("FROM", FOLDER))
    return Variant(text or "as shipped", {name: int(value) for name, value in pairs.items()}, folder)


def attention(kernel: str, inputs: Inputs) -> Callable[..., Any]:
    """A call of ours by threshold and options."""
    lengths = torch.full((inputs.k.shape[0],), inputs.k.shape[1], dtype=torch.int32, device=inputs.k.device)
    thresholds: dict[float, torch.Tensor] = {}

    def call(threshold: float | None, **options: Any) -> Any:
        options |= {"softmax_scale": inputs.softmax_scale, "impl": "hopper"}
        if kernel == "prefill":
            return blasst_attn_func(inputs.q, inputs.k, inputs.v, threshold=threshold, causal=True, **options)
        given = None
        if threshold is not None:
            made = torch.full(lengths.shape, threshold, device=inputs.k.device)
            given = thresholds.setdefault(threshold, made)
        return blasst_attn_with_kvcache(
            inputs.q, inputs.k, inputs.v, cache_seqlens=lengths, threshold=given, **options
        )

    return call


def options() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("kernel", choices=KERNELS)
    parser.add_argument("shape", help="sequences x keys, as 4x65536")
    parser.add_argument("variants", nargs="+", type=parse)
    parser.add_argument("--heads", default="32/8")
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--sparsities", default="0.5,0.9")
    parser.add_argument("--repeats", type=int, default=15)
    return parser.parse_args()


def main() -> None:
    """Check each variant against the first, then time all of them."""
    chosen = options()
    batch, keys = map(int, chosen.shape.split("x"))
    heads, kv_heads = map(int, chosen.heads.split("/"))
    device = torch.device("cuda")
    inputs = hot_and_cold_inputs(
        batch,
        keys,
        heads,
        kv_heads,
        chosen.head_dim,
        dtype=torch.bfloat16,
        device=device,
        new_tokens=None if chosen.kernel == "prefill" else 1,
    )
    attend = attention(chosen.kernel, inputs)
    wanted = [float(text) for text in chosen.sparsities.split(",") if text]
    first = chosen.variants[0]
    first.choose(chosen.kernel, 0)
    dialled = dial_sparsity(lambda t: float(attend(t, return_counts=True).counts.sparsity), wanted)
    settings = {"dense": None, "0%": 0.0, **{f"{d.sparsity:.0%}": d.threshold for d in dialled}}
    truth = {name: attend(threshold).out for name, threshold in settings.items()}

    def of(number: int, threshold: float | None) -> Callable[[], Any]:
        def call() -> Any:
            chosen.variants[number].choose(chosen.kernel, number)
            return attend(threshold)

        return call

    baseline = torch_baseline(inputs, causal=chosen.kernel == "prefill")
    calls: dict[str, Callable[[], Any]] = {f"{baseline.name}|dense": baseline.call}
    for number, variant in enumerate(chosen.variants):
        for name, threshold in settings.items():
            call = calls[f"{variant.label}|{name}"] = of(number, threshold)
            if not torch.equal(call().out, truth[name]):
                print(f"{variant.label}, {name}: other bits than {first.label}")
    times = interleaved(calls, device, repeats=chosen.repeats, warmup=2, cold_l2=chosen.kernel == "decode")
    base = times[f"{baseline.name}|dense"].median
    for name, timing in times.items():
        label, setting = name.split("|")
        ratio = base / timing.median
        print(f"{label[-40:]:40s} {setting:6s} {timing.median * 1e3:10.1f} us {ratio:6.3f} x {baseline.name}")


if __name__ == "__main__":
    main()
