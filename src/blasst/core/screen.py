"""Screened decode: an upper bound of every score of a tile, from the codes of its keys alone.

In every channel d a key k of a tile lies within step_d / 2 of khat_d = low_d + step_d * (c_d + 1/2), c its
codes, so q . k <= q . khat + sum_d |q_d| * step_d / 2. The bound must hold for the score as another program
computes it, in any order of summation, so the rounding of both computations is added: see `upper_scores`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from blasst.core.errors import UnsupportedError
from blasst.core.key_codes import KeyCodes, unpack_codes
from blasst.core.problem import AttentionProblem
from blasst.core.types import DECODE_TILE, FP8

_TILE = DECODE_TILE.key

#: Relative error of the inputs of a float32 matrix product under torch.set_float32_matmul_precision.
_INPUT_ERROR = {"highest": 0.0, "high": 2.0**-10, "medium": 2.0**-7}


def check_screen(screen: KeyCodes, problem: AttentionProblem) -> tuple[Tensor, Tensor, Tensor]:
    """Codes that fit a call which can be screened; what `AttentionProblem.screen` holds.

    Args:
        screen: what the user gave.
        problem: the call without it.

    Raises:
        ValueError: codes of another cache, or a call without a threshold.
        UnsupportedError: a call that cannot be screened.
    """
    k = problem.k
    reason = not_screened_reason(problem)
    if reason is not None:
        raise UnsupportedError(f"screen: not supported beside {reason}")
    if problem.threshold is None:
        raise ValueError(
            "screen: got KeyCodes without a threshold, want threshold= or threshold_scale_factor="
        )
    tiles = problem.max_seqlen_k // _TILE
    shape = (problem.batch_size, tiles, problem.num_kv_heads, problem.head_dim)
    got = tuple(screen.low.shape)
    if (got[0], *got[2:]) != (shape[0], *shape[2:]) or got[1] < tiles:
        raise ValueError(
            f"screen: got codes of (batch, tiles, num_kv_heads, head_dim) = {got}, want {shape} "
            "(or more tiles) like the cache"
        )
    if screen.dtype != k.dtype or screen.codes.device != k.device:
        raise ValueError(
            f"screen: got codes of {screen.dtype} keys on {screen.codes.device}, want {k.dtype} on "
            f"{k.device} like the cache"
        )
    return screen.codes, screen.low, screen.step


def not_screened_reason(problem: AttentionProblem) -> str | None:
    """What screening does not go with, in a call with a threshold; None = nothing."""
    if problem.phase != "decode":
        return f"{problem.max_seqlen_q} new tokens, which follow the prefill rule; it takes 1 to 8"
    if problem.max_skipped_mass is not None:
        return "max_skipped_mass, which needs the scores of every tile"
    if problem.want_mass_bound:
        return "return_mass_bound, which needs the scores of every tile"
    if problem.leftpad_k is not None:
        return "cache_leftpad"
    return f"a cache of {FP8}" if problem.k.dtype == FP8 else None


def upper_scores(
    q: Tensor, screen: Sequence[Tensor], index: int, tiles: range, seqlen_k: int, softcap: float
) -> Tensor:
    """Upper bound of each row's largest score in each tile; inf where a tile must be scored.

    Let m = sum_d |q_d| * max|k_d|. A sum of n products in any order is off by at most n unit roundoffs of m;
    n + 8 covers what happens around it. The unit taken is 2 eps, four times that of rounding to nearest, so
    that an accumulation which truncates counts too; both the bound and the score get that much. Where m is
    near overflow or NaN, a score could be NaN, and the tile is to be scored.

    Args:
        q: (num_kv_heads, rows, head_dim) rows times softmax_scale, in the dtype of the computation.
        screen: codes, low and step as in `KeyCodes`.
        index: the sequence.
        tiles: key tiles in question.
        seqlen_k: keys of the sequence; a tile that they do not fill is not screened.
        softcap: 0 = none.

    Returns:
        (num_kv_heads, rows, tiles), dtype of q.
    """
    upper = q.new_full((*q.shape[:2], len(tiles)), math.inf)
    whole = range(tiles.start, min(tiles.stop, seqlen_k // _TILE, screen[0].shape[1]))
    if len(whole) == 0:
        return upper
    codes, low, step = (x[index, whole.start : whole.stop].transpose(0, 1) for x in screen)
    bits = codes.shape[-2] * 8 // _TILE
    low, step = low.to(q.dtype), step.to(q.dtype)  # [heads, tiles, dim]
    center = low[..., None, :] + step[..., None, :] * (unpack_codes(codes, bits).to(q.dtype) + 0.5)
    largest = torch.maximum(low.abs(), (low + step * 2**bits).abs())

    best = (q @ center.flatten(1, 2).transpose(1, 2)).unflatten(-1, (-1, _TILE)).amax(-1)
    limits = torch.finfo(q.dtype)
    smallest = limits.tiny / limits.eps  # what underflow may take away lies far below
    size = q.abs() + smallest
    half_steps = size @ (step / 2).transpose(1, 2)
    magnitude = size @ largest.transpose(1, 2)
    bound = best + half_steps + 2 * rounding(q.shape[-1], q.dtype) * magnitude + smallest
    if softcap > 0:
        bound = torch.tanh(bound / softcap) * softcap + 16 * limits.eps * softcap
    safe = magnitude < limits.max / 4
    upper[..., : len(whole)] = torch.where(safe, bound, math.inf)
    return upper


def rounding(head_dim: int, dtype: torch.dtype) -> float:
    """Relative to sum_d |q_d| * |k_d|, how far a score computed in a dtype may lie from the true one."""
    terms = (head_dim + 8) * 2 * torch.finfo(dtype).eps
    return terms / (1 - terms) + (2 * _input_error() if dtype == torch.float32 else 0.0)


def _input_error() -> float:
    """Relative error that torch may add to each input of a float32 matrix product."""
    try:
        precision = torch.get_float32_matmul_precision()
    except RuntimeError:  # set for single devices or operators, so torch has no one answer
        precision = "medium"
    return _INPUT_ERROR[precision]
