"""What every selector looks like, and how its dial is turned to a wanted sparsity.

A selector is a frozen dataclass: its parameters, one of them `dial` in [0, 1]. A larger dial keeps more, 1
keeps every visible tile, 0 keeps what the method always keeps. What the dial is called in the paper stands in
each file. `select` returns a block mask in the tiles of this library, whatever granularity the paper has.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from blasst.core.checks import check_batch, check_number, check_qkv, check_softmax_scale

#: Halvings of the dial: 2 ** -14 of its range is finer than one tile of the sizes that are compared.
_STEPS = 14


class PrefillSelector(Protocol):
    """Chooses key tiles for each query tile of a prompt."""

    @property
    def dial(self) -> float:
        """How much is kept, 0 to 1."""

    def select(
        self, q: Tensor, k: Tensor, *, causal: bool = True, softmax_scale: float | None = None
    ) -> Tensor:
        """Block mask of a prompt.

        Args:
            q: (batch, seqlen_q, num_heads, head_dim), after position embedding.
            k: (batch, seqlen_k, num_kv_heads, head_dim), likewise.
            causal: bottom-right aligned.
            softmax_scale: factor on q . k; default head_dim ** -0.5.

        Returns:
            bool (batch, num_heads, query tiles of 64, key tiles of 128), visible tiles only; every row that
            sees keys keeps the tile of its last one.
        """


class DecodeSelector(Protocol):
    """Chooses key tiles of a cache for one decode step."""

    @property
    def dial(self) -> float:
        """How much is kept, 0 to 1."""

    def select(
        self, q: Tensor, k: Tensor, *, past_q: Tensor | None = None, softmax_scale: float | None = None
    ) -> Tensor:
        """Block mask of a decode step.

        Args:
            q: (batch, new tokens, num_heads, head_dim), after position embedding.
            k: (batch, seqlen_k, num_kv_heads, head_dim), cache and new tokens.
            past_q: (batch, prompt, num_heads, head_dim), queries of the first `prompt` positions, for methods
                that decide by the prompt.
            softmax_scale: factor on q . k; default head_dim ** -0.5.

        Returns:
            bool (batch, num_kv_heads, 1, key tiles of 64); the tiles of the new tokens are always kept.
        """


AnyPrefillSelector = TypeVar("AnyPrefillSelector", bound=PrefillSelector)


def check_inputs(q: Tensor, k: Tensor, softmax_scale: float | None, dial: float) -> float:
    """Check what every selector is given.

    Args:
        q: (batch, seqlen_q, num_heads, head_dim).
        k: (batch, seqlen_k, num_kv_heads, head_dim).
        softmax_scale: or None.
        dial: in [0, 1].

    Returns:
        The softmax scale.

    Raises:
        TypeError: a wrong type.
        ValueError: a wrong value, shape, dtype or device, or no row or key.
    """
    check_qkv(q, k, k, 4, 4, ("q", "k", "k"))
    check_batch(k, q, ("k", "q"))
    if q.shape[1] == 0 or k.shape[1] == 0:
        raise ValueError(f"q, k: got {q.shape[1]} rows and {k.shape[1]} keys, want at least one of each")
    if not 0 <= check_number("dial", dial, "a number in [0, 1]") <= 1:
        raise ValueError(f"dial: got {dial!r}, want a number in [0, 1]")
    return check_softmax_scale(softmax_scale, q.shape[-1])


def check_past(past_q: Tensor | None, q: Tensor, k: Tensor, method: str) -> Tensor:
    """The queries of the prompt, which methods that evict by it need.

    Args:
        past_q: (batch, prompt, num_heads, head_dim) or None.
        q: the new tokens.
        k: cache and new tokens.
        method: name for the message.

    Raises:
        ValueError: none given, or a wrong shape.
    """
    batch, new, num_heads, head_dim = q.shape
    wanted = f"({batch}, 1 to {k.shape[1] - new}, {num_heads}, {head_dim}): the queries of the prompt"
    if past_q is None:
        raise ValueError(f"past_q: got None, {method} wants {wanted}")
    if past_q.dim() != 4 or past_q.shape[::2] != q.shape[::2] or past_q.shape[3] != head_dim:
        raise ValueError(f"past_q: got shape {tuple(past_q.shape)}, {method} wants {wanted}")
    if not 1 <= past_q.shape[1] <= k.shape[1] - new:
        raise ValueError(f"past_q: got shape {tuple(past_q.shape)}, {method} wants {wanted}")
    return past_q


def mask_sparsity(mask: Tensor, visible: Tensor) -> float:
    """Share of visible tiles that a mask leaves out.

    Args:
        mask: bool (batch, heads, query tiles, key tiles).
        visible: bool (query tiles, key tiles).
    """
    total = int(visible.sum()) * mask.shape[0] * mask.shape[1]
    return 1.0 - int((mask & visible).sum()) / max(total, 1)


def reach_sparsity(
    selector: AnyPrefillSelector,
    q: Tensor,
    k: Tensor,
    sparsity: float,
    *,
    causal: bool = True,
    softmax_scale: float | None = None,
) -> AnyPrefillSelector:
    """The selector with its dial as low as needed to leave out at most a wanted share of the visible tiles.

    Args:
        selector: whose other parameters stay.
        q: (batch, seqlen_q, num_heads, head_dim).
        k: (batch, seqlen_k, num_kv_heads, head_dim).
        sparsity: wanted, 0 to 1. One that the method cannot reach gives dial 0.
        causal: bottom-right aligned.
        softmax_scale: default head_dim ** -0.5.
    """

    def at(dial: float) -> AnyPrefillSelector:
        changed: Any = replace(selector, dial=dial)  # type: ignore[type-var]
        return changed

    def left_out(dial: float) -> float:
        mask = at(dial).select(q, k, causal=causal, softmax_scale=softmax_scale)
        return mask_sparsity(mask, visible)

    everything = at(1.0).select(q, k, causal=causal, softmax_scale=softmax_scale)
    visible = everything[0, 0]
    low, high = 0.0, 1.0
    if left_out(low) <= sparsity:
        return at(low)
    for _ in range(_STEPS):
        middle = (low + high) / 2
        if left_out(middle) <= sparsity:
            high = middle
        else:
            low = middle
    return at(high)


def repeat_heads(k: Tensor, num_heads: int) -> Tensor:
    """Keys of each query head, float32 (batch, num_heads, seqlen_k, head_dim).

    Args:
        k: (batch, seqlen_k, num_kv_heads, head_dim).
        num_heads: query heads.
    """
    return torch.repeat_interleave(k.float().transpose(1, 2), num_heads // k.shape[2], dim=1)
