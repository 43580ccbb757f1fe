"""A batch taken apart into sequences, and which keys a row may see."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from blasst.core.problem import AttentionProblem
from blasst.core.types import FP8, TileShape, VisitingOrder, num_tiles


@dataclass(frozen=True)
class SequenceView:
    """One sequence of a batch; k and v hold its real keys only, times their descale.

    Attributes:
        index: position in the batch.
        q: (seqlen_q, num_heads, head_dim).
        k: (seqlen_k, num_kv_heads, head_dim).
        v: (seqlen_k, num_kv_heads, head_dim_v).
        rows: where its rows stand in a packed tensor, or in its own row block of a batched one.
    """

    index: int
    q: Tensor
    k: Tensor
    v: Tensor
    rows: slice


def keys_of_pages(cache: Tensor, table: Tensor, length: int) -> Tensor:
    """The first `length` slots of a paged sequence; entries of the table past need are not read."""
    page_size = cache.shape[1]
    pages = table[: num_tiles(length, page_size)].long()
    bits = cache.view(torch.uint8) if cache.dtype == FP8 else cache  # torch indexes no fp8 on a CPU
    return bits[pages].view(cache.dtype).flatten(0, 1)[:length]


def _descaled(x: Tensor, descale: Tensor | None, index: int) -> Tensor:
    """The real keys or values of a sequence (seqlen_k, num_kv_heads, dim)."""
    return x if descale is None else x.float() * descale[index, :, None]


def split_sequences(problem: AttentionProblem) -> Iterator[SequenceView]:
    """Yield each sequence of a problem; reads lengths on the host."""
    cu_q = problem.cu_seqlens_q.tolist() if problem.cu_seqlens_q is not None else None
    cu_k = problem.cu_seqlens_k.tolist() if problem.cu_seqlens_k is not None else None
    used = problem.seqused_k.tolist() if problem.seqused_k is not None else None
    pad = problem.leftpad_k.tolist() if problem.leftpad_k is not None else None
    for index in range(problem.batch_size):
        if cu_q is not None:
            rows = slice(cu_q[index], cu_q[index + 1])
            q = problem.q[rows]
        else:
            rows = slice(0, problem.q.shape[1])
            q = problem.q[index]
        begin = 0
        if cu_k is not None:
            begin, end = cu_k[index], cu_k[index + 1]
            if problem.block_table is not None:
                begin, end = 0, end - begin
        else:
            end = problem.max_seqlen_k
        if used is not None:
            end = begin + used[index]
        if problem.block_table is not None:
            k = keys_of_pages(problem.k, problem.block_table[index], end)
            v = keys_of_pages(problem.v, problem.block_table[index], end)
        elif cu_k is not None:
            k, v = problem.k[begin:end], problem.v[begin:end]
        else:
            k, v = problem.k[index, :end], problem.v[index, :end]
        if pad is not None:
            k, v = k[pad[index] :], v[pad[index] :]
        k, v = _descaled(k, problem.k_descale, index), _descaled(v, problem.v_descale, index)
        yield SequenceView(index, q, k, v, rows)


def visible_range(
    row: Tensor, seqlen_q: int, seqlen_k: int, causal: bool, window_size: tuple[int, int]
) -> tuple[Tensor, Tensor]:
    """First visible key and one past the last, per row; begin >= end for a row that sees nothing.

    Args:
        row: int64 row numbers of a sequence, any shape.
        seqlen_q: rows of the sequence.
        seqlen_k: keys of the sequence.
        causal: bottom-right aligned: row i sees keys <= i + seqlen_k - seqlen_q.
        window_size: (left, right) around the aligned position; -1 = unlimited.
    """
    position = row + (seqlen_k - seqlen_q)
    left, right = window_size
    if causal:
        right = 0 if right < 0 else min(right, 0)
    begin = (position - left).clamp(min=0) if left >= 0 else torch.zeros_like(position)
    end = (position + right + 1).clamp(max=seqlen_k) if right >= 0 else torch.full_like(position, seqlen_k)
    return begin, end


def visited_tiles(begin: Tensor, end: Tensor, tile_key: int) -> range:
    """Key tiles in which at least one of the rows sees a key; one run of tiles, since ranges slide."""
    sees = begin < end
    if not bool(sees.any()):
        return range(0)
    first = int(begin[sees].min()) // tile_key
    return range(first, num_tiles(int(end[sees].max()), tile_key))


def visiting_order(tiles: range, order: VisitingOrder) -> list[int]:
    """The tiles of a prefill query tile in the order in which they are visited."""
    if order == "ascending" or len(tiles) == 0:
        return list(tiles)
    if order == "descending":
        return list(reversed(tiles))
    return [tiles[0], *reversed(tiles[1:])]


def anchor_tiles(begin: Tensor, end: Tensor, tile_key: int) -> set[int]:
    """Union over rows of the first and the last two visible key tiles (the decode rule keeps them)."""
    anchors: set[int] = set()
    for first_key, last_key in zip(begin.tolist(), (end - 1).tolist(), strict=True):
        if last_key >= first_key:
            first, last = first_key // tile_key, last_key // tile_key
            anchors |= {first, last, max(last - 1, first)}
    return anchors


def visits(tiles: range, order: VisitingOrder, allowed: Tensor | None) -> list[tuple[int, Tensor | None]]:
    """The visits of a prefill query tile in order: a key tile, and which heads visit it then (None = all).

    Under a block mask heads differ in their first tile, so a tile may come twice, for different heads.

    Args:
        tiles: key tiles with a visible pair.
        order: visiting order.
        allowed: bool (heads, key tiles), the block mask from key tile 0 on, or None.
    """
    if allowed is None:
        return [(j, None) for j in visiting_order(tiles, order)]
    if order != "sink_first":
        return [(j, allowed[:, j]) for j in visiting_order(tiles, order)]
    first = allowed & first_true(allowed[:, tiles.start : tiles.stop], tiles.start, allowed.shape[1])
    plan: list[tuple[int, Tensor | None]] = [(j, first[:, j]) for j in tiles if bool(first[:, j].any())]
    plan += [(j, allowed[:, j] & ~first[:, j]) for j in reversed(tiles)]
    return plan


def first_true(flags: Tensor, start: int, width: int) -> Tensor:
    """Marks the first True of each row of flags (..., n), placed at columns start.. of (..., width)."""
    marked = flags.new_zeros((*flags.shape[:-1], width))
    marked[..., start : start + flags.shape[-1]] = flags & (flags.cumsum(-1) == 1)
    return marked


def anchors_under_mask(concerned: Tensor) -> Tensor:
    """Anchor tiles when a block mask leaves tiles out: of each row the first and the last two that are left.

    Args:
        concerned: bool (heads, rows, tiles), the row sees a key of the tile and the mask keeps it.

    Returns:
        bool (heads, tiles), the union over rows.
    """
    from_left = concerned.cumsum(-1)
    from_right = from_left[..., -1:] - from_left + concerned
    return (concerned & ((from_left == 1) | (from_right <= 2))).any(1)


def map_shape(problem: AttentionProblem, tile: TileShape) -> tuple[int, int, int, int]:
    """Shape of the kept map: (batch, heads that vote, query tiles, key tiles)."""
    if tile.query is None:
        heads, query_tiles = problem.num_kv_heads, 1 if problem.max_seqlen_q > 0 else 0
    else:
        heads, query_tiles = problem.num_heads, num_tiles(problem.max_seqlen_q, tile.query)
    return problem.batch_size, heads, query_tiles, num_tiles(problem.max_seqlen_k, tile.key)
