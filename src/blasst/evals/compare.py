"""Compare a model under sparse attention with itself under dense attention, on given token sequences."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from blasst.core.errors import BlasstError


class QualityError(BlasstError):
    """Sparse attention agrees less with dense attention than the stated limits allow."""


@dataclass(frozen=True)
class MassSummary:
    """Skipped softmax weight of attention rows, 0..1.

    Attributes:
        n: rows looked at (a sample).
        mean: mean over rows.
        p99: 99th percentile.
        max: largest of the sample.
    """

    n: int
    mean: float
    p99: float
    max: float


@dataclass(frozen=True)
class Comparison:
    """Model-level agreement with dense attention.

    Attributes:
        num_tokens: predicted tokens that entered the means.
        nll_dense: mean negative log-likelihood per token, nats.
        nll_sparse: the same under sparse attention.
        kl: mean KL(dense || sparse) of the next-token distribution, nats.
        top1_agreement: share of positions whose most likely next token is the same, 0..1.
        skipped_mass: per phase; empty when not measured.
        sparsity: skipped over visited tiles per phase, 0..1.
        layer_skipped_mass: per phase, mean skipped mass of each layer index; empty when not measured.
    """

    num_tokens: int
    nll_dense: float
    nll_sparse: float
    kl: float
    top1_agreement: float
    skipped_mass: Mapping[str, MassSummary]
    sparsity: Mapping[str, float]
    layer_skipped_mass: Mapping[str, Mapping[int, float]]

    @property
    def nll_difference(self) -> float:
        """nll_sparse - nll_dense."""
        return self.nll_sparse - self.nll_dense


def compare(
    model: Any,
    sequences: Sequence[Tensor | Sequence[int]],
    settings: Mapping[str, Any],
    *,
    last_tokens: int | None = None,
    decode_tokens: int = 0,
    chunk_size: int = 256,
    measure_skipped_mass: bool = True,
) -> Comparison:
    """Teacher-forced comparison of sparse with dense attention.

    Args:
        model: a transformers causal language model, on its device, in eval mode.
        sequences: token ids, each a 1-D int64 tensor or a list, of any lengths from 2 up.
        settings: keyword arguments of sparse_attention (profile, target_sparsity, threshold, ...).
        last_tokens: only the last so many predictions of each sequence enter the means, default all.
        decode_tokens: this many tokens at the end of each sequence are fed one at a time against the cache
            (the decode rule); the rest in one forward pass (the prefill rule). Default 0.
        chunk_size: positions whose logits exist at once; memory is chunk_size x vocabulary float32.
        measure_skipped_mass: also measure the skipped softmax weight (a second dense attention per layer).

    Returns:
        Means over all predictions of all sequences.

    Raises:
        ValueError: an empty or too short sequence, or one longer than the model takes.
    """
    raise NotImplementedError


def compare_dense(
    model: Any,
    sequences: Sequence[Tensor | Sequence[int]],
    settings: Mapping[str, Any],
    *,
    min_top1_agreement: float | None = None,
    max_nll_difference: float | None = None,
    max_kl: float | None = None,
    max_layer_skipped_mass: float | None = None,
    **options: Any,
) -> Comparison:
    """Compare with dense attention and fail when agreement is below a stated limit.

    Args:
        model: as in compare.
        sequences: as in compare.
        settings: as in compare.
        min_top1_agreement: smallest share of equal most likely tokens, 0..1.
        max_nll_difference: largest nll_sparse - nll_dense, nats per token.
        max_kl: largest mean KL, nats.
        max_layer_skipped_mass: largest mean skipped mass of any layer, 0..1.
        **options: last_tokens, decode_tokens, chunk_size, measure_skipped_mass of compare.

    Returns:
        The comparison, when every stated limit holds.

    Raises:
        ValueError: no limit was stated.
        QualityError: a limit does not hold; names every broken limit, and the layers to ignore.
    """
    raise NotImplementedError
