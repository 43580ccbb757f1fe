"""What an output must pass before its time is reported; cheap enough for 64K tokens on a GPU.

The truth in float64 costs too much there for all rows, so it is computed for a few query tiles; the dense
output is compared with another dense kernel everywhere.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch
from torch import Tensor

from blasst.bench.inputs import Inputs
from blasst.core.errors import BlasstError
from blasst.core.reference import ReferenceOutput, reference_attention
from blasst.core.types import DECODE_TILE, PREFILL_TILE, Phase, SkipCounts, num_tiles
from blasst.testing import assert_same_kept_tiles, assert_within_budget, max_error

#: Query heads that are sampled of each place.
_SAMPLED_HEADS = 4

#: Nats around the cut in which a decision may differ from the reference in float64: float32 scores of up to
#: some hundred nats, summed over head_dim products, are off by some 1e-4.
_NEAR = 1e-3

_ROWS = PREFILL_TILE.query or 64
_ROWS_AT_ONCE = 8192


class WrongResultError(BlasstError):
    """A kernel's output is outside its error budget; its time is not reported."""


def _relative_error_allowed(dtype: torch.dtype) -> float:
    """Allowed root-mean-square difference of a query tile between two dense kernels, over that of the output.

    Each kernel rounds softmax weights and output to the dtype, a relative error of at most eps / 2 each with
    a root mean square of eps / 3.5. Two kernels: 0.6 eps, allowed 4 eps. In float32 the scores are rounded as
    coarsely as the weights: some ten nats are off by some ten eps, and so is the weight; allowed 64 eps.
    """
    return (64 if dtype == torch.float32 else 4) * torch.finfo(dtype).eps


def check_close(got: Tensor, want: Tensor, name: str) -> None:
    """Compare two dense outputs, (query tile, head) by (query tile, head).

    Args:
        got: (batch, seqlen, heads, head_dim).
        want: the same from another kernel.
        name: of got, for the message.

    Raises:
        WrongResultError: they differ by more than rounding, or one is not finite.
    """
    if got.shape != want.shape or got.dtype != want.dtype:
        raise WrongResultError(
            f"{name}: {got.dtype} {tuple(got.shape)}, want {want.dtype} {tuple(want.shape)}"
        )
    allowed = _relative_error_allowed(got.dtype)
    for begin in range(0, got.shape[1], _ROWS_AT_ONCE):
        rows = slice(begin, begin + _ROWS_AT_ONCE)
        a, b = got[:, rows].float(), want[:, rows].float()
        spare = (0, 0, 0, 0, 0, -a.shape[1] % _ROWS)
        difference, size = (
            torch.nn.functional.pad(x, spare).unflatten(1, (-1, _ROWS)).square().sum((2, 4)).sqrt()
            for x in (a - b, b)
        )
        wrong = ~(difference <= allowed * size)
        if bool(wrong.any()):
            where = wrong.nonzero()[0].tolist()
            worst = float((difference / size)[wrong].nan_to_num(nan=float("inf")).max())
            raise WrongResultError(
                f"{name}: {int(wrong.sum())} query tiles differ from the other dense kernel by up to "
                f"{worst:.2g} of their size, allowed {allowed:.2g}; the first (batch, tile, head) from row "
                f"{begin} on: {where}"
            )


def check_equal(got: Tensor, want: Tensor, what: str) -> None:
    """The same numbers in every place.

    Args:
        got: an output.
        want: another.
        what: what is promised, for the message.

    Raises:
        WrongResultError: they differ.
    """
    if not torch.equal(got, want):
        raise WrongResultError(f"{what}: they differ by up to {max_error(got, want):.3g}")


def visited_tiles_of_head(inputs: Inputs, causal: bool, phase: Phase) -> int:
    """Key tiles that the query tiles of one head visit: a query head in prefill, a KV head in decode.

    Args:
        inputs: their lengths count; as many rows as keys in prefill.
        causal: the mask; of no effect in decode, where the newest token sees every key.
        phase: whose tiles.
    """
    keys = inputs.k.shape[1]
    if phase == "decode":
        return num_tiles(keys, DECODE_TILE.key)
    ends = [min(end, keys) if causal else keys for end in range(_ROWS, keys + _ROWS, _ROWS)]
    return sum(num_tiles(end, PREFILL_TILE.key) for end in ends)


def check_counts(counts: SkipCounts, kept_tiles: Tensor, visited: int) -> None:
    """Counts agree with the map of kept tiles, and visited with the mask.

    Args:
        counts: (batch, heads) each.
        kept_tiles: (batch, heads, query tiles, key tiles).
        visited: tiles that each head must visit.

    Raises:
        WrongResultError: they do not.
    """
    if not bool((counts.visited == visited).all()):
        raise WrongResultError(f"counts.visited: {counts.visited.unique().tolist()}, want {visited}")
    if not torch.equal(counts.visited - counts.skipped, kept_tiles.sum((2, 3))):
        raise WrongResultError("counts.skipped: not the number of visited tiles that the map does not keep")


@dataclass(frozen=True)
class _Place:
    """One query tile of some heads, what they see, and the reference without skipping."""

    batch: int
    heads: Tensor  # query heads
    map_heads: Tensor  # their heads in the map of kept tiles
    tile: int
    q: Tensor  # (1, rows, sampled heads, head_dim)
    k: Tensor  # (1, keys, sampled heads, head_dim); in decode the one KV head
    values: Tensor  # v and |v| beside each other
    dense: ReferenceOutput

    def rows_of(self, out: Tensor) -> Tensor:
        begin = self.tile * _ROWS
        return out[self.batch : self.batch + 1, begin : begin + self.q.shape[1]][:, :, self.heads]


