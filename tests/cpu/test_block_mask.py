"""block_mask=: tiles left out are not attended, blasst skips among the rest, and GPU kernels refuse."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import blasst
from blasst import UnsupportedError, blasst_attn_func, blasst_attn_varlen_func, blasst_attn_with_kvcache
from blasst.core.reference import reference_attention
from blasst.core.sequences import anchor_tiles, anchors_under_mask, visible_range
from blasst.core.types import DECODE_TILE, PREFILL_TILE, num_tiles
from blasst.kernels import repeats, select
from blasst.testing import (
    assert_same_kept_tiles,
    assert_within_budget,
    attention_calls,
    heavy_tailed_inputs,
)

EVERYTHING = {
    "return_lse": True,
    "return_counts": True,
    "return_mass_bound": True,
    "return_kept_tiles": True,
    "impl": "eager",
}
NEAR = 1e-3  # nats by which float32 and float64 scores of these inputs may differ


def map_size(phase, inputs):
    batch, seqlen_q, num_heads, _ = inputs.q.shape
    seqlen_k, num_kv_heads = inputs.k.shape[1:3]
    if phase == "decode":
        return batch, num_kv_heads, 1, num_tiles(seqlen_k, 64)
    return batch, num_heads, num_tiles(seqlen_q, 64), num_tiles(seqlen_k, 128)


def random_mask(phase, inputs, options, seed, density=0.5):
    """Random tiles, and the tile of each row's last visible key, so that no row is empty."""
    generator = torch.Generator().manual_seed(seed)
    mask = torch.rand(map_size(phase, inputs), generator=generator) < density
    tile = DECODE_TILE if phase == "decode" else PREFILL_TILE
    seqlen_q, seqlen_k = inputs.q.shape[1], inputs.k.shape[1]
    row = torch.arange(seqlen_q)
    window = options.get("window_size", (-1, -1))
    begin, end = visible_range(row, seqlen_q, seqlen_k, options.get("causal", False), window)
    sees = begin < end
    mask[:, :, row[sees] // (tile.query or seqlen_q), (end[sees] - 1) // tile.key] = True
    return mask


def dense_under_mask(phase, inputs, mask, causal=False):
    """Softmax over the keys of kept tiles, written down in the simplest way."""
    q, k, v = (x.double() for x in inputs)
    group = q.shape[2] // k.shape[2]
    k, v = (x.repeat_interleave(group, dim=2) for x in (k, v))
    size = 64 if phase == "decode" else 128
    allowed = mask.repeat_interleave(size, -1)[..., : k.shape[1]]
    if phase == "decode":
        allowed = allowed.repeat_interleave(group, 1).expand(-1, -1, q.shape[1], -1)
    else:
        allowed = allowed.repeat_interleave(64, 2)[:, :, : q.shape[1]]
    if causal:
        offset = k.shape[1] - q.shape[1]
        allowed = allowed & torch.ones(q.shape[1], k.shape[1], dtype=torch.bool).tril(offset)
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * q.shape[-1] ** -0.5
    weight = scores.masked_fill(~allowed, -math.inf).softmax(-1)
    return torch.einsum("bhqk,bkhd->bqhd", weight, v)


def public(phase):
    return blasst_attn_with_kvcache if phase == "decode" else blasst_attn_func


@settings(max_examples=50)
@given(
    attention_calls([torch.float16, torch.float32]),
    st.sampled_from([None, 0.0, 0.003, 0.1, 1.0]),
    st.integers(0, 10**6),
)
def test_eager_equals_the_reference(call, threshold, seed):
    phase, inputs, options = call
    if threshold is None:
        options["max_skipped_mass"] = None
    mask = random_mask(phase, inputs, options, seed)
    truth = reference_attention(*inputs, threshold=threshold, phase=phase, block_mask=mask, **options)
    got = public(phase)(*inputs, threshold=threshold, block_mask=mask, **options, **EVERYTHING)
    assert not bool((got.kept_tiles & ~mask).any())
    if options["max_skipped_mass"] is not None and not torch.equal(got.kept_tiles, truth.kept_tiles):
        return  # a budget decision near its own cut
    yardstick = reference_attention(
        *inputs,
        threshold=threshold,
        phase=phase,
        block_mask=mask,
        kept_tiles=truth.kept_tiles,
        dtype=inputs.q.dtype,
        **options,
    )
    if assert_same_kept_tiles(got.kept_tiles, truth, threshold, NEAR):
        return
    # A row of few tiles is a sum that may cancel: its terms are as large as the values.
    magnitude = float(inputs.v.float().abs().max())
    assert_within_budget(got.out, truth.out, yardstick.out, "out", magnitude)
    assert_within_budget(got.lse, truth.lse, yardstick.lse, "lse", magnitude=8.0)
    assert torch.equal(got.counts.skipped, truth.counts.skipped)
    assert torch.equal(got.counts.visited, truth.counts.visited)
    assert bool((got.mass_bound.double() * (1 + 1e-5) + 1e-30 >= truth.skipped_mass).all())


@settings(max_examples=30)
@given(attention_calls([torch.float16, torch.float32]), st.sampled_from([None, 0.0, 0.01, 1.0]))
def test_a_mask_of_all_tiles_changes_no_bit(call, threshold):
    phase, inputs, options = call
    if threshold is None:
        options["max_skipped_mass"] = None
    mask = torch.ones(map_size(phase, inputs), dtype=torch.bool)
    plain = public(phase)(*inputs, threshold=threshold, **options, **EVERYTHING)
    masked = public(phase)(*inputs, threshold=threshold, block_mask=mask, **options, **EVERYTHING)
    truth = reference_attention(*inputs, threshold=threshold, phase=phase, **options)
    under = reference_attention(*inputs, threshold=threshold, phase=phase, block_mask=mask, **options)
    for a, b in ((plain, masked), (truth, under)):
        for one, other in zip(a, b, strict=True):
            if isinstance(one, torch.Tensor):
                torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)
            else:
                assert torch.equal(one.skipped, other.skipped) and torch.equal(one.visited, other.visited)


