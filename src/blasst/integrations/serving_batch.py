"""One step of an engine with a paged cache: prompts, chunks of prompts and decode steps in one batch."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from blasst.core.errors import UnsupportedError
from blasst.core.types import MAX_DECODE_TOKENS, AttentionOutput, Phase, SkipCounts, num_tiles
from blasst.functional import blasst_attn_varlen_func, blasst_attn_with_kvcache
from blasst.integrations.serving_options import ServingRules
from blasst.kernels.select import backend_used


class LayerOptions(NamedTuple):
    """What a layer adds to a step; the words of the public functions.

    Attributes:
        softmax_scale: factor on q . k.
        window_size: (left, right), -1 = unlimited.
        softcap: 0 = none.
        sinks: (num_heads,) or None.
        impl: kernel.
    """

    softmax_scale: float
    window_size: tuple[int, int] = (-1, -1)
    softcap: float = 0.0
    sinks: Tensor | None = None
    impl: str = "auto"


@dataclass(frozen=True, eq=False)
class _Group:
    """Sequences of a step that go into one call.

    Attributes:
        phase: the rule that holds for them.
        rows: int64 rows of q that belong to them, or None = the first `num_rows`.
        num_rows: how many.
        new_tokens: of each sequence in decode; of the longest in prefill.
        seq_lens: int32 (sequences,) keys, cache and new.
        block_table: int32 (sequences, pages).
        cu_seqlens_q: int32 (sequences + 1,), prefill only.
        cu_seqlens_k: int32 (sequences + 1,), prefill only.
        threshold: float32 (sequences,), or None = dense.
    """

    phase: Phase
    rows: Tensor | None
    num_rows: int
    new_tokens: int
    seq_lens: Tensor
    block_table: Tensor
    cu_seqlens_q: Tensor | None
    cu_seqlens_k: Tensor | None
    threshold: Tensor | None
    dense_tail: int  # rows at the end of each sequence that skip nothing


@dataclass(frozen=True, eq=False)
class PagedStep:
    """A step split by the rule that each sequence follows; made once, used by every layer.

    A sequence with 1 to 8 new tokens follows the decode rule, one with more the prefill rule, whether the
    tokens are a whole prompt, a chunk of one or what follows a cached prefix. Thresholds follow each
    sequence's own number of keys.
    """

    groups: tuple[_Group, ...]
    max_seqlen_k: int

    @staticmethod
    def split(
        query_starts: Sequence[int],
        seq_lens: Tensor,
        block_table: Tensor,
        max_seqlen_k: int,
        page_size: int,
        rules: ServingRules,
    ) -> PagedStep:
        """Split a step.

        Args:
            query_starts: (sequences + 1) where each sequence's rows begin, on the host; sequences without
                rows (padding of a batch) take no part.
            seq_lens: int32 (sequences,) keys of each sequence, cache and new.
            block_table: int32 (sequences, pages); entries past need are not read.
            max_seqlen_k: at least the longest sequence's keys.
            page_size: tokens of a page.
            rules: threshold of each phase.
        """
        lengths = [end - begin for begin, end in pairwise(query_starts)]
        members: dict[tuple[Phase, int], list[int]] = {}
        for index, length in enumerate(lengths):
            if length > MAX_DECODE_TOKENS:
                members.setdefault(("prefill", 0), []).append(index)
            elif length > 0:
                members.setdefault(("decode", length), []).append(index)
        device = seq_lens.device
        block_table = block_table[:, : max(num_tiles(max_seqlen_k, page_size), 1)]
        groups = []
        for (phase, new_tokens), chosen in members.items():
            rows: Tensor | None = None
            lens, table = seq_lens, block_table
            if len(chosen) < len(lengths):
                picks = torch.tensor(chosen, device=device)
                lens, table = seq_lens.index_select(0, picks), block_table.index_select(0, picks)
                spans = [torch.arange(query_starts[i], query_starts[i + 1]) for i in chosen]
                rows = torch.cat(spans).to(device)
            picked = [lengths[i] for i in chosen]
            cu_q = cu_k = None
            if phase == "prefill":
                cu_q = torch.tensor([0, *picked], dtype=torch.int32).cumsum(0, dtype=torch.int32).to(device)
                cu_k = torch.nn.functional.pad(lens.cumsum(0, dtype=torch.int32), (1, 0))
            rule = rules.of(phase)
            groups.append(
                _Group(
                    phase,
                    rows,
                    sum(picked),
                    new_tokens or max(picked),
                    lens,
                    table,
                    cu_q,
                    cu_k,
                    None if rule.kind == "dense" else rule.for_lengths(lens),
                    rule.dense_tail,
                )
            )
        return PagedStep(tuple(groups), max_seqlen_k)

    def attend(
        self, q: Tensor, k_pages: Tensor, v_pages: Tensor, out: Tensor, layer: LayerOptions
    ) -> list[tuple[Phase, SkipCounts]]:
        """Attention of one layer; the new keys and values are in the pages already.

        Args:
            q: (rows, num_heads, head_dim).
            k_pages: (pages, page_size, num_kv_heads, head_dim).
            v_pages: (pages, page_size, num_kv_heads, head_dim_v).
            out: (rows, num_heads, head_dim_v), written; rows that belong to no sequence stay as they are.
            layer: what else the layer needs.

        Returns:
            Tiles skipped and visited, of each call.
        """
        counts = []
        for group in self.groups:
            rows = q[: group.num_rows] if group.rows is None else q.index_select(0, group.rows)
            result = self._call(group, rows, k_pages, v_pages, layer)
            values = result.out.view(group.num_rows, *result.out.shape[-2:])
            if group.rows is None:
                out[: group.num_rows] = values
            else:
                out.index_copy_(0, group.rows, values)
            if result.counts is not None:
                counts.append((group.phase, result.counts))
        return counts

    def _call(
        self, group: _Group, q: Tensor, k_pages: Tensor, v_pages: Tensor, layer: LayerOptions
    ) -> AttentionOutput:
        if group.cu_seqlens_q is None or group.cu_seqlens_k is None:
            return blasst_attn_with_kvcache(
                q.unflatten(0, (-1, group.new_tokens)),
                k_pages,
                v_pages,
                cache_seqlens=group.seq_lens,
                block_table=group.block_table,
                threshold=group.threshold,
                causal=True,
                return_counts=True,
                **layer._asdict(),
            )
        return blasst_attn_varlen_func(
            q,
            k_pages,
            v_pages,
            group.cu_seqlens_q,
            group.cu_seqlens_k,
            group.new_tokens,
            self.max_seqlen_k,
            block_table=group.block_table,
            threshold=group.threshold,
            dense_tail=group.dense_tail,
            causal=True,
            return_counts=True,
            **layer._asdict(),
        )


@functools.lru_cache(maxsize=64)
def require_kernels(
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    head_dim_v: int,
    page_size: int,
    dtype: torch.dtype,
    device: torch.device,
    options: LayerOptions,
) -> None:
    """Run both rules once on a small cache, so that what no kernel serves ends the start of an engine.

    Args:
        num_heads: query heads of a layer.
        num_kv_heads: heads of its cache.
        head_dim: size of a query and of a key.
        head_dim_v: size of a value.
        page_size: tokens of a page of the cache.
        dtype: of queries and of the cache.
        device: where the layer runs.
        options: what else the layer needs.

    Raises:
        UnsupportedError: no kernel serves the layer; on a GPU with impl="auto" also when only the eager one
            does.
    """
    length = 9  # the shortest that follows the prefill rule
    pages = num_tiles(length, page_size)
    k_pages = torch.zeros(pages, page_size, num_kv_heads, head_dim, dtype=dtype, device=device)
    v_pages = torch.zeros(pages, page_size, num_kv_heads, head_dim_v, dtype=dtype, device=device)
    table = torch.arange(pages, dtype=torch.int32, device=device)[None]
    lengths = torch.tensor([length], dtype=torch.int32, device=device)
    starts = torch.tensor([0, length], dtype=torch.int32, device=device)
    q = torch.zeros(length, num_heads, head_dim, dtype=dtype, device=device)
    common: dict[str, Any] = {
        "block_table": table,
        "threshold": 0.0,
        "causal": True,
        "return_counts": True,
        **options._asdict(),
    }
    with torch.no_grad():
        blasst_attn_varlen_func(q, k_pages, v_pages, starts, starts, length, length, **common)
        used = [backend_used()]
        blasst_attn_with_kvcache(q[None, :1], k_pages, v_pages, cache_seqlens=lengths, **common)
        used.append(backend_used())
    if device.type != "cpu" and options.impl == "auto" and "eager" in used:
        raise UnsupportedError(
            f"no GPU kernel of blasst serves head size {head_dim} in {dtype}; impl=eager would, slowly"
        )
