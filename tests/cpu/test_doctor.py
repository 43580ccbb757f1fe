"""`blasst doctor` on machines that lack something: what is wrong, and what to do about it."""

import dataclasses
import re
import shutil
import sys
import warnings
from types import SimpleNamespace

import pytest
import torch

from blasst.kernels import hopper
from blasst.kernels.hopper import compile as compiler
from blasst.report import doctor
from blasst.report.doctor import Machine, examine, gpu_finding, hopper_finding, triton_finding

H200 = Machine(
    build="CUDA 13.0",
    capability=(9, 0),
    text="NVIDIA H200, 139.8 GiB",
    driver="580.65",
    driver_cuda=(13, 0),
    architectures=("sm_75", "sm_80", "sm_90", "sm_100", "compute_120"),
)


def of(**changes):
    return dataclasses.replace(H200, **changes)


@pytest.fixture(autouse=True)
def compilers(monkeypatch):
    """A machine with everything: Triton, a C compiler, cuda-core, NVRTC 13."""
    monkeypatch.setitem(sys.modules, "triton", SimpleNamespace(__version__="3.6.0", __spec__=object()))
    monkeypatch.setattr(doctor, "_lacking_to_build", lambda: None)
    monkeypatch.setattr(hopper, "compiler_reason", lambda: None)
    monkeypatch.setattr(compiler, "compiler_version", lambda: "13.0 (cuda-bindings 13.0.1)")


def test_a_whole_machine_lacks_nothing(monkeypatch):
    monkeypatch.setattr(doctor, "look", lambda: H200)
    findings = {finding.name: finding for finding in examine("")}
    for name in ("GPU", "triton kernels", "hopper kernels"):
        assert findings[name].state == "ok", findings[name]
        assert not findings[name].remedy
    assert findings["GPU"].detail == "NVIDIA H200, sm_90, 139.8 GiB, driver 580.65"
    assert "prefill and decode" in findings["hopper kernels"].detail


TOO_OLD = "CUDA initialization: The NVIDIA driver on your system is too old (found version 12020)."
NO_GPU = {"capability": None, "driver": None, "driver_cuda": None}


@pytest.mark.parametrize(
    ("machine", "state", "detail", "remedy"),
    [
        (of(**NO_GPU, build=None), "missing", "is a CPU build; eager serves", "nothing on a machine without"),
        (
            of(capability=None, build=None),
            "missing",
            "CPU build, though .* driver 580.65",
            "build of torch for CUDA",
        ),
        (
            of(**NO_GPU),
            "missing",
            "torch for CUDA 13.0 sees none; eager",
            "nothing on .*on one, install its driver",
        ),
        (of(capability=None), "missing", "sees none, though nvidia-smi", "--gpus all"),
        (
            of(capability=None, driver="535.1", complaint=TOO_OLD),
            "missing",
            "driver 535.1; torch says: .*too old",
            "update the NVIDIA driver to one for CUDA 13.0, or install a torch for an older CUDA",
        ),
        (
            of(capability=None, hidden=""),
            "missing",
            "CUDA_VISIBLE_DEVICES='' hides every GPU",
            "unset CUDA_VIS",
        ),
        (of(capability=(7, 5)), "limited", "no bf16 in hardware", "float16"),
        (of(capability=(6, 1)), "limited", "has code for sm_75 .* only", "get_arch_list"),
        (of(capability=(12, 1)), "ok", "sm_121", "^$"),  # compiled on the machine from compute_120
        (of(capability=(10, 3), architectures=("sm_100",)), "ok", "sm_103", "^$"),
        (
            of(capability=(10, 0), architectures=("sm_90a",)),
            "limited",
            "has code for sm_90a only",
            "build of torch",
        ),
        (
            of(build="ROCm 6.4", capability=(9, 4), driver=None, architectures=("gfx942",)),
            "ok",
            "ROCm 6.4",
            "^$",
        ),
    ],
)
def test_gpu(machine, state, detail, remedy):
    check(gpu_finding(machine), state, detail, remedy)


def check(finding, state, detail, remedy):
    assert finding.state == state, finding
    assert bool(finding.remedy) == (state != "ok"), finding
    assert re.search(detail, finding.detail), finding
    assert re.search(remedy, finding.remedy), finding


