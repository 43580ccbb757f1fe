"""Progressive keys: what is stored of a key, what a tile is in between, and attention over keys as stored."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_key_codes import keys, normal
from test_screen import EVERYTHING, assert_same_bits, edit_keys, lengths_of

from blasst import KeyCodes, ProgressiveKeys, UnsupportedError, blasst_attn_with_kvcache
from blasst.core.key_codes import unpack_codes
from blasst.kernels import select
from blasst.testing import heavy_tailed_inputs, pages_from

DTYPES = [torch.float16, torch.bfloat16]


def same_bits(a, b):
    return torch.equal(a.contiguous().view(torch.int16), b.contiguous().view(torch.int16))


def spread(x):
    """low or step of each key slot, float64 (batch, slots, heads, dim)."""
    return x.double().repeat_interleave(64, 1)


def code_of(store):
    """The 16 bits of every key, float64 (batch, slots, heads, dim)."""
    upper, rest = store.planes[..., : 8 * store.bits, :], store.planes[..., 8 * store.bits : 64, :]
    parts = (unpack_codes(upper, store.bits), unpack_codes(rest, 8 - store.bits), store.planes[..., 64:, :])
    places = (2.0 ** (16 - store.bits), 256.0, 1.0)
    code = sum(part.double() * place for part, place in zip(parts, places, strict=True))
    return code.transpose(2, 3).flatten(1, 2)


def bin_ends(store):
    """Ends of the bins of the upper bits, exact; float64 (batch, slots, heads, dim)."""
    codes, low, step = store.upper()
    code = unpack_codes(codes, store.bits).double().transpose(2, 3).flatten(1, 2)
    return [spread(low) + spread(step) * (code + i) for i in (0, 1)]


@settings(max_examples=150)
@given(keys(), st.sampled_from([4, 5, 6]))
def test_every_stored_key_lies_in_its_bin_and_close_to_the_key_that_came(k, bits):
    k = k.to(torch.bfloat16) if k.dtype == torch.float32 else k
    store = ProgressiveKeys.from_keys(k, bits)
    stored, codes = store.keys(), KeyCodes.from_keys(k, bits)
    assert torch.equal(store.screenable, codes.screenable)
    ok = store.screenable.repeat_interleave(64, 1)[..., None].expand_as(k)
    assert same_bits(stored[~ok], k[~ok])  # what cannot be encoded is kept as it came
    below, above = bin_ends(store)
    assert bool(((below <= stored.double()) & (stored.double() <= above))[ok].all())
    fine = spread(store.step) * 2.0 ** (bits - 16)
    assert bool(((stored.double() - k.double()).abs() <= fine * (1 + 2.0**-12))[ok].all())  # float32's part
    unrounded = spread(store.low) + fine * (code_of(store) + 0.5)
    assert bool(((unrounded - k.double()).abs() <= fine / 2 * (1 + 2.0**-30))[ok].all())  # float64's here
    width = k.double().unflatten(1, (-1, 64)).amax(2) - k.double().unflatten(1, (-1, 64)).amin(2)
    share = 128 if k.dtype == torch.bfloat16 else 16
    exact = ok & (k.double().abs() > spread(width) / share) & (k.double().abs() >= 2.0**-20)
    assert torch.equal(stored[exact], k[exact])
    assert torch.equal(store.low[store.screenable], codes.low[store.screenable])
    assert torch.equal(store.step[store.screenable], codes.step[store.screenable])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bits", [4, 5, 6])
def test_the_stored_key_is_one_fused_multiply_add_and_one_conversion(bits, dtype):
    k = (normal(1, 256, 2, 16) * 2.0 ** torch.linspace(-12, 12, 16)).to(dtype)
    store = ProgressiveKeys.from_keys(k, bits)
    planes = store.planes.transpose(2, 3)  # [batch, tiles, 128, heads, dim], by the layout in words
    by_hand = torch.empty_like(k)
    for key in range(256):
        tile, i = divmod(key, 64)
        rows = planes[0, tile].int()
        code = rows[64 + i]
        for p in range(8 - bits):
            code = code + ((rows[8 * bits + (i // 8) * (8 - bits) + p] >> i % 8 & 1) << (8 + p))
        for p in range(bits):
            code = code + ((rows[(i // 8) * bits + p] >> i % 8 & 1) << (16 - bits + p))
        low, step = store.low[0, tile].double(), store.step[0, tile].double()
        by_hand[0, key] = (low + step * 2.0 ** (bits - 16) * (code + 0.5)).float().to(dtype)
    assert same_bits(store.keys(), by_hand)
    assert torch.equal(store.upper()[0], KeyCodes.from_keys(k, bits).codes)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rounding_takes_no_key_out_of_its_bin(dtype):
    """Small keys in a wide channel, where keys are further apart than codes, at and near the ends of bins."""
    k = torch.zeros(1, 64, 1, 4).to(dtype)
    k[0, 0], k[0, 1] = -8.0, 8.0
    ends = torch.arange(-15, 16) / 2.0**5
    for i, end in enumerate(ends[:31].tolist()):
        k[0, 2 + i] = end * 0.5
        k[0, 33 + i] = torch.nextafter(torch.tensor(end * 0.5), torch.tensor(-1.0)).to(dtype)
    for bits in (4, 5, 6):
        store = ProgressiveKeys.from_keys(k, bits)
        below, above = bin_ends(store)
        stored = store.keys().double()
        assert bool(store.screenable.all()) and bool(((below <= stored) & (stored <= above)).all())


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 3e38, -1e6])
def test_what_float16_cannot_hold_leaves_its_tile_and_head_as_it_came(value):
    k = normal(2, 256, 3, 8).bfloat16()
    k[1, 130, 2, 5] = value
    store = ProgressiveKeys.from_keys(k, 5)
    want = torch.ones(2, 4, 3, dtype=torch.bool)
    want[1, 2, 2] = False
    assert torch.equal(store.screenable, want)
    assert same_bits(store.keys()[1, 128:192, 2], k[1, 128:192, 2])


@pytest.mark.parametrize("bits", [4, 5, 6])
def test_memory_is_that_of_16_bit_keys_and_a_32nd(bits):
    k = torch.zeros(2, 4096, 2, 128, dtype=torch.bfloat16)
    store = ProgressiveKeys.empty(2, 4096, 2, 128, bits)
    assert store.nbytes == k.nbytes + k.nbytes // 32
    assert store.nbytes + k.nbytes <= 1.016 * 2 * k.nbytes  # keys and values
    assert store.stand_in().shape == k.shape and store.stand_in().untyped_storage().nbytes() == 2


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("new", [1, 3, 8, 64, 100, 330])
def test_keys_come_in_any_portions(new, dtype):
    k = normal(3, 330, 2, 7, seed=2).to(dtype)
    shift = torch.tensor([0, 5, 100], dtype=torch.int32)
    want = ProgressiveKeys.from_keys(torch.nn.functional.pad(k, (0, 0, 0, 0, 0, 100)), 6, 330 + 0 * shift)
    store = ProgressiveKeys.empty(3, 430, 2, 7, 6, dtype=dtype)
    store.planes.fill_(0xFF)  # NaN
    early = normal(3, 100, 2, 7, seed=3).to(dtype)
    store.append(early, 0)
    for begin in range(0, 330, new):
        part = k[:, begin : begin + new]
        store.append(part, shift + begin)
        stored, length = store.keys(), begin + part.shape[1]
        whole = length // 64 * 64
        assert torch.equal(stored[0, :whole], want.keys()[0, :whole])
        assert same_bits(stored[0, whole:length], k[0, whole:length])  # unfinished: as they came
    assert store.screenable[0].all(-1).tolist()[:5] == [True] * 5 and not bool(store.screenable[0, 5].any())
    final = store.keys()
    for i, n in enumerate(shift.tolist()):
        first = ProgressiveKeys.from_keys(torch.cat([early[i : i + 1, :n], k[i : i + 1]], 1), 6)
        # The tile that was opened has the early keys as they were stored the first time.
        assert torch.equal(final[i, (n + 63) // 64 * 64 : n + 330], first.keys()[0, (n + 63) // 64 * 64 :])


def test_a_tile_that_lost_keys_keeps_the_others_as_they_were_stored():
    k, other = normal(1, 128, 1, 8).bfloat16(), normal(1, 128, 1, 8, seed=9).bfloat16() * 100
    store = ProgressiveKeys.from_keys(k, 4)
    before = store.keys()
    store.append(other[:, :3], 100)
    assert store.screenable[0, :, 0].tolist() == [True, False]
    assert same_bits(store.keys()[0, :100], before[0, :100])
    assert same_bits(store.keys()[0, 100:103], other[0, :3])
    store.append(other[:, 3:28], 103)
    assert bool(store.screenable.all())
    store.append(other[:, :5], 0)  # a new sequence in the same place
    assert store.screenable[0, :, 0].tolist() == [False, True]
    assert same_bits(store.keys()[0, :5], other[0, :5])


def test_sequences_do_not_touch_each_other():
    k = normal(3, 200, 2, 8).bfloat16()
    store = ProgressiveKeys.from_keys(k, 5, lengths_of(200, 70, 0))
    assert store.screenable.all(-1).sum(1).tolist() == [3, 1, 0]
    one = store.select(torch.tensor([1, 1, 0]))
    one.append(k[:, :60], lengths_of(70, 10, 140))
    assert torch.equal(store.keys()[0], ProgressiveKeys.from_keys(k[:1], 5).keys()[0])
    assert same_bits(one.keys()[0, :64], store.keys()[1, :64])
    assert same_bits(one.keys()[1, :10], store.keys()[1, :10])
    assert same_bits(one.keys()[2, :128], store.keys()[0, :128])
    wide = store.grown(500)
    assert wide.keys().shape == (3, 500, 2, 8) and same_bits(wide.keys()[:, :200], store.keys())
    wide.append(k, 300)
    assert wide.screenable[0].all(-1).tolist() == [True] * 3 + [False] + [True] * 3 + [False]
    with pytest.raises(ValueError, match=r"^capacity: got 100, want at least 200"):
        store.grown(100)


@pytest.mark.parametrize("page_size", [64, 192])
def test_pages_hold_the_bytes_of_the_sequences(page_size):
    k = normal(2, 400, 2, 16, seed=3).half()
    lengths = lengths_of(300, 0)
    pages, table = pages_from(k, page_size, fill=math.nan)
    needed = torch.tensor([-(-(300 + 100) // page_size), -(-100 // page_size)])
    for i, n in enumerate(needed.tolist()):
        table[i, n:] = -1  # past need
    start = table.clone()
    start[1] = -1
    got = ProgressiveKeys.from_keys(pages, 5, lengths, start)
    new = k[:, 300:400]
    got.append(new, lengths, table)
    flat = ProgressiveKeys.from_keys(k, 5, lengths)
    flat.append(new, lengths)
    for ours, want in zip(got.upper(table), flat.upper(), strict=True):
        for i, tiles in enumerate((400 // 64, 1)):
            assert torch.equal(ours[i, :tiles], want[i, :tiles])
    paged = got.keys()[table.clamp(min=0).long()].flatten(1, 2)
    assert same_bits(paged[0, :400], flat.keys()[0]) and same_bits(paged[1, :100], flat.keys()[1, :100])


K = normal(2, 128, 2, 16).half()


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: ProgressiveKeys.from_keys(K, 8), ValueError, "bits: got 8, want one of 4, 5, 6"),
        (
            lambda: ProgressiveKeys.from_keys(K.float()),
            UnsupportedError,
            "dtype: got torch.float32, .*16 bits",
        ),
        (lambda: ProgressiveKeys.from_keys(K.tolist()), TypeError, "k: got list, want a tensor"),
        (lambda: ProgressiveKeys.from_keys(K, 4, 129), ValueError, "cache_seqlens: got 129, want 0 to 128"),
        (lambda: ProgressiveKeys.from_keys(K, 4, True), TypeError, "cache_seqlens: got True, want an int"),
        (lambda: ProgressiveKeys.from_keys(K, 4, lengths_of(1, 129)), ValueError, "cache_seqlens: got"),
        (
            lambda: ProgressiveKeys.from_keys(K, 4, None, torch.zeros(1, 1, dtype=torch.int32)),
            ValueError,
            "cache_seqlens: got None",
        ),
        (
            lambda: ProgressiveKeys.from_keys(K[:, :48], 4, 40, torch.zeros(1, 1, dtype=torch.int32)),
            ValueError,
            "block_table: got pages of 48 slots, progressive keys want multiples of 64",
        ),
        (
            lambda: ProgressiveKeys.from_keys(K, 4).append(K[:, :1, :1], 0),
            ValueError,
            r"k: got shape \(2, 1, 1, 16\), want \(2, 1, 2, 16\) like the cache",
        ),
        (
            lambda: ProgressiveKeys.from_keys(K, 4).append(K[:, :1].bfloat16(), 0),
            ValueError,
            "k: got torch.bfloat16 on cpu, want torch.float16 on cpu like the cache",
        ),
        (
            lambda: ProgressiveKeys.from_keys(K, 4).append(K[:, :1], 128),
            ValueError,
            "cache_seqlens: got 128, want 0 to 127",
        ),
        (
            lambda: ProgressiveKeys.from_keys(K, 4).append(K[:, :1], 0, torch.full((2, 1), 7).int()),
            ValueError,
            "block_table: got page 7",
        ),
    ],
)
def test_wrong_arguments_are_named(make, error, message):
    with pytest.raises(error, match=f"^{message}"):
        make()


# --- attention ----------------------------------------------------------------------------------------------


def stored_and_plain(q, store, v, impl="eager", **options):
    """(with the store, with its keys as a tensor), both checked to be the same."""
    options = {**EVERYTHING, **options, "impl": impl}
    got = blasst_attn_with_kvcache(q, store, v, **options)
    plain = blasst_attn_with_kvcache(q, store.keys(), v, **options)
    assert_same_bits(got, plain)
    return got, plain


@st.composite
def decode_calls(draw):
    kv_heads, group = draw(st.sampled_from([1, 2])), draw(st.sampled_from([1, 3, 7]))
    capacity = draw(st.sampled_from([65, 449, 700, 1000]))
    inputs = heavy_tailed_inputs(
        2,
        draw(st.sampled_from([1, 1, 2, 8])),
        capacity,
        kv_heads * group,
        kv_heads,
        draw(st.sampled_from([8, 16, 40])),
        16,
        dtype=draw(st.sampled_from(DTYPES)),
        seed=draw(st.integers(0, 10**6)),
        noise=draw(st.sampled_from([0.2, 2.0])),
        drop=draw(st.sampled_from([(8.0, 40.0), (1.0, 12.0)])),
    )
    edit_keys(draw, inputs.k)
    short = draw(st.sampled_from([0, 1, 63, 64, 65, 128, 300, 700]))
    options = {
        "cache_seqlens": lengths_of(min(short, capacity), capacity - draw(st.sampled_from([0, 1, 60]))),
        "threshold": draw(st.sampled_from([0.0, 0.003, 0.1, 1.0])),
        "causal": draw(st.booleans()),
        "softcap": draw(st.sampled_from([0.0, 0.0, 5.0])),
        "window_size": draw(st.sampled_from([(-1, -1), (200, -1)])),
    }
    return inputs, options, draw(st.sampled_from([4, 5, 6]))


@settings(max_examples=60)
@given(decode_calls())
def test_no_bit_changes_and_no_tile_is_screened_that_the_rule_keeps(call):
    (q, k, v), options, bits = call
    store = ProgressiveKeys.from_keys(k, bits, options["cache_seqlens"])
    for impl in ("eager", "reference"):
        stored_and_plain(q, store, v, impl, **options)


@pytest.mark.parametrize("impl", ["eager", "reference"])
def test_a_call_writes_its_keys_into_the_store(impl):
    long = heavy_tailed_inputs(2, 1, 460, 6, 2, 16, dtype=torch.bfloat16, seed=5)
    lengths = lengths_of(310, 120)
    stores = [ProgressiveKeys.from_keys(long.k, 6, lengths) for _ in range(2)]
    values = [long.v.clone() for _ in range(2)]
    screened = 0
    for step in range(12):
        if step == 7:  # 50 keys are taken back
            lengths -= 50
            long = heavy_tailed_inputs(2, 1, 460, 6, 2, 16, dtype=torch.bfloat16, seed=6)
        new = [torch.stack([x[i, n : n + 8] for i, n in enumerate(lengths.tolist())]) for x in long[1:]]
        options = {"threshold": 0.05, "impl": impl, **EVERYTHING}
        got = blasst_attn_with_kvcache(long.q, stores[0], values[0], *new, cache_seqlens=lengths, **options)
        stores[1].append(new[0], lengths)
        for i, n in enumerate(lengths.tolist()):
            values[1][i, n : n + 8] = new[1][i]
        plain = blasst_attn_with_kvcache(
            long.q, stores[1].keys(), values[1], cache_seqlens=lengths + 8, **options
        )
        assert_same_bits(got, plain)
        assert torch.equal(values[0], values[1])
        screened += int(got.counts.screened.sum())
        lengths += 8
    assert screened > 20


@pytest.mark.parametrize("page_size", [64, 128])
def test_pages(page_size):
    q, k, v = heavy_tailed_inputs(2, 2, 700, 6, 2, 16, dtype=torch.float16, seed=7)
    lengths = lengths_of(690, 333)
    (pages, table), (values, _) = (pages_from(x, page_size, fill=math.nan) for x in (k, v))
    store = ProgressiveKeys.from_keys(pages, 6, lengths, table)
    new = k[:, :2], v[:, :2]
    options = {"block_table": table, "threshold": 0.05, "causal": True, **EVERYTHING}
    first = blasst_attn_with_kvcache(q, store, values, *new, cache_seqlens=lengths, **options)
    got, _ = stored_and_plain(q, store, values, cache_seqlens=lengths + 2, **options)
    assert int(got.counts.screened.sum()) > 10 and torch.equal(first.out, got.out)


def test_where_a_call_cannot_be_screened_it_runs_without():
    q, k, v = heavy_tailed_inputs(2, 1, 700, 4, 2, 16, dtype=torch.bfloat16, seed=8)
    store = ProgressiveKeys.from_keys(k, 6)
    more = heavy_tailed_inputs(2, 70, 700, 4, 2, 16, dtype=torch.bfloat16, seed=8).q
    calls = [
        (q, {"threshold": None}, 0),
        (q, {"threshold": 0.05, "max_skipped_mass": 0.5}, 1),
        (q, {"threshold": 0.05, "return_mass_bound": True}, 1),
        (q, {"threshold": 0.05, "cache_leftpad": lengths_of(3, 0)}, 1),
        (more, {"threshold": 0.05, "causal": True}, 1),
    ]
    for rows, options, skips in calls:
        options = {**EVERYTHING, **options}
        got = blasst_attn_with_kvcache(rows, store, v, **options)
        plain = blasst_attn_with_kvcache(rows, store.keys(), v, **options)
        assert got.counts.screened is None and bool(got.counts.skipped.sum() > 0) == bool(skips)
        for a, b in zip((*got[:2], got.kept_tiles), (*plain[:2], plain.kept_tiles), strict=True):
            assert torch.equal(a, b)


@pytest.mark.parametrize("impl", ["triton", "hopper"])
@pytest.mark.parametrize("threshold", [None, 0.1])
def test_gpu_kernels_refuse_and_leave_the_cache_alone(impl, threshold):
    q, k, v = heavy_tailed_inputs(1, 1, 300, 2, 1, 16, dtype=torch.float16)
    store = ProgressiveKeys.from_keys(k, 4, 200)
    before = store.planes.clone(), v.clone()
    with pytest.raises(UnsupportedError, match=f"{impl}: it takes no progressive keys.*eager, reference"):
        blasst_attn_with_kvcache(
            q, store, v, k[:, :5], v[:, :5], cache_seqlens=200, threshold=threshold, impl=impl
        )
    assert torch.equal(store.planes, before[0]) and torch.equal(v, before[1])


def test_auto_takes_eager_where_a_gpu_kernel_would_serve(monkeypatch):
    q, k, v = heavy_tailed_inputs(1, 1, 300, 2, 1, 16, dtype=torch.float16)
    monkeypatch.setattr(select, "AUTO_ELSEWHERE", select.AUTO_ON_GPU)
    monkeypatch.setattr("blasst.kernels.triton.unsupported_reason", lambda problem: None)
    monkeypatch.setattr("blasst.kernels.hopper.unsupported_reason", lambda problem: None)
    blasst_attn_with_kvcache(q, ProgressiveKeys.from_keys(k), v)
    assert select.backend_used() == "eager"


def test_reading_compiles_as_one_graph():
    q, k, v = heavy_tailed_inputs(1, 1, 700, 4, 2, 16, dtype=torch.float16, seed=10)
    store, lengths = ProgressiveKeys.from_keys(k), lengths_of(700)

    def f(q, v, n):
        result = blasst_attn_with_kvcache(q, store, v, cache_seqlens=n, threshold=0.02, return_counts=True)
        return result.out, result.counts.screened

    torch._dynamo.reset()
    compiled = torch.compile(f, fullgraph=True, backend="aot_eager")
    for a, b in zip(compiled(q, v, lengths), f(q, v, lengths), strict=True):
        assert torch.equal(a, b) and bool((b != 0).any())


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (
            {"screen": KeyCodes.empty(1, 300, 2, 16, 4, dtype=torch.float16)},
            ValueError,
            "screen: got KeyCodes beside ProgressiveKeys, which hold their own codes",
        ),
        ({"q": torch.ones(1, 1, 4, 16)}, ValueError, "k_cache: got dtype torch.float16, want torch.float32"),
        ({"v_cache": torch.ones(1, 299, 2, 16).half()}, ValueError, r"v_cache: got shape \(1, 299, 2, 16\)"),
        ({"k_descale": 0.5}, ValueError, "k_descale: got"),
        ({"cache_seqlens": 301}, ValueError, "cache_seqlens: got 301, want 0 to 300"),
        (
            {"block_table": torch.zeros(1, 1, dtype=torch.int32), "cache_seqlens": 300},
            ValueError,
            "block_table: got pages of 300 slots, progressive keys want multiples of 64",
        ),
    ],
)
def test_what_does_not_fit_is_refused(change, error, message):
    q, k, v = heavy_tailed_inputs(1, 1, 300, 4, 2, 16, dtype=torch.float16)
    call = {"q": q, "k_cache": ProgressiveKeys.from_keys(k, 4), "v_cache": v, "threshold": 0.1, **change}
    with pytest.raises(error, match=f"^{message}"):
        blasst_attn_with_kvcache(**call)


@pytest.mark.parametrize("lengths", [(64, 30), (30, 64), (128, 40)])
def test_a_page_of_two_sequences_holds_the_keys_of_the_longer_one(lengths):
    k = torch.randn(3, 64, 1, 16).bfloat16()
    pages = -(-max(lengths) // 64)
    table = torch.tensor([[0, 1], [0, 2]], dtype=torch.int32)[:, :pages].contiguous()
    store = ProgressiveKeys.from_keys(k, 6, torch.tensor(lengths, dtype=torch.int32), table)
    whole = ProgressiveKeys.from_keys(k[:1], 6, 64).keys()
    assert torch.equal(store.keys()[:1], whole)