@pytest.mark.parametrize("phase", ["prefill", "decode"])
@pytest.mark.parametrize("impl", ["eager", "reference"])
def test_dense_under_a_mask_is_softmax_over_its_tiles(phase, impl):
    inputs = heavy_tailed_inputs(2, 3 if phase == "decode" else 200, 900, 4, 2, 16, noise=2.0, seed=31)
    mask = random_mask(phase, inputs, {"causal": True}, 5, density=0.3)
    want = dense_under_mask(phase, inputs, mask, causal=True)
    got = public(phase)(*inputs, causal=True, block_mask=mask, impl=impl, return_counts=True)
    torch.testing.assert_close(got.out.double(), want, rtol=1e-5, atol=1e-5)
    assert int(got.counts.skipped.sum()) == 0
    without = public(phase)(*inputs, causal=True, impl=impl).out
    assert float((without - got.out).abs().max()) > 0.01  # the mask matters


@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_tiles_left_out_are_neither_visited_nor_skipped_and_the_rest_is_skipped_further(phase):
    inputs = heavy_tailed_inputs(1, 1 if phase == "decode" else 200, 1500, 4, 2, 16, seed=32)
    mask = random_mask(phase, inputs, {}, 6, density=0.6)
    got = public(phase)(*inputs, threshold=0.02, block_mask=mask, **EVERYTHING)
    truth = reference_attention(*inputs, threshold=0.02, phase=phase, block_mask=mask)
    assert torch.equal(got.counts.visited, mask.sum((-1, -2)))
    assert torch.equal(got.kept_tiles, truth.kept_tiles)
    assert torch.equal(got.counts.visited - got.counts.skipped, got.kept_tiles.sum((-1, -2)))
    assert int(got.counts.skipped.sum()) > 0


