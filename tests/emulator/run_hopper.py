"""The library's own functions on emulated Hopper kernels: its host code as it is, its device emulated.

    with emulated(seed=3) as device:
        got = blasst_attn_func(q, k, v, threshold=0.05, impl="hopper")
    device.launches  # how many

Tensors are those of the CPU. Within `cuda_is_the_cpu` they are so where device="cuda" was asked for: device
tests run as they are, but for those that look at the GPU itself (memory, graphs, values not read back):

    PYTHONPATH=src:tests/emulator python3 -m pytest --noconftest -p emulated_cuda tests/gpu/test_hopper.py
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import hopper_emulator
import torch
from torch.overrides import TorchFunctionMode

from blasst.kernels import hopper
from blasst.kernels.hopper import compile as compile_
from blasst.kernels.hopper import decode, prefill


@dataclass
class Device:
    """An emulated GPU.

    Attributes:
        seed: of the order of things, see `hopper_emulator`.
        processors: it has; CTAs of the persistent prefill grid.
        resident: CTAs at the same time.
        edit: makes another text of a source file, by its name; for planted faults.
        launches: how many there were.
    """

    seed: int = 0
    processors: int = 2
    resident: int = 4
    edit: Callable[[str, str], str] | None = None
    launches: int = 0
    _zeros: list[torch.Tensor] = field(default_factory=list)

    def sources(self) -> dict[str, str]:
        """Texts of the kernels."""
        return {
            name: text if self.edit is None else self.edit(name, text)
            for name, text in compile_.sources().items()
        }

    def load_kernel(self, device: int, file: str, name: str, macros: tuple[tuple[str, int], ...]) -> Any:
        """In the place of compile.load_kernel."""
        return hopper_emulator.build(self.sources(), file, name, dict(macros))

    def start(
        self,
        kernel: hopper_emulator.Kernel,
        grid: tuple[int, int, int],
        threads: int,
        shared: int,
        stream: int,
        params: ctypes.Structure,
    ) -> None:
        """In the place of launch.start."""
        self.launches += 1
        kernel.launch(
            params, grid=grid, threads=threads, shared=shared, seed=self.seed, resident=self.resident
        )
        for zeros in self._zeros:
            assert not bool(zeros.any()), "counters are not zero again after the launch"

    def zeros(self, count: int, stream: int) -> int:
        """In the place of decode._zeros: new ones for each launch, looked at after it."""
        self._zeros = [torch.zeros(count, dtype=torch.int32)]
        return self._zeros[0].data_ptr()


class _Torch(ModuleType):
    """torch with another GPU."""

    def __init__(self, replaced: Mapping[str, Any]):
        super().__init__("torch")
        self.__dict__.update(replaced)

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def _torch_with_a_gpu(processors: int) -> _Torch:
    stream = SimpleNamespace(cuda_stream=0)
    cuda = SimpleNamespace(
        device=lambda device: nullcontext(),
        current_device=lambda: 0,
        current_stream=lambda: stream,
        get_device_properties=lambda device: SimpleNamespace(multi_processor_count=processors),
    )
    internal = SimpleNamespace(
        _cuda_getDevice=lambda: None,  # the index of the device "cpu"
        _cuda_getCurrentRawStream=lambda index: 0,
        _cuda_isCurrentStreamCapturing=lambda: False,
    )
    return _Torch({"cuda": cuda, "_C": internal})


def _unsupported_reason(problem: Any) -> str | None:
    reason = decode.unsupported_reason(problem) if problem.phase == "decode" else None
    return reason or hopper._shape_reason(problem)


@contextmanager
def emulated(seed: int = 0, **options: Any) -> Iterator[Device]:
    """Within it impl="hopper" serves CPU tensors, emulated; new memory is full of NaN.

    Args:
        seed: of the order of things.
        options: of `Device`.
    """
    device = Device(seed, **options)
    with (
        mock.patch.object(hopper, "unsupported_reason", _unsupported_reason),
        mock.patch.object(decode, "_zeros", device.zeros),
        _patched(prefill, device),
        _patched(decode, device),
        _filled_memory(),
    ):
        yield device


class cuda_is_the_cpu(TorchFunctionMode):
    """Within it torch makes and moves tensors to the CPU where a caller names the device "cuda"."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call it with another device."""
        if function is torch.Tensor.cuda:
            return args[0]
        args = tuple("cpu" if isinstance(x, str) and x == "cuda" else x for x in args)
        given = dict(kwargs or {})
        if str(given.get("device", "")).startswith("cuda"):
            given["device"] = "cpu"
        return function(*args, **given)


@contextmanager
def _patched(module: ModuleType, device: Device) -> Iterator[None]:
    replaced = {
        "torch": _torch_with_a_gpu(device.processors),
        "map_of": hopper_emulator.map_of,
        "load_kernel": device.load_kernel,
        "start": device.start,
    }
    with mock.patch.multiple(module, **replaced):
        yield


@contextmanager
def _filled_memory() -> Iterator[None]:
    """torch.empty gives NaN."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)
