"""Peak memory of a call, and what docs/support.md says it may take beside its output."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from blasst.kernels import op

#: Small tensors of a call (thresholds, lengths, counts), each rounded up to 512 bytes by torch's allocator.
SMALL = 16 * 1024


def tensors_in(result: object) -> Iterator[Tensor]:
    """Every tensor of a call's output."""
    return (leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor))


def output_bytes(result: object) -> int:
    """Bytes of the output, storages that are shared counted once."""
    storages = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors_in(result)}
    return sum(storages.values())


class _Living(TorchDispatchMode):
    """Bytes of the storages that operations made and that still live, and their peak; for a CPU."""

    def __init__(self, given: set[int]) -> None:
        super().__init__()
        self.known, self.now, self.peak = given, 0, 0

    def _gone(self, key: int, size: int) -> None:
        self.known.discard(key)
        self.now -= size

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.blasst.attention.default:
            with self:  # look inside
                return op._attention(*args)
        out = func(*args, **(kwargs or {}))
        for tensor in tensors_in(out):
            storage = tensor.untyped_storage()
            if storage._cdata not in self.known:
                self.known.add(storage._cdata)
                self.now += storage.nbytes()
                weakref.finalize(storage, self._gone, storage._cdata, storage.nbytes())
        self.peak = max(self.peak, self.now)
        return out


def peak_beside_output(call: Callable[[], object], given: object, device: str) -> int:
    """Bytes that a call takes at its peak, those of its output left out.

    Args:
        call: of a public function; its first run, which compiles and prepares, should lie behind.
        given: tensors that exist before.
        device: where it runs.
    """
    gc.collect()
    if device == "cpu":
        living = _Living({t.untyped_storage()._cdata for t in tensors_in(given)})
        with living:
            result = call()
        return living.peak - output_bytes(result)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    result = call()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before - output_bytes(result)


def stated_workspace(
    impl: str, q: Tensor, k: Tensor, heads: tuple[int, int], capacity: int, *, measured: bool
) -> int:
    """What docs/support.md, "Memory", says of a call.

    Args:
        impl: that serves it.
        q: packed or not.
        k: cache, keys or pages.
        heads: query heads and KV heads.
        capacity: key slots of a sequence at most.
        measured: whether it asks for the mass bound or has a budget.
    """
    num_heads, kv_heads = heads
    dim, rows = q.shape[-1], q.numel() // (q.shape[-1] * num_heads)  # rows of all sequences
    tokens = q.shape[1] if q.dim() == 4 else 64  # packed is prefill
    lse = 4 * rows * num_heads
    if impl == "eager":
        at_once = min(tokens, 64) if tokens > 8 else tokens
        sequence = 4 * (capacity + 128) * kv_heads * dim
        return (
            SMALL + lse + 4 * sequence + (6 if measured else 3) * 4 * num_heads * at_once * (capacity + 128)
        )
    if tokens > 8:
        return SMALL + lse
    tiles = -(-capacity // 64)
    splits = max(1, min(32, -(-(tiles + 1) // 8)))
    votes = rows // tokens * kv_heads * tiles * -(-num_heads // kv_heads * tokens // 16)
    return SMALL + lse + 4 * splits * rows * num_heads * (dim + 4) + votes * (impl == "triton")
