"""The Triton kernels in Triton's CPU interpreter, against the reference.

Whether a kernel is interpreted is fixed when triton is imported, so these tests want a process of their own:
test_triton.py starts it; by hand: TRITON_INTERPRET=1 python -m pytest tests/cpu/test_triton_interpreter.py
"""

import dataclasses
import math
import os

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("runs in the process that test_triton.py starts", allow_module_level=True)
pytest.importorskip("triton")

from blasst import blasst_attn_func, blasst_attn_varlen_func, blasst_attn_with_kvcache
from blasst.core.cache import quantize
from blasst.core.errors import UnsupportedError
from blasst.core.problem import AttentionProblem
from blasst.core.reference import reference_attention, run_reference
from blasst.kernels.triton import decode, prefill, unsupported_reason
from blasst.testing import (
    assert_finite,
    assert_matches_reference,
    assert_same_kept_tiles,
    assert_within_budget,
    attention_calls,
    heavy_tailed_inputs,
    pages_from,
)

# numpy says what the kernels do on purpose: log2(0), inf - inf, all-NaN maxima, exp2 overflow
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

EVERYTHING = {
    "return_lse": True,
    "return_counts": True,
    "return_mass_bound": True,
    "return_kept_tiles": True,
    "impl": "triton",
}
#: Nats by which float32 and float64 scores of these inputs may differ.
NEAR = 1e-3


def attention_of(phase):
    return blasst_attn_with_kvcache if phase == "decode" else blasst_attn_func


def problem_of(inputs, phase, threshold, **options):
    """A canonical problem, for what the public functions check away or do not offer."""
    batch, seqlen_q = inputs.q.shape[:2]
    wanted = dict.fromkeys(("want_counts", "want_mass_bound", "want_kept_tiles"), True)
    absent = (
        "sinks",
        "max_skipped_mass",
        "cu_seqlens_q",
        "cu_seqlens_k",
        "seqused_k",
        "leftpad_k",
        "block_table",
    )
    if isinstance(threshold, float):
        threshold = torch.full((batch,), threshold)
    fields = dict.fromkeys(absent) | wanted
    fields |= {
        "softmax_scale": inputs.q.shape[-1] ** -0.5,
        "causal": True,
        "window_size": (-1, -1),
        "softcap": 0.0,
    }
    fields |= {"max_seqlen_q": seqlen_q, "max_seqlen_k": inputs.k.shape[1]}
    return AttentionProblem(*inputs, phase=phase, threshold=threshold, **(fields | options))


def compare(problem, near=0.0):
    """A run of the kernel against the reference; returns the run's output."""
    got = (decode if problem.phase == "decode" else prefill).run(problem)
    truth = run_reference(problem)
    yardstick = run_reference(problem, kept_tiles=truth.kept_tiles, dtype=problem.q.dtype)
    assert_matches_reference(got, truth, yardstick, problem.threshold, near)
    return got


@settings(max_examples=15)
@given(attention_calls([torch.float16, torch.float32]), st.sampled_from([0.0, 0.003, 0.1, 1.0]))
def test_random_calls_equal_the_reference(call, threshold):
    phase, inputs, options = call
    truth = reference_attention(*inputs, threshold=threshold, phase=phase, **options)
    got = attention_of(phase)(*inputs, threshold=threshold, **options, **EVERYTHING)
    if options["max_skipped_mass"] is not None and not torch.equal(got.kept_tiles, truth.kept_tiles):
        return  # a budget decision near its own cut
    yardstick = reference_attention(
        *inputs,
        threshold=threshold,
        phase=phase,
        kept_tiles=truth.kept_tiles,
        dtype=inputs.q.dtype,
        **options,
    )
    assert_matches_reference(got, truth, yardstick, threshold, NEAR)


