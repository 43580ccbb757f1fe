"""What comes of comparing a model under sparse attention with itself under dense attention."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class MassSummary:
    """Skipped softmax weight of attention rows, 0..1.

    Attributes:
        n: rows looked at.
        mean: mean over rows.
        p99: 99th percentile, of a sample.
        max: largest.
    """

    n: int
    mean: float
    p99: float
    max: float


@dataclass(frozen=True)
class LayerError:
    """What skipping took from one layer in one phase.

    Attributes:
        layer: module name.
        phase: "prefill" or "decode".
        sparsity: skipped over visited tiles, 0..1.
        mean_skipped_mass: skipped softmax weight, mean over rows, 0..1; None when not measured. The error of
            a row is at most twice its skipped weight times the largest value vector.
        max_skipped_mass: of the worst row; None when not measured.
        head_skipped_mass: mean of each query head; empty when not measured.
    """

    layer: str
    phase: str
    sparsity: float
    mean_skipped_mass: float | None
    max_skipped_mass: float | None
    head_skipped_mass: tuple[float, ...] = ()


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
        layers: one record per layer and phase that ran, prefill first, layers in model order.
        mass_bound: what the kernels certify about skipped_mass, per phase; a row's bound is not below its
            skipped mass.
    """

    num_tokens: int
    nll_dense: float
    nll_sparse: float
    kl: float
    top1_agreement: float
    skipped_mass: Mapping[str, MassSummary]
    sparsity: Mapping[str, float]
    layers: tuple[LayerError, ...] = field(default=(), repr=False)
    mass_bound: Mapping[str, MassSummary] = field(default_factory=dict, repr=False)

    @property
    def nll_difference(self) -> float:
        """nll_sparse - nll_dense."""
        return self.nll_sparse - self.nll_dense


def mass_summaries(masses: Mapping[Any, Mapping[str, float]]) -> dict[str, MassSummary]:
    """Of each phase, from rows, mean, p99 and max under their names."""
    return {
        phase: MassSummary(int(mass["rows"]), mass["mean"], mass["p99"], mass["max"])
        for phase, mass in masses.items()
    }
