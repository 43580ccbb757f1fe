"""Tile skipping with torch operations alone: any device, and skipped tiles cost no exp and no P.V.

One query tile at a time meets all its keys: scores (heads, rows, keys) in float32, their maximum per key
tile, then the rule. A skipped tile never holds a new row maximum, so the running maximum of every tile is a
cumulative maximum in visiting order and all decisions of a query tile are taken at once. Only the scores of
kept tiles are then gathered, exponentiated and multiplied with V. Memory: rows of one query tile times keys.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
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
    first_true,
    map_shape,
    split_sequences,
    visible_range,
    visited_tiles,
    visiting_order,
)
from blasst.core.threshold import effective_log_threshold
from blasst.core.types import (
    DECODE_TILE,
    PREFILL_TILE,
    AttentionOutput,
    SkipCounts,
    TileShape,
    VisitingOrder,
    in_dense_tail,
    num_tiles,
)
from blasst.core.values import weighted_values
from blasst.kernels.eager_rule import ScoredTiles, mass_bound_of, within_budget

_LOWEST = -math.inf


@dataclass(frozen=True)
class _Sequence:
    """Keys and values of one sequence, laid out for matmul and padded to whole tiles with zeros."""

    k: Tensor  # (num_kv_heads, padded keys, head_dim) float32
    v: Tensor  # (num_kv_heads, padded keys, head_dim_v) float32, or empty when only scores are wanted
    v_finite: bool
    seqlen_q: int
    seqlen_k: int
    tile: TileShape
    softmax_scale: float
    causal: bool
    window_size: tuple[int, int]
    softcap: float
    sinks: Tensor | None
    order: VisitingOrder
    splits: int | None = None  # decode: None = anchors, else a running maximum in each of so many splits

    @staticmethod
    def of(problem: AttentionProblem, view: SequenceView, tile: TileShape) -> _Sequence:
        return _Sequence.build(view.q, view.k, view.v, problem, tile)

    @staticmethod
    def build(
        q: Tensor,
        k: Tensor,
        v: Tensor | None,
        problem: AttentionProblem | _ScoreOptions,
        tile: TileShape,
        order: VisitingOrder = "sink_first",
        splits: int | None = None,
    ) -> _Sequence:
        spare = -k.shape[0] % tile.key
        keys = torch.nn.functional.pad(k.transpose(0, 1).float(), (0, 0, 0, spare))
        values = keys[:, :0]
        if v is not None:
            values = torch.nn.functional.pad(v.transpose(0, 1).float(), (0, 0, 0, spare))
        return _Sequence(
            keys,
            values,
            bool(values.sum().isfinite()) or bool(values.isfinite().all()),  # a sum is one cheap pass
            q.shape[0],
            k.shape[0],
            tile,
            problem.softmax_scale,
            problem.causal,
            problem.window_size,
            problem.softcap,
            problem.sinks,
            order,
            splits,
        )

    def score(self, q: Tensor, first_row: int, block_mask: Tensor | None = None) -> ScoredTiles | None:
        """Scores of the rows of one query tile.

        Args:
            q: (rows, num_heads, head_dim) the rows, from first_row on.
            first_row: number of the first of them in the sequence.
            block_mask: bool (heads that vote, key tiles), or None.

        Returns:
            None when no row sees a key.
        """
        rows, num_heads = q.shape[:2]
        num_kv_heads = self.k.shape[0]
        group, decode = num_heads // num_kv_heads, self.tile.query is None
        row = torch.arange(first_row, first_row + rows)
        begin, end = visible_range(row, self.seqlen_q, self.seqlen_k, self.causal, self.window_size)
        tiles = visited_tiles(begin, end, self.tile.key)
        if len(tiles) == 0:
            return None
        columns = slice(tiles.start * self.tile.key, tiles.stop * self.tile.key)
        scores = torch.matmul(self.scaled_rows(q), self.k[:, columns].transpose(1, 2))
        if self.softcap > 0:
            scores = scores.div_(self.softcap).tanh_().mul_(self.softcap)
        sink = self._sink_of_rows(rows, num_kv_heads, group, decode)
        if decode:
            begin, end = begin.repeat_interleave(group), end.repeat_interleave(group)
        else:
            scores = scores.view(num_heads, rows, -1)
        allowed = None if block_mask is None else block_mask[:, tiles.start : tiles.stop]
        return self._with_rule(scores, tiles, begin, end, sink, allowed)

    def scaled_rows(self, q: Tensor) -> Tensor:
        """q times softmax_scale as (num_kv_heads, rows * group, head_dim), float32.

        Rows of a KV head: (row, group member) in decode, where they vote together; else (member, row).
        """
        group = q.shape[1] // self.k.shape[0]
        grouped = q.float().unflatten(1, (-1, group))
        grouped = grouped.permute((1, 0, 2, 3) if self.tile.query is None else (1, 2, 0, 3))
        return grouped.flatten(1, 2) * self.softmax_scale

    def _sink_of_rows(self, rows: int, num_kv_heads: int, group: int, decode: bool) -> Tensor:
        if self.sinks is None:
            shape = (num_kv_heads, rows * group) if decode else (num_kv_heads * group, rows)
            return self.k.new_full(shape, _LOWEST)
        sinks = self.sinks.float()
        if decode:
            return sinks.view(num_kv_heads, 1, group).expand(-1, rows, -1).reshape(num_kv_heads, -1)
        return sinks[:, None].expand(-1, rows)

    def _with_rule(
        self,
        scores: Tensor,
        tiles: range,
        begin: Tensor,
        end: Tensor,
        start: Tensor,
        allowed: Tensor | None,
    ) -> ScoredTiles:
        """Mask the edge tiles and find what the rule compares each tile with."""
        size, device = self.tile.key, scores.device
        first = tiles.start * size
        host_begin, host_end = begin, end
        begin, end = begin.to(device), end.to(device)
        whole_from = min(num_tiles(int(host_begin.max()), size), tiles.stop)
        whole_to = max(int(host_end.min()) // size, tiles.start)
        for edge in (slice(tiles.start, whole_from), slice(max(whole_to, whole_from), tiles.stop)):
            if edge.start < edge.stop:
                key = torch.arange(edge.start * size, edge.stop * size, device=device)
                hidden = (key < begin[:, None]) | (key >= end[:, None])
                scores[..., edge.start * size - first : edge.stop * size - first].masked_fill_(
                    hidden, _LOWEST
                )
        if allowed is not None:
            scores.unflatten(-1, (-1, size)).masked_fill_(~allowed[:, None, :, None], _LOWEST)
        tile_max = scores.unflatten(-1, (-1, size)).amax(-1)
        tile = torch.arange(tiles.start, tiles.stop, device=device)
        concerned = (begin[:, None] < (tile + 1) * size) & (end[:, None] > tile * size)
        concerned &= (begin < end)[:, None]
        if allowed is not None:
            concerned = concerned & allowed[:, None]  # (heads, rows, tiles)
        if self.splits is not None:
            compare = _maximum_in_splits(tile_max, self.splits)
            return ScoredTiles(tiles, scores, tile_max, concerned, compare, None, start, begin, end)
        if self.tile.query is None:
            if allowed is None:
                anchors = anchor_tiles(host_begin, host_end, size)
                anchor = torch.tensor([j in anchors for j in tiles], device=device)
                top = tile_max[..., anchor].amax(-1)
            else:
                anchor = anchors_under_mask(concerned)
                top = tile_max.masked_fill(~anchor[:, None], _LOWEST).amax(-1)
            compare = torch.maximum(top, start)[..., None].expand_as(tile_max)
            return ScoredTiles(
                tiles, scores, tile_max, concerned, compare, anchor, start, begin, end, allowed
            )
        visit = torch.tensor(visiting_order(tiles, self.order), device=device) - tiles.start
        compare = torch.empty_like(tile_max)
        if allowed is None:
            seen = torch.cat([start[..., None], tile_max[..., visit[:-1]]], dim=-1)
            compare[..., visit] = seen.cummax(-1).values
        else:
            visit = _visits_of_heads(visit, allowed, self.order)[:, None].expand_as(tile_max)
            seen = torch.cat([start[..., None], tile_max.gather(-1, visit[..., :-1])], dim=-1)
            compare.scatter_(-1, visit, seen.cummax(-1).values)
        return ScoredTiles(tiles, scores, tile_max, concerned, compare, None, start, begin, end, allowed)


def _visits_of_heads(visit: Tensor, allowed: Tensor, order: VisitingOrder) -> Tensor:
    """Visiting order of each head under a block mask, (heads, tiles); tiles left out stand anywhere.

    Args:
        visit: (tiles,) the order without a mask.
        allowed: (heads, tiles) the mask.
        order: its name.
    """
    place = torch.empty_like(visit).scatter_(0, visit, torch.arange(len(visit), device=visit.device))
    if order != "sink_first":
        return visit.expand_as(allowed)
    first = first_true(allowed, 0, len(visit))
    return torch.where(first, -1, place).argsort(-1)


def _maximum_in_splits(tile_max: Tensor, splits: int) -> Tensor:
    """Largest maximum of the earlier tiles of a tile's split, -inf before its first; shape of tile_max."""
    count = tile_max.shape[-1]
    rounds = torch.nn.functional.pad(tile_max, (splits, -count % splits), value=_LOWEST)
    running = rounds.unflatten(-1, (-1, splits)).cummax(-2).values  # [..., rounds + 1, splits]
    return running.flatten(-2)[..., :count]


