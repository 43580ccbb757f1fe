"""Counts for a calibration: dense forward passes in which every attention call also counts.

The output of each layer is the model's own dense attention. Beside it, the margin of every visited tile is
found in the serving tile shape and visiting order (a tile is skipped at a threshold t iff its margin is below
ln t), so one pass counts for every candidate threshold at once. Decode counts come from decode steps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from blasst.calibrate.counts import CountPoint, Floats
from blasst.calibrate.generate import greedy_pass
from blasst.calibrate.histograms import Histograms
from blasst.calibrate.prompts import Prompt, prompts_hash
from blasst.core.checks import check_dense_tail
from blasst.core.errors import CalibrationError
from blasst.core.phase_fit import SCREENED_RULE, SERVING_RULES, CountingRule
from blasst.core.types import PHASES, Phase, in_dense_tail
from blasst.integrations.sessions import in_place_of
from blasst.integrations.transformers_attention import AttentionCall, Layer, Session, session_of
from blasst.kernels.eager import decode_margins, prefill_margins
from blasst.kernels.int8_margins import screened_margins

#: Called with prompts done, prompts in all, and what comes next.
Progress = Callable[[int, int, str], None]

#: Candidate thresholds of a calibration, rising.
DEFAULT_THRESHOLDS: Floats = np.logspace(-7, 0, 64)


@dataclass(frozen=True, eq=False)
class CountRecord:
    """Counts of one prompt in one phase.

    Attributes:
        prompt: number of the prompt.
        kind: its kind.
        phase: "prefill" or "decode".
        kv_len: keys by which the kernel divides; in decode the mean over the steps, rounded.
        skipped: int64 (thresholds, layers, heads); KV heads in decode. Layers with fewer heads than the
            widest have zeros.
        visited: int64 (layers, heads).
    """

    prompt: int
    kind: str
    phase: Phase
    kv_len: int
    skipped: NDArray[np.int64]
    visited: NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class CountTable:
    """Everything that `collect` counted.

    Attributes:
        thresholds: rising, in (0, 1], float64 (T,).
        layers: names of the attention modules, in the order of the counts.
        records: one per prompt and phase.
        data_hash: digest of the token ids.
        num_prompts: prompts that were run.
        rules: how was counted, per phase.
    """

    thresholds: Floats
    layers: tuple[str, ...]
    records: tuple[CountRecord, ...]
    data_hash: str
    num_prompts: int
    rules: Mapping[Phase, CountingRule] = field(default_factory=lambda: SERVING_RULES)

    def points(self, phase: Phase) -> list[CountPoint]:
        """Counts per prompt, summed over layers and heads, for the fit; none for prompts without tiles."""
        points = []
        for record in self.records:
            visited = int(record.visited.sum())
            if record.phase == phase and visited:
                skipped = record.skipped.sum(axis=(1, 2))
                points.append(CountPoint(record.kind, record.kv_len, self.thresholds, skipped, visited))
        return points

    def head_sparsity(self, phase: Phase, threshold: float) -> Floats:
        """Sparsity per layer and head at the counted threshold nearest in log, float64 (layers, heads)."""
        records = [record for record in self.records if record.phase == phase]
        if not records:
            raise CalibrationError(f"{phase} was not counted")
        nearest = int(np.abs(np.log(self.thresholds) - np.log(threshold)).argmin())
        skipped = sum(record.skipped[nearest] for record in records)
        visited = sum(record.visited for record in records)
        return np.asarray(skipped / np.maximum(visited, 1), dtype=np.float64)


@dataclass(eq=False)
class _CountingHandler:
    """Runs the model's own attention and adds each call's margins to the histograms."""

    histograms: Histograms
    phases: Sequence[Phase]
    rules: Mapping[Phase, CountingRule]

    def __call__(self, layer: Layer, call: AttentionCall) -> Tensor:
        """The model's own attention; counts on the side."""
        if call.phase in self.phases:
            for index, rows, keys in call.sequences():
                q, k = call.q[index, rows], call.k[index, keys]
                self.histograms.add(call.phase, index, layer.index, k.shape[0], self._margins(call, q, k))
        return call.native()

    def _margins(self, call: AttentionCall, q: Tensor, k: Tensor) -> Tensor:
        """Margins (heads that vote, visited tiles) of one sequence."""
        rule = self.rules[call.phase]
        options: dict[str, Any] = {
            "softmax_scale": call.scale,
            "causal": True,
            "window_size": call.window_size,
            "softcap": call.softcap,
            "sinks": call.sinks,
        }
        if rule.tile.query is None:
            splits = None if rule.order == "anchors" else rule.splits
            return decode_margins(q, k, tile=rule.tile, splits=splits, **options)[1]
        if rule.order == SCREENED_RULE.order:
            margins = screened_margins(q, k, **options)
        else:
            margins = prefill_margins(q, k, **(options | {"tile": rule.tile, "order": rule.order}))
        rows, tail = rule.tile.query, rule.dense_tail
        parts = [
            torch.full_like(margin, math.inf) if in_dense_tail(i * rows, q.shape[0], rows, tail) else margin
            for i, _, margin in margins
        ]
        return torch.cat(parts, dim=1)


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Eval mode for every module and no gradients; each module's own mode is put back afterwards."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, training in modes.items():
            module.training = training


@contextmanager
def _counting(model: nn.Module, handler: _CountingHandler, ignore: Sequence[str]) -> Iterator[Session]:
    made = Session.create(model, handler, ignore)
    with in_place_of(session_of(model), lambda: made) as session:
        yield session


