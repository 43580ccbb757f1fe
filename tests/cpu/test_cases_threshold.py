"""Cases from the field, A and B: what a threshold means, and what is counted."""

import math
import warnings

import pytest
import torch
from cases_parts import (
    DTYPE,
    INTERPRETED,
    ON_GPU,
    ROUNDING,
    attention,
    blasst_attn_func,
    blasst_attn_varlen_func,
    blasst_attn_with_kvcache,
    close,
    heavy_tailed_inputs,
    impls,
)

import blasst
from blasst import UnsupportedError
from blasst.core import checks
from blasst.core.reference import reference_attention
from blasst.testing import assert_error_bound, assert_finite

pytestmark = [impls, pytest.mark.filterwarnings("ignore::RuntimeWarning")]  # numpy of Triton's interpreter


@pytest.mark.parametrize("length", [1, 64, 512] + [2048] * (not INTERPRETED))
def test_scale_factor_made_for_long_prompts_is_clamped_on_short_ones(impl, length, monkeypatch):
    monkeypatch.setattr(checks, "_warned", set())
    inputs = heavy_tailed_inputs(1, length, length, 4, 2, 16, seed=1, dtype=torch.bfloat16)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        got = blasst_attn_func(
            *inputs, threshold_scale_factor=15000.0, causal=True, return_kept_tiles=True, impl=impl
        )
    said = [str(one.message) for one in said if one.category is UserWarning]
    assert len(said) == 1 and "threshold_scale_factor: got 15000 for a sequence" in said[0]
    assert_finite(got.out)
    assert bool(got.kept_tiles[..., 0].all())  # the first tile in which a row sees a key
    one = blasst_attn_func(*inputs, threshold=1.0, causal=True, impl=impl)
    assert torch.equal(got.out, one.out)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)  # said once
        blasst_attn_func(*inputs, threshold_scale_factor=15000.0, causal=True, impl=impl)


def test_threshold_one_keeps_only_tiles_that_reach_the_running_maximum(impl):
    inputs = heavy_tailed_inputs(1, 64, 1024, 1, 1, 16, seed=2)
    got = blasst_attn_func(*inputs, threshold=1.0, return_kept_tiles=True, impl=impl)
    margin = reference_attention(*inputs).margin
    assert torch.equal(got.kept_tiles, margin >= 0)
    assert not bool(got.kept_tiles.all())


def test_none_zero_and_denormal_are_the_same_bits_and_equal_dense(impl):
    inputs = heavy_tailed_inputs(1, 300, 300, 2, 1, 64, seed=3, dtype=torch.float16)
    dense = blasst_attn_func(*inputs, causal=True, return_lse=True, impl=impl)
    truth = torch.nn.functional.scaled_dot_product_attention(
        *(x.transpose(1, 2).double() for x in inputs), is_causal=True, enable_gqa=True
    ).transpose(1, 2)
    close(dense.out.double(), truth, rtol=2e-3, atol=2e-3)
    for threshold in (0.0, 5e-324, 1e-30, torch.tensor([0.0])):
        got = blasst_attn_func(*inputs, threshold=threshold, causal=True, return_lse=True, impl=impl)
        assert torch.equal(got.out, dense.out)
        assert torch.equal(got.lse, dense.lse)


@pytest.mark.parametrize(
    ("threshold", "error"),
    [
        (-0.1, ValueError),
        (math.nan, ValueError),
        (math.inf, ValueError),
        (2.0, ValueError),
        ("0.1", TypeError),
        (True, TypeError),
        (torch.tensor([1.5]), ValueError),
        (torch.tensor([math.nan]), ValueError),
        (torch.tensor([0.1, 0.2]), ValueError),
        (torch.tensor([0.1]).double(), TypeError),
    ],
)
def test_thresholds_that_are_no_ratio_are_refused_by_name_and_range(impl, threshold, error):
    inputs = heavy_tailed_inputs(1, 64, 64, 1, 1, 16)
    if ON_GPU and isinstance(threshold, torch.Tensor) and error is ValueError and len(threshold) == 1:
        blasst_attn_func(*inputs, threshold=threshold, impl=impl)  # values there are not read back
        return
    with pytest.raises(error, match=r"threshold: got .*\[0, 1\]"):
        blasst_attn_func(*inputs, threshold=threshold, impl=impl)


