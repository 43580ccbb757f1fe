"""Host side of the Hopper decode kernel: parameters, the choice of the build, the launch."""

from __future__ import annotations

import ctypes
import dataclasses
import math
from collections.abc import Iterator
from itertools import product
from typing import Any

import torch
from torch import Tensor

from blasst.core.problem import AttentionProblem
from blasst.core.sequences import map_shape
from blasst.core.types import DECODE_TILE, AttentionOutput, SkipCounts, num_tiles
from blasst.kernels.hopper import DTYPES, HEAD_DIMS
from blasst.kernels.hopper.compile import checked, load_kernel
from blasst.kernels.hopper.launch import CHUNK, ROW_BYTES, dense, map_of, pointer, score_arguments, start

FILE = "decode.cu"
KEY_TILE = 64

#: Query rows (query heads of a KV head x new tokens) that a build holds.
ROWS = (8, 16, 32, 64, 128)
#: CTAs that share a multiprocessor, by whether the cache is fp8 and by rows (else 1): one works while another
#: starts, ends, or converts fp8 keys. Registers allow no more.
_CTAS = {False: {8: 2, 16: 2, 32: 2}, True: {8: 4, 16: 3, 32: 2}}

#: Splits of a long sequence, and key tiles below which one is not worth its sums. They depend on the length
#: alone: neither the GPU nor the batch nor how heads are spread over GPUs may change a bit.
SPLITS = 32
_MIN_TILES = 8

#: Multiprocessors of an H200: few CTAs may each have a deeper ring of K tiles.
_PROCESSORS = 132

#: Shared memory of a multiprocessor; every CTA takes 1 KB of it besides its own.
_SHARED_BYTES = 228 * 1024
_CTA_BYTES = 1024
#: Kept tiles whose P.V is still to come; V tiles under way in a dense build. There are more in one whose CTAs
#: do not share multiprocessors; a skipping one gains nothing from that.
_SLOTS = 3
SLOTS_ALONE = 4
_MAX_STAGES = 12
#: K under way on a multiprocessor where all CTAs of a call run at once. More of it makes multiprocessors
#: unequal, and the call lasts as long as the slowest.
_BYTES_IN_ONE_WAVE = 64 * 1024

_MAX_MAPS = 1024
_MAX_BATCH = 65535  # the grid's third axis

_POINTERS = (
    "q",
    "out",
    "lse",
    "mass_bound",
    "partial",
    "arrivals",
    "messages",
    "kept",
    "skipped",
    "visited",
    "threshold",
    "sinks",
    "k_descale",
    "v_descale",
    "seqused",
    "leftpad",
    "table",
)
_STRIDES = (
    "q_stride_b",
    "q_stride_s",
    "q_stride_h",
    "out_stride_b",
    "out_stride_s",
    "out_stride_h",
    "lse_stride_b",
    "lse_stride_h",
)
_INTEGERS = (
    "table_stride",
    "threshold_stride",
    "k_descale_stride_b",
    "k_descale_stride_h",
    "v_descale_stride_b",
    "v_descale_stride_h",
    "num_kv_heads",
    "group",
    "tokens",
    "seqlen_k",
    "stages",
    "splits",
    "wanted_splits",
    "min_tiles",
    "page_shift",
    "window_left",
    "window_right",
    "key_tiles",
    "guard_values",
)
_FLOATS = ("scale_log2", "unit", "score_factor", "score_cap", "cut_factor", "eps")


#: (device, stream) -> (address of zeros, how many). Some KB, never given back.
_counters: dict[tuple[int, int], tuple[int, int]] = {}


class _Params(ctypes.Structure):
    """struct Params of decode.cu."""

    _fields_ = (
        [(name, ctypes.c_uint64 * 16) for name in ("k", "v")]
        + [(name, ctypes.c_void_p) for name in _POINTERS]
        + [(name, ctypes.c_int64) for name in _STRIDES]
        + [(name, ctypes.c_int32) for name in _INTEGERS]
        + [(name, ctypes.c_float) for name in _FLOATS]
        + [("padding", ctypes.c_uint8 * 64)]
    )


