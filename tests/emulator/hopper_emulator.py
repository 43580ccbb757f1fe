"""Runs CUDA C++ kernels for Hopper on the CPU, byte for byte as they are, with their errors in the open.

How to run a kernel (`run_hopper.py` does it for calls of the library's own functions):

    from blasst.kernels.hopper.compile import sources  # the texts of prefill.cu, decode.cu and ptx.cuh
    kernel = hopper_emulator.build({**sources(), "my.cu": text}, "my.cu", "my_kernel", {"BF16": 0, "FP8": 0})
    kernel.launch(params, grid=(2, 1, 1), threads=384, shared=shared_bytes, seed=0, resident=4)

- `params` is the ctypes structure of the kernel's one argument, `struct Params` in the text. Pointers in it
  are addresses of CPU tensors; a TensorMap in it is what `map_of(tensor, rows)` gives.
- Seed 0: warps take turns, copies and products happen as late as they may. With any other seed warps drift
  apart, and copies and products happen at random moments. No output may depend on it.
- `EmulatorError` says what went wrong and where in the kernel's text: a deadlock with the place of every
  warp, an arrival too many on an mbarrier, lanes that meet at different calls, shared memory out of bounds,
  a wgmma that reads what was written without fence.proxy.async, copies or products under way at the end.
- What is not there yet is NaN: shared memory at the start, the target of a copy until it arrives, registers
  of a wgmma until the wait. So a missing wait shows in the output.
- A PTX instruction that is not known ends `build`: add its text to translate.py and a function to ptx.h.
- It needs g++ with binutils. Builds are kept in $BLASST_EMULATOR_DIR, default a folder among temporary
  files.

A thread is a fiber, and threads change only inside the functions of device.h and ptx.h. A product is
computed once for each warp: what one instruction adds up is exact, then rounded to float32.

Not modelled: time; registers that run out (but for sums of setmaxnreg); the order of memory (all accesses
are sequentially consistent, and of the proxies only fence.proxy.async before wgmma is looked at); caches,
clusters, multicast; the rounding of tensor cores and of ex2 and lg2, for which exact ones stand; registers
of A that change while a wgmma reads them; a missing wgmma.fence; races between plain accesses with no call
between them; global memory out of bounds.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import re
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from translate import translate

FOLDER = Path(__file__).parent
#: Lines of these say nothing about where a kernel stands.
_HEADERS = ("device.h", "ptx.h")
_MACHINE = ("scheduler", "barriers", "copies", "products")
#: Contraction stays off, as in the compiled kernels. A debugging table of lines tells where a warp stands.
_KERNEL_FLAGS = (
    "-O1",
    "-g1",
    "-ffp-contract=off",
    "-fno-optimize-sibling-calls",
    "-fno-strict-aliasing",
    "-w",
)
_MACHINE_FLAGS = ("-O3", "-fno-optimize-sibling-calls", "-Wall", "-Wextra", "-Werror")
_FLAGS = ("-std=c++17", "-march=native", "-fPIC")
_MESSAGE_BYTES = 1 << 20


class EmulatorError(RuntimeError):
    """What a kernel did that it must not do."""


def cache_folder() -> Path:
    """Where built kernels lie; all of it may be deleted."""
    return Path(os.environ.get("BLASST_EMULATOR_DIR") or Path(tempfile.gettempdir()) / "blasst-emulator")


class _Map(ctypes.Structure):
    """struct Map of machine.h, in the place of a tensor map."""

    _fields_ = (
        ("magic", ctypes.c_uint64),
        ("base", ctypes.c_uint64),
        ("size", ctypes.c_uint32 * 4),
        ("step", ctypes.c_uint64 * 3),
        ("box", ctypes.c_uint32 * 4),
        ("item", ctypes.c_uint32),
    )


def map_of(tensor: torch.Tensor, rows: int) -> Any:
    """Tensor map of (x, rows, heads, dim), or without x, in boxes of 128 bytes x rows: as launch.map_of."""
    four = tensor if tensor.dim() == 4 else tensor.unsqueeze(0)
    outer, length, heads, dim = four.shape
    item = four.element_size()
    steps = [four.stride(axis) * item for axis in (1, 2, 0)]
    made = _Map(
        magic=0x70616D5F756D65,
        base=four.data_ptr(),
        size=(dim, length, heads, outer),
        step=tuple(steps),
        box=(128 // item, rows, 1, 1),
        item=item,
    )
    words = (ctypes.c_uint64 * 16)()
    ctypes.memmove(words, ctypes.byref(made), ctypes.sizeof(made))
    return words


@dataclass(frozen=True)
class Kernel:
    """A kernel that was built.

    Attributes:
        path: of its library.
        params_bytes: of its one argument.
    """

    path: Path
    params_bytes: int

    def launch(
        self,
        params: ctypes.Structure,
        *,
        grid: tuple[int, int, int],
        threads: int,
        shared: int,
        seed: int = 0,
        resident: int = 4,
    ) -> None:
        """Run a grid to its end.

        Args:
            params: the kernel's argument.
            grid: CTAs.
            threads: of a CTA.
            shared: bytes of dynamic shared memory, which begin as NaN.
            seed: of the order in which things happen; 0 is the plain one.
            resident: CTAs that run at the same time.

        Raises:
            EmulatorError: the kernel did what it must not do.
        """
        if ctypes.sizeof(params) < self.params_bytes:  # the host rounds up
            raise ValueError(
                f"params has {ctypes.sizeof(params)} bytes, the kernel wants {self.params_bytes}"
            )
        library = _load(self.path)
        # Params is aligned to 64 bytes.
        memory = ctypes.create_string_buffer(self.params_bytes + 64)
        address = -(-ctypes.addressof(memory) // 64) * 64
        ctypes.memmove(address, ctypes.byref(params), self.params_bytes)
        message = ctypes.create_string_buffer(_MESSAGE_BYTES)
        failed = library.emulated_launch(
            library.emulated_entry,
            ctypes.c_void_p(address),
            (ctypes.c_uint32 * 3)(*grid),
            ctypes.c_uint32(threads),
            ctypes.c_uint32(shared),
            ctypes.c_uint64(seed),
            ctypes.c_uint32(resident),
            message,
            ctypes.c_uint32(_MESSAGE_BYTES),
        )
        if failed:
            raise EmulatorError(_with_lines(message.value.decode(), self.path))


def build(sources: Mapping[str, str], file: str, name: str, macros: Mapping[str, int]) -> Kernel:
    """Build a kernel, or find it built.

    Args:
        sources: texts of files by their names.
        file: the one to compile.
        name: of the kernel in it.
        macros: what it needs defined.

    Raises:
        translate.UnknownInstruction: it holds an instruction that is not emulated.
        EmulatorError: g++ does not take it.
    """
    own = {
        part.name: part.read_text(encoding="utf-8") for part in sorted(FOLDER.glob("*.*")) if part.is_file()
    }
    key = (
        sorted(sources.items()),
        file,
        name,
        sorted(macros.items()),
        sorted(own.items()),
        _KERNEL_FLAGS,
        _machine(),
    )
    folder = cache_folder() / hashlib.sha256(repr(key).encode()).hexdigest()[:24]
    library, size = folder / "kernel.so", folder / "params"
    if not size.exists():
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            _compile(Path(scratch), sources, file, name, macros)
            os.replace(Path(scratch) / "kernel.so", library)
            os.replace(Path(scratch) / "params", size)  # last: then all is there
    return Kernel(library, int(size.read_text()))


def _compile(
    scratch: Path, sources: Mapping[str, str], file: str, name: str, macros: Mapping[str, int]
) -> None:
    for part, text in sources.items():
        (scratch / part).write_text(text, encoding="utf-8")
    defined = [f"-D{key}={value}" for key, value in macros.items()]
    plain = _run("g++", "-E", "-x", "c++", "-std=c++17", *defined, file, cwd=scratch)
    entry = (
        '\nextern "C" void emulated_entry(const void* params)'
        f" {{ {name}(*static_cast<const Params*>(params)); }}\n"
        'extern "C" const unsigned emulated_params_bytes = sizeof(Params);\n'
    )
    (scratch / "kernel.cpp").write_text(
        f'#include "{FOLDER}/ptx.h"\n' + translate(plain) + entry, encoding="utf-8"
    )
    _run("g++", *_FLAGS, *_KERNEL_FLAGS, "-c", "kernel.cpp", "-o", "kernel.o", cwd=scratch)
    _run("g++", "-shared", "kernel.o", *map(str, _machine_objects()), "-o", "kernel.so", cwd=scratch)
    library = ctypes.CDLL(str(scratch / "kernel.so"))
    (scratch / "params").write_text(str(ctypes.c_uint32.in_dll(library, "emulated_params_bytes").value))


def _run(*command: str, cwd: Path) -> str:
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise EmulatorError(f"{' '.join(command)} failed:\n{done.stderr[:8000]}")
    return done.stdout


def _own_texts() -> list[tuple[str, str]]:
    files = sorted([*FOLDER.glob("*.h"), *FOLDER.glob("*.cpp")])
    return [(path.name, path.read_text(encoding="utf-8")) for path in files]


@cache
def _machine() -> str:
    """What g++ compiles for on this machine."""
    return _run("g++", "-march=native", "-dM", "-E", "-x", "c++", os.devnull, cwd=FOLDER)


@cache
def _machine_objects() -> tuple[Path, ...]:
    """The machine itself, built once."""
    key = hashlib.sha256(repr((_own_texts(), _MACHINE_FLAGS, _machine())).encode()).hexdigest()[:24]
    folder = cache_folder() / f"machine-{key}"
    objects = tuple(folder / f"{part}.o" for part in _MACHINE)
    folder.mkdir(parents=True, exist_ok=True)
    for made in objects:
        if made.exists():
            continue
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            _run(
                "g++",
                *_FLAGS,
                *_MACHINE_FLAGS,
                "-c",
                str(FOLDER / f"{made.stem}.cpp"),
                "-o",
                "part.o",
                cwd=Path(scratch),
            )
            os.replace(Path(scratch) / "part.o", made)
    return objects


@cache
def _load(path: Path) -> Any:
    return ctypes.CDLL(str(path))


def _with_lines(message: str, library: Path) -> str:
    """The message with places in the kernel's text for addresses: `at 0x...`."""
    base = ctypes.cast(_load(library).emulated_entry, ctypes.c_void_p).value
    table = subprocess.run(["nm", str(library)], capture_output=True, text=True, check=False).stdout
    entry = re.search(r"^([0-9a-f]+) T emulated_entry$", table, re.MULTILINE)
    if base is None or entry is None:
        return message
    offset = base - int(entry.group(1), 16)

    @cache
    def place(address: str) -> list[str]:
        at = hex(int(address, 16) - offset - 1)  # inside of the call
        command = ["addr2line", "-i", "-s", "-e", str(library), at]
        lines = subprocess.run(command, capture_output=True, text=True, check=False).stdout.split("\n")
        known = [re.sub(r" \(discriminator \d+\)", "", line) for line in lines if line and "?" not in line]
        return [line for line in known if not line.startswith((*_HEADERS, "kernel.cpp"))]

    def places(found: re.Match[str]) -> str:
        lines = [line for address in re.findall(r"0x[0-9a-f]+", found.group(0)) for line in place(address)]
        return "at " + " <- ".join(lines)

    return re.sub(r"\bat 0x[0-9a-f]+(?: <- at 0x[0-9a-f]+)*", places, message)
