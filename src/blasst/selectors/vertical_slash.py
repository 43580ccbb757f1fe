"""Lines of an attention map: columns of key tiles and bands of diagonals, weighed by the last rows.

Both methods that choose lines work on single columns and diagonals. A single column or diagonal touches whole
tiles, and a few dozen scattered ones touch them all. So lines are as wide as tiles here: a column is a key
tile of 128, a diagonal is a band of 64 offsets between a row's position and a key.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from blasst.selectors.selector import repeat_heads
from blasst.selectors.tiles import KEY, QUERY, PromptTiles, tile_sums

#: Offsets of one diagonal band.
BAND = 64


@dataclass(frozen=True)
class Lines:
    """Softmax weight of the last rows by line.

    Attributes:
        columns: (batch, num_heads, key tiles).
        bands: (batch, num_heads, bands); band b holds the offsets (b - zero) * 64 and the next 63.
        zero: the band that begins at offset 0, the main diagonal.
        weight: (batch, num_heads, rows, seqlen_k) of the last rows.
    """

    columns: Tensor
    bands: Tensor
    zero: int
    weight: Tensor

    def real_bands(self, causal: bool) -> Tensor:
        """bool (bands,): those that hold visible pairs.

        Args:
            causal: whether negative offsets are invisible.
        """
        band = torch.arange(self.bands.shape[-1], device=self.bands.device)
        return band >= (self.zero if causal else 0)


def line_weights(q: Tensor, k: Tensor, rows: int, grid: PromptTiles, scale: float) -> Lines:
    """Attention of the last rows, summed along lines.

    Args:
        q: (batch, seqlen_q, num_heads, head_dim).
        k: (batch, seqlen_k, num_kv_heads, head_dim).
        rows: how many last rows speak for all.
        grid: the prompt's tiles.
        scale: softmax scale.

    Raises:
        ValueError: rows is not positive.
    """
    if rows < 1:
        raise ValueError(f"rows: got {rows}, want at least 1")
    rows = min(rows, grid.seqlen_q)
    last = q[:, -rows:].float().transpose(1, 2)
    scores = last @ repeat_heads(k, q.shape[2]).transpose(-1, -2) * scale
    position = torch.arange(grid.seqlen_k - rows, grid.seqlen_k, device=q.device)
    offset = position[:, None] - torch.arange(grid.seqlen_k, device=q.device)  # (rows, keys)
    if grid.causal:
        scores = scores.masked_fill(offset < 0, -math.inf)
    weight = scores.softmax(-1).nan_to_num(0.0)
    zero = -(-grid.seqlen_k // BAND)
    band = offset // BAND + zero
    count = zero + -(-grid.seqlen_k // BAND)
    bands = weight.new_zeros(*weight.shape[:2], count)
    bands.scatter_add_(-1, band.flatten().expand(*weight.shape[:2], -1), weight.flatten(2))
    return Lines(tile_sums(weight.sum(-2), KEY), bands, zero, weight)


def tiles_on_lines(columns: Tensor, bands: Tensor, zero: int, grid: PromptTiles) -> Tensor:
    """Tiles that a chosen line touches.

    Args:
        columns: bool (batch, num_heads, key tiles).
        bands: bool (batch, num_heads, bands).
        zero: as in Lines.
        grid: the prompt's tiles.

    Returns:
        bool (batch, num_heads, query tiles, key tiles), visible tiles only.
    """
    query_tiles, key_tiles = grid.shape
    first_row = torch.arange(query_tiles, device=grid.device) * QUERY
    last_row = (first_row + QUERY - 1).clamp(max=grid.seqlen_q - 1)
    first_key = torch.arange(key_tiles, device=grid.device) * KEY
    last_key = (first_key + KEY - 1).clamp(max=grid.seqlen_k - 1)
    low = first_row[:, None] + grid.offset - last_key
    if grid.causal:
        low = low.clamp(min=0)
    high = last_row[:, None] + grid.offset - first_key
    before = torch.nn.functional.pad(bands.long().cumsum(-1), (1, 0))  # chosen bands left of one
    at_low = (low // BAND + zero).clamp(min=0, max=bands.shape[-1])
    at_high = (high // BAND + zero + 1).clamp(min=0, max=bands.shape[-1])
    touched = before[..., at_high] > before[..., at_low]
    return (touched | columns[..., None, :]) & grid.visible()