@pytest.mark.parametrize("phase", ["prefill", "decode"])
@pytest.mark.parametrize("arch", [(8, 0), (8, 9), (9, 0), (10, 0)])
@pytest.mark.parametrize(
    ("head_dim", "dtype"), [(32, torch.float16), (144, torch.float16), (32, torch.float32)]
)
def test_the_configurations_of_gpus_compute_the_same(arch, phase, head_dim, dtype, monkeypatch):
    monkeypatch.setattr(prefill, "capability", lambda device: arch)
    monkeypatch.setattr(decode, "capability", lambda device: arch)
    inputs = heavy_tailed_inputs(
        1, 2 if phase == "decode" else 70, 450, 1, 1, head_dim, dtype=dtype, seed=1, block=128
    )
    got = compare(problem_of(inputs, phase, 0.05))
    assert int(got.counts.skipped.sum()) > 0
    budget = compare(problem_of(inputs, phase, 1.0, max_skipped_mass=0.05), NEAR)
    assert int(budget.counts.skipped.sum()) > 0


@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_skip_sets_are_those_of_the_reference_and_nested(phase):
    inputs = heavy_tailed_inputs(
        2, 2 if phase == "decode" else 70, 900, 2, 1, 40, dtype=torch.float16, seed=2, block=128
    )
    before = None
    for threshold in (0.0, 0.01, 0.05, 1.0):
        got = attention_of(phase)(*inputs, threshold=threshold, causal=True, **EVERYTHING)
        truth = reference_attention(*inputs, threshold=threshold, causal=True, phase=phase)
        assert assert_same_kept_tiles(got.kept_tiles, truth, threshold, 0.0 if threshold < 1 else NEAR) == 0
        assert threshold == 0.0 or int(got.counts.skipped.sum()) > 0
        assert before is None or not bool((got.kept_tiles & ~before).any())
        before = got.kept_tiles


