"""The Triton kernels compile for every architecture without spills and within its shared memory; no GPU."""

import os
import re
import subprocess
from dataclasses import dataclass

import pytest
import torch

if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("interpreted kernels have no compiler", allow_module_level=True)
pytest.importorskip("triton")

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from blasst.core.problem import AttentionProblem
from blasst.core.types import DECODE_TILE, PREFILL_TILE
from blasst.kernels.triton import decode, launch, prefill

#: Bytes of shared memory that a program may use, by compute capability.
SHARED_MEMORY = {80: 163 * 1024, 89: 99 * 1024, 90: 227 * 1024, 100: 227 * 1024, 120: 99 * 1024}
TYPES = {
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.float32: "fp32",
    torch.int32: "i32",
    torch.int8: "i8",
    torch.float8_e4m3fn: "fp8e4nv",
}
TYPES[torch.int64] = "i64"


@dataclass(frozen=True)
class Compiled:
    """What the compiler made of one launch: registers, local memory and shared memory in bytes."""

    mode: int
    registers: int
    local: int
    shared: int


def source_of(one: launch.Launch) -> ASTSource:
    """The specialisation that a call would compile, from the arguments of its launch."""
    signature, constants, attributes = {}, {}, {}
    for place, (name, value) in enumerate(launch.named(one).items()):
        free = name not in launch.LENGTHS
        if name in one.constants or value is None or (free and isinstance(value, int) and value == 1):
            signature[name], constants[name] = "constexpr", value
        elif isinstance(value, torch.Tensor):
            signature[name] = "*" + TYPES[value.dtype]
            attributes[(place,)] = [["tt.divisibility", 16]]
        else:
            signature[name] = "fp32" if isinstance(value, float) else "i32"
            if free and isinstance(value, int) and value % 16 == 0:
                attributes[(place,)] = [["tt.divisibility", 16]]
    return ASTSource(one.kernel, signature, constants, attributes)


def compile_launch(one: launch.Launch, arch: int, folder) -> Compiled:
    binary = triton.compile(source_of(one), target=GPUTarget("cuda", arch, 32), options=dict(one.options))
    cubin = folder / "kernel.cubin"
    cubin.write_bytes(binary.asm["cubin"])
    listing = subprocess.run(
        [triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", str(cubin)],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    usage = {key: int(value) for key, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", listing)}
    local = usage["STACK"] + usage["LOCAL"]
    return Compiled(one.constants.get("MODE", 0), usage["REG"], local, binary.metadata.shared)


def problem(
    phase, dims, threshold=0.1, *, heads=(8, 2), rows=None, page_size=None, cache=torch.bfloat16, **options
) -> AttentionProblem:
    """A small problem whose launches are compiled, not run."""
    rows = rows or (128 if phase == "prefill" else 1)
    q = torch.empty(2, rows, heads[0], dims[0], dtype=torch.bfloat16)
    k = torch.empty(2, page_size or 4096, heads[1], dims[0], dtype=cache)
    v = k[..., : dims[1]] if dims == (576, 512) else torch.empty(*k.shape[:-1], dims[1], dtype=cache)
    fields = dict.fromkeys(
        ("sinks", "max_skipped_mass", "cu_seqlens_q", "cu_seqlens_k", "seqused_k", "leftpad_k")
    )
    fields |= {"block_table": torch.zeros(2, 4, dtype=torch.int32) if page_size else None}
    fields |= {
        "softmax_scale": 0.1,
        "causal": True,
        "window_size": (-1, -1),
        "softcap": 0.0,
        "want_counts": True,
    }
    fields |= {"max_seqlen_q": rows, "max_seqlen_k": 4096, "phase": phase}
    threshold = None if threshold is None else torch.full((2,), threshold)
    return AttentionProblem(q, k, v, threshold=threshold, **(fields | options))


def launches_of(call: AttentionProblem, arch: int) -> list[launch.Launch]:
    kernels, tile = (prefill, PREFILL_TILE) if call.phase == "prefill" else (decode, DECODE_TILE)
    return kernels.plan(call, launch.allocate(call, tile), (arch // 10, arch % 10))


@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (192, 128), (256, 256)])
@pytest.mark.parametrize(("arch", "threshold"), [(80, 0.1), (90, None), (90, 0.1), (100, 0.1)])
def test_default_prefill_has_no_spills_and_fits(arch, threshold, dims, tmp_path):
    (one,) = launches_of(problem("prefill", dims, threshold), arch)
    made = compile_launch(one, arch, tmp_path)
    # sm_100 at 256: ten scalars are put aside before the loops
    assert made.local <= (40 if (arch, dims) == (100, (256, 256)) else 0), made
    assert made.shared <= SHARED_MEMORY[arch], made


