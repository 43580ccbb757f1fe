"""screen=: no tile is screened that the rule keeps, and no bit of a result changes."""

import math
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from blasst import KeyCodes, UnsupportedError, blasst_attn_with_kvcache
from blasst.core.screen import upper_scores
from blasst.kernels import repeats, select
from blasst.testing import heavy_tailed_inputs, pages_from

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "screened_tiles.py"
IMPLS = ["eager", "reference"]
EVERYTHING = {"return_lse": True, "return_counts": True, "return_kept_tiles": True}


def lengths_of(*values):
    return torch.tensor(values, dtype=torch.int32)


def assert_same_bits(got, plain):
    """Everything that a call returns, but for the count of screened tiles."""
    for name in ("out", "lse", "kept_tiles"):
        a, b = getattr(got, name), getattr(plain, name)
        torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True, msg=name)
    assert torch.equal(got.counts.skipped, plain.counts.skipped)
    assert torch.equal(got.counts.visited, plain.counts.visited)
    assert plain.counts.screened is None
    assert bool((got.counts.screened <= got.counts.skipped).all())


def screened_and_plain(inputs, bits, impl, **options):
    """(with codes, without), both checked to be the same."""
    codes = KeyCodes.from_keys(inputs[1], bits, options.get("cache_seqlens"), options.get("block_table"))
    options = {**EVERYTHING, **options, "impl": impl}
    got = blasst_attn_with_kvcache(*inputs, screen=codes, **options)
    plain = blasst_attn_with_kvcache(*inputs, **options)
    assert_same_bits(got, plain)
    return got, plain


def edit_keys(draw, k):
    """Make the keys hard to encode or to bound; in place."""
    form = draw(st.sampled_from(["heavy", "heavy", "constant", "channels", "few values", "huge", "odd"]))
    dim = k.shape[-1]
    if form == "constant":
        k[..., draw(st.integers(0, dim - 1)) :] = 0.75
    if form == "channels":  # ranges of 20 octaves
        k *= 2.0 ** torch.linspace(-16, 4, dim).to(k.dtype)
    if form == "few values":  # many keys on bounds of bins, and many equal scores
        k.copy_((k * 2).round() / 2)
    if form == "huge":
        k[..., 0] *= 3e3
    if form == "odd":
        for _ in range(3):
            place = [draw(st.integers(0, n - 1)) for n in k.shape]
            k[tuple(place)] = draw(st.sampled_from([math.nan, math.inf, -math.inf, 6e4, 1e-7]))


@st.composite
def decode_calls(draw):
    kv_heads, group = draw(st.sampled_from([1, 2])), draw(st.sampled_from([1, 3, 4, 6, 7]))
    capacity = draw(st.sampled_from([65, 449, 700, 1000]))
    inputs = heavy_tailed_inputs(
        2,
        draw(st.sampled_from([1, 1, 2, 8])),
        capacity,
        kv_heads * group,
        kv_heads,
        draw(st.sampled_from([8, 16, 40])),
        16,
        dtype=draw(st.sampled_from([torch.float16, torch.bfloat16, torch.float32])),
        seed=draw(st.integers(0, 10**6)),
        noise=draw(st.sampled_from([0.2, 2.0])),
        drop=draw(st.sampled_from([(8.0, 40.0), (1.0, 12.0)])),
    )
    edit_keys(draw, inputs.k)
    short = draw(st.sampled_from([0, 1, 63, 64, 65, 128, 256, 300, 320, 448, 700]))
    options = {
        "cache_seqlens": lengths_of(min(short, capacity), capacity - draw(st.sampled_from([0, 0, 1, 60]))),
        "threshold": draw(st.sampled_from([0.0, 1e-4, 0.01, 0.1, 0.3, 1.0])),
        "causal": draw(st.booleans()),
        "window_size": draw(st.sampled_from([(-1, -1), (-1, -1), (300, 0), (200, 30)])),
        "softcap": draw(st.sampled_from([0.0, 0.0, 10.0])),
        "softmax_scale": draw(st.sampled_from([None, None, None, -0.3, 0.0])),
    }
    if draw(st.booleans()):
        options["sinks"] = torch.linspace(-2, 6, kv_heads * group)
    return inputs, options


