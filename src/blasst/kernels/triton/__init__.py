"""Portable Triton kernels: any GPU that Triton supports, and its CPU interpreter.

Importing this package imports nothing of triton; `unsupported_reason` does when it is asked, and the modules
`prefill` and `decode` (each with `run(problem)`) do.
"""

from __future__ import annotations

import importlib.util

import torch

from blasst.core.problem import AttentionProblem
from blasst.core.types import DECODE_TILE, FP8, PREFILL_TILE, num_tiles

#: Programs on the first axis of a grid.
_MAX_PROGRAMS = 2**31 - 1

#: Oldest version that the kernels are written for and tested with.
MIN_TRITON = (3, 6)

_DEVICES = ("cuda", "xpu")
_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def unsupported_reason(problem: AttentionProblem) -> str | None:
    """Why these kernels cannot serve a checked problem, or None when they can."""
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    try:
        import triton
    except ImportError as error:
        return f"triton does not import: {error}"
    version = tuple(int(part) for part in triton.__version__.split(".")[:2])
    if version < MIN_TRITON:
        return f"triton is {triton.__version__}, supported is {MIN_TRITON[0]}.{MIN_TRITON[1]} or newer"
    interpreted = bool(triton.knobs.runtime.interpret)
    q = problem.q
    if q.device.type not in _DEVICES and not (interpreted and q.device.type == "cpu"):
        return f"q is on {q.device}, Triton needs a GPU (or TRITON_INTERPRET=1 for its CPU interpreter)"
    if q.dtype not in _DTYPES:
        return f"q has dtype {q.dtype}, supported are float16, bfloat16 and float32"
    if q.dtype == torch.bfloat16:
        if interpreted:
            return "Triton's interpreter computes bfloat16 wrongly, use float16 or float32 with it"
        if _before_ampere(q.device):
            return "bfloat16 needs compute capability 8.0, use float16 on this GPU"
    if problem.k.dtype == FP8:
        return f"a cache of {FP8}"
    return _shape_reason(problem)


def _before_ampere(device: torch.device) -> bool:
    if device.type != "cuda" or torch.version.hip is not None:
        return False
    return torch.cuda.get_device_capability(device) < (8, 0)


def _shape_reason(problem: AttentionProblem) -> str | None:
    dims = (problem.head_dim, problem.head_dim_v)
    if max(dims) > 256 and dims != (576, 512):
        return f"head dims are {dims}, supported are up to 256 each, and 576 with 512"
    for name, tensor in (("q", problem.q), ("k", problem.k), ("v", problem.v)):
        if tensor.numel() and tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
            return f"{name} has stride {tensor.stride(-1)} in its last dimension, supported is 1"
    if problem.phase == "prefill":
        length = problem.q.shape[-3]
        slots = num_tiles(length, PREFILL_TILE.query or 1) * (1 if problem.packed else problem.batch_size)
        programs = (slots + problem.batch_size) * problem.num_heads
    else:
        splits = min(32, num_tiles(problem.max_seqlen_k, DECODE_TILE.key))
        programs = problem.batch_size * problem.num_heads * max(problem.max_seqlen_q, 1) * max(splits, 1)
    if programs > _MAX_PROGRAMS:
        return f"the call needs {programs} programs, a grid holds {_MAX_PROGRAMS}"
    return None
