"""The Triton kernels: reasons; in processes of their own, imports without triton and the interpreter."""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from blasst.core.types import FP8
from blasst.kernels.triton import unsupported_reason

HERE = Path(__file__).parent
SOURCE = HERE.parents[1] / "src"


def run(*arguments, **environment):
    return subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        cwd=HERE.parents[1],
        env=os.environ | {"PYTHONPATH": str(SOURCE)} | environment,
    )


def test_importing_the_package_imports_nothing_of_triton():
    done = run("-c", "import sys, blasst.kernels.triton; print('triton' in sys.modules)")
    assert done.stdout.strip() == "False", done.stderr


def test_without_triton_the_reason_is_said():
    code = """
import sys
sys.modules["triton"] = None
import torch
from blasst import blasst_attn_func
from blasst.core.errors import UnsupportedError
q = torch.ones(1, 4, 1, 16)
assert bool((blasst_attn_func(q, q, q, threshold=0.1).out == 1).all())
try:
    blasst_attn_func(q, q, q, threshold=0.1, impl="triton")
except UnsupportedError as error:
    print(error)
"""
    done = run("-c", code)
    assert "triton is not installed" in done.stdout, done.stderr


def test_without_a_gpu_and_interpreter_the_reason_is_said():
    pytest.importorskip("triton")
    code = """
import torch
from blasst import blasst_attn_func
q = torch.ones(1, 4, 1, 16)
blasst_attn_func(q, q, q, threshold=0.1, impl="triton")
"""
    done = run("-c", code, TRITON_INTERPRET="0")
    assert "q is on cpu, Triton needs a GPU" in done.stderr


@pytest.mark.parametrize(
    ("capability", "q_dtype", "k_dtype", "advice"),
    [
        ((7, 5), torch.bfloat16, torch.bfloat16, "needs compute capability 8.0, use float16"),
        ((8, 6), torch.bfloat16, FP8, "needs compute capability 8.9"),
    ],
)
def test_a_dtype_that_the_gpu_lacks_is_refused_with_advice(capability, q_dtype, k_dtype, advice, monkeypatch):
    pytest.importorskip("triton")
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    gpu = torch.device("cuda", 0)
    problem = SimpleNamespace(
        q=SimpleNamespace(device=gpu, dtype=q_dtype), k=SimpleNamespace(device=gpu, dtype=k_dtype)
    )
    assert advice in str(unsupported_reason(problem))


@pytest.mark.long
@pytest.mark.parametrize(
    "files",
    [
        ("test_triton_interpreter.py", "test_rule_by_hand.py"),
        ("test_cases_masks.py",),
        ("test_cases_sharing.py", "test_cases_threshold.py", "test_fuzz_layouts.py"),
    ],
)
def test_kernels_equal_the_reference_in_the_interpreter(files):
    pytest.importorskip("triton")
    tests = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist"]
    tests += [f"tests/cpu/{file}" for file in files]
    done = run(*tests, TRITON_INTERPRET="1", OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert " passed" in done.stdout