@settings(max_examples=200)
@given(decode_calls(), st.sampled_from([4, 5, 6]), st.sampled_from(IMPLS))
def test_no_bit_changes(call, bits, impl):
    inputs, options = call
    screened_and_plain(inputs, bits, impl, **options)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_most_tiles_that_are_skipped_are_screened(impl, dtype):
    inputs = heavy_tailed_inputs(2, 2, 1900, 12, 2, 64, dtype=dtype, noise=1.0, seed=3)
    shares = []
    for bits in (4, 5, 6):
        got, _ = screened_and_plain(inputs, bits, impl, threshold=0.01, causal=True)
        assert int(got.counts.skipped.sum()) > 50
        shares.append(int(got.counts.screened.sum()) / int(got.counts.skipped.sum()))
    assert shares == sorted(shares) and shares[0] > 0.5 and shares[2] > 0.9


@pytest.mark.parametrize("impl", IMPLS)
def test_the_keys_of_a_screened_tile_do_not_matter(impl):
    inputs = heavy_tailed_inputs(1, 1, 1000, 4, 1, 16, drop=(30.0, 40.0), seed=4)
    codes = KeyCodes.from_keys(inputs.k, 6)
    options = {"threshold": 0.01, "impl": impl, **EVERYTHING}
    want = blasst_attn_with_kvcache(*inputs, **options)
    plain = blasst_attn_with_kvcache(*inputs, screen=codes, **options)
    assert torch.equal(plain.counts.screened, plain.counts.skipped) and int(plain.counts.skipped) > 3
    gone = ~want.kept_tiles[0, 0, 0].repeat_interleave(64)[:1000]
    inputs.k[:, gone] = math.nan
    inputs.v[:, gone] = math.nan
    assert_same_bits(blasst_attn_with_kvcache(*inputs, screen=codes, **options), want)
    broken = blasst_attn_with_kvcache(*inputs, **options)
    assert bool(broken.out.isnan().any())  # without codes they do


