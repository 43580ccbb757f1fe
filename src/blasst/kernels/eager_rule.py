"""The rule on the scores of one query tile: margins, kept tiles, the mass bound and the error budget."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from blasst.core.sequences import visits

_LOWEST = -math.inf


@dataclass(frozen=True)
class ScoredTiles:
    """Scores of one query tile against its visited key tiles.

    Attributes:
        tiles: visited key tiles.
        scores: float32 (heads that vote, rows, tiles * tile.key), invisible = -inf.
        tile_max: (heads, rows, tiles).
        concerned: (rows, tiles) whether the row sees a key of the tile; with a block mask also whether the
            head may attend it, (heads, rows, tiles).
        compare: (heads, rows, tiles) what the rule compares with: running maximum or anchor maximum.
        anchor: bool (tiles,), (heads, tiles) with a block mask, or None in prefill.
        start: (heads, rows) sink logit or -inf.
        begin: (rows,) first visible key.
        end: (rows,) one past the last visible key.
        allowed: bool (heads, tiles), the block mask; None = every tile.
    """

    tiles: range
    scores: Tensor
    tile_max: Tensor
    concerned: Tensor
    compare: Tensor
    anchor: Tensor | None
    start: Tensor
    begin: Tensor
    end: Tensor
    allowed: Tensor | None = None

    def margin(self, rows_per_vote: int | None = None) -> Tensor:
        """(heads, votes, tiles): the tile is skipped at a threshold t iff its margin < ln(t).

        Args:
            rows_per_vote: rows that vote together; default all of them.
        """
        gap = row_margins(self.tile_max, self.compare, self.concerned)
        size = rows_per_vote or gap.shape[1]
        spare = -gap.shape[1] % size
        gap = torch.nn.functional.pad(gap, (0, 0, 0, spare), value=_LOWEST).unflatten(1, (-1, size)).amax(2)
        return gap if self.anchor is None else gap.masked_fill(self.anchor, math.inf)

    def kept(self, log_threshold: Tensor | None) -> Tensor:
        """(heads, tiles): the rule, strict and safe for infinities; NaN keeps; only tiles of a block mask."""
        if log_threshold is None:
            every = torch.ones_like(self.tile_max[:, 0], dtype=torch.bool)
            return every if self.allowed is None else self.allowed.clone()
        agree = (self.tile_max < self.compare + log_threshold) | ~self.concerned
        kept = ~agree.all(1)
        return kept if self.anchor is None else kept | self.anchor

    def kept_within(self, upper: Tensor, lower: Tensor, log_threshold: Tensor) -> Tensor:
        """(heads, tiles): the rule against the final maximum, on bounds of tile_max (heads, rows, tiles)."""
        compare = torch.maximum(self.start, lower.amax(-1))[..., None]
        kept = ~((upper < compare + log_threshold) | ~self.concerned).all(1)
        return kept if self.allowed is None else kept & self.allowed

    @property
    def num_visited(self) -> int | Tensor:
        """Visited tiles; under a block mask (heads,)."""
        return len(self.tiles) if self.allowed is None else self.allowed.sum(-1)

    def screened(self, upper: Tensor, log_threshold: Tensor) -> Tensor:
        """(heads, tiles): the rule on upper bounds of tile_max (heads, rows, tiles); never an anchor."""
        agree = ((upper < self.compare + log_threshold) | ~self.concerned).all(1)
        if self.allowed is not None:
            agree = agree & self.allowed
        return agree if self.anchor is None else agree & ~self.anchor

    def visible(self, tile_key: int) -> Tensor:
        """(rows, tiles * tile_key) bool, whatever the block mask says."""
        first = self.tiles.start * tile_key
        key = torch.arange(first, first + len(self.tiles) * tile_key, device=self.scores.device)
        return (key >= self.begin[:, None]) & (key < self.end[:, None])


def row_margins(tile_max: Tensor, compare: Tensor, concerned: Tensor) -> Tensor:
    """tile_max (heads, rows, tiles) minus compare; inf for NaN, -inf where a row sees nothing."""
    gap = (tile_max - compare).nan_to_num(nan=math.inf, posinf=math.inf, neginf=_LOWEST)
    return gap.masked_fill(~concerned, _LOWEST)


def _group_view(value: Tensor, tile_key: int) -> Tensor:
    """(..., tiles * tile_key) to (..., tiles, tile_key // 32, 4, 4, 2); axes -3 and -1 run inside a group."""
    return value.unflatten(-1, (-1, tile_key // 32, 4, 4, 2))


def _tile_bounds(scored: ScoredTiles, compare: Tensor, tile_key: int) -> tuple[Tensor, Tensor]:
    """Mass bound of each tile (heads, rows, tiles) and its keys that count (..., rows, tiles)."""
    visible = scored.visible(tile_key)
    if scored.allowed is not None:
        visible = visible & scored.allowed.repeat_interleave(tile_key, dim=-1)[:, None]
    count = _group_view(visible, tile_key).sum((-3, -1))
    group_max = _group_view(scored.scores, tile_key).amax((-3, -1))
    term = count * (group_max - compare[..., None, None]).exp()
    bound = term.masked_fill(count == 0, 0.0).sum((-2, -1))
    return bound, count.sum((-2, -1))


def mass_bound_of(scored: ScoredTiles, kept: Tensor, lse: Tensor, tile_key: int) -> Tensor:
    """D / (D + row_sum) per row, with D and row_sum both relative to lse (so row_sum = 1)."""
    if bool(kept.all()):
        return torch.zeros_like(lse)
    bound, _ = _tile_bounds(scored, lse[..., None], tile_key)
    total = bound.masked_fill(kept[:, None], 0.0).sum(-1)
    return torch.where(total == 0, 0.0, total / (total + 1.0))


def within_budget(scored: ScoredTiles, kept: Tensor, eps: float, tile_key: int) -> Tensor:
    """Keep also what the error budget of some row does not allow to skip."""
    bound, count = _tile_bounds(scored, scored.compare, tile_key)
    if scored.anchor is not None:
        anchor_max = scored.compare[..., :1]
        safe = anchor_max.masked_fill(anchor_max == _LOWEST, 0.0)
        weight = (scored.scores - safe).exp().unflatten(-1, (-1, tile_key)).sum(-1)
        anchor = scored.anchor if scored.allowed is None else scored.anchor[:, None]
        row_sum = weight.masked_fill(~anchor, 0.0).sum(-1, keepdim=True)
        row_sum = row_sum + torch.where(
            scored.start[..., None] == _LOWEST, 0.0, (scored.start[..., None] - safe).exp()
        )
        rest = count.masked_fill(anchor, 0).sum(-1, keepdim=True).clamp(min=1)
        afford = (bound <= eps * row_sum * count / rest) | ~scored.concerned
        return kept | ~afford.all(1)
    after = torch.maximum(scored.compare, scored.tile_max)
    safe = after.masked_fill(after == _LOWEST, 0.0)
    tile_sum = (scored.scores.unflatten(-1, (-1, tile_key)) - safe[..., None]).exp().sum(-1)
    rescale = torch.where(scored.compare == after, 1.0, (scored.compare - safe).exp())
    kept = kept.clone()
    row_sum = (scored.start > _LOWEST).float()
    skipped = torch.zeros_like(row_sum)
    for j, heads in visits(range(len(scored.tiles)), "sink_first", scored.allowed):
        afford = (skipped + bound[..., j] <= eps * row_sum) | ~scored.concerned[..., j]
        now = torch.ones_like(kept[:, j]) if heads is None else heads
        kept[:, j] |= now & ~afford.all(1)
        keep, drop = (kept[:, j] & now)[:, None], (~kept[:, j] & now)[:, None]
        skipped = torch.where(
            keep, skipped * rescale[..., j], skipped + torch.where(drop, bound[..., j], 0.0)
        )
        row_sum = torch.where(keep, row_sum * rescale[..., j] + tile_sum[..., j], row_sum)
    return kept
