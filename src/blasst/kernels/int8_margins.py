"""Margins of `screen="int8"`, for counting: the bounds of its rule, without scores."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from blasst.core.int8_screen import Int8Keys, Int8Rows, score_bounds
from blasst.core.sequences import visible_range, visited_tiles
from blasst.core.types import PREFILL_TILE
from blasst.kernels.eager_rule import row_margins


def screened_margins(
    q: Tensor,
    k: Tensor,
    *,
    softmax_scale: float,
    causal: bool,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    sinks: Tensor | None = None,
) -> Iterator[tuple[int, int, Tensor]]:
    """`blasst.kernels.eager.prefill_margins` of a call that is screened in int8.

    Args:
        q: (seqlen_q, num_heads, head_dim); what the statistics of the channels are taken from, so all rows
            of the call.
        k: (seqlen_k, num_kv_heads, head_dim).
        softmax_scale: factor on q . k.
        causal: bottom-right aligned.
        window_size: (left, right), -1 = unlimited.
        softcap: 0 = none.
        sinks: (num_heads,) or None.

    Yields:
        (query tile, first visited key tile, margin float32 (num_heads, visited key tiles)).
    """
    keys, size = Int8Keys.of(k, q, torch.float32), PREFILL_TILE.key
    assert PREFILL_TILE.query is not None
    for i, part in enumerate(q.split(PREFILL_TILE.query)):
        row = i * PREFILL_TILE.query + torch.arange(part.shape[0])
        begin, end = visible_range(row, q.shape[0], k.shape[0], causal, window_size)
        tiles = visited_tiles(begin, end, size)
        if len(tiles) == 0:
            continue
        key = torch.arange(tiles.start * size, tiles.stop * size)
        visible = ((key >= begin[:, None]) & (key < end[:, None])).to(q.device)
        rows = Int8Rows.of(part.transpose(0, 1), softmax_scale, keys)
        upper, lower = score_bounds(rows, keys, tiles, visible, softcap)
        compare = lower.amax(-1, keepdim=True)  # the row maximum is no smaller
        if sinks is not None:
            compare = torch.maximum(compare, sinks.float()[:, None, None])
        concerned = visible.unflatten(-1, (-1, size)).any(-1)
        yield i, tiles.start, row_margins(upper, compare, concerned).amax(1)
