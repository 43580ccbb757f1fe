"""The rule where every answer is plain: each key tile has one score, so what is skipped follows by hand.

Runs on the reference and the eager kernel, and on the Triton kernels in the process that test_triton.py
starts, and on a GPU. The scores are exact in float32, which the Hopper kernels do not take.
"""

import math

import pytest
import torch
from cases_parts import FEW, blasst_attn_func, blasst_attn_with_kvcache, impls

pytestmark = [
    impls,
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # numpy of the interpreter: log2(0), inf - inf
]

TILE = {"prefill": 128, "decode": 64}
ROWS = {"prefill": 64, "decode": 2}
EVERYTHING = {
    "return_lse": True,
    "return_counts": True,
    "return_kept_tiles": True,
    "return_mass_bound": True,
}
PHASES = pytest.mark.parametrize("phase", ["prefill", "decode"])


def inputs_of(levels, phase, heads=1, missing=0):
    """One sequence whose keys have the score of their tile in every row; `missing` keys end early."""
    keys = len(levels) * TILE[phase] - missing
    q, k = torch.zeros(1, ROWS[phase], heads, 16), torch.zeros(1, keys, heads, 16)
    q[..., 0] = 1.0
    k[..., 0] = torch.tensor(levels).repeat_interleave(TILE[phase])[:keys, None]
    v = torch.randn(1, keys, heads, 16, generator=torch.Generator().manual_seed(0))
    return q, k, v


def call(inputs, phase, threshold, impl, **options):
    attn = blasst_attn_with_kvcache if phase == "decode" else blasst_attn_func
    return attn(*inputs, threshold=threshold, softmax_scale=1.0, impl=impl, **EVERYTHING, **options)


def kept_of(result, head=0):
    return result.kept_tiles[0, head, 0].tolist()


def skips(result):
    return int(result.counts.skipped.sum())


