"""What one prompt does in one model: sparsity per head, skipped mass, and the skip map of one head."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from blasst.core.types import PREFILL_TILE, Phase
from blasst.evals.haystack import read_files, token_sequence
from blasst.evals.models import LoadedModel
from blasst.functional import blasst_attn_func
from blasst.integrations.threshold_rules import resolve_rules
from blasst.integrations.transformers import (
    attention_stats,
    skipped_mass_samples,
    skipped_mass_summary,
    sparse_attention,
)
from blasst.integrations.transformers_attention import AttentionCall, Layer, Session


@dataclass(frozen=True)
class LayerRow:
    """Counts of one layer and phase.

    Attributes:
        layer: module name.
        phase: "prefill" or "decode".
        visited: tiles, all heads together.
        skipped: of these.
        sparsity: skipped over visited, 0..1.
        least_head: smallest sparsity of a head.
        most_head: largest sparsity of a head.
    """

    layer: str
    phase: Phase
    visited: int
    skipped: int
    sparsity: float
    least_head: float
    most_head: float


@dataclass(frozen=True)
class Inspection:
    """What inspect_sequence measured.

    Attributes:
        seqlen: tokens, prompt and decoded together.
        rules: the thresholds in force, as text.
        layers: one row per layer and phase.
        head_sparsity: phase -> (layers, heads in prefill, KV heads in decode), 0..1.
        sparsity: phase -> skipped over visited tiles.
        skipped_mass: phase -> mean, p99, max and rows.
        mass_samples: phase -> float32 (samples,), skipped softmax weight of sampled rows.
    """

    seqlen: int
    rules: str
    layers: Sequence[LayerRow]
    head_sparsity: Mapping[Phase, NDArray[np.float64]]
    sparsity: Mapping[Phase, float]
    skipped_mass: Mapping[Phase, Mapping[str, float]]
    mass_samples: Mapping[Phase, Tensor]

    def summary(self) -> dict[str, Any]:
        """Everything but the samples, as JSON values."""
        return {
            "seqlen": self.seqlen,
            "rules": self.rules.splitlines(),
            "sparsity": dict(self.sparsity),
            "skipped_mass": {phase: dict(mass) for phase, mass in self.skipped_mass.items()},
            "layers": [asdict(row) for row in self.layers],
        }


@torch.inference_mode()
def inspect_sequence(
    model: Any, token_ids: Sequence[int], settings: Mapping[str, Any], *, decode_tokens: int = 16
) -> Inspection:
    """Run one sequence sparsely and record what every layer and head skipped, and what that weighed.

    Args:
        model: a transformers causal language model, in eval mode.
        token_ids: the sequence.
        settings: keyword arguments of sparse_attention (profile, target_sparsity, threshold, ...).
        decode_tokens: this many tokens at the end are fed one at a time against the cache.

    Raises:
        ValueError: the sequence is not longer than decode_tokens.
    """
    if not 0 <= decode_tokens < len(token_ids):
        raise ValueError(f"decode_tokens is {decode_tokens}, the sequence has {len(token_ids)} tokens")
    ids = torch.tensor([list(token_ids)], dtype=torch.int64, device=model.device)
    prompt_length = ids.shape[1] - decode_tokens
    options = {**settings, "collect_counts": True, "measure_skipped_mass": True}
    with sparse_attention(model, **options) as enabled:
        state = model(ids[:, :prompt_length], use_cache=True, logits_to_keep=1)
        for position in range(prompt_length, ids.shape[1]):
            step = ids[:, position : position + 1]
            state = model(step, cache=state.cache, use_cache=True)
        stats = attention_stats(model)
        samples = skipped_mass_samples(model)
        masses = skipped_mass_summary(model)
        rules = str(enabled)
    phases = list(dict.fromkeys(record.phase for record in stats))
    shares = {id(record): (record.skipped.double() / record.visited.clamp(min=1)).numpy() for record in stats}
    return Inspection(
        seqlen=ids.shape[1],
        rules=rules,
        layers=[
            LayerRow(
                record.layer,
                record.phase,
                int(record.visited.sum()),
                int(record.skipped.sum()),
                record.sparsity,
                float(shares[id(record)].min()),
                float(shares[id(record)].max()),
            )
            for record in stats
        ],
        head_sparsity={
            phase: np.stack([shares[id(record)] for record in stats if record.phase == phase])
            for phase in phases
        },
        sparsity={
            phase: sum(int(record.skipped.sum()) for record in stats if record.phase == phase)
            / max(1, sum(int(record.visited.sum()) for record in stats if record.phase == phase))
            for phase in phases
        },
        skipped_mass=masses,
        mass_samples=samples,
    )


class _Capture:
    """Handler of a session that keeps one layer's queries and keys and computes the model's own attention."""

    def __init__(self, layer_index: int) -> None:
        self.layer_index = layer_index
        self.call: AttentionCall | None = None

    def __call__(self, layer: Layer, call: AttentionCall) -> Tensor:
        if layer.index == self.layer_index:
            self.call = call
        return call.native()


@dataclass(frozen=True)
class SkipMap:
    """Tiles of one head in prefill.

    Attributes:
        kept: bool (query tiles, key tiles), visited and kept.
        visited: bool (query tiles, key tiles), at least one visible pair.
        layer: position among the served layers.
        head: query head.
        threshold: linear ratio that was applied.
    """

    kept: NDArray[np.bool_]
    visited: NDArray[np.bool_]
    layer: int
    head: int
    threshold: float

    @property
    def title(self) -> str:
        """What the map shows, for a figure."""
        return f"Layer {self.layer}, query head {self.head}, threshold {self.threshold:.3g}"


@torch.inference_mode()
def skip_map(
    model: Any, token_ids: Sequence[int], *, threshold: float, layer: int, head: int, dense_tail: int = 0
) -> SkipMap:
    """The tiles that one head skips in prefill; layers below it run the model's own attention.

    Args:
        model: a transformers causal language model, in eval mode.
        token_ids: the prompt.
        threshold: linear ratio in [0, 1].
        layer: position among the layers that blasst serves.
        head: query head.
        dense_tail: last rows that skip nothing.

    Raises:
        ValueError: no such layer or head.
    """
    capture = _Capture(layer)
    session = Session.create(model, capture)
    if not 0 <= layer < len(session.served):
        raise ValueError(f"layer is {layer}, the model has served layers 0 to {len(session.served) - 1}")
    session.activate()
    try:
        ids = torch.tensor([list(token_ids)], dtype=torch.int64, device=model.device)
        model(ids, use_cache=False, logits_to_keep=1)
    finally:
        session.deactivate()
    call = capture.call
    if call is None:
        raise ValueError(f"layer {layer} was not called")
    num_heads, num_kv_heads = call.q.shape[2], call.k.shape[2]
    if not 0 <= head < num_heads:
        raise ValueError(f"head is {head}, the layer has heads 0 to {num_heads - 1}")
    kv_head = head // (num_heads // num_kv_heads)
    out = blasst_attn_func(
        call.q[:, :, head : head + 1],
        call.k[:, :, kv_head : kv_head + 1],
        call.v[:, :, kv_head : kv_head + 1],
        threshold=threshold,
        causal=True,
        softmax_scale=call.softmax_scale,
        window_size=call.window_size,
        softcap=call.softcap,
        sinks=None if call.sinks is None else call.sinks[head : head + 1],
        dense_tail=dense_tail,
        return_kept_tiles=True,
    )
    assert out.kept_tiles is not None
    kept = out.kept_tiles[0, 0].cpu().numpy()
    return SkipMap(kept, _visited(kept.shape, len(token_ids), call.window_size[0]), layer, head, threshold)


def _visited(shape: tuple[int, ...], seqlen: int, window_left: int) -> NDArray[np.bool_]:
    """Tiles with at least one visible pair under a causal mask, bool like shape."""
    first_row = np.arange(shape[0])[:, None] * (PREFILL_TILE.query or 1)
    last_row = np.minimum(first_row + (PREFILL_TILE.query or 1), seqlen) - 1
    first_key = np.arange(shape[1])[None, :] * PREFILL_TILE.key
    last_key = np.minimum(first_key + PREFILL_TILE.key, seqlen) - 1
    seen = first_key <= last_row
    if window_left >= 0:
        seen = seen & (last_key >= first_row - window_left)
    return np.asarray(seen)


def mass_histogram(samples: Tensor, *, decades: int = 6, bins_per_decade: int = 8) -> dict[str, Any]:
    """Histogram of skipped masses on a logarithmic axis that ends at 1.

    Args:
        samples: float (n,), 0..1.
        decades: length of the axis.
        bins_per_decade: resolution.

    Returns:
        edges (bins + 1), counts (bins) and below: samples under the first edge.
    """
    edges = np.logspace(-decades, 0, decades * bins_per_decade + 1)
    values = samples.double().numpy()
    counts, _ = np.histogram(values, edges)
    return {"edges": edges.tolist(), "counts": counts.tolist(), "below": int((values < edges[0]).sum())}


def prompt_tokens(tokenizer: Any, prompt: Path | None, length: int) -> list[int]:
    """Token ids of a text file, cut to a length, or of generated prose.

    Args:
        tokenizer: a transformers tokenizer.
        prompt: UTF-8 text file; None = prose from the standard library's help texts.
        length: tokens; a shorter file is used whole.
    """
    if prompt is None:
        return token_sequence(tokenizer, "prose", seed=0, index=0, num_tokens=length)
    return list(tokenizer(read_files([prompt])).input_ids)[:length]


def inspect_prompt(
    loaded: LoadedModel,
    settings: Mapping[str, Any],
    *,
    prompt: Path | None,
    length: int,
    decode_tokens: int,
    layer: int,
    head: int,
    out: Path | None,
) -> Inspection:
    """inspect_sequence on a text, and the pictures of it.

    Args:
        loaded: model and tokenizer.
        settings: keyword arguments of sparse_attention.
        prompt: text file, or None for generated prose.
        length: tokens.
        decode_tokens: tokens at the end that are fed one at a time.
        layer: layer of the skip map.
        head: query head of the skip map.
        out: folder for skip_map.png, head_sparsity.png and skipped_mass.png; None = no pictures.

    Raises:
        ValueError: the text is too short, or there is no such layer or head.
    """
    ids = prompt_tokens(loaded.tokenizer, prompt, length)
    inspection = inspect_sequence(loaded.model, ids, settings, decode_tokens=decode_tokens)
    if out is None:
        return inspection
    from blasst.report import plots
    from blasst.report.style import save_png

    rule = resolve_rules(
        settings.get("profile"), settings.get("target_sparsity"), settings.get("threshold"), None
    )["prefill"]
    threshold = rule.for_length(len(ids)) or 0.0
    tiles = skip_map(
        loaded.model, ids, threshold=threshold, layer=layer, head=head, dense_tail=rule.dense_tail
    )
    out.mkdir(parents=True, exist_ok=True)
    target = float(settings.get("target_sparsity") or inspection.sparsity.get("prefill", 0.0))
    shape = (PREFILL_TILE.query or 1, PREFILL_TILE.key)
    save_png(plots.skip_map_figure(tiles.kept, tiles.visited, shape, tiles.title), out / "skip_map.png")
    save_png(plots.head_sparsity_figure(inspection.head_sparsity, target), out / "head_sparsity.png")
    rows = [
        {"phase": phase, "seqlen": len(ids), "target": target, **mass_histogram(samples)}
        for phase, samples in inspection.mass_samples.items()
    ]
    save_png(plots.skipped_mass_figure(rows), out / "skipped_mass.png")
    return inspection