def test_triton_missing_broken_or_too_old(monkeypatch):
    for version, detail, remedy in (
        ("3.5.1", "triton 3.5.1 is too old, 3.6 is needed", r'--upgrade "triton>=3\.6"'),
        ("unknown", "installed but broken", "reinstall"),
    ):
        monkeypatch.setitem(sys.modules, "triton", SimpleNamespace(__version__=version, __spec__=object()))
        check(triton_finding(H200), "missing", detail, remedy)
    monkeypatch.setitem(sys.modules, "triton", SimpleNamespace(__spec__=object()))
    check(triton_finding(H200), "missing", "installed but broken: .*__version__", "reinstall")
    monkeypatch.setattr(doctor.importlib.util, "find_spec", lambda name: None)
    check(triton_finding(H200), "missing", "triton is not installed", r'pip install "blasst\[cuda\]"')


def test_triton_needs_a_gpu_that_it_supports():
    check(triton_finding(of(**NO_GPU)), "limited", "no GPU: only its interpreter", "see GPU")
    check(
        triton_finding(of(capability=(7, 0))), "missing", "needs sm_75 or newer; eager serves", "older than"
    )
    check(triton_finding(of(capability=(8, 6))), "ok", "prefill and decode", "^$")


def test_triton_needs_a_c_compiler(monkeypatch, tmp_path):
    monkeypatch.undo()
    monkeypatch.setitem(sys.modules, "triton", SimpleNamespace(__version__="3.6.0", __spec__=object()))
    for name in ("CC", "CPATH", "C_INCLUDE_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(shutil, "which", lambda name: None)
    check(triton_finding(H200), "missing", "no gcc or clang", "install gcc and Python's headers .*CC")
    monkeypatch.setattr(shutil, "which", lambda name: f"/bin/{name}")
    monkeypatch.setattr(doctor.sysconfig, "get_paths", lambda scheme: {"include": str(tmp_path)})
    check(triton_finding(H200), "missing", "no Python.h", "headers")
    (tmp_path / "Python.h").write_text("")
    check(triton_finding(H200), "ok", "prefill", "^$")


@pytest.mark.parametrize(
    "reason",
    [
        "cuda-core is not installed",
        "cuda-core is older than 0.5 or broken: no Program",
        "NVRTC, which compiles the kernel, does not load: libnvrtc",
    ],
)
def test_what_compiles_the_hopper_kernels_may_be_missing(reason, monkeypatch):
    monkeypatch.setattr(hopper, "compiler_reason", lambda: f"{reason} (pip install 'blasst[cuda]')")
    finding = hopper_finding(H200)
    check(finding, "missing", "", r'pip install "blasst\[cuda\]"')
    assert finding.detail == reason  # the remedy is said once


def test_hopper_kernels_need_a_hopper_gpu_and_a_driver_of_their_cuda():
    check(hopper_finding(of(**NO_GPU)), "limited", "no GPU: they only compile", "see GPU")
    for other in (of(capability=(8, 0)), of(capability=(10, 0)), of(build="ROCm 6.4")):
        check(hopper_finding(other), "limited", "no Hopper .*Triton serves", "H100, H200 and GH200 only")
    old = of(driver="550.54", driver_cuda=(12, 4))
    check(
        hopper_finding(old),
        "missing",
        r"driver 550.54 serves CUDA up to 12\.4",
        'for CUDA 13; .*impl="triton"',
    )
    check(hopper_finding(of(driver_cuda=None)), "ok", "prefill and decode", "^$")


def test_what_torch_warns_of_is_told_and_not_printed(monkeypatch):
    def too_old():
        warnings.warn(TOO_OLD, UserWarning, stacklevel=2)
        return False

    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", too_old)
    monkeypatch.setattr(doctor, "driver_version", lambda: "535.1")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    machine = doctor.look()
    assert machine == Machine(build="CUDA 13.0", driver="535.1", complaint=TOO_OLD)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    assert doctor.look().hidden == "-1"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert doctor.look().hidden is None


def test_transformers_that_is_too_old(monkeypatch):
    monkeypatch.setattr(doctor, "_version", lambda name: "4.57.1")
    check(doctor._transformers(), "limited", "4.57.1 is too old, 5.0 is needed", r"blasst\[hf\]")


def test_everything_that_is_not_ok_says_what_to_do(monkeypatch):
    monkeypatch.undo()
    monkeypatch.setattr(doctor.importlib.util, "find_spec", lambda name: None)
    hopper._compiler_reason.cache_clear()
    try:
        findings = examine("pip install the-model")
    finally:
        hopper._compiler_reason.cache_clear()
    states = {finding.name: finding.state for finding in findings}
    assert states["triton kernels"] == states["hopper kernels"] == states["transformers"] == "missing"
    assert [finding for finding in findings if finding.state != "ok" and not finding.remedy] == []
