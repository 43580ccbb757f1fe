"""What one phase of a calibration holds: the counts, both fits, their errors, and which one is used."""

from __future__ import annotations

import bisect
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args

from blasst.core.errors import ProfileError
from blasst.core.sparsity_model import ExponentialModel, LengthExponentModel, ModelName, solve_target
from blasst.core.types import DECODE_TILE, PREFILL_TILE, Phase, TileShape

#: Two rules have no visiting order: "anchors" is that of decode, "int8" that of `screen="int8"` in prefill.
CountingOrder = Literal["sink_first", "descending", "ascending", "anchors", "int8"]
#: Why a model was selected: error on lengths left out, error on the fitted lengths, or nothing to choose.
SelectionReason = Literal["held_out_lengths", "fitted_lengths", "single_length"]

COUNTING_ORDERS: tuple[CountingOrder, ...] = get_args(CountingOrder)
SELECTION_REASONS: tuple[SelectionReason, ...] = ("held_out_lengths", "fitted_lengths", "single_length")

#: What the kernels of this library vote in: a profile must have been counted like this to be served.
SERVING_TILES: Mapping[Phase, TileShape] = {"prefill": PREFILL_TILE, "decode": DECODE_TILE}
SERVING_ORDERS: Mapping[Phase, CountingOrder] = {"prefill": "sink_first", "decode": "anchors"}


@dataclass(frozen=True)
class CountingRule:
    """How the rows of a phase vote: what a threshold means.

    Attributes:
        tile: shape of a vote.
        order: visiting order, "anchors" or "int8".
        splits: decode in ascending order: parts of the key axis, each with a running maximum of its own; part
            i has every splits-th tile from the i-th on.
        dense_tail: prefill: query tiles with one of the last so many rows of a call skip nothing.
    """

    tile: TileShape
    order: CountingOrder
    splits: int = 1
    dense_tail: int = 0


#: How `blasst.calibrate.collect` counts unless told otherwise, and profiles are served. The last rows of a
#: prompt stay dense: the answer is read from them, and they are few (docs/method.md).
SERVING_RULES: Mapping[Phase, CountingRule] = {
    "prefill": CountingRule(PREFILL_TILE, SERVING_ORDERS["prefill"], dense_tail=64),
    "decode": CountingRule(DECODE_TILE, SERVING_ORDERS["decode"]),
}

#: The same for prefill with `screen="int8"`, and the name of its fit in a profile file.
SCREENED_RULE = CountingRule(PREFILL_TILE, "int8", dense_tail=64)
SCREENED_FIT = "prefill_screened"


@dataclass(frozen=True)
class ObservedRange:
    """Smallest and largest value among the fitted points.

    Attributes:
        sparsity: skipped over visited tiles.
        seqlen: kv_len.
        threshold: linear threshold.
    """

    sparsity: tuple[float, float]
    seqlen: tuple[int, int]
    threshold: tuple[float, float]


@dataclass(frozen=True)
class SparsityCurve:
    """Counts of all prompts of about one length, summed over kinds, layers and heads.

    Attributes:
        seqlen: representative kv_len (geometric mean, weighted by visited tiles).
        samples: prompts in the sum.
        visited: visited tiles.
        threshold: rising thresholds.
        skipped: tiles skipped at each threshold.
    """

    seqlen: int
    samples: int
    visited: int
    threshold: tuple[float, ...]
    skipped: tuple[int, ...]

    @property
    def sparsity(self) -> tuple[float, ...]:
        """Skipped over visited at each threshold."""
        return tuple(count / max(self.visited, 1) for count in self.skipped)


@dataclass(frozen=True)
class LengthResidual:
    """Achieved minus target sparsity of one model at one length.

    Attributes:
        model: whose thresholds.
        seqlen: length of the curve they were looked up in.
        held_out: whether the model was fitted without this length.
        target: the targets asked for.
        residual: achieved minus target, in units of sparsity.
    """

    model: ModelName
    seqlen: int
    held_out: bool
    target: tuple[float, ...]
    residual: tuple[float, ...]

    @property
    def rms(self) -> float:
        """Root mean square of the residuals; 0 without any."""
        return math.sqrt(sum(r * r for r in self.residual) / max(len(self.residual), 1))