def test_values_and_keys_of_tiles_left_out_are_not_touched():
    for phase in ("prefill", "decode"):
        inputs = heavy_tailed_inputs(1, 2 if phase == "decode" else 130, 1024, 2, 1, 16, seed=33)
        mask = random_mask(phase, inputs, {}, 7, density=0.4)
        mask[..., 2] = mask[..., 4:6] = False
        everyones = mask.any(1).any(1)[0]
        clean = public(phase)(*inputs, threshold=0.02, block_mask=mask, **EVERYTHING)
        unused = ~everyones.repeat_interleave(64 if phase == "decode" else 128)
        inputs.v[:, unused] = math.nan
        inputs.k[:, unused] = math.nan
        for impl in ("eager", "reference"):
            got = public(phase)(
                *inputs,
                threshold=0.02,
                block_mask=mask,
                impl=impl,
                return_counts=True,
                return_mass_bound=True,
            )
            torch.testing.assert_close(got.out, clean.out, rtol=1e-5, atol=1e-5)
            assert torch.equal(got.counts.skipped, clean.counts.skipped)
            assert bool(got.mass_bound.isfinite().all())


def test_anchors_are_the_first_and_the_last_two_tiles_that_the_mask_leaves():
    inputs = heavy_tailed_inputs(1, 1, 640, 1, 1, 16, seed=34)
    mask = torch.tensor([False, True, True, True, False, True, True, True, False, False]).view(1, 1, 1, 10)
    mask[..., 9] = False
    got = blasst_attn_with_kvcache(*inputs, threshold=1.0, block_mask=mask, **EVERYTHING)
    truth = reference_attention(*inputs, threshold=1.0, phase="decode", block_mask=mask)
    for kept in (got.kept_tiles, truth.kept_tiles):
        assert bool(kept[0, 0, 0, [1, 6, 7]].all())
    assert truth.margin[0, 0, 0].isposinf().nonzero().flatten().tolist() == [1, 6, 7]
    assert truth.margin[0, 0, 0].isnan().tolist() == (~mask[0, 0, 0]).tolist()


@given(st.lists(st.tuples(st.integers(0, 700), st.integers(1, 700)), min_size=1, max_size=5))
def test_anchors_under_a_full_mask_are_those_without_one(rows):
    begin = torch.tensor([a for a, _ in rows])
    end = torch.tensor([a + n for a, n in rows])
    first_key = torch.arange(num_tiles(1400, 64)) * 64
    sees = (begin[:, None] < first_key + 64) & (end[:, None] > first_key)
    got = anchors_under_mask(sees[None])[0].nonzero().flatten().tolist()
    assert got == sorted(anchor_tiles(begin, end, 64))


def test_the_first_tile_of_the_order_is_the_first_that_the_mask_leaves():
    # Tile 1 scores highest, tile 2 next: whoever visits tile 1 first skips 2, else tile 2 is kept.
    q = torch.zeros(1, 64, 1, 16)
    q[..., 0] = 4.0
    k = torch.zeros(1, 512, 1, 16)
    for tile, level in enumerate((9.0, 8.0, 5.0, 0.0)):
        k[:, tile * 128 : (tile + 1) * 128, :, 0] = level
    mask = torch.tensor([False, True, True, True]).view(1, 1, 1, 4)
    for impl in ("eager", "reference"):
        got = blasst_attn_func(q, k, k, threshold=0.5, block_mask=mask, return_kept_tiles=True, impl=impl)
        assert got.kept_tiles[0, 0, 0].tolist() == [False, True, False, False]


