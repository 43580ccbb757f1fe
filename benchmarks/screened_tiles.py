"""How many of the tiles that decode skips its key codes can tell, on captured attention; no times.

python benchmarks/screened_tiles.py qkv.pt --sparsities 0.65,0.8 --steps 4

The last positions of the capture (`benchmarks/capture_qkv.py`), or of its first `--length` tokens, are decode
steps, each against the keys up to its own. All steps have one threshold per sparsity. Every screened call is
compared with the plain one, bit for bit.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from torch import Tensor

from blasst import AttentionOutput, KeyCodes, blasst_attn_with_kvcache
from blasst.bench.inputs import Inputs, captured_inputs
from blasst.core.key_codes import CODE_BITS
from blasst.kernels.eager import decode_margins


def threshold_at(margins: list[Tensor], sparsity: float) -> float:
    """The threshold that skips about a share of the visited tiles of all steps, at most 1."""
    ordered = torch.cat([margin.flatten() for margin in margins]).sort().values
    return min(1.0, float(ordered[int(sparsity * (len(ordered) - 1))].exp()))


def decode(inputs: Inputs, length: int, threshold: float, codes: KeyCodes | None) -> AttentionOutput:
    """The step whose new token is the last of so many."""
    return blasst_attn_with_kvcache(
        inputs.q[:, length - 1 : length],
        inputs.k,
        inputs.v,
        cache_seqlens=length,
        threshold=threshold,
        softmax_scale=inputs.softmax_scale,
        screen=codes,
        return_lse=True,
        return_counts=True,
        return_kept_tiles=True,
        impl="eager",
    )


def share_screened(inputs: Inputs, lengths: range, threshold: float, codes: KeyCodes) -> tuple[float, float]:
    """(skipped over visited, screened over skipped), summed over the steps.

    Raises:
        RuntimeError: a screened call differs from the plain one.
    """
    totals = torch.zeros(3)
    for length in lengths:
        plain, got = (decode(inputs, length, threshold, x) for x in (None, codes))
        same = (torch.equal(getattr(plain, x), getattr(got, x)) for x in ("out", "lse", "kept_tiles"))
        if not all(same) or not torch.equal(plain.counts.skipped, got.counts.skipped):
            raise RuntimeError(f"{length} keys, threshold {threshold:g}: screening changed a result")
        totals += torch.tensor(
            [x.sum() for x in (got.counts.visited, got.counts.skipped, got.counts.screened)]
        )
    visited, skipped, screened = totals.tolist()
    return skipped / visited, screened / max(skipped, 1)


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("capture", type=Path)
    parser.add_argument("--length", type=int, help="first tokens of the capture (default: all)")
    parser.add_argument("--steps", type=int, default=4, help="decode steps, the last positions (default: 4)")
    parser.add_argument("--sparsities", default="0.65,0.8", help="default: 0.65,0.8")
    options = parser.parse_args()
    inputs = captured_inputs(options.capture, dtype=torch.bfloat16, device=torch.device("cpu"))
    length = options.length or inputs.k.shape[1]
    lengths = range(length - options.steps + 1, length + 1)
    codes = [KeyCodes.from_keys(inputs.k, bits) for bits in CODE_BITS]
    margins = [
        decode_margins(inputs.q[0, n - 1 : n], inputs.k[0, :n], softmax_scale=inputs.softmax_scale)[1]
        for n in lengths
    ]
    print(f"{inputs.name}, {length} keys, {options.steps} steps")
    for sparsity in map(float, options.sparsities.split(",")):
        threshold = threshold_at(margins, sparsity)
        shares = [share_screened(inputs, lengths, threshold, x) for x in codes]
        told = ", ".join(f"{x.bits} bits {share:.1%}" for x, (_, share) in zip(codes, shares, strict=True))
        print(f"threshold {threshold:.2e} skips {shares[0][0]:.1%}; of these are screened: {told}")


if __name__ == "__main__":
    main()
