"""Checks of a block mask: which tiles a call may attend, chosen by the caller or by a selector."""

from __future__ import annotations

import torch
from torch import Tensor

from blasst.core.checks import readable
from blasst.core.problem import AttentionProblem
from blasst.core.sequences import map_shape, visible_range
from blasst.core.types import DECODE_TILE, PREFILL_TILE


def check_block_mask(block_mask: object, problem: AttentionProblem) -> Tensor:
    """A bool tensor in the shape of the kept map, in which every row that sees keys keeps one of its tiles.

    Args:
        block_mask: what the user gave.
        problem: the call without it.

    Raises:
        TypeError: no tensor, or not bool.
        ValueError: a wrong shape or device, or, where values are readable, a row without a tile.
    """
    tile = PREFILL_TILE if problem.phase == "prefill" else DECODE_TILE
    shape, device = map_shape(problem, tile), problem.q.device
    heads = "num_heads" if problem.phase == "prefill" else "num_kv_heads"

    def wanted() -> str:
        return f"a bool tensor (batch, {heads}, query tiles, key tiles) = {tuple(shape)} on {device}"

    if not isinstance(block_mask, Tensor):
        raise TypeError(f"block_mask: got {type(block_mask).__name__}, want {wanted()}")
    if block_mask.dtype != torch.bool:
        raise TypeError(f"block_mask: got dtype {block_mask.dtype}, want {wanted()}")
    if tuple(block_mask.shape) != tuple(shape):
        raise ValueError(f"block_mask: got shape {tuple(block_mask.shape)}, want {wanted()}")
    if block_mask.device != device:
        raise ValueError(f"block_mask: got a tensor on {block_mask.device}, want {wanted()}")
    if readable(block_mask):
        _check_rows(block_mask, problem)
    return block_mask


def _check_rows(block_mask: Tensor, problem: AttentionProblem) -> None:
    """No row of a sequence that sees keys has all their tiles left out."""
    tile = PREFILL_TILE if problem.phase == "prefill" else DECODE_TILE
    for index, (seqlen_q, seqlen_k) in enumerate(_lengths(problem)):
        row = torch.arange(seqlen_q)
        begin, end = visible_range(row, seqlen_q, seqlen_k, problem.causal, problem.window_size)
        seeing = begin < end
        row, begin, end = row[seeing], begin[seeing], end[seeing]
        before = torch.nn.functional.pad(
            block_mask[index].long().cumsum(-1), (1, 0)
        )  # kept tiles left of one
        of_row = before[:, row // tile.query if tile.query is not None else torch.zeros_like(row)]
        first, last = begin // tile.key, (end - 1) // tile.key
        at = [side.expand(of_row.shape[:2])[..., None] for side in (first, last + 1)]
        empty = (of_row.gather(-1, at[0]) == of_row.gather(-1, at[1]))[..., 0]  # (heads, rows)
        if bool(empty.any()):
            head, which = empty.nonzero()[0].tolist()
            raise ValueError(
                f"block_mask: leaves out all key tiles {int(first[which])} to {int(last[which])} that row "
                f"{int(row[which])} of sequence {index} sees (head {head}), want at least one of them kept"
            )


def _lengths(problem: AttentionProblem) -> list[tuple[int, int]]:
    """(rows, keys) of each sequence, without left padding."""

    def differences(cu_seqlens: Tensor | None, otherwise: int) -> list[int]:
        if cu_seqlens is None:
            return [otherwise] * problem.batch_size
        lengths: list[int] = (cu_seqlens[1:] - cu_seqlens[:-1]).tolist()
        return lengths

    rows = differences(problem.cu_seqlens_q, problem.max_seqlen_q)
    keys = differences(problem.cu_seqlens_k, problem.max_seqlen_k)
    if problem.seqused_k is not None:
        keys = problem.seqused_k.tolist()
    if problem.leftpad_k is not None:
        keys = [used - pad for used, pad in zip(keys, problem.leftpad_k.tolist())]
    return list(zip(rows, keys))