def test_log_domain_values_are_refused_with_a_hint(impl):
    inputs = heavy_tailed_inputs(1, 64, 64, 1, 1, 16)
    with pytest.raises(ValueError, match="log-domain"):
        blasst_attn_func(*inputs, threshold=-0.7, impl=impl)


def test_threshold_and_scale_factor_together_are_refused(impl):
    inputs = heavy_tailed_inputs(1, 64, 64, 1, 1, 16)
    with pytest.raises(ValueError, match="got both"):
        blasst_attn_func(*inputs, threshold=0.1, threshold_scale_factor=10.0, impl=impl)


def test_scale_factor_divides_by_each_sequence_of_a_batch(impl):
    lengths = [256, 1024, 2048]
    # cold tiles lie 1 to 6 nats below the hot ones, the cuts of the three lengths 1.5 to 3.5: each matters
    singles = [heavy_tailed_inputs(1, n, n, 1, 1, 16, seed=n, drop=(1.0, 6.0), noise=0.2) for n in lengths]
    packed = [torch.cat([getattr(s, name)[0] for s in singles]) for name in ("q", "k", "v")]
    cu = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)
    options = {"threshold_scale_factor": 60.0, "causal": True, "return_counts": True, "impl": impl}
    got = blasst_attn_varlen_func(*packed, cu, cu, 2048, 2048, **options)
    assert int(got.counts.skipped.sum()) > 0
    for i, single in enumerate(singles):
        one = blasst_attn_func(*single, **options)
        assert torch.equal(got.out[int(cu[i]) : int(cu[i + 1])], one.out[0])
        assert torch.equal(got.counts.skipped[i], one.counts.skipped[0])
        direct = blasst_attn_func(
            *single, **{**options, "threshold_scale_factor": None}, threshold=60.0 / lengths[i]
        )
        assert torch.equal(direct.out, one.out)


@pytest.mark.parametrize(
    ("tokens", "phase"), [(1, "decode"), (5, "decode"), (8, "decode"), (9, "prefill"), (128, "prefill")]
)
def test_one_to_eight_new_tokens_are_decode_and_more_are_prefill(impl, tokens, phase):
    inputs = heavy_tailed_inputs(1, tokens, 1024, 4, 2, 16, seed=4)
    got = blasst_attn_with_kvcache(*inputs, threshold=0.05, causal=True, return_kept_tiles=True, impl=impl)
    truth = reference_attention(*inputs, threshold=0.05, causal=True, phase=phase)
    assert torch.equal(got.kept_tiles, truth.kept_tiles)
    assert not bool(got.kept_tiles.all())


def test_a_strong_row_neither_causes_nor_blocks_the_skips_of_others(impl):
    generator = torch.Generator().manual_seed(5)
    q, k, v = (torch.randn(1, n, 1, 64, generator=generator).to(DTYPE) for n in (128, 1024, 1024))
    q[:, 0] *= 20
    k[:, 10] = q[:, 0] / q[:, 0].norm() * 40  # the spike of row 0, in tile 0
    q[:, 1:, :, 0] = 16.0
    k[:, 5 * 128 : 6 * 128, :, 0] = 10.0  # the mass of all other rows, in tile 5
    got = blasst_attn_func(q, k, v, threshold=0.05, return_kept_tiles=True, impl=impl)
    truth = reference_attention(q, k, v, threshold=0.05)
    dense = reference_attention(q, k, v)
    assert torch.equal(got.kept_tiles, truth.kept_tiles)
    assert bool(got.kept_tiles[..., 5].all())
    assert int(truth.counts.skipped.sum()) > 0
    assert_error_bound(got.out, dense.out, truth.skipped_mass, v, slack=1e-5 + ROUNDING)


def test_denominator_and_lse_are_those_of_kept_tiles(impl):
    inputs = heavy_tailed_inputs(1, 64, 2048, 1, 1, 16, seed=6, drop=(3.0, 6.0))
    dense = blasst_attn_func(*inputs, return_lse=True, impl=impl)
    got = blasst_attn_func(*inputs, threshold=0.3, return_lse=True, return_kept_tiles=True, impl=impl)
    kept_keys = got.kept_tiles[0, 0, 0].repeat_interleave(128)
    assert not bool(kept_keys.all())
    scores = inputs.q[0, :, 0].float() @ inputs.k[0, :, 0].float().T * inputs.q.shape[-1] ** -0.5
    close(got.lse[0, 0], scores[:, kept_keys].logsumexp(-1), rtol=1e-4, atol=1e-4)
    dropped = dense.lse - got.lse
    assert bool((dropped >= -1e-5).all())
    assert bool((dropped <= math.log(1 + 0.3 * int((~kept_keys).sum()))).all())
    assert not torch.equal(got.out, dense.out)