@dataclass(frozen=True)
class _ScoreOptions:
    """The options of a problem that scores depend on, for counting without values."""

    softmax_scale: float
    causal: bool
    window_size: tuple[int, int]
    softcap: float
    sinks: Tensor | None


def run(problem: AttentionProblem) -> AttentionOutput:
    """Attention of a checked problem; reads lengths on the host, so it does not go into a CUDA graph."""
    tile = PREFILL_TILE if problem.phase == "prefill" else DECODE_TILE
    shape, device = map_shape(problem, tile), problem.q.device
    out = problem.q.new_zeros(*problem.q.shape[:-1], problem.head_dim_v)
    lse = torch.full(problem.q.shape[:-1], _LOWEST, dtype=torch.float32, device=device)
    mass_bound = torch.zeros_like(lse)
    kept_map = torch.zeros(shape, dtype=torch.bool, device=device) if problem.want_kept_tiles else None
    skipped = torch.zeros(shape[:2], dtype=torch.int64, device=device)
    visited, screened = torch.zeros_like(skipped), torch.zeros_like(skipped)
    logs = None if problem.threshold is None else effective_log_threshold(problem.threshold)
    if problem.sinks is not None:
        lse[:] = problem.sinks.float()  # what a row without keys is left with

    for view in split_sequences(problem):
        b = view.index
        sequence = _Sequence.of(problem, view, tile)
        place = (view.rows,) if problem.packed else (b, view.rows)
        log_threshold = None if logs is None else logs[b]
        mask = (
            None if problem.block_mask is None else problem.block_mask[b]
        )  # (heads, query tiles, key tiles)
        step = tile.query or max(sequence.seqlen_q, 1)
        coded = Int8Keys.of(view.k, view.q, torch.float32) if problem.int8_screen else None
        for first_row in range(0, sequence.seqlen_q, step):
            rows = slice(first_row, first_row + step)
            i = first_row // step
            scored = sequence.score(view.q[rows], first_row, None if mask is None else mask[:, i])
            if scored is None:
                continue
            tail = problem.phase == "prefill" and in_dense_tail(
                first_row, sequence.seqlen_q, step, problem.dense_tail
            )
            cut = None if tail else log_threshold
            if coded is None or cut is None:
                kept = scored.kept(cut)
            else:
                kept = _kept_in_int8(view.q[rows], coded, scored, problem, cut)
                screened[b] += scored.num_visited - kept.sum(-1)
            if problem.max_skipped_mass is not None and cut is not None:
                kept = within_budget(scored, kept, problem.max_skipped_mass, tile.key)
            if problem.screen and cut is not None:
                upper = upper_scores(
                    *(sequence.scaled_rows(view.q[rows]), problem.screen, b),
                    *(scored.tiles, sequence.seqlen_k, problem.softcap),
                )
                without_scores = scored.screened(upper, cut)
                kept &= ~without_scores  # what their keys say does not count
                screened[b] += without_scores.sum(-1)
            if kept_map is not None:
                kept_map[b, :, i, scored.tiles.start : scored.tiles.stop] = kept
            visited[b] += scored.num_visited
            skipped[b] += scored.num_visited - kept.sum(-1)
            part, part_lse = _attend(scored, kept, sequence)
            out[place][rows] = _rows_first(part, problem, tile).to(out.dtype)
            lse[place][rows] = _rows_first(part_lse, problem, tile)
            if problem.want_mass_bound:
                bound = mass_bound_of(scored, kept, part_lse, tile.key)
                mass_bound[place][rows] = _rows_first(bound, problem, tile)
    axes = (1, 0) if problem.packed else (0, 2, 1)
    return AttentionOutput(
        out,
        lse.permute(axes).contiguous(),
        SkipCounts(skipped, visited, screened if problem.screened else None) if problem.want_counts else None,
        mass_bound.permute(axes).contiguous() if problem.want_mass_bound else None,
        kept_map,
    )


