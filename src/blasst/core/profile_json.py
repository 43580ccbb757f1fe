"""Reading and writing the parts of a profile file; every miss names the field, the found and the wanted."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, TypeVar

from blasst.core.errors import ProfileError
from blasst.core.phase_fit import (
    COUNTING_ORDERS,
    SELECTION_REASONS,
    KindSpread,
    LengthResidual,
    ObservedRange,
    PhaseFit,
    SparsityCurve,
)
from blasst.core.sparsity_model import MODEL_NAMES, ExponentialModel, LengthExponentModel
from blasst.core.types import Phase, TileShape

Choice = TypeVar("Choice", bound=str)

#: Largest integer in a file; ratios of larger ones could exceed a float.
MAX_INTEGER = 2**63 - 1


class Fields:
    """One JSON object being read. `close` refuses keys that nobody asked for."""

    def __init__(self, value: Any, path: str) -> None:
        self._path = path
        if not isinstance(value, dict):
            raise ProfileError(f"{path}: found {_shown(value)}, wanted an object")
        self._value = value
        self._read: set[str] = set()

    def _take(self, key: str) -> Any:
        self._read.add(key)
        if key not in self._value:
            raise ProfileError(f"{self._path}.{key}: found nothing, wanted a value")
        return self._value[key]

    def _miss(self, key: str, found: Any, wanted: str) -> ProfileError:
        return ProfileError(f"{self._path}.{key}: found {_shown(found)}, wanted {wanted}")

    def has(self, key: str) -> bool:
        """Whether the key is there and not null."""
        self._read.add(key)
        return self._value.get(key) is not None

    def fields(self, key: str) -> Fields:
        """A nested object."""
        return Fields(self._take(key), f"{self._path}.{key}")

    def list_of_fields(self, key: str) -> list[Fields]:
        """A list of objects."""
        return [Fields(item, f"{self._path}.{key}[{i}]") for i, item in enumerate(self._list(key))]

    def _list(self, key: str) -> list[Any]:
        value = self._take(key)
        if not isinstance(value, list):
            raise self._miss(key, value, "a list")
        return value

    def text(self, key: str) -> str:
        """A string."""
        value = self._take(key)
        if not isinstance(value, str):
            raise self._miss(key, value, "a string")
        return value

    def texts(self, key: str) -> tuple[str, ...]:
        """A list of strings."""
        values = self._list(key)
        for value in values:
            if not isinstance(value, str):
                raise self._miss(key, value, "a list of strings")
        return tuple(values)

    def choice(self, key: str, wanted: Sequence[Choice]) -> Choice:
        """One of a few strings."""
        value = self.text(key)
        for option in wanted:
            if value == option:
                return option
        raise self._miss(key, value, " or ".join(repr(option) for option in wanted))

    def flag(self, key: str) -> bool:
        """true or false."""
        value = self._take(key)
        if not isinstance(value, bool):
            raise self._miss(key, value, "true or false")
        return value

    def number(self, key: str, low: float = -math.inf, high: float = math.inf) -> float:
        """A finite number in [low, high]."""
        return self._number(key, self._take(key), low, high)

    def _number(self, key: str, value: Any, low: float, high: float) -> float:
        wanted = "a finite number" if low == -math.inf else f"a number in [{low:g}, {high:g}]"
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise self._miss(key, value, wanted)
        if not (abs(value) <= sys.float_info.max and low <= value <= high):
            raise self._miss(key, value, wanted)
        return float(value)

    def numbers(self, key: str, low: float = -math.inf, high: float = math.inf) -> tuple[float, ...]:
        """A list of finite numbers in [low, high]."""
        return tuple(self._number(key, value, low, high) for value in self._list(key))

    def integer(self, key: str, low: int = 0) -> int:
        """An integer in [low, MAX_INTEGER]."""
        return self._integer(key, self._take(key), low)

    def _integer(self, key: str, value: Any, low: int) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= MAX_INTEGER:
            limit = f"at most {MAX_INTEGER}" if isinstance(value, int) and value > low else f"at least {low}"
            raise self._miss(key, value, f"an integer of {limit}")
        return value

    def integers(self, key: str, low: int = 0) -> tuple[int, ...]:
        """A list of integers in [low, MAX_INTEGER]."""
        return tuple(self._integer(key, value, low) for value in self._list(key))

    def span(self, key: str, low: float = -math.inf, high: float = math.inf) -> tuple[float, float]:
        """Two numbers, the first not above the second."""
        values = self.numbers(key, low, high)
        if len(values) != 2 or values[0] > values[1]:
            raise self._miss(key, list(values), "[lowest, highest]")
        return values[0], values[1]

    def require(self, key: str, condition: bool, wanted: str) -> None:
        """Refuse the value of a key that does not fit the others."""
        if not condition:
            raise self._miss(key, self._value.get(key), wanted)

    def close(self) -> None:
        """Refuse keys that nobody asked for."""
        unknown = sorted(set(self._value) - self._read)
        if unknown:
            raise ProfileError(
                f"{self._path}.{unknown[0]}: found an unknown field, wanted {sorted(self._read)}"
            )


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def phase_fit_to_json(fit: PhaseFit) -> dict[str, Any]:
    """A fit as JSON values."""
    ours, theirs = fit.length_exponent, fit.exponential
    return {
        "tile": {"query": fit.tile.query, "key": fit.tile.key},
        "order": fit.order,
        **({} if fit.splits == 1 else {"splits": fit.splits}),
        **({} if fit.dense_tail == 0 else {"dense_tail": fit.dense_tail}),
        "selected": fit.selected,
        "selected_by": fit.selected_by,
        "exponential": {"a": theirs.a, "b": theirs.b, "r2": theirs.r2},
        "length_exponent": None
        if ours is None
        else {
            **{
                name: getattr(ours, name) for name in ("c0", "c1", "c2", "c3", "c4", "reference_length", "r2")
            },
            "logit_range": list(ours.logit_range),
        },
        "observed": {
            "sparsity": list(fit.observed.sparsity),
            "seqlen": list(fit.observed.seqlen),
            "threshold": list(fit.observed.threshold),
        },
        "points": [
            {
                "seqlen": curve.seqlen,
                "samples": curve.samples,
                "visited": curve.visited,
                "threshold": list(curve.threshold),
                "skipped": list(curve.skipped),
            }
            for curve in fit.points
        ],
        "residuals": [
            {
                "model": item.model,
                "seqlen": item.seqlen,
                "held_out": item.held_out,
                "target": list(item.target),
                "residual": list(item.residual),
            }
            for item in fit.residuals
        ],
        "kind_spread": [
            {"kind": item.kind, "seqlen": item.seqlen, "target": item.target, "achieved": item.achieved}
            for item in fit.kind_spread
        ],
    }


def phase_fit_from_json(phase: Phase, fields: Fields) -> PhaseFit:
    """Inverse of `phase_fit_to_json`.

    Raises:
        ProfileError: names the field, what was found and what is wanted.
    """
    tile = fields.fields("tile")
    observed = fields.fields("observed")
    shape = TileShape(tile.integer("query", 1) if tile.has("query") else None, tile.integer("key", 1))
    shortest, longest = observed.span("seqlen", 1.0)
    points = tuple(_curve(item) for item in fields.list_of_fields("points"))
    lengths = [curve.seqlen for curve in points]
    fields.require("points", _rise(lengths), "lengths that rise")
    fit = PhaseFit(
        phase=phase,
        tile=shape,
        order=fields.choice("order", COUNTING_ORDERS),
        exponential=_exponential(fields.fields("exponential")),
        length_exponent=_length_exponent(fields.fields("length_exponent"))
        if fields.has("length_exponent")
        else None,
        selected=fields.choice("selected", MODEL_NAMES),
        selected_by=fields.choice("selected_by", SELECTION_REASONS),
        observed=ObservedRange(
            sparsity=observed.span("sparsity", 0.0, 1.0),
            seqlen=(int(shortest), int(longest)),
            threshold=observed.span("threshold", 0.0, 1.0),
        ),
        points=points,
        residuals=tuple(_residual(item) for item in fields.list_of_fields("residuals")),
        kind_spread=tuple(_spread(item) for item in fields.list_of_fields("kind_spread")),
        splits=fields.integer("splits", 1) if fields.has("splits") else 1,
        dense_tail=fields.integer("dense_tail") if fields.has("dense_tail") else 0,
    )
    for part in (tile, observed, fields):
        part.close()
    return fit


def _exponential(fields: Fields) -> ExponentialModel:
    model = ExponentialModel(fields.number("a"), fields.number("b"), fields.number("r2"))
    fields.close()
    return model


def _length_exponent(fields: Fields) -> LengthExponentModel:
    model = LengthExponentModel(
        c0=fields.number("c0"),
        c1=fields.number("c1"),
        c2=fields.number("c2"),
        c3=fields.number("c3"),
        c4=fields.number("c4"),
        reference_length=fields.number("reference_length"),
        logit_range=fields.span("logit_range"),
        r2=fields.number("r2"),
    )
    fields.close()
    return model


def _curve(fields: Fields) -> SparsityCurve:
    curve = SparsityCurve(
        seqlen=fields.integer("seqlen", 1),
        samples=fields.integer("samples", 1),
        visited=fields.integer("visited", 1),
        threshold=fields.numbers("threshold", 0.0, 1.0),
        skipped=fields.integers("skipped"),
    )
    fields.require("threshold", _rise(curve.threshold), "thresholds that rise")
    fits = len(curve.skipped) == len(curve.threshold) and all(
        a <= b for a, b in pairwise((*curve.skipped, curve.visited))
    )
    fields.require("skipped", fits, "one count per threshold, none that falls or exceeds visited")
    fields.close()
    return curve


def _rise(values: Sequence[float]) -> bool:
    return all(a < b for a, b in pairwise(values))


def _residual(fields: Fields) -> LengthResidual:
    item = LengthResidual(
        model=fields.choice("model", MODEL_NAMES),
        seqlen=fields.integer("seqlen", 1),
        held_out=fields.flag("held_out"),
        target=fields.numbers("target", 0.0, 1.0),
        residual=fields.numbers("residual", -1.0, 1.0),
    )
    fields.close()
    return item


def _spread(fields: Fields) -> KindSpread:
    item = KindSpread(
        kind=fields.text("kind"),
        seqlen=fields.integer("seqlen", 1),
        target=fields.number("target", 0.0, 1.0),
        achieved=fields.number("achieved", 0.0, 1.0),
    )
    fields.close()
    return item
