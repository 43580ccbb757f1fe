"""Memory: peaks of the public calls, tensors of more than 2**31 elements, calls for which none is left."""

from __future__ import annotations

import fcntl
import gc
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from peak_memory import peak_beside_output, stated_workspace

from blasst import (
    attention,
    blasst_attn_func,
    blasst_attn_varlen_func,
    blasst_attn_with_kvcache,
    merge_attention,
)
from blasst.core.cache import quantize
from blasst.core.types import FP8, AttentionOutput
from blasst.kernels import repeats
from blasst.testing import heavy_tailed_inputs, pages_from

DEVICE = "cuda"
BFLOAT, HALF = torch.bfloat16, torch.float16
MEASURES = {"return_lse": True, "return_counts": True, "return_mass_bound": True, "return_kept_tiles": True}

impls = pytest.mark.parametrize("impl", ["hopper", "triton"])


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    """Tests of some tens of GB follow each other."""
    yield
    gc.collect()
    repeats._kept_constant.cache_clear()
    if DEVICE == "cuda":
        torch.cuda.empty_cache()


def on_device(values: list[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32).to(DEVICE)


# --- peaks ----------------------------------------------------------------------------------------------


def measured_calls(impl: str) -> dict[str, tuple]:
    """Name -> (call, tensors it is given, q, k, key slots of a sequence, whether it is measured)."""
    batch, heads, dim = 3, (8, 2), 128
    prompt = heavy_tailed_inputs(batch, 700, 2048, *heads, dim, dtype=HALF, device=DEVICE, block=128)
    step = heavy_tailed_inputs(batch, 4, 5000, *heads, dim, dtype=HALF, device=DEVICE)
    packed = [x.flatten(0, 1) for x in prompt]
    ends = [on_device([0, n, 2 * n, 3 * n]) for n in (700, 2048)]
    lengths, table = on_device([5000, 1, 700]), None
    (pages_k, table), (pages_v, _) = (pages_from(x, 64, fill=0.0) for x in step[1:])
    new, shorter = [x[:, :4].clone() for x in step[1:]], on_device([4996, 1, 700])
    eighths = [quantize(x, None) for x in step[1:]]
    by_torch = [x.transpose(1, 2) for x in prompt]
    given = [prompt, step, packed, ends, lengths, table, pages_k, pages_v, new, eighths, by_torch]
    at = {"threshold": 0.05, "causal": True, "impl": impl}
    cached = {**at, "cache_seqlens": lengths}
    budget = {**MEASURES, "max_skipped_mass": 0.05}

    def entry(call, q, k, capacity, measured=False):
        return call, given, q, k, capacity, measured

    calls = {
        "attention": entry(
            lambda: attention(*by_torch, is_causal=True, enable_gqa=True, threshold=0.05, impl=impl),
            *prompt[:2], 2048,
        ),
        "func": entry(lambda: blasst_attn_func(*prompt, **at), *prompt[:2], 2048),
        "func, dense": entry(lambda: blasst_attn_func(*prompt, impl=impl), *prompt[:2], 2048),
        "func, measured": entry(
            lambda: blasst_attn_func(*prompt, **at, **budget), *prompt[:2], 2048, True
        ),
        "varlen": entry(
            lambda: blasst_attn_varlen_func(*packed, *ends, 700, 2048, **at), *packed[:2], 2048
        ),
        "chunk": entry(
            lambda: blasst_attn_with_kvcache(
                prompt.q, pages_k, pages_v, block_table=table, **cached
            ),
            prompt.q, pages_k, 5056,
        ),
        "step": entry(lambda: blasst_attn_with_kvcache(*step, **cached), *step[:2], 5000),
        "step, dense": entry(
            lambda: blasst_attn_with_kvcache(*step, **(cached | {"threshold": None})), *step[:2], 5000
        ),
        "step, measured": entry(
            lambda: blasst_attn_with_kvcache(*step, **cached, **budget), *step[:2], 5000, True
        ),
        "step, pages": entry(
            lambda: blasst_attn_with_kvcache(step.q, pages_k, pages_v, block_table=table, **cached),
            step.q, pages_k, 5056,
        ),
        "step, new keys": entry(
            lambda: blasst_attn_with_kvcache(*step, *new, **(cached | {"cache_seqlens": shorter})),
            *step[:2], 5000,
        ),
        "step, fp8": entry(
            lambda: blasst_attn_with_kvcache(step.q, *eighths, **cached), step.q, eighths[0], 5000
        ),
    }  # fmt: skip
    return calls


CALLS = (
    "attention", "func", "func, dense", "func, measured", "varlen", "chunk", "step", "step, dense",
    "step, measured", "step, pages", "step, new keys", "step, fp8",
)  # fmt: skip


@pytest.mark.parametrize("impl", ["hopper", "triton", "eager"])
@pytest.mark.parametrize("name", CALLS)
def test_a_call_takes_no_more_than_its_output_and_what_is_stated(name: str, impl: str) -> None:
    call, given, q, k, capacity, measured = measured_calls(impl)[name]
    for _ in range(2):
        call()
    peak = peak_beside_output(call, given, DEVICE)
    stated = stated_workspace(impl, q, k, (8, 2), capacity, measured=measured)
    assert peak <= stated, f"{peak} bytes, stated are {stated}"


def test_merging_takes_five_float32_copies_of_its_output() -> None:
    out = torch.randn(3, 700, 8, 128, device=DEVICE).to(HALF)
    outs, lses = [out, out + 1, out - 1], list(torch.randn(3, 3, 8, 700, device=DEVICE))
    peak = peak_beside_output(lambda: merge_attention(outs, lses), [outs, lses], DEVICE)
    rows = 3 * 700 * 8
    assert peak <= 5 * 4 * rows * 128 + 12 * 3 * 4 * rows


# --- more than 2**31 elements -----------------------------------------------------------------------------


@pytest.fixture
def most_of_the_memory() -> Iterator[None]:
    """One test of many GB at a time, also among processes."""
    with (Path(tempfile.gettempdir()) / "blasst-tests-large.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
        gc.collect()
        torch.cuda.empty_cache()


large = pytest.mark.usefixtures("most_of_the_memory")
HEADS, DIM = 8, 128


def needles(k: torch.Tensor, v: torch.Tensor, *places: tuple[int, ...]) -> None:
    """Keys of zeros but for some that score 30 with `asking`; their values are 1, 3, 5, ..."""
    for i, place in enumerate(places):
        k[(*place, slice(None), 0)] = 16.0
        v[place] = 2.0 * i + 1.0


def asking(*shape: int) -> torch.Tensor:
    q = torch.zeros(*shape, HEADS, DIM, dtype=HALF, device=DEVICE)
    q[..., 0] = 30.0 / 16.0 * DIM**0.5
    return q


def assert_means(got: AttentionOutput, mean: float) -> None:
    """Two needles of the same weight e**30: 2**22 keys of weight 1 beside them are less than 1e-6 of it.

    Weights and out are rounded to float16: 2**-11 each, doubled.
    """
    assert bool(((got.out.float() - mean).abs() <= mean * 2**-9).all())
    assert int(got.counts.skipped.sum()) > 0.9 * int(got.counts.visited.sum())


@large
@impls
@pytest.mark.parametrize("tokens", [1, 8, 100])
def test_a_sequence_of_more_than_two_billion_elements(tokens: int, impl: str) -> None:
    keys = 2_200_000
    k = torch.zeros(1, keys, HEADS, DIM, dtype=HALF, device=DEVICE)
    assert k.numel() > 2**31
    v = torch.zeros_like(k)
    needles(k, v, (0, 5), (0, keys - 10_000))
    used = on_device([keys - 3])
    options = {"threshold": 0.01, "return_counts": True, "impl": impl}
    assert_means(blasst_attn_with_kvcache(asking(1, tokens), k, v, cache_seqlens=used, **options), 2.0)


@large
@impls
@pytest.mark.parametrize("tokens", [1, 8, 100])
def test_a_batch_whose_last_cache_begins_beyond_two_billion_elements(tokens: int, impl: str) -> None:
    batch, keys = 9, 270_000
    k = torch.zeros(batch, keys, HEADS, DIM, dtype=HALF, device=DEVICE)
    assert k[:8].numel() > 2**31
    v = torch.zeros_like(k)
    for b in range(batch):
        needles(k, v, (b, 5), (b, 20_000 * (b + 1)))
    v[8] *= 3
    used = on_device([keys - b for b in range(batch)])
    options = {"threshold": 0.01, "return_counts": True, "impl": impl}
    got = blasst_attn_with_kvcache(asking(batch, tokens), k, v, cache_seqlens=used, **options)
    got.out[8] /= 3.0
    assert_means(got, 2.0)


@large
@impls
@pytest.mark.parametrize("dtype", [HALF, FP8], ids=["fp16", "fp8"])
@pytest.mark.parametrize("tokens", [1, 8, 100])
def test_pages_beyond_two_billion_elements(tokens: int, dtype: torch.dtype, impl: str) -> None:
    if dtype == FP8 and tokens > 8 and impl == "hopper":
        pytest.skip("Hopper's prefill takes no fp8 cache")
    pages, page = 36_000, 64
    k = torch.zeros(pages, page, HEADS, DIM, dtype=dtype, device=DEVICE)
    assert k.numel() > 2**31
    v = torch.zeros_like(k)
    needles(k, v, (pages - 1, 5), (pages - 3, 63))
    table = torch.arange(pages - 1, pages - 401, -1, dtype=torch.int32).to(DEVICE)[None]
    options = {"threshold": 0.01, "return_counts": True, "impl": impl, "block_table": table}
    got = blasst_attn_with_kvcache(
        asking(1, tokens), k, v, cache_seqlens=on_device([400 * page - 7]), **options
    )
    assert_means(got, 2.0)


@large
@impls
def test_packed_tensors_of_more_than_two_billion_elements(impl: str) -> None:
    length, sequences = 2000, 1100
    total = length * sequences
    q, k, v = (torch.zeros(total, HEADS, DIM, dtype=HALF, device=DEVICE) for _ in range(3))
    assert q.numel() > 2**31
    last = heavy_tailed_inputs(3, length, length, HEADS, HEADS, DIM, dtype=HALF, device=DEVICE, block=128)
    for whole, part in zip((q, k, v), last, strict=True):
        whole[-3 * length :] = part.flatten(0, 1)
    ends = torch.arange(sequences + 1, dtype=torch.int32).to(DEVICE) * length
    options = {"threshold": 0.05, "causal": True, "return_counts": True, "return_lse": True, "impl": impl}
    got = blasst_attn_varlen_func(q, k, v, ends, ends, length, length, **options)
    want = blasst_attn_func(*last, **options)
    assert torch.equal(got.out[-3 * length :].view_as(want.out), want.out)
    assert torch.equal(got.lse[:, -3 * length :].unflatten(1, (3, length)).transpose(0, 1), want.lse)
    assert torch.equal(got.counts.skipped[-3:], want.counts.skipped)
    assert int(want.counts.skipped.sum()) > 0
    assert not bool(got.out[: -3 * length].any())


@large
@impls
def test_queries_of_more_than_two_billion_elements(impl: str) -> None:
    batch, rows, keys = 300, 7500, 700
    q = torch.zeros(batch, rows, HEADS, DIM, dtype=HALF, device=DEVICE)
    assert q[:-1].numel() > 2**31
    x = heavy_tailed_inputs(1, rows, keys, HEADS, HEADS, DIM, dtype=HALF, device=DEVICE, block=128)
    q[-1] = x.q[0]
    k, v = (t.expand(batch, -1, -1, -1).contiguous() for t in x[1:])
    options = {"threshold": 0.05, "return_counts": True, "return_lse": True, "impl": impl}
    got = blasst_attn_func(q, k, v, **options)
    want = blasst_attn_func(*x, **options)
    assert torch.equal(got.out[-1], want.out[0])
    assert torch.equal(got.lse[-1], want.lse[0])
    assert int(want.counts.skipped.sum()) > 0
    assert torch.equal(got.out[0], got.out[-2])


# --- no memory left ---------------------------------------------------------------------------------------


def scarce_calls(impl: str) -> dict[str, Callable[[], AttentionOutput]]:
    """Calls that need hundreds of MB of output, or of partial results."""
    q = torch.zeros(1, 200_000, HEADS, DIM, dtype=HALF, device=DEVICE)
    x = heavy_tailed_inputs(1, 8, 16_384, 32, 4, DIM, dtype=HALF, device=DEVICE)
    pages = [t[0].unflatten(0, (256, 64)) for t in x[1:]]
    batch = 256
    table = torch.arange(256, dtype=torch.int32).to(DEVICE).expand(batch, -1).contiguous()
    steps, used = x.q.expand(batch, -1, -1, -1).contiguous(), on_device([16_384] * batch)
    keys = heavy_tailed_inputs(1, 1, 300, HEADS, 2, DIM, dtype=HALF, device=DEVICE)[1:]
    at = {"threshold": 0.05, "impl": impl, "return_counts": True}
    return {
        "prefill": lambda: blasst_attn_func(q, *keys, **at),
        "decode": lambda: blasst_attn_with_kvcache(
            steps, *pages, cache_seqlens=used, block_table=table, **at
        ),
    }


@large
@impls
@pytest.mark.parametrize("kind", ["prefill", "decode"])
def test_a_call_that_finds_no_memory_raises_and_leaves_all_as_it_was(kind: str, impl: str) -> None:
    x = heavy_tailed_inputs(2, 1, 3000, 8, 2, DIM, dtype=BFLOAT, device=DEVICE, seed=1)
    prompt = heavy_tailed_inputs(1, 300, 3000, 8, 2, DIM, dtype=BFLOAT, device=DEVICE, seed=2)

    def small() -> list[torch.Tensor]:
        step = blasst_attn_with_kvcache(*x, cache_seqlens=on_device([3000, 700]), threshold=0.05, impl=impl)
        return [step.out, blasst_attn_func(*prompt, threshold=0.05, causal=True, impl=impl).out]

    call = scarce_calls(impl)[kind]
    want, others = call(), small()
    call(), small()  # a call like an earlier one keeps its threshold, some bytes
    whole = torch.cuda.get_device_properties(0).total_memory
    failures = 0
    try:
        for extra in (0, 2**24, 2**26, 2**28, 2**29, 2**30, None):
            gc.collect()
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
            before = torch.cuda.memory_allocated()
            share = 1.0 if extra is None else (torch.cuda.memory_reserved() + extra) / whole
            torch.cuda.set_per_process_memory_fraction(min(share, 1.0))
            got = None
            try:
                got = call()
            except torch.OutOfMemoryError:
                failures += 1
            torch.cuda.set_per_process_memory_fraction(1.0)
            if got is not None:
                assert torch.equal(got.out, want.out)
                assert torch.equal(got.counts.skipped, want.counts.skipped)
                del got
            else:
                gc.collect()
                assert torch.cuda.memory_allocated() <= before, "a failed call keeps memory"
            assert all(torch.equal(a, b) for a, b in zip(small(), others, strict=True))
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert failures > 0 and extra is None


@large
@impls
def test_new_keys_of_a_call_that_finds_no_memory_can_be_written_again(impl: str) -> None:
    batch = 128
    q, k, v = heavy_tailed_inputs(1, 8, 16_384, 32, 4, DIM, dtype=HALF, device=DEVICE, seed=3)
    pages = [t[0].unflatten(0, (256, 64)) for t in (k, v)]
    table = torch.arange(256, dtype=torch.int32).to(DEVICE).expand(batch, -1).contiguous()
    steps, used = q.expand(batch, -1, -1, -1).contiguous(), on_device([16_376] * batch)
    new = [t[:, -8:].expand(batch, -1, -1, -1).contiguous() for t in (k, v)]  # what stands there already
    copies = [t.clone() for t in pages]

    def call() -> torch.Tensor:
        return blasst_attn_with_kvcache(
            steps, *pages, *new, cache_seqlens=used, block_table=table, threshold=0.05, causal=True, impl=impl
        ).out

    want = call()
    gc.collect()
    torch.cuda.empty_cache()
    whole = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + 2**25) / whole)
    try:
        with pytest.raises(torch.OutOfMemoryError):
            call()
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert all(torch.equal(a, b) for a, b in zip(pages, copies, strict=True))
    assert torch.equal(call(), want)
