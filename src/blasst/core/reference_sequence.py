"""The reference's rule on one sequence: the tiles of a query tile, visited one after the other."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from blasst.core.int8_screen import Int8Keys, Int8Rows, score_bounds
from blasst.core.problem import AttentionProblem
from blasst.core.screen import upper_scores
from blasst.core.sequences import (
    SequenceView,
    anchor_tiles,
    anchors_under_mask,
    visible_range,
    visited_tiles,
    visits,
)
from blasst.core.threshold import effective_log_threshold
from blasst.core.types import TileShape, VisitingOrder, group_of_key, in_dense_tail
from blasst.core.values import weighted_values


@dataclass
class Rows:
    """State of the rows of one query tile: (heads, rows), and (heads, rows, head_dim_v) for acc."""

    row_max: Tensor
    row_sum: Tensor
    acc: Tensor
    bound: Tensor  # D of the mass bound, relative to row_max
    skipped: Tensor  # sum of exp(s - row_max) over skipped keys


class SequenceSolver:
    """Rows of one sequence, grouped into the query tiles that vote together."""

    def __init__(
        self,
        problem: AttentionProblem,
        sequence: SequenceView,
        tile: TileShape,
        order: VisitingOrder,
        dtype: torch.dtype,
    ) -> None:
        self.problem, self.tile, self.order, self.index = problem, tile, order, sequence.index
        self.seqlen_q, num_heads = sequence.q.shape[:2]
        self.seqlen_k, num_kv_heads = sequence.k.shape[:2]
        self.group = num_heads // num_kv_heads
        self.q = sequence.q.to(dtype)
        self.coded = None  # what 8-bit copies are made of: the rows as they came, and the keys' copies
        if problem.int8_screen:
            wide = torch.promote_types(dtype, torch.float32)
            self.coded = sequence.q, Int8Keys.of(sequence.k, sequence.q, wide)
        per_head = 1 if tile.query is None else self.group
        self.k = sequence.k.to(dtype).transpose(0, 1).repeat_interleave(per_head, dim=0)  # (heads, keys, dim)
        self.v = sequence.v.to(dtype).transpose(0, 1).repeat_interleave(per_head, dim=0)
        self.sinks = None if problem.sinks is None else problem.sinks.to(dtype)
        self.num_query_tiles = (
            min(1, self.seqlen_q) if tile.query is None else -(-self.seqlen_q // tile.query)
        )
        mask = problem.block_mask
        self.block_mask = None if mask is None else mask[sequence.index]  # (heads, query tiles, key tiles)
        self.log_threshold: Tensor | None = None
        if problem.threshold is not None:
            self.log_threshold = effective_log_threshold(problem.threshold)[sequence.index].to(dtype)

    def rows_of(self, i: int) -> tuple[Tensor, Tensor]:
        """Row and head numbers (heads that vote, rows) of query tile i; rows past the end are clamped."""
        device = self.q.device
        if self.tile.query is None:
            row = torch.arange(self.seqlen_q, device=device).repeat_interleave(self.group)
            head = torch.arange(self.group, device=device).repeat(self.seqlen_q)
            first_head = torch.arange(self.k.shape[0], device=device)[:, None] * self.group
            return row.expand(self.k.shape[0], -1), first_head + head
        row = torch.arange(i * self.tile.query, (i + 1) * self.tile.query, device=device)
        row = row.clamp(max=self.seqlen_q - 1)
        heads = torch.arange(self.k.shape[0], device=device)[:, None]
        return row.expand(self.k.shape[0], -1), heads.expand(-1, row.numel())

    def row_valid(self, i: int) -> Tensor:
        """Which rows of query tile i lie inside the sequence."""
        if self.tile.query is None:
            return torch.ones(self.seqlen_q * self.group, dtype=torch.bool, device=self.q.device)
        first = i * self.tile.query
        return torch.arange(first, first + self.tile.query, device=self.q.device) < self.seqlen_q

    def _ranges(self, i: int) -> tuple[Tensor, Tensor]:
        """Visible key range of each row; padding rows see nothing."""
        rows = self.rows_of(i)[0][0] if self.k.shape[0] else torch.zeros(0, dtype=torch.int64)
        begin, end = visible_range(
            rows, self.seqlen_q, self.seqlen_k, self.problem.causal, self.problem.window_size
        )
        return begin, torch.where(self.row_valid(i), end, begin)

    def tiles_of(self, i: int) -> range:
        """Visited key tiles of query tile i."""
        return visited_tiles(*self._ranges(i), self.tile.key)

    def num_visited(self, i: int) -> int | Tensor:
        """Visited key tiles of query tile i; under a block mask (heads,)."""
        tiles = self.tiles_of(i)
        if self.block_mask is None:
            return len(tiles)
        return self.block_mask[:, i, tiles.start : tiles.stop].sum(-1)

    def _scores(self, i: int) -> Tensor:
        """Scaled and capped scores (heads, rows, keys) of query tile i, not masked yet."""
        row, head = self.rows_of(i)
        scores = self.q[row, head] @ self.k.transpose(1, 2) * self.problem.softmax_scale
        cap = self.problem.softcap
        return torch.tanh(scores / cap) * cap if cap > 0 else scores

    def _upper_scores(self, i: int, tiles: int) -> Tensor:
        """Upper bound of each tile's scores from the codes of its keys, (heads, rows, key tiles)."""
        row, head = self.rows_of(i)
        rows = self.q[row, head] * self.problem.softmax_scale
        return upper_scores(
            *(rows, self.problem.screen, self.index, range(tiles), self.seqlen_k, self.problem.softcap)
        )

    def _int8_vote(
        self, i: int, visible: Tensor, start: Tensor, log_threshold: Tensor | None, width: int
    ) -> tuple[Tensor, Tensor] | None:
        """Margin of every key tile and whether every row agrees to skip it, both (heads, key tiles)."""
        if self.coded is None or self.k.shape[1] == 0:
            return None
        q, keys = self.coded
        row, head = self.rows_of(i)
        rows = Int8Rows.of(q[row, head], self.problem.softmax_scale, keys)
        tiles = range(keys.codes.shape[1] // self.tile.key)
        seen = torch.nn.functional.pad(visible, (0, len(tiles) * self.tile.key - visible.shape[-1]))
        upper, lower = score_bounds(rows, keys, tiles, seen, self.problem.softcap)
        compare = torch.maximum(start, lower.amax(-1).to(start.dtype))
        gap = start.new_full((upper.shape[0], width), -math.inf)
        skip = torch.zeros_like(gap, dtype=torch.bool)
        for j in tiles:
            here = seen[..., j * self.tile.key : (j + 1) * self.tile.key]
            gap[:, j], skip[:, j] = self._vote(upper[..., j : j + 1], here, compare, log_threshold)
        return gap, skip

    def solve(self, i: int, given: Tensor | None, kept: Tensor, margin: Tensor, screened: Tensor) -> Rows:
        """Visit the tiles of query tile i; fills kept, margin and screened (heads, key tiles) in place."""
        begin, end = self._ranges(i)
        key = torch.arange(self.seqlen_k, device=self.q.device)
        visible = (key >= begin[:, None]) & (key < end[:, None])  # (rows, keys)
        tiles = visited_tiles(begin, end, self.tile.key)
        decode = self.problem.phase == "decode"
        log_threshold = self._log_threshold(i)
        allowed = None if self.block_mask is None else self.block_mask[:, i]  # (heads, key tiles)
        if allowed is not None:
            in_mask = allowed.repeat_interleave(self.tile.key, dim=-1)[:, None, : self.seqlen_k]
            visible = visible & in_mask  # (heads, rows, keys)
        scores = torch.where(visible, self._scores(i), -math.inf)
        state = self._start(scores, i)
        anchors = self._anchors(begin, end, allowed, kept.shape) if decode else torch.zeros_like(kept)
        anchor = _AnchorState.of(scores, visible, state.row_max, anchors, self.tile.key) if decode else None
        upper = self._upper_scores(i, kept.shape[-1]) if self.problem.screen else None
        votes = self._int8_vote(i, visible, state.row_max, log_threshold, kept.shape[-1])
        plan = visits(tiles, "ascending" if decode else self.order, allowed)
        if votes is not None:
            plan = _kept_first(plan, votes[1] if given is None else ~given[:, i])

        for j, heads in plan:
            columns = slice(j * self.tile.key, (j + 1) * self.tile.key)
            s, seen = scores[..., columns], visible[..., columns]
            if heads is not None:  # to the others the tile is as good as invisible now
                s = torch.where(heads[:, None, None], s, -math.inf)
                seen = seen & heads[:, None, None]
            compare = state.row_max if anchor is None else anchor.row_max
            gap, agree = self._vote(s, seen, compare, log_threshold)
            if votes is not None:
                gap, agree = votes[0][:, j], votes[1][:, j]
            skip = agree & ~anchors[:, j]
            gap = torch.where(anchors[:, j], math.inf, gap)
            if upper is not None:  # then what the keys of the tile say does not count
                _, sure = self._vote(upper[..., j : j + 1], seen, compare, log_threshold)
                sure &= ~anchors[:, j]
                skip |= sure
                screened[:, j] |= sure if heads is None else sure & heads
            if self.problem.max_skipped_mass is not None:
                skip &= self._affordable(s, seen, state, anchor)
            if given is not None:
                skip = ~given[:, i, j]
            now = torch.ones_like(skip) if heads is None else heads
            margin[:, j] = torch.where(now, gap, margin[:, j])
            kept[:, j] = torch.where(now, ~skip, kept[:, j])
            self._update(state, s, seen, self.v[:, columns], skip)
        return state

    def _log_threshold(self, i: int) -> Tensor | None:
        """Log threshold of query tile i; None = skips nothing."""
        rows, tail = self.tile.query, self.problem.dense_tail
        if rows is not None and in_dense_tail(i * rows, self.seqlen_q, rows, tail):
            return None
        return self.log_threshold

    def _anchors(self, begin: Tensor, end: Tensor, allowed: Tensor | None, shape: torch.Size) -> Tensor:
        """Anchor tiles, bool (heads, key tiles)."""
        anchors = torch.zeros(shape, dtype=torch.bool, device=self.q.device)
        if allowed is None:
            anchors[:, sorted(anchor_tiles(begin, end, self.tile.key))] = True
            return anchors
        first_key = torch.arange(shape[-1], device=self.q.device) * self.tile.key
        sees = (begin[:, None] < first_key + self.tile.key) & (end[:, None] > first_key)
        sees &= (begin < end)[:, None]
        return anchors_under_mask(sees & allowed[:, None])

    def _start(self, scores: Tensor, i: int) -> Rows:
        heads, rows = scores.shape[:2]
        row_max = scores.new_full((heads, rows), -math.inf)
        row_sum = scores.new_zeros((heads, rows))
        if self.sinks is not None:
            row_max = self.sinks[self.rows_of(i)[1]].clone()
            row_sum = (row_max > -math.inf).to(scores.dtype)
        acc = scores.new_zeros((heads, rows, self.v.shape[-1]))
        return Rows(row_max, row_sum, acc, torch.zeros_like(row_max), torch.zeros_like(row_max))

    def _vote(
        self, s: Tensor, seen: Tensor, compare: Tensor, log_threshold: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Margin of the tile and whether every row agrees to skip it, per head."""
        tile_max = s.amax(-1)
        concerned = seen.any(-1)
        gap = (tile_max - compare).nan_to_num(nan=math.inf, posinf=math.inf, neginf=-math.inf)
        gap = torch.where(concerned, gap, -math.inf).amax(-1)
        if log_threshold is None:
            return gap, torch.zeros_like(gap, dtype=torch.bool)
        agree = (tile_max < compare + log_threshold) | ~concerned
        return gap, agree.all(-1)

    def _affordable(self, s: Tensor, seen: Tensor, state: Rows, anchor: _AnchorState | None) -> Tensor:
        """Whether the error budget of every row allows the skip, per head."""
        eps = self.problem.max_skipped_mass or 0.0
        concerned = seen.any(-1)
        if anchor is None:
            afford = state.bound + _tile_bound(s, seen, state.row_max) <= eps * state.row_sum
        else:
            share = eps * anchor.row_sum * seen.sum(-1) / anchor.rest.clamp(min=1)
            afford = _tile_bound(s, seen, anchor.row_max) <= share
        return (afford | ~concerned).all(-1)

    def _update(self, state: Rows, s: Tensor, seen: Tensor, v: Tensor, skip: Tensor) -> None:
        """Online softmax of the heads that keep the tile; mass accounting of those that skip it."""
        skip = skip[:, None]
        new_max = torch.where(skip, state.row_max, torch.maximum(state.row_max, s.amax(-1)))
        safe = torch.where(new_max == -math.inf, torch.zeros_like(new_max), new_max)
        rescale = torch.where(new_max == state.row_max, 1.0, (state.row_max - safe).exp())
        weight = torch.where(seen, (s - safe[..., None]).exp(), 0.0)
        kept_weight = torch.where(skip[..., None], 0.0, weight)
        state.row_sum = state.row_sum * rescale + kept_weight.sum(-1)
        tile_acc = torch.where(skip[..., None], 0.0, weighted_values(weight, v, seen))
        state.acc = state.acc * rescale[..., None] + tile_acc
        bound = torch.where(skip, _tile_bound(s, seen, safe), 0.0)
        state.bound = state.bound * rescale + bound
        state.skipped = state.skipped * rescale + torch.where(skip, weight.sum(-1), 0.0)
        state.row_max = new_max


def _kept_first(plan: list[tuple[int, Tensor | None]], skip: Tensor) -> list[tuple[int, Tensor | None]]:
    """The visits with those that skip at the end: then every row knows its maximum, and counts against it."""
    first: list[tuple[int, Tensor | None]] = []
    last: list[tuple[int, Tensor | None]] = []
    for j, heads in plan:
        if not bool(skip[:, j].any()):
            first.append((j, heads))
            continue
        now = torch.ones_like(skip[:, j]) if heads is None else heads
        first.append((j, now & ~skip[:, j]))
        last.append((j, now & skip[:, j]))
    return first + last


@dataclass(frozen=True)
class _AnchorState:
    """What the anchor tiles say: (heads, rows) maximum and sum, (heads, rows) keys outside them."""

    row_max: Tensor
    row_sum: Tensor
    rest: Tensor

    @staticmethod
    def of(scores: Tensor, visible: Tensor, start: Tensor, anchors: Tensor, tile_key: int) -> _AnchorState:
        of_keys = anchors.repeat_interleave(tile_key, dim=-1)[:, None, : scores.shape[-1]]
        inside = of_keys & visible  # (heads, rows, keys)
        row_max = start
        if scores.shape[-1]:
            row_max = torch.maximum(start, torch.where(inside, scores, -math.inf).amax(-1))
        safe = torch.where(row_max == -math.inf, torch.zeros_like(row_max), row_max)
        weight = torch.where(inside, (scores - safe[..., None]).exp(), 0.0)
        row_sum = weight.sum(-1) + torch.where(start == -math.inf, 0.0, (start - safe).exp())
        return _AnchorState(row_max, row_sum, (visible & ~inside).sum(-1))


def _tile_bound(s: Tensor, seen: Tensor, compare: Tensor) -> Tensor:
    """Sum over groups of 8 keys of n_visible * exp(group_max - compare), (heads, rows)."""
    group = group_of_key(-(-s.shape[-1] // 32) * 32)[: s.shape[-1]].to(s.device)
    num_groups = int(group.max()) + 1
    none = seen.new_zeros((*seen.shape[:-1], num_groups), dtype=torch.int64)
    count = none.scatter_add(-1, group.expand_as(seen), seen.long())
    start = s.new_full((*s.shape[:-1], num_groups), -math.inf)
    group_max = start.scatter_reduce(-1, group.expand_as(s), s, "amax")
    bound = count * (group_max - compare[..., None]).exp()
    return torch.where(count > 0, bound, 0.0).sum(-1)
