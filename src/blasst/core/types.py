"""The fixed vocabulary: phases, tile shapes, counts and the one output tuple."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

Phase = Literal["prefill", "decode"]
VisitingOrder = Literal["sink_first", "descending", "ascending"]

PHASES: tuple[Phase, ...] = ("prefill", "decode")

#: New tokens per sequence up to which a call against a cache follows the decode rule.
MAX_DECODE_TOKENS = 8

#: The 8-bit dtype that a KV cache may have; finite up to 448, NaN, no infinity.
FP8 = torch.float8_e4m3fn

#: Keys of a tile that share one maximum in the mass bound.
MASS_GROUP_SIZE = 8


@dataclass(frozen=True)
class TileShape:
    """The shape in which rows vote; part of the meaning of a threshold.

    Attributes:
        query: rows of one query tile; None means all query heads of a KV head x all new tokens (decode).
        key: consecutive keys of one key tile; a multiple of 32.
    """

    query: int | None
    key: int


PREFILL_TILE = TileShape(query=64, key=128)
DECODE_TILE = TileShape(query=None, key=64)


class SkipCounts(NamedTuple):
    """Skipped and visited tiles, int64, on the device of the inputs.

    Attributes:
        skipped: (batch, num_heads) in prefill, (batch, num_kv_heads) in decode.
        visited: the same shape.
        screened: the same shape, skipped tiles whose scores were not needed; None without screen=.
    """

    skipped: Tensor
    visited: Tensor
    screened: Tensor | None = None

    @property
    def sparsity(self) -> Tensor:
        """Skipped over visited, summed over everything; float64 scalar, 0 when nothing was visited."""
        return self.skipped.sum().double() / self.visited.sum().clamp(min=1)


class AttentionOutput(NamedTuple):
    """What every public attention function returns; parts that were not asked for are None.

    Attributes:
        out: (batch, seqlen_q, num_heads, head_dim_v), packed (total_q, num_heads, head_dim_v); dtype of q.
        lse: float32, natural log, of the kept tiles and the sink; (batch, num_heads, seqlen_q), packed
            (num_heads, total_q); -inf for a row that sees nothing.
        counts: skipped and visited tiles.
        mass_bound: float32, shape of lse; upper bound of the row's skipped softmax weight.
        kept_tiles: bool, (batch, num_heads, query tiles, key tiles) in prefill,
            (batch, num_kv_heads, 1, key tiles) in decode; True = visited and kept.
    """

    out: Tensor
    lse: Tensor | None
    counts: SkipCounts | None
    mass_bound: Tensor | None
    kept_tiles: Tensor | None


def in_dense_tail(first_row: int, seqlen_q: int, tile_query: int, dense_tail: int) -> bool:
    """Whether the query tile that begins at a row holds one of a sequence's last `dense_tail` rows."""
    return min(first_row + tile_query, seqlen_q) + dense_tail > seqlen_q


def num_tiles(length: int, tile: int) -> int:
    """Tiles of a size needed to cover a length."""
    return -(-length // tile)


def group_of_key(tile_key: int) -> Tensor:
    """Group index of each key of a tile: group(c) = (c // 32) * 4 + (c % 8) // 2, int64 (tile_key,).

    These are the keys that one lane of a wgmma accumulator row owns, so a Hopper kernel needs no shuffle.
    """
    key = torch.arange(tile_key)
    return (key // 32) * 4 + (key % 8) // 2
