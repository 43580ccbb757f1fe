"""What the tests of both benchmarks need."""

from __future__ import annotations

import math
import sys
from types import ModuleType

import pytest
import torch

from blasst import cli
from blasst.bench import variants
from blasst.core.types import AttentionOutput, SkipCounts

CPU = torch.device("cpu")
TINY = ("--heads", "4/2", "--head-dim", "16", "--dtype", "fp32", "--repeats", "1", "--device", "cpu")

KEYS = {
    *("bench", "gpu", "kernel", "dtype", "batch", "num_heads", "num_kv_heads", "head_dim"),
    *("seqlen_q", "seqlen_k", "causal", "threshold", "sparsity", "ms", "tflops", "ratio_to_cudnn"),
    *("ratio_to_own_dense", "commit", "environment"),
    *("schema", "inputs", "ms_low", "ms_high", "repeats", "max_error", "command"),
}


def run_inside(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    """The command line in this process; its output goes to capfd."""
    monkeypatch.setattr(sys, "argv", ["blasst", *arguments])
    return cli.run()


def forbid_timing(monkeypatch: pytest.MonkeyPatch, module: ModuleType = variants) -> None:
    """Whoever times from here on fails."""

    def no_timing(*_: object, **__: object) -> None:
        raise AssertionError("a wrong kernel was timed")

    monkeypatch.setattr(module, "interleaved", no_timing)


def with_nan(result: AttentionOutput) -> AttentionOutput:
    """One output is no number."""
    out = result.out.clone()
    out[0, 0, 0, 0] = math.nan
    return result._replace(out=out)


def counting_wrong(result: AttentionOutput) -> AttentionOutput:
    """One more tile is counted as skipped."""
    if result.counts is None:
        return result
    return result._replace(counts=SkipCounts(result.counts.skipped + 1, result.counts.visited))
