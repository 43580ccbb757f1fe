"""The one table that says which kernel serves a call, or the reason why not."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

import torch

from blasst.core.errors import UnsupportedError
from blasst.core.problem import AttentionProblem
from blasst.core.reference import run_reference
from blasst.core.types import AttentionOutput

_served = threading.local()


@dataclass(frozen=True)
class Kernel:
    """One implementation: whether it can serve a problem, and how to run it."""

    name: str
    unsupported_reason: Callable[[AttentionProblem], str | None]
    run: Callable[[AttentionProblem], AttentionOutput]


def _tiles_reason(problem: AttentionProblem) -> str | None:
    """GPU kernels visit and score every tile that the causal mask, window and lengths leave."""
    if problem.block_mask is not None:
        return "it takes no block_mask"
    if problem.int8_screen:
        return 'it takes no screen="int8"'
    if problem.progressive:
        return "it takes no progressive keys"
    return "it takes no screen" if problem.screen else None


def _triton_reason(problem: AttentionProblem) -> str | None:
    if reason := _tiles_reason(problem):
        return reason
    from blasst.kernels import triton

    return triton.unsupported_reason(problem)


def _run_triton(problem: AttentionProblem) -> AttentionOutput:
    if problem.phase == "decode":
        from blasst.kernels.triton import decode

        return decode.run(problem)
    from blasst.kernels.triton import prefill

    return prefill.run(problem)


def _hopper_reason(problem: AttentionProblem) -> str | None:
    if reason := _tiles_reason(problem):
        return reason
    from blasst.kernels import hopper

    return hopper.unsupported_reason(problem)


def _run_hopper(problem: AttentionProblem) -> AttentionOutput:
    if problem.phase == "decode":
        from blasst.kernels.hopper import decode

        return decode.run(problem)
    from blasst.kernels.hopper import prefill

    return prefill.run(problem)


def _run_eager(problem: AttentionProblem) -> AttentionOutput:
    from blasst.kernels import eager

    return eager.run(problem)


def _run_reference(problem: AttentionProblem) -> AttentionOutput:
    result = run_reference(problem, dtype=torch.float64)
    return AttentionOutput(
        result.out.to(problem.q.dtype),
        result.lse.float().contiguous(),
        result.counts if problem.want_counts else None,
        result.mass_bound.float().contiguous() if problem.want_mass_bound else None,
        result.kept_tiles if problem.want_kept_tiles else None,
    )


def _everything(problem: AttentionProblem) -> str | None:
    return None


KERNELS = {
    "hopper": Kernel("hopper", _hopper_reason, _run_hopper),
    "triton": Kernel("triton", _triton_reason, _run_triton),
    "eager": Kernel("eager", _everything, _run_eager),
    "reference": Kernel("reference", _everything, _run_reference),
}

#: What impl="auto" tries, in this order, on a GPU and elsewhere.
AUTO_ON_GPU = ("hopper", "triton", "eager")
AUTO_ELSEWHERE = ("eager",)


def choose(problem: AttentionProblem, impl: str) -> Kernel:
    """The kernel for a problem.

    Args:
        problem: a checked call.
        impl: "auto" or a kernel's name.

    Raises:
        UnsupportedError: no kernel, or not the one that was named, can serve the call.
    """
    on_gpu = problem.q.device.type in ("cuda", "xpu")
    names = (AUTO_ON_GPU if on_gpu else AUTO_ELSEWHERE) if impl == "auto" else (impl,)
    reasons = []
    for name in names:
        reason = KERNELS[name].unsupported_reason(problem)
        if reason is None:
            return KERNELS[name]
        reasons.append(f"{name}: {reason}")
    others = [n for n in KERNELS if n not in names and KERNELS[n].unsupported_reason(problem) is None]
    raise UnsupportedError(
        f"impl={impl!r} cannot serve this call ({'; '.join(reasons)}); it is supported by {', '.join(others)}"
    )


def run(problem: AttentionProblem, impl: str) -> AttentionOutput:
    """Choose a kernel and run it."""
    kernel = choose(problem, impl)
    note_served(kernel.name)
    return kernel.run(problem)


def note_served(name: str) -> None:
    """Name of the kernel that serves this thread's call."""
    _served.name = name


def backend_used() -> str | None:
    """Name of the kernel that served this thread's most recent call; None before the first."""
    return getattr(_served, "name", None)
