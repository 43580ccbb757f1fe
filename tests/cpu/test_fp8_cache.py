"""KV caches in float8_e4m3fn: the keys and values meant are the stored ones times their scale, everywhere."""

import math

import pytest
import torch

from blasst import blasst_attn_func, blasst_attn_with_kvcache
from blasst.core.cache import quantize
from blasst.core.errors import UnsupportedError
from blasst.core.reference import reference_attention
from blasst.testing import (
    assert_matches_reference,
    assert_same_kept_tiles,
    heavy_tailed_inputs,
    pages_from,
)

FP8 = torch.float8_e4m3fn
EVERYTHING = {
    "return_lse": True,
    "return_counts": True,
    "return_mass_bound": True,
    "return_kept_tiles": True,
}
#: Every form of a scale for 2 sequences and 2 KV heads.
SCALES = {
    "none": None,
    "float": 0.3,
    "scalar": torch.tensor(0.3),
    "heads": torch.tensor([0.2, 0.35]),
    "sequences": torch.tensor([[0.2, 0.35], [0.5, 1.7]]),
    "strided": torch.tensor([[0.2, 0.5], [0.35, 1.7]]).t(),
}
#: Nats by which float32 and float64 scores of these inputs may differ.
NEAR = 1e-3


def full(scale):
    """Any form of a scale as (2, 2)."""
    return torch.as_tensor(1.0 if scale is None else scale).expand(2, 2)


def cached(tokens, k_scale, v_scale, dtype=torch.float32, seqlen_k=700, **options):
    """(q, k, v) with k and v in fp8."""
    q, k, v = heavy_tailed_inputs(2, tokens, seqlen_k, 4, 2, 16, 24, dtype=dtype, **options)
    return q, quantize(k, full(k_scale)), quantize(v, full(v_scale))


def real(stored, scale):
    """The keys or values meant, in float32."""
    return stored.float() * full(scale)[:, None, :, None]


def phase_of(q):
    return "decode" if q.shape[1] <= 8 else "prefill"


def yardstick_of(q, k, v, k_scale, v_scale, truth, **options):
    """The reference at equal rounding: scaled keys and values in the dtype of q."""
    k, v = real(k, k_scale).to(q.dtype), real(v, v_scale).to(q.dtype)
    options |= {"kept_tiles": truth.kept_tiles, "dtype": q.dtype}
    return reference_attention(q, k, v, phase=phase_of(q), **options)


def softmax_attention(q, k, v, softcap, sinks):
    """Causal attention in float64: (out, lse)."""
    group = q.shape[2] // k.shape[2]
    q, k, v = (x.double().transpose(1, 2) for x in (q, k, v))
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
    if softcap:
        scores = torch.tanh(scores / softcap) * softcap
    visible = torch.ones(scores.shape[-2:], dtype=torch.bool).tril(k.shape[2] - q.shape[2])
    scores = scores.masked_fill(~visible, -math.inf)
    sink = torch.full((q.shape[1],), -math.inf) if sinks is None else sinks
    scores = torch.cat([scores, sink.double().view(1, -1, 1, 1).expand(*scores.shape[:3], 1)], -1)
    return (scores.softmax(-1)[..., :-1] @ v).transpose(1, 2), scores.logsumexp(-1)


