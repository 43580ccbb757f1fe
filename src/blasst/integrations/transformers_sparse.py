"""Sparse attention of one call of a transformers layer: which public function, with which lengths."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from blasst.core.types import AttentionOutput, Phase, SkipCounts
from blasst.functional import blasst_attn_func, blasst_attn_varlen_func, blasst_attn_with_kvcache
from blasst.integrations.threshold_rules import ThresholdRule
from blasst.integrations.transformers_attention import AttentionCall, Layer
from blasst.integrations.transformers_state import Counters, MassSamples


def _prefill_padded(
    call: AttentionCall, threshold: Tensor | None, options: dict[str, Any]
) -> AttentionOutput:
    """Pack the real rows and keys, so that tiles start at each sequence's first real token."""
    assert call.record is not None
    packing = call.record.packing(call.q.device)
    batch, q_length = call.q.shape[:2]
    result = blasst_attn_varlen_func(
        call.q.flatten(0, 1).index_select(0, packing.rows),
        call.k.flatten(0, 1).index_select(0, packing.keys),
        call.v.flatten(0, 1).index_select(0, packing.keys),
        packing.cu_rows,
        packing.cu_keys,
        max(packing.row_counts),
        max(packing.key_counts),
        threshold=threshold,
        **options,
    )
    out = result.out.new_zeros(batch * q_length, *result.out.shape[1:])
    out[packing.rows] = result.out
    return result._replace(out=out.unflatten(0, (batch, q_length)))


def _decode_scattered(
    call: AttentionCall, threshold: Tensor | None, options: dict[str, Any]
) -> AttentionOutput:
    """Decode over a cache with padding between real keys: one call per sequence on its gathered keys."""
    out = call.q.new_zeros(*call.q.shape[:3], call.v.shape[-1])
    parts = []
    for index, rows, keys in call.sequences():
        part = blasst_attn_with_kvcache(
            call.q[index, rows][None],
            call.k[index, keys][None],
            call.v[index, keys][None],
            threshold=None if threshold is None else threshold[index : index + 1],
            **options,
        )
        out[index, rows] = part.out[0]
        parts.append(part)
    lse = (
        torch.cat([p.lse.flatten() for p in parts if p.lse is not None])
        if options.get("return_lse")
        else None
    )
    counts = None
    if options.get("return_counts"):
        known = [p.counts for p in parts if p.counts is not None]
        counts = SkipCounts(torch.cat([c.skipped for c in known]), torch.cat([c.visited for c in known]))
    return AttentionOutput(out, lse, counts, None, None)


def attend(call: AttentionCall, threshold: Tensor | None, **extra: Any) -> AttentionOutput:
    """Attention of a call through the public functions.

    Args:
        call: the call.
        threshold: float32 (batch,) on the device, or None = dense.
        **extra: further keyword arguments of the public functions.

    Returns:
        `out` is (batch, seqlen_q, num_heads, head_dim_v) with zeros in padding rows; `lse` and `counts` as
        the function that was chosen returns them (padding rows: -inf or left out).
    """
    record = call.record
    options = {
        "causal": True,
        "softmax_scale": call.softmax_scale,
        "window_size": call.window_size,
        "softcap": call.softcap,
        "sinks": call.sinks,
        **extra,
    }
    if call.phase == "prefill":
        if record is not None and not record.plain:
            return _prefill_padded(call, threshold, options)
        used = call.k.shape[1] if record is None else record.used
        return blasst_attn_func(call.q, call.k[:, :used], call.v[:, :used], threshold=threshold, **options)
    if record is not None and not record.plain and not record.left_only:
        return _decode_scattered(call, threshold, options)
    leftpad = None if record is None else record.on_device("leftpad", call.q.device)
    screened = threshold is not None and leftpad is None and options.get("max_skipped_mass") is None
    return blasst_attn_with_kvcache(
        call.q,
        call.k,
        call.v,
        cache_seqlens=None if record is None else record.cache_seqlens(call.q.device),
        cache_leftpad=leftpad,
        threshold=threshold,
        screen=call.codes if screened else None,
        **options,
    )


@dataclass(eq=False)
class SparseHandler:
    """Serves layers with skipping attention; a phase without a threshold runs the model's own attention.

    Attributes:
        rules: threshold rule of each phase.
        impl: backend of the public functions.
        max_skipped_mass: error budget, or None.
        dense_tail: rows at the end of a prefill call that skip nothing.
        screen: "int8" or None, for prefill.
        collect_counts: add up tile counts.
        measure_skipped_mass: also run the dense kernel and compare log-sum-exps.
        counters: tile counts.
        masses: skipped mass per phase.
        bounds: what the kernels certify about it, per phase; not of padded decode calls.
    """

    rules: Mapping[Phase, ThresholdRule]
    impl: str = "auto"
    max_skipped_mass: float | None = None
    dense_tail: int = 0
    screen: str | None = None
    collect_counts: bool = False
    measure_skipped_mass: bool = False
    counters: Counters = field(default_factory=Counters)
    masses: dict[Phase, MassSamples] = field(default_factory=dict)
    bounds: dict[Phase, MassSamples] = field(default_factory=dict)
    _constant: tuple[tuple[Any, ...], Tensor] | None = None

    def reset(self) -> None:
        """Forget counts and samples."""
        self.counters, self.masses, self.bounds = Counters(), {}, {}

    def _threshold(self, call: AttentionCall, rule: ThresholdRule) -> Tensor:
        """Per-sequence thresholds of a call, computed once per forward."""
        record, device = call.record, call.q.device
        lengths = None if record is None else record.on_device("lengths", device)
        if record is not None and lengths is not None:
            key = (id(rule), device)
            if key not in record.thresholds:
                rule.check(lengths)
                record.thresholds[key] = rule.for_lengths(lengths)
            return record.thresholds[key]
        kv_len = call.k.shape[1] if record is None else record.used
        wanted = (call.phase, call.q.shape[0], kv_len, device)
        if self._constant is None or self._constant[0] != wanted:
            rule.check(kv_len)
            value = rule.for_length(kv_len)
            self._constant = (
                wanted,
                torch.full((call.q.shape[0],), value or 0.0, dtype=torch.float32, device=device),
            )
        return self._constant[1]

    def __call__(self, layer: Layer, call: AttentionCall) -> Tensor:
        """Sparse attention of one call."""
        rule = self.rules[call.phase]
        if rule.kind == "dense":
            return call.native()
        prefill = {"dense_tail": self.dense_tail, "screen": self.screen}
        result = attend(
            call,
            self._threshold(call, rule),
            max_skipped_mass=self.max_skipped_mass,
            return_counts=self.collect_counts,
            return_lse=self.measure_skipped_mass,
            return_mass_bound=self.measure_skipped_mass,
            impl=self.impl,
            **(prefill if call.phase == "prefill" else {}),
        )
        if result.counts is not None:
            self.counters.add(layer.index, call.phase, result.counts)
        if self.measure_skipped_mass and result.lse is not None:
            dense = attend(call, None, return_lse=True, impl=self.impl).lse
            assert dense is not None
            mass = -torch.expm1(result.lse - dense)  # a row that sees nothing: -inf - -inf = nan
            samples = self.masses.setdefault(call.phase, MassSamples())
            samples.add(layer.index, mass.clamp(0.0, 1.0).abs())  # no -0.0
        if self.measure_skipped_mass and result.mass_bound is not None:
            self.bounds.setdefault(call.phase, MassSamples()).add(layer.index, result.mass_bound)
        return result.out
