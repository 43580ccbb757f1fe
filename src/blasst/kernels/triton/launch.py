"""Host side of the Triton kernels: outputs, arguments, the table of launch configurations, the launch."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from blasst.core.problem import AttentionProblem
from blasst.core.sequences import map_shape
from blasst.core.types import AttentionOutput, SkipCounts, TileShape

#: Stands for "no limit" in window sizes: beyond every position, far from int32 overflow.
UNLIMITED = 2**30

LOG2_E = 1.4426950408889634

#: Compute capability that stands for Triton's CPU interpreter.
NO_GPU = (0, 0)

#: Arguments whose value must not lead to a new compilation (Triton specialises integers on 1 and on 16).
LENGTHS = [
    "batch",
    "seqlen_q",
    "seqlen_k",
    "num_heads",
    "group",
    "slots",
    "search_steps",
    "query_tiles",
    "key_tiles",
    "splits",
    "rows",
    "row_blocks",
    "window_left",
    "window_right",
    "dense_tail",
    "table_stride",
    "threshold_stride",
    "lse_stride_b",
    "lse_stride_h",
    "k_descale_stride_b",
    "k_descale_stride_h",
    "v_descale_stride_b",
    "v_descale_stride_h",
    "scale",
    "cap",
    "eps",
]


@dataclass(frozen=True)
class Launch:
    """One kernel launch on a one-dimensional grid (its first axis alone may exceed 65535)."""

    kernel: Any
    programs: int
    arguments: dict[str, Any]
    constants: dict[str, Any]
    options: dict[str, Any]


@dataclass(frozen=True)
class Outputs:
    """Tensors that a kernel fills.

    Attributes:
        out: contiguous, dtype of q.
        lse: float32 (batch, num_heads, seqlen_q), packed (num_heads, total_q).
        mass_bound: like lse, or None.
        kept: int8 kept map, or None.
        skipped: int64 (batch, heads that vote), or None.
        visited: the same.
    """

    out: Tensor
    lse: Tensor
    mass_bound: Tensor | None
    kept: Tensor | None
    skipped: Tensor | None
    visited: Tensor | None

    def result(self) -> AttentionOutput:
        """As the public tuple."""
        counts = None
        if self.skipped is not None and self.visited is not None:
            counts = SkipCounts(self.skipped, self.visited)
        kept = None if self.kept is None else self.kept.view(torch.bool)
        return AttentionOutput(self.out, self.lse, counts, self.mass_bound, kept)


def allocate(problem: AttentionProblem, tile: TileShape) -> Outputs:
    """Outputs of a problem; what a kernel only adds to or marks in starts at zero.

    Packed rows may belong to no sequence: they read as rows that see nothing.
    """
    q, device = problem.q, problem.q.device
    out_shape = (*q.shape[:-1], problem.head_dim_v)
    if problem.packed:
        out = torch.zeros(out_shape, dtype=q.dtype, device=device)
        lse = torch.full((problem.num_heads, q.shape[0]), -torch.inf, dtype=torch.float32, device=device)
    else:
        out = torch.empty(out_shape, dtype=q.dtype, device=device)
        lse_shape = (q.shape[0], problem.num_heads, q.shape[1])
        lse = torch.empty(lse_shape, dtype=torch.float32, device=device)
    shape = map_shape(problem, tile)
    return Outputs(
        out,
        lse,
        torch.zeros_like(lse) if problem.want_mass_bound else None,
        torch.zeros(shape, dtype=torch.int8, device=device) if problem.want_kept_tiles else None,
        torch.zeros(shape[:2], dtype=torch.int64, device=device) if problem.want_counts else None,
        torch.zeros(shape[:2], dtype=torch.int64, device=device) if problem.want_counts else None,
    )


def problem_arguments(problem: AttentionProblem, outputs: Outputs) -> dict[str, Any]:
    """Runtime arguments that the prefill and the decode kernel share, by name."""
    q, k, v, out, lse = problem.q, problem.k, problem.v, outputs.out, outputs.lse
    table, threshold = _dense(problem.block_table), problem.threshold
    left, right = problem.window_size
    if problem.causal:
        right = 0
    scale, cap = problem.softmax_scale * LOG2_E, 0.0
    if problem.softcap > 0:
        scale, cap = problem.softmax_scale / problem.softcap, problem.softcap * LOG2_E
    mass = outputs.mass_bound if threshold is not None else None
    return {
        "q_ptr": q,
        "k_ptr": k,
        "v_ptr": v,
        "out_ptr": out,
        "lse_ptr": lse,
        "mass_ptr": mass,
        "kept_ptr": outputs.kept,
        "skipped_ptr": outputs.skipped,
        "visited_ptr": outputs.visited,
        "threshold_ptr": threshold,
        "sinks_ptr": _dense(problem.sinks),
        "cu_q_ptr": _dense(problem.cu_seqlens_q),
        "cu_k_ptr": _dense(problem.cu_seqlens_k),
        "seqused_ptr": _dense(problem.seqused_k),
        "leftpad_ptr": _dense(problem.leftpad_k),
        "table_ptr": table,
        **_descale("k", problem.k_descale),
        **_descale("v", problem.v_descale),
        **_strides("q", q),
        **_strides("k", k),
        **_strides("v", v),
        **_strides("out", out),
        "lse_stride_b": 0 if problem.packed else lse.stride(0),
        "lse_stride_h": lse.stride(-2),
        "table_stride": 0 if table is None else table.stride(0),
        "threshold_stride": 0 if threshold is None else threshold.stride(0),
        "page_size": 1 if table is None else k.shape[1],
        "batch": problem.batch_size,
        "seqlen_q": q.shape[-3],
        "seqlen_k": problem.max_seqlen_k,
        "num_heads": problem.num_heads,
        "group": problem.num_heads // problem.num_kv_heads,
        "window_left": UNLIMITED if left < 0 else min(left, UNLIMITED),
        "window_right": UNLIMITED if right < 0 else min(right, UNLIMITED),
        "scale": float(scale),
        "cap": float(cap),
        "eps": float(problem.max_skipped_mass or 0.0),
    }


def _dense(tensor: Tensor | None) -> Tensor | None:
    """A small index tensor whose last dimension has stride 1."""
    return tensor if tensor is None or tensor.stride(-1) == 1 else tensor.contiguous()


def _descale(name: str, descale: Tensor | None) -> dict[str, Any]:
    """Pointer to the scale of k or v and its strides of (sequence, KV head); it may be expanded."""
    stride_b, stride_h = (0, 0) if descale is None else descale.stride()
    return {
        f"{name}_descale_ptr": descale,
        f"{name}_descale_stride_b": stride_b,
        f"{name}_descale_stride_h": stride_h,
    }


def _strides(name: str, tensor: Tensor) -> dict[str, int]:
    """Strides of (sequence or page, row, head); 0 for the first of a packed tensor."""
    return {
        f"{name}_stride_b": tensor.stride(0) if tensor.dim() == 4 else 0,
        f"{name}_stride_s": tensor.stride(-3),
        f"{name}_stride_h": tensor.stride(-2),
    }


def flags(problem: AttentionProblem) -> dict[str, Any]:
    """Compile-time options of the rule."""
    skip = problem.threshold is not None
    budget = skip and problem.max_skipped_mass is not None
    return {
        "SKIP": skip,
        "BUDGET": budget,
        "MASS": budget or (skip and problem.want_mass_bound),
        "SOFTCAP": problem.softcap > 0,
    }


def split_dimension(size: int) -> tuple[int, int]:
    """A head dimension as (main, tail): powers of two; the tail is 64 or 0.

    192 = 128 + 64 and 576 = 512 + 64 waste nothing. Narrower tails are not used: on an H200 with Triton 3.6 a
    tail of 16 or 32 columns beside a wider main part gave wrong scores (96 = 64 + 32) or an illegal access
    (160 = 128 + 32), while one padded to 64 and a single padded part are right
    (tests/gpu/test_triton_device.py holds every head dimension).
    """
    main = max(16, 1 << (size.bit_length() - 1))
    rest = size - main
    if rest <= 0:
        return main, 0
    return (main, 64) if main >= 128 and rest <= 64 else (2 * main, 0)


def dimensions(problem: AttentionProblem) -> dict[str, int]:
    """Compile-time head dimensions."""
    main, tail = split_dimension(problem.head_dim)
    main_v, tail_v = split_dimension(problem.head_dim_v)
    return {
        "HEAD_DIM": problem.head_dim,
        "MAIN": main,
        "TAIL": tail,
        "HEAD_DIM_V": problem.head_dim_v,
        "MAIN_V": main_v,
        "TAIL_V": tail_v,
    }


def narrow(problem: AttentionProblem, part: int) -> bool:
    """Whether every aligned run of `part` keys lies at one stride and within 2**31 elements."""
    if problem.block_table is not None and (problem.k.shape[1] % part or problem.leftpad_k is not None):
        return False
    return part * max(problem.k.stride(-3), problem.v.stride(-3)) < 2**31


@dataclass(frozen=True)
class Config:
    """How a kernel is compiled; nothing here changes what is skipped.

    Attributes:
        num_warps: warps of a program.
        num_stages: depth of the load pipeline.
        part: keys that prefill scores at once: half of the tile (both halves of the scores stay in
            registers), or 32 (a tile is scored once to vote and once more to be used).
        edge_part: keys that prefill scores at once in tiles with masks (64 spills at head_dim 128).
        stream: columns of q and k per step of Q.K^T; 0 = all at once, q stays resident.
        block_m: rows of a program in decode.
    """

    num_warps: int
    num_stages: int
    part: int = 64
    edge_part: int = 32
    stream: int = 0
    block_m: int = 16

    def options(self) -> dict[str, Any]:
        """Keyword options of the launch; contraction stays off (see primitives)."""
        return {"num_warps": self.num_warps, "num_stages": self.num_stages, "enable_fp_fusion": False}


#: Prefill at 16 bits: (major capability, largest head dimension) -> configuration. Chosen by compiling
#: (Triton 3.6) for no spills; tests/cpu/test_triton_compile.py repeats it. 64 rows x 4 warps suit wgmma
#: (8 warps would repeat the rows), but sm_80 keeps q in registers and sm_100 the accumulator apart: both
#: need 8 warps at 128. Above that the scores of a whole tile and the accumulator do not fit together: 32
#: keys at a time.
PREFILL_CONFIGS: dict[tuple[int, int], Config] = {
    (8, 64): Config(num_warps=4, num_stages=2),
    (8, 128): Config(num_warps=8, num_stages=2),
    (8, 192): Config(num_warps=8, num_stages=2, part=32, stream=64),
    (8, 256): Config(num_warps=8, num_stages=2, part=32, stream=64),
    (9, 64): Config(num_warps=4, num_stages=2),
    (9, 128): Config(num_warps=4, num_stages=2),
    (9, 192): Config(num_warps=4, num_stages=2, part=32),
    (9, 256): Config(num_warps=8, num_stages=2, part=32, stream=32),
    (10, 64): Config(num_warps=4, num_stages=2),
    (10, 128): Config(num_warps=8, num_stages=2),
    (10, 192): Config(num_warps=8, num_stages=2, part=32, stream=64),
    (10, 256): Config(num_warps=8, num_stages=2, part=32, stream=32),
}
#: fp32 multiplies on the FMA units (IEEE), with operands in registers: narrow steps.
PREFILL_FP32 = Config(num_warps=8, num_stages=1, part=32, stream=32)
#: 576/512: 512 accumulators a row.
PREFILL_WIDEST = Config(num_warps=8, num_stages=1, part=32, stream=32)

#: In Triton's interpreter: as few operations as possible.
INTERPRETED = Config(num_warps=4, num_stages=1, edge_part=64)

#: Parts of these capabilities have 99 KB of shared memory for a program, others 163 KB or more.
SMALL_SHARED_MEMORY = ((8, 6), (8, 9), (12, 0), (12, 1))


def _widest(problem: AttentionProblem) -> int:
    return max(problem.head_dim, problem.head_dim_v)


def prefill_config(problem: AttentionProblem, arch: tuple[int, int]) -> Config:
    """Launch configuration of prefill."""
    wide = _widest(problem)
    if arch == NO_GPU:
        return INTERPRETED
    if problem.q.dtype == torch.float32:
        return PREFILL_FP32
    if wide > 256:
        return PREFILL_WIDEST
    column = next(size for size in (64, 128, 192, 256) if wide <= size)
    row = arch[0] if arch[0] in (9, 10) else 8
    return PREFILL_CONFIGS[row, column]


def decode_config(problem: AttentionProblem, arch: tuple[int, int], rows: int) -> Config:
    """Launch configuration of decode for a number of rows per KV head.

    Bound by loads of k and v, so the rows of a KV head share a program up to 64; wider accumulators leave
    room for fewer. All of these compile without spills (fp32 does not).
    """
    wide = _widest(problem)
    if arch == NO_GPU:
        return Config(num_warps=4, num_stages=1, block_m=16 if rows <= 16 else 64)
    if problem.q.dtype == torch.float32:
        return Config(num_warps=8, num_stages=1, stream=32)
    if wide > 256:
        if arch in SMALL_SHARED_MEMORY:
            return Config(num_warps=8, num_stages=1, stream=64)
        return Config(num_warps=8, num_stages=2)
    if rows <= 16:
        return Config(num_warps=4, num_stages=3 if wide <= 128 else 2)
    if wide > 128:
        return Config(num_warps=8, num_stages=2, block_m=32)
    if rows <= 32:
        return Config(num_warps=4, num_stages=2, block_m=32)
    return Config(num_warps=8, num_stages=2, block_m=64)


def combine_config(problem: AttentionProblem) -> Config:
    """Launch configuration of the merge of splits: one row of head_dim_v, bound by latency."""
    return Config(num_warps=1 if problem.head_dim_v <= 128 else 4, num_stages=2)


def named(launch: Launch) -> dict[str, Any]:
    """Arguments and constants that the launch's kernel takes, by name."""
    everything = launch.arguments | launch.constants
    return {name: everything[name] for name in launch.kernel.arg_names}


@cache
def _capability(index: int) -> tuple[int, int]:
    return torch.cuda.get_device_capability(index)


def capability(device: torch.device) -> tuple[int, int]:
    """Compute capability of a CUDA device, NO_GPU in the interpreter; other vendors count as (8, 0)."""
    if device.type == "cpu":
        return NO_GPU
    if device.type != "cuda" or torch.version.hip is not None:
        return 8, 0
    return _capability(device.index if device.index is not None else torch.cuda.current_device())


def start(launches: list[Launch], device: torch.device) -> None:
    """Run launches in order on the current stream of their device; the current device stays as it is."""
    guard = torch.cuda.device(device) if device.type == "cuda" else nullcontext()
    with guard:
        for launch in launches:
            launch.kernel[(launch.programs,)](**named(launch), **launch.options)
