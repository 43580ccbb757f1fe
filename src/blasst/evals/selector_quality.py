"""Skipped mass and output error of blasst and other methods at equal sparsity, on given q, k and v."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from blasst.core.types import DECODE_TILE, PREFILL_TILE, Phase
from blasst.functional import blasst_attn_func, blasst_attn_with_kvcache
from blasst.selectors import (
    H2O,
    DecodeSelector,
    FlexPrefill,
    MInference,
    PrefillSelector,
    Quest,
    RocketKV,
    SnapKV,
    SpargeAttention,
    XAttention,
    reach_sparsity,
)
from blasst.selectors.tiles import PromptTiles, largest

PREFILL_SELECTORS: tuple[PrefillSelector, ...] = (
    XAttention(),
    FlexPrefill(),
    MInference(),
    SpargeAttention(),
)
DECODE_SELECTORS: tuple[DecodeSelector, ...] = (Quest(), RocketKV(), SnapKV(), H2O())

#: Selectors under which blasst is measured too: what the paper combines itself with, and Quest.
COMPOSED = ("XAttention", "RocketKV", "Quest")

#: ln(threshold) below which nothing is skipped in what is compared, and halvings of the range above it.
_LOWEST_LOG = -25.0
_STEPS = 13


@dataclass(frozen=True)
class SelectorRow:
    """One method at one wanted sparsity; also one line of a JSONL file.

    Attributes:
        inputs: name of the input set.
        phase: "prefill" or "decode".
        method: "blasst", a selector's class, "<selector> + blasst" (the selector leaves out half of what is
            wanted, blasst skips the rest among what is left), or "oracle" (the tiles of least weight go).
        wanted: sparsity asked for.
        sparsity: tiles not attended over visible tiles, all heads and calls together.
        setting: the selector's dial, or blasst's threshold; of both methods the latter; None for the oracle.
        mass_mean: softmax weight of dense attention on keys not attended, mean over rows and query heads.
        mass_p99: its 99th percentile.
        mass_max: its largest.
        error: root of the sum of squares of out minus dense over that of dense.
        rows: rows times query heads that the figures are taken over.
        seqlen_k: keys of the longest call.
    """

    inputs: str
    phase: str
    method: str
    wanted: float
    sparsity: float
    setting: float | None
    mass_mean: float
    mass_p99: float
    mass_max: float
    error: float
    rows: int
    seqlen_k: int


@dataclass(frozen=True)
class _Call:
    """One call, and what dense attention does in it."""

    phase: Phase
    q: Tensor
    k: Tensor
    v: Tensor
    past_q: Tensor | None
    scale: float
    tile_mass: Tensor  # (batch, num_heads, rows, key tiles)
    dense: Tensor
    visible: Tensor  # (query tiles, key tiles)

    @staticmethod
    def of(phase: Phase, q: Tensor, k: Tensor, v: Tensor, past_q: Tensor | None, scale: float) -> _Call:
        if phase == "prefill":
            visible = PromptTiles.of(q, k, True).visible()
        else:
            visible = torch.ones(1, -(-k.shape[1] // DECODE_TILE.key), dtype=torch.bool, device=q.device)
        call = _Call(phase, q, k, v, past_q, scale, q, q, visible)
        return replace(call, tile_mass=_tile_mass(call), dense=call.attend().out)

    def attend(self, **options: Any) -> Any:
        attn: Callable[..., Any] = blasst_attn_func if self.phase == "prefill" else blasst_attn_with_kvcache
        return attn(self.q, self.k, self.v, causal=True, softmax_scale=self.scale, impl="eager", **options)

    def skipped_mass(self, kept: Tensor) -> Tensor:
        """(batch, num_heads, rows)."""
        if self.phase == "decode":
            of_rows = kept.repeat_interleave(self.q.shape[2] // self.k.shape[2], dim=1)
        else:
            of_rows = kept.repeat_interleave(PREFILL_TILE.query or 1, dim=2)[:, :, : self.q.shape[1]]
        return self.tile_mass.masked_fill(of_rows, 0.0).sum(-1)


def _tile_mass(call: _Call) -> Tensor:
    """Dense softmax weight of each key tile, a few rows at a time."""
    q, k = call.q.float().transpose(1, 2), call.k.float().permute(0, 2, 3, 1)
    key_tile = (PREFILL_TILE if call.phase == "prefill" else DECODE_TILE).key
    k = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    key, parts = torch.arange(k.shape[-1], device=q.device), []
    for first in range(0, q.shape[2], 256):
        rows = q[:, :, first : first + 256]
        position = torch.arange(first, first + rows.shape[2], device=q.device) + k.shape[-1] - q.shape[2]
        scores = (rows @ k * call.scale).masked_fill(key > position[:, None], -math.inf)
        weight = torch.nn.functional.pad(scores.softmax(-1), (0, -k.shape[-1] % key_tile))
        parts.append(weight.unflatten(-1, (-1, key_tile)).sum(-1))
    return torch.cat(parts, dim=2)


def _sparsity(calls: Sequence[_Call], masks: Sequence[Tensor]) -> float:
    kept = sum(int((mask & call.visible).sum()) for call, mask in zip(calls, masks))
    total = sum(int(call.visible.sum()) * mask.shape[0] * mask.shape[1] for call, mask in zip(calls, masks))
    return 1.0 - kept / total


def _row(
    name: str, method: str, wanted: float, setting: float | None, calls: list[_Call], masks: list[Tensor]
) -> SelectorRow:
    mass = torch.cat([call.skipped_mass(mask).flatten() for call, mask in zip(calls, masks)]).double()
    outs = [call.attend(block_mask=mask).out.double() for call, mask in zip(calls, masks)]
    wrong = sum(float((out - call.dense.double()).square().sum()) for out, call in zip(outs, calls))
    size = sum(float(call.dense.double().square().sum()) for call in calls)
    return SelectorRow(
        inputs=name,
        phase=calls[0].phase,
        method=method,
        wanted=wanted,
        sparsity=_sparsity(calls, masks),
        setting=setting,
        mass_mean=float(mass.mean()),
        mass_p99=float(mass.kthvalue(math.ceil(0.99 * len(mass))).values),
        mass_max=float(mass.max()),
        error=math.sqrt(wrong / max(size, 1e-300)),
        rows=len(mass),
        seqlen_k=max(call.k.shape[1] for call in calls),
    )


def _blasst(
    calls: list[_Call], wanted: float, inside: list[Tensor] | None = None
) -> tuple[float, list[Tensor]]:
    """The largest threshold that leaves out at most the wanted share, and what it keeps."""

    def kept(log_threshold: float) -> list[Tensor]:
        options = [{}] * len(calls) if inside is None else [{"block_mask": mask} for mask in inside]
        at = math.exp(log_threshold)
        results = [c.attend(threshold=at, return_kept_tiles=True, **o) for c, o in zip(calls, options)]
        return [result.kept_tiles for result in results]

    low, high, best = _LOWEST_LOG, 0.0, kept(0.0)
    if _sparsity(calls, best) <= wanted:
        return 1.0, best
    best = kept(low)
    for _ in range(_STEPS):
        middle = (low + high) / 2
        masks = kept(middle)
        if _sparsity(calls, masks) <= wanted:
            low, best = middle, masks
        else:
            high = middle
    return math.exp(low), best


def _oracle(calls: list[_Call], wanted: float) -> list[Tensor]:
    """The tiles with most true weight, summed over the rows that vote, ranked over all heads and calls.

    Every query tile keeps its heaviest one, of those that all its rows see.
    """
    weights, heaviest = [], []
    for call in calls:
        mass, tile = call.tile_mass, PREFILL_TILE if call.phase == "prefill" else DECODE_TILE
        if tile.query is None:
            weight = mass.unflatten(1, (call.k.shape[2], -1)).sum((2, 3))[:, :, None]
            seen = call.visible
        else:
            padded = torch.nn.functional.pad(mass, (0, 0, 0, -mass.shape[2] % tile.query))
            weight = padded.unflatten(2, (-1, tile.query)).sum(3)
            first_row = torch.arange(weight.shape[2], device=mass.device) * tile.query
            position = first_row + call.k.shape[1] - call.q.shape[1]
            seen = torch.arange(weight.shape[3], device=mass.device) * tile.key <= position[:, None]
        best = weight.masked_fill(~seen, -1.0).argmax(-1, keepdim=True)
        weights.append(weight)
        heaviest.append(torch.zeros_like(weight, dtype=torch.bool).scatter(-1, best, True))
    visible = [call.visible.expand_as(weight) for call, weight in zip(calls, weights)]
    flat = [torch.cat([x.flatten() for x in part]) for part in (weights, visible, heaviest)]
    chosen = largest(flat[0], math.ceil((1 - wanted) * int(flat[1].sum())), flat[1], flat[2])
    parts = chosen.split([weight.numel() for weight in weights])
    return [part.view_as(weight) for part, weight in zip(parts, weights)]


def prefill_quality(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    sparsities: Sequence[float],
    name: str,
    softmax_scale: float | None = None,
    selectors: Sequence[PrefillSelector] = PREFILL_SELECTORS,
) -> list[SelectorRow]:
    """Compare methods on a causal prompt.

    Args:
        q: (batch, seqlen_q, num_heads, head_dim), after position embedding.
        k: (batch, seqlen_k, num_kv_heads, head_dim).
        v: (batch, seqlen_k, num_kv_heads, head_dim_v).
        sparsities: wanted, each 0 to 1; a method that cannot reach one is measured at its most.
        name: of the inputs.
        softmax_scale: default head_dim ** -0.5.
        selectors: to compare with.
    """
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    calls = [_Call.of("prefill", q, k, v, None, scale)]

    def select(selector: PrefillSelector, wanted: float) -> tuple[float, list[Tensor]]:
        found = reach_sparsity(selector, q, k, wanted, softmax_scale=scale)
        return found.dial, [found.select(q, k, softmax_scale=scale)]

    return _compare(calls, selectors, select, sparsities, name)


def decode_quality(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    prompt: int,
    sparsities: Sequence[float],
    name: str,
    stride: int = 1,
    softmax_scale: float | None = None,
    selectors: Sequence[DecodeSelector] = DECODE_SELECTORS,
) -> list[SelectorRow]:
    """Compare methods on decode steps behind a prompt; the positions after it are the steps.

    Args:
        q: (batch, seqlen, num_heads, head_dim), after position embedding; all positions, the prompt's too.
        k: (batch, seqlen, num_kv_heads, head_dim).
        v: (batch, seqlen, num_kv_heads, head_dim_v).
        prompt: positions of the prompt, below seqlen; its queries are what methods that evict decide by.
        sparsities: wanted, each 0 to 1; the dial of a selector is 1 minus that.
        name: of the inputs.
        stride: every so many positions are measured.
        softmax_scale: default head_dim ** -0.5.
        selectors: to compare with.

    Raises:
        ValueError: no position after the prompt.
    """
    if not 0 < prompt < q.shape[1]:
        raise ValueError(f"prompt: got {prompt}, want 1 to {q.shape[1] - 1}, below the length")
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    calls = [
        _Call.of("decode", q[:, p : p + 1], k[:, : p + 1], v[:, : p + 1], q[:, :prompt], scale)
        for p in range(prompt, q.shape[1], stride)
    ]

    def select(selector: DecodeSelector, wanted: float) -> tuple[float, list[Tensor]]:
        at: Any = replace(selector, dial=1 - wanted)  # type: ignore[type-var]
        return at.dial, [at.select(c.q, c.k, past_q=c.past_q, softmax_scale=scale) for c in calls]

    return _compare(calls, selectors, select, sparsities, name)


def _compare(
    calls: list[_Call],
    selectors: Sequence[Any],
    select: Callable[[Any, float], tuple[float, list[Tensor]]],
    sparsities: Sequence[float],
    name: str,
) -> list[SelectorRow]:
    rows: list[SelectorRow] = []
    for wanted in sparsities:
        found: list[tuple[str, float | None, list[Tensor]]] = [("oracle", None, _oracle(calls, wanted))]
        found.append(("blasst", *_blasst(calls, wanted)))
        for selector in selectors:
            method = type(selector).__name__
            found.append((method, *select(selector, wanted)))
            if method in COMPOSED:
                _, half = select(selector, wanted / 2)
                found.append((f"{method} + blasst", *_blasst(calls, wanted, half)))
        rows += [_row(name, method, wanted, setting, calls, masks) for method, setting, masks in found]
    return rows