def test_packed_sequences_and_left_padding_count_from_their_own_first_key():
    lengths = [(70, 300), (130, 500)]
    singles = [heavy_tailed_inputs(1, n, m, 2, 1, 16, seed=40 + n) for n, m in lengths]
    masks = [random_mask("prefill", s, {"causal": True}, i, 0.4) for i, s in enumerate(singles)]
    packed = [torch.cat([getattr(s, name)[0] for s in singles]) for name in ("q", "k", "v")]
    cu_q, cu_k = (torch.tensor(x, dtype=torch.int32) for x in ([0, 70, 200], [0, 300, 800]))
    together = torch.zeros(2, 2, 3, 4, dtype=torch.bool)
    for i, mask in enumerate(masks):
        together[i, :, : mask.shape[2], : mask.shape[3]] = mask[0]
    got = blasst_attn_varlen_func(
        *packed, cu_q, cu_k, 130, 500, threshold=0.02, causal=True, block_mask=together, return_counts=True
    )
    for i, (single, mask) in enumerate(zip(singles, masks, strict=True)):
        one = blasst_attn_func(*single, threshold=0.02, causal=True, block_mask=mask, return_counts=True)
        assert torch.equal(got.out[int(cu_q[i]) : int(cu_q[i + 1])], one.out[0])
        assert torch.equal(got.counts.visited[i], one.counts.visited[0])

    step = heavy_tailed_inputs(1, 1, 400, 2, 1, 16, seed=50)
    mask = random_mask("decode", step, {}, 3, 0.4)
    padded = [torch.nn.functional.pad(x, (0, 0, 0, 0, 37, 0), value=math.nan) for x in step[1:]]
    pad = torch.tensor([37], dtype=torch.int32)
    one = blasst_attn_with_kvcache(*step, threshold=0.02, block_mask=mask)
    got = blasst_attn_with_kvcache(step.q, *padded, cache_leftpad=pad, threshold=0.02, block_mask=mask)
    assert torch.equal(got.out, one.out)


@pytest.mark.parametrize("impl", ["triton", "hopper"])
@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_gpu_kernels_refuse_a_mask(phase, impl):
    inputs = heavy_tailed_inputs(1, 1, 300, 2, 1, 16)
    mask = torch.ones(map_size(phase, inputs), dtype=torch.bool)
    with pytest.raises(UnsupportedError, match=f"{impl}: it takes no block_mask.*supported by eager"):
        public(phase)(*inputs, block_mask=mask, impl=impl)


def test_auto_takes_eager_where_a_gpu_kernel_would_serve(monkeypatch):
    seen = []

    def run(problem, impl):
        seen.append(problem)
        return select.KERNELS["eager"].run(problem)

    monkeypatch.setattr(select, "run", run)
    inputs = heavy_tailed_inputs(1, 64, 300, 2, 1, 16)
    mask = torch.ones(map_size("prefill", inputs), dtype=torch.bool)
    blasst_attn_func(*inputs, block_mask=mask)
    monkeypatch.setattr(select, "AUTO_ELSEWHERE", select.AUTO_ON_GPU)
    monkeypatch.setattr("blasst.kernels.triton.unsupported_reason", lambda problem: None)
    monkeypatch.setattr("blasst.kernels.hopper.unsupported_reason", lambda problem: None)
    assert select.choose(seen[0], "auto").name == "eager"
    assert select.choose(replace(seen[0], block_mask=None), "auto").name == "hopper"


def test_a_prepared_call_never_serves_a_mask(monkeypatch):
    inputs = heavy_tailed_inputs(1, 1, 300, 2, 1, 16)
    lengths = torch.tensor([300], dtype=torch.int32)
    mask = random_mask("decode", inputs, {}, 1, 0.3)
    want = blasst_attn_with_kvcache(*inputs, cache_seqlens=lengths, block_mask=mask).out
    served = []
    monkeypatch.setattr(repeats, "call_key", lambda *_: ("key",))
    monkeypatch.setattr(repeats, "find", lambda key: "plan")
    monkeypatch.setattr(repeats, "run", lambda plan, *_: served.append(plan))
    blasst_attn_with_kvcache(*inputs, cache_seqlens=lengths)
    assert served == ["plan"]  # the patch is where a call looks
    assert torch.equal(blasst_attn_with_kvcache(*inputs, cache_seqlens=lengths, block_mask=mask).out, want)
    assert served == ["plan"]


