"""How one phase of a model attends: dense, by blasst's rule, in tiles that a selector chose, or both.

What `blasst.enable` does for blasst alone, for every method that is compared with it: a session on a
transformers model whose handler runs a `Method` per phase and counts tiles. Methods can be switched between
calls, so that several ways to decode share one prompt pass.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from blasst.calibrate.collect import evaluating
from blasst.calibrate.generate import greedy_pass
from blasst.core.errors import UnsupportedError
from blasst.core.types import DECODE_TILE, PREFILL_TILE, Phase, SkipCounts, in_dense_tail
from blasst.functional import blasst_attn_func, blasst_attn_with_kvcache
from blasst.integrations.sessions import in_place_of
from blasst.integrations.threshold_rules import ThresholdRule
from blasst.integrations.transformers_attention import AttentionCall, Layer, Session, session_of
from blasst.integrations.transformers_sparse import SparseHandler, attend
from blasst.integrations.transformers_state import Counters
from blasst.selectors import H2O, DecodeSelector, PrefillSelector, SnapKV
from blasst.selectors.tiles import PromptTiles

#: Selectors that choose once, at the first step; tiles that come later are kept.
_CHOOSE_ONCE = (SnapKV, H2O)

#: Rows whose mask exists at once.
_ROWS = 2048

#: Dials at which sparsity is measured to find the one of a wanted sparsity.
_LOW = (0.0, 0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8)
DIALS = (*_LOW, 0.86, 0.9, 0.93, 0.95, 0.97, 0.98, 0.99, 0.995, 0.998, 0.9995, 1.0)


@dataclass(frozen=True)
class Method:
    """What one phase does.

    Attributes:
        rule: blasst's threshold; None = no skipping.
        selector: chooses the tiles first; None = all.
        dense_tail: query tiles with one of the last so many rows of a prompt leave out nothing.
        max_skipped_mass: error budget, with a rule.
    """

    rule: ThresholdRule | None = None
    selector: PrefillSelector | DecodeSelector | None = None
    dense_tail: int = 0
    max_skipped_mass: float | None = None

    @property
    def label(self) -> str:
        """Text that tells methods apart, for rows and to refuse rows of other settings."""
        parts = [repr(self.selector)] if self.selector is not None else []
        if self.rule is not None:
            parts.append(f"{self.rule}, budget {self.max_skipped_mass}")
        return f"{' + '.join(parts)}, dense tail {self.dense_tail}" if parts else "dense"


DENSE = Method()


@dataclass(eq=False)
class MethodHandler:
    """Runs a method per phase.

    Attributes:
        methods: of each phase; may be replaced between calls, see `use`.
        impl: backend of blasst's functions.
        counters: tiles left out and visible, of the methods that ran.
        queries: the prompt's queries by (layer, sequence), for selectors that decide by them; kept from
            every prompt pass when `keep_queries` is set.
        keep_queries: see queries.
    """

    methods: dict[Phase, Method] = field(default_factory=dict)
    impl: str = "auto"
    counters: Counters = field(default_factory=Counters)
    queries: dict[tuple[int, int], Tensor] = field(default_factory=dict)
    keep_queries: bool = False
    _chosen: dict[tuple[int, int], Tensor] = field(default_factory=dict)
    _rules: dict[Phase, SparseHandler] = field(default_factory=dict)

    def use(self, phase: Phase, method: Method) -> None:
        """Switch a phase over; what a selector chose before is forgotten, and counts begin anew.

        Args:
            phase: which.
            method: from now on.
        """
        self.methods[phase] = method
        self._chosen.clear()
        self._rules.pop(phase, None)
        if method.rule is not None:
            rules = {phase: method.rule}
            self._rules[phase] = SparseHandler(
                rules, self.impl, method.max_skipped_mass, method.dense_tail, collect_counts=True
            )
        self.counters = Counters()

    def take(self, phase: Phase) -> tuple[int, int]:
        """(tiles left out, visible tiles) of a phase since `use` or the last take.

        Args:
            phase: which.
        """
        rules = self._rules.get(phase)
        counters = [self.counters] + ([] if rules is None else [rules.counters])
        sums = [0, 0]
        for counter in counters:
            for key in [key for key in counter.sums if key[1] == phase]:
                counts = counter.sums.pop(key)
                sums[0] += int(counts.skipped.sum())
                sums[1] += int(counts.visited.sum())
        return sums[0], sums[1]

    def __call__(self, layer: Layer, call: AttentionCall) -> Tensor:
        """Attention of one call."""
        method = self.methods.get(call.phase, DENSE)
        if self.keep_queries and call.phase == "prefill":
            for index, rows, _ in call.sequences():
                self.queries[layer.index, index] = call.q[index, rows]
        if method.selector is not None:
            return self._selected(layer, call, method)
        if method.rule is not None:
            return self._rules[call.phase](layer, call)
        if call.phase == "decode" and call.record is not None and not call.record.plain:
            # torch would build a mask and repeat K and V for every query head.
            return attend(call, None, impl=self.impl).out
        return call.native()

    def _selected(self, layer: Layer, call: AttentionCall, method: Method) -> Tensor:
        out = call.q.new_zeros(*call.q.shape[:3], call.v.shape[-1])
        for index, rows, keys in call.sequences():
            q, k, v = call.q[index, rows][None], call.k[index, keys][None], call.v[index, keys][None]
            mask = self._mask(layer.index, index, call, method, q, k)
            part, counts = self._attend_tiles(call, method, mask, q, k, v)
            self.counters.add(layer.index, call.phase, counts)
            out[index, rows] = part[0].to(out.dtype)
        return out

    def _mask(
        self, layer: int, index: int, call: AttentionCall, method: Method, q: Tensor, k: Tensor
    ) -> Tensor:
        selector: Any = method.selector
        if call.phase == "prefill":
            mask = selector.select(q, k, causal=True, softmax_scale=call.scale)
            rows = PREFILL_TILE.query or 1
            for tile in range(mask.shape[2]):
                if in_dense_tail(tile * rows, q.shape[1], rows, method.dense_tail):
                    mask[:, :, tile] |= PromptTiles.of(q, k, True).visible()[tile]
            return mask
        known = self._chosen.get((layer, index))
        tiles = -(-k.shape[1] // DECODE_TILE.key)
        if known is None or not isinstance(selector, _CHOOSE_ONCE):
            past = self.queries.get((layer, index))
            past = None if past is None else past[None]
            known = selector.select(q, k, past_q=past, softmax_scale=call.scale)
        known = torch.nn.functional.pad(known, (0, tiles - known.shape[-1]), value=True)
        self._chosen[layer, index] = known
        return known

    def _attend_tiles(
        self, call: AttentionCall, method: Method, mask: Tensor, q: Tensor, k: Tensor, v: Tensor
    ) -> tuple[Tensor, SkipCounts]:
        """Output (1, seqlen_q, num_heads, head_dim_v) of one sequence, and its counts (1, heads)."""
        for name, given in (("softcap", call.softcap), ("sinks", call.sinks is not None)):
            if given:
                raise UnsupportedError(f"{name}: got a layer with it, selectors know none")
        if 0 <= call.window_size[0] < k.shape[1] - 1:
            raise UnsupportedError(f"window_size: got {call.window_size}, selectors see all keys")
        visible = mask.new_ones(mask.shape[2:])
        if call.phase == "prefill":
            visible = PromptTiles.of(q, k, True).visible()
        total = visible.sum().expand(mask.shape[:2])
        if method.rule is None:
            left_out = total - (mask & visible).sum((2, 3))
            return masked_attention(q, k, v, mask, call.scale, call.phase), SkipCounts(left_out, total)
        threshold = method.rule.for_length(k.shape[1])
        options: dict[str, Any] = {"causal": True, "softmax_scale": call.scale, "return_counts": True}
        if call.phase == "prefill":
            options["dense_tail"] = method.dense_tail
        function: Any = blasst_attn_func if call.phase == "prefill" else blasst_attn_with_kvcache
        result = function(q, k, v, threshold=threshold, block_mask=mask, **options)
        kept = result.counts.visited - result.counts.skipped
        return result.out, SkipCounts(total - kept, total)


def masked_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float, phase: Phase) -> Tensor:
    """Causal attention in the tiles of a mask, by torch; on a GPU block masks have no kernel here.

    Args:
        q: (batch, seqlen_q, num_heads, head_dim).
        k: (batch, seqlen_k, num_kv_heads, head_dim).
        v: (batch, seqlen_k, num_kv_heads, head_dim_v).
        mask: bool in the tiles of the phase, (batch, heads that vote, query tiles, key tiles).
        scale: softmax scale.
        phase: whose tiles.

    Returns:
        (batch, seqlen_q, num_heads, head_dim_v).
    """
    seqlen_q, seqlen_k, group = q.shape[1], k.shape[1], q.shape[2] // k.shape[2]
    tile = PREFILL_TILE if phase == "prefill" else DECODE_TILE
    mask = mask.repeat_interleave(q.shape[2] // mask.shape[1], dim=1)
    keys, values = (x.transpose(1, 2).repeat_interleave(group, dim=1) for x in (k, v))
    key, parts = torch.arange(seqlen_k, device=q.device), []
    for first in range(0, seqlen_q, _ROWS):
        rows = q[:, first : first + _ROWS].transpose(1, 2)
        row = torch.arange(first, first + rows.shape[2], device=q.device)
        end = min(seqlen_k, first + rows.shape[2] + seqlen_k - seqlen_q)
        of_rows = mask[:, :, row // (tile.query or seqlen_q)] if tile.query else mask
        seen = of_rows.repeat_interleave(tile.key, dim=3)[..., :end]
        seen = seen & (key[:end] <= row[:, None] + seqlen_k - seqlen_q)
        parts.append(
            torch.nn.functional.scaled_dot_product_attention(
                rows, keys[:, :, :end], values[:, :, :end], attn_mask=seen, scale=scale
            ).transpose(1, 2)
        )
    return torch.cat(parts, dim=1)


@contextmanager
def method_session(model: Any, handler: Any) -> Iterator[Session]:
    """The served layers of a model run a handler inside; afterwards the model is as before.

    Args:
        model: a transformers causal language model.
        handler: a `MethodHandler`, or another handler of attention calls.
    """
    with in_place_of(session_of(model), lambda: Session.create(model, handler)) as session:
        yield session


@dataclass(eq=False)
class _DialProbe:
    """Counts what prefill selectors would leave out at each dial; the output is dense."""

    selectors: Mapping[str, Any]
    sums: dict[str, Tensor] = field(default_factory=dict)  # name: (dials, 2) left out and visible

    def __call__(self, layer: Layer, call: AttentionCall) -> Tensor:
        if call.phase == "prefill":
            for index, rows, keys in call.sequences():
                q, k = call.q[index, rows][None], call.k[index, keys][None]
                visible = PromptTiles.of(q, k, True).visible()
                total = visible.sum() * q.shape[2]
                for name, selector in self.selectors.items():
                    found = []
                    for dial in DIALS:
                        mask = replace(selector, dial=dial).select(q, k, softmax_scale=call.scale)
                        found.append(torch.stack([total - (mask & visible).sum(), total]))
                    sums = torch.stack(found)
                    self.sums[name] = sums + self.sums[name] if name in self.sums else sums
        return call.native()


def prefill_dials(
    model: Any,
    prompts: Sequence[Sequence[int]],
    selectors: Mapping[str, PrefillSelector],
    sparsities: Sequence[float],
) -> dict[str, dict[float, float]]:
    """One dial per selector and wanted sparsity, for all layers and heads, as a threshold is.

    Args:
        model: a transformers causal language model.
        prompts: token ids, of the length that will be served.
        selectors: by name.
        sparsities: wanted, over all layers and prompts together.

    Returns:
        Per name and sparsity the dial, interpolated between `DIALS`; the smallest where a selector cannot
        reach the sparsity.
    """
    probe = _DialProbe(selectors)
    with evaluating(model), method_session(model, probe):
        for ids in prompts:
            greedy_pass(model, [ids], 0)
    dials: dict[str, dict[float, float]] = {}
    for name, sums in probe.sums.items():
        left_out = (sums[:, 0] / sums[:, 1]).double().cpu().numpy()  # falls with the dial
        dials[name] = {s: float(np.interp(-s, -left_out, np.array(DIALS))) for s in sparsities}
    return dials


def decode_dial(sparsity: float) -> float:
    """Dial of a decode selector for a wanted sparsity: the share of the tiles that stays.

    Args:
        sparsity: 0 to 1.
    """
    if not 0 <= sparsity <= 1 or math.isnan(sparsity):
        raise ValueError(f"sparsity: got {sparsity!r}, want a number in [0, 1]")
    return 1.0 - sparsity
