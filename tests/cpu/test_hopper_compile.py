"""The Hopper kernel compiles without spills or serialised wgmma, and its host side fits it; no GPU."""

import ctypes
import math
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch

from blasst.core.problem import AttentionProblem
from blasst.kernels import hopper
from blasst.kernels.hopper import compile as compiler
from blasst.kernels.hopper import decode, prefill
from blasst.kernels.hopper.resources import read_log

REMEDY = "pip install 'cuda-core>=1.2' 'cuda-bindings>=13' 'nvidia-cuda-nvrtc>=13'"
SHARED_MEMORY = 227 * 1024
REGISTERS = 168  # 65536 over 384 threads
BUILDS = list(prefill.builds())
DECODE_BUILDS = list(decode.builds())
PLAIN = prefill.build(128, torch.bfloat16, SKIP=1, MASS=0, BUDGET=0, SOFTCAP=0)


def name_of(build):
    rule = "-".join(name.lower() for name in ("SKIP", "MASS", "BUDGET", "SOFTCAP", "PAGED") if build[name])
    return f"{'bf16' if build['BF16'] else 'fp16'}-{build['HEAD_DIM']}-{rule or 'dense'}"


def name_of_decode(build):
    rule = "-".join(name.lower() for name in ("FP8", "SKIP", "MASS") if build[name])
    dtype = "bf16" if build["BF16"] else "fp16"
    return f"{build['ROWS']}-rows-{dtype}-{build['HEAD_DIM']}-{rule or 'dense'}"


@pytest.fixture(scope="module", autouse=True)
def _a_compiler():
    reason = hopper.compiler_reason()
    assert reason is None, f"{reason}; these tests need it: {REMEDY}"


@pytest.mark.parametrize("build", BUILDS, ids=name_of)
def test_build_has_no_spills_and_fits(build):
    cubin, log = compiler.compile_source(prefill.FILE, build, verbose=True)
    assert cubin.startswith(b"\x7fELF")
    made = read_log(log)
    assert made.clean, made
    assert made.registers <= REGISTERS, made
    assert made.shared + prefill.shared_bytes(build) <= SHARED_MEMORY, made


