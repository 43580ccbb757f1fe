"""Sparse decode against a paged KV cache: two sequences of different length, one new token each."""

import torch

from blasst import blasst_attn_with_kvcache
from blasst.testing import heavy_tailed_inputs


def main() -> None:
    page_size, lengths = 16, (1500, 700)
    q, k, v = heavy_tailed_inputs(2, 1, 2048, 8, 2, 64)

    # Pages of both sequences in one pool; a block table says which page holds which keys.
    pages_each = 2048 // page_size
    k_pages = k.reshape(2 * pages_each, page_size, 2, 64).contiguous()
    v_pages = v.reshape(2 * pages_each, page_size, 2, 64).contiguous()
    block_table = torch.arange(2 * pages_each, dtype=torch.int32).reshape(2, pages_each)

    new_k, new_v = torch.randn(2, 1, 2, 64), torch.randn(2, 1, 2, 64)
    result = blasst_attn_with_kvcache(
        q,
        k_pages,
        v_pages,
        new_k,  # written into the pages at cache_seqlens
        new_v,
        cache_seqlens=torch.tensor(lengths, dtype=torch.int32),
        block_table=block_table,
        threshold=0.001,
        return_counts=True,
    )
    for index, length in enumerate(lengths):
        skipped = result.counts.skipped[index].tolist()
        visited = result.counts.visited[index].tolist()
        print(f"{length + 1} keys: skipped {skipped} of {visited} tiles per KV head")


if __name__ == "__main__":
    main()
