"""Where the cases of test_cases_*.py run: on reference and eager kernel, unless the environment says more.

- TRITON_INTERPRET=1: the Triton kernels in the interpreter; test_triton.py does it.
- BLASST_CASES=triton or hopper: those kernels on a GPU; tests/gpu/test_both_cases.py does it. Tensors are
  made and compared on the CPU, and a call takes them to the GPU as they are: strides, shared memory, what
  lies beside them. What the Hopper kernels never serve is made wider (head_dim 64 at least) and of 16 bits by
  `heavy_tailed_inputs`; what they refuse is skipped, with their reason.
- BLASST_CASES=emulated: the Hopper kernels on the emulator of tests/emulator, in an order of things drawn by
  BLASST_SEED; test_hopper_emulated_cases.py does it.
"""

import os
from contextlib import nullcontext

import pytest
import torch

import blasst
from blasst import UnsupportedError
from blasst.testing import heavy_tailed_inputs as _heavy_tailed_inputs

_STAGE = os.environ.get("BLASST_CASES", "")
EMULATED = _STAGE == "emulated"
STAGE = "hopper" if EMULATED else _STAGE
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
#: Few shapes are enough where each is compiled, or interpreted.
FEW = INTERPRETED or bool(STAGE)
DEVICE = "cuda" if STAGE and not EMULATED else "cpu"
ON_GPU, HOPPER = DEVICE == "cuda", STAGE == "hopper"
IMPLS = (STAGE,) if STAGE else ("triton",) if INTERPRETED else ("reference", "eager")
impls = pytest.mark.parametrize("impl", IMPLS)

#: Dtype and head_dim of tests that make their tensors themselves.
DTYPE, DIM = (torch.float16, 64) if HOPPER else (torch.float32, 16)
#: Rounding of weights and out to float16, 2**-11 each, times values up to 4 that add up, doubled.
ROUNDING = 2**-7 if HOPPER else 0.0


def heavy_tailed_inputs(*shape, dtype=torch.float32, **options):
    """`blasst.testing.heavy_tailed_inputs` in what the kernels of the stage serve."""
    if HOPPER:
        dtype = DTYPE if dtype == torch.float32 else dtype
        shape = (*shape[:5], *(max(dim, 64) for dim in shape[5:]))
    if INTERPRETED and dtype == torch.bfloat16:  # which the interpreter computes wrongly
        dtype = torch.float16
    return _heavy_tailed_inputs(*shape, dtype=dtype, **options)


def close(actual, expected, rtol=1e-5, atol=1e-6):
    """torch.testing.assert_close, for values that a kernel may have rounded to 16 bits."""
    if actual.dtype == torch.float16:
        rtol = max(rtol, 1e-3)
    torch.testing.assert_close(actual, expected, rtol=max(rtol, ROUNDING / 4), atol=max(atol, ROUNDING))


def _the_device():
    """What must hold while a kernel of the stage runs."""
    if not EMULATED:
        return nullcontext()
    from run_hopper import emulated

    return emulated(int(os.environ.get("BLASST_SEED", "0")))


class _Moved:
    """Tensors on the device in which a call was asked for: one copy of each memory."""

    def __init__(self):
        self.memory = {}  # address of a storage -> (its bytes, their copy, the copy as it was)

    def __call__(self, x):
        if not isinstance(x, torch.Tensor):
            return x
        if x.numel() == 0:
            return x.to(DEVICE)
        storage = x.untyped_storage()
        if storage.data_ptr() not in self.memory:
            own = torch.empty(0, dtype=torch.uint8).set_(storage)
            there = own.to(DEVICE)
            self.memory[storage.data_ptr()] = own, there, there.clone()
        _, there, _ = self.memory[storage.data_ptr()]
        return there.view(x.dtype).as_strided(x.shape, x.stride(), x.storage_offset())

    def look_back(self, written):
        """Bring back what was written; everything else must be as it was."""
        addresses = {x.untyped_storage().data_ptr() for x in written}
        for address, (own, there, before) in self.memory.items():
            if address in addresses:
                own.copy_(there)
            else:
                assert torch.equal(there, before), "an input was modified"


def _on_the_device(function):
    """A public function whose tensors go to the device of the stage and whose output comes back."""

    def call(*args, **options):
        move = _Moved()
        try:
            with _the_device():
                got = function(*map(move, args), **{name: move(x) for name, x in options.items()})
        except UnsupportedError as error:
            if f"impl={STAGE!r} cannot serve" in str(error):
                pytest.skip(str(error))
            raise
        tensors, form = torch.utils._pytree.tree_flatten(got)
        assert all(x.device.type == DEVICE for x in tensors if x is not None)
        move.look_back(args[1:3] if len(args) > 3 and function is blasst.blasst_attn_with_kvcache else ())
        tensors = [None if x is None else x.cpu() for x in tensors]
        return torch.utils._pytree.tree_unflatten(tensors, form)

    return call if STAGE else function


attention = _on_the_device(blasst.attention)
blasst_attn_func = _on_the_device(blasst.blasst_attn_func)
blasst_attn_varlen_func = _on_the_device(blasst.blasst_attn_varlen_func)
blasst_attn_with_kvcache = _on_the_device(blasst.blasst_attn_with_kvcache)