@pytest.mark.parametrize("build", DECODE_BUILDS, ids=name_of_decode)
def test_decode_build_has_no_spills_and_fits(build):
    made = read_log(compiler.compile_source(decode.FILE, build, verbose=True)[1])
    assert made.clean, made
    # As cuda_occupancy.h counts: a warp takes whole 256 registers, and lives in one of four parts of 16384.
    of_warp = -(-made.registers * 32 // 256) * 256
    assert 16384 // of_warp * 4 // (decode.threads(build) // 32) >= build["CTAS"], made
    assert made.shared == 0
    alone = build["SLOTS"] == decode.SLOTS_ALONE
    for count in (1, 132) if alone else (1, 132, 132 * build["CTAS"], 10**6):
        depth, together = decode.stages(build, count), min(build["CTAS"], -(-count // 132))
        assert depth >= 2 and build["SLOTS"] >= 2  # a slot is filled again one vote after it was drained
        assert (decode.shared_bytes(build, depth) + 1024) * together <= 228 * 1024


@pytest.mark.parametrize(("kernel", "count"), [(prefill, 96), (decode, 198)])
def test_every_build_is_listed_once(kernel, count):
    builds = list(kernel.builds())
    assert len({tuple(build.items()) for build in builds}) == len(builds) == count


@pytest.mark.parametrize(
    ("old", "new", "what"),
    [
        ("wgmma_wait<1>();", "", "serialized"),
        ("kConsumerRegisters = 240", "kConsumerRegisters = 160", "spill"),
        ("__launch_bounds__(384, 1)", "", "setmaxnreg"),
    ],
)
def test_gate_sees_what_it_is_for(old, new, what, monkeypatch):
    texts = compiler.sources()
    assert old in texts[prefill.FILE]
    worse = texts | {prefill.FILE: texts[prefill.FILE].replace(old, new)}
    monkeypatch.setattr(compiler, "sources", lambda: worse)
    made = read_log(compiler.compile_source(prefill.FILE, PLAIN, verbose=True)[1])
    assert not made.clean
    if what == "spill":
        assert made.stack > 0 and made.spill_stores > 0 and made.spill_loads > 0
    else:
        assert what in " ".join(made.remarks)


def test_log_of_nothing_is_no_proof():
    with pytest.raises(ValueError, match="ptxas -v of one kernel"):
        read_log("")


def test_source_that_does_not_compile_says_so(monkeypatch):
    monkeypatch.setattr(compiler, "sources", lambda: {prefill.FILE: "no such thing;"})
    with pytest.raises(RuntimeError, match="does not compile"):
        compiler.compile_source(prefill.FILE, PLAIN)


# --- the kernel's arguments -----------------------------------------------------------------------------

C_TYPES = {ctypes.c_int64: "i64", ctypes.c_int32: "int", ctypes.c_float: "float"}


def layout_checks(structure, state=prefill._STATE_BYTES):
    """CUDA C++ that compiles only if struct Params has the fields, offsets and types of a structure."""
    fields = [name for name, _ in structure._fields_ if name != "padding"]
    names = ", ".join(f"_{name}" for name in fields)
    lines = [
        "template <class A, class B> constexpr bool same = false;",
        "template <class A> constexpr bool same<A, A> = true;",
        f"__device__ void all_fields(Params& p) {{ auto& [{names}] = p; }}",
        f"static_assert(alignof(Params) == 64 && sizeof(Params) <= {ctypes.sizeof(structure)});",
        f"static_assert(sizeof(Shared) <= {state});",
    ]
    # NVRTC 13.0 has no offsetof. Order, sizes and alignments of the fields, each checked, give the offsets.
    lines.append("constexpr Params object{};")
    offset, before = 0, None
    for name, kind in structure._fields_:
        if name == "padding":
            continue
        alignment = (
            64 if issubclass(kind, ctypes.Array) else ctypes.alignment(kind)
        )  # TensorMap is alignas(64)
        offset = -(-offset // alignment) * alignment
        assert getattr(structure, name).offset == offset, name
        offset += ctypes.sizeof(kind)
        lines.append(f"static_assert(alignof(decltype(Params::{name})) == {alignment});")
        lines.append(f"static_assert(sizeof(Params::{name}) == {ctypes.sizeof(kind)});")
        if before is not None:
            first, second = (f"static_cast<const void*>(&object.{field})" for field in (before, name))
            lines.append(f"static_assert({first} < {second});")
        before = name
        if kind in C_TYPES:
            lines.append(f"static_assert(same<decltype(Params::{name}), {C_TYPES[kind]}>);")
    return "\n".join(lines)


def compile_with(text, monkeypatch):
    texts = compiler.sources()
    together = texts | {prefill.FILE: texts[prefill.FILE] + text}
    with monkeypatch.context() as patch:
        patch.setattr(compiler, "sources", lambda: together)
        compiler.compile_source(prefill.FILE, PLAIN)


def test_arguments_lie_where_the_kernel_reads_them(monkeypatch):
    compile_with(layout_checks(prefill._Params), monkeypatch)


@pytest.mark.parametrize("build", DECODE_BUILDS[:: len(decode.ROWS) * 3 - 1], ids=name_of_decode)
def test_decode_arguments_are_those_of_its_kernel(build, monkeypatch):
    texts = compiler.sources()
    checks = layout_checks(decode._Params, decode.state_bytes(build))
    together = texts | {decode.FILE: texts[decode.FILE] + checks}
    monkeypatch.setattr(compiler, "sources", lambda: together)
    compiler.compile_source(decode.FILE, build)


@pytest.mark.parametrize("wrong", ["order", "missing", "type"])
def test_arguments_that_differ_are_seen(wrong, monkeypatch):
    fields = list(prefill._Params._fields_)
    at = [name for name, _ in fields].index("window_left")
    if wrong == "order":
        fields[at], fields[at + 1] = fields[at + 1], fields[at]
    elif wrong == "missing":
        del fields[-2]
    else:
        fields[at] = ("window_left", ctypes.c_float)
    structure = type("Wrong", (ctypes.Structure,), {"_fields_": fields})
    with pytest.raises(RuntimeError, match=r"static assertion|structured binding|names"):
        compile_with(layout_checks(structure), monkeypatch)


# --- reasons --------------------------------------------------------------------------------------------


class OnGpu:
    """A CPU tensor that says it is on a GPU."""

    device = torch.device("cuda", 0)

    def __init__(self, tensor):
        self.tensor = tensor

    def __getattr__(self, name):
        return getattr(self.tensor, name)


def problem(**changes):
    def gpu(*shape, dtype=torch.bfloat16):
        return OnGpu(torch.empty(*shape, dtype=dtype))

    fields = dict.fromkeys(
        ("threshold", "sinks", "max_skipped_mass", "cu_seqlens_q", "cu_seqlens_k", "seqused_k", "leftpad_k")
    )
    fields |= {"block_table": None, "phase": "prefill", "softmax_scale": 0.1, "causal": True, "softcap": 0.0}
    fields |= {"window_size": (-1, -1), "max_seqlen_q": 128, "max_seqlen_k": 256}
    fields |= {"q": gpu(2, 128, 4, 128), "k": gpu(2, 256, 2, 128), "v": gpu(2, 256, 2, 128)}
    return AttentionProblem(**(fields | changes))


def sized(dim, dim_v=None, dtype=torch.bfloat16):
    shapes = {"q": (2, 128, 4, dim), "k": (2, 256, 2, dim), "v": (2, 256, 2, dim_v or dim)}
    return {name: OnGpu(torch.empty(*shape, dtype=dtype)) for name, shape in shapes.items()}


def paged(page_size, **more):
    pages = OnGpu(torch.empty(9, page_size, 2, 128, dtype=torch.bfloat16))
    return {"k": pages, "v": pages, "block_table": torch.zeros(2, 4, dtype=torch.int32)} | more


@pytest.fixture
def hopper_gpu(monkeypatch):
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "Some GPU")
    monkeypatch.setattr(hopper, "driver_reason", lambda: None)


@pytest.mark.usefixtures("hopper_gpu")
@pytest.mark.parametrize(
    "changes",
    [{}, sized(64), sized(96, dtype=torch.float16), paged(16), paged(64), paged(128), paged(256)],
    ids=["128", "64", "96", "page 16", "page 64", "page 128", "page 256"],
)
def test_served_calls_have_no_reason(changes):
    assert hopper.unsupported_reason(problem(**changes)) is None


@pytest.mark.usefixtures("hopper_gpu")
@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"phase": "decode"}, "rows for each KV head"),
        (sized(128, dtype=torch.float32), "dtype torch.float32, supported are float16 and bfloat16"),
        (
            {name: sized(128, dtype=torch.float8_e4m3fn)[name] for name in "kv"},
            "the cache has dtype torch.float8_e4m3fn, which prefill does not take",
        ),
        (sized(80), "head dims are (80, 80), supported are equal ones of 64, 96, 128"),
        (sized(128, 64), "head dims are (128, 64)"),
        ({"softmax_scale": -0.1}, "softmax_scale is -0.1"),
        ({"softmax_scale": 0.0}, "softmax_scale is 0.0"),
        (paged(48), "page_size is 48"),
        (paged(8), "page_size is 8"),
        (paged(64, leftpad_k=torch.zeros(2, dtype=torch.int32)), "leftpad_k with a block_table"),
        ({"q": OnGpu(torch.empty(2, 0, 4, 128, dtype=torch.bfloat16))}, "q is empty"),
        ({"v": OnGpu(torch.empty(2, 256, 2, 132, dtype=torch.bfloat16)[..., 4:])}, "v with strides"),
        (
            {"k": OnGpu(torch.empty(1, 256, 2, 128, dtype=torch.bfloat16).expand(2, -1, -1, -1))},
            "k with strides",
        ),
        (
            {
                "q": OnGpu(torch.empty(128, 4, 128, dtype=torch.bfloat16)),
                "cu_seqlens_q": torch.zeros(1, dtype=torch.int32),
            },
            "there is no sequence",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_reasons_name_what_is_wrong(changes, reason):
    assert reason in hopper.unsupported_reason(problem(**changes))


@pytest.mark.parametrize("capability", [(7, 5), (8, 0), (8, 9), (10, 0), (12, 0)])
@pytest.mark.usefixtures("hopper_gpu")
def test_other_gpus_are_refused_before_anything_is_compiled(capability, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    monkeypatch.setattr(compiler, "compile_source", lambda *a, **k: pytest.fail("compiled"))
    assert hopper.unsupported_reason(problem()) == ("Some GPU is not a Hopper GPU (compute capability 9.0)")


def test_a_cpu_tensor_and_another_vendor_are_refused(monkeypatch):
    cpu = {name: torch.empty(2, 128, 2, 128, dtype=torch.bfloat16) for name in ("q", "k", "v")}
    assert "q is on cpu, these kernels need an NVIDIA GPU" in hopper.unsupported_reason(problem(**cpu))
    monkeypatch.setattr(torch.version, "hip", "6.0")
    assert "need an NVIDIA GPU" in hopper.unsupported_reason(problem())


def test_importing_the_package_imports_no_compiler():
    code = "import sys, blasst.kernels.hopper, blasst.functional; print('cuda.core' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=os.environ)
    assert done.stdout.strip() == "False", done.stderr


@pytest.mark.parametrize(("module", "said"), [("cuda.core", "cuda-core"), ("cuda.bindings", "NVRTC")])
def test_a_missing_compiler_is_a_reason_that_names_the_extra(module, said, monkeypatch):
    monkeypatch.setitem(sys.modules, module, None)
    hopper._compiler_reason.cache_clear()
    try:
        reason = hopper.compiler_reason()
    finally:
        monkeypatch.undo()
        hopper._compiler_reason.cache_clear()
    assert said in reason and "pip install 'blasst[cuda]'" in reason


def test_threads_do_not_look_for_the_compiler_at_the_same_time(monkeypatch):
    inside, together = [0], []
    find = hopper.import_module

    def slow_import(name):
        inside[0] += 1
        together.append(inside[0])
        time.sleep(0.01)
        inside[0] -= 1
        return find(name)

    monkeypatch.setattr(hopper, "import_module", slow_import)
    hopper._compiler_reason.cache_clear()
    try:
        with ThreadPoolExecutor(4) as pool:
            reasons = {pool.submit(hopper.compiler_reason) for _ in range(4)}
            assert len({reason.result() for reason in reasons}) == 1
    finally:
        hopper._compiler_reason.cache_clear()
    assert together and max(together) == 1


# --- compiled kernels on disk ---------------------------------------------------------------------------


@pytest.fixture
def compiled(monkeypatch):
    """What compile_source was asked for, in place of compiling."""
    asked = []

    def compile_source(file, macros, **_):
        asked.append(dict(macros))
        return b"\x7fELF of " + repr(sorted(macros.items())).encode(), ""

    monkeypatch.setattr(compiler, "compile_source", compile_source)
    return asked


def test_a_kernel_is_compiled_once_and_read_again(compiled, tmp_path, monkeypatch):
    monkeypatch.setenv("BLASST_CACHE_DIR", str(tmp_path / "new" / "folder"))
    first = compiler.cached_cubin(prefill.FILE, PLAIN)
    assert compiler.cached_cubin(prefill.FILE, PLAIN) == first
    assert len(compiled) == 1
    (file,) = (tmp_path / "new" / "folder").iterdir()  # and no part of a file
    assert file.suffix == ".cubin"
    other = compiler.cached_cubin(prefill.FILE, PLAIN | {"STAGES": 2})
    assert other != first and len(compiled) == 2
    texts = compiler.sources()
    monkeypatch.setattr(compiler, "sources", lambda: texts | {"ptx.cuh": "// changed"})
    compiler.cached_cubin(prefill.FILE, PLAIN)
    assert len(compiled) == 3, "a changed header is another kernel"
    monkeypatch.setattr(compiler, "compiler_version", lambda: "99.0")
    compiler.cached_cubin(prefill.FILE, PLAIN)
    assert len(compiled) == 4, "another compiler too"


@pytest.mark.parametrize("content", [b"", b"\x7fELF", b"x" * 40])
def test_a_broken_file_is_compiled_again(content, compiled, tmp_path, monkeypatch):
    monkeypatch.setenv("BLASST_CACHE_DIR", str(tmp_path))
    first = compiler.cached_cubin(prefill.FILE, PLAIN)
    (file,) = tmp_path.iterdir()
    whole = file.read_bytes()
    for damaged in (content, whole[:-1]):
        file.write_bytes(damaged)
        assert compiler.cached_cubin(prefill.FILE, PLAIN) == first
        assert file.read_bytes() == whole
    assert len(compiled) == 3


def test_a_folder_that_cannot_be_written_costs_time_only(compiled, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("BLASST_CACHE_DIR", str(tmp_path / "file" / "folder"))
    first = compiler.cached_cubin(prefill.FILE, PLAIN)
    assert compiler.cached_cubin(prefill.FILE, PLAIN) == first
    assert len(compiled) == 2

    def full(*_):
        raise OSError("no space left on device")

    monkeypatch.setenv("BLASST_CACHE_DIR", str(tmp_path / "full"))
    monkeypatch.setattr(os, "replace", full)
    assert compiler.cached_cubin(prefill.FILE, PLAIN) == first
    assert list((tmp_path / "full").iterdir()) == [], "parts of files are removed"


def test_a_user_without_a_home_compiles_every_time(compiled, monkeypatch):
    def nowhere():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("BLASST_CACHE_DIR", raising=False)
    monkeypatch.setattr(compiler.Path, "home", nowhere)
    assert compiler.cached_cubin(prefill.FILE, PLAIN).startswith(b"\x7fELF")
    assert compiler.cache_folder() is None


# --- choice of the build --------------------------------------------------------------------------------


def test_every_call_asks_for_a_listed_build():
    known = {tuple(sorted(build.items())) for build in BUILDS}
    threshold = torch.zeros(2)
    calls = [
        problem(),
        problem(threshold=threshold),
        problem(threshold=threshold, want_mass_bound=True, softcap=20.0),
        problem(threshold=threshold, max_skipped_mass=0.1),
        problem(want_mass_bound=True),
        problem(**paged(16), threshold=threshold),
        *(problem(**sized(dim, dtype=dtype)) for dim in hopper.HEAD_DIMS for dtype in hopper.DTYPES),
    ]
    for call in calls:
        assert tuple(sorted(prefill.macros(call).items())) in known
    assert math.prod((3, 2, 4, 2, 2)) == len(known)
    assert prefill.macros(calls[0]) == prefill.macros(replace(calls[0], causal=False, want_counts=True))


@pytest.mark.parametrize(("served", "refused"), [(12080, True), (13000, False), (14000, False)])
def test_a_driver_older_than_the_compiler_is_a_reason(served, refused, monkeypatch):
    from cuda.bindings import driver

    monkeypatch.setattr(driver, "cuDriverGetVersion", lambda: (0, served))
    monkeypatch.setattr(compiler, "compiler_major", lambda: 13)
    hopper.driver_reason.cache_clear()
    try:
        reason = hopper.driver_reason()
    finally:
        hopper.driver_reason.cache_clear()
    assert (reason is not None) == refused
    if refused:
        assert "serves CUDA 12" in reason
        assert "for CUDA 13" in reason