def _kept_in_int8(
    q: Tensor, keys: Int8Keys, scored: ScoredTiles, problem: AttentionProblem, log_threshold: Tensor
) -> Tensor:
    """(heads, tiles): what bounds from 8-bit copies leave; the scores of a skipped tile do not count."""
    rows = Int8Rows.of(q.transpose(0, 1), problem.softmax_scale, keys)
    visible = scored.visible(PREFILL_TILE.key)
    if scored.allowed is not None:
        visible = visible & scored.allowed.repeat_interleave(PREFILL_TILE.key, dim=-1)[:, None]
    upper, lower = score_bounds(rows, keys, scored.tiles, visible, problem.softcap)
    return scored.kept_within(upper, lower, log_threshold)


def _rows_first(value: Tensor, problem: AttentionProblem, tile: TileShape) -> Tensor:
    """(heads that vote, rows, ...) to (rows of the sequence, num_heads, ...)."""
    if tile.query is not None:
        return value.transpose(0, 1)
    group = problem.num_heads // problem.num_kv_heads
    return value.unflatten(1, (-1, group)).transpose(0, 1).flatten(1, 2)


def _attend(scored: ScoredTiles, kept: Tensor, sequence: _Sequence) -> tuple[Tensor, Tensor]:
    """Softmax and P.V over kept tiles: (heads, rows, head_dim_v) and lse (heads, rows)."""
    size = sequence.tile.key
    kept_max = scored.tile_max.masked_fill(~kept[:, None], _LOWEST).amax(-1)
    row_max = torch.maximum(kept_max, scored.start)
    safe = row_max.masked_fill(row_max == _LOWEST, 0.0)
    columns = slice(scored.tiles.start * size, scored.tiles.stop * size)
    v = sequence.v[:, columns]
    group = scored.scores.shape[0] // v.shape[0]
    seen = None if sequence.v_finite else scored.visible(size)
    host_kept = kept.cpu()
    if bool(host_kept.all()):
        weight = scored.scores.sub_(safe[..., None]).exp_()
        row_sum = weight.sum(-1)
        if seen is None:
            acc = torch.matmul(weight.view(v.shape[0], -1, weight.shape[-1]), v).view(*row_max.shape, -1)
        else:
            acc = weighted_values(weight, v.repeat_interleave(group, 0), seen)
    else:
        row_sum, acc = torch.zeros_like(row_max), row_max.new_zeros(*row_max.shape, v.shape[-1])
        for head in range(scored.scores.shape[0]):
            index = host_kept[head].nonzero().flatten().to(kept.device)
            picked = scored.scores[head].unflatten(-1, (-1, size)).index_select(1, index)
            weight = picked.sub_(safe[head, :, None, None]).exp_().flatten(1)
            values = v[head // group].unflatten(0, (-1, size)).index_select(0, index).flatten(0, 1)
            row_sum[head] = weight.sum(-1)
            if seen is None:
                acc[head] = weight @ values
            else:
                key_seen = seen.unflatten(-1, (-1, size)).index_select(1, index).flatten(1)
                acc[head] = weighted_values(weight[None], values[None], key_seen)[0]
    row_sum = row_sum + torch.where(scored.start == _LOWEST, 0.0, (scored.start - safe).exp())
    norm = row_sum.masked_fill(row_sum == 0, 1.0)
    return acc / norm[..., None], row_max + row_sum.log()


def prefill_margins(
    q: Tensor,
    k: Tensor,
    *,
    softmax_scale: float,
    causal: bool,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    tile: TileShape = PREFILL_TILE,
    order: VisitingOrder = "sink_first",
) -> Iterator[tuple[int, int, Tensor]]:
    """Margins of every visited tile of one sequence, one query tile after the other.

    A tile is skipped at a threshold t iff its margin < ln(t); inf where it is kept at any threshold.

    Args:
        q: (seqlen_q, num_heads, head_dim).
        k: (seqlen_k, num_kv_heads, head_dim).
        softmax_scale: factor on q . k.
        causal: bottom-right aligned.
        window_size: (left, right), -1 = unlimited.
        softcap: 0 = none.
        sinks: (num_heads,) or None.
        tile: vote shape; tile.query rows vote together.
        order: visiting order.

    Yields:
        (query tile, first visited key tile, margin float32 (num_heads, visited key tiles)).
    """
    if tile.query is None:
        raise ValueError("tile.query: got None, prefill votes in tiles of a fixed number of rows")
    options = _ScoreOptions(softmax_scale, causal, window_size, softcap, sinks)
    sequence = _Sequence.build(q, k, None, options, tile, order)
    step = tile.query * _query_tiles_at_once(q, k, tile.query, window_size)
    for first_row in range(0, q.shape[0], step):
        scored = sequence.score(q[first_row : first_row + step], first_row)
        if scored is None:
            continue
        margins = scored.margin(tile.query)
        row = torch.arange(first_row, min(first_row + step, q.shape[0]))
        begin, end = visible_range(row, q.shape[0], k.shape[0], causal, window_size)
        for i in range(margins.shape[1]):
            rows = slice(i * tile.query, (i + 1) * tile.query)
            tiles = visited_tiles(begin[rows], end[rows], tile.key)
            if len(tiles):
                start = tiles.start - scored.tiles.start
                yield first_row // tile.query + i, tiles.start, margins[:, i, start : start + len(tiles)]


def _query_tiles_at_once(q: Tensor, k: Tensor, tile_query: int, window_size: tuple[int, int]) -> int:
    """Query tiles whose scores may exist together: one on a CPU, where they then stay in cache, and with a
    left window, where query tiles begin at different key tiles; on a GPU as many as fit into 256 MB.
    """
    if q.device.type == "cpu" or window_size[0] >= 0:
        return 1
    return max(1, 2**26 // max(q.shape[1] * tile_query * k.shape[0], 1))


def decode_margins(
    q: Tensor,
    k: Tensor,
    *,
    softmax_scale: float,
    causal: bool = True,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    tile: TileShape = DECODE_TILE,
    splits: int | None = None,
) -> tuple[int, Tensor]:
    """Margins of one decode step of one sequence against the anchor maximum; inf where a tile always stays.

    Args:
        q: (new tokens, num_heads, head_dim).
        k: (seqlen_k, num_kv_heads, head_dim).
        softmax_scale: factor on q . k.
        causal: bottom-right aligned.
        window_size: (left, right), -1 = unlimited.
        softcap: 0 = none.
        sinks: (num_heads,) or None.
        tile: vote shape with query None.
        splits: for the files of other engines: in place of the anchors, tile t is compared with the largest
            maximum of the tiles t - splits, t - 2 * splits, ...; sinks do not count there.

    Returns:
        (first visited key tile, margin float32 (num_kv_heads, visited key tiles)).
    """
    options = _ScoreOptions(softmax_scale, causal, window_size, softcap, sinks)
    scored = _Sequence.build(q, k, None, options, tile, splits=splits).score(q, 0)
    if scored is None:
        return 0, q.new_zeros(k.shape[1], 0, dtype=torch.float32)
    return scored.tiles.start, scored.margin()[:, 0]