@pytest.mark.parametrize(
    ("dims", "heads", "rows"),
    [
        ((64, 64), (9, 3), 1),
        ((128, 128), (32, 8), 1),
        ((128, 128), (8, 1), 8),
        ((256, 256), (8, 4), 1),
        ((576, 512), (128, 1), 1),
    ],
)
@pytest.mark.parametrize("arch", [80, 90, 100])
def test_default_decode_has_no_spills_and_fits(arch, dims, heads, rows, tmp_path):
    for one in launches_of(problem("decode", dims, heads=heads, rows=rows), arch):
        made = compile_launch(one, arch, tmp_path)
        assert made.local == 0, (one.kernel.__name__, made)
        assert made.shared <= SHARED_MEMORY[arch], made


@pytest.mark.parametrize(
    ("arch", "phase", "dims", "options"),
    [
        (89, "prefill", (256, 256), {}),
        (120, "prefill", (128, 128), {"page_size": 16}),
        (89, "decode", (576, 512), {"heads": (16, 1)}),
        (90, "prefill", (128, 128), {"page_size": 16, "max_skipped_mass": 0.1, "window_size": (512, 0)}),
        (100, "prefill", (64, 64), {"max_skipped_mass": 0.1, "softcap": 50.0, "sinks": torch.zeros(8)}),
        (100, "decode", (128, 128), {"max_skipped_mass": 0.1, "heads": (32, 1), "rows": 4, "page_size": 64}),
        (
            90,
            "decode",
            (96, 96),
            {"softcap": 50.0, "sinks": torch.zeros(8), "window_size": (512, 0), "rows": 4},
        ),
    ],
)
def test_other_configurations_compile_and_fit(arch, phase, dims, options, tmp_path):
    for one in launches_of(problem(phase, dims, **options), arch):
        assert compile_launch(one, arch, tmp_path).shared <= SHARED_MEMORY[arch]


@pytest.mark.parametrize(
    ("arch", "phase", "dims", "options"),
    [
        (89, "decode", (128, 128), {"heads": (32, 8)}),
        (90, "decode", (128, 128), {"heads": (32, 8), "page_size": 64}),
        (90, "decode", (128, 128), {"heads": (8, 1), "rows": 8, "softcap": 30.0}),
        (90, "decode", (576, 512), {"heads": (16, 1)}),
        (100, "decode", (64, 64), {}),
        (90, "prefill", (128, 128), {"page_size": 16}),
        (100, "prefill", (256, 256), {}),
    ],
)
def test_an_fp8_cache_compiles_and_fits(arch, phase, dims, options, tmp_path):
    scale = torch.ones(1).expand(2, options.get("heads", (8, 2))[1])
    call = problem(phase, dims, cache=torch.float8_e4m3fn, k_descale=scale, v_descale=scale, **options)
    for one in launches_of(call, arch):
        made = compile_launch(one, arch, tmp_path)
        assert made.shared <= SHARED_MEMORY[arch], made
        assert made.local == 0 or phase == "prefill", made


def test_lengths_thresholds_and_strides_share_a_compilation():
    keys = set()
    for batch, seqlen_k, heads, threshold in (
        (2, 4096, (8, 2), 0.1),
        (1, 700, (6, 3), 1.0),
        (3, 17, (32, 8), 0.0),
    ):
        call = problem("decode", (64, 64), threshold, heads=heads)
        q, k = call.q[:1].expand(batch, -1, -1, -1), call.k[:1, :seqlen_k].expand(batch, -1, -1, -1)
        fields = {
            "q": q,
            "k": k,
            "v": k,
            "max_seqlen_k": seqlen_k,
            "threshold": torch.full((batch,), threshold),
        }
        for one in launches_of(AttentionProblem(**(vars(call) | fields)), 90):
            key = source_of(one)
            keys.add((one.kernel.__name__, str(key.signature), str(key.constants), str(key.attrs)))
    assert len(keys) == 2, keys  # decode and combine, once each