@pytest.mark.parametrize("tokens", [1, 40])
@pytest.mark.parametrize("form", SCALES)
@pytest.mark.parametrize(
    "options", [{}, {"softcap": 5.0}, {"sinks": torch.tensor([0.5, -1.0, 2.0, -math.inf])}]
)
def test_the_reference_is_softmax_attention_of_the_scaled_cache(options, form, tokens):
    k_scale, v_scale = SCALES[form], SCALES["none" if form == "float" else form]
    q, k, v = cached(tokens, k_scale, v_scale, torch.float64)
    out, lse = softmax_attention(
        q, real(k, k_scale), real(v, v_scale), options.get("softcap", 0.0), options.get("sinks")
    )
    got = blasst_attn_with_kvcache(
        q, k, v, k_descale=k_scale, v_descale=v_scale, threshold=0.0, causal=True, return_lse=True,
        impl="reference", **options,
    )  # fmt: skip
    assert got.out.dtype == torch.float64
    torch.testing.assert_close(got.out, out, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(got.lse, lse.float())
    other = blasst_attn_with_kvcache(q, k, v, causal=True, impl="reference", **options)
    assert form == "none" or not torch.allclose(other.out, out, rtol=0.01)


@pytest.mark.parametrize("page_size", [None, 50])
@pytest.mark.parametrize("tokens", [1, 3, 40])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("form", SCALES)
def test_eager_equals_the_reference(form, dtype, tokens, page_size):
    scale = SCALES[form]
    q, k, v = cached(tokens, scale, scale, dtype)
    options = {"causal": True, "threshold": 0.02}
    truth = reference_attention(q, k, v, phase=phase_of(q), k_descale=scale, v_descale=scale, **options)
    yardstick = yardstick_of(q, k, v, scale, scale, truth, **options)
    if page_size:
        (k, table), (v, _) = (pages_from(x.float(), page_size, fill=math.nan) for x in (k, v))
        k, v = k.to(FP8), v.to(FP8)
        options |= {"block_table": table, "cache_seqlens": 700}
    got = blasst_attn_with_kvcache(q, k, v, k_descale=scale, v_descale=scale, **options, **EVERYTHING)
    assert got.out.dtype == dtype
    assert_matches_reference(got, truth, yardstick, 0.02)
    assert int(got.counts.skipped.sum()) > 0


@pytest.mark.parametrize("impl", ["reference", "eager"])
@pytest.mark.parametrize("tokens", [1, 40])
def test_the_decision_is_taken_on_scaled_scores(tokens, impl):
    q, k, v = cached(tokens, None, None, torch.float16)
    skipped = {}
    for scale in (1.0, 0.25):
        truth = reference_attention(q, real(k, scale), real(v, None), threshold=0.002, phase=phase_of(q))
        got = blasst_attn_with_kvcache(q, k, v, k_descale=scale, threshold=0.002, impl=impl, **EVERYTHING)
        assert assert_same_kept_tiles(got.kept_tiles, truth, 0.002) == 0
        skipped[scale] = int(got.counts.skipped.sum())
    assert 0 < skipped[0.25] < skipped[1.0]


@pytest.mark.parametrize("tokens", [1, 40])
@pytest.mark.parametrize("softcap", [0.0, 30.0])
def test_budget_and_mass_bound_are_those_of_scaled_scores(softcap, tokens):
    scale = SCALES["sequences"]
    q, k, v = cached(tokens, scale, None, torch.float16, seqlen_k=2000, drop=(2.0, 12.0))
    options = {"threshold": 1.0, "softcap": softcap, "max_skipped_mass": 0.05}
    got = blasst_attn_with_kvcache(q, k, v, k_descale=scale, **options, **EVERYTHING)
    truth = reference_attention(q, k, v, k_descale=scale, phase=phase_of(q), **options)
    assert torch.equal(got.kept_tiles, truth.kept_tiles)
    assert 0 < int(got.counts.skipped.sum()) < int(got.counts.visited.sum())
    assert float(truth.skipped_mass.max()) <= 0.05 / 1.05
    assert_matches_reference(got, truth, yardstick_of(q, k, v, scale, None, truth, **options), 1.0)


@pytest.mark.parametrize("page_size", [None, 16])
@pytest.mark.parametrize("form", ["none", "float", "heads", "sequences"])
@pytest.mark.parametrize("stored", [False, True], ids=["rounded", "stored"])
def test_new_keys_are_written_scaled_and_rounded(stored, form, page_size):
    scale = SCALES[form]
    q, k, v = cached(2, scale, scale, torch.float16, seqlen_k=100)
    new = heavy_tailed_inputs(2, 2, 2, 4, 2, 16, 24, dtype=torch.float16, seed=5)
    new.k[0, 0, 0, :4] = torch.tensor([math.nan, 1e4, -math.inf, 0.0078])
    new.v[0, 0, 0, :4] = torch.tensor([math.nan, -1e4, math.inf, -0.0078])
    for x in new.k[1, 0, 1], new.v[1, 0, 1]:  # halfway between fp8 values, and below the smallest
        x[:3] = torch.tensor([17.0, 19.0, 0.0009765625]) * full(scale)[1, 1]
    expected = [
        (x.float() / full(scale)[:, None, :, None]).clamp(-448, 448).to(FP8).view(torch.uint8)
        for x in (new.k, new.v)
    ]
    fresh = [x.view(FP8) for x in expected] if stored else list(new[1:])
    lengths = torch.tensor([90, 41], dtype=torch.int32)
    options = {"k_descale": scale, "v_descale": scale, "threshold": 0.02, "causal": True}
    filled = [x.view(torch.uint8).clone() for x in (k, v)]
    for x, rows in zip(filled, expected, strict=True):
        for b, n in enumerate(lengths.tolist()):
            x[b, n : n + 2] = rows[b]
    want = blasst_attn_with_kvcache(
        q, *(x.view(FP8) for x in filled), cache_seqlens=lengths + 2, **options
    ).out
    table = None
    if page_size:
        (k, table), (v, _) = (pages_from(x.float(), page_size, fill=0.0) for x in (k, v))
        k, v = k.to(FP8), v.to(FP8)
    got = blasst_attn_with_kvcache(q, k, v, *fresh, cache_seqlens=lengths, block_table=table, **options).out
    assert torch.equal(got.isnan(), want.isnan())
    assert torch.equal(got[1], want[1])
    for cache, wanted in zip((k, v), filled, strict=True):
        bits = cache.view(torch.uint8)
        if table is not None:
            bits = bits[table.long()].flatten(1, 2)[:, :100]
        assert torch.equal(bits, wanted)
    largest = k.float().nan_to_num(0.0).abs().max()
    assert float(largest) <= 448 and bool(expected[0].view(FP8).isnan().any())


def test_a_nan_in_the_cache_stays_in_its_column():
    q, k, v = cached(3, 0.3, 0.3)
    v.view(torch.uint8)[0, 698, 0, 5] = 0x7F
    got = blasst_attn_with_kvcache(q, k, v, k_descale=0.3, v_descale=0.3, threshold=0.02, causal=True).out
    expected = torch.zeros(2, 3, 4, 24, dtype=torch.bool)
    expected[0, 1:, :2, 5] = True
    assert torch.equal(got.isnan(), expected)


GOOD = torch.ones(2)


@pytest.mark.parametrize("name", ["k_descale", "v_descale"])
@pytest.mark.parametrize(
    ("value", "error", "message"),
    [
        (0.0, ValueError, "got 0.0, want a positive float"),
        (-1.0, ValueError, "got -1.0"),
        (math.inf, ValueError, "got inf"),
        (1e-60, ValueError, "got 1e-60"),
        (math.nan, ValueError, "got nan"),
        ("1", TypeError, "got '1'"),
        (True, TypeError, "got True"),
        (GOOD.double(), TypeError, "got dtype torch.float64, want a positive float, or a float32 tensor"),
        (GOOD.to("meta"), ValueError, "got a tensor on meta"),
        (torch.ones(3), ValueError, r"got shape \(3,\), want .* \(\), \(2,\) or \(2, 2\)"),
        (torch.ones(2, 1), ValueError, r"got shape \(2, 1\)"),
        (torch.tensor([1.0, 0.0]), ValueError, r"got \[1.0, 0.0\]"),
        (torch.tensor(math.nan), ValueError, r"got \[nan\]"),
        (torch.tensor(math.inf), ValueError, r"got \[inf\]"),
    ],
)
def test_wrong_scales_are_named_and_nothing_is_written(name, value, error, message):
    q, k, v = cached(1, None, None)
    before = k.view(torch.uint8).clone()
    new = torch.ones(2, 1, 2, 16), torch.ones(2, 1, 2, 24)
    with pytest.raises(error, match=f"^{name}: {message}"):
        blasst_attn_with_kvcache(q, k, v, *new, cache_seqlens=9, **{name: value})
    assert torch.equal(k.view(torch.uint8), before)


@pytest.mark.parametrize("name", ["k_descale", "v_descale"])
@pytest.mark.parametrize("value", [1.0, torch.tensor(1.0)])
def test_a_scale_beside_a_16_bit_cache_is_refused(name, value):
    with pytest.raises(ValueError, match=f"^{name}: got a scale beside a cache of torch.float16"):
        blasst_attn_with_kvcache(
            *heavy_tailed_inputs(2, 1, 9, 4, 2, 16, dtype=torch.float16), **{name: value}
        )


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"v_cache": torch.float16}, ValueError, "v_cache: got dtype torch.float16, want .*fn like k_cache"),
        ({"k_cache": torch.float16}, ValueError, "v_cache: got dtype .*fn, want torch.float16 like q"),
        (
            dict.fromkeys(("k_cache", "v_cache"), torch.float8_e5m2),
            UnsupportedError,
            "k_cache: got dtype torch.float8_e5m2, supported are that of q and torch.float8_e4m3fn",
        ),
        ({"v_cache": torch.float8_e5m2}, UnsupportedError, "v_cache: got dtype torch.float8_e5m2"),
        ({"v_cache": torch.uint8}, UnsupportedError, "v_cache: got dtype torch.uint8"),
        ({"k_cache": torch.float32}, ValueError, "k_cache: got dtype torch.float32, want torch.float16"),
        (dict.fromkeys(("q", "k", "v"), FP8), UnsupportedError, "q: got dtype torch.float8_e4m3fn"),
        ({"k": torch.float32}, ValueError, "k: got torch.float32 .* want .*fn or torch.float16"),
        ({"v": torch.float8_e5m2}, ValueError, "v: got torch.float8_e5m2"),
    ],
)
def test_dtypes_that_do_not_fit_are_named(change, error, message):
    q, k, v = cached(1, None, None, torch.float16)
    values = {"q": q, "k_cache": k, "v_cache": v, "k": k[:, :1].half(), "v": v[:, :1].half()}
    for name, dtype in change.items():
        values[name] = values[name].float().to(dtype)
    with pytest.raises(error, match=f"^{message}"):
        blasst_attn_with_kvcache(**values, cache_seqlens=9)


