"""Host side of the Hopper decode kernel: parameters, the choice of the build, the launch."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from itertools import product
from typing import Any

import torch
from torch import Tensor

from blasst.core.problem import AttentionProblem
from blasst.core.types import DECODE_TILE, AttentionOutput, num_tiles
from blasst.kernels.hopper import DTYPES, HEAD_DIMS
from blasst.kernels.hopper.compile import checked, load_kernel
from blasst.kernels.hopper.prefill import CHUNK, map_of, pointer
from blasst.kernels.triton.launch import LOG2_E, UNLIMITED, Outputs, allocate

FILE = "decode.cu"
KEY_TILE = 64
THREADS = 288

#: Query rows (query heads of a KV head x new tokens) that a build holds.
ROWS = (8, 16, 32)

#: CTAs that one long sequence should give: about one for each processor of an H200.
_CTAS = 128
#: Key tiles below which a split is not worth its anchors.
_MIN_TILES = 8

_SHARED_BYTES = 227 * 1024
_STATE_BYTES = 4096
_SLOTS = 3

_POINTERS = (
    "q",
    "out",
    "lse",
    "partial",
    "arrivals",
    "kept",
    "skipped",
    "visited",
    "threshold",
    "sinks",
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
    "num_kv_heads",
    "group",
    "tokens",
    "seqlen_k",
    "splits",
    "wanted_splits",
    "min_tiles",
    "page_shift",
    "window_left",
    "window_right",
    "key_tiles",
    "guard_values",
)
_FLOATS = ("scale_log2", "unit", "score_factor", "score_cap")


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
    if problem.want_mass_bound or problem.max_skipped_mass is not None:
        return "mass bound and error budget in decode"
    return None


def build(
    head_dim: int, dtype: torch.dtype, rows: int, *, skip: bool, softcap: bool, paged: bool
) -> dict[str, int]:
    """What a build defines."""
    tile_bytes = num_tiles(head_dim, CHUNK) * CHUNK * 2 * KEY_TILE
    free = _SHARED_BYTES - _STATE_BYTES - num_tiles(head_dim, CHUNK) * rows * CHUNK * 2
    free -= 2 * _SLOTS * (tile_bytes + rows * KEY_TILE * 2)
    return {
        "HEAD_DIM": head_dim,
        "BF16": int(dtype == torch.bfloat16),
        "ROWS": rows,
        "SKIP": int(skip),
        "SOFTCAP": int(softcap),
        "PAGED": int(paged),
        "KEY_STAGES": min(free // tile_bytes, 8),
        "SLOTS": _SLOTS,
    }


def builds() -> Iterator[dict[str, int]]:
    """Every build that a call can ask for."""
    flags = (False, True)
    for dim, dtype, rows in product(HEAD_DIMS, DTYPES, ROWS):
        for skip, softcap, paged in product(flags, flags, flags):
            yield build(dim, dtype, rows, skip=skip, softcap=softcap, paged=paged)


def shared_bytes(defined: dict[str, int]) -> int:
    """Dynamic shared memory of a build."""
    chunks, rows = num_tiles(defined["HEAD_DIM"], CHUNK), defined["ROWS"]
    tile_bytes = chunks * CHUNK * 2 * KEY_TILE
    queries = -(-chunks * rows * CHUNK * 2 // 1024) * 1024
    weights = 2 * defined["SLOTS"] * rows * KEY_TILE * 2
    return queries + (defined["KEY_STAGES"] + 2 * defined["SLOTS"]) * tile_bytes + weights + _STATE_BYTES


def _parameters(
    problem: AttentionProblem, outputs: Outputs, partial: Tensor, arrivals: Tensor, splits: int
) -> _Params:
    q, k, out, lse, threshold = problem.q, problem.k, outputs.out, outputs.lse, problem.threshold
    table = problem.block_table
    left, right = problem.window_size
    if problem.causal:
        right = 0 if right < 0 else min(right, 0)
    scale, capped = problem.softmax_scale, problem.softcap > 0
    rows = min(k.shape[1], KEY_TILE) if table is not None else KEY_TILE
    return _Params(
        k=map_of(k, rows),
        v=map_of(problem.v, rows),
        q=q.data_ptr(),
        out=out.data_ptr(),
        lse=lse.data_ptr(),
        partial=partial.data_ptr(),
        arrivals=arrivals.data_ptr(),
        kept=pointer(outputs.kept),
        skipped=pointer(outputs.skipped),
        visited=pointer(outputs.visited),
        threshold=pointer(threshold),
        sinks=pointer(problem.sinks),
        seqused=pointer(problem.seqused_k),
        leftpad=pointer(problem.leftpad_k),
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
        num_kv_heads=problem.num_kv_heads,
        group=problem.num_heads // problem.num_kv_heads,
        tokens=q.shape[1],
        seqlen_k=problem.max_seqlen_k,
        splits=splits,
        wanted_splits=splits,
        min_tiles=_MIN_TILES,
        page_shift=0 if table is None else k.shape[1].bit_length() - 1,
        window_left=UNLIMITED if left < 0 else min(left, UNLIMITED),
        window_right=UNLIMITED if right < 0 else min(right, UNLIMITED),
        key_tiles=0 if outputs.kept is None else outputs.kept.shape[3],
        guard_values=int(table is not None or problem.seqused_k is not None),
        scale_log2=LOG2_E if capped else scale * LOG2_E,
        unit=1.0 if capped else scale,
        score_factor=2 * scale / problem.softcap * LOG2_E if capped else 0.0,
        score_cap=problem.softcap,
    )


def run(problem: AttentionProblem) -> AttentionOutput:
    """Launch on the current stream of q's device."""
    from cuda.bindings import driver

    device = problem.q.device
    rows = problem.q.shape[1] * (problem.num_heads // problem.num_kv_heads)
    held = next(n for n in ROWS if n >= rows)
    defined = build(
        problem.head_dim,
        problem.q.dtype,
        held,
        skip=problem.threshold is not None,
        softcap=problem.softcap > 0,
        paged=problem.block_table is not None,
    )
    # A function of the KV heads alone: what a sequence gives does not depend on its neighbours.
    splits = max(_CTAS // problem.num_kv_heads, 1)
    batch, kv_heads = problem.batch_size, problem.num_kv_heads
    with torch.cuda.device(device):
        outputs = allocate(problem, DECODE_TILE)
        size = batch * kv_heads * splits * 2 * (problem.head_dim + 2) * held
        partial = torch.empty(size, dtype=torch.float32, device=device)
        arrivals = torch.zeros(batch * kv_heads, dtype=torch.int32, device=device)
        params = _parameters(problem, outputs, partial, arrivals, splits)
        shared = shared_bytes(defined)
        kernel = load_kernel(device.index or 0, FILE, "decode", tuple(sorted(defined.items())), shared)
        arguments: Any = (ctypes.c_void_p * 1)(ctypes.addressof(params))
        stream = torch.cuda.current_stream(device).cuda_stream
        checked(
            driver.cuLaunchKernel(
                kernel, splits, kv_heads, batch, THREADS, 1, 1, shared, stream, ctypes.addressof(arguments), 0
            )
        )
    return outputs.result(problem)
