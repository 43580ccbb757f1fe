"""Tiles of a prompt or a cache: which are visible, their means, and choices among scored tiles."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from blasst.core.sequences import visible_range
from blasst.core.types import DECODE_TILE, PREFILL_TILE, num_tiles

QUERY = PREFILL_TILE.query or 1
KEY = PREFILL_TILE.key
DECODE_KEY = DECODE_TILE.key


@dataclass(frozen=True)
class PromptTiles:
    """The tile grid of one prompt.

    Attributes:
        seqlen_q: rows.
        seqlen_k: keys.
        causal: bottom-right aligned.
        device: of the masks.
    """

    seqlen_q: int
    seqlen_k: int
    causal: bool
    device: torch.device

    @staticmethod
    def of(q: Tensor, k: Tensor, causal: bool) -> PromptTiles:
        """The grid of (batch, seqlen, heads, head_dim) tensors.

        Args:
            q: queries.
            k: keys.
            causal: bottom-right aligned.
        """
        return PromptTiles(q.shape[1], k.shape[1], causal, q.device)

    @property
    def offset(self) -> int:
        """Position of row 0."""
        return self.seqlen_k - self.seqlen_q

    @property
    def shape(self) -> tuple[int, int]:
        """(query tiles, key tiles)."""
        return num_tiles(self.seqlen_q, QUERY), num_tiles(self.seqlen_k, KEY)

    def _ends(self) -> tuple[Tensor, Tensor]:
        """Rows that see keys, and one past the last key of each."""
        row = torch.arange(self.seqlen_q, device=self.device)
        _, end = visible_range(row, self.seqlen_q, self.seqlen_k, self.causal, (-1, -1))
        return row[end > 0], end[end > 0]

    def visible(self) -> Tensor:
        """bool (query tiles, key tiles): some row sees some key."""
        row, end = self._ends()
        longest = torch.zeros(self.shape[0], dtype=torch.int64, device=self.device)
        longest = longest.scatter_reduce(0, row // QUERY, end, "amax")
        return torch.arange(self.shape[1], device=self.device) * KEY < longest[:, None]

    def last(self) -> Tensor:
        """bool (query tiles, key tiles): the tile of some row's last visible key (causal: the diagonal)."""
        row, end = self._ends()
        mask = torch.zeros(self.shape, dtype=torch.bool, device=self.device)
        mask[row // QUERY, (end - 1) // KEY] = True
        return mask

    def first(self) -> Tensor:
        """bool (query tiles, key tiles): the first key tile, where visible."""
        mask = self.visible()
        mask[:, 1:] = False
        return mask


def tile_means(x: Tensor, size: int) -> Tensor:
    """Mean vector of each tile of positions; a last tile counts its real ones only.

    Args:
        x: (batch, heads, seqlen, dim).
        size: positions of a tile.

    Returns:
        (batch, heads, tiles, dim).
    """
    return tile_sums(x.transpose(2, 3), size).transpose(2, 3) / tile_lengths(x.shape[2], size, x)[:, None]


def tile_sums(x: Tensor, size: int) -> Tensor:
    """Sums over tiles of the last dimension.

    Args:
        x: (..., seqlen).
        size: positions of a tile.

    Returns:
        (..., tiles).
    """
    return torch.nn.functional.pad(x, (0, -x.shape[-1] % size)).unflatten(-1, (-1, size)).sum(-1)


def tile_lengths(seqlen: int, size: int, like: Tensor) -> Tensor:
    """Real positions of each tile, (tiles,).

    Args:
        seqlen: positions.
        size: positions of a tile.
        like: tensor whose dtype and device are taken.
    """
    return tile_sums(like.new_ones(seqlen), size)


def smallest_set(mass: Tensor, share: float, candidates: Tensor, always: Tensor) -> Tensor:
    """The fewest tiles that hold a share of the mass, those always kept first, then by falling mass.

    Args:
        mass: (..., n), not negative.
        share: in [0, 1]; 1 keeps every candidate.
        candidates: bool, broadcast to (..., n).
        always: bool, broadcast to (..., n); a subset of the candidates.

    Returns:
        bool (..., n); grows with share.
    """
    candidates, always = candidates.expand(mass.shape), always.expand(mass.shape)
    if share >= 1:
        return candidates.clone()
    mass = mass.masked_fill(~candidates, 0.0)
    order = _falling(mass, candidates, always)
    sorted_mass = mass.gather(-1, order)
    before = sorted_mass.cumsum(-1) - sorted_mass
    needed = before < share * mass.sum(-1, keepdim=True)
    chosen = torch.zeros_like(candidates).scatter(-1, order, needed)
    return (chosen & candidates) | always


def largest(score: Tensor, count: int | Tensor, candidates: Tensor, always: Tensor) -> Tensor:
    """The tiles with the highest scores, those always kept among the count.

    Args:
        score: (..., n).
        count: how many, at least as many as are always kept; int, or (..., 1).
        candidates: bool, broadcast to (..., n).
        always: bool, broadcast to (..., n); a subset of the candidates.

    Returns:
        bool (..., n); grows with count.
    """
    candidates, always = candidates.expand(score.shape), always.expand(score.shape)
    order = _falling(score, candidates, always)
    rank = torch.arange(score.shape[-1], device=score.device).expand(score.shape)
    chosen = torch.zeros_like(candidates).scatter(-1, order, rank < count)
    return (chosen & candidates) | always


def _falling(score: Tensor, candidates: Tensor, always: Tensor) -> Tensor:
    """Order of the last dimension: always kept, then by falling score, then what is no candidate."""
    key = score.nan_to_num(nan=math.inf).masked_fill(~candidates, -math.inf).masked_fill(always, math.inf)
    return key.sort(dim=-1, descending=True, stable=True).indices


def tiles_from(key: int, k: Tensor) -> Tensor:
    """bool (tiles,) of a cache: the tile that holds a key, and all after it.

    Args:
        key: position; past the end, the last tile.
        k: (batch, seqlen_k, num_kv_heads, head_dim).
    """
    tile = torch.arange(num_tiles(k.shape[1], DECODE_KEY), device=k.device)
    return tile >= min(key, k.shape[1] - 1) // DECODE_KEY


def new_tiles(new_tokens: int, k: Tensor) -> Tensor:
    """bool (tiles,) of a cache: the tiles of its last tokens, of which each new row sees one at least.

    Args:
        new_tokens: how many are new.
        k: (batch, seqlen_k, num_kv_heads, head_dim), new ones included.
    """
    return tiles_from(max(k.shape[1] - new_tokens, 0), k)


def share_of(dial: float, total: int) -> int:
    """Tiles of a share, rounded up against noise of the product.

    Args:
        dial: share in [0, 1].
        total: tiles.
    """
    return min(total, math.ceil(dial * total - 1e-9))
