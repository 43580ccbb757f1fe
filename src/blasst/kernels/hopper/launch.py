"""What the Hopper kernels share on the host: tensor maps, arguments of the scores, the launch."""

from __future__ import annotations

import ctypes
from functools import cache, lru_cache
from typing import Any

import torch
from torch import Tensor

from blasst.core.problem import AttentionProblem
from blasst.kernels.hopper.compile import checked
from blasst.kernels.triton.launch import LOG2_E, UNLIMITED

#: Bytes of a row that lie together in shared memory.
ROW_BYTES = 128
CHUNK = 64  # elements of 16 bits in them


@lru_cache(maxsize=512)
def _tensor_map(
    address: int,
    dtype: torch.dtype,
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    rows: int,
) -> Any:
    """Tensor map of (x, rows, heads, dim) as (dim, rows, heads, x), in boxes of (128 bytes, rows, 1, 1).

    What L2 fetches at once is a matter of the kernel: with promotion to 256 bytes decode reads 4.15 instead
    of 4.46 TB/s (H200, 64K keys, batch 16).
    """
    from cuda.bindings import driver

    kinds = driver.CUtensorMapDataType
    kind = {
        torch.bfloat16: kinds.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
        torch.float16: kinds.CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
        torch.float8_e4m3fn: kinds.CU_TENSOR_MAP_DATA_TYPE_UINT8,
    }[dtype]
    outer, length, heads, dim = shape
    # A dimension of size 1 is never stepped along; its stride only has to be valid.
    steps = [
        stride * dtype.itemsize if size > 1 else 16
        for stride, size in ((strides[1], length), (strides[2], heads), (strides[0], outer))
    ]
    encoded = checked(
        driver.cuTensorMapEncodeTiled(
            kind,
            4,
            address,
            [driver.cuuint64_t(size) for size in (dim, length, heads, outer)],
            [driver.cuuint64_t(step) for step in steps],
            [driver.cuuint32_t(size) for size in (ROW_BYTES // dtype.itemsize, rows, 1, 1)],
            [driver.cuuint32_t(1)] * 4,
            driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
            driver.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B,
            driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
            driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        )
    )
    return (ctypes.c_uint64 * 16)(*(int(word) for word in encoded.opaque))


def map_of(tensor: Tensor, rows: int) -> Any:
    """Tensor map of q, k or v, packed or not, in boxes of so many rows."""
    four = tensor if tensor.dim() == 4 else tensor.unsqueeze(0)
    return _tensor_map(four.data_ptr(), four.dtype, tuple(four.shape), four.stride(), rows)


def pointer(tensor: Tensor | None) -> int:
    """Address of a tensor; 0 for None."""
    return 0 if tensor is None else tensor.data_ptr()


def dense(tensor: Tensor | None) -> Tensor | None:
    """A small index tensor whose last dimension has stride 1."""
    return tensor if tensor is None or tensor.stride(-1) == 1 else tensor.contiguous()


def score_arguments(problem: AttentionProblem) -> dict[str, float]:
    """Arguments that say how scores are scaled, capped and masked.

    Scores stay q . k while they are compared; `unit` makes them natural logits, `scale_log2` base-2 ones.
    """
    left, right = problem.window_size
    if problem.causal:
        right = 0
    scale, capped = problem.softmax_scale, problem.softcap > 0
    return {
        "window_left": UNLIMITED if left < 0 else min(left, UNLIMITED),
        "window_right": UNLIMITED if right < 0 else min(right, UNLIMITED),
        "scale_log2": LOG2_E if capped else scale * LOG2_E,
        "unit": 1.0 if capped else scale,
        "score_factor": 2 * scale / problem.softcap * LOG2_E if capped else 0.0,
        "score_cap": problem.softcap,
    }


@cache
def _launch_function() -> Any:
    """cuLaunchKernel itself: a call through cuda.bindings takes the host longer."""
    function = ctypes.CDLL("libcuda.so.1").cuLaunchKernel
    function.argtypes = [ctypes.c_void_p, *[ctypes.c_uint] * 7, *[ctypes.c_void_p] * 3]
    function.restype = ctypes.c_int
    return function


def start(
    kernel: int, grid: tuple[int, int, int], threads: int, shared: int, stream: int, params: ctypes.Structure
) -> None:
    """Launch a kernel on a stream of the current device.

    Args:
        kernel: CUfunction, from `load_kernel`.
        grid: CTAs.
        threads: of a CTA.
        shared: bytes of dynamic shared memory.
        stream: CUstream.
        params: the kernel's one argument; copied before this returns.

    Raises:
        RuntimeError: the driver refuses.
    """
    arguments = ctypes.c_void_p(ctypes.addressof(params))
    status = _launch_function()(
        kernel, *grid, threads, 1, 1, shared, stream, ctypes.addressof(arguments), None
    )
    if status != 0:
        raise RuntimeError(f"CUDA driver: cuLaunchKernel returned {status}")