def test_without_a_cache_there_is_no_fp8():
    q, k, v = cached(1, None, None, torch.float16)
    with pytest.raises(ValueError, match=r"^k: got dtype torch.float8_e4m3fn, want torch.float16 like q"):
        blasst_attn_func(q, k, v)


def test_values_shared_with_keys_need_no_copy():
    q, k, _ = cached(2, 0.3, 0.3)
    options = {"k_descale": 0.3, "v_descale": 0.2, "threshold": 0.02}
    shared = blasst_attn_with_kvcache(q, k, k[..., :8], **options)
    apart = blasst_attn_with_kvcache(q, k, k[..., :8].clone(), **options)
    assert torch.equal(shared.out, apart.out)


@pytest.mark.parametrize("dtype", [torch.float32, FP8])
@pytest.mark.parametrize("form", ["scalar", "strided"])
def test_the_op_passes_torchs_own_checks(form, dtype):
    q, k, v = cached(1, None, None)
    scale = full(SCALES[form])
    arguments = (
        q, k.to(dtype), v.to(dtype), "decode", torch.full((2,), 0.05), 0.25, True, [-1, -1], 0.0, None, None,
        None, None, None, None, None, 1, 700, scale, scale, None, 0, (), False, False, True, True, True,
        "eager",
    )  # fmt: skip
    checks = ["test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"]
    if dtype != FP8:  # this one multiplies the arguments, which torch cannot in fp8
        checks.append("test_schema")
    results = torch.library.opcheck(torch.ops.blasst.attention, arguments, test_utils=checks)
    assert set(results.values()) == {"SUCCESS"}