def check_output(result, inputs, phase, head=0, sink=-math.inf):
    """out and lse are those of the kept keys, by their definition in float64."""
    q, k, v = (x[0, :, head].double() for x in inputs)
    kept = result.kept_tiles[0, head, 0].repeat_interleave(TILE[phase])[: k.shape[0]]
    scores = (q @ k.T)[:, kept]
    lse = torch.logaddexp(scores.logsumexp(-1), torch.tensor(sink, dtype=torch.float64))
    out = (scores - lse[:, None]).exp() @ v[kept]
    torch.testing.assert_close(result.lse[0, head].double(), lse, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(result.out[0, :, head].double(), out, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("threshold", [1.0] if FEW else [1.0, 0.5, 0.1])
@PHASES
def test_a_tile_exactly_at_the_cut_is_kept_and_one_step_below_is_skipped(impl, phase, threshold):
    if threshold == 1.0:
        top = cut = 1.0
    else:  # the sum of a maximum of 0 and the logarithm is exact in every dtype
        top, cut = 0.0, float(torch.tensor([threshold]).log())
    below = float(torch.nextafter(torch.tensor(cut), torch.tensor(-math.inf)))
    levels = [top, cut, below, top] + ([top] if phase == "decode" else [])
    inputs = inputs_of(levels, phase)
    got = call(inputs, phase, threshold, impl)
    assert kept_of(got) == [True, True, False, True] + [True] * (len(levels) - 4)
    assert skips(got) == 1
    check_output(got, inputs, phase)


@pytest.mark.parametrize(
    ("levels", "kept"),
    [
        ([0.0, -1.0, -20.0, 4.0], [1, 0, 0, 1]),  # the last tile is known before those in the middle
        ([4.0, -1.0, -20.0, 0.0], [1, 0, 0, 0]),  # the first is known before all others
        ([0.0, 9.0, 3.0, 7.0, 0.0], [1, 1, 0, 1, 1]),  # then from the right to the left
    ],
)
def test_prefill_visits_the_first_tile_then_from_the_last_to_the_left(impl, levels, kept):
    inputs = inputs_of(levels, "prefill")
    got = call(inputs, "prefill", 0.05, impl)
    assert kept_of(got) == [bool(x) for x in kept]
    assert got.counts.visited.tolist() == [[len(levels)]]
    assert got.counts.skipped.tolist() == [[kept.count(0)]]
    check_output(got, inputs, "prefill")


@pytest.mark.parametrize(
    ("levels", "kept"),
    [
        ([4.0, -1.0, 2.0, -20.0, -20.0, -20.0], [1, 0, 1, 0, 1, 1]),
        ([-20.0, -1.0, 2.0, -20.0, -20.0, 4.0], [1, 0, 1, 0, 1, 1]),
        ([-20.0, -1.0, 2.0, -20.0, 4.0, -20.0], [1, 0, 1, 0, 1, 1]),
        ([0.0, 9.0, 5.0, -20.0, 0.0, 0.0], [1, 1, 1, 0, 1, 1]),  # 9 is no anchor and counts for nobody
    ],
)
def test_decode_compares_with_its_anchors_alone(impl, levels, kept):
    inputs = inputs_of(levels, "decode")
    got = call(inputs, "decode", 0.05, impl)
    assert kept_of(got) == [bool(x) for x in kept]
    assert got.counts.visited.tolist() == [[len(levels)]]
    check_output(got, inputs, "decode")


@PHASES
def test_a_sink_counts_in_the_maximum_and_in_the_denominator(impl, phase):
    inputs = inputs_of([0.0] * 6, phase, heads=2)
    got = call(inputs, phase, 0.05, impl, sinks=torch.tensor([10.0, -math.inf]))
    anchors = [True, False, False, False, True, True] if phase == "decode" else [False] * 6
    assert kept_of(got, 0) == anchors  # in prefill the sink alone lets even the first tile go
    assert kept_of(got, 1) == [True] * 6
    check_output(got, inputs, phase, 0, 10.0)
    check_output(got, inputs, phase, 1)


@PHASES
def test_the_mass_bound_of_equal_keys_is_their_mass(impl, phase):
    # the maximum rises after tiles were skipped, and the last tile has fewer keys
    levels = [0.0, -5.0, 3.0, -2.0, -4.0] if phase == "prefill" else [0.0, -5.0, -2.0, 1.0, -1.0, 0.5]
    inputs = inputs_of(levels, phase, missing=40)
    got = call(inputs, phase, 1.0, impl)
    dense = call(inputs, phase, None, impl)
    assert kept_of(got) == [level >= 0 for level in levels[:4]] + [phase == "decode"] * (len(levels) - 4)
    mass = -torch.expm1(got.lse.double() - dense.lse.double())
    assert float(mass.min()) > 1e-3
    torch.testing.assert_close(got.mass_bound.double(), mass, rtol=1e-3, atol=0)  # lse is float32


def test_a_prefill_budget_is_spent_once(impl):
    levels, eps = [0.0] + [-3.2] * 12, 0.1
    inputs = inputs_of(levels, "prefill")
    got = call(inputs, "prefill", 1.0, impl, max_skipped_mass=eps)
    weight, spent, row_sum, kept = math.exp(-3.2), 0.0, 1.0, [True]
    for _ in levels[1:]:  # in units of the first tile, in the order of the visits
        fits = spent + weight <= eps * row_sum
        spent, row_sum = (spent + weight, row_sum) if fits else (spent, row_sum + weight)
        kept.insert(1, not fits)
    assert kept_of(got) == kept
    assert 0 < kept.count(False) < 12
    dense = call(inputs, "prefill", None, impl)
    assert bool((-torch.expm1(got.lse - dense.lse) <= eps / (1 + eps) + 1e-6).all())


def test_tiles_of_a_decode_step_share_the_budget(impl):
    # 8 tiles share a tenth of the 3 anchors: each may weigh exp(-3.283) of one tile
    levels = [0.0] + [-3.4, -3.2] * 4 + [0.0, 0.0]
    inputs = inputs_of(levels, "decode")
    got = call(inputs, "decode", 1.0, impl, max_skipped_mass=0.1)
    assert kept_of(got) == [True] + [False, True] * 4 + [True, True]
    check_output(got, inputs, "decode")


@PHASES
def test_nan_in_a_row_or_a_key_keeps_the_tiles_that_see_it(impl, phase):
    levels = [0.0, -20.0, -20.0, -20.0, 0.0, 0.0]
    q, k, v = inputs_of(levels, phase, heads=2)
    kept = [True, False, False, False, True, True]
    assert kept_of(call((q, k, v), phase, 0.05, impl)) == kept
    odd = q.clone()
    odd[0, 1, 0, 3] = math.nan
    got = call((odd, k, v), phase, 0.05, impl)
    assert kept_of(got, 0) == [True] * 6
    assert kept_of(got, 1) == kept
    odd = k.clone()
    odd[0, 2 * TILE[phase] + 5, 0, 3] = math.nan
    got = call((q, odd, v), phase, 0.05, impl)
    assert kept_of(got, 0)[2]
    assert kept_of(got, 1) == kept
    if phase == "prefill":  # the row maxima are NaN from then on
        assert kept_of(got, 0)[1]
        assert not kept_of(got, 0)[3]


def test_a_nan_row_has_no_vote_on_a_tile_that_it_does_not_see(impl):
    q, k, v = inputs_of([0.0, -20.0], "prefill", missing=96)
    q[0, 0] = math.nan  # of 160 keys row 0 sees 97, all in the first tile
    got = call((q, k, v), "prefill", 0.05, impl, causal=True)
    assert kept_of(got) == [True, False]


def test_query_tiles_of_the_dense_tail_skip_nothing(impl):
    levels = [0.0, -20.0, -20.0, 0.0]
    q, k, v = inputs_of(levels, "prefill")
    q = q[:, :1].expand(-1, 150, -1, -1).contiguous()  # query tiles of 64, 64 and 22 rows
    skipping = call((q, k, v), "prefill", 0.05, impl).kept_tiles[0, 0]
    assert skipping.tolist() == [[True, False, False, True]] * 3
    dense = {0: 0, 1: 1, 22: 1, 23: 2, 86: 2, 87: 3, 10**12: 3}  # rows of the tail: query tiles that keep all
    for rows, tiles in dense.items():
        got = call((q, k, v), "prefill", 0.05, impl, dense_tail=rows, max_skipped_mass=0.5)
        expected = skipping.clone()
        expected[3 - tiles :] = True
        assert torch.equal(got.kept_tiles[0, 0], expected)
        assert (int(got.counts.visited.sum()), skips(got)) == (12, 2 * (3 - tiles))