def test_options_are_never_accepted_and_ignored(impl):
    inputs = heavy_tailed_inputs(1, 64, 256, 2, 1, 16)
    q, k, v = (x.transpose(1, 2) for x in inputs)
    with pytest.raises(UnsupportedError, match="attn_mask"):
        attention(q, k, v, torch.ones(64, 256, dtype=torch.bool), enable_gqa=True, threshold=0.1, impl=impl)
    lowest = torch.full((64, 256), torch.finfo(torch.float32).min)
    with pytest.raises(UnsupportedError, match="attn_mask"):  # also one that stands for -inf
        attention(q, k, v, lowest, enable_gqa=True, threshold=0.1, impl=impl)
    with pytest.raises(UnsupportedError, match="dropout_p"):
        attention(q, k, v, dropout_p=0.1, enable_gqa=True, threshold=0.1, impl=impl)
    with pytest.raises(ValueError, match=r"max_skipped_mass.*threshold"):
        blasst_attn_func(*inputs, max_skipped_mass=0.1, impl=impl)
    with pytest.raises(ValueError, match="impl: got 'flash'"):
        blasst_attn_func(*inputs, threshold=0.1, impl="flash")
    blasst_attn_func(*inputs, threshold=0.1, impl=impl)
    assert blasst.backend_used() == impl


def test_float64_is_refused_by_kernels_and_taken_by_the_reference(impl):
    inputs = heavy_tailed_inputs(1, 64, 256, 2, 1, 16, dtype=torch.float64)
    if impl == "reference":
        assert blasst_attn_func(*inputs, threshold=0.1, impl=impl).out.dtype == torch.float64
    else:
        with pytest.raises(UnsupportedError, match="float64"):
            blasst_attn_func(*inputs, threshold=0.1, impl=impl)


@pytest.mark.parametrize("length", [1, 100, 129])
@pytest.mark.parametrize("threshold", [0.0, 1.0])
def test_sparsity_is_a_ratio_over_the_tile_grid(impl, length, threshold):
    inputs = heavy_tailed_inputs(1, length, length, 2, 1, 16)
    counts = blasst_attn_func(*inputs, threshold=threshold, causal=True, return_counts=True, impl=impl).counts
    assert 0.0 <= float(counts.sparsity) <= 1.0
    if length <= 128:
        assert float(counts.sparsity) == 0.0
    tiles = {1: 1, 100: 2, 129: 4}[length]  # query tiles 0, 1 see key tile 0; query tile 2 sees both
    assert counts.visited.tolist() == [[tiles] * 2]


@pytest.mark.parametrize("seqlen_q", [1, 130])
def test_padding_rows_neither_veto_nor_approve(impl, seqlen_q):
    inputs = heavy_tailed_inputs(1, seqlen_q, 4096, 1, 1, 16, seed=7)
    got = blasst_attn_func(*inputs, threshold=0.1, return_kept_tiles=True, return_counts=True, impl=impl)
    tail = blasst_attn_func(
        inputs.q[:, -(seqlen_q % 64 or 64) :],
        inputs.k,
        inputs.v,
        threshold=0.1,
        return_kept_tiles=True,
        impl=impl,
    )
    assert torch.equal(got.kept_tiles[:, :, -1], tail.kept_tiles[:, :, -1])
    assert int(got.counts.skipped.sum()) == int((~got.kept_tiles).sum()) > 0


def test_measuring_does_not_change_the_result(impl):
    inputs = heavy_tailed_inputs(1, 130, 700, 2, 1, 16, seed=8)
    for attn in (blasst_attn_func, lambda q, *rest, **kw: blasst_attn_with_kvcache(q[:, :2], *rest, **kw)):
        plain = attn(*inputs, threshold=0.05, impl=impl)
        measured = attn(
            *inputs,
            threshold=0.05,
            return_lse=True,
            return_counts=True,
            return_mass_bound=True,
            return_kept_tiles=True,
            impl=impl,
        )
        assert int(measured.counts.skipped.sum()) > 0
        assert torch.equal(plain.out, measured.out)
        assert plain.lse is plain.counts is plain.mass_bound is plain.kept_tiles is None
