"""Codes of cached keys: keys lie in their bins exactly, codes follow the cache, and what they cost."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from blasst import KeyCodes, UnsupportedError
from blasst.core.key_codes import pack_codes, unpack_codes
from blasst.testing import pages_from

DTYPES = [torch.float16, torch.bfloat16, torch.float32]


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def bins(codes):
    """Lower and upper bounds of every key's bin, float64 (batch, tiles * 64, heads, dim); exact."""
    code = unpack_codes(codes.codes, codes.bits).double()
    low, step = codes.low.double()[..., None, :], codes.step.double()[..., None, :]
    return [(low + step * (code + i)).transpose(2, 3).flatten(1, 2) for i in (0, 1)]


def assert_equal_codes(a, b):
    assert torch.equal(a.encoded, b.encoded) and torch.equal(a.screenable, b.screenable)
    for tile in a.screenable.nonzero().tolist():
        for name in ("codes", "low", "step"):
            assert torch.equal(getattr(a, name)[tuple(tile)], getattr(b, name)[tuple(tile)])


@st.composite
def keys(draw):
    """Channels of very different ranges: constant, tiny, huge, with outliers, on few values."""
    dtype = draw(st.sampled_from(DTYPES))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 10**6)))
    heads, dim = draw(st.sampled_from([1, 2])), draw(st.sampled_from([1, 7, 16]))
    shape = (1, 64 * draw(st.integers(1, 3)), heads, dim)
    exponents = st.sampled_from([-140, -40, -26, -14, -3, 0, 4, 10])
    scale = torch.tensor([[2.0 ** draw(exponents) for _ in range(dim)] for _ in range(heads)])
    offset = torch.tensor([[draw(st.sampled_from([0.0, 1.0, -100.0, 3e4])) for _ in range(dim)]])
    k = torch.randn(shape, generator=generator)
    form = draw(st.sampled_from(["normal", "steps", "heavy"]))
    if form == "steps":  # keys exactly on the bounds of bins
        k = k.mul(16).round() / 16
    if form == "heavy":
        k = k / torch.rand(shape, generator=generator).clamp(min=1e-3)
    k = k * scale + offset
    k[..., : draw(st.integers(0, dim))] = draw(st.sampled_from([0.0, -0.0, 1.1, -65504.0, 65504.0]))
    return k.to(dtype)


@settings(max_examples=150)
@given(keys(), st.sampled_from([4, 5, 6]))
def test_every_key_lies_in_its_bin_exactly(k, bits):
    codes = KeyCodes.from_keys(k, bits)
    below, above = bins(codes)
    inside = (below <= k.double()) & (k.double() <= above)
    ok = codes.screenable.repeat_interleave(64, 1)
    assert bool(inside[ok].all())
    assert bool((codes.step >= 0).all()) and bool(codes.step.isfinite().all())
    too_large = (k.double().abs() > 65504).unflatten(1, (-1, 64)).any(-1).any(2)
    assert bool((codes.screenable | too_large).all())  # nothing else stops a tile


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("bits", [4, 5, 6])
def test_a_key_a_hair_above_the_other_end_of_its_channel_has_a_bin(bits, dtype):
    k = torch.full((1, 64, 1, 2), -0.5, dtype=dtype)
    k[0, 3, 0], k[0, 9, 0] = -1.0, 1e-20  # in float64 their difference is 1, and 2**-bits a step
    codes = KeyCodes.from_keys(k, bits)
    below, above = bins(codes)
    assert bool(codes.screenable.all()) and bool(((below <= k.double()) & (k.double() <= above)).all())


def test_codes_compare_by_identity_and_lengths_stay_on_the_cpu():
    k = normal(1, 128, 1, 4)
    with torch.device("meta"):  # as torch.set_default_device("cuda") beside a cache on the CPU
        codes = KeyCodes.from_keys(k, 4, torch.full((1,), 100, dtype=torch.int32, device="cpu"))
    assert codes.encoded.device.type == "cpu"
    assert codes == codes and codes != KeyCodes.from_keys(k, 4, 100)


def test_codes_do_not_join_the_graph_of_the_keys():
    k = normal(1, 128, 1, 4).requires_grad_()
    codes = KeyCodes.from_keys(k, 4)
    assert not codes.low.requires_grad and not codes.step.requires_grad