@dataclass(frozen=True)
class KindSpread:
    """Achieved sparsity of one kind of prompt at the threshold of a target."""

    kind: str
    seqlen: int
    target: float
    achieved: float


@dataclass(frozen=True)
class PhaseFit:
    """Everything known about one phase.

    Attributes:
        phase: which rule was counted.
        tile: tile shape in which was counted.
        order: visiting order in which was counted.
        exponential: the model of TensorRT-LLM and ModelOpt files.
        length_exponent: our own model, or None when there was one length only.
        selected: the model that gives the thresholds.
        selected_by: on what ground.
        observed: range of the fitted points.
        points: the counts, one curve per length.
        residuals: achieved minus target per model and length.
        kind_spread: achieved sparsity per kind of prompt.
        splits: parts of the key axis in which was counted, see `CountingRule`.
        dense_tail: last rows that were counted as dense, see `CountingRule`.
    """

    phase: Phase
    tile: TileShape
    order: CountingOrder
    exponential: ExponentialModel
    length_exponent: LengthExponentModel | None
    selected: ModelName
    selected_by: SelectionReason
    observed: ObservedRange
    points: tuple[SparsityCurve, ...]
    residuals: tuple[LengthResidual, ...] = ()
    kind_spread: tuple[KindSpread, ...] = ()
    splits: int = 1
    dense_tail: int = 0

    def __post_init__(self) -> None:
        if self.splits != 1 and (self.phase, self.order) != ("decode", "ascending"):
            raise ProfileError(
                f"phases.{self.name}.splits: found {self.splits} with order {self.order!r}, wanted 1; only "
                "decode in ascending order has splits"
            )
        if type(self.dense_tail) is not int or self.dense_tail < 0:
            raise ProfileError(
                f"phases.{self.name}.dense_tail: found {self.dense_tail!r}, wanted an integer >= 0"
            )
        if self.dense_tail and self.phase != "prefill":
            raise ProfileError(
                f"phases.{self.name}.dense_tail: found {self.dense_tail}, wanted 0; only prefill has one"
            )
        if self.selected == "length_exponent" and self.length_exponent is None:
            raise ProfileError(
                f"phases.{self.name}.selected: found 'length_exponent' without that model, "
                "wanted 'exponential'"
            )

    @property
    def name(self) -> str:
        """Its name in a profile file."""
        return SCREENED_FIT if self.order == SCREENED_RULE.order else self.phase

    @property
    def rule(self) -> CountingRule:
        """How was counted."""
        return CountingRule(self.tile, self.order, self.splits, self.dense_tail)

    @property
    def model(self) -> ExponentialModel | LengthExponentModel:
        """The selected model."""
        if self.selected == "length_exponent" and self.length_exponent is not None:
            return self.length_exponent
        return self.exponential

    def predicted_sparsity(self, threshold: float, kv_len: float) -> float:
        """Sparsity that the selected model expects at a threshold, and no more than was counted at any.

        Args:
            threshold: linear, in [0, 1].
            kv_len: keys of the sequence; below 128 acts as 128.
        """
        return min(solve_target(self.model, threshold, kv_len), self.reachable_sparsity(kv_len))

    def reachable_sparsity(self, kv_len: float) -> float:
        """Largest sparsity that was counted at any threshold, interpolated in ln(kv_len).

        Beyond the counted lengths the value of the nearest one.
        """
        lengths = [curve.seqlen for curve in self.points]
        reach = [max(curve.sparsity, default=0.0) for curve in self.points]
        if not lengths:
            return 1.0
        i = bisect.bisect_left(lengths, kv_len)
        if i == 0 or i == len(lengths):
            return reach[min(i, len(lengths) - 1)]
        share = math.log(kv_len / lengths[i - 1]) / math.log(lengths[i] / lengths[i - 1])
        return reach[i - 1] + share * (reach[i] - reach[i - 1])
