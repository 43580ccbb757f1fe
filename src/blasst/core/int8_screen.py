"""Screened prefill: two-sided bounds of every score of a tile from 8-bit copies of Q and K.

A score is q . m + q . (k - m) for any fixed vector m. The second product does not change when a channel of
one side is divided by what the other is multiplied by, and both are rotated by the same orthogonal matrix.
Then both sides are rounded to 8 bits, the integers are multiplied exactly, and what rounding can have cost is
bounded. The bounds cover scores as a float32 kernel computes them, in any order of summation.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from blasst.core.errors import UnsupportedError
from blasst.core.key_codes import KeyCodes
from blasst.core.problem import AttentionProblem
from blasst.core.screen import check_screen, rounding
from blasst.core.types import PREFILL_TILE

_TILE = PREFILL_TILE.key

#: Keys from which the fixed vector is taken, and keys and rows from which the channel scales are.
FIRST_KEYS = 2048

#: Half a step, and what a quotient rounded in float32 may lie beside the nearest integer.
_HALF = 0.5 + 2.0**-13

_EPS, _TINY = torch.finfo(torch.float32).eps, torch.finfo(torch.float32).tiny
_SMALLEST = _TINY / _EPS  # what underflow may take away lies far below


@dataclass(frozen=True)
class Int8Recipe:
    """How Q and K are rounded and bounded; calls use the default, the others are there to be measured.

    Attributes:
        center: what is taken off the keys: "first", the mean of the first of them; "tile", the mean of those
            that share a step; or "none".
        balance: move channel scales, powers of two, between keys and queries, by the sizes of "both", of the
            "keys" alone, or "none".
        rotate: Hadamard matrix on both sides, in blocks of the largest power of two that divides head_dim.
        keys_per_step: keys that share a step; divides 128.
        step_per_row: a step for each row; False = one for the query tile.
        bound: "l1", "l2", or "both", the smaller of the two.
    """

    center: Literal["first", "tile", "none"] = "first"
    balance: Literal["both", "keys", "none"] = "both"
    rotate: bool = True
    keys_per_step: int = _TILE
    step_per_row: bool = True
    bound: Literal["l1", "l2", "both"] = "both"


@dataclass(frozen=True)
class Int8Keys:
    """8-bit keys of one sequence, padded to whole tiles, in groups of keys that share a step.

    Attributes:
        codes: int8 (num_kv_heads, keys, head_dim).
        finite: bool (num_kv_heads, keys), the key has codes; False for padding.
        step: (num_kv_heads, groups).
        center: float32 (num_kv_heads, 1 or groups, head_dim), the vector that was taken off.
        scale: float32 (num_kv_heads, head_dim), powers of two that the keys were divided by.
        sum: (num_kv_heads, groups), largest sum of absolute values of a rounded key.
        norm: the same of its Euclidean norm.
        residual: the same of the norm of what rounding changed.
        size: largest norm of a key, or a bound of it, before all this.
        recipe: how they were made.
    """

    codes: Tensor
    finite: Tensor
    step: Tensor
    center: Tensor
    scale: Tensor
    sum: Tensor
    norm: Tensor
    residual: Tensor
    size: Tensor
    recipe: Int8Recipe

    @staticmethod
    def of(k: Tensor, q: Tensor, dtype: torch.dtype, recipe: Int8Recipe | None = None) -> Int8Keys:
        """Round the keys of a sequence.

        Args:
            k: (seqlen_k, num_kv_heads, head_dim).
            q: (seqlen_q, num_heads, head_dim); the sizes of its channels count for the channel scales.
            dtype: of steps and norms, float32 or float64; codes are computed in float32 whatever it is.
            recipe: default `Int8Recipe()`.
        """
        recipe = recipe or Int8Recipe()
        keys = k.transpose(0, 1).float()
        keys = torch.nn.functional.pad(keys, (0, 0, 0, -k.shape[0] % _TILE))
        finite = keys.isfinite().all(-1)
        finite[:, k.shape[0] :] = False
        center = _center(keys, finite, recipe)
        moved = keys - center.repeat_interleave(keys.shape[1] // max(center.shape[1], 1), 1)
        scale = _channel_scale(moved, finite, q, recipe)
        turned = moved / scale[:, None]
        turned = _rotated(turned) if recipe.rotate else turned
        finite &= turned.isfinite().all(-1)
        turned, moved = (x.masked_fill(~finite[..., None], 0.0) for x in (turned, moved))

        group = recipe.keys_per_step
        parts = turned.unflatten(1, (-1, group))  # [heads, groups, keys, dim]
        step = _step(parts.abs().amax((-1, -2)))
        codes = (parts / step[..., None, None]).round_()
        wide, wide_step = codes.to(dtype), step.to(dtype)
        rounded = wide * wide_step[..., None, None]
        size = norm(moved.to(dtype)).unflatten(1, (-1, group)).amax(-1)
        return Int8Keys(
            codes.to(torch.int8).flatten(1, 2),
            finite,
            wide_step,
            center,
            scale,
            wide.abs().sum(-1).amax(-1) * wide_step,
            norm(wide).amax(-1) * wide_step,
            norm(parts.to(dtype) - rounded).amax(-1),
            size + norm(center.to(dtype)),
            recipe,
        )


@dataclass(frozen=True)
class Int8Rows:
    """8-bit rows of one query tile, times softmax_scale: (num_heads, rows), and head_dim more for codes.

    Attributes:
        codes: int8.
        step: of each row.
        rows: the rows themselves times softmax_scale, float32, 0 in a row without codes.
        finite: bool, the row has codes.
        sum: sum of absolute values after rotation and scales.
        norm: Euclidean norm there.
        residual: norm of what rounding changed.
        size: norm before rotation and scales.
    """

    codes: Tensor
    step: Tensor
    rows: Tensor
    finite: Tensor
    sum: Tensor
    norm: Tensor
    residual: Tensor
    size: Tensor

    @staticmethod
    def of(q: Tensor, softmax_scale: float, keys: Int8Keys) -> Int8Rows:
        """Round the rows of one query tile for the keys that they meet.

        Args:
            q: (num_heads, rows, head_dim).
            softmax_scale: factor on q . k.
            keys: of the sequence.
        """
        dtype, recipe = keys.step.dtype, keys.recipe
        group = q.shape[0] // keys.scale.shape[0]
        rows = q.float() * softmax_scale
        turned = rows * keys.scale.repeat_interleave(group, 0)[:, None]
        if recipe.rotate:  # the matrix is not normalised: its block size goes with the rows
            turned = _rotated(turned) / _block(q.shape[-1])
        finite = turned.isfinite().all(-1) & rows.isfinite().all(-1)
        rows, turned = (x.masked_fill(~finite[..., None], 0.0) for x in (rows, turned))
        largest = turned.abs().amax(-1)
        if not recipe.step_per_row and largest.shape[1]:
            largest = largest.amax(-1, keepdim=True).expand_as(largest)
        step = _step(largest)
        codes = (turned / step[..., None]).round_()
        rounded = codes.to(dtype) * step[..., None].to(dtype)
        wide = turned.to(dtype)
        return Int8Rows(
            codes.to(torch.int8),
            step.to(dtype),
            rows,
            finite,
            wide.abs().sum(-1),
            norm(wide),
            norm(wide - rounded),
            norm(rows.to(dtype)),
        )


def check_screen_name(screen: object) -> bool:
    """Whether prefill is asked to screen.

    Args:
        screen: what the user gave.

    Raises:
        TypeError: no text.
        ValueError: another text than "int8".
    """
    if screen is None:
        return False
    if not isinstance(screen, str):
        raise TypeError(f'screen: got {type(screen).__name__}, want KeyCodes, "int8" or None')
    if screen != "int8":
        raise ValueError(f'screen: got {screen!r}, want "int8" or None')
    return True


def with_screen(problem: AttentionProblem, screen: object) -> AttentionProblem:
    """A call with what its `screen=` asks for: "int8" under the prefill rule, key codes under that of decode.

    Args:
        problem: the call without it.
        screen: what the user gave.

    Raises:
        TypeError: another type.
        ValueError: another text, codes of another cache, or a call without a threshold.
        UnsupportedError: a call that cannot be screened so.
    """
    if isinstance(screen, KeyCodes):
        return replace(problem, screen=check_screen(screen, problem))
    if not check_screen_name(screen):
        return problem
    reason = None
    if problem.phase == "decode":
        reason = f"{problem.max_seqlen_q} new tokens, which follow the decode rule; that takes KeyCodes"
    elif problem.max_skipped_mass is not None:
        reason = "max_skipped_mass, which needs the scores of every tile"
    elif problem.want_mass_bound:
        reason = "return_mass_bound, which needs the scores of every tile"
    if reason is not None:
        raise UnsupportedError(f'screen: "int8" is not supported beside {reason}')
    if problem.threshold is None:
        raise ValueError('screen: got "int8" without a threshold, want threshold= or threshold_scale_factor=')
    return replace(problem, int8_screen=True)


def score_bounds(
    rows: Int8Rows, keys: Int8Keys, tiles: range, visible: Tensor, softcap: float
) -> tuple[Tensor, Tensor]:
    """Upper and lower bound of each row's largest visible score in each tile.

    -inf where nothing is visible; NaN where a visible score could come out as NaN or infinite.

    Args:
        rows: of one query tile.
        keys: of the sequence.
        tiles: key tiles in question.
        visible: bool (rows, keys of these tiles), or (num_heads, rows, keys) under a block mask; padding is
            never visible.
        softcap: 0 = none.

    Returns:
        (upper, lower), both (num_heads, rows, tiles).
    """
    dtype, kv_heads, dim = keys.step.dtype, keys.step.shape[0], keys.codes.shape[-1]
    num_heads, num_rows = rows.step.shape
    width = keys.recipe.keys_per_step
    per_tile = _TILE // width
    columns = slice(tiles.start * _TILE, tiles.stop * _TILE)
    groups = slice(tiles.start * per_tile, tiles.stop * per_tile)
    heads = num_heads // kv_heads

    def of_keys(value: Tensor) -> Tensor:
        return value[:, groups].repeat_interleave(heads, 0)[:, None]  # [heads, 1, groups]

    # integers below 2^24 and their sums are exact in float32, whatever precision torch multiplies with
    exact = torch.float32 if dim * 127**2 < 2**24 else torch.float64
    dots = rows.codes.to(exact).view(kv_heads, -1, dim) @ keys.codes[:, columns].to(exact).transpose(1, 2)
    dots = dots.view(num_heads, num_rows, -1).masked_fill_(~visible, -math.inf)
    best = dots.unflatten(-1, (-1, width)).amax(-1).to(dtype)
    center = keys.center if keys.center.shape[1] == 1 else keys.center[:, groups]
    center = center.repeat_interleave(heads, 0).transpose(1, 2)
    constant = (rows.rows.double() @ center.double()).to(dtype)  # q . m, [heads, rows, 1 or groups]
    estimate = constant + best * (rows.step[..., None] * of_keys(keys.step))

    relative = rounding(dim, torch.float32)
    error = (1 + relative) * _rounding_error(rows, of_keys, keys)
    turned = (rows.norm + rows.residual)[..., None] * of_keys(keys.norm + keys.residual)
    error += 32 * _EPS * turned  # the rotations with at most 12 sums each, khat, qhat and the estimate
    magnitude = (rows.size[..., None] + _SMALLEST) * (of_keys(keys.size) + _SMALLEST)
    error += 2 * relative * magnitude + _SMALLEST
    upper, lower = estimate + error, estimate - error
    if softcap > 0:
        slack = 16 * _EPS * softcap
        upper, lower = (torch.tanh(x / softcap) * softcap + y for x, y in ((upper, slack), (lower, -slack)))

    lost = ~(magnitude < torch.finfo(torch.float32).max / 4)
    if not bool(keys.finite[:, columns].all()):
        broken = ~keys.finite[:, columns].repeat_interleave(heads, 0)[:, None] & visible
        lost = lost | broken.unflatten(-1, (-1, width)).any(-1)
    lost = lost | ~rows.finite[..., None]
    nothing = ~visible.unflatten(-1, (-1, width)).any(-1)
    both = []
    for value in (upper, lower):
        value = value.masked_fill(lost, math.nan).masked_fill(nothing, -math.inf)
        both.append(value.unflatten(-1, (-1, per_tile)).amax(-1))
    return both[0], both[1]


def _rounding_error(rows: Int8Rows, of_keys: Callable[[Tensor], Tensor], keys: Int8Keys) -> Tensor:
    """How far the product of codes may lie from that of what was rounded, (num_heads, rows, groups).

    a . b - ahat . bhat = a . (b - bhat) + (a - ahat) . bhat, and each product is at most the largest entry of
    one side times the sum of the other (L1), or the product of the norms (L2).
    """
    row_step, row_sum, row_norm, row_residual = (
        x[..., None] for x in (rows.step, rows.sum, rows.norm, rows.residual)
    )
    by_sum = _HALF * (of_keys(keys.step) * row_sum + row_step * of_keys(keys.sum))
    by_norm = row_norm * of_keys(keys.residual) + row_residual * of_keys(keys.norm)
    bound = keys.recipe.bound
    return by_sum if bound == "l1" else by_norm if bound == "l2" else torch.minimum(by_sum, by_norm)


def norm(x: Tensor) -> Tensor:
    """Euclidean norm over the last axis, also where squares would overflow or vanish."""
    largest = x.abs().amax(-1, keepdim=True).clamp(min=_TINY)
    return torch.linalg.vector_norm(x / largest, dim=-1) * largest[..., 0]


def _step(largest: Tensor) -> Tensor:
    """Step with which the largest value becomes 127."""
    return (largest / 127).clamp(min=_TINY)


def _block(head_dim: int) -> int:
    """Largest power of two that divides head_dim."""
    return head_dim & -head_dim


def _rotated(x: Tensor) -> Tensor:
    """Hadamard transform of the last axis in blocks, not normalised; sums and differences alone."""
    width = 1
    while width < _block(x.shape[-1]):
        pairs = x.unflatten(-1, (-1, 2, width))
        a, b = pairs[..., 0, :], pairs[..., 1, :]
        x = torch.stack((a + b, a - b), -2).flatten(-3)
        width *= 2
    return x


def _center(keys: Tensor, finite: Tensor, recipe: Int8Recipe) -> Tensor:
    """The vector to take off, float32 (heads, 1 or groups, head_dim)."""
    if recipe.center == "none":
        return keys.new_zeros(keys.shape[0], 1, keys.shape[2])
    if recipe.center == "first":
        parts, counted = keys[:, None, :FIRST_KEYS], finite[:, None, :FIRST_KEYS]
    else:
        parts, counted = (x.unflatten(1, (-1, recipe.keys_per_step)) for x in (keys, finite))
    total = parts.masked_fill(~counted[..., None], 0.0).double().sum(-2)
    return (total / counted.sum(-1).clamp(min=1)[..., None]).float()


def _channel_scale(moved: Tensor, finite: Tensor, q: Tensor, recipe: Int8Recipe) -> Tensor:
    """What each channel of the keys is divided by: powers of two, float32 (heads, head_dim).

    With sizes a of a channel of q and b of k, the root of b / a makes the product of both norms smallest.
    """
    if recipe.balance == "none":
        return moved.new_ones(moved.shape[0], moved.shape[2])
    size = _channel_size(moved[:, :FIRST_KEYS], finite[:, :FIRST_KEYS])
    if recipe.balance == "both":
        rows = q[:FIRST_KEYS].unflatten(1, (moved.shape[0], -1)).permute(1, 0, 2, 3).flatten(1, 2).float()
        size = size - _channel_size(rows, rows.isfinite().all(-1))
    power = (size - size.mean(-1, keepdim=True)) / 2
    return torch.exp2(power.round().clamp(-16, 16)).float()


def _channel_size(x: Tensor, counted: Tensor) -> Tensor:
    """log2 of the root mean square of each channel over what counts, float64 (heads, head_dim)."""
    total = x.masked_fill(~counted[..., None], 0.0).double().square().sum(1)
    return (total / counted.sum(-1).clamp(min=1)[:, None]).sqrt().clamp(min=1e-30).log2()
