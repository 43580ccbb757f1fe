"""Host side of the Hopper decode kernel: parameters, the choice of the build, the launch."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from itertools import product

import torch
from torch import Tensor

from blasst.core.problem import AttentionProblem
from blasst.core.types import DECODE_TILE, AttentionOutput, num_tiles
from blasst.kernels.hopper import DTYPES, HEAD_DIMS
from blasst.kernels.hopper.launch import CHUNK, ROW_BYTES, dense, map_of, pointer, score_arguments, start
from blasst.kernels.triton.launch import Outputs, allocate

FILE = "decode.cu"
KEY_TILE = 64

#: Query rows (query heads of a KV head x new tokens) that a build holds.
ROWS = (8, 16, 32, 64, 128)
#: Builds up to these rows let two CTAs share a multiprocessor: one works while the other starts or ends.
_TWO_CTAS_ROWS = 32

#: Multiprocessors of an H200, and CTAs that one long sequence should give. Fixed: results do not depend on the GPU.
_PROCESSORS = 132
_CTAS = 132
_MAX_SPLITS = 128
#: Key tiles below which a split is not worth its anchors.
_MIN_TILES = 8

#: Shared memory of a multiprocessor; every CTA takes 1 KB of it besides its own.
_SHARED_BYTES = 228 * 1024
_CTA_BYTES = 1024
_SLOTS = 3
_MAX_STAGES = 12

_MAX_BATCH = 65535  # the grid's third axis

_POINTERS = (
    "q",
    "out",
    "lse",
    "mass_bound",
    "partial",
    "arrivals",
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
_FLOATS = ("scale_log2", "unit", "score_factor", "score_cap", "eps")


#: (device, stream) -> zeros.
_counters: dict[tuple[int, int], Tensor] = {}


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
    head_dim: int, dtype: torch.dtype, rows: int, *, fp8: bool = False, skip: bool = True, mass: bool = False
) -> dict[str, int]:
    """What a build defines.

    Args:
        head_dim: 64, 96 or 128.
        dtype: of q.
        rows: query rows, one of ROWS.
        fp8: whether the cache is float8_e4m3fn.
        skip: whether it skips.
        mass: whether it knows the mass bound (and the budget).
    """
    return {
        "HEAD_DIM": head_dim,
        "BF16": int(dtype == torch.bfloat16),
        "FP8": int(fp8),
        "ROWS": rows,
        "SKIP": int(skip),
        "MASS": int(mass),
        "SLOTS": _SLOTS,
        "CTAS": 2 if rows <= _TWO_CTAS_ROWS else 1,
    }


def stages(defined: dict[str, int], ctas: int) -> int:
    """Depth of the ring of K tiles where so many CTAs share a multiprocessor."""
    free = _SHARED_BYTES // ctas - _CTA_BYTES - shared_bytes(defined, 0)
    return min(free // _tile_bytes(defined), _MAX_STAGES)


def builds() -> Iterator[dict[str, int]]:
    """Every build that a call can ask for."""
    rules = ((False, False), (True, False), (True, True))
    for dim, dtype, fp8, rows, (skip, mass) in product(HEAD_DIMS, DTYPES, (False, True), ROWS, rules):
        yield build(dim, dtype, rows, fp8=fp8, skip=skip, mass=mass)


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
    return 512 + 4 * per_row * defined["ROWS"]


def macros(problem: AttentionProblem) -> dict[str, int]:
    """The build for a problem."""
    skip = problem.threshold is not None
    rows = problem.max_seqlen_q * (problem.num_heads // problem.num_kv_heads)
    return build(
        problem.head_dim,
        problem.q.dtype,
        next(held for held in ROWS if held >= rows),
        fp8=problem.k.dtype == torch.float8_e4m3fn,
        skip=skip,
        mass=skip and (problem.want_mass_bound or problem.max_skipped_mass is not None),
    )


def wanted_splits(num_kv_heads: int) -> int:
    """Splits of a long sequence.

    A function of the KV heads alone: what a sequence gives does not depend on its neighbours.
    """
    return max(1, min(_CTAS // num_kv_heads, _MAX_SPLITS))


def _parameters(
    problem: AttentionProblem,
    outputs: Outputs,
    partial: Tensor,
    arrivals: Tensor,
    depth: int,
    splits: int,
    wanted: int,
) -> tuple[_Params, list[Tensor | None]]:
    """Arguments of the kernel, and tensors that must live until it is launched."""
    index = [dense(x) for x in (problem.sinks, problem.seqused_k, problem.leftpad_k, problem.block_table)]
    sinks, seqused, leftpad, table = index
    q, k, out, lse, threshold = problem.q, problem.k, outputs.out, outputs.lse, problem.threshold
    k_descale, v_descale = problem.k_descale, problem.v_descale
    rows = KEY_TILE if table is None else min(k.shape[1], KEY_TILE)
    params = _Params(
        k=map_of(k, rows),
        v=map_of(problem.v, rows),
        q=q.data_ptr(),
        out=out.data_ptr(),
        lse=lse.data_ptr(),
        mass_bound=pointer(outputs.mass_bound),
        partial=partial.data_ptr(),
        arrivals=arrivals.data_ptr(),
        kept=pointer(outputs.kept),
        skipped=pointer(outputs.skipped),
        visited=pointer(outputs.visited),
        threshold=pointer(threshold),
        sinks=pointer(sinks),
        k_descale=pointer(k_descale),
        v_descale=pointer(v_descale),
        seqused=pointer(seqused),
        leftpad=pointer(leftpad),
        table=pointer(table),
        q_stride_b=q.stride(0),
        q_stride_s=q.stride(1),
        q_stride_h=q.stride(2),
        out_stride_b=out.stride(0),
        out_stride_s=out.stride(1),
        out_stride_h=out.stride(2),
        lse_stride_b=lse.stride(0),
        lse_stride_h=lse.stride(1),
        table_stride=0 if table is None else table.stride(0),
        threshold_stride=0 if threshold is None else threshold.stride(0),
        k_descale_stride_b=0 if k_descale is None else k_descale.stride(0),
        k_descale_stride_h=0 if k_descale is None else k_descale.stride(1),
        v_descale_stride_b=0 if v_descale is None else v_descale.stride(0),
        v_descale_stride_h=0 if v_descale is None else v_descale.stride(1),
        num_kv_heads=problem.num_kv_heads,
        group=problem.num_heads // problem.num_kv_heads,
        tokens=q.shape[1],
        seqlen_k=problem.max_seqlen_k,
        stages=depth,
        splits=splits,
        wanted_splits=wanted,
        min_tiles=_MIN_TILES,
        page_shift=0 if table is None else k.shape[1].bit_length() - 1,
        key_tiles=0 if outputs.kept is None else outputs.kept.shape[3],
        guard_values=int(table is not None or seqused is not None),
        eps=-1.0 if problem.max_skipped_mass is None else problem.max_skipped_mass,
        **score_arguments(problem),
    )
    return params, index


def _zeros(count: int, device: torch.device) -> Tensor:
    """Counters that are zero before and after each launch; outside graphs a stream keeps its own."""
    if torch.cuda.is_current_stream_capturing():
        return torch.zeros(count, dtype=torch.int32, device=device)
    stream = torch.cuda.current_stream(device)
    kept = _counters.get((stream.device_index, stream.cuda_stream))
    if kept is None or kept.numel() < count:
        kept = torch.zeros(max(count, 1024), dtype=torch.int32, device=device)
        _counters[stream.device_index, stream.cuda_stream] = kept
    return kept


def run(problem: AttentionProblem) -> AttentionOutput:
    """Launch on the current stream of q's device."""
    device = problem.q.device
    defined = macros(problem)
    wanted = wanted_splits(problem.num_kv_heads)
    # Of the longest sequence, whose tiles begin at its first key: one more may be touched.
    splits = min(wanted, num_tiles(num_tiles(problem.max_seqlen_k, KEY_TILE) + 1, _MIN_TILES))
    heads = problem.batch_size * problem.num_kv_heads
    depth = stages(defined, defined["CTAS"] if heads * splits > _PROCESSORS else 1)
    rows = problem.max_seqlen_q * (problem.num_heads // problem.num_kv_heads)
    with torch.cuda.device(device):
        outputs = allocate(problem, DECODE_TILE)
        size = heads * splits * rows * (problem.head_dim + 4)
        partial = torch.empty(size, dtype=torch.float32, device=device)
        arrivals = _zeros(heads, device)
        params, _alive = _parameters(problem, outputs, partial, arrivals, depth, splits, wanted)
        grid = problem.num_kv_heads, splits, problem.batch_size
        start(FILE, "decode", defined, shared_bytes(defined, depth), grid, threads(defined), params)
    return outputs.result(problem)
