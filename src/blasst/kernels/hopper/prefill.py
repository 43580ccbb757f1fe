"""Host side of the Hopper prefill kernel: tensor maps, parameters, the choice of the build, the launch."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from functools import lru_cache
from itertools import product
from typing import Any

import torch
from torch import Tensor

from blasst.core.problem import AttentionProblem
from blasst.core.types import PREFILL_TILE, AttentionOutput, num_tiles
from blasst.kernels.hopper import DTYPES, HEAD_DIMS
from blasst.kernels.hopper.compile import checked, load_kernel
from blasst.kernels.triton.launch import LOG2_E, UNLIMITED, Outputs, allocate, flags

FILE = "prefill.cu"
BLOCK = 128  # query rows of a CTA
KEY_TILE = 128
CHUNK = 64  # elements of a row that lie together in shared memory: 128 bytes
THREADS = 384

#: Keys and values of one section (heads that share them) should stay in this much of the L2 cache.
_SECTION_BYTES = 32 * 2**20

#: Barriers, work slots and tile descriptions, rounded up.
_STATE_BYTES = 1024
_SHARED_BYTES = 227 * 1024
_MAX_STAGES = 6


class _Params(ctypes.Structure):
    """struct Params of prefill.cu."""

    _fields_ = (
        [(name, ctypes.c_uint64 * 16) for name in ("q", "k", "v")]
        + [
            (name, ctypes.c_void_p)
            for name in (
                "out",
                "lse",
                "mass",
                "kept",
                "skipped",
                "visited",
                "threshold",
                "sinks",
                "cu_q",
                "cu_k",
                "seqused",
                "leftpad",
                "table",
                "ticket",
            )
        ]
        + [
            (name, ctypes.c_int64)
            for name in ("out_stride_b", "out_stride_s", "out_stride_h", "lse_stride_b", "lse_stride_h")
        ]
        + [
            (name, ctypes.c_int32)
            for name in (
                "table_stride",
                "threshold_stride",
                "batch",
                "num_heads",
                "group",
                "seqlen_q",
                "seqlen_k",
                "blocks",
                "section",
                "total",
                "page_shift",
                "window_left",
                "window_right",
                "query_tiles",
                "key_tiles",
                "guard_values",
            )
        ]
        + [(name, ctypes.c_float) for name in ("scale_log2", "unit", "score_factor", "score_cap", "eps")]
        + [("padding", ctypes.c_uint8 * 64)]
    )


@lru_cache(maxsize=512)
def _tensor_map(
    address: int, dtype: torch.dtype, shape: tuple[int, ...], strides: tuple[int, ...], rows: int
) -> Any:
    """Tensor map of (x, heads, rows, dim) as (dim, rows, heads, x), in boxes of (64, rows, 1, 1)."""
    from cuda.bindings import driver

    kind = driver.CUtensorMapDataType
    outer, length, heads, dim = shape
    # A dimension of size 1 is never stepped along; its stride only has to be valid.
    steps = [
        stride * 2 if size > 1 else 16
        for stride, size in ((strides[1], length), (strides[2], heads), (strides[0], outer))
    ]
    encoded = checked(
        driver.cuTensorMapEncodeTiled(
            kind.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16
            if dtype == torch.bfloat16
            else kind.CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
            4,
            address,
            [driver.cuuint64_t(size) for size in (dim, length, heads, outer)],
            [driver.cuuint64_t(step) for step in steps],
            [driver.cuuint32_t(size) for size in (CHUNK, rows, 1, 1)],
            [driver.cuuint32_t(1)] * 4,
            driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
            driver.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B,
            driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
            driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        )
    )
    return (ctypes.c_uint64 * 16)(*(int(word) for word in encoded.opaque))


def map_of(tensor: Tensor, rows: int) -> Any:
    """Tensor map of q, k or v, packed or not, in boxes of so many rows."""
    four = tensor if tensor.dim() == 4 else tensor.unsqueeze(0)
    return _tensor_map(four.data_ptr(), four.dtype, tuple(four.shape), four.stride(), rows)


def _parts(head_dim: int, **rule: Any) -> int:
    """Parts in which P.V of a kept tile is issued: as many as fit in the registers, up to what pays."""
    if rule["BUDGET"]:
        return 1
    return 8 if head_dim > 64 and not rule["SKIP"] else 4


def build(head_dim: int, dtype: torch.dtype, *, paged: bool = False, **rule: Any) -> dict[str, int]:
    """What a build defines; rule holds SKIP, MASS, BUDGET and SOFTCAP."""
    tile_bytes = num_tiles(head_dim, CHUNK) * CHUNK * 2 * KEY_TILE
    stages = (_SHARED_BYTES - _STATE_BYTES - tile_bytes) // (2 * tile_bytes)
    return {
        "HEAD_DIM": head_dim,
        "HEAD_DIM_V": head_dim,
        "BF16": int(dtype == torch.bfloat16),
        **{name: int(rule[name]) for name in ("SKIP", "MASS", "BUDGET", "SOFTCAP")},
        "PAGED": int(paged),
        "STAGES": min(stages, _MAX_STAGES),
        "PARTS": _parts(head_dim, **rule),
    }


def builds() -> Iterator[dict[str, int]]:
    """Every build that a call can ask for."""
    rules = [(0, 0, 0), (1, 0, 0), (1, 1, 0), (1, 1, 1)]
    for dim, dtype, (skip, mass, budget), softcap, paged in product(
        HEAD_DIMS, DTYPES, rules, (0, 1), (False, True)
    ):
        yield build(dim, dtype, paged=paged, SKIP=skip, MASS=mass, BUDGET=budget, SOFTCAP=softcap)


def macros(problem: AttentionProblem) -> dict[str, int]:
    """The build for a problem."""
    paged = problem.block_table is not None
    return build(problem.head_dim, problem.q.dtype, paged=paged, **flags(problem))


def shared_bytes(defined: dict[str, int]) -> int:
    """Dynamic shared memory of a build."""
    chunks = num_tiles(defined["HEAD_DIM"], CHUNK)
    return (1 + 2 * defined["STAGES"]) * chunks * CHUNK * 2 * KEY_TILE + _STATE_BYTES


def _section(problem: AttentionProblem) -> int:
    """Query heads whose work is handed out together: their keys and values should share the L2 cache."""
    per_head = problem.max_seqlen_k * (problem.head_dim + problem.head_dim_v) * 2
    fit = max(1, _SECTION_BYTES // max(per_head, 1))
    kv_heads = problem.num_kv_heads
    together = max(n for n in range(1, kv_heads + 1) if kv_heads % n == 0 and n <= fit)
    return together * (problem.num_heads // kv_heads)


def pointer(tensor: Tensor | None) -> int | None:
    """Address of a tensor, or None."""
    return None if tensor is None else tensor.data_ptr()


def _parameters(problem: AttentionProblem, outputs: Outputs, ticket: Tensor) -> tuple[_Params, list[Tensor]]:
    """Arguments of the kernel, and tensors that must live until it is launched."""
    q, k, out, lse = problem.q, problem.k, outputs.out, outputs.lse
    threshold = problem.threshold
    index = [
        tensor if tensor is None or tensor.stride(-1) == 1 else tensor.contiguous()
        for tensor in (
            problem.sinks,
            problem.cu_seqlens_q,
            problem.cu_seqlens_k,
            problem.seqused_k,
            problem.leftpad_k,
            problem.block_table,
        )
    ]
    sinks, cu_q, cu_k, seqused, leftpad, table = index
    paged = table is not None
    rows = min(k.shape[1], KEY_TILE) if paged else KEY_TILE
    left, right = problem.window_size
    if problem.causal:
        right = 0 if right < 0 else min(right, 0)
    scale, capped = problem.softmax_scale, problem.softcap > 0
    length = q.shape[-3]
    blocks = length // BLOCK + problem.batch_size if problem.packed else num_tiles(length, BLOCK)
    heads = problem.num_heads if problem.packed else problem.num_heads * problem.batch_size
    params = _Params(
        q=map_of(q, BLOCK),
        k=map_of(k, rows),
        v=map_of(problem.v, rows),
        out=out.data_ptr(),
        lse=lse.data_ptr(),
        mass=pointer(outputs.mass_bound if threshold is not None else None),
        kept=pointer(outputs.kept),
        skipped=pointer(outputs.skipped),
        visited=pointer(outputs.visited),
        threshold=pointer(threshold),
        sinks=pointer(sinks),
        cu_q=pointer(cu_q),
        cu_k=pointer(cu_k),
        seqused=pointer(seqused),
        leftpad=pointer(leftpad),
        table=pointer(table),
        ticket=ticket.data_ptr(),
        out_stride_b=0 if problem.packed else out.stride(0),
        out_stride_s=out.stride(-3),
        out_stride_h=out.stride(-2),
        lse_stride_b=0 if problem.packed else lse.stride(0),
        lse_stride_h=lse.stride(-2),
        table_stride=0 if table is None else table.stride(0),
        threshold_stride=0 if threshold is None else threshold.stride(0),
        batch=problem.batch_size,
        num_heads=problem.num_heads,
        group=problem.num_heads // problem.num_kv_heads,
        seqlen_q=length,
        seqlen_k=problem.max_seqlen_k,
        blocks=blocks,
        section=_section(problem),
        total=blocks * heads,
        page_shift=k.shape[1].bit_length() - 1 if paged else 0,
        window_left=UNLIMITED if left < 0 else min(left, UNLIMITED),
        window_right=UNLIMITED if right < 0 else min(right, UNLIMITED),
        query_tiles=0 if outputs.kept is None else outputs.kept.shape[2],
        key_tiles=0 if outputs.kept is None else outputs.kept.shape[3],
        guard_values=int(paged or cu_k is not None or seqused is not None),
        scale_log2=LOG2_E if capped else scale * LOG2_E,
        unit=1.0 if capped else scale,
        score_factor=2 * scale / problem.softcap * LOG2_E if capped else 0.0,
        score_cap=problem.softcap,
        eps=float(problem.max_skipped_mass or 0.0),
    )
    return params, [tensor for tensor in (*index, ticket) if tensor is not None]


def run(problem: AttentionProblem) -> AttentionOutput:
    """Launch on the current stream of q's device."""
    from cuda.bindings import driver

    device = problem.q.device
    with torch.cuda.device(device):
        outputs = allocate(problem, PREFILL_TILE)
        ticket = torch.zeros(1, dtype=torch.int32, device=device)
        params, _alive = _parameters(problem, outputs, ticket)
        defined = macros(problem)
        shared = shared_bytes(defined)
        kernel = load_kernel(device.index or 0, FILE, "prefill", tuple(sorted(defined.items())), shared)
        processors = torch.cuda.get_device_properties(device).multi_processor_count
        arguments = (ctypes.c_void_p * 1)(ctypes.addressof(params))
        stream = torch.cuda.current_stream(device).cuda_stream
        grid = min(processors, params.total)
        checked(
            driver.cuLaunchKernel(
                kernel, grid, 1, 1, THREADS, 1, 1, shared, stream, ctypes.addressof(arguments), 0
            )
        )
    return outputs.result(problem)
