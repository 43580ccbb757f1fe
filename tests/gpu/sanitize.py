"""Small calls of the Hopper kernel, to be run under compute-sanitizer.

compute-sanitizer --tool memcheck --kernel-regex kns=prefill python tests/gpu/sanitize.py
"""

from __future__ import annotations

import torch

from blasst import blasst_attn_func, blasst_attn_varlen_func, blasst_attn_with_kvcache
from blasst.testing import heavy_tailed_inputs, pages_from


def main() -> None:
    """Dense, skipping, with bound and budget; contiguous, packed and paged; nothing, some and all skipped."""
    for head_dim, dtype in ((128, torch.bfloat16), (64, torch.float16)):
        x = heavy_tailed_inputs(2, 300, 700, 3, 1, head_dim, dtype=dtype, device="cuda", block=128)
        everything = {"return_counts": True, "return_kept_tiles": True, "impl": "hopper", "causal": True}
        for threshold in (None, 0.0, 0.01, 1.0):
            blasst_attn_func(*x, threshold=threshold, **everything)
        blasst_attn_func(*x, threshold=0.1, return_mass_bound=True, window_size=(200, 0), **everything)
        blasst_attn_func(*x, threshold=1.0, max_skipped_mass=0.1, softcap=20.0, **everything)
        ends_q = torch.tensor([0, 0, 130, 300], dtype=torch.int32, device="cuda")
        ends_k = torch.tensor([0, 50, 333, 700], dtype=torch.int32, device="cuda")
        packed = (x.q[0], x.k[0], x.v[0], ends_q, ends_k, 170, 367)
        blasst_attn_varlen_func(*packed, threshold=0.01, **everything)
        pages_k, table = pages_from(x.k, 32, fill=torch.nan)
        pages_v, _ = pages_from(x.v, 32, fill=torch.nan)
        lengths = torch.tensor([700, 301], dtype=torch.int32, device="cuda")
        blasst_attn_with_kvcache(
            x.q, pages_k, pages_v, cache_seqlens=lengths, block_table=table, threshold=0.01, **everything
        )
    torch.cuda.synchronize()
    print("done")


if __name__ == "__main__":
    main()