@pytest.mark.parametrize("bits", [4, 5, 6])
def test_bins_are_no_wider_than_the_range_asks_for(bits):
    k = normal(1, 640, 2, 16, seed=1).half()
    codes = KeyCodes.from_keys(k, bits)
    tiles = k.double().unflatten(1, (-1, 64))
    want = (tiles.amax(2) - tiles.amin(2)) / 2**bits
    assert bool((codes.step.double() <= want * (1 + 2**-9)).all())
    assert torch.equal(codes.low.double(), tiles.amin(2))
    used = unpack_codes(codes.codes, bits).amax((-2, -1))
    assert bool((used == 2**bits - 1).all())


@pytest.mark.parametrize("bits", [4, 5, 6])
@pytest.mark.parametrize("dim", [1, 7, 16])
def test_packing_keeps_every_code(bits, dim):
    code = torch.randint(2**bits, (2, 3, 64, dim), generator=torch.Generator().manual_seed(dim)).byte()
    packed = pack_codes(code, bits)
    assert packed.shape == (2, 3, 8 * bits, dim) and packed.dtype == torch.uint8
    assert torch.equal(unpack_codes(packed, bits), code)
    first = torch.zeros_like(code)
    first[..., 8:16, :] = 2  # bit 1 of keys 8 to 15: byte 1 * bits + 1
    assert pack_codes(first, bits)[0, 0, :, 0].nonzero().tolist() == [[bits + 1]]


def test_constant_channels_have_no_width():
    k = torch.full((1, 64, 1, 3), 1.375, dtype=torch.bfloat16)
    codes = KeyCodes.from_keys(k, 4)
    assert bool((codes.low == 1.375).all()) and bool((codes.step == 0).all())


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 3e38, -1e6])
def test_what_float16_cannot_hold_concerns_its_tile_and_head_alone(value):
    k = normal(2, 256, 3, 8).bfloat16()
    k[1, 130, 2, 5] = value
    want = torch.ones(2, 4, 3, dtype=torch.bool)
    want[1, 2, 2] = False
    codes = KeyCodes.from_keys(k, 5)
    assert torch.equal(codes.screenable, want)
    assert bool(codes.low[1, 2, 2].isnan().all()) and codes.encoded.tolist() == [4, 4]


@pytest.mark.parametrize("bits", [4, 5, 6])
def test_memory_is_the_bits_and_a_64th(bits):
    k = torch.zeros(2, 4096, 2, 128, dtype=torch.bfloat16)
    cache = 2 * k.nbytes  # keys and values
    nbytes = KeyCodes.from_keys(k, bits, 0).nbytes
    assert nbytes == cache * bits // 32 + cache // 64
    assert nbytes <= cache * (bits / 32 + 0.02)


