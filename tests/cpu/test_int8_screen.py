"""screen="int8": the bounds hold for scores as they are computed, and no tile goes that the rule keeps."""

import math
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from blasst import UnsupportedError, blasst_attn_func, blasst_attn_varlen_func
from blasst.core.int8_screen import Int8Keys, Int8Recipe, Int8Rows, score_bounds
from blasst.core.reference import reference_attention
from blasst.testing import heavy_tailed_inputs, pages_from

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "screened_prefill.py"
IMPLS = ["eager", "reference"]
EVERYTHING = {"return_lse": True, "return_counts": True, "return_kept_tiles": True}
FORMS = ["heavy", "heavy", "constant", "channels", "offset", "huge", "tiny", "odd", "one key", "few values"]


def edited(form, q, k, draw=None):
    """Make q and k hard to round or to bound; in place."""
    dim = k.shape[-1]
    if form == "constant":
        k[..., dim // 2 :] = 0.75
    if form == "channels":  # outliers, the same in q and k and in one of them
        k *= 2.0 ** torch.linspace(-6, 4, dim).to(k.dtype)
        q[..., 0] *= 30
    if form == "offset":  # nearly all of a score is that of the mean
        k += 300 * torch.linspace(-1, 1, dim).sign().to(k.dtype)
    if form == "huge":
        k *= 3e3
    if form == "tiny":
        k *= 1e-7
        q *= 1e-3
    if form == "one key":  # it fills the range of its tile
        k[:, min(40, k.shape[1] - 1)] *= 100
    if form == "few values":  # many equal scores
        k.copy_((k * 2).round() / 2)
        q.copy_((q * 2).round() / 2)
    if form == "odd" and draw is not None:
        for _ in range(3):
            side = draw(st.sampled_from([q, k]))
            place = tuple(draw(st.integers(0, n - 1)) for n in side.shape)
            side[place] = draw(st.sampled_from([math.nan, math.inf, -math.inf, 6e4, 1e-7]))


def visible_keys(seqlen_q, seqlen_k, causal, window):
    """(rows, keys), written out."""
    position = torch.arange(seqlen_q)[:, None] + seqlen_k - seqlen_q
    key = torch.arange(seqlen_k)[None]
    seen = torch.ones(seqlen_q, seqlen_k, dtype=torch.bool)
    if causal:
        seen &= key <= position
    if window[0] >= 0:
        seen &= key >= position - window[0]
    if window[1] >= 0:
        seen &= key <= position + window[1]
    return seen


def tiled(x, fill):
    """(..., rows, keys) to (..., query tiles, 64, key tiles, 128)."""
    x = torch.nn.functional.pad(x, (0, -x.shape[-1] % 128, 0, -x.shape[-2] % 64), value=fill)
    return x.unflatten(-1, (-1, 128)).unflatten(-3, (-1, 64))


def exact_rule(q, k, threshold, causal, window_size, softcap=0.0, softmax_scale=None, sinks=None):
    """(kept, visited) of the rule against the final maximum, from float32 scores."""
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    keys = k.float().repeat_interleave(q.shape[2] // k.shape[2], 2).permute(0, 2, 3, 1)
    scores = (q.float() * scale).transpose(1, 2) @ keys
    if softcap:
        scores = torch.tanh(scores / softcap) * softcap
    seen = visible_keys(q.shape[1], k.shape[1], causal, window_size)
    scores = scores.masked_fill(~seen, -math.inf)
    row_max = scores.amax(-1)
    if sinks is not None:
        row_max = torch.maximum(row_max, sinks[:, None])
    limit = row_max + torch.tensor(threshold).log()
    limit = torch.nn.functional.pad(limit, (0, -q.shape[1] % 64)).unflatten(-1, (-1, 64))
    concerned = tiled(seen, False).any(-1)
    tile_max = tiled(scores, -math.inf).amax(-1)  # [batch, heads, query tiles, 64, key tiles]
    kept = (concerned & ~(tile_max < limit[..., None])).any(-2)
    return kept, concerned.any(-2).expand_as(kept)


@st.composite
def prefill_calls(draw):
    kv_heads, group = draw(st.sampled_from([1, 2])), draw(st.sampled_from([1, 3]))
    inputs = heavy_tailed_inputs(
        2,
        draw(st.sampled_from([1, 70, 130, 200])),
        draw(st.sampled_from([1, 127, 300, 700])),
        kv_heads * group,
        kv_heads,
        draw(st.sampled_from([7, 16, 40, 64])),
        16,
        dtype=draw(st.sampled_from([torch.bfloat16, torch.float32])),
        seed=draw(st.integers(0, 10**6)),
        noise=draw(st.sampled_from([0.2, 2.0])),
        drop=draw(st.sampled_from([(8.0, 40.0), (1.0, 12.0)])),
    )
    edited(draw(st.sampled_from(FORMS)), inputs.q, inputs.k, draw)
    options = {
        "threshold": draw(st.sampled_from([1e-4, 0.01, 0.1, 0.3, 1.0])),
        "causal": draw(st.booleans()),
        "window_size": draw(st.sampled_from([(-1, -1), (-1, -1), (200, 0), (150, 30)])),
        "softcap": draw(st.sampled_from([0.0, 0.0, 10.0])),
        "softmax_scale": draw(st.sampled_from([None, None, None, -0.3, 0.0])),
    }
    if draw(st.booleans()):
        options["sinks"] = torch.linspace(-2, 6, kv_heads * group)
    return inputs, options


@settings(max_examples=100)
@given(prefill_calls(), st.sampled_from(IMPLS))
def test_no_tile_is_skipped_that_the_rule_keeps_against_the_final_maximum(call, impl):
    inputs, options = call
    got = blasst_attn_func(*inputs, screen="int8", impl=impl, **options, **EVERYTHING)
    kept, visited = exact_rule(*inputs[:2], **options)
    assert bool((got.kept_tiles | ~kept).all())
    assert bool((visited | ~got.kept_tiles).all())
    assert torch.equal(got.counts.visited, visited.sum((-1, -2)))
    assert torch.equal(got.counts.skipped, (visited & ~got.kept_tiles).sum((-1, -2)))
    assert torch.equal(got.counts.screened, got.counts.skipped)


@settings(max_examples=60)
@given(
    st.integers(0, 10**6),
    st.sampled_from([form for form in FORMS if form != "odd"]),
    st.sampled_from([7, 64, 96, 128]),
    st.sampled_from([0.0, 20.0]),
    st.sampled_from(
        [
            Int8Recipe(),
            Int8Recipe(center="tile", keys_per_step=64),
            Int8Recipe(center="none", balance="keys", step_per_row=False, bound="l1"),
            Int8Recipe(rotate=False, balance="none", bound="l2"),
        ]
    ),
    st.sampled_from([torch.float32, torch.float64]),
)
def test_the_bounds_hold_however_the_score_was_added_up(seed, form, dim, softcap, recipe, dtype):
    q, k, _ = (x[0] for x in heavy_tailed_inputs(1, 64, 300, 2, 1, dim, seed=seed, noise=2.0))
    edited(form, q[None], k[None])
    scale = dim**-0.5
    keys = Int8Keys.of(k, q, dtype, recipe)
    seen = torch.nn.functional.pad(visible_keys(64, 300, True, (-1, -1)), (0, 84))
    bounds = score_bounds(Int8Rows.of(q.transpose(0, 1), scale, keys), keys, range(3), seen, softcap)
    rows, columns = (q * scale).transpose(0, 1), k[:, 0]
    terms = rows[:, :, None] * columns  # [heads, rows, keys, dim]
    ways = [
        rows @ columns.T,
        (q.transpose(0, 1) @ columns.T) * scale,
        rows.double() @ columns.double().T,
        terms.cumsum(-1)[..., -1],
        terms.flip(-1).cumsum(-1)[..., -1],
    ]
    for scores in ways:
        scores = torch.tanh(scores / softcap) * softcap if softcap else scores
        scores = torch.nn.functional.pad(scores, (0, 84)).masked_fill(~seen, -math.inf)
        top = scores.unflatten(-1, (-1, 128)).amax(-1)
        assert bool((top <= bounds[0]).all()) and bool((top >= bounds[1]).all())
    if form == "heavy" and recipe == Int8Recipe():  # and they are tight: 2% of the product of the norms
        size = rows.norm(dim=-1)[..., None] * columns.norm(dim=-1).max()
        assert bool(((bounds[0] - bounds[1]).nan_to_num(nan=0.0) <= 0.02 * 2 * size).all())


def test_a_bound_covers_what_a_float32_score_loses_to_a_large_mean():
    """Keys of 3000 and a little in every channel: the codes are fine, but not the scores."""
    generator = torch.Generator().manual_seed(0)
    beyond = 0
    for _ in range(20):
        k = 3000 + torch.randn(256, 1, 64, generator=generator) * 1e-3
        q = torch.randn(64, 1, 64, generator=generator)
        q -= q.mean(-1, keepdim=True)
        keys = Int8Keys.of(k, q, torch.float32)
        seen = torch.ones(64, 256, dtype=torch.bool)
        upper, lower = score_bounds(Int8Rows.of(q.transpose(0, 1), 1.0, keys), keys, range(2), seen, 0.0)
        for order in (torch.arange(64), torch.randperm(64, generator=generator)):
            scores = (q[:, 0, None] * k[None, :, 0])[..., order].cumsum(-1)[..., -1]
            top = scores.unflatten(-1, (-1, 128)).amax(-1)
            assert bool((top <= upper[0]).all()) and bool((top >= lower[0]).all())
            exact = (q[:, 0].double() @ k[:, 0].double().T).unflatten(-1, (-1, 128)).amax(-1)
            beyond += int(((top - exact).abs() > 1e-3).sum())
    assert beyond > 100


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    "options",
    [
        {"causal": True},
        {"causal": True, "dense_tail": 70},
        {"window_size": (600, 100)},
        {"softcap": 30.0, "sinks": torch.tensor([-math.inf, 0.0, 3.0, -5.0])},
    ],
)
def test_reference_and_eager_agree_away_from_the_cut_and_attend_what_is_kept(dtype, options):
    inputs = heavy_tailed_inputs(2, 500, 1700, 4, 2, 64, dtype=dtype, seed=5, noise=1.0, drop=(4.0, 40.0))
    threshold = 0.003
    got = blasst_attn_func(*inputs, threshold=threshold, screen="int8", impl="eager", **options, **EVERYTHING)
    decided = reference_attention(*inputs, threshold=threshold, int8_screen=True, **options)
    near = (decided.margin - math.log(threshold)).abs() < 1e-3
    assert bool((near | (got.kept_tiles == decided.kept_tiles)).all()) and float(near.float().mean()) < 0.01
    assert 0.1 < float(got.counts.sparsity) < 0.95
    exact, _ = exact_rule(
        *inputs[:2],
        threshold,
        options.get("causal", False),
        options.get("window_size", (-1, -1)),
        options.get("softcap", 0.0),
        sinks=options.get("sinks"),
    )
    if "dense_tail" not in options:  # most of what the rule skips
        skipped = got.counts.visited.sum() - exact.sum()
        assert int(got.counts.skipped.sum()) > 0.7 * int(skipped)
    follow = {"threshold": threshold, "kept_tiles": got.kept_tiles, **options}
    truth = reference_attention(*inputs, **follow)
    yardstick = reference_attention(*inputs, dtype=dtype, **follow)
    error = (got.out.double() - truth.out).abs().max()
    limit = (yardstick.out.double() - truth.out).abs().max()
    assert error <= 2 * (limit + torch.finfo(dtype).eps * truth.out.abs().max())
    # lse: float32 scores of size 50 at most, and a sum of 1700 terms
    torch.testing.assert_close(got.lse.double(), truth.lse, rtol=1e-5, atol=1e-4)


def test_the_reference_counts_skipped_mass_of_tiles_that_come_before_the_maximum():
    inputs = heavy_tailed_inputs(1, 64, 1000, 1, 1, 16, seed=2, drop=(3.0, 9.0))
    before = reference_attention(*inputs, threshold=0.3, int8_screen=True)
    cold = 128 * int((~before.kept_tiles[0, 0, 0, 1:]).nonzero()[0] + 1)
    inputs.k[:, :128] = inputs.k[:, cold : cold + 128]  # visited first, and skipped
    got = reference_attention(*inputs, threshold=0.3, int8_screen=True)
    assert not bool(got.kept_tiles[0, 0, 0, 0]) and bool((got.skipped_mass > 0).all())
    dense = reference_attention(*inputs)
    torch.testing.assert_close(got.lse - torch.log1p(-got.skipped_mass), dense.lse)
    bound = 2 * got.skipped_mass[0, 0] * inputs.v.double().norm(dim=-1).max()
    assert bool(((got.out - dense.out)[0, :, 0].norm(dim=-1) <= bound).all())


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("options", [{}, {"causal": True, "softcap": 5.0}, {"sinks": torch.ones(4) * 40}])
def test_threshold_0_skips_nothing_and_has_the_bits_of_dense(impl, options):
    inputs = heavy_tailed_inputs(1, 200, 900, 4, 2, 16, seed=7)
    options = {"impl": impl, **options, **EVERYTHING}
    dense = blasst_attn_func(*inputs, **options)
    got = blasst_attn_func(*inputs, threshold=0.0, screen="int8", **options)
    assert torch.equal(got.out, dense.out) and torch.equal(got.lse, dense.lse)
    assert torch.equal(got.kept_tiles, dense.kept_tiles) and int(got.counts.skipped.sum()) == 0


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_rows_that_meet_a_nan_or_an_infinity_keep_everything(impl, value):
    inputs = heavy_tailed_inputs(1, 192, 1000, 1, 1, 16, seed=3, noise=0.2)
    clean = blasst_attn_func(*inputs, threshold=0.01, causal=True, screen="int8", impl=impl, **EVERYTHING)
    inputs.k[0, 900, 0, 4] = value  # seen by rows from 92 on
    got = blasst_attn_func(*inputs, threshold=0.01, causal=True, screen="int8", impl=impl, **EVERYTHING)
    assert torch.equal(got.kept_tiles[0, 0, 0], clean.kept_tiles[0, 0, 0])
    assert int((~clean.kept_tiles[0, 0]).sum(-1).min()) > 1
    assert bool(got.kept_tiles[0, 0, 1:].all())
    inputs.k[0, 900, 0, 4] = 0
    inputs.q[0, 70, 0, 1] = value
    got = blasst_attn_func(*inputs, threshold=0.01, causal=True, screen="int8", impl=impl, **EVERYTHING)
    assert int(got.kept_tiles[0, 0, 1, :-1].sum()) >= 7 and not bool(got.kept_tiles[0, 0, 2].all())


def test_a_sink_is_compared_with():
    inputs = heavy_tailed_inputs(1, 64, 500, 2, 2, 16, seed=3, noise=0.2)
    inputs.k.add_(0.5)
    options = {"threshold": 0.01, "screen": "int8", "impl": "eager", **EVERYTHING}
    got = blasst_attn_func(*inputs, sinks=torch.tensor([-math.inf, 60.0]), **options)
    assert bool(got.kept_tiles[0, 0].any()) and not bool(got.kept_tiles[0, 1].any())
    assert bool((got.out[:, :, 1] == 0).all()) and bool((got.lse[0, 1] == 60).all())


@pytest.mark.parametrize("impl", IMPLS)
def test_packed_and_paged_sequences_are_those_alone(impl):
    lengths, rows = [700, 0, 130, 400], [100, 30, 64, 0]
    cu_q, cu_k = (torch.tensor([0, *x]).cumsum(0).int() for x in (rows, lengths))
    x = heavy_tailed_inputs(1, sum(rows), sum(lengths), 4, 2, 16, seed=9, noise=0.3)
    q, k, v = (y[0] for y in x)
    options = {"threshold": 0.01, "causal": True, "screen": "int8", "impl": impl, **EVERYTHING}
    got = blasst_attn_varlen_func(q, k, v, cu_q, cu_k, max(rows), max(lengths), **options)
    assert int(got.counts.skipped.sum()) > 5
    cache = torch.full((4, max(lengths), 2, 16), math.nan)
    caches = [cache, cache.clone()]
    for i, n in enumerate(lengths):
        own = [y[s[i] : s[i + 1]][None] for y, s in ((q, cu_q), (k, cu_k), (v, cu_k))]
        for at, y in zip(caches, own[1:], strict=True):
            at[i, :n] = y[0]
        if not rows[i]:
            continue
        alone = blasst_attn_func(*own, **options)
        assert torch.equal(got.out[cu_q[i] : cu_q[i + 1]], alone.out[0])
        tiles = alone.kept_tiles.shape[2:]
        assert torch.equal(got.kept_tiles[i, :, : tiles[0], : tiles[1]], alone.kept_tiles[0])
    (pages, table), (values, _) = (pages_from(y, 16, fill=math.nan) for y in caches)
    paged = blasst_attn_varlen_func(
        q, pages, values, cu_q, cu_k, max(rows), max(lengths), block_table=table, **options
    )
    assert torch.equal(paged.out, got.out) and torch.equal(paged.counts.skipped, got.counts.skipped)


@pytest.mark.parametrize("impl", IMPLS)
def test_under_a_block_mask_only_its_tiles_count(impl):
    inputs = heavy_tailed_inputs(1, 130, 900, 2, 1, 16, seed=4, noise=0.3)
    options = {"threshold": 0.01, "screen": "int8", "impl": impl, **EVERYTHING}
    free = blasst_attn_func(*inputs, **options)
    mask = torch.ones(1, 2, 3, 8, dtype=torch.bool)
    same = blasst_attn_func(*inputs, block_mask=mask, **options)
    assert torch.equal(same.out, free.out) and torch.equal(same.kept_tiles, free.kept_tiles)
    mask[0, 0] = ~free.kept_tiles[0, 0]  # what is left is compared with itself
    got = blasst_attn_func(*inputs, block_mask=mask, **options)
    assert bool((mask | ~got.kept_tiles).all()) and bool(got.kept_tiles[0, 0].any(-1).all())
    assert torch.equal(got.kept_tiles[0, 1], free.kept_tiles[0, 1])
    assert torch.equal(got.counts.visited, mask.sum((-1, -2)))


def test_refusals():
    x = heavy_tailed_inputs(1, 70, 200, 2, 1, 16)
    with pytest.raises(UnsupportedError, match="max_skipped_mass"):
        blasst_attn_func(*x, threshold=0.1, screen="int8", max_skipped_mass=0.1)
    with pytest.raises(UnsupportedError, match="return_mass_bound"):
        blasst_attn_func(*x, threshold=0.1, screen="int8", return_mass_bound=True)
    with pytest.raises(ValueError, match="without a threshold"):
        blasst_attn_func(*x, screen="int8")
    with pytest.raises(ValueError, match="int8"):
        blasst_attn_func(*x, threshold=0.1, screen="int4")
    with pytest.raises(TypeError, match="int8"):
        blasst_attn_func(*x, threshold=0.1, screen=8)
    for impl in ("triton", "hopper"):
        with pytest.raises(UnsupportedError, match='no screen="int8"'):
            blasst_attn_func(*x, threshold=0.1, screen="int8", impl=impl)


def test_the_script_compares_ways_to_round(tmp_path):
    inputs = heavy_tailed_inputs(1, 700, 700, 4, 2, 16, noise=1.0, seed=11)
    torch.save(dict(zip("qkv", inputs, strict=True)), tmp_path / "qkv.pt")
    command = [sys.executable, SCRIPT, tmp_path / "qkv.pt", "--length", "600", "--every", "2"]
    done = subprocess.run([*command, "--thresholds", "0.01,0.1"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    title, _, *lines = done.stdout.splitlines()
    assert title == "captured: qkv, first 600 tokens, every 2. query tile" and len(lines) == 13
    running, final, *screened = (list(map(float, re.findall(r"([0-9.]+)%", line))) for line in lines)
    assert 0 < running[0] <= final[0] and 0 < screened[0][0] <= final[0]
    assert all(len(shares) == 2 and shares[1] <= final[1] for shares in screened)


def test_a_screened_call_compiles_as_one_graph():
    inputs = heavy_tailed_inputs(1, 130, 700, 4, 2, 16, seed=10, noise=0.3)

    def f(q, k, v):
        result = blasst_attn_func(q, k, v, threshold=0.02, screen="int8", return_counts=True)
        return result.out, result.counts.screened

    torch._dynamo.reset()
    compiled = torch.compile(f, fullgraph=True, backend="aot_eager")
    for a, b in zip(compiled(*inputs), f(*inputs), strict=True):
        assert torch.equal(a, b) and bool((b != 0).any())
