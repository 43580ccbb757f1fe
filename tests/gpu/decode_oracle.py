"""The decode rule in float64 for a whole batch at once, and how far a kernel may lie from it.

`blasst.core.reference` goes through sequences and tiles one after the other, which would take most of the
time of thousands of calls. tests/cpu/test_decode_oracle.py holds this one to it.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

TILE = 64


class Truth(NamedTuple):
    """What the rule says of a batch.

    Attributes:
        out: float64 (batch, tokens, heads, head_dim).
        lse: float64 (batch, heads, tokens).
        weighted: shape of out, sum of weight * |v|: what an error of the weights is multiplied with.
        kept: bool (batch, KV heads, tiles), visited and kept.
        visited: int64 (batch,), tiles.
        margin: (batch, KV heads, tiles), max over rows of tile_max - anchor_max; inf in anchors.
        skipped_mass: float64, shape of lse.
    """

    out: Tensor
    lse: Tensor
    weighted: Tensor
    kept: Tensor
    visited: Tensor
    margin: Tensor
    skipped_mass: Tensor


class Scores(NamedTuple):
    """Scores of a batch whose sequences begin at their first key, and what is visible.

    Attributes:
        s: float64 (batch, KV heads, rows, keys), -inf where a row does not see a key; keys are whole tiles.
        seen: bool (batch, 1, rows, keys).
        v: float64 (batch, KV heads, keys, head_dim).
        anchors: bool (batch, tiles).
        visited: bool (batch, tiles).
        sink: float64 (KV heads, rows), -inf without a sink.
        tokens: new ones of each sequence.
    """

    s: Tensor
    seen: Tensor
    v: Tensor
    anchors: Tensor
    visited: Tensor
    sink: Tensor
    tokens: int


def scores_of(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    ends: Tensor,
    pads: Tensor,
    *,
    causal: bool,
    window_size: tuple[int, int],
    softcap: float,
    sinks: Tensor | None,
) -> Scores:
    """Scores, visibility and anchors.

    Args:
        q: (batch, tokens, heads, head_dim).
        k: (batch, capacity, KV heads, head_dim), as meant (times its scale).
        v: the same shape.
        ends: int64 (batch,), slots in use.
        pads: int64 (batch,), first slot of each sequence.
        causal: bottom-right aligned.
        window_size: (left, right), -1 = unlimited.
        softcap: 0 = none.
        sinks: (heads,) or None.
    """
    batch, tokens, heads, dim = q.shape
    capacity, kv_heads = k.shape[1:3]
    group, width = heads // kv_heads, -(-capacity // TILE) * TILE
    place = torch.arange(width, device=q.device)
    slot = (place + pads[:, None]).clamp(max=capacity - 1)[:, :, None, None]
    length = ends - pads
    real = (place < length[:, None])[:, :, None, None]
    k, v = (  # (batch, KV heads, keys, dim); what belongs to no sequence may be NaN
        torch.where(real, x.gather(1, slot.expand(-1, -1, kv_heads, dim)), 0).double().transpose(1, 2)
        for x in (k, v)
    )
    rows = q.view(batch, tokens, kv_heads, group, dim).permute(0, 2, 1, 3, 4).flatten(2, 3).double()
    s = rows @ k.transpose(-1, -2) * dim**-0.5
    if softcap > 0:
        s = torch.tanh(s / softcap) * softcap
    at = torch.arange(tokens, device=q.device).repeat_interleave(group) + (length[:, None] - tokens)
    left, right = window_size
    right = 0 if causal else right
    begin = (at - left).clamp(min=0) if left >= 0 else torch.zeros_like(at)
    end = torch.minimum(at + right + 1, length[:, None]) if right >= 0 else length[:, None].expand_as(at)
    seen = (place >= begin[..., None]) & (place < end[..., None])  # (batch, rows, keys)
    sees, tile = begin < end, torch.arange(width // TILE, device=q.device)
    first, last = begin // TILE, (end - 1) // TILE
    mine = (tile == first[..., None]) | (tile == last[..., None])
    mine |= tile == torch.maximum(last - 1, first)[..., None]
    anchors = (mine & sees[..., None]).any(1)
    low = torch.where(sees, first, width).amin(1, keepdim=True)
    high = torch.where(sees, last, -1).amax(1, keepdim=True)
    sink = s.new_full((kv_heads, tokens * group), -math.inf)
    if sinks is not None:
        sink = sinks.double().view(kv_heads, 1, group).expand(-1, tokens, -1).flatten(1)
    seen = seen[:, None]
    visited = (tile >= low) & (tile <= high)
    return Scores(torch.where(seen, s, -math.inf), seen, v, anchors, visited, sink, tokens)


def decode_truth(scores: Scores, threshold: Tensor | None, kept: Tensor | None = None) -> Truth:
    """The rule without a budget, or attention over the tiles of a map.

    Args:
        scores: of the batch.
        threshold: (batch,), or None = dense.
        kept: bool (batch, KV heads, tiles) to follow; the margin is that of the rule all the same.
    """
    s, seen, v, anchors, visited, sink, tokens = scores
    tiles = s.unflatten(-1, (-1, TILE))
    tile_max, concerned = tiles.amax(-1), seen.unflatten(-1, (-1, TILE)).any(-1)
    best = torch.where(anchors[:, None, None], tile_max, -math.inf).amax(-1)
    anchor_max = torch.maximum(best, sink)[..., None]
    gap = torch.where(concerned, tile_max - anchor_max, -math.inf).amax(2)  # (batch, KV heads, tiles)
    margin = torch.where(anchors[:, None], math.inf, gap)
    if kept is None:
        cut = -math.inf if threshold is None else threshold.double().clamp(0, 1).log()[:, None, None]
        kept = visited[:, None] & ~(margin < cut)
    used = torch.where(kept[:, :, None].repeat_interleave(TILE, -1), s, -math.inf)
    lse = torch.logaddexp(used.logsumexp(-1), sink)  # (batch, KV heads, rows)
    whole = torch.logaddexp(s.logsumexp(-1), sink)
    safe = torch.where(lse == -math.inf, 0, lse)[..., None]
    weight = (used - safe).exp()
    left_out = torch.where(used == s, -math.inf, s).logsumexp(-1)
    mass = torch.where(left_out == -math.inf, 0, (left_out - whole).exp())
    return Truth(
        _by_heads(weight @ v, tokens),
        _by_heads(lse[..., None], tokens)[..., 0].transpose(1, 2),
        _by_heads(weight @ v.abs(), tokens),
        kept,
        visited.sum(-1),
        margin,
        _by_heads(mass[..., None], tokens)[..., 0].transpose(1, 2),
    )


def _by_heads(x: Tensor, tokens: int) -> Tensor:
    """(batch, KV heads, tokens x group, n) as (batch, tokens, heads, n)."""
    return x.unflatten(2, (tokens, -1)).transpose(1, 2).flatten(2, 3)
