"""The inputs of the prefill and decode benchmarks: generated on the device, or captured from a model."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from blasst.core.types import DECODE_TILE, PREFILL_TILE, Phase, num_tiles

#: Share of hot blocks. In decode three anchor tiles are kept as well, and 95% of 16K keys shall be in reach.
HOT_FRACTION = {"prefill": 0.05, "decode": 0.03}
#: How far the others lie below them, and the spread of scores inside a block, in nats.
COLD_NATS = (8.0, 40.0)
NOISE = 0.5


@dataclass(frozen=True)
class Inputs:
    """One attention input and what to call it.

    Attributes:
        name: for the "inputs" of a row.
        q: (batch, seqlen, num_heads, head_dim); in decode the new tokens only.
        k: (batch, seqlen, num_kv_heads, head_dim).
        v: (batch, seqlen, num_kv_heads, head_dim).
        softmax_scale: factor on q . k.
    """

    name: str
    q: Tensor
    k: Tensor
    v: Tensor
    softmax_scale: float

    def first(self, seqlen: int) -> Inputs:
        """The same with only the first seqlen tokens."""
        q, k, v = (x[:, :seqlen].contiguous() for x in (self.q, self.k, self.v))
        return Inputs(self.name, q, k, v, self.softmax_scale)

    def decode_step(self, seqlen: int, new_tokens: int, batch: int) -> Inputs:
        """The last new_tokens of the first seqlen against all of them, for so many equal sequences."""
        q = self.q[:, seqlen - new_tokens : seqlen]
        q, k, v = (x.repeat(batch, 1, 1, 1) for x in (q, self.k[:, :seqlen], self.v[:, :seqlen]))
        return Inputs(f"{self.name}, decode at {seqlen}", q, k, v, self.softmax_scale)

    def visible_pairs(self, causal: bool) -> int:
        """Pairs of a row and a key that the mask, aligned bottom right, lets it see: batch x query heads."""
        batch, rows, heads = self.q.shape[:3]
        hidden = rows * (rows - 1) // 2 if causal else 0
        return batch * heads * (rows * self.k.shape[1] - hidden)


def hot_and_cold_inputs(
    batch: int,
    seqlen: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    *,
    dtype: torch.dtype,
    device: torch.device,
    seed: int = 0,
    new_tokens: int | None = None,
) -> Inputs:
    """Heavy-tailed inputs whose sparsity follows ln(threshold) almost linearly, from 0 to about 0.95.

    Keys come in blocks of one key tile: 128, or 64 for a cache (new_tokens). A block is hot with chance 0.05,
    or 0.03 for a cache (the first always is), at level 0; a cold block has a level drawn evenly from 8 to 40
    nats lower, for each sequence and KV head. The score of row r and key c is level[block of c] +
    0.5 * N(0, 1) nats at softmax_scale head_dim ** -0.5. All rows agree on the levels, so all query tiles of
    a KV head skip about the same key tiles. Made in the dtype and on the device asked for; memory is that of
    q, k and v, work is linear in seqlen.

    Args:
        batch: sequences.
        seqlen: keys, and query rows without new_tokens.
        num_heads: query heads.
        num_kv_heads: key and value heads.
        head_dim: size of a vector, at least 2.
        dtype: of the tensors.
        device: where they are made.
        seed: of the generator; CPU and GPU draw different numbers from one seed.
        new_tokens: query rows of decode against a cache; None = prefill.
    """
    generator = torch.Generator(device=device).manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=device, dtype=dtype)

    phase: Phase = "prefill" if new_tokens is None else "decode"
    block, hot = (PREFILL_TILE if new_tokens is None else DECODE_TILE).key, HOT_FRACTION[phase]
    blocks = num_tiles(seqlen, block)
    draw = torch.rand(2, batch, blocks, num_kv_heads, generator=generator, device=device)
    low, high = COLD_NATS
    level = torch.where(draw[0] < hot, 0.0, -(low + (high - low) * draw[1]))
    level[:, 0] = 0.0
    level = level.repeat_interleave(block, dim=1)[:, :seqlen]
    # The first channel carries the level, the others the noise.
    root = head_dim**0.25
    q = normal(batch, new_tokens or seqlen, num_heads, head_dim)
    q[..., 0] = root
    k = normal(batch, seqlen, num_kv_heads, head_dim)
    k *= NOISE * (head_dim / (head_dim - 1)) ** 0.5
    k[..., 0] = (level * root).to(dtype)
    v = normal(batch, seqlen, num_kv_heads, head_dim)
    name = f"heavy-tailed, {hot:.0%} hot blocks of {block}, cold {low:g} to {high:g} nats lower"
    return Inputs(name, q, k, v, head_dim**-0.5)


def captured_inputs(path: Path, *, dtype: torch.dtype, device: torch.device) -> Inputs:
    """Read what `benchmarks/capture_qkv.py` wrote, or any torch file with tensors q, k and v.

    Args:
        path: a dict with q (batch, seqlen, num_heads, head_dim), k and v (batch, seqlen, num_kv_heads,
            head_dim) after position embedding; optional: name, softmax_scale (default head_dim ** -0.5).
        dtype: to convert to.
        device: where to put them.

    Raises:
        ValueError: something is missing, or the shapes do not fit.
    """
    content = torch.load(path, map_location="cpu", weights_only=True)
    if not isinstance(content, dict) or not all(isinstance(content.get(x), Tensor) for x in "qkv"):
        raise ValueError(f"{path}: wants a dict with tensors q, k and v")
    q, k, v = (content[x] for x in "qkv")
    shapes = f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
    same_rows = q.dim() == k.dim() == 4 and q.shape[:2] == k.shape[:2] and q.shape[3] == k.shape[3]
    if not same_rows or k.shape != v.shape or q.shape[2] % k.shape[2]:
        raise ValueError(
            f"{path}: wants (batch, seqlen, heads, head_dim), one seqlen and head_dim; got {shapes}"
        )
    name, scale = content.get("name", path.stem), content.get("softmax_scale", q.shape[-1] ** -0.5)
    q, k, v = (x.to(device=device, dtype=dtype).contiguous() for x in (q, k, v))
    return Inputs(f"captured: {name}", q, k, v, float(scale))