def check_thresholds(thresholds: Sequence[float] | Floats | None) -> Floats:
    """Candidate thresholds as an array.

    Args:
        thresholds: rising, in (0, 1]; None = `DEFAULT_THRESHOLDS`.

    Raises:
        ValueError: others.
    """
    values = np.asarray(DEFAULT_THRESHOLDS if thresholds is None else thresholds, dtype=np.float64)
    if (
        values.ndim != 1
        or not values.size
        or not ((values > 0) & (values <= 1)).all()
        or (np.diff(values) <= 0).any()
    ):
        raise ValueError("thresholds: wants rising values in (0, 1]")
    return values


def _check_rules(rules: Mapping[Phase, CountingRule], phases: Sequence[Phase]) -> None:
    """Refuse what cannot be counted."""
    for phase in phases:
        if phase not in rules:
            raise ValueError(f"rules: has nothing for {phase}, which is to be counted")
        rule = rules[phase]
        group_votes = rule.tile.query is None
        known = ("anchors", "ascending") if group_votes else ("sink_first", "descending", "ascending")
        if phase == "prefill" and rule.tile == SCREENED_RULE.tile:
            known = (*known, SCREENED_RULE.order)
        if rule.order not in known or (phase == "prefill" and group_votes):
            raise ValueError(f"rules: {phase} cannot be counted as {rule}")
        if rule.splits < 1 or (rule.splits > 1 and not (group_votes and rule.order == "ascending")):
            raise ValueError(f"rules: {phase} has splits {rule.splits}, wants 1, or more for a whole group")
        if check_dense_tail(rule.dense_tail) and phase != "prefill":
            raise ValueError(
                f"rules: {phase} has dense_tail {rule.dense_tail}, wants 0; only prefill has one"
            )


def _tokens_without_skips(rule: CountingRule) -> int:
    """Keys up to which no tile can ever be skipped."""
    if rule.order == "anchors":
        return 3 * rule.tile.key
    first = rule.splits * rule.tile.key
    return first + rule.dense_tail if rule.tile.query is not None else first


def _check_lengths(
    lengths: Sequence[int], phases: Sequence[Phase], rules: Mapping[Phase, CountingRule]
) -> None:
    """Refuse samples in which no tile could ever be skipped."""
    if not lengths:
        raise CalibrationError("prompts: got none, need at least one")
    if min(lengths) < 1:
        raise CalibrationError("prompts: one has no tokens")
    for phase in phases:
        needed = _tokens_without_skips(rules[phase])
        if max(lengths) <= needed:
            raise CalibrationError(
                f"prompts: the longest has {max(lengths)} tokens, so {phase} has no skippable tile; "
                f"need more than {needed} tokens (and far more for a useful calibration)"
            )


def collect(
    model: nn.Module,
    tokenizer: Any,
    prompts: Sequence[Prompt],
    *,
    phases: Sequence[Phase] = PHASES,
    thresholds: Sequence[float] | Floats | None = None,
    decode_tokens: int = 16,
    batch_size: int = 1,
    padding_side: Literal["left", "right"] = "left",
    ignore: Sequence[str] = (),
    rules: Mapping[Phase, CountingRule] = SERVING_RULES,
    progress: Progress | None = None,
) -> CountTable:
    """Run prompts densely and count, per layer, head and threshold, the tiles that would be skipped.

    The model runs in eval mode without gradients; its mode and its attention are put back, also after an
    exception. Counts are per sequence: padding changes none of them.

    Args:
        model: a transformers causal language model.
        tokenizer: for prompts given as text; may be None when all have token ids.
        prompts: what to run.
        phases: which phases to count.
        thresholds: rising candidates in (0, 1]; default `DEFAULT_THRESHOLDS`.
        decode_tokens: greedy decode steps after each prompt; needed for the decode phase.
        batch_size: prompts per forward.
        padding_side: where shorter prompts of a batch are padded.
        ignore: fnmatch patterns of attention modules that are not counted (and will not be served).
        rules: tile shape, order and dense tail to count in, per phase; those of another engine for an
            export to it (`blasst.calibrate.tiles`), or `SCREENED_RULE` for prefill with `screen="int8"`.
        progress: called before each batch and at the end.

    Raises:
        CalibrationError: no prompts, or all too short to skip anything.
        ValueError: bad arguments, or no layer of the model can be served.
    """
    values = check_thresholds(thresholds)
    if unknown := set(phases) - set(PHASES):
        raise ValueError(f"phases: unknown {sorted(unknown)}, known are {list(PHASES)}")
    if not phases or batch_size < 1:
        raise ValueError("phases and batch_size: nothing to count")
    if "decode" in phases and decode_tokens < 1:
        raise ValueError(f"decode_tokens: got {decode_tokens}, decode counts need at least 1")
    _check_rules(rules, phases)
    tokens = [prompt.ids(tokenizer) for prompt in prompts]
    _check_lengths([len(ids) for ids in tokens], phases, rules)
    histograms = Histograms(np.log(values))
    handler = _CountingHandler(histograms, phases, rules)
    steps = decode_tokens if "decode" in phases else 0
    records: list[CountRecord] = []
    with evaluating(model), _counting(model, handler, ignore) as session:
        for begin in range(0, len(tokens), batch_size):
            chunk = tokens[begin : begin + batch_size]
            if progress is not None:
                longest = max(map(len, chunk))
                progress(begin, len(tokens), f"{prompts[begin].kind}, {longest} tokens")
            histograms.clear()
            greedy_pass(model, chunk, steps, padding_side)
            for phase in phases:
                for index in range(len(chunk)):
                    counts = histograms.take(phase, index, len(session.served))
                    if counts is not None:
                        records.append(
                            CountRecord(begin + index, prompts[begin + index].kind, phase, *counts)
                        )
    if progress is not None:
        progress(len(tokens), len(tokens), "done")
    counted = {phase: rules[phase] for phase in phases}
    return CountTable(values, session.served, tuple(records), prompts_hash(tokens), len(tokens), counted)
