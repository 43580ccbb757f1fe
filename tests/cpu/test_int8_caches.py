"""screen="int8" over KV caches: chunks of a prompt against pages, padding, 8-bit caches and new keys."""

import math

import pytest
import torch

from blasst import (
    KeyCodes,
    UnsupportedError,
    blasst_attn_func,
    blasst_attn_varlen_func,
    blasst_attn_with_kvcache,
)
from blasst.testing import heavy_tailed_inputs, pages_from

IMPLS = ["eager", "reference"]
OPTIONS = {
    "threshold": 0.02,
    "causal": True,
    "screen": "int8",
    "return_counts": True,
    "return_kept_tiles": True,
}
USED = [700, 420]


def equal(got, want, index=None):
    """The same bits and the same tiles; index = sequence of got that want is alone."""
    at = slice(None) if index is None else slice(index, index + 1)
    tiles = want.kept_tiles.shape[2:]
    assert torch.equal(got.out[at], want.out)
    assert torch.equal(got.kept_tiles[at, :, : tiles[0], : tiles[1]], want.kept_tiles)
    assert torch.equal(got.counts.skipped[at], want.counts.skipped)
    assert torch.equal(got.counts.screened[at], want.counts.screened)
    assert int(want.counts.skipped.sum()) > 5


def cached(tokens=100, capacity=800, dtype=torch.float32):
    """q of a chunk, k and v with NaN in slots that are not used."""
    q, k, v = heavy_tailed_inputs(2, tokens, capacity, 4, 2, 64, dtype=dtype, seed=9, noise=0.3)
    for i, n in enumerate(USED):
        k[i, n:] = v[i, n:] = math.nan
    return q, k, v, torch.tensor(USED, dtype=torch.int32)


@pytest.mark.parametrize("impl", IMPLS)
def test_a_chunk_against_a_cache_is_the_call_on_its_keys(impl):
    q, k, v, used = cached()
    got = blasst_attn_with_kvcache(q, k, v, cache_seqlens=used, impl=impl, **OPTIONS)
    for i, n in enumerate(USED):
        equal(got, blasst_attn_func(*(x[i : i + 1, :n] for x in (q, k, v)), impl=impl, **OPTIONS), i)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("page", [16, 96])
def test_pages_are_the_contiguous_cache_in_both_functions(impl, page):
    q, k, v, used = cached()
    want = blasst_attn_with_kvcache(q, k, v, cache_seqlens=used, impl=impl, **OPTIONS)
    (pages, table), (values, _) = (pages_from(x, page, fill=math.nan) for x in (k, v))
    got = blasst_attn_with_kvcache(
        q, pages, values, cache_seqlens=used, block_table=table, impl=impl, **OPTIONS
    )
    equal(got, want)
    rows = torch.tensor([0, 100, 200], dtype=torch.int32)
    room = torch.tensor([0, 800, 1600], dtype=torch.int32)
    for lengths, seqused in ((torch.tensor([0, *USED]).cumsum(0).int(), None), (room, used)):
        packed = blasst_attn_varlen_func(
            q.flatten(0, 1),
            *(pages, values, rows, lengths, 100, 800),
            **{"seqused_k": seqused, "block_table": table, "impl": impl, **OPTIONS},
        )
        equal(packed._replace(out=packed.out.unflatten(0, (2, 100))), want)
    unpaged = blasst_attn_varlen_func(
        *(x.flatten(0, 1) for x in (q, k, v)), rows, room, 100, 800, seqused_k=used, impl=impl, **OPTIONS
    )
    equal(unpaged._replace(out=unpaged.out.unflatten(0, (2, 100))), want)


@pytest.mark.parametrize("impl", IMPLS)
def test_left_padding_shifts_the_tile_grid(impl):
    q, k, v, used = cached()
    k[0, :37] = v[0, :37] = math.nan
    pad = torch.tensor([37, 0], dtype=torch.int32)
    got = blasst_attn_with_kvcache(q, k, v, cache_seqlens=used, cache_leftpad=pad, impl=impl, **OPTIONS)
    equal(got, blasst_attn_func(q[:1], k[:1, 37:700], v[:1, 37:700], impl=impl, **OPTIONS), 0)