@pytest.mark.parametrize(
    ("mask", "error", "message"),
    [
        ([[True]], TypeError, "got list, want a bool tensor"),
        (torch.ones(1, 2, 2, 3), TypeError, "got dtype torch.float32, want a bool tensor"),
        (
            torch.ones(1, 2, 3, 3, dtype=torch.bool),
            ValueError,
            r"got shape \(1, 2, 3, 3\), want .* \(1, 2, 2, 3\)",
        ),
        (torch.ones(2, 3, dtype=torch.bool), ValueError, r"got shape \(2, 3\)"),
        (torch.ones(1, 2, 2, 3, dtype=torch.bool, device="meta"), ValueError, "got a tensor on meta"),
        (torch.zeros(1, 2, 2, 3, dtype=torch.bool), ValueError, "row 0 of sequence 0 sees .head 0., want"),
    ],
)
def test_a_bad_mask_is_named(mask, error, message):
    inputs = heavy_tailed_inputs(1, 128, 300, 2, 1, 16)
    with pytest.raises(error, match=f"^block_mask: .*{message}"):
        blasst_attn_func(*inputs, block_mask=mask, causal=True)


def test_a_row_that_is_empty_between_others_is_found():
    # 300 keys, 128 rows: row 84 is the first that sees key 256, the first of tile 2.
    inputs = heavy_tailed_inputs(1, 128, 300, 2, 1, 16)
    mask = torch.ones(1, 2, 2, 3, dtype=torch.bool)
    mask[0, 1, 1, :2] = False
    with pytest.raises(ValueError, match=r"key tiles 0 to 1 that row 64 of sequence 0 sees \(head 1\)"):
        blasst_attn_func(*inputs, block_mask=mask, causal=True)
    blasst_attn_func(*inputs, block_mask=mask)  # without the causal mask every row sees tile 2
    mask = torch.ones(1, 1, 1, 5, dtype=torch.bool)
    mask[..., 1:] = False
    step = heavy_tailed_inputs(1, 1, 300, 2, 1, 16)
    with pytest.raises(ValueError, match="key tiles 3 to 4 that row 0"):
        blasst_attn_with_kvcache(*step, block_mask=mask, window_size=(60, 0))


def test_rows_that_see_nothing_need_no_tile():
    inputs = heavy_tailed_inputs(1, 200, 10, 1, 1, 16)
    mask = torch.zeros(1, 1, 4, 1, dtype=torch.bool)
    mask[:, :, 2:] = True  # rows 190 to 199 see keys
    out = blasst_attn_func(*inputs, block_mask=mask, causal=True).out
    assert torch.equal(out, blasst_attn_func(*inputs, causal=True).out)


def test_compiles_with_a_mask():
    inputs = heavy_tailed_inputs(1, 70, 300, 2, 1, 16)
    mask = random_mask("prefill", inputs, {}, 2, 0.3)
    want = blasst_attn_func(*inputs, threshold=0.02, block_mask=mask).out
    compiled = torch.compile(
        lambda q, k, v, m: blasst_attn_func(q, k, v, threshold=0.02, block_mask=m).out,
        fullgraph=True,
        backend="aot_eager",
    )
    assert torch.equal(compiled(*inputs, mask), want)
    assert blasst.backend_used() == "eager"


@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_the_budget_counts_only_what_is_skipped_inside_the_mask(phase):
    """Fixed inputs, on which float32 and float64 decide alike: the budget's own cut is nowhere near."""
    spared = skipped = 0
    for seed in range(4):
        inputs = heavy_tailed_inputs(
            1, 3 if phase == "decode" else 130, 1500, 4, 2, 16, noise=1.0, drop=(1, 14), seed=seed
        )
        mask = random_mask(phase, inputs, {}, seed, 0.6)
        # Sinks let the first tile of a head go, so that its second turn in the order would be seen.
        options = {"threshold": 1.0, "block_mask": mask, "sinks": torch.tensor([4.0, 6.0, 3.0, 5.0])}
        got = public(phase)(*inputs, max_skipped_mass=0.05, **options, **EVERYTHING)
        truth = reference_attention(*inputs, phase=phase, max_skipped_mass=0.05, **options)
        assert torch.equal(got.kept_tiles, truth.kept_tiles)
        assert torch.equal(got.counts.skipped, truth.counts.skipped)
        skipped += int(truth.counts.skipped.sum())
        assert float(truth.skipped_mass.max()) <= 0.05 / 1.05
        without = reference_attention(*inputs, phase=phase, **options)
        spared += int((truth.kept_tiles & ~without.kept_tiles).sum())
    assert spared > 0 and skipped > 0
