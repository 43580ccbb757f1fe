"""Sparse prefill on inputs that look like trained attention: how much is skipped, and what it costs."""

import torch

from blasst import blasst_attn_func
from blasst.testing import heavy_tailed_inputs


def main() -> None:
    # batch, rows, keys, heads, KV heads, head_dim; cold blocks of keys lie 2 to 12 nats below the hot ones
    q, k, v = heavy_tailed_inputs(1, 1024, 1024, 8, 2, 64, hot_fraction=0.1, drop=(2.0, 12.0))
    dense = blasst_attn_func(q, k, v, causal=True)
    print("threshold  sparsity  largest |out - dense|")
    for threshold in (0.0, 0.0001, 0.001, 0.01):
        sparse = blasst_attn_func(q, k, v, causal=True, threshold=threshold, return_counts=True)
        error = (sparse.out - dense.out).abs().max().item()
        print(f"{threshold:9g}  {sparse.counts.sparsity.item():8.3f}  {error:.2e}")

    # The same setting for every length: the threshold of a sequence is the factor over its number of keys.
    scaled = blasst_attn_func(q, k, v, causal=True, threshold_scale_factor=1.024, return_counts=True)
    fixed = blasst_attn_func(q, k, v, causal=True, threshold=0.001)
    print("scale factor 1.024 at 1024 keys is threshold 0.001:", torch.equal(scaled.out, fixed.out))


if __name__ == "__main__":
    main()
