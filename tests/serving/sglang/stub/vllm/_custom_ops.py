"""The one function that SGLang 0.5.23 takes from vLLM when it runs on a CPU without its own CPU kernels."""

from __future__ import annotations

from torch import Tensor


def rotary_embedding(
    positions: Tensor,
    query: Tensor,
    key: Tensor | None,
    head_size: int,
    cos_sin_cache: Tensor,
    is_neox: bool,
    *_: object,
    **__: object,
) -> None:
    """Rotate query and key in place.

    positions is (tokens,), query and key are (tokens, heads * head_size), cos_sin_cache is (positions,
    rotary size): cosines, then sines. Pairs are the two halves of the rotated part, or neighbours if not
    is_neox.
    """
    cos, sin = cos_sin_cache[positions.flatten()].float().chunk(2, dim=-1)  # [tokens, rotary / 2] each
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    half = cos.shape[-1]
    for states in (query, key):
        if states is None:
            continue
        rotated = states.view(cos.shape[0], -1, head_size)[..., : 2 * half]
        if is_neox:
            first, second = rotated[..., :half], rotated[..., half:]
        else:
            first, second = rotated[..., 0::2], rotated[..., 1::2]
        a, b = first.float(), second.float()
        first.copy_(a * cos - b * sin)
        second.copy_(b * cos + a * sin)
