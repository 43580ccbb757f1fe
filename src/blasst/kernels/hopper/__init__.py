"""Hopper kernels (sm_90a): CUDA C++ compiled on first use by NVRTC, launched on torch's stream.

Importing this package imports nothing of cuda; `unsupported_reason` does when it is asked, and the module
`prefill` (with `run(problem)`) does.
"""

from __future__ import annotations

import importlib.util
import math
import threading
from functools import cache
from importlib import import_module

import torch
from torch import Tensor

from blasst.core.problem import AttentionProblem

#: Compute capability of the GPUs that these kernels run on.
CAPABILITY = (9, 0)

HEAD_DIMS = (64, 96, 128)
DTYPES = (torch.float16, torch.bfloat16)

_MIN_PAGE = 16

#: TMA addresses rows in units of 16 bytes, with strides below 2**40 bytes.
_ALIGNMENT = 16
_MAX_STRIDE = 2**40

_looking = threading.Lock()


def unsupported_reason(problem: AttentionProblem) -> str | None:
    """Why these kernels cannot serve a checked problem, or None when they can."""
    q = problem.q
    if q.device.type != "cuda" or torch.version.hip is not None:
        return f"q is on {q.device}, these kernels need an NVIDIA GPU"
    if torch.cuda.get_device_capability(q.device) != CAPABILITY:
        return f"{torch.cuda.get_device_name(q.device)} is not a Hopper GPU (compute capability 9.0)"
    if problem.phase == "decode":
        decode = import_module("blasst.kernels.hopper.decode")
        reason = decode.unsupported_reason(problem) or _shape_reason(problem)
    else:
        reason = _shape_reason(problem)
    return reason or compiler_reason() or driver_reason()


def compiler_reason() -> str | None:
    """Why the kernels cannot be compiled here, or None when they can; looked at once."""
    with _looking:  # threads that import cuda.core at the same time may see it half made
        return _compiler_reason()


@cache
def _compiler_reason() -> str | None:
    remedy = "pip install 'blasst[cuda]'"
    if importlib.util.find_spec("cuda") is None or importlib.util.find_spec("cuda.core") is None:
        return f"cuda-core is not installed ({remedy})"
    try:
        import_module("cuda.core").Program  # noqa: B018
    except (ImportError, AttributeError, OSError) as error:
        return f"cuda-core is older than 0.5 or broken: {error} ({remedy})"
    try:
        import_module("blasst.kernels.hopper.compile").compiler_version()
    except (ImportError, RuntimeError, OSError) as error:
        return f"NVRTC, which compiles the kernel, does not load: {error} ({remedy})"
    return None


@cache
def driver_reason() -> str | None:
    """Why the driver does not load what the compiler makes, or None when it does; looked at once."""
    from cuda.bindings import driver

    compile_ = import_module("blasst.kernels.hopper.compile")
    served, made = int(compile_.checked(driver.cuDriverGetVersion())) // 1000, compile_.compiler_major()
    if served >= made:
        return None
    return (
        f"the driver serves CUDA {served}, and NVRTC compiles for CUDA {made} "
        f"(wants a newer driver, or an NVRTC of CUDA {served})"
    )


def _shape_reason(problem: AttentionProblem) -> str | None:
    q = problem.q
    if q.dtype not in DTYPES:
        return f"q has dtype {q.dtype}, supported are float16 and bfloat16"
    if problem.k.dtype != q.dtype and (problem.phase, problem.k.dtype) != ("decode", torch.float8_e4m3fn):
        return f"the cache has dtype {problem.k.dtype}, which {problem.phase} does not take"
    dims = (problem.head_dim, problem.head_dim_v)
    if dims[0] != dims[1] or dims[0] not in HEAD_DIMS:
        return f"head dims are {dims}, supported are equal ones of {', '.join(map(str, HEAD_DIMS))}"
    if not problem.softmax_scale > 0 or not math.isfinite(1 / problem.softmax_scale):
        return f"softmax_scale is {problem.softmax_scale}, supported are positive ones"
    if problem.block_table is not None:
        page = problem.k.shape[1]
        if page < _MIN_PAGE or page & (page - 1):
            return f"page_size is {page}, supported are powers of two from {_MIN_PAGE}"
        if problem.leftpad_k is not None:
            return "leftpad_k with a block_table"
    if problem.batch_size == 0:
        return "there is no sequence"
    for name, tensor in (("q", q), ("k", problem.k), ("v", problem.v)):
        if tensor.numel() == 0:
            return f"{name} is empty"
        if not _addressable(tensor):
            return (
                f"{name} with strides {tensor.stride()} does not lie in units of {_ALIGNMENT} bytes,"
                " which the copy engine needs"
            )
    return None


def _addressable(tensor: Tensor) -> bool:
    """Whether TMA can address rows of a tensor."""
    size = tensor.element_size()
    strides = [stride * size for stride, length in zip(tensor.stride()[:-1], tensor.shape[:-1]) if length > 1]
    return tensor.data_ptr() % _ALIGNMENT == 0 and all(
        0 < stride < _MAX_STRIDE and stride % _ALIGNMENT == 0 for stride in strides
    )