@pytest.mark.parametrize("impl", IMPLS)
def test_new_keys_are_written_first(impl):
    q, k, v, used = cached()
    want = blasst_attn_with_kvcache(q, k, v, cache_seqlens=used, impl=impl, **OPTIONS)
    before, ends = used - 100, [slice(n - 100, n) for n in USED]
    new = [torch.stack([x[i, end] for i, end in enumerate(ends)]) for x in (k, v)]
    caches = [x.clone() for x in (k, v)]
    for x in caches:
        for i, end in enumerate(ends):
            x[i, end] = math.nan
    equal(blasst_attn_with_kvcache(q, *caches, *new, cache_seqlens=before, impl=impl, **OPTIONS), want)
    assert torch.equal(caches[0].nan_to_num(), k.nan_to_num())


@pytest.mark.parametrize("impl", IMPLS)
def test_keys_of_8_bits_count_as_their_scale_makes_them(impl):
    q, k, v, used = cached(dtype=torch.bfloat16)
    scales = {"k_descale": torch.tensor([0.5, 2.0]), "v_descale": 0.25}
    k8, v8 = (x.to(torch.float8_e4m3fn) for x in (k * 2, v * 4))
    k8[:, :, 1] = (k / 2).to(torch.float8_e4m3fn)[:, :, 1]
    got = blasst_attn_with_kvcache(q, k8, v8, cache_seqlens=used, impl=impl, **scales, **OPTIONS)
    # exact in bfloat16: 4 bits of mantissa times a power of two
    plain = k8.float() * scales["k_descale"][:, None], v8.float() * 0.25
    equal(
        got,
        blasst_attn_with_kvcache(q, *(x.bfloat16() for x in plain), cache_seqlens=used, impl=impl, **OPTIONS),
    )


@pytest.mark.parametrize("impl", IMPLS)
def test_chunks_of_a_prompt_skip_what_the_rule_allows_each(impl):
    """Each chunk has statistics of its own; what it skips goes by the rule with the final maximum too."""
    q, k, v = heavy_tailed_inputs(1, 700, 700, 4, 2, 64, seed=5, noise=0.3)
    skipped = 0
    for begin in range(0, 700, 128):
        end = min(begin + 128, 700)
        got = blasst_attn_with_kvcache(q[:, begin:end], k, v, cache_seqlens=end, impl=impl, **OPTIONS)
        scores = (q[0, begin:end].transpose(0, 1) / 8) @ k[0, :end].repeat_interleave(2, 1).permute(1, 2, 0)
        seen = torch.arange(end) <= torch.arange(begin, end)[:, None]
        scores = torch.nn.functional.pad(
            scores.masked_fill(~seen, -math.inf), (0, -end % 128), value=-math.inf
        )
        scores = torch.nn.functional.pad(scores, (0, 0, 0, begin - end + 128), value=-math.inf)
        top = scores.unflatten(-1, (-1, 128)).amax(-1)
        stays = (top >= scores.amax(-1, keepdim=True) + math.log(0.02)) & (top > -math.inf)
        stays = stays.unflatten(1, (2, 64)).any(2)  # [heads, query tiles, key tiles]
        kept = got.kept_tiles[0, :, : -(-(end - begin) // 64), : stays.shape[-1]]
        assert bool((kept | ~stays[:, : kept.shape[1]]).all())
        skipped += int(got.counts.skipped.sum())
    assert skipped > 20


def test_decode_and_wrong_screens_are_refused():
    q, k, v, used = cached(tokens=8)
    call = {"cache_seqlens": used, "threshold": 0.1, "causal": True}
    with pytest.raises(UnsupportedError, match=r"8 new tokens.*decode rule; that takes KeyCodes"):
        blasst_attn_with_kvcache(q, k, v, screen="int8", **call)
    blasst_attn_with_kvcache(q, k, v, screen=KeyCodes.empty(2, 800, 2, 64, 4, dtype=k.dtype), **call)
    long = torch.cat([q, q], dim=1)
    with pytest.raises(UnsupportedError, match=r"16 new tokens.*prefill rule"):
        blasst_attn_with_kvcache(long, k, v, screen=KeyCodes.empty(2, 800, 2, 64, 4, dtype=k.dtype), **call)
    with pytest.raises(ValueError, match="int4"):
        blasst_attn_with_kvcache(long, k, v, screen="int4", **call)
    with pytest.raises(UnsupportedError, match="max_skipped_mass"):
        blasst_attn_with_kvcache(long, k, v, screen="int8", max_skipped_mass=0.1, **call)
    caches = k.clone(), v.clone()
    with pytest.raises(UnsupportedError, match="triton"):  # and the cache is left alone
        blasst_attn_with_kvcache(
            long, *caches, k[:, :16], v[:, :16], cache_seqlens=0, threshold=0.1, screen="int8", impl="triton"
        )
    assert torch.equal(caches[0].nan_to_num(), k.nan_to_num())