@pytest.mark.parametrize("phase", ["prefill", "decode"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_threshold_zero_is_bit_identical_to_dense_and_measuring_changes_nothing(phase, dtype):
    inputs = heavy_tailed_inputs(1, 3 if phase == "decode" else 100, 600, 2, 1, 24, dtype=dtype, seed=3)
    attn = attention_of(phase)
    dense = attn(*inputs, causal=True, return_lse=True, impl="triton")
    for keywords in ({"impl": "triton", "return_lse": True}, EVERYTHING):
        got = attn(*inputs, threshold=0.0, causal=True, **keywords)
        assert torch.equal(got.out, dense.out)
        assert torch.equal(got.lse, dense.lse)
    assert int(got.counts.skipped.sum()) == 0


@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_values_of_skipped_tiles_are_not_touched(phase):
    inputs = heavy_tailed_inputs(1, 1 if phase == "decode" else 70, 1000, 2, 1, 16, seed=4, block=128)
    size = 64 if phase == "decode" else 128
    truth = reference_attention(*inputs, threshold=0.05, phase=phase)
    skipped_by_all = ~truth.kept_tiles[0].any(0).any(0)
    assert int(skipped_by_all.sum()) > 0
    clean = attention_of(phase)(*inputs, threshold=0.05, impl="triton").out
    inputs.v[:, skipped_by_all.repeat_interleave(size)[:1000]] = math.nan
    got = attention_of(phase)(*inputs, threshold=0.05, impl="triton").out
    assert_finite(got)
    assert torch.equal(got, clean)


@pytest.mark.parametrize("dims", [(72, 96), (96, 120), (112, 80), (192, 128), (256, 256), (8, 5)])
def test_head_dims_with_nan_in_the_lanes_beyond(dims):
    wide = heavy_tailed_inputs(1, 66, 140, 1, 1, 272, seed=5, dtype=torch.float16)
    for x, size in zip(wide, (dims[0], dims[0], dims[1]), strict=True):
        x[..., size:] = math.nan
    inputs = type(wide)(wide.q[..., : dims[0]], wide.k[..., : dims[0]], wide.v[..., : dims[1]])
    compare(problem_of(inputs, "prefill", 0.0), NEAR)
    compare(problem_of(inputs._replace(q=inputs.q[:, -2:]), "decode", 0.0), NEAR)


@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_mla_with_values_inside_the_keys(phase):
    inputs = heavy_tailed_inputs(
        1, 2, 400, 20 if phase == "decode" else 2, 1, 576, seed=6, dtype=torch.float16
    )
    inputs = inputs._replace(v=inputs.k[..., :512])
    got = compare(problem_of(inputs, phase, 0.05))
    apart = compare(problem_of(inputs._replace(v=inputs.v.contiguous()), phase, 0.05))
    assert torch.equal(got.out, apart.out)
    assert int(got.counts.skipped.sum()) > 0 or phase == "prefill"


def test_all_rows_of_a_kv_head_vote_together_beyond_one_block():
    inputs = heavy_tailed_inputs(1, 3, 700, 50, 1, 16, seed=7, dtype=torch.float16)
    # rows of the last block alone want tile 5
    direction = inputs.q[0, 2, 49].float()
    direction[0] = 0.0
    inputs.k[0, 5 * 64 + 7, 0] = (direction / direction.norm() ** 2 * 4.0 * 30.0).half()
    for keywords in ({}, {"max_skipped_mass": 0.2}):
        problem = problem_of(inputs, "decode", 0.05, **keywords)
        assert problem.num_heads * 3 > 2 * 64
        got = compare(problem, NEAR)
        assert bool(got.kept_tiles[0, 0, 0, 5])
        assert int(got.counts.skipped.sum()) > 0
    want_nothing = dict.fromkeys(("want_counts", "want_mass_bound", "want_kept_tiles"), False)
    plain = decode.run(dataclasses.replace(problem_of(inputs, "decode", 0.05), **want_nothing))
    assert torch.equal(plain.out, decode.run(problem_of(inputs, "decode", 0.05)).out)


def test_a_request_decodes_to_the_same_bits_alone_and_in_a_batch():
    inputs = heavy_tailed_inputs(5, 2, 1300, 4, 2, 16, seed=8, dtype=torch.float16)
    used = torch.tensor([1300, 3, 700, 1290, 64], dtype=torch.int32)
    batch = blasst_attn_with_kvcache(*inputs, cache_seqlens=used, threshold=0.05, causal=True, **EVERYTHING)
    assert int(batch.counts.skipped.sum()) > 0
    for i in (0, 2, 4):
        alone = blasst_attn_with_kvcache(
            inputs.q[i : i + 1],
            inputs.k[i : i + 1, : used[i]],
            inputs.v[i : i + 1, : used[i]],
            threshold=0.05,
            causal=True,
            **EVERYTHING,
        )
        assert torch.equal(batch.out[i], alone.out[0])
        assert torch.equal(batch.lse[i], alone.lse[0])
        assert torch.equal(batch.kept_tiles[i, ..., : alone.kept_tiles.shape[-1]], alone.kept_tiles[0])


@pytest.mark.parametrize("page_size", [1, 16, 48, 64, 256])
@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_pages_equal_the_contiguous_cache(phase, page_size):
    inputs = heavy_tailed_inputs(
        2, 2 if phase == "decode" else 40, 500, 2, 1, 16, seed=9, dtype=torch.float16
    )
    lengths = [497, 70]
    used = torch.tensor(lengths, dtype=torch.int32)
    plain_k, plain_v = inputs.k.clone(), inputs.v.clone()
    for b, n in enumerate(lengths):
        for x in (inputs.k, inputs.v, plain_k, plain_v):
            x[b, n:] = math.nan
    pages_k, table = pages_from(inputs.k, page_size, fill=math.nan)
    pages_v, _ = pages_from(inputs.v, page_size, fill=math.inf)
    for b, n in enumerate(lengths):
        table[b, -(-n // page_size) :] = 2**31 - 1 if b else -1  # entries past need are never read
    options = {"seqused_k": used, "max_seqlen_k": 500}
    plain = compare(problem_of(inputs._replace(k=plain_k, v=plain_v), phase, 0.05, **options))
    paged_inputs = inputs._replace(k=pages_k, v=pages_v)
    got = compare(problem_of(paged_inputs, phase, 0.05, block_table=table, **options))
    assert torch.equal(got.out, plain.out)
    assert torch.equal(got.kept_tiles, plain.kept_tiles)
    assert int(got.counts.skipped.sum()) > 0


@pytest.mark.parametrize("page_size", [None, 64])
@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_left_padding_shifts_the_tile_grid(phase, page_size):
    inputs = heavy_tailed_inputs(2, 2 if phase == "decode" else 66, 480, 2, 1, 16, seed=10)
    pad = torch.tensor([50, 0], dtype=torch.int32)
    inputs.k[0, :50] = inputs.v[0, :50] = math.nan
    options = {"leftpad_k": pad, "max_seqlen_k": 480}
    if page_size:
        pages_k, options["block_table"] = pages_from(inputs.k, page_size, fill=math.nan)
        inputs = inputs._replace(k=pages_k, v=pages_from(inputs.v, page_size, fill=math.nan)[0])
        options["seqused_k"] = torch.tensor([480, 480], dtype=torch.int32)
    got = compare(problem_of(inputs, phase, 0.05, **options))
    assert int(got.counts.skipped.sum()) > 0


def test_packed_sequences_of_any_length_equal_their_own_calls():
    cu_q = torch.tensor([0, 0, 70, 70, 200, 200], dtype=torch.int32)
    cu_k = torch.tensor([0, 50, 450, 460, 460, 900], dtype=torch.int32)
    inputs = heavy_tailed_inputs(1, 207, 907, 2, 1, 16, seed=11, dtype=torch.float16)
    q, k, v = (x[0] for x in inputs)
    k[900:] = v[900:] = math.nan
    got = blasst_attn_varlen_func(q, k, v, cu_q, cu_k, 130, 450, threshold=0.05, causal=True, **EVERYTHING)
    assert int(got.counts.skipped.sum()) > 0
    assert bool((got.out[70:] == 0).all())
    assert bool((got.lse[:, 70:] == -math.inf).all())
    alone = blasst_attn_func(
        q[None, :70], k[None, 50:450], v[None, 50:450], threshold=0.05, causal=True, **EVERYTHING
    )
    assert torch.equal(got.out[:70], alone.out[0])
    assert torch.equal(got.lse[:, :70], alone.lse[0])
    assert torch.equal(got.counts.visited[1], alone.counts.visited[0])
    assert got.counts.visited[[0, 2, 3, 4]].sum() == 0


def test_the_grid_of_packed_tiles_covers_every_split_of_a_batch():
    generator = torch.Generator().manual_seed(12)
    for _ in range(6):
        lengths = torch.randint(0, 140, (7,), generator=generator)
        cu = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).int()
        total = int(cu[-1])
        q = torch.randn(total, 1, 16, generator=generator)
        v = torch.ones(total, 1, 16)
        got = blasst_attn_varlen_func(q, q, v, cu, cu, 140, 140, threshold=0.0, impl="triton")
        torch.testing.assert_close(got.out, torch.ones_like(got.out))


@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_thresholds_on_the_device_act_per_sequence_and_are_clamped(phase):
    inputs = heavy_tailed_inputs(5, 1 if phase == "decode" else 64, 500, 1, 1, 16, seed=13)
    same = type(inputs)(*(x[:1].expand(5, -1, -1, -1) for x in inputs))
    threshold = torch.tensor([0.05, 7.0, math.nan, -1.0, math.inf])
    got = compare(problem_of(same, phase, threshold), NEAR)
    one = compare(problem_of(same, phase, torch.tensor(1.0).expand(5)), NEAR)  # stride 0
    skipped = got.counts.skipped[:, 0].tolist()
    assert skipped[0] > 0
    assert skipped[2:4] == [0, 0]
    assert skipped[1] == skipped[4] == int(one.counts.skipped[0]) >= skipped[0]


@pytest.mark.parametrize("phase", ["prefill", "decode"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_odd_values_reach_only_the_rows_that_see_them(phase, value):
    rows = 5 if phase == "decode" else 100
    inputs = heavy_tailed_inputs(1, rows, 400, 2, 1, 40, seed=14)
    inputs.v[0, 397, 0, 3] = value
    inputs.v[0, 350, 0, 33] = value
    got = compare(problem_of(inputs, phase, 0.0))
    seen = torch.arange(rows) + 400 - rows >= 397
    assert torch.equal(~got.out[0, :, 0, 3].isfinite(), seen)


@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_nan_keeps_tiles_and_stays_in_its_row_or_column(phase):
    rows = 2 if phase == "decode" else 64
    inputs = heavy_tailed_inputs(1, rows, 900, 1, 1, 16, seed=15)
    clean = compare(problem_of(inputs, phase, 0.05))
    inputs.q[0, 0, 0, 2] = math.nan
    got = compare(problem_of(inputs, phase, 0.05, want_mass_bound=False))
    assert int(clean.counts.skipped.sum()) > 0
    assert int(got.counts.skipped.sum()) == 0
    assert bool(got.out[0, 0].isnan().all())
    assert_finite(got.out[0, 1:])
    inputs.q[0, 0, 0, 2] = 0.0
    gone = int((~clean.kept_tiles[0, 0, 0]).nonzero()[0]) * (64 if phase == "decode" else 128)
    inputs.k[0, gone + 1, 0, 1] = math.nan
    got = compare(problem_of(inputs, phase, 0.05, want_mass_bound=False))
    assert bool(got.kept_tiles[0, 0, 0, gone // (64 if phase == "decode" else 128)])


@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_rows_without_keys_and_sinks(phase):
    inputs = heavy_tailed_inputs(1, 8 if phase == "decode" else 70, 4, 3, 1, 16, seed=16)
    sinks = torch.tensor([-math.inf, 0.3, 20.0])
    plain = compare(problem_of(inputs, phase, 0.5))
    got = compare(problem_of(inputs, phase, 0.5, sinks=sinks))
    assert bool((plain.lse[..., :-4] == -math.inf).all())
    assert bool((got.out[:, :-4] == 0).all())
    assert torch.equal(got.lse[0, :, :-4], sinks[:, None].expand(-1, inputs.q.shape[1] - 4))
    keyless = problem_of(inputs._replace(k=inputs.k[:, :0], v=inputs.v[:, :0]), phase, 0.5, sinks=sinks)
    assert torch.equal(compare(keyless).lse[0], sinks[:, None].expand(-1, inputs.q.shape[1]))


def test_layouts_of_hosts_equal_their_contiguous_copies():
    inputs = heavy_tailed_inputs(2, 70, 260, 2, 2, 16, seed=17, dtype=torch.float16)
    plain = blasst_attn_func(*inputs, threshold=0.05, causal=True, impl="triton").out
    for change in (
        lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
        lambda x: torch.stack([x, x * math.nan], 2).flatten(1, 2)[:, ::2],
        lambda x: torch.cat([x, x * math.nan], -1)[..., :16],
        lambda x: x.permute(1, 0, 2, 3).contiguous().permute(1, 0, 2, 3),
    ):
        moved = [change(x) for x in inputs]
        assert torch.equal(blasst_attn_func(*moved, threshold=0.05, causal=True, impl="triton").out, plain)
    far = inputs._replace(k=inputs.k[:1].expand(2, -1, -1, -1))
    compare(problem_of(far, "prefill", 0.05))


def test_rows_too_far_apart_for_32_bits_are_reached():
    from blasst.kernels.triton import launch

    inputs = heavy_tailed_inputs(1, 3, 300, 1, 1, 16, seed=18)
    problem = problem_of(inputs, "decode", 0.05)
    assert launch.narrow(problem, 64)
    apart = torch.empty_strided((1, 300, 1, 16), (0, 2**26, 0, 1), device="meta")
    assert not launch.narrow(dataclasses.replace(problem, k=apart), 64)
    plain = decode.run(problem)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decode, "narrow", lambda problem, part: False)
        assert torch.equal(decode.run(problem).out, plain.out)


def fp8_problem(phase, rows, threshold, *, head_dim=16, seqlen_k=700, heads=(4, 2), **options):
    """A problem whose cache is in fp8, with a scale for each KV head of 2 sequences."""
    shape = (2, rows, seqlen_k, *heads, head_dim)
    inputs = heavy_tailed_inputs(*shape, dtype=torch.float16, seed=20, block=128)
    scales = torch.tensor([[0.2, 0.01], [0.35, 0.02]])[:, None].expand(2, heads[1], 2)  # strided
    k_scale, v_scale = scales.unbind(-1)
    inputs = inputs._replace(k=quantize(inputs.k, k_scale), v=quantize(inputs.v, v_scale))
    options = {"k_descale": k_scale, "v_descale": v_scale} | options
    return problem_of(inputs, phase, threshold, **options)


@pytest.mark.parametrize("phase", ["prefill", "decode"])
@pytest.mark.parametrize(("arch", "head_dim"), [((8, 9), 32), ((9, 0), 144), ((10, 0), 32)])
def test_an_fp8_cache_equals_the_reference(arch, phase, head_dim, monkeypatch):
    monkeypatch.setattr(prefill, "capability", lambda device: arch)
    monkeypatch.setattr(decode, "capability", lambda device: arch)
    rows = 2 if phase == "decode" else 70
    got = compare(fp8_problem(phase, rows, 0.05, head_dim=head_dim, seqlen_k=450))
    assert got.out.dtype == torch.float16
    assert int(got.counts.skipped.sum()) > 0


@pytest.mark.parametrize("phase", ["prefill", "decode"])
@pytest.mark.parametrize(
    "options",
    [
        {"softcap": 20.0},
        {"sinks": torch.tensor([0.5, -1.0, 3.0, -math.inf])},
        {"threshold": 1.0, "max_skipped_mass": 0.05},
        {"window_size": (300, 0)},
        {"k_descale": None},
        {"v_descale": None},
    ],
    ids=lambda options: "-".join(options),
)
def test_options_with_an_fp8_cache(phase, options):
    options = {"threshold": 0.05, **options}
    got = compare(fp8_problem(phase, 3 if phase == "decode" else 70, **options), NEAR)
    assert int(got.counts.skipped.sum()) > 0


@pytest.mark.parametrize("phase", ["prefill", "decode"])
@pytest.mark.parametrize("page_size", [16, 64])
def test_pages_in_fp8_equal_the_contiguous_cache(phase, page_size):
    rows = 2 if phase == "decode" else 40
    used = torch.tensor([497, 70], dtype=torch.int32)
    options = {"seqused_k": used, "max_seqlen_k": 500}
    problem = fp8_problem(phase, rows, 0.05, seqlen_k=500, **options)
    plain = compare(problem)
    (pages_k, table), (pages_v, _) = (
        pages_from(x.float(), page_size, fill=math.nan) for x in (problem.k, problem.v)
    )
    pages = {"k": pages_k.to(problem.k.dtype), "v": pages_v.to(problem.v.dtype), "block_table": table}
    got = compare(dataclasses.replace(problem, **pages))
    assert torch.equal(got.out, plain.out)
    assert torch.equal(got.kept_tiles, plain.kept_tiles)
    assert int(got.counts.skipped.sum()) > 0


@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_the_scale_of_fp8_keys_decides_what_is_skipped(phase):
    problem = fp8_problem(phase, 2 if phase == "decode" else 64, 0.002)
    skipped = []
    for scale in (0.2, 0.05):
        got = compare(dataclasses.replace(problem, k_descale=torch.tensor(scale).expand(2, 2)))
        skipped.append(int(got.counts.skipped.sum()))
    assert 0 < skipped[1] < skipped[0]


@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_nan_in_fp8_keys_keeps_tiles_and_in_fp8_values_reaches_only_rows_that_see_it(phase):
    rows = 5 if phase == "decode" else 64
    problem = fp8_problem(phase, rows, 0.05, heads=(2, 1))
    clean = compare(problem)
    size = 64 if phase == "decode" else 128
    gone = int((~clean.kept_tiles[0, 0, 0]).nonzero()[0])
    problem.v.view(torch.uint8)[0, 697, 0, 3] = 0x7F
    got = compare(problem)
    assert torch.equal(got.out[0, :, 0, 3].isnan(), torch.arange(rows) + 700 - rows >= 697)
    problem.k.view(torch.uint8)[0, gone * size + 1, 0, 1] = 0xFF
    got = compare(dataclasses.replace(problem, want_mass_bound=False))
    assert bool(got.kept_tiles[0, 0, 0, gone])


def test_latent_values_inside_fp8_keys():
    problem = fp8_problem("decode", 2, 0.05, head_dim=576, seqlen_k=400, heads=(20, 1))
    got = compare(dataclasses.replace(problem, v=problem.k[..., :512]))
    apart = compare(
        dataclasses.replace(problem, v=problem.k[..., :512].view(torch.uint8).clone().view(problem.k.dtype))
    )
    assert torch.equal(got.out, apart.out)
    assert int(got.counts.skipped.sum()) > 0


def test_an_fp8_cache_through_the_public_function():
    problem = fp8_problem("decode", 1, 0.05)
    new = [x[:, :1] for x in heavy_tailed_inputs(2, 1, 1, 4, 2, 16, dtype=torch.float16)[1:]]
    options = {"cache_seqlens": 699, "k_descale": problem.k_descale, "v_descale": problem.v_descale}
    got = blasst_attn_with_kvcache(
        problem.q, problem.k, problem.v, *new, threshold=0.05, **options, **EVERYTHING
    )
    assert torch.equal(got.out, decode.run(problem).out)  # the cache holds the new keys now
    assert int(got.counts.skipped.sum()) > 0


def test_what_is_not_supported_is_said():
    with pytest.raises(UnsupportedError, match="supported beside an fp8 cache are float16"):
        call = fp8_problem("decode", 1, 0.1)
        blasst_attn_with_kvcache(call.q.float(), call.k, call.v, impl="triton")
    with pytest.raises(UnsupportedError, match="bfloat16"):
        blasst_attn_func(*heavy_tailed_inputs(1, 2, 2, 1, 1, 16, dtype=torch.bfloat16), impl="triton")
    with pytest.raises(UnsupportedError, match="up to 256"):
        blasst_attn_func(*heavy_tailed_inputs(1, 2, 2, 1, 1, 320), impl="triton")
    inputs = heavy_tailed_inputs(1, 2, 2, 1, 1, 16)
    assert unsupported_reason(problem_of(inputs, "decode", 0.1)) is None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("triton.__version__", "3.5.1")
        assert "3.6 or newer" in str(unsupported_reason(problem_of(inputs, "decode", 0.1)))
    huge = torch.empty((2**20, 2**10, 2**8, 16), device="meta")
    reason = unsupported_reason(dataclasses.replace(problem_of(inputs, "prefill", 0.1), q=huge))
    assert reason is not None


def test_a_kept_map_decides_the_output():
    inputs = heavy_tailed_inputs(1, 64, 700, 1, 1, 16, seed=19)
    got = compare(problem_of(inputs, "prefill", 0.05))
    dense = reference_attention(*inputs, causal=True)
    follow = reference_attention(*inputs, causal=True, kept_tiles=got.kept_tiles)
    assert int(got.counts.skipped.sum()) > 0
    assert not torch.equal(dense.out, follow.out)
    assert_within_budget(got.out, follow.out, follow.out.float())