class SampledTiles:
    """A few query tiles of an input with their reference in float64.

    Prefill has two places: the last query tile, which sees most keys, and a random one; up to 4 random heads
    of each. Decode has one: a random KV head of a random sequence, with all its query heads and new tokens.
    """

    def __init__(self, inputs: Inputs, causal: bool, seed: int = 0, phase: Phase = "prefill") -> None:
        self.causal, self.scale, self.dtype = causal, inputs.softmax_scale, inputs.q.dtype
        self.phase = phase
        draw = random.Random(seed)
        if phase == "decode":
            self._places = [self._kv_head(inputs, draw)]
            return
        last = num_tiles(inputs.q.shape[1], _ROWS) - 1
        self._places = [self._place(inputs, tile, draw) for tile in sorted({last, draw.randint(0, last)})]

    def _kv_head(self, inputs: Inputs, draw: random.Random) -> _Place:
        b, kv_head = draw.randrange(inputs.k.shape[0]), draw.randrange(inputs.k.shape[2])
        group = inputs.q.shape[2] // inputs.k.shape[2]
        own = torch.tensor([kv_head], device=inputs.q.device)
        heads = kv_head * group + torch.arange(group, device=inputs.q.device)
        q = inputs.q[b : b + 1, :, heads]
        k, v = (x[b : b + 1, :, kv_head : kv_head + 1] for x in (inputs.k, inputs.v))
        values = torch.cat([v, v.abs()], dim=-1)
        return _Place(b, heads, own, 0, q, k, values, self._reference(q, k, values))

    def _place(self, inputs: Inputs, tile: int, draw: random.Random) -> _Place:
        batch, seqlen, num_heads = inputs.q.shape[:3]
        b, end = draw.randrange(batch), min((tile + 1) * _ROWS, seqlen)
        chosen = sorted(draw.sample(range(num_heads), min(num_heads, _SAMPLED_HEADS)))
        heads = torch.tensor(chosen, device=inputs.q.device)
        kv_heads = heads // (num_heads // inputs.k.shape[2])
        keys = end if self.causal else seqlen
        q = inputs.q[b : b + 1, tile * _ROWS : end][:, :, heads]
        k, v = (x[b : b + 1, :keys][:, :, kv_heads] for x in (inputs.k, inputs.v))
        values = torch.cat([v, v.abs()], dim=-1)
        return _Place(b, heads, heads, tile, q, k, values, self._reference(q, k, values))

    def _reference(
        self, q: Tensor, k: Tensor, values: Tensor, kept_tiles: Tensor | None = None, exact: bool = True
    ) -> ReferenceOutput:
        return reference_attention(
            q,
            k,
            values,
            phase=self.phase,
            causal=self.causal,
            softmax_scale=self.scale,
            kept_tiles=kept_tiles,
            dtype=torch.float64 if exact else self.dtype,
        )

    def dense_error(self, out: Tensor) -> float:
        """Largest difference of a dense output from the truth in the sampled tiles.

        Args:
            out: (batch, seqlen, num_heads, head_dim).
        """
        return max(max_error(place.rows_of(out), self._halves(place.dense.out)[0]) for place in self._places)

    def check(self, out: Tensor, kept_tiles: Tensor | None, threshold: float | None, name: str) -> float:
        """The map is the rule's, and the output that of the reference that follows the map.

        Args:
            out: (batch, seqlen, num_heads, head_dim).
            kept_tiles: (batch, heads, query tiles, key tiles), or None for a dense output.
            threshold: that they were computed with; None = dense.
            name: for the message.

        Returns:
            max|out - truth| over the sampled tiles.

        Raises:
            WrongResultError: a decision away from the cut, or a value outside the error budget.
        """
        worst = 0.0
        for place in self._places:
            kept, truth = place.dense.kept_tiles, place.dense
            try:
                if kept_tiles is not None and threshold is not None:
                    kept = self._checked_map(place, kept_tiles, threshold)
                    truth = self._reference(place.q, place.k, place.values, kept)
                want, magnitude = self._halves(truth.out)
                yardstick = self._reference(place.q, place.k, place.values, kept, exact=False).out
                got = place.rows_of(out)
                assert_within_budget(got, want, self._halves(yardstick)[0], magnitude=float(magnitude.max()))
            except AssertionError as error:
                raise WrongResultError(f"{name}, query tile {place.tile}: {error}") from error
            difference = float((got.double() - want).square().mean().sqrt())
            allowed = _relative_error_allowed(self.dtype) * float(magnitude.square().mean().sqrt())
            if not difference <= allowed:
                raise WrongResultError(
                    f"{name}, query tile {place.tile}: root-mean-square error {difference:.3g} exceeds "
                    f"{allowed:.3g}"
                )
            worst = max(worst, max_error(got, want))
        return worst

    def _checked_map(self, place: _Place, kept_tiles: Tensor, threshold: float) -> Tensor:
        """The kept map of a place, (1, heads, 1, its key tiles), compared with the rule."""
        own = kept_tiles[place.batch, place.map_heads, place.tile][None, :, None]
        keys = place.dense.kept_tiles.shape[-1]
        if bool(own[..., keys:].any()):
            raise AssertionError("kept_tiles: keeps a tile that no row sees")
        own = own[..., :keys]
        cut = torch.tensor(threshold, dtype=torch.float32).double().log().to(own.device)
        want = place.dense.kept_tiles & ~(place.dense.margin < cut)
        assert_same_kept_tiles(own, place.dense._replace(kept_tiles=want), threshold, _NEAR)
        return own

    @staticmethod
    def _halves(out: Tensor) -> tuple[Tensor, Tensor]:
        """What v and what |v| gave."""
        value, magnitude = out.chunk(2, dim=-1)
        return value, magnitude
