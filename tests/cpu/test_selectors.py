"""Other methods as selectors: what they keep, their dials, and their own formulas against plain ones."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from blasst import blasst_attn_func, blasst_attn_with_kvcache
from blasst.core.reference import reference_attention
from blasst.core.sequences import visible_range
from blasst.selectors import (
    H2O,
    FlexPrefill,
    MInference,
    Quest,
    RocketKV,
    SnapKV,
    SpargeAttention,
    XAttention,
    mask_sparsity,
    reach_sparsity,
)
from blasst.selectors.prompt_votes import pooled, prompt_votes
from blasst.selectors.quest import rows_of_kv_heads, upper_bounds
from blasst.selectors.spargeattention import self_similarity
from blasst.selectors.tiles import PromptTiles, largest, smallest_set, tile_means
from blasst.selectors.vertical_slash import BAND, line_weights, tiles_on_lines
from blasst.testing import heavy_tailed_inputs

PREFILL = [XAttention(), FlexPrefill(), FlexPrefill(tau=2.0), MInference(), SpargeAttention(theta=-1.0)]
DECODE = [Quest(), SnapKV(), H2O(), RocketKV()]
NAME = {"ids": lambda s: f"{type(s).__name__}{'-means' if getattr(s, 'tau', 0) > 1 else ''}"}


@st.composite
def prompts(draw):
    seqlen_k = draw(st.sampled_from([1, 64, 127, 129, 400, 700]))
    seqlen_q = min(draw(st.sampled_from([1, 63, 65, 130, 700])), seqlen_k)
    return heavy_tailed_inputs(
        draw(st.sampled_from([1, 2])),
        seqlen_q,
        seqlen_k,
        4,
        draw(st.sampled_from([1, 2])),
        16,
        noise=draw(st.sampled_from([0.5, 3.0])),
        block=128,
        seed=draw(st.integers(0, 1000)),
    )


def rows_without_a_tile(mask, seqlen_q, seqlen_k, causal, query, key):
    """Rows that see keys but keep no tile, counted row by row."""
    row = torch.arange(seqlen_q)
    begin, end = visible_range(row, seqlen_q, seqlen_k, causal, (-1, -1))
    tile = torch.arange(mask.shape[-1]) * key
    sees = (tile < end[:, None]) & (tile + key > begin[:, None])
    return int(((~(mask[:, :, row // query] & sees).any(-1)) & sees.any(-1)).sum())


@pytest.mark.parametrize("selector", PREFILL, **NAME)
@settings(max_examples=25)
@given(prompts(), st.booleans(), st.lists(st.floats(0, 1), min_size=2, max_size=3))
def test_prefill_masks_leave_no_row_empty_and_grow_with_the_dial(selector, inputs, causal, dials):
    q, k, v = inputs
    visible = PromptTiles.of(q, k, causal).visible()
    smaller = None
    for dial in [*sorted(dials), 1.0]:
        mask = replace(selector, dial=dial).select(q, k, causal=causal)
        assert mask.dtype == torch.bool and mask.shape[:2] == (q.shape[0], 4)
        assert not bool((mask & ~visible).any())
        assert rows_without_a_tile(mask, q.shape[1], k.shape[1], causal, 64, 128) == 0
        assert smaller is None or not bool((smaller & ~mask).any())
        smaller = mask
    assert bool((smaller == visible).all())  # dial 1
    dense = blasst_attn_func(q, k, v, causal=causal).out
    assert torch.equal(blasst_attn_func(q, k, v, causal=causal, block_mask=smaller).out, dense)


@pytest.mark.parametrize("selector", DECODE, **NAME)
@settings(max_examples=25)
@given(prompts(), st.sampled_from([1, 3]), st.lists(st.floats(0, 1), min_size=2, max_size=3))
def test_decode_masks_leave_no_row_empty_and_grow_with_the_dial(selector, inputs, new, dials):
    _, k, v = inputs
    new = min(new, k.shape[1])
    if k.shape[1] - new < 1:
        return
    q = torch.randn(k.shape[0], k.shape[1], 4, 16)
    step, past = q[:, -new:], q[:, : k.shape[1] - new]
    smaller = None
    for dial in [*sorted(dials), 1.0]:
        mask = replace(selector, dial=dial).select(step, k, past_q=past)
        assert mask.dtype == torch.bool and mask.shape[:3] == (k.shape[0], k.shape[2], 1)
        assert rows_without_a_tile(mask, new, k.shape[1], True, new, 64) == 0
        if smaller is not None:  # RocketKV's second stage may change its choice among more survivors
            assert bool((smaller.sum(-1) <= mask.sum(-1)).all())
            assert isinstance(selector, RocketKV) or not bool((smaller & ~mask).any())
        smaller = mask
    assert bool(smaller.all())
    dense = blasst_attn_with_kvcache(step, k, v, causal=True).out
    assert torch.equal(blasst_attn_with_kvcache(step, k, v, causal=True, block_mask=smaller).out, dense)


def test_rows_that_see_no_key_ask_for_no_tile():
    q, k, v = heavy_tailed_inputs(1, 300, 100, 2, 1, 16)
    for selector in PREFILL:
        mask = selector.select(q, k)
        assert not bool(mask[:, :, :3].any()) and bool(mask[:, :, 4].all())
        blasst_attn_func(q, k, v, causal=True, block_mask=mask)


def tile_mass(q, k, causal=True):
    """Softmax weight of each key tile of 128, mean over rows, heads and sequences of a query tile."""
    keys = k.repeat_interleave(q.shape[2] // k.shape[2], dim=2)
    scores = torch.einsum("bqhd,bkhd->bhqk", q, keys) * q.shape[-1] ** -0.5
    if causal:
        hidden = ~torch.ones(q.shape[1], k.shape[1], dtype=torch.bool).tril(k.shape[1] - q.shape[1])
        scores = scores.masked_fill(hidden, -torch.inf)
    weight = scores.softmax(-1).unflatten(-1, (-1, 128)).sum(-1)
    return weight.unflatten(2, (-1, 64)).mean(3)


@pytest.mark.parametrize("selector", PREFILL, **NAME)
def test_prefill_selectors_leave_out_light_tiles(selector):
    q, k, _ = heavy_tailed_inputs(1, 1024, 2048, 2, 1, 32, block=128, hot_fraction=0.2, drop=(2, 9), seed=3)
    found = reach_sparsity(selector, q, k, 0.4).select(q, k)
    visible = PromptTiles.of(q, k, True).visible()
    sparsity = mask_sparsity(found, visible)
    skipped = float(tile_mass(q, k).masked_fill(found, 0.0).sum(-1).mean())
    assert 0.2 < sparsity <= 0.4
    # Columns are all that matters in these inputs; lines waste half of what they keep on diagonals.
    assert skipped < (0.6 if isinstance(selector, MInference) else 0.2) * sparsity


@pytest.mark.parametrize("selector", DECODE, **NAME)
def test_decode_selectors_keep_hot_tiles(selector):
    q, k, v = heavy_tailed_inputs(1, 1500, 1500, 2, 1, 32, block=64, hot_fraction=0.25, drop=(9, 20), seed=5)
    step, past = q[:, -1:], q[:, :-1]
    truth = reference_attention(step, k, v, phase="decode")
    hot = truth.margin[0, 0, 0] > -5
    assert 6 <= int(hot.sum()) <= 12  # of 24
    mask = replace(selector, dial=20 / 24 if isinstance(selector, H2O) else 14 / 24)
    mask = mask.select(step, k, past_q=past)[0, 0, 0]
    light = truth.margin[0, 0, 0].isposinf()  # an anchor may be light, and left out
    assert int(mask.sum()) < 24 and bool((mask | light)[hot].all())


@given(
    st.lists(st.floats(0, 1), min_size=1, max_size=12),
    st.floats(0, 1),
    st.integers(0, 4095),
    st.integers(0, 4095),
)
def test_the_smallest_set_is_smallest(values, share, candidate_bits, always_bits):
    mass = torch.tensor(values, dtype=torch.float64)
    bit = 2 ** torch.arange(len(values))
    candidates = (candidate_bits & bit) > 0
    always = candidates & ((always_bits & bit) > 0)
    got = smallest_set(mass, share, candidates, always)
    total = mass[candidates].sum()
    assert not bool((always & ~got).any()) and not bool((got & ~candidates).any())
    if share == 1:
        assert torch.equal(got, candidates)
        return
    assert float(mass[got].sum()) >= share * float(total) - 1e-9
    extra = got & ~always
    if bool(extra.any()):  # without its lightest member it would not do
        assert float(mass[got].sum() - mass[extra].min()) < share * float(total) + 1e-9


def test_the_largest_count_those_always_kept():
    score = torch.tensor([5.0, 1.0, 4.0, 3.0, 2.0])
    always = torch.tensor([False, True, False, False, False])
    candidates = torch.tensor([True, True, True, True, False])
    assert largest(score, 3, candidates, always).tolist() == [True, True, True, False, False]
    assert largest(score, 0, candidates, always).tolist() == always.tolist()
    assert largest(score, 9, candidates, always).tolist() == candidates.tolist()


@given(st.integers(0, 1000), st.sampled_from([60, 64, 200]), st.booleans())
def test_quests_bound_is_above_every_score_of_the_tile(seed, seqlen_k, tight):
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(2, 3, 4, 16, generator=generator)
    k = torch.randn(2, seqlen_k, 2, 16, generator=generator)
    if tight:  # all keys of a tile alike: the bound is the score
        k = k[:, torch.arange(seqlen_k) // 64 * 64]
    rows = rows_of_kv_heads(q, k)
    bound = upper_bounds(rows, k)
    score = rows @ k.permute(0, 2, 3, 1)
    score = torch.nn.functional.pad(score, (0, -seqlen_k % 64), value=-torch.inf).unflatten(-1, (-1, 64))
    best = score.amax(-1)
    assert bound.shape == best.shape
    # Both are sums of 16 products below 5 * 5 in float32.
    rounding = 2 * 16 * 25 * torch.finfo(torch.float32).eps
    assert bool((bound >= best - rounding).all())
    if tight:
        assert float((bound - best).abs().max()) <= rounding
    else:
        assert float((bound - best).max()) > 1.0


def test_rows_of_a_kv_head_are_its_own_query_heads():
    q = torch.arange(4.0).view(1, 1, 4, 1).expand(1, 2, 4, 1)
    k = torch.zeros(1, 5, 2, 1)
    rows = rows_of_kv_heads(q, k)[0, :, :, 0]
    assert sorted(rows[0].tolist()) == [0, 0, 1, 1] and sorted(rows[1].tolist()) == [2, 2, 3, 3]


def test_xattention_sums_antidiagonals():
    q, k, _ = heavy_tailed_inputs(1, 200, 300, 2, 1, 16, noise=2.0, seed=7)
    grid = PromptTiles.of(q, k, True)
    got = XAttention(stride=8)._mass(q, k, grid, 0.25)[0, 1]
    scores = torch.zeros(25, 38)
    for a in range(25):
        for b in range(38):
            for i in range(8):
                row, key = 8 * a + 7 - i, 8 * b + i
                if key < 300:
                    scores[a, b] += q[0, row, 1] @ k[0, key, 0] * 0.25 / 8
            if 8 * b > 8 * a + 7 + 100:
                scores[a, b] = -torch.inf
    weight = scores.softmax(-1)
    want = torch.zeros(4, 3)
    for a in range(25):
        for b in range(38):
            want[a // 8, b // 16] += weight[a, b]
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


@given(st.integers(0, 1000), st.booleans(), st.sampled_from([(130, 300), (64, 64), (200, 129)]))
@settings(max_examples=20)
def test_tiles_on_lines_are_those_that_a_line_touches(seed, causal, lengths):
    seqlen_q, seqlen_k = lengths
    generator = torch.Generator().manual_seed(seed)
    q, k = torch.zeros(1, seqlen_q, 1, 4), torch.zeros(1, seqlen_k, 1, 4)
    grid = PromptTiles.of(q, k, causal)
    lines = line_weights(q, k, 64, grid, 1.0)
    columns = torch.rand(lines.columns.shape, generator=generator) < 0.2
    bands = torch.rand(lines.bands.shape, generator=generator) < 0.2
    got = tiles_on_lines(columns, bands, lines.zero, grid)[0, 0]
    offset = torch.arange(seqlen_q)[:, None] + seqlen_k - seqlen_q - torch.arange(seqlen_k)
    real = offset // BAND + lines.zero
    on_band = bands[0, 0][real.clamp(0, bands.shape[-1] - 1)] & (real >= 0) & (real < bands.shape[-1])
    if causal:
        on_band &= offset >= 0
    want = torch.zeros(grid.shape, dtype=torch.bool)
    for i in range(grid.shape[0]):
        for j in range(grid.shape[1]):
            want[i, j] = on_band[64 * i : 64 * i + 64, 128 * j : 128 * j + 128].any()
    assert torch.equal(got, (want | columns[0, 0]) & grid.visible())


def test_line_weights_are_sums_of_the_last_rows_softmax():
    q, k, _ = heavy_tailed_inputs(1, 150, 300, 2, 1, 16, noise=2.0, seed=8)
    lines = line_weights(q, k, 70, PromptTiles.of(q, k, True), 0.25)
    scores = q[0, -70:, 1] @ k[0, :, 0].T * 0.25
    offset = torch.arange(230, 300)[:, None] - torch.arange(300)
    weight = scores.masked_fill(offset < 0, -torch.inf).softmax(-1)
    for j in range(3):
        torch.testing.assert_close(lines.columns[0, 1, j], weight[:, 128 * j : 128 * j + 128].sum())
    for band in range(5):
        inside = (offset >= band * BAND) & (offset < (band + 1) * BAND)
        torch.testing.assert_close(lines.bands[0, 1, lines.zero + band], weight[inside].sum())
    assert float(lines.bands[0, 1, : lines.zero].abs().sum()) == 0


def test_flexprefill_trusts_means_where_keys_of_a_tile_are_alike():
    q, k, _ = heavy_tailed_inputs(1, 512, 512, 2, 1, 16, noise=2.0, seed=9)
    alike = k[:, torch.arange(512) // 128 * 128]
    same = q[:, :1].expand_as(q)
    selector = FlexPrefill(rows=1)
    distances = []
    for rows, keys in ((same, alike), (q, k)):
        lines = line_weights(rows, keys, 1, PromptTiles.of(rows, keys, True), 0.25)
        distances.append(selector.means_distance(rows, keys, lines, 0.25))
    assert float(distances[0].max()) < 1e-3 < float(distances[1].min())
    assert bool((distances[1] < 0.84).all())  # sqrt(ln 2) is the largest there is
    by_means, by_lines = (FlexPrefill(0.5, tau, 1).select(q, k) for tau in (1.0, 0.0))
    assert not torch.equal(by_means, by_lines)
    means = tile_means(q.transpose(1, 2), 64)[0, 0] @ tile_means(k.transpose(1, 2), 128)[0, 0].T * 0.25
    grid = PromptTiles.of(q, k, True)
    weight = means.masked_fill(~grid.visible(), -torch.inf).softmax(-1).flatten()
    always = (grid.first() | grid.last()).flatten()
    want = smallest_set(weight, 0.5, grid.visible().flatten(), always).view(grid.shape)
    assert torch.equal(by_means[0, 0], want)


def test_spargeattention_keeps_tiles_that_do_not_resemble_themselves():
    generator = torch.Generator().manual_seed(0)
    q = torch.ones(1, 512, 1, 32)
    sign = torch.tensor([1.0, -1.0, -1.0, 1.0]).repeat_interleave(128)
    k = sign.view(1, -1, 1, 1).repeat(1, 1, 1, 32)
    selector = SpargeAttention(dial=0.5, theta=0.5)
    assert selector.select(q, k)[0, 0, -1].tolist() == [True, False, False, True]
    k[:, 128:256] = torch.randn(1, 128, 1, 32, generator=generator)
    assert selector.select(q, k)[0, 0, -1].tolist() == [True, True, False, True]
    q[:, 448:] = torch.randn(1, 64, 1, 32, generator=generator)
    mask = selector.select(q, k)[0, 0]
    assert mask[-1].tolist() == [True] * 4 and mask[-2].tolist() == [True, True, False, True]


def test_self_similarity_is_the_mean_cosine_of_pairs():
    x = torch.randn(1, 1, 100, 8)
    unit = torch.nn.functional.normalize(x[0, 0, 64:], dim=-1)
    torch.testing.assert_close(self_similarity(x, 64)[0, 0, 1], (unit @ unit.T).mean(), rtol=1e-4, atol=1e-5)


def test_minference_keeps_the_first_tile_and_the_nearest_diagonals():
    q, k, _ = heavy_tailed_inputs(1, 1024, 1024, 1, 1, 16, seed=10)
    mask = MInference(dial=0.0).select(q, k)[0, 0]
    want = torch.zeros(16, 8, dtype=torch.bool)
    want[:, 0] = True
    for i in range(16):
        for j in range(8):
            near = range(max(64 * i - 127, 0), 64 * i + 64)  # keys less than two bands behind some row
            want[i, j] |= any(128 * j <= key < 128 * j + 128 for key in near)
    assert torch.equal(mask, want)


@pytest.mark.parametrize("rows", [20, 1000])
def test_votes_are_softmax_weights_of_the_last_rows(rows):
    past = torch.randn(1, 600, 4, 16)
    k = torch.randn(1, 700, 2, 16)
    got = prompt_votes(past, k, rows, 0.25)
    keys = k[:, :600].repeat_interleave(2, dim=2)
    scores = torch.einsum("bqhd,bkhd->bhqk", past, keys) * 0.25
    weight = scores.masked_fill(~torch.ones(600, 600, dtype=torch.bool).tril(), -torch.inf).softmax(-1)
    want = weight[:, :, -min(rows, 600) :].sum(2).unflatten(1, (2, 2)).mean(2)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


def test_votes_are_pooled_over_neighbours():
    votes = torch.zeros(1, 1, 9)
    votes[..., 4] = 2.0
    assert pooled(votes, 3)[0, 0].tolist() == [0, 0, 0, 2, 2, 2, 0, 0, 0]


def test_snapkv_listens_to_the_window_and_h2o_to_all_queries():
    # Early queries look at tile 2, those of the window at tile 5; 16 tiles of 64.
    k = torch.zeros(1, 1024, 1, 16)
    k[:, 128:192, :, 0] = 8.0
    k[:, 320:384, :, 1] = 8.0
    past = torch.zeros(1, 1020, 1, 16)
    past[:, 300:900, :, 0] = 8.0
    past[:, -32:, :, 1] = 8.0
    step = torch.zeros(1, 1, 1, 16)
    snap = SnapKV(dial=2 / 16).select(step, k, past_q=past)[0, 0, 0]
    assert snap.nonzero().flatten().tolist() == [5, 15]
    heavy = H2O(dial=2 / 16).select(step, k, past_q=past)[0, 0, 0]
    assert heavy.nonzero().flatten().tolist() == [2, 15]
    recent = H2O(dial=6 / 16).select(step, k, past_q=past)[0, 0, 0]
    assert {2, 13, 14, 15} <= set(recent.nonzero().flatten().tolist()) and int(recent.sum()) == 6


def test_rocketkv_chooses_among_the_survivors_of_its_first_stage():
    generator = torch.Generator().manual_seed(11)
    q, k = (torch.randn(1, 1500, heads, 16, generator=generator) for heads in (4, 2))
    step, past = q[:, -1:], q[:, :-1]
    rocket = RocketKV(dial=0.25).select(step, k, past_q=past)
    first = SnapKV(0.5, 32, 63).select(step, k, past_q=past)
    quest = Quest(dial=0.25).select(step, k)
    assert not bool((rocket & ~first).any())
    assert int(first.sum()) == 2 * 12 and int(rocket.sum()) == 2 * 6
    assert not torch.equal(rocket, quest)
    everyone = RocketKV(dial=0.25, channels=1.0)
    bound = upper_bounds(rows_of_kv_heads(step, k) * 0.25, k).amax(2)
    always = torch.zeros(24, dtype=torch.bool)
    always[-1] = True
    assert torch.equal(
        everyone.select(step, k, past_q=past)[:, :, 0], largest(bound, 6, first[:, :, 0], always)
    )


@pytest.mark.parametrize("selector", PREFILL, **NAME)
def test_the_dial_reaches_a_sparsity_and_not_more(selector):
    q, k, _ = heavy_tailed_inputs(1, 1024, 1024, 4, 2, 16, noise=3.0, drop=(2, 8), seed=12)
    visible = PromptTiles.of(q, k, True).visible()
    low = mask_sparsity(replace(selector, dial=0.0).select(q, k), visible)
    for wanted in (0.1, 0.3, 1.0):
        found = reach_sparsity(selector, q, k, wanted)
        got = mask_sparsity(found.select(q, k), visible)
        assert got <= wanted
        if wanted >= low:
            assert found.dial == 0.0 and got == low
        elif isinstance(selector, XAttention | SpargeAttention):  # single tiles; lines go in steps
            assert got > wanted - 0.05


@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_blasst_skips_further_inside_a_selection(phase):
    q, k, v = heavy_tailed_inputs(1, 640, 1280, 4, 2, 16, noise=2.0, drop=(4, 12), seed=13)
    if phase == "prefill":
        mask, attn = XAttention(0.95).select(q, k), blasst_attn_func
    else:
        q, attn = q[:, -1:], blasst_attn_with_kvcache
        mask = Quest(0.6).select(q, k)
    options = {"causal": True, "threshold": 0.1, "block_mask": mask}
    got = attn(q, k, v, **options, return_counts=True, return_kept_tiles=True)
    truth = reference_attention(q, k, v, **options, phase=phase)
    assert torch.equal(got.kept_tiles, truth.kept_tiles)
    assert 0 < int(got.counts.skipped.sum()) < int(mask.sum())
    torch.testing.assert_close(got.out.double(), truth.out, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("selector", "change", "message"),
    [
        (XAttention(dial=1.5), {}, r"^dial: got 1.5, want a number in \[0, 1\]"),
        (Quest(dial=float("nan")), {}, "^dial: got nan"),
        (XAttention(stride=24), {}, "^stride: got 24, want a divisor of 64"),
        (MInference(rows=0), {}, "^rows: got 0"),
        (FlexPrefill(rows=0), {}, "^rows: got 0"),
        (SnapKV(kernel_size=4), {}, "^window, kernel_size: got 32 and 4"),
        (RocketKV(channels=0.0), {}, "^channels: got 0.0"),
        (H2O(), {"past_q": None}, "^past_q: got None, H2O wants"),
        (SnapKV(), {"past_q": torch.zeros(1, 200, 4, 8)}, "^past_q: got shape .*, SnapKV wants"),
        (RocketKV(), {"past_q": torch.zeros(1, 300, 4, 16)}, "^past_q: got shape .*1 to 299"),
        (XAttention(), {"k": torch.zeros(1, 300, 3, 16)}, "^k: got 3 heads for 4 query heads"),
        (Quest(), {"k": torch.zeros(2, 300, 2, 16)}, "^k: got batch 2, want 1"),
        (Quest(), {"q": torch.zeros(1, 0, 4, 16)}, "^q, k: got 0 rows"),
    ],
)
def test_bad_input_is_named(selector, change, message):
    inputs = {"q": torch.zeros(1, 1, 4, 16), "k": torch.zeros(1, 300, 2, 16)}
    if isinstance(selector, Quest | SnapKV | H2O | RocketKV):
        inputs["past_q"] = torch.zeros(1, 200, 4, 16)
    with pytest.raises(ValueError, match=message):
        selector.select(**{**inputs, **change})
