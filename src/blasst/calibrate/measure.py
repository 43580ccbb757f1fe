"""Sparsity that a model really reaches on prompts, with the skipping kernels at work."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from blasst.calibrate.collect import Progress, evaluating
from blasst.calibrate.generate import greedy_pass
from blasst.calibrate.prompts import Prompt
from blasst.core.types import PHASES, Phase
from blasst.integrations.transformers import attention_stats, reset_stats, sparse_attention


@dataclass(frozen=True)
class AchievedSparsity:
    """Tiles of one prompt in one phase, summed over layers and heads.

    Attributes:
        phase: "prefill" or "decode".
        kind: kind of the prompt.
        seqlen: tokens of the prompt.
        skipped: skipped tiles.
        visited: visited tiles.
    """

    phase: Phase
    kind: str
    seqlen: int
    skipped: int
    visited: int

    @property
    def sparsity(self) -> float:
        """Skipped over visited; 0 when nothing was visited."""
        return self.skipped / max(self.visited, 1)


def pooled_sparsity(records: Sequence[AchievedSparsity], phase: Phase, seqlen: int | None = None) -> float:
    """Sparsity of several prompts: counts summed, then divided; 0 when there are none.

    Args:
        records: from `measure_sparsity`.
        phase: the phase to take.
        seqlen: only prompts of this length; None = all.
    """
    chosen = [r for r in records if r.phase == phase and seqlen in (None, r.seqlen)]
    return sum(r.skipped for r in chosen) / max(sum(r.visited for r in chosen), 1)


def measure_sparsity(
    model: nn.Module,
    tokenizer: Any,
    prompts: Sequence[Prompt],
    *,
    decode_tokens: int = 16,
    progress: Progress | None = None,
    **settings: Any,
) -> list[AchievedSparsity]:
    """Run prompts with sparse attention and read the kernels' own counts.

    Args:
        model: a transformers causal language model.
        tokenizer: for prompts given as text; may be None when all have token ids.
        prompts: held-out prompts.
        decode_tokens: greedy decode steps after each prompt; 0 = prefill only.
        progress: called before each prompt and at the end.
        **settings: keyword arguments of `blasst.integrations.transformers.enable`.

    Returns:
        One record per prompt and phase that ran sparse.
    """
    records = []
    with evaluating(model), sparse_attention(model, **{**settings, "collect_counts": True}):
        for number, prompt in enumerate(prompts):
            ids = prompt.ids(tokenizer)
            if progress is not None:
                progress(number, len(prompts), f"{prompt.kind}, {len(ids)} tokens")
            reset_stats(model)
            greedy_pass(model, [ids], decode_tokens)
            for phase in PHASES:
                stats = [record for record in attention_stats(model) if record.phase == phase]
                if stats:
                    skipped = sum(int(record.skipped.sum()) for record in stats)
                    visited = sum(int(record.visited.sum()) for record in stats)
                    records.append(AchievedSparsity(phase, prompt.kind, len(ids), skipped, visited))
    if progress is not None:
        progress(len(prompts), len(prompts), "done")
    return records
