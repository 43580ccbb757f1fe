"""Coarse codes of cached keys, from which a decode call can tell that a tile need not be scored at all."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from blasst.core import checks
from blasst.core.errors import UnsupportedError
from blasst.core.sequences import keys_of_pages
from blasst.core.types import DECODE_TILE

#: Bits of a code that can be asked for.
CODE_BITS = (4, 5, 6)

_TILE = DECODE_TILE.key

#: Tiles that are encoded together; bounds the float64 copy of their keys.
_TILES_AT_ONCE = 256


@dataclass(frozen=True, eq=False)
class KeyCodes:
    """Codes of a few bits beside a KV cache: for each tile of 64 keys, KV head and channel.

    A channel of a tile has `low`, `step` and a code c per key, and its keys lie within half a step of
    `low + step * (c + 1/2)`, exactly. Only tiles whose 64 keys are all there are encoded. A tile that cannot
    be (NaN or infinity in a key, values beyond float16) has NaN in `low` for that KV head, and so have tiles
    that are not encoded yet: a bound made from NaN screens nothing.

    The codes do not follow the cache by themselves. `blasst_attn_with_kvcache` keeps them up to date for the
    keys that it writes (`k=`); whoever writes keys otherwise calls `append`, and `truncate` before keys of
    tiles that were complete are written over.

    Attributes:
        bits: bits of a code, 4, 5 or 6.
        dtype: dtype of the keys.
        codes: uint8 (batch, tiles, num_kv_heads, 8 * bits, head_dim), packed: byte g * bits + p holds bit p
            of the codes of keys 8 g to 8 g + 7 of the tile.
        low: float16 (batch, tiles, num_kv_heads, head_dim), rounded down.
        step: float16, the same shape, rounded up; at least 0.
        encoded: int64 (batch,) on the CPU, leading tiles of each sequence that were encoded.
    """

    bits: int
    dtype: torch.dtype
    codes: Tensor
    low: Tensor
    step: Tensor
    encoded: Tensor

    @staticmethod
    def empty(
        batch: int,
        capacity: int,
        num_kv_heads: int,
        head_dim: int,
        bits: int,
        *,
        dtype: torch.dtype = torch.bfloat16,
        device: torch.device | str = "cpu",
    ) -> KeyCodes:
        """Codes of an empty cache.

        Args:
            batch: sequences.
            capacity: key slots of a sequence; with pages, max_pages * page_size.
            num_kv_heads: key heads.
            head_dim: size of a key.
            bits: 4, 5 or 6. More bits screen more tiles and cost more memory: bits / 32 of a cache of 16-bit
                keys and values of one size, and 1 / 64 of it for low and step.
            dtype: of the keys: float16, bfloat16 (default) or float32.
            device: of the cache. Default: the CPU.

        Raises:
            ValueError: another number of bits.
            UnsupportedError: another dtype.
        """
        if type(bits) is not int or bits not in CODE_BITS:
            raise ValueError(f"bits: got {bits!r}, want one of {', '.join(map(str, CODE_BITS))}")
        if dtype not in checks.SUPPORTED_DTYPES:
            raise UnsupportedError(f"dtype: got {dtype}, supported are float16, bfloat16 and float32")
        shape = (batch, capacity // _TILE, num_kv_heads)
        return KeyCodes(
            bits,
            dtype,
            torch.zeros(*shape, _TILE // 8 * bits, head_dim, dtype=torch.uint8, device=device),
            torch.full((*shape, head_dim), math.nan, dtype=torch.float16, device=device),
            torch.zeros(*shape, head_dim, dtype=torch.float16, device=device),
            torch.zeros(batch, dtype=torch.int64, device="cpu"),
        )

    @staticmethod
    def from_keys(
        k: Tensor,
        bits: int,
        cache_seqlens: Tensor | int | None = None,
        block_table: Tensor | None = None,
    ) -> KeyCodes:
        """Codes of the keys that are in a cache.

        Args:
            k: (batch, capacity, num_kv_heads, head_dim), or pages (num_pages, page_size, num_kv_heads,
                head_dim) with block_table; float16, bfloat16 or float32, any strides.
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
        if block_table is not None:
            checks.check_index("block_table", block_table, (None, None), k.device)
        batch = k.shape[0] if block_table is None else block_table.shape[0]
        capacity = k.shape[1] if block_table is None else block_table.shape[1] * k.shape[1]
        made = KeyCodes.empty(batch, capacity, k.shape[2], k.shape[3], bits, dtype=k.dtype, device=k.device)
        if cache_seqlens is None:
            if block_table is not None:
                raise ValueError(
                    "cache_seqlens: got None, want an int or int32 (batch,) beside a block_table"
                )
            cache_seqlens = capacity
        made.append(k, cache_seqlens, block_table)
        return made

    def append(self, k: Tensor, cache_seqlens: Tensor | int, block_table: Tensor | None = None) -> None:
        """Encode the tiles that were completed since; in place.

        A sequence that became shorter than what was encoded is truncated first. One that was truncated and
        has grown again in between looks as if it had only grown: call `truncate` when keys are taken away.
        Reads the lengths on the host.

        Args:
            k: the cache, as in `from_keys`.
            cache_seqlens: keys in the cache now; int or int32 (batch,).
            block_table: as in `from_keys`.

        Raises:
            TypeError: a wrong type, or a dtype of an argument that is fixed.
            ValueError: a wrong value, shape or device.
            UnsupportedError: keys of another dtype than float16, bfloat16 and float32.
        """
        check_keys(k)
        batch, tiles, heads = self.codes.shape[:3]
        wanted = (batch if block_table is None else k.shape[0], k.shape[1], heads, self.codes.shape[4])
        if tuple(k.shape) != wanted:
            raise ValueError(f"k: got shape {tuple(k.shape)}, want {wanted} like the codes")
        if k.dtype != self.dtype or k.device != self.codes.device:
            raise ValueError(
                f"k: got {k.dtype} on {k.device}, want {self.dtype} on {self.codes.device} like the codes"
            )
        capacity = k.shape[1]
        if block_table is not None:
            checks.check_index("block_table", block_table, (batch, None), k.device)
            capacity = block_table.shape[1] * k.shape[1]
        lengths = self._lengths(cache_seqlens, min(capacity, tiles * _TILE + _TILE - 1))
        if block_table is not None:
            checks.check_pages(block_table, torch.tensor(lengths, dtype=torch.int32, device="cpu"), None, k)
        self._forget(lengths)
        for index, length in enumerate(lengths):
            begin, end = int(self.encoded[index]), length // _TILE
            if begin == end:
                continue
            keys = k[index] if block_table is None else keys_of_pages(k, block_table[index], end * _TILE)
            for first in range(begin, end, _TILES_AT_ONCE):
                part = slice(first, min(first + _TILES_AT_ONCE, end))
                tile_keys = keys[part.start * _TILE : part.stop * _TILE].unflatten(0, (-1, _TILE))
                low, step, code = encode(tile_keys.transpose(1, 2), self.bits)
                self.low[index, part], self.step[index, part] = low, step
                self.codes[index, part] = pack_codes(code.to(torch.uint8), self.bits)
            self.encoded[index] = end

    def truncate(self, cache_seqlens: Tensor | int) -> None:
        """Forget the tiles that are not complete any more in a cache that became shorter; in place.

        Args:
            cache_seqlens: keys that are left; int or int32 (batch,). A sequence that is longer keeps its
                codes. Read on the host.

        Raises:
            TypeError: a wrong type or dtype.
            ValueError: a negative length, or a wrong shape.
        """
        self._forget(self._lengths(cache_seqlens, None))

    def grown(self, capacity: int) -> KeyCodes:
        """The same codes with room for more tiles.

        Args:
            capacity: key slots of a sequence, as in `empty`.

        Raises:
            ValueError: fewer than there is room for.
        """
        batch, tiles, heads, _, dim = self.codes.shape
        if capacity // _TILE < tiles:
            raise ValueError(f"capacity: got {capacity}, want at least {tiles * _TILE}")
        more = KeyCodes.empty(
            *(batch, capacity - tiles * _TILE, heads, dim, self.bits),
            dtype=self.dtype,
            device=self.codes.device,
        )
        pairs = ((self.codes, more.codes), (self.low, more.low), (self.step, more.step))
        codes, low, step = (torch.cat(pair, 1) for pair in pairs)
        return KeyCodes(self.bits, self.dtype, codes, low, step, self.encoded.clone())

    def select(self, indices: Tensor) -> KeyCodes:
        """Copies of the codes of chosen sequences, in their order; for beams and batches that change.

        Args:
            indices: int64 (new batch,). Read on the host.
        """
        at = indices.to(self.codes.device)
        codes, low, step = (x[at] for x in (self.codes, self.low, self.step))
        return KeyCodes(self.bits, self.dtype, codes, low, step, self.encoded[indices.cpu()])

    @property
    def screenable(self) -> Tensor:
        """Which tiles can be screened: encoded and without NaN; bool (batch, tiles, num_kv_heads)."""
        return ~self.low.isnan().any(-1)

    @property
    def nbytes(self) -> int:
        """Bytes of codes, low and step."""
        return self.codes.nbytes + self.low.nbytes + self.step.nbytes

    def _forget(self, lengths: list[int]) -> None:
        for index, length in enumerate(lengths):
            left = length // _TILE
            if left < int(self.encoded[index]):
                self.low[index, left:] = math.nan
                self.encoded[index] = left

    def _lengths(self, cache_seqlens: Tensor | int, most: int | None) -> list[int]:
        """Lengths of all sequences, in [0, most]."""
        batch = self.codes.shape[0]
        wanted = "an int or an int32 tensor (batch,)"
        if isinstance(cache_seqlens, Tensor):
            checks.check_index("cache_seqlens", cache_seqlens, (batch,), cache_seqlens.device)
            lengths: list[int] = cache_seqlens.tolist()
        elif isinstance(cache_seqlens, int) and not isinstance(cache_seqlens, bool):
            lengths = [cache_seqlens] * batch
        else:
            raise TypeError(f"cache_seqlens: got {cache_seqlens!r}, want {wanted}")
        low, high = min(lengths, default=0), max(lengths, default=0)
        if low < 0 or (most is not None and high > most):
            limit = "at least 0" if most is None else f"0 to {most}"
            raise ValueError(f"cache_seqlens: got values in [{low}, {high}], want {limit}")
        return lengths


