"""Decode calls like an earlier one go straight to the launch: nothing is checked or chosen twice.

A model calls with the same shapes in every layer and step, and the device may wait for the host. What the
checks look at on a GPU (shapes, strides, dtypes, devices, alignment, options; never values) is the key of a
prepared call.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from blasst.core.problem import AttentionProblem
from blasst.core.types import AttentionOutput
from blasst.kernels import select

if TYPE_CHECKING:
    from blasst.kernels.hopper.decode import Plan

_MAX_PLANS = 4096
_plans: dict[tuple[Any, ...], Plan] = {}

#: Depth of the stacks of modes that must see every operation; None in a torch that does not tell.
_dispatch_modes = getattr(torch._C, "_len_torch_dispatch_stack", None)
_transforms = getattr(getattr(torch._C, "_functorch", None), "maybe_current_level", None)


def _dual_level() -> int:
    """Depth of forward-mode differentiation; -1 = none."""
    return getattr(forward_ad, "_current_level", -1)


def call_key(options: tuple[object, ...], *tensors: object) -> tuple[Any, ...] | None:
    """What tells one call from another, or None for a call that must be looked at.

    Args:
        options: kept with their types; None if one of them cannot be hashed.
        tensors: tensors or None; anything else, a subclass, or a tensor that is on no GPU gives None.
    """
    if torch.compiler.is_compiling() or _dispatch_modes is None or _transforms is None:
        return None
    if _dispatch_modes() or _transforms() is not None or torch.jit.is_tracing() or _dual_level() >= 0:
        return None
    try:
        hash(options)
    except TypeError:
        return None
    key: list[Any] = [torch.is_grad_enabled(), options, tuple(map(type, options))]
    for x in tensors:
        if x is None:
            key.append(None)
        elif type(x) is Tensor and x.is_cuda:
            key.append((x.shape, x.stride(), x.dtype, x.device, x.data_ptr() & 15, x.requires_grad))
        else:
            return None
    return tuple(key)


def find(key: tuple[Any, ...]) -> Plan | None:
    """The prepared call of a key."""
    return _plans.get(key)


def run(plan: Plan, *tensors: Any) -> AttentionOutput:
    """Run a prepared call on new tensors, in the order of `Plan.run`."""
    result = plan.run(*tensors)
    select.note_served("hopper")
    return result


def remember(key: tuple[Any, ...], problem: AttentionProblem, return_lse: bool, *tensors: Any) -> None:
    """Prepare the call that was just served, if it was by a kernel that can be prepared.

    Args:
        key: of the call; another one where return_lse is another.
        problem: what the checks made of it.
        return_lse: whether the calls want the lse.
        tensors: what the user gave, in the order of `Plan.run`; None for a number that became a tensor.
    """
    if select.backend_used() != "hopper" or problem.phase != "decode":
        return
    from blasst.kernels.hopper import decode

    for used, given in zip(decode.arguments(problem), tensors, strict=True):
        if given is not None and (
            used is None or used.data_ptr() != given.data_ptr() or given.stride()[-1:] not in ((1,), ())
        ):
            return
    if len(_plans) >= _MAX_PLANS:
        _plans.clear()
    _plans[key] = decode.Plan(problem, wants_lse=return_lse)


@lru_cache(maxsize=256)
def _kept_constant(value: float, batch: int, device: torch.device, stream: int) -> Tensor:
    return torch.full((batch,), value, dtype=torch.float32, device=device)


def constant(value: float, batch: int, device: torch.device) -> Tensor:
    """float32 (batch,) of one value; a stream makes it once, a graph anew: what it makes belongs to it."""
    if torch.cuda.is_current_stream_capturing():
        return torch.full((batch,), value, dtype=torch.float32, device=device)
    return _kept_constant(value, batch, device, torch.cuda.current_stream(device).cuda_stream)
