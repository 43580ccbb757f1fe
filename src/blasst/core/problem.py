"""One checked attention call in canonical form: what the public functions hand to a kernel."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from blasst.core.types import Phase


@dataclass(frozen=True)
class AttentionProblem:
    """Every kernel takes this and nothing else; all checks are done before it is built.

    Three layouts of q (batched 4-D, packed 3-D with cu_seqlens_q) and three of k, v (batched 4-D, packed
    3-D with cu_seqlens_k and no block_table, pages with block_table). Strides are arbitrary; the last
    dimension has stride 1.

    Attributes:
        q: (batch, seqlen_q, num_heads, head_dim) or packed (total_q, num_heads, head_dim).
        k: (batch, seqlen_k, num_kv_heads, head_dim), packed (total_k, num_kv_heads, head_dim), or pages
            (num_pages, page_size, num_kv_heads, head_dim). Dtype of q, or float8_e4m3fn.
        v: like k, with head_dim_v; may share storage with k (MLA).
        phase: which rule of the specification applies.
        threshold: float32 (batch,) on the device of q with values in [0, 1] (values on a device are not
            read back: a kernel treats above 1 as 1, NaN and negative as 0); None = dense.
        softmax_scale: factor on q . k.
        causal: bottom-right aligned: row i of seqlen_q sees keys <= i + seqlen_k - seqlen_q.
        window_size: (left, right) keys around the aligned position; -1 = unlimited.
        softcap: cap * tanh(score / cap) before the mask; 0 = none.
        sinks: float32 (num_heads,) natural-log logits added to the softmax denominator, or None.
        max_skipped_mass: error budget eps in (0, 1), or None.
        cu_seqlens_q: int32 (batch + 1,), packed q only.
        cu_seqlens_k: int32 (batch + 1,), packed k, or lengths of a paged k in a varlen call.
        seqused_k: int32 (batch,) keys in use, counted from slot 0 (left padding included), or None = all.
        leftpad_k: int32 (batch,) first valid key slot, or None = 0. Keys before it do not exist: lengths,
            masks and the tile grid count from it.
        block_table: int32 (batch, max_pages) page index of each page of a sequence, or None.
        max_seqlen_q: upper bound of query rows of a sequence (host integer).
        max_seqlen_k: upper bound of key slots of a sequence (host integer).
        k_descale: float32 (batch, num_kv_heads), any strides: the keys are k.float() * k_descale, and scores
            and decisions are theirs; None = 1. Only with k in float8_e4m3fn.
        v_descale: the same for v.
        block_mask: bool (batch, heads that vote, query tiles, key tiles), shape of the kept map: a tile that
            is False is attended by no row of its query tile and counts as not visited. None = all.
        dense_tail: query tiles that hold one of a sequence's last so many rows skip nothing; prefill only.
        screen: codes, low and step of `KeyCodes` of the keys, or empty = no screening; decode only, with a
            threshold, without budget, mass bound, descale and leftpad.
        int8_screen: tiles are skipped by bounds from 8-bit copies of Q and K instead of their scores; prefill
            only, with a threshold, without budget and mass bound.
        progressive: k was expanded from `ProgressiveKeys`, which is what a kernel that reads their planes is
            there to avoid; the others of a GPU refuse.
        want_counts: fill AttentionOutput.counts.
        want_mass_bound: fill AttentionOutput.mass_bound.
        want_kept_tiles: fill AttentionOutput.kept_tiles.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    phase: Phase
    threshold: Tensor | None
    softmax_scale: float
    causal: bool
    window_size: tuple[int, int]
    softcap: float
    sinks: Tensor | None
    max_skipped_mass: float | None
    cu_seqlens_q: Tensor | None
    cu_seqlens_k: Tensor | None
    seqused_k: Tensor | None
    leftpad_k: Tensor | None
    block_table: Tensor | None
    max_seqlen_q: int
    max_seqlen_k: int
    k_descale: Tensor | None = None
    v_descale: Tensor | None = None
    block_mask: Tensor | None = None
    dense_tail: int = 0
    screen: Sequence[Tensor] = ()
    int8_screen: bool = False
    progressive: bool = False
    want_counts: bool = False
    want_mass_bound: bool = False
    want_kept_tiles: bool = False

    @property
    def packed(self) -> bool:
        """Whether q is (total_q, num_heads, head_dim)."""
        return self.cu_seqlens_q is not None

    @property
    def screened(self) -> bool:
        """Whether tiles are skipped without their scores."""
        return self.int8_screen or len(self.screen) > 0

    @property
    def batch_size(self) -> int:
        """Number of sequences."""
        if self.cu_seqlens_q is not None:
            return self.cu_seqlens_q.shape[0] - 1
        return self.q.shape[0]

    @property
    def num_heads(self) -> int:
        """Query heads."""
        return self.q.shape[-2]

    @property
    def num_kv_heads(self) -> int:
        """Key and value heads."""
        return self.k.shape[-2]

    @property
    def head_dim(self) -> int:
        """Size of one query or key vector."""
        return self.q.shape[-1]

    @property
    def head_dim_v(self) -> int:
        """Size of one value vector."""
        return self.v.shape[-1]