def test_the_script_says_how_much_is_screened(tmp_path):
    inputs = heavy_tailed_inputs(1, 1500, 1500, 4, 2, 16, noise=1.0, seed=11)
    torch.save(dict(zip("qkv", inputs, strict=True)), tmp_path / "qkv.pt")
    command = [sys.executable, SCRIPT, tmp_path / "qkv.pt", "--sparsities", "0.4,0.6", "--steps", "2"]
    done = subprocess.run([*command, "--length", "1400"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    title, *lines = done.stdout.splitlines()
    assert title == "captured: qkv, 1400 keys, 2 steps" and len(lines) == 2
    for line, wanted in zip(lines, (40, 60), strict=True):
        sparsity, *shares = map(float, re.findall(r"([0-9.]+)%", line))
        assert abs(sparsity - wanted) < 3 and len(shares) == 3
        assert 30 < shares[0] <= shares[1] <= shares[2] <= 100


# --- the bound ----------------------------------------------------------------------------------------------


def tight_tiles(seed, bits, dim, dtype, heads=8, tiles=6):
    """q and keys of which the first of every tile reaches the bound exactly, but for rounding.

    Its channels are the upper ends of their ranges where q is positive and the lower ends elsewhere, which is
    half a step from the middle of its bin in the direction of q; ends and steps are exact in float16.
    """
    generator = torch.Generator().manual_seed(seed)

    def whole(low, high, *shape):
        return torch.randint(low, high, shape, generator=generator).float()

    fine = dtype == torch.float32
    low = whole(-200, 200, tiles, heads, dim) * (0.0137 if fine else 2**-4)
    low = low.half().float()
    step = (whole(1, 9, tiles, heads, dim) * (0.0113 if fine else 2**-8)).half().float()
    if not fine:
        low, step = low.round(), step * 2**4 * 2 ** (4 - bits)
    span = step * 2**bits
    q = torch.randn(heads, dim, generator=generator).to(dtype).float()
    key = torch.rand(tiles, 64, heads, dim, generator=generator) * span[:, None] + low[:, None]
    best = torch.where(q > 0, low + span, low)
    key[:, 0], key[:, 1] = best, 2 * low + span - best
    key = key.to(dtype)
    assert torch.equal(key[:, 0].float(), best) and torch.equal(key[:, 1].float(), 2 * low + span - best)
    return q.to(dtype), key.flatten(0, 1)[None]


def summed(terms):
    """The float32 sum one after the other."""
    total = torch.zeros_like(terms[..., 0])
    for i in range(terms.shape[-1]):
        total = total + terms[..., i]
    return total


@settings(max_examples=20)
@given(
    st.integers(0, 10**6),
    st.sampled_from([4, 5, 6]),
    st.sampled_from([8, 64, 128]),
    st.sampled_from([torch.float32, torch.bfloat16]),
    st.sampled_from([0.0, 0.5, 20.0]),
    st.sampled_from([0.088, 0.37, -0.21]),
)
def test_the_bound_covers_the_score_however_it_was_added_up(seed, bits, dim, dtype, softcap, scale):
    q, k = tight_tiles(seed, bits, dim, dtype)
    q = q if scale > 0 else -q
    codes = KeyCodes.from_keys(k, bits)
    assert bool(codes.screenable.all())
    screen = (codes.codes, codes.low, codes.step)
    rows = q.float()[:, None] * scale
    tiles = range(k.shape[1] // 64)
    upper = upper_scores(rows, screen, 0, tiles, k.shape[1], softcap)[:, 0]  # [heads, tiles]
    keys = k[0].float().transpose(0, 1)  # [heads, keys, dim]
    terms = rows * keys
    order = terms.abs().argsort(-1)
    ways = [
        (rows @ keys.transpose(1, 2))[:, 0],
        summed(terms),
        summed(terms.flip(-1)),
        summed(terms.gather(-1, order)),
        summed(terms.gather(-1, order.flip(-1))),
        terms.unflatten(-1, (-1, 8)).sum(-1).sum(-1),
        summed(q.float()[:, None] * keys) * scale,
    ]
    for scores in ways:
        scores = torch.tanh(scores / softcap) * softcap if softcap else scores
        assert bool((upper >= scores.unflatten(-1, (-1, 64)).amax(-1)).all())
    if not softcap:
        exact = (rows.double() @ keys.double().transpose(1, 2))[:, 0].unflatten(-1, (-1, 64)).amax(-1)
        magnitude = rows.double().abs() @ keys.double().abs().amax(1, keepdim=True).transpose(1, 2)
        assert bool((upper - exact <= 1e-3 * magnitude[:, 0]).all())  # and is tight


@pytest.mark.parametrize("bits", [4, 6])
def test_a_tile_on_the_cut_is_kept(bits):
    """Threshold 1 and the tile's best key in an anchor too: its score is not below the anchor maximum."""
    tiles = 0
    for seed in range(12):
        q, k = tight_tiles(seed, bits, 64, torch.float32)
        for tile in range(1, 4):
            own = k.clone()
            for anchor in (0, 4, 5):
                own[:, 64 * anchor : 64 * (anchor + 1)] = own[:, 64 * tile, None] / 2
            own[:, 0] = own[:, 64 * tile]
            inputs = q[None, None], own, torch.ones_like(own)
            _, plain = screened_and_plain(inputs, bits, "eager", threshold=1.0, softmax_scale=0.125)
            tiles += int(plain.kept_tiles[..., tile].sum())
    assert tiles > 200  # tiles exactly on the cut


def test_a_tile_that_is_not_whole_has_no_bound():
    inputs = heavy_tailed_inputs(1, 1, 320, 1, 1, 16)
    codes = KeyCodes.from_keys(inputs.k, 4)
    screen, q = (codes.codes, codes.low, codes.step), inputs.q[0].transpose(0, 1)
    upper = upper_scores(q, screen, 0, range(1, 5), 319, 0.0)  # the codes are of 320 keys
    assert upper[0, 0].isposinf().tolist() == [False, False, False, True]
    assert (
        upper_scores(q, screen, 0, range(3, 9), 600, 0.0)[0, 0].isposinf().tolist()
        == [False] * 2 + [True] * 4
    )
    assert bool(upper_scores(q, screen, 0, range(2), 63, 0.0).isposinf().all())


def test_a_score_that_may_overflow_has_no_bound():
    k = torch.full((1, 256, 1, 4), 6e4)
    k[:, 64:128] = 1.0
    k[:, 200:] = 0.0  # a range that begins at 0
    codes = KeyCodes.from_keys(k, 4)
    screen = codes.codes, codes.low, codes.step
    for value in (math.nan, math.inf, -math.inf, 1e34):
        q = torch.full((1, 1, 4), 1e-3)
        q[..., 2] = value
        upper = upper_scores(q, screen, 0, range(4), 256, 5.0)[0, 0]
        assert upper.isposinf().tolist() == [True, value != 1e34, True, True]


@pytest.mark.parametrize("precision", ["high", "medium"])
def test_coarser_matrix_products_widen_the_bound(precision):
    inputs = heavy_tailed_inputs(1, 1, 1900, 4, 1, 64, noise=1.0, seed=3)
    codes = KeyCodes.from_keys(inputs.k, 6)
    rows, keys = inputs.q[0].transpose(0, 1), inputs.k[0].permute(1, 2, 0)
    coarse = {"high": 10, "medium": 7}[precision]
    cut = [(x.view(torch.int32) & -(1 << (23 - coarse))).view(torch.float32) for x in (rows, keys)]
    scores = (cut[0].view(1, 4, 64) @ cut[1])[..., : 29 * 64].unflatten(-1, (-1, 64)).amax(-1)
    arguments = rows.view(1, 4, 64), (codes.codes, codes.low, codes.step), 0, range(29), 1900, 0.0
    exact = upper_scores(*arguments)
    torch.set_float32_matmul_precision(precision)
    try:
        wide = upper_scores(*arguments)
    finally:
        torch.set_float32_matmul_precision("highest")
    assert bool((wide > exact).all()) and bool((wide >= scores).all())


# --- calls --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("impl", IMPLS)
def test_a_call_brings_the_codes_up_to_date_for_the_keys_it_writes(impl):
    long = heavy_tailed_inputs(2, 1, 460, 6, 2, 16, dtype=torch.bfloat16, seed=5)
    caches = [torch.full_like(x, math.nan) for x in (*long[1:], *long[1:])]
    lengths = lengths_of(310, 120)
    for cache, x in zip(caches, (*long[1:], *long[1:]), strict=True):
        for i, n in enumerate(lengths.tolist()):
            cache[i, :n] = x[i, :n]
    codes = KeyCodes.from_keys(caches[0], 6, lengths)
    screened = 0
    for step in range(12):
        if step == 7:  # 50 keys are taken back; others take their place, and fill a tile at once
            lengths -= 50
            long = heavy_tailed_inputs(2, 1, 460, 6, 2, 16, dtype=torch.bfloat16, seed=6)
        new = [torch.stack([x[i, n : n + 8] for i, n in enumerate(lengths.tolist())]) for x in long[1:]]
        options = {"threshold": 0.05, "impl": impl, "cache_seqlens": lengths, **EVERYTHING}
        got = blasst_attn_with_kvcache(long.q, *caches[:2], *new, screen=codes, **options)
        assert_same_bits(got, blasst_attn_with_kvcache(long.q, *caches[2:], *new, **options))
        screened += int(got.counts.screened.sum())
        lengths += 8
        fresh = KeyCodes.from_keys(caches[0], 6, lengths)
        assert torch.equal(codes.encoded, fresh.encoded)
        there = fresh.screenable
        assert torch.equal(codes.screenable, there) and torch.equal(codes.low[there], fresh.low[there])
        assert torch.equal(codes.codes[there], fresh.codes[there])
    assert screened > 20


def test_a_refused_call_leaves_cache_and_codes_alone():
    inputs = heavy_tailed_inputs(1, 1, 200, 2, 1, 16)
    codes = KeyCodes.from_keys(inputs.k, 4, 120)
    before = codes.low.clone(), inputs.k.clone()
    new = torch.ones(1, 10, 1, 16)
    for change in ({"impl": "triton"}, {"return_mass_bound": True}):
        with pytest.raises(UnsupportedError):
            blasst_attn_with_kvcache(
                *inputs, new, new, cache_seqlens=120, screen=codes, threshold=0.1, **change
            )
    torch.testing.assert_close((codes.low, inputs.k), before, rtol=0, atol=0, equal_nan=True)
    assert codes.encoded.tolist() == [1]


@pytest.mark.parametrize("page_size", [16, 48, 128])
def test_pages(page_size):
    inputs = heavy_tailed_inputs(2, 2, 700, 6, 2, 16, dtype=torch.float16, seed=7)
    lengths = lengths_of(700, 333)
    (k, table), (v, _) = (pages_from(x, page_size, fill=math.nan) for x in inputs[1:])
    got, _ = screened_and_plain(
        (inputs.q, k, v), 6, "eager", block_table=table, cache_seqlens=lengths, threshold=0.05, causal=True
    )
    assert int(got.counts.screened.sum()) > 10


@pytest.mark.parametrize("impl", IMPLS)
def test_under_a_block_mask_only_its_tiles_are_screened(impl):
    inputs = heavy_tailed_inputs(1, 1, 1500, 4, 2, 16, seed=8)
    mask = torch.rand(1, 2, 1, 24, generator=torch.Generator().manual_seed(1)) < 0.6
    got, _ = screened_and_plain(inputs, 6, impl, threshold=0.02, block_mask=mask)
    assert 5 < int(got.counts.screened.sum()) <= int(got.counts.skipped.sum()) < int(mask.sum())


def test_strides_and_more_codes_than_the_cache_has_tiles():
    inputs = heavy_tailed_inputs(2, 1, 900, 4, 2, 16, dtype=torch.float16, seed=9)
    wide = torch.full((2, 2, 900, 48), math.nan, dtype=torch.float16)
    wide[..., 8:40:2] = inputs.k.transpose(1, 2)
    k = wide[..., 8:40:2].transpose(1, 2)
    got, plain = screened_and_plain((inputs.q, k, inputs.v), 6, "eager", threshold=0.05)
    assert int(got.counts.screened.sum()) > 10
    long = KeyCodes.empty(2, 4096, 2, 16, 6, dtype=torch.float16)
    long.append(k, 900)
    more = blasst_attn_with_kvcache(inputs.q, k, inputs.v, screen=long, threshold=0.05, **EVERYTHING)
    assert_same_bits(more, plain)
    assert torch.equal(more.counts.screened, got.counts.screened)


def test_the_op_passes_torchs_own_checks_and_compiles_as_one_graph():
    inputs = heavy_tailed_inputs(1, 1, 700, 4, 2, 16, seed=10)
    codes = KeyCodes.from_keys(inputs.k, 5)
    lengths = lengths_of(700)

    def f(q, k, v, n):
        options = {"threshold": 0.02, "screen": codes, "return_counts": True}
        result = blasst_attn_with_kvcache(q, k, v, cache_seqlens=n, **options)
        return result.out, result.counts.screened

    torch._dynamo.reset()
    compiled = torch.compile(f, fullgraph=True, backend="aot_eager")
    for a, b in zip(compiled(*inputs, lengths), f(*inputs, lengths), strict=True):
        assert torch.equal(a, b) and bool((b != 0).any())
    arguments = (
        *inputs, "decode", torch.full((1,), 0.05), 0.25, True, [-1, -1], 0.0, None, None, None, None, lengths,
        None, None, 1, 700, None, None, None, 0, (codes.codes, codes.low, codes.step), False, False, True,
        False, True, "eager",
    )  # fmt: skip
    results = torch.library.opcheck(torch.ops.blasst.attention, arguments)
    assert set(results.values()) == {"SUCCESS"}


@pytest.mark.parametrize("impl", ["triton", "hopper"])
def test_gpu_kernels_refuse(impl):
    inputs = heavy_tailed_inputs(1, 1, 300, 2, 1, 16)
    codes = KeyCodes.from_keys(inputs.k, 4)
    with pytest.raises(UnsupportedError, match=f"{impl}: it takes no screen.*supported by eager, reference"):
        blasst_attn_with_kvcache(*inputs, threshold=0.1, screen=codes, impl=impl)


def test_auto_takes_eager_where_a_gpu_kernel_would_serve(monkeypatch):
    seen = []

    def run(problem, impl):
        seen.append(problem)
        return select.KERNELS["eager"].run(problem)

    monkeypatch.setattr(select, "run", run)
    inputs = heavy_tailed_inputs(1, 1, 300, 2, 1, 16)
    blasst_attn_with_kvcache(*inputs, threshold=0.1, screen=KeyCodes.from_keys(inputs.k, 4))
    monkeypatch.setattr(select, "AUTO_ELSEWHERE", select.AUTO_ON_GPU)
    monkeypatch.setattr("blasst.kernels.triton.unsupported_reason", lambda problem: None)
    monkeypatch.setattr("blasst.kernels.hopper.unsupported_reason", lambda problem: None)
    assert select.choose(seen[0], "auto").name == "eager"
    assert select.choose(replace(seen[0], screen=()), "auto").name == "hopper"


def test_a_prepared_call_never_serves_codes(monkeypatch):
    inputs = heavy_tailed_inputs(1, 1, 300, 2, 1, 16)
    options = {"threshold": torch.full((1,), 0.1), "cache_seqlens": lengths_of(300)}
    served = []
    monkeypatch.setattr(repeats, "call_key", lambda *_: ("key",))
    monkeypatch.setattr(repeats, "find", lambda key: "plan")
    monkeypatch.setattr(repeats, "run", lambda plan, *_: served.append(plan))
    blasst_attn_with_kvcache(*inputs, **options)
    assert served == ["plan"]
    assert blasst_attn_with_kvcache(*inputs, **options, screen=KeyCodes.from_keys(inputs.k, 4)) is not None
    assert served == ["plan"]


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"screen": 4}, TypeError, "got int, want KeyCodes"),
        ({"threshold": None}, ValueError, "got KeyCodes without a threshold, want threshold="),
        ({"max_skipped_mass": 0.1}, UnsupportedError, "not supported beside max_skipped_mass"),
        ({"return_mass_bound": True}, UnsupportedError, "not supported beside return_mass_bound"),
        ({"cache_leftpad": lengths_of(3)}, UnsupportedError, "not supported beside cache_leftpad"),
        ({"q": torch.ones(1, 9, 4, 16)}, UnsupportedError, "not supported beside 9 new tokens"),
        (
            {x: torch.zeros(1, 300, 2, 16).to(torch.float8_e4m3fn) for x in ("k_cache", "v_cache")},
            UnsupportedError,
            "not supported beside a cache of torch.float8_e4m3fn",
        ),
        (
            {"screen": KeyCodes.empty(1, 255, 2, 16, 4, dtype=torch.float32)},
            ValueError,
            r"got codes of .* \(1, 3, 2, 16\), want \(1, 4, 2, 16\) \(or more tiles\)",
        ),
        (
            {"screen": KeyCodes.empty(2, 300, 2, 16, 4, dtype=torch.float32)},
            ValueError,
            r"got codes of .* \(2, 4, 2, 16\), want \(1, 4, 2, 16\)",
        ),
        (
            {"screen": KeyCodes.empty(1, 300, 2, 16, 4)},
            ValueError,
            "got codes of torch.bfloat16 keys on cpu, want torch.float32 on cpu like the cache",
        ),
    ],
)
def test_what_cannot_be_screened_is_refused(change, error, message):
    q, k, v = heavy_tailed_inputs(1, 1, 300, 4, 2, 16)
    call = {
        "q": q,
        "k_cache": k,
        "v_cache": v,
        "threshold": 0.1,
        "screen": KeyCodes.from_keys(k, 4),
        **change,
    }
    with pytest.raises(error, match=f"^screen: {message}"):
        blasst_attn_with_kvcache(**call)
