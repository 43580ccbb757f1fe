"""Host side of the Hopper prefill kernel: parameters, the choice of the build, the launch."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from itertools import product
from typing import Any

import torch
from torch import Tensor

from blasst.core.problem import AttentionProblem
from blasst.core.types import PREFILL_TILE, AttentionOutput, num_tiles
from blasst.kernels.hopper import DTYPES, HEAD_DIMS
from blasst.kernels.hopper.compile import SHARED_BYTES, load_kernel
from blasst.kernels.hopper.launch import CHUNK, dense, map_of, pointer, score_arguments, start
from blasst.kernels.triton.launch import Outputs, allocate, flags

FILE = "prefill.cu"
BLOCK = 128  # query rows of a CTA
KEY_TILE = 128
THREADS = 384

#: Keys and values of one section (heads that share them) should stay in this much of the L2 cache.
_SECTION_BYTES = 32 * 2**20

#: Barriers, work slots and tile descriptions, rounded up.
_STATE_BYTES = 1024
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
                "dense_tail",
                "query_tiles",
                "key_tiles",
                "guard_values",
            )
        ]
        + [(name, ctypes.c_float) for name in ("scale_log2", "unit", "score_factor", "score_cap", "eps")]
        + [("padding", ctypes.c_uint8 * 64)]
    )


def build(head_dim: int, dtype: torch.dtype, *, paged: bool = False, **rule: Any) -> dict[str, int]:
    """What a build defines; rule holds SKIP, MASS, BUDGET and SOFTCAP."""
    tile_bytes = num_tiles(head_dim, CHUNK) * CHUNK * 2 * KEY_TILE
    stages = (SHARED_BYTES - _STATE_BYTES - tile_bytes) // (2 * tile_bytes)
    return {
        "HEAD_DIM": head_dim,
        "HEAD_DIM_V": head_dim,
        "BF16": int(dtype == torch.bfloat16),
        **{name: int(rule[name]) for name in ("SKIP", "MASS", "BUDGET", "SOFTCAP")},
        "PAGED": int(paged),
        "STAGES": min(stages, _MAX_STAGES),
        "PARTS": 1 if rule["BUDGET"] else 4,  # of P.V; what a budget needs leaves no registers for more
        # At head_dim 64 exp takes as long as the tensor cores: the warpgroups take turns in it.
        "TURNS": int(head_dim == 64),
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


def _parameters(problem: AttentionProblem, outputs: Outputs, ticket: Tensor) -> tuple[_Params, list[Tensor]]:
    """Arguments of the kernel, and tensors that must live until it is launched."""
    q, k, out, lse = problem.q, problem.k, outputs.out, outputs.lse
    threshold = problem.threshold
    index = [
        dense(tensor)
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
        query_tiles=0 if outputs.kept is None else outputs.kept.shape[2],
        key_tiles=0 if outputs.kept is None else outputs.kept.shape[3],
        guard_values=int(paged or cu_k is not None or seqused is not None),
        dense_tail=problem.dense_tail,
        eps=float(problem.max_skipped_mass or 0.0),
        **score_arguments(problem),
    )
    return params, [tensor for tensor in (*index, ticket) if tensor is not None]


def run(problem: AttentionProblem) -> AttentionOutput:
    """Launch on the current stream of q's device."""
    device = problem.q.device
    with torch.cuda.device(device):
        outputs = allocate(problem, PREFILL_TILE)
        ticket = torch.zeros(1, dtype=torch.int32, device=device)
        params, _alive = _parameters(problem, outputs, ticket)
        defined = macros(problem)
        processors = torch.cuda.get_device_properties(device).multi_processor_count
        grid = min(processors, params.total), 1, 1
        kernel = load_kernel(torch.cuda.current_device(), FILE, "prefill", tuple(sorted(defined.items())))
        stream = torch.cuda.current_stream().cuda_stream
        start(kernel, grid, THREADS, shared_bytes(defined), stream, params)
    return outputs.result()