def test_codes_grow_with_the_cache_one_tile_at_a_time():
    k = normal(3, 330, 2, 16, seed=2).bfloat16()
    grown = KeyCodes.empty(3, 330, 2, 16, 6)
    for length in range(0, 331, 30):
        lengths = torch.tensor([length, length // 2, 0], dtype=torch.int32)
        hidden = k.clone()
        for i, n in enumerate(lengths.tolist()):
            hidden[i, n:] = math.nan  # not there yet, so not read
        grown.append(hidden, lengths)
        assert grown.encoded.tolist() == [length // 64, length // 2 // 64, 0]
        assert_equal_codes(grown, KeyCodes.from_keys(k, 6, lengths))
    assert grown.screenable.all(-1).sum(1).tolist() == [5, 2, 0]


def test_an_encoded_tile_is_not_encoded_again():
    k = normal(1, 256, 1, 8).half()
    codes = KeyCodes.from_keys(k, 4, 128)
    later = k.clone()
    later[:, :128] = 0.0
    codes.append(later, 256)
    assert_equal_codes(codes, KeyCodes.from_keys(k, 4))


def test_a_shorter_cache_forgets_the_tiles_it_lost():
    k, other = normal(2, 256, 1, 8).half(), normal(2, 256, 1, 8, seed=9).half()
    codes = KeyCodes.from_keys(k, 4)
    codes.truncate(torch.tensor([130, 300], dtype=torch.int32))
    assert codes.encoded.tolist() == [2, 4]
    assert codes.screenable[..., 0].tolist() == [[True, True, False, False], [True] * 4]
    k[0, 130:] = other[0, 130:]
    codes.append(k, 256)
    assert_equal_codes(codes, KeyCodes.from_keys(k, 4))
    codes.append(other, 0)  # a new sequence in the same place
    assert not bool(codes.screenable.any())
    codes.append(other, 256)
    assert_equal_codes(codes, KeyCodes.from_keys(other, 4))


@pytest.mark.parametrize("page_size", [1, 16, 48, 128])
def test_codes_of_pages_are_those_of_the_sequence(page_size):
    k = normal(2, 300, 2, 16, seed=3).half()
    lengths = torch.tensor([300, 200], dtype=torch.int32)
    pages, table = pages_from(k, page_size, fill=math.nan)
    table[1, -(-200 // page_size) :] = -1  # past need
    capacity = table.shape[1] * page_size
    got = KeyCodes.from_keys(pages, 5, lengths, table)
    whole = torch.nn.functional.pad(k, (0, 0, 0, 0, 0, capacity - 300))
    assert_equal_codes(got, KeyCodes.from_keys(whole, 5, lengths))
    assert got.encoded.tolist() == [4, 3]


def test_strides_do_not_matter():
    k = normal(2, 200, 2, 16, seed=4).half()
    want = KeyCodes.from_keys(k, 4)
    wide = torch.full((2, 2, 200, 32), math.nan, dtype=torch.float16)
    wide[..., ::2] = k.transpose(1, 2)
    assert_equal_codes(KeyCodes.from_keys(wide[..., ::2].transpose(1, 2), 4), want)
    one = k[:1, :, :1].expand(3, -1, 2, -1)
    assert_equal_codes(KeyCodes.from_keys(one, 4), KeyCodes.from_keys(one.contiguous(), 4))


def test_a_cache_below_one_tile_has_no_codes():
    for capacity in (0, 1, 63):
        codes = KeyCodes.from_keys(normal(2, capacity, 1, 8), 4)
        assert codes.screenable.shape == (2, 0, 1) and codes.nbytes == 0


K = normal(2, 128, 2, 16).half()


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: KeyCodes.from_keys(K, 8), ValueError, "bits: got 8, want one of 4, 5, 6"),
        (lambda: KeyCodes.from_keys(K, True), ValueError, "bits: got True"),
        (lambda: KeyCodes.from_keys(K, 5.0), ValueError, "bits: got 5.0"),
        (lambda: KeyCodes.from_keys(K.tolist(), 4), TypeError, "k: got list, want a tensor"),
        (lambda: KeyCodes.from_keys(K[0], 4), ValueError, r"k: got shape \(128, 2, 16\), want 4 dimensions"),
        (
            lambda: KeyCodes.from_keys(K.to(torch.float8_e4m3fn), 4),
            UnsupportedError,
            "k: got dtype torch.float8_e4m3fn, supported are float16",
        ),
        (
            lambda: KeyCodes.empty(1, 64, 1, 8, 4, dtype=torch.float64),
            UnsupportedError,
            "dtype: got torch.float64",
        ),
        (lambda: KeyCodes.from_keys(K, 4, 129), ValueError, r"cache_seqlens: .*\[129, 129\], want 0 to 128"),
        (lambda: KeyCodes.from_keys(K, 4, -1), ValueError, "cache_seqlens: got values in"),
        (lambda: KeyCodes.from_keys(K, 4, 1.5), TypeError, "cache_seqlens: got 1.5, want an int or"),
        (lambda: KeyCodes.from_keys(K, 4, torch.tensor([1, 2])), TypeError, "cache_seqlens: got dtype"),
        (
            lambda: KeyCodes.from_keys(K, 4, None, torch.zeros(1, 1, dtype=torch.int32)),
            ValueError,
            "cache_seqlens: got None",
        ),
        (
            lambda: KeyCodes.from_keys(K, 4, 128, torch.full((1, 1), 7, dtype=torch.int32)),
            ValueError,
            "block_table: got page 7",
        ),
        (
            lambda: KeyCodes.from_keys(K, 4).append(K[:, :, :1], 128),
            ValueError,
            r"k: got shape \(2, 128, 1, 16\), want \(2, 128, 2, 16\) like the codes",
        ),
        (
            lambda: KeyCodes.from_keys(K, 4).append(K.float(), 128),
            ValueError,
            "k: got torch.float32 on cpu, want torch.float16 on cpu",
        ),
        (
            lambda: KeyCodes.empty(2, 128, 2, 16, 4, dtype=K.dtype).append(K.repeat(1, 2, 1, 1), 200),
            ValueError,
            r"cache_seqlens: .*\[200, 200\], want 0 to 191",
        ),
        (lambda: KeyCodes.from_keys(K, 4).truncate(-1), ValueError, "cache_seqlens: .* want at least 0"),
    ],
)
def test_wrong_arguments_are_named(make, error, message):
    with pytest.raises(error, match=f"^{message}"):
        make()