def unsupported_reason(problem: AttentionProblem) -> str | None:
    """What of a decode call this kernel does not serve."""
    if problem.packed or problem.k.dim() != 4:
        return "packed sequences in decode"
    rows = problem.max_seqlen_q * (problem.num_heads // problem.num_kv_heads)
    if rows > ROWS[-1]:
        return f"{rows} rows for each KV head, supported are up to {ROWS[-1]}"
    if problem.batch_size > _MAX_BATCH:
        return f"{problem.batch_size} sequences, supported are up to {_MAX_BATCH}"
    return None


def build(
    head_dim: int,
    dtype: torch.dtype,
    rows: int,
    *,
    fp8: bool = False,
    skip: bool = True,
    mass: bool = False,
    alone: bool = False,
) -> dict[str, int]:
    """What a build defines.

    Args:
        head_dim: 64, 96 or 128.
        dtype: of q.
        rows: query rows, one of ROWS.
        fp8: whether the cache is float8_e4m3fn.
        skip: whether it skips.
        mass: whether it knows the mass bound (and the budget).
        alone: whether no two CTAs share a multiprocessor, which then has room for more V.
    """
    ctas = _CTAS[fp8].get(rows, 1)
    return {
        "HEAD_DIM": head_dim,
        "BF16": int(dtype == torch.bfloat16),
        "FP8": int(fp8),
        "ROWS": rows,
        "SKIP": int(skip),
        "MASS": int(mass),
        "SLOTS": SLOTS_ALONE if alone and not skip and not fp8 and ctas > 1 else _SLOTS,
        "CTAS": ctas,
    }


def stages(defined: dict[str, int], count: int) -> int:
    """Depth of the ring of K tiles in a call of so many CTAs."""
    tile, most = _tile_bytes(defined), defined["CTAS"]
    ctas = min(most, num_tiles(count, _PROCESSORS))
    free = _SHARED_BYTES // ctas - _CTA_BYTES - shared_bytes(defined, 0)
    wanted = _MAX_STAGES
    if count <= most * _PROCESSORS:
        wanted = max(_BYTES_IN_ONE_WAVE // (ctas * tile), 2)
    return min(free // tile, wanted)


def builds() -> Iterator[dict[str, int]]:
    """Every build that a call can ask for."""
    rules = ((False, False), (True, False), (True, True))
    for dim, dtype, fp8, rows, (skip, mass) in product(HEAD_DIMS, DTYPES, (False, True), ROWS, rules):
        made = [build(dim, dtype, rows, fp8=fp8, skip=skip, mass=mass, alone=x) for x in (False, True)]
        yield from made[: 1 if made[0] == made[1] else 2]


def _tile_bytes(defined: dict[str, int]) -> int:
    """Of K or V in shared memory: rows of 128 bytes."""
    return KEY_TILE * ROW_BYTES * (1 if defined["FP8"] else num_tiles(defined["HEAD_DIM"], CHUNK))


def shared_bytes(defined: dict[str, int], depth: int) -> int:
    """Dynamic shared memory of a build with so many K tiles in the ring."""
    rows = defined["ROWS"]
    queries = -(-num_tiles(defined["HEAD_DIM"], CHUNK) * rows * CHUNK * 2 // 1024) * 1024
    weights = defined["SLOTS"] * rows * KEY_TILE * 2
    tiles = (depth + defined["SLOTS"]) * _tile_bytes(defined)
    return queries + tiles + weights + state_bytes(defined)


def threads(defined: dict[str, int]) -> int:
    """Of a CTA: one consumer warpgroup and a warp, or two and a warpgroup."""
    return 384 if defined["ROWS"] > 64 else 160


def state_bytes(defined: dict[str, int]) -> int:
    """Upper bound of struct Shared: barriers, then floats of each row."""
    per_row = 4 + 4 + 2 + 2 * defined["FP8"] + 16 * defined["MASS"]
    return 832 + 4 * (defined["HEAD_DIM"] + 4 + 128) + 4 * per_row * defined["ROWS"]


def macros(problem: AttentionProblem, count: int) -> dict[str, int]:
    """The build for a problem that takes so many CTAs."""
    skip = problem.threshold is not None
    rows = problem.max_seqlen_q * (problem.num_heads // problem.num_kv_heads)
    return build(
        problem.head_dim,
        problem.q.dtype,
        next(held for held in ROWS if held >= rows),
        fp8=problem.k.dtype == torch.float8_e4m3fn,
        skip=skip,
        mass=skip and (problem.want_mass_bound or problem.max_skipped_mass is not None),
        alone=count <= _PROCESSORS,
    )


_Pointers = ctypes.c_uint64 * len(_POINTERS)


class Plan:
    """A decode call prepared: all that depends on shapes, strides, dtypes and options alone.

    Attributes:
        kernel: CUfunction.
        grid: CTAs.
        shared: bytes of dynamic shared memory.
    """

    def __init__(self, problem: AttentionProblem, *, wants_lse: bool = True) -> None:
        """Take what is needed of a call that this kernel can serve; compile or load the build."""
        q, k, table = problem.q, problem.k, problem.block_table
        self.device = q.device
        batch, kv_heads, group = (
            problem.batch_size,
            problem.num_kv_heads,
            problem.num_heads // problem.num_kv_heads,
        )
        # Of the longest sequence, whose tiles begin at its first key: one more may be touched.
        splits = min(SPLITS, num_tiles(num_tiles(problem.max_seqlen_k, KEY_TILE) + 1, _MIN_TILES))
        rows, count = group * q.shape[1], batch * kv_heads * splits
        defined = macros(problem, count)
        self._arrivals = batch * kv_heads + batch * kv_heads % 2  # whole 8 bytes
        words = batch * kv_heads * rows * (1 + defined["MASS"]) if defined["SKIP"] else 0
        self._counters = self._arrivals + 2 * words
        depth = stages(defined, count)
        self._partial = count * rows * (problem.head_dim + 4)
        self._box_rows = KEY_TILE if table is None else min(k.shape[1], KEY_TILE)
        self._out_shape, self._lse_shape = q.shape, (batch, problem.num_heads, q.shape[1])
        self._map_shape = map_shape(problem, DECODE_TILE)
        self._wants = problem.want_counts, problem.want_mass_bound, problem.want_kept_tiles
        self._wants_lse = wants_lse
        self.grid, self.shared = (kv_heads, splits, batch), shared_bytes(defined, depth)
        self._threads = threads(defined)
        self._maps: dict[tuple[int, int], tuple[Any, Any]] = {}
        tokens, heads, scores = q.shape[1], problem.num_heads, score_arguments(problem)
        self._fixed = _Params(
            q_stride_b=q.stride(0),
            q_stride_s=q.stride(1),
            q_stride_h=q.stride(2),
            out_stride_b=tokens * heads * problem.head_dim,
            out_stride_s=heads * problem.head_dim,
            out_stride_h=problem.head_dim,
            lse_stride_b=heads * tokens,
            lse_stride_h=tokens,
            table_stride=0 if table is None else table.stride(0),
            **_strides_of("threshold", problem.threshold, ""),
            **_strides_of("k_descale", problem.k_descale, "bh"),
            **_strides_of("v_descale", problem.v_descale, "bh"),
            num_kv_heads=kv_heads,
            group=group,
            tokens=tokens,
            seqlen_k=problem.max_seqlen_k,
            stages=depth,
            splits=splits,
            wanted_splits=SPLITS,
            min_tiles=_MIN_TILES,
            page_shift=0 if table is None else k.shape[1].bit_length() - 1,
            key_tiles=self._map_shape[3],
            guard_values=int(table is not None or problem.seqused_k is not None),
            eps=-1.0 if problem.max_skipped_mass is None else problem.max_skipped_mass,
            cut_factor=math.log(2) / scores["unit"],
            **scores,
        )
        with torch.cuda.device(self.device):
            device = torch.cuda.current_device()
            self.kernel = load_kernel(device, FILE, "decode", tuple(sorted(defined.items())))

    def run(
        self, q: Tensor, k: Tensor, v: Tensor, threshold: Tensor | None, *index: Tensor | None
    ) -> AttentionOutput:
        """Launch on the current stream of q's device.

        Args:
            q: as in the call that was prepared.
            k: the same.
            v: the same.
            threshold: the same.
            index: sinks, k_descale, v_descale, seqused_k, leftpad_k, block_table.
        """
        if torch._C._cuda_getDevice() != self.device.index:
            with torch.cuda.device(self.device):
                return self.run(q, k, v, threshold, *index)
        wants_counts, wants_bound, wants_kept = self._wants
        out = torch.empty(self._out_shape, dtype=q.dtype, device=self.device)
        lse = None
        if self._wants_lse:
            lse = torch.empty(self._lse_shape, dtype=torch.float32, device=self.device)
        skipped, visited, mass_bound, kept_tiles = None, None, None, None
        if wants_counts:
            skipped, visited = torch.zeros((2, *self._map_shape[:2]), dtype=torch.int64, device=self.device)
        if wants_bound:
            mass_bound = torch.zeros(self._lse_shape, dtype=torch.float32, device=self.device)
        if wants_kept:
            kept_tiles = torch.zeros(self._map_shape, dtype=torch.bool, device=self.device)
        stream = torch._C._cuda_getCurrentRawStream(self.device.index)
        if torch._C._cuda_isCurrentStreamCapturing():
            zeros = torch.zeros(self._counters, dtype=torch.int32, device=self.device)
            counters = zeros.data_ptr()
        else:
            counters = _zeros(self._counters, stream)
        partial = torch.empty(self._partial, dtype=torch.float32, device=self.device)
        params = _Params.from_buffer_copy(self._fixed)
        addresses = k.data_ptr(), v.data_ptr()  # shapes and strides are those of the plan
        maps = self._maps.get(addresses)
        if maps is None:
            if len(self._maps) >= _MAX_MAPS:
                self._maps.clear()
            maps = self._maps[addresses] = map_of(k, self._box_rows), map_of(v, self._box_rows)
        params.k, params.v = maps
        _Pointers.from_buffer(params, _Params.q.offset)[:] = [
            q.data_ptr(),
            out.data_ptr(),
            pointer(lse),
            pointer(mass_bound),
            partial.data_ptr(),
            counters,
            counters + 4 * self._arrivals,
            pointer(kept_tiles),
            pointer(skipped),
            pointer(visited),
            pointer(threshold),
            *map(pointer, index),
        ]
        start(self.kernel, self.grid, self._threads, self.shared, stream, params)
        counts = None if skipped is None or visited is None else SkipCounts(skipped, visited)
        return AttentionOutput(out, lse, counts, mass_bound, kept_tiles)


def _strides_of(name: str, tensor: Tensor | None, dimensions: str) -> dict[str, int]:
    """name_stride, or name_stride_b and _h; 0 without a tensor."""
    names = [f"{name}_stride_{d}" for d in dimensions] or [f"{name}_stride"]
    return dict.fromkeys(names, 0) if tensor is None else dict(zip(names, tensor.stride(), strict=True))


def _zeros(count: int, stream: int) -> int:
    """Address of 32-bit zeros, which are zero again after each launch; a stream of a device keeps its own.

    They are not torch's: a graph that is being warmed up would take them for its own memory.
    """
    from cuda.bindings import driver

    place = torch.cuda.current_device(), stream
    kept, size = _counters.get(place, (0, 0))
    if size < count:
        size = max(2 * count, 1024)
        # Another thread may be capturing a graph, which is none of this memory's business.
        mode = checked(
            driver.cuThreadExchangeStreamCaptureMode(
                driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
            )
        )
        status, address = driver.cuMemAlloc(4 * size)
        checked(driver.cuThreadExchangeStreamCaptureMode(mode))
        if status == driver.CUresult.CUDA_ERROR_OUT_OF_MEMORY:
            raise torch.OutOfMemoryError(f"CUDA out of memory: {4 * size} bytes of counters")
        kept = int(checked((status, address)))
        checked(driver.cuMemsetD32Async(kept, 0, size, stream))
        _counters[place] = kept, size
    return kept


def run(problem: AttentionProblem) -> AttentionOutput:
    """Launch on the current stream of q's device."""
    index = (problem.sinks, problem.seqused_k, problem.leftpad_k, problem.block_table)
    sinks, seqused, leftpad, table = (dense(x) for x in index)
    problem = dataclasses.replace(
        problem, sinks=sinks, seqused_k=seqused, leftpad_k=leftpad, block_table=table
    )
    return Plan(problem).run(*arguments(problem))


def arguments(problem: AttentionProblem) -> tuple[Tensor, Tensor, Tensor, *tuple[Tensor | None, ...]]:
    """The tensors of a problem in the order of `Plan.run`."""
    return (
        problem.q,
        problem.k,
        problem.v,
        problem.threshold,
        problem.sinks,
        problem.k_descale,
        problem.v_descale,
        problem.seqused_k,
        problem.leftpad_k,
        problem.block_table,
    )