@pytest.mark.parametrize("page_size", [None, 16])
def test_compiles_as_one_graph_and_writes_the_cache(page_size):
    def f(q, k_cache, v_cache, k, v, lengths, table, k_scale, v_scale):
        return blasst_attn_with_kvcache(
            q, k_cache, v_cache, k, v, cache_seqlens=lengths, block_table=table, k_descale=k_scale,
            v_descale=v_scale, threshold=0.02,
        ).out  # fmt: skip

    torch._dynamo.reset()
    compiled = torch.compile(f, fullgraph=True, backend="aot_eager")
    for k_scale, v_scale in ((None, 0.3), (SCALES["heads"], SCALES["scalar"]), (0.5, SCALES["sequences"])):
        q, k, v = cached(1, k_scale, v_scale, torch.float16, seqlen_k=160)
        new = k[:, :1].half(), v[:, :1].half()
        table = None
        if page_size:
            (k, table), (v, _) = (pages_from(x.float(), page_size, fill=0.0) for x in (k, v))
            k, v = k.to(FP8), v.to(FP8)
        lengths = torch.tensor([150, 33], dtype=torch.int32)
        copies = [(k.clone(), v.clone()) for _ in range(2)]
        outs = [g(q, *c, *new, lengths, table, k_scale, v_scale) for g, c in zip((f, compiled), copies)]
        assert torch.equal(*outs)
        for a, b, before in zip(*copies, (k, v), strict=True):
            assert torch.equal(a.view(torch.uint8), b.view(torch.uint8))
            assert not torch.equal(a.view(torch.uint8), before.view(torch.uint8))
