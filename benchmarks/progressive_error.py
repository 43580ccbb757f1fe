"""How far progressive keys lie from the keys that came, beside bfloat16; no times.

python benchmarks/progressive_error.py qkv.pt --bits 6
python benchmarks/progressive_error.py --generated --bits 6

Keys are those of a capture (`benchmarks/capture_qkv.py`) in the dtype that it has, or generated ones in
float32. The width of a channel is that of its largest less its smallest key in a tile of 64; an error
counts relative to it, so that channels add up. "fixed point" is what is stored, before it is rounded to a
dtype. "progressive" is a store of keys that were bfloat16 (float16) already, against these.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from torch import Tensor

from blasst import ProgressiveKeys
from blasst.core.key_codes import encode
from blasst.testing import heavy_tailed_inputs


def tiles_of(k: Tensor) -> Tensor:
    """Whole tiles (tiles, heads, 64, dim) of keys (batch, seqlen, heads, dim), float64."""
    whole = k[:, : k.shape[1] // 64 * 64].double()
    return whole.unflatten(1, (-1, 64)).flatten(0, 1).transpose(1, 2)


def line(name: str, got: Tensor, want: Tensor, width: Tensor) -> str:
    """Largest and root-mean-square error over the width, and the share of keys that are the same."""
    error = torch.where(width > 0, (got - want).abs() / width, 0.0)
    same = (got == want).double().mean()
    return f"  {name:<34} max {error.max():.2e}  rms {error.square().mean().sqrt():.2e}  same {same:.2%}"


def report(name: str, k: Tensor, bits: int) -> None:
    """Print the errors of one set of keys."""
    keys = tiles_of(k)
    width = keys.amax(-2, keepdim=True) - keys.amin(-2, keepdim=True)
    print(
        f"{name}, {k.dtype}, {keys.shape[0]} tiles x {keys.shape[1]} KV heads x {keys.shape[-1]}, {bits} bits"
    )
    low, step, code = encode(keys, bits, 16 - bits)
    fixed = low.double()[..., None, :] + step.double()[..., None, :] * 2.0 ** (bits - 16) * (code + 0.5)
    print(line("fixed point", fixed, keys, width))
    for dtype in (torch.bfloat16, torch.float16):
        word = str(dtype).removeprefix("torch.")
        rounded = k.to(dtype)
        print(line(f"{word}", tiles_of(rounded), keys, width))
        stored = tiles_of(ProgressiveKeys.from_keys(rounded, bits).keys())
        print(line(f"progressive, from {word}", stored, tiles_of(rounded), width))
        print(line("the same, from the keys that came", stored, keys, width))


def main() -> None:
    """Print one table for each set of keys."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("captures", type=Path, nargs="*")
    parser.add_argument("--generated", action="store_true", help="generated keys of three kinds")
    parser.add_argument("--bits", type=int, default=6, help="upper bits (default: 6)")
    options = parser.parse_args()
    for path in options.captures:
        found = torch.load(path, weights_only=True)
        report(str(found["name"]), found["k"], options.bits)
    if options.generated:
        normal = torch.randn(1, 4096, 4, 128, generator=torch.Generator().manual_seed(0))
        report("normal", normal, options.bits)
        report("normal, mean 3", normal + 3, options.bits)
        report("heavy-tailed", heavy_tailed_inputs(1, 1, 4096, 8, 4, 128).k, options.bits)


if __name__ == "__main__":
    main()