def check_keys(k: object) -> None:
    """A tensor of 4 dimensions in a dtype that attention computes with."""
    if not isinstance(k, Tensor):
        raise TypeError(f"k: got {type(k).__name__}, want a tensor")
    if k.dim() != 4:
        raise ValueError(f"k: got shape {tuple(k.shape)}, want 4 dimensions")
    if k.dtype not in checks.SUPPORTED_DTYPES:
        raise UnsupportedError(f"k: got dtype {k.dtype}, supported are float16, bfloat16 and float32")


def encode(keys: Tensor, bits: int, finer_bits: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """low and step of each channel, float16 (..., dim), and codes, whole float64 (..., keys, dim).

    Bounds of bins are multiples of 2**-36 of at most 53 bits (a low of many units has a step of few), so
    float64 computes them, and compares keys with them, exactly.

    Args:
        keys: (..., keys, dim).
        bits: of the codes that `step` is the width of.
        finer_bits: at most 12; further low bits of each code, whose bins are `step * 2**-finer_bits` wide.
    """
    keys = keys.detach().double()
    levels, finer = 2**bits, 2**finer_bits
    smallest, largest = keys.amin(-2), keys.amax(-2)
    low = smallest.to(torch.float16)
    low = torch.where(low.double() > smallest, _next(low, -math.inf), low)
    step = ((largest - low.double()) / levels).to(torch.float16)
    short = low.double() + step.double() * levels < largest  # or float64 lost a hair above
    step = torch.where(short, _next(step, math.inf), step)
    usable = (low.isfinite() & step.isfinite()).all(-1, keepdim=True)
    low, step = torch.where(usable, low, math.nan), torch.where(usable, step, 0.0)
    at, width = low.double()[..., None, :], step.double()[..., None, :] / finer
    code = ((keys - at) / width).floor().nan_to_num(0.0)  # 0 / 0: a constant channel
    code = code.clamp(0, levels * finer - 1)
    code = code - (keys < at + width * code).double()  # the quotient was rounded
    code = code + (keys > at + width * (code + 1)).double()
    return low, step, code


def _next(x: Tensor, toward: float) -> Tensor:
    """The next float16 towards -inf or inf; torch.nextafter knows float16 in few versions and devices."""
    grows = (x > 0) == (toward > 0)  # in magnitude, which is what the bits count
    moved = (x.view(torch.int16) + torch.where(grows, 1, -1).to(torch.int16)).view(torch.float16)
    return torch.where(x == 0, math.copysign(2.0**-24, toward), moved)


def pack_codes(code: Tensor, bits: int) -> Tensor:
    """uint8 (..., keys, dim) codes to (..., keys / 8 * bits, dim) bytes, laid out as in `KeyCodes.codes`."""
    eight = code.unflatten(-2, (-1, 8))  # [..., groups, 8, dim]
    place = torch.arange(8, dtype=torch.uint8, device=code.device)[:, None]
    planes = [((eight >> p & 1) << place).sum(-2, dtype=torch.uint8) for p in range(bits)]
    return torch.stack(planes, -2).flatten(-3, -2)


def unpack_codes(codes: Tensor, bits: int) -> Tensor:
    """The inverse of `pack_codes`."""
    planes = codes.unflatten(-2, (-1, bits))  # [..., groups, bits, dim]
    place = torch.arange(8, dtype=torch.uint8, device=codes.device)[:, None]
    code = torch.zeros_like(planes[..., :1, :]).expand(*planes.shape[:-2], 8, planes.shape[-1])
    for p in range(bits):
        code = code | ((planes[..., p : p + 1, :] >> place & 1) << p)
    return code.flatten(-3, -2)
