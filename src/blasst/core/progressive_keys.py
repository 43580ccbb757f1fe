"""Keys of a cache in 16-bit fixed point, of which a decode call may read the upper bits alone.

The layout of a tile of 64 keys of a KV head is 128 rows of head_dim bytes. With b upper bits, rows 0 to
8 b - 1 are the codes of `KeyCodes`, so the same bound reads them; rows 8 b to 63 hold the other 8 - b bits
of the upper byte, packed in the same way; row 64 + i is the lower byte of key i. A tile that is not encoded
takes the same 128 rows for its 64 keys as they came, two bytes each.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from blasst.core import checks
from blasst.core.errors import UnsupportedError
from blasst.core.key_codes import CODE_BITS, check_keys, encode, pack_codes, unpack_codes
from blasst.core.problem import AttentionProblem
from blasst.core.screen import not_screened_reason
from blasst.core.types import DECODE_TILE

_TILE = DECODE_TILE.key

#: Rows of a tile.
_ROWS = 2 * _TILE

#: Tiles that are encoded or decoded together; bounds the float64 copy of their keys.
_TILES_AT_ONCE = 256


@dataclass(frozen=True, eq=False)
class ProgressiveKeys:
    """Keys of a KV cache as 16-bit fixed point, in two planes; `k_cache` of `blasst_attn_with_kvcache`.

    A channel of a tile of 64 keys has `low` and `step` as in `KeyCodes` and a code c of 16 bits per key. The
    key as stored is `low + step * 2**(bits - 16) * (c + 1/2)`, rounded to float32 and then to `dtype`: what
    one fused multiply-add and one conversion give, so that a kernel multiplies it in 16-bit matrix units as
    any other key. Before the rounding it is within half a fine step, `step * 2**(bits - 17)`, of the key that
    came. That is a number of `dtype`, so rounding moves it by no more, and the bin of the upper bits still
    holds it. A key of more than 1/128 (bfloat16; float16: 1/16) of the width of its channel, and no less than
    2**-20, comes back as it was.

    A tile is kept as it came, to the bit, while its 64 keys are not all there, and if it cannot be encoded
    (NaN or infinity in a key, values beyond float16), for that KV head alone. It has NaN in `low`. New keys
    behind the first of an encoded tile (they replace keys that were taken back) make it unfinished again,
    with the keys before them as they were stored.

    There is no length: slots beyond `cache_seqlens` are not looked at, as in a cache of tensors, and nothing
    is read on the host.

    Attributes:
        bits: upper bits, 4, 5 or 6.
        dtype: of the keys, float16 or bfloat16.
        capacity: slots of a sequence, or of a page.
        planes: uint8 (batch or num_pages, tiles, num_kv_heads, 128, head_dim).
        low: float16 (batch or num_pages, tiles, num_kv_heads, head_dim), rounded down.
        step: float16, the same shape, rounded up; width of the bins of the upper bits.
    """

    bits: int
    dtype: torch.dtype
    capacity: int
    planes: Tensor
    low: Tensor
    step: Tensor

    @staticmethod
    def empty(
        batch: int,
        capacity: int,
        num_kv_heads: int,
        head_dim: int,
        bits: int = 6,
        *,
        dtype: torch.dtype = torch.bfloat16,
        device: torch.device | str = "cpu",
    ) -> ProgressiveKeys:
        """An empty cache.

        Args:
            batch: sequences; with pages, num_pages.
            capacity: key slots of a sequence; with pages, page_size, a multiple of 64.
            num_kv_heads: key heads.
            head_dim: size of a key.
            bits: upper bits, 4, 5 or 6 (default). More screen more tiles and are more to read of each.
            dtype: of the keys: bfloat16 (default) or float16.
            device: of the cache. Default: the CPU.

        Raises:
            ValueError: another number of bits.
            UnsupportedError: another dtype.
        """
        if type(bits) is not int or bits not in CODE_BITS:
            raise ValueError(f"bits: got {bits!r}, want one of {', '.join(map(str, CODE_BITS))}")
        if dtype not in (torch.float16, torch.bfloat16):
            raise UnsupportedError(
                f"dtype: got {dtype}, progressive keys have 16 bits: float16 or bfloat16; "
                "KeyCodes go beside keys of float32"
            )
        shape = (batch, -(-capacity // _TILE), num_kv_heads)
        return ProgressiveKeys(
            bits,
            dtype,
            capacity,
            torch.zeros(*shape, _ROWS, head_dim, dtype=torch.uint8, device=device),
            torch.full((*shape, head_dim), math.nan, dtype=torch.float16, device=device),
            torch.zeros(*shape, head_dim, dtype=torch.float16, device=device),
        )

    @staticmethod
    def from_keys(
        k: Tensor,
        bits: int = 6,
        cache_seqlens: Tensor | int | None = None,
        block_table: Tensor | None = None,
    ) -> ProgressiveKeys:
        """The keys of a cache of tensors, in the same slots.

        Args:
            k: (batch, capacity, num_kv_heads, head_dim), or pages (num_pages, page_size, num_kv_heads,
                head_dim) with block_table and page_size a multiple of 64; float16 or bfloat16.
            bits: as in `empty`.
            cache_seqlens: keys in the cache; int or int32 (batch,). Default: the capacity of a cache without
                pages.
            block_table: int32 (batch, max_pages), page numbers; entries past need are not read.

        Raises:
            TypeError: a wrong type, or a dtype of an argument that is fixed.
            ValueError: a wrong value, shape or device.
            UnsupportedError: keys of another dtype.
        """
        check_keys(k)
        rows, capacity, heads, dim = k.shape
        store = ProgressiveKeys.empty(rows, capacity, heads, dim, bits, dtype=k.dtype, device=k.device)
        if block_table is None:
            cache_seqlens = k.shape[1] if cache_seqlens is None else cache_seqlens
        elif cache_seqlens is None:
            raise ValueError("cache_seqlens: got None, want an int or int32 (batch,) beside a block_table")
        batch, limit = store._check_table(block_table)
        ends = _lengths(cache_seqlens, batch, limit, k.device)
        if block_table is not None:
            checks.check_pages(block_table, ends.int(), None, k)
            some = ends > 0  # the others may have no page at all
            ends, block_table = ends[some], block_table[some]
            k = k[block_table.long().clamp(0, max(k.shape[0] - 1, 0))].flatten(1, 2)
            # A page may belong to several sequences: the longest, which comes last, fills it.
            for row in ends.argsort().split(1):
                store._write(k[row], torch.zeros_like(ends[row]), ends[row], block_table[row])
        else:
            store._write(k, torch.zeros_like(ends), ends, None)
        return store

    def append(self, k: Tensor, cache_seqlens: Tensor | int, block_table: Tensor | None = None) -> None:
        """Write new keys behind those in the cache and encode the tiles that they complete; in place.

        Args:
            k: (batch, new, num_kv_heads, head_dim), in `dtype`.
            cache_seqlens: keys in the cache before; int or int32 (batch,).
            block_table: int32 (batch, max_pages), page numbers; entries past need are not read.

        Raises:
            TypeError: a wrong type, or a dtype of an argument that is fixed.
            ValueError: a wrong value, shape, dtype or device.
        """
        check_keys(k)
        batch, limit = self._check_table(block_table)
        wanted = (batch, k.shape[1], self.planes.shape[2], self.planes.shape[4])
        if tuple(k.shape) != wanted:
            raise ValueError(f"k: got shape {tuple(k.shape)}, want {wanted} like the cache")
        if k.dtype != self.dtype or k.device != self.planes.device:
            raise ValueError(
                f"k: got {k.dtype} on {k.device}, want {self.dtype} on {self.planes.device} like the cache"
            )
        begins = _lengths(cache_seqlens, batch, limit - k.shape[1], k.device)
        ends = begins + k.shape[1]
        if block_table is not None:
            checks.check_pages(block_table, ends.int(), begins.int(), self.stand_in())
        self._write(k, begins, ends, block_table)

    def keys(self) -> Tensor:
        """The keys as stored, (batch, capacity, num_kv_heads, head_dim) in `dtype`.

        Slots that are not in use hold anything. With pages (num_pages, page_size, num_kv_heads, head_dim).
        """
        rows, tiles, heads, _, dim = self.planes.shape
        out = torch.empty(rows, tiles, _TILE, heads, dim, dtype=self.dtype, device=self.planes.device)
        at_once = max(1, _TILES_AT_ONCE // max(rows, 1))
        for first in range(0, tiles, at_once):
            part = slice(first, first + at_once)
            planes, low, step = self.planes[:, part], self.low[:, part], self.step[:, part]
            out[:, part] = _decode(planes, low, step, self.bits, self.dtype).transpose(2, 3)
        return out.flatten(1, 2)[:, : self.capacity]

    def upper(self, block_table: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """`codes`, `low` and `step` of each sequence, as in `KeyCodes`; views without a block_table.

        Args:
            block_table: int32 (batch, max_pages); entries past need give codes of any page.
        """
        codes = self.planes[..., : 8 * self.bits, :]
        if block_table is None:
            return codes, self.low, self.step
        pages = block_table.long().clamp(0, max(self.planes.shape[0] - 1, 0))
        codes, low, step = (x[pages].flatten(1, 2) for x in (codes, self.low, self.step))
        return codes, low, step

    def grown(self, capacity: int) -> ProgressiveKeys:
        """The same keys with room for more.

        Args:
            capacity: slots of a sequence, no fewer than now.

        Raises:
            ValueError: a smaller capacity.
        """
        if capacity < self.capacity:
            raise ValueError(f"capacity: got {capacity}, want at least {self.capacity}")
        rows, tiles, heads, _, dim = self.planes.shape
        more, device = max(capacity - tiles * _TILE, 0), self.planes.device
        new = ProgressiveKeys.empty(rows, more, heads, dim, self.bits, dtype=self.dtype, device=device)
        pairs = ((self.planes, new.planes), (self.low, new.low), (self.step, new.step))
        planes, low, step = (torch.cat(pair, 1) for pair in pairs)
        return ProgressiveKeys(self.bits, self.dtype, capacity, planes, low, step)

    def select(self, indices: Tensor) -> ProgressiveKeys:
        """Copies of chosen sequences, in their order; for beams and batches that change.

        Args:
            indices: int64 (new batch,), on the device of the cache.
        """
        planes, low, step = (x[indices] for x in (self.planes, self.low, self.step))
        return ProgressiveKeys(self.bits, self.dtype, self.capacity, planes, low, step)

    def stand_in(self) -> Tensor:
        """A tensor in the shape and dtype of `keys()` that takes no memory and says nothing."""
        rows, _, heads, _, dim = self.planes.shape
        return self.planes.new_empty(1, dtype=self.dtype).expand(rows, self.capacity, heads, dim)

    @property
    def screenable(self) -> Tensor:
        """Which tiles can be screened: those that are encoded; bool (batch, tiles, num_kv_heads)."""
        return ~self.low.isnan().any(-1)

    @property
    def nbytes(self) -> int:
        """Bytes of planes, low and step."""
        return self.planes.nbytes + self.low.nbytes + self.step.nbytes

    def check_call(self, screen: object, block_table: Tensor | None) -> None:
        """Refuse what a call cannot bring beside these keys.

        Args:
            screen: of the call.
            block_table: of the call.

        Raises:
            ValueError: codes, which these keys hold themselves, or pages of another than whole tiles.
        """
        if screen is not None:
            raise ValueError(
                f"screen: got {type(screen).__name__} beside ProgressiveKeys, which hold their own codes, "
                "want None"
            )
        self._check_table(block_table)

    def _check_table(self, block_table: Tensor | None) -> tuple[int, int]:
        """Sequences, and slots of each."""
        if block_table is None:
            return self.planes.shape[0], self.capacity
        checks.check_index("block_table", block_table, (None, None), self.planes.device)
        if self.capacity % _TILE:
            raise ValueError(
                f"block_table: got pages of {self.capacity} slots, progressive keys want multiples of {_TILE}"
            )
        return block_table.shape[0], block_table.shape[1] * self.capacity

    def _place(self, tile: Tensor, block_table: Tensor | None) -> tuple[Tensor, Tensor]:
        """Where tiles (batch, n) of the sequences lie: row and tile of it."""
        if block_table is None:
            return torch.arange(tile.shape[0], device=tile.device)[:, None].expand_as(tile), tile
        tiles = self.planes.shape[1]
        return block_table.long().gather(1, tile // tiles), tile % tiles

    def _write(self, k: Tensor, begins: Tensor, ends: Tensor, block_table: Tensor | None) -> None:
        """Write keys to slots begins to ends of each sequence.

        All touched tiles are opened, changed and encoded if they are complete. A sequence that touches fewer
        than another has its last one again in their place, which then gets the same bytes again.

        Args:
            k: (batch, new, num_kv_heads, head_dim), the keys of these slots from 0 on.
            begins: int64 (batch,).
            ends: int64 (batch,), at most begins + new.
            block_table: as in `append`.
        """
        new = k.shape[1]
        if new == 0 or k.shape[0] == 0:
            return
        count = (new + _TILE - 2) // _TILE + 1  # tiles that so many keys touch at most
        first = begins // _TILE
        last = torch.maximum((ends - 1) // _TILE, first)
        within, sequence = (torch.arange(n, device=k.device) for n in (_TILE, k.shape[0]))
        at_once = max(1, _TILES_AT_ONCE // k.shape[0])
        for begin in range(0, count, at_once):
            steps = torch.arange(begin, min(begin + at_once, count), device=k.device)
            tile = torch.minimum(first[:, None] + steps, last[:, None])  # [batch, n]
            slot = tile[..., None] * _TILE + within  # [batch, n, 64]
            place = self._place(tile, block_table)
            held = (self.planes[place], self.low[place], self.step[place])
            keys = _decode(*held, self.bits, self.dtype)  # [batch, n, heads, 64, dim]
            source = (slot - begins[:, None, None]).clamp(0, new - 1)
            given = k.detach()[sequence[:, None, None], source].transpose(2, 3)
            fresh = (slot >= begins[:, None, None]) & (slot < ends[:, None, None])
            keys = torch.where(fresh[:, :, None, :, None], given, keys).contiguous()
            planes, low, step = _encode(keys, self.bits)
            complete = ((tile + 1) * _TILE <= ends[:, None])[..., None, None]
            low = torch.where(complete, low, math.nan)
            raw = low.isnan()[..., None, :]
            as_came = keys.flatten(-2).view(torch.uint8).unflatten(-1, (_ROWS, -1))
            self.planes[place] = torch.where(raw, as_came, planes)
            self.low[place] = low
            self.step[place] = torch.where(complete, step, 0.0)


def with_progressive_keys(problem: AttentionProblem, store: ProgressiveKeys) -> AttentionProblem:
    """A problem whose k was a stand-in: with the keys as stored, and their codes where it can be screened."""
    problem = replace(problem, k=store.keys(), progressive=True)
    if problem.threshold is None or not_screened_reason(problem) is not None:
        return problem
    return replace(problem, screen=store.upper(problem.block_table))


def _lengths(value: Tensor | int, batch: int, limit: int, device: torch.device) -> Tensor:
    """cache_seqlens as int64 (batch,), in [0, limit] where that can be seen without waiting for a device."""
    if isinstance(value, Tensor):
        checks.check_index("cache_seqlens", value, (batch,), device)
        checks.check_lengths("cache_seqlens", value, 0, limit)
        return value.long()
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"cache_seqlens: got {value!r}, want an int or an int32 tensor (batch,)")
    if not 0 <= value <= limit:
        raise ValueError(f"cache_seqlens: got {value}, want 0 to {limit}")
    return torch.full((batch,), value, dtype=torch.int64, device=device)


def _values(low: Tensor, step: Tensor, code: Tensor, bits: int, dtype: torch.dtype) -> Tensor:
    """Keys as stored, (..., 64, dim); float64 holds the sum exactly (see `encode`), then it is rounded."""
    fine = step.double()[..., None, :] * 2.0 ** (bits - 16)
    return (low.double()[..., None, :] + fine * (code.double() + 0.5)).float().to(dtype)


def _encode(keys: Tensor, bits: int) -> tuple[Tensor, Tensor, Tensor]:
    """Planes (..., 128, dim), low and step (..., dim) of tiles of keys (..., 64, dim)."""
    low, step, code = encode(keys, bits, 16 - bits)
    whole = code.to(torch.int32)
    middle = (whole >> 8) & (2 ** (8 - bits) - 1)
    parts = (
        pack_codes((whole >> (16 - bits)).to(torch.uint8), bits),
        pack_codes(middle.to(torch.uint8), 8 - bits),
        (whole & 255).to(torch.uint8),
    )
    return torch.cat(parts, -2), low, step


def _decode(planes: Tensor, low: Tensor, step: Tensor, bits: int, dtype: torch.dtype) -> Tensor:
    """Keys as stored (..., 64, dim) of planes (..., 128, dim), encoded or not; low and step (..., dim)."""
    raw = planes.flatten(-2).view(dtype).unflatten(-1, (_TILE, -1))
    upper = unpack_codes(planes[..., : 8 * bits, :], bits).to(torch.int32)
    middle = unpack_codes(planes[..., 8 * bits : _TILE, :], 8 - bits).to(torch.int32)
    code = (upper << (16 - bits)) | (middle << 8) | planes[..., _TILE:, :]
    return torch.where(low.isnan()[..., None, :], raw, _values(low, step, code, bits, dtype))
