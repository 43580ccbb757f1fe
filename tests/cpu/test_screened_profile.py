"""Profiles for screen="int8": counts are those of calls, and its curve never serves the other rule."""

import json
import math
from dataclasses import replace
from importlib import resources

import jsonschema
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from blasst import blasst_attn_func
from blasst.calibrate.assemble import achieved_on, build_profile
from blasst.calibrate.counts import CountPoint
from blasst.calibrate.histograms import Histograms
from blasst.core.errors import CalibrationError, ProfileError
from blasst.core.phase_fit import SCREENED_RULE, SERVING_RULES
from blasst.core.prefill_costs import PrefillCosts, prefill_costs
from blasst.core.profile import DataInfo, ModelInfo, Profile, load_profile
from blasst.core.reference import reference_attention
from blasst.core.types import TileShape
from blasst.integrations.threshold_rules import resolve_rules
from blasst.kernels.int8_margins import screened_margins
from blasst.testing import heavy_tailed_inputs


def far_from(margins):
    """Rising thresholds in the middle of wide gaps between margins, where no rounding moves a tile."""
    values = margins[margins.isfinite() & (margins < 0)].double().unique()
    gaps = values.diff()
    middles = (values[:-1] + gaps / 2)[gaps > 1e-2]
    return middles[:: max(1, len(middles) // 4)].exp().tolist()


@st.composite
def calls(draw):
    kv_heads, group = draw(st.sampled_from([1, 2])), draw(st.sampled_from([1, 3]))
    inputs = heavy_tailed_inputs(
        1,
        draw(st.sampled_from([1, 70, 130, 200])),
        draw(st.sampled_from([127, 300, 700])),
        kv_heads * group,
        kv_heads,
        draw(st.sampled_from([16, 40, 64])),
        16,
        dtype=draw(st.sampled_from([torch.bfloat16, torch.float32])),
        seed=draw(st.integers(0, 10**6)),
        noise=draw(st.sampled_from([0.2, 2.0])),
        drop=draw(st.sampled_from([(8.0, 40.0), (1.0, 12.0)])),
    )
    if draw(st.booleans()):
        side = draw(st.sampled_from([inputs.q, inputs.k]))
        place = tuple(draw(st.integers(0, n - 1)) for n in side.shape)
        side[place] = draw(st.sampled_from([math.nan, math.inf]))
    options = {
        "causal": draw(st.booleans()),
        "window_size": draw(st.sampled_from([(-1, -1), (200, 0), (150, 30)])),
        "softcap": draw(st.sampled_from([0.0, 10.0])),
    }
    if draw(st.booleans()):
        options["sinks"] = torch.linspace(-2, 6, kv_heads * group)
    return inputs, options


@settings(max_examples=60)
@given(calls(), st.sampled_from(["eager", "reference"]))
def test_counts_of_a_histogram_are_those_of_calls_at_its_thresholds(call, impl):
    (q, k, v), options = call
    margins = [m for _, _, m in screened_margins(q[0], k[0], softmax_scale=q.shape[-1] ** -0.5, **options)]
    margins = torch.cat(margins, dim=1) if margins else torch.zeros(q.shape[2], 0)
    thresholds = far_from(margins) or [0.01, 1.0]
    histograms = Histograms(np.log(thresholds))
    histograms.add("prefill", 0, 0, k.shape[1], margins)
    _, skipped, visited = histograms.take("prefill", 0, 1)
    for j, threshold in enumerate(thresholds):
        got = blasst_attn_func(
            q, k, v, threshold=threshold, screen="int8", impl=impl, return_counts=True, **options
        ).counts
        assert got.skipped[0].tolist() == skipped[j, 0].tolist()
        assert got.visited[0].tolist() == visited[0].tolist()


@pytest.mark.parametrize("options", [{"causal": True}, {"causal": False, "window_size": (300, 40)}])
def test_margins_are_those_of_the_reference(options):
    q, k, v = heavy_tailed_inputs(1, 200, 900, 4, 2, 64, seed=3, noise=1.0, drop=(2.0, 20.0))
    q[:, :64, :, ::4] /= 16  # channels are weighed by all rows, not by those of the first tile
    truth = reference_attention(q, k, v, threshold=0.1, int8_screen=True, **options).margin[0]
    found = torch.full_like(truth, math.nan)
    for i, first, margin in screened_margins(q[0], k[0], softmax_scale=0.125, **options):
        found[:, i, first : first + margin.shape[1]] = margin
    # scores of size 50 in float32, whose bounds add their own rounding
    torch.testing.assert_close(found, truth, rtol=0, atol=1e-3, equal_nan=True)
    assert int((truth < -1).sum()) > 20


def counted(seqlen, shift):
    """Counts whose sparsity is logistic in ln(threshold) and ln(length)."""
    threshold = np.logspace(-6, 0, 40)
    x = 4.0 + shift + 1.1 * np.log(threshold) + 0.9 * np.log(seqlen / 512)
    skipped = np.round(100_000 / (1 + np.exp(-x))).astype(np.int64)
    return CountPoint("prose", seqlen, threshold, skipped, 100_000)


class Table:
    """Counts of the lengths 128 to 1024 by one rule of prefill."""

    def __init__(self, rule, shift=0.0):
        self.rules = {"prefill": rule}
        self.shift = shift

    def points(self, phase):
        return [counted(n, self.shift) for n in (128, 256, 512, 1024)] if phase == "prefill" else []


OWN, SCREENED = Table(SERVING_RULES["prefill"]), Table(SCREENED_RULE, shift=-0.7)
INFO = {"model_info": ModelInfo("tiny", "f00d"), "data_info": DataInfo("cafe", 4, ("prose",))}


@pytest.fixture(scope="module")
def profile():
    return build_profile(OWN, screened=SCREENED, target_sparsity=0.5, **INFO)


def test_the_second_curve_goes_through_the_file_and_the_schema(profile, tmp_path):
    profile.save(tmp_path / "p.json")
    assert load_profile(tmp_path / "p.json", fingerprint="f00d") == profile
    content = json.loads((tmp_path / "p.json").read_text())
    assert content["version"] == 1 and list(content["phases"]) == ["prefill", "prefill_screened"]
    assert profile.screened.rule == SCREENED_RULE and profile.phases["prefill"].rule.order == "sink_first"
    schema = json.loads(resources.files("blasst.core").joinpath("profile.schema.json").read_text())
    jsonschema.validate(content, schema)
    content["phases"]["prefill_screened"]["order"] = "sink_first"
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(content, schema)
    with pytest.raises(ProfileError, match=r"prefill_screened\.order: found 'sink_first', wanted 'int8'"):
        Profile.from_json(content)
    content["phases"]["prefill_screened"]["order"] = "int8"
    content["phases"]["prefill_screened"]["dense_tail"] = -1
    with pytest.raises(ProfileError, match=r"prefill_screened\.dense_tail"):
        Profile.from_json(content)


def test_the_screened_curve_alone_makes_a_profile(profile):
    alone = replace(profile, phases={}, target_sparsity={})
    assert Profile.from_json(json.loads(json.dumps(alone.to_json()))) == alone
    assert resolve_rules(alone, {"prefill": 0.5}, None, None, screen="int8")["prefill"].value == 0.5
    with pytest.raises(ProfileError, match="prefill"):
        resolve_rules(alone, {"prefill": 0.5}, None, None)
    with pytest.raises(ProfileError, match="phases: found nothing"):
        Profile.from_json({**alone.to_json(), "phases": {}})


def test_no_rule_gets_the_thresholds_of_the_other(profile, tmp_path):
    screened = resolve_rules(profile, None, None, None, screen="int8")["prefill"]
    own = resolve_rules(profile, None, None, None)["prefill"]
    # a shift of 0.7 in logit is one of 0.7 / 1.1 in ln(threshold)
    ratio = screened.for_length(700) / own.for_length(700)
    assert ratio == pytest.approx(math.exp(0.7 / 1.1), rel=0.01)
    lengths = torch.tensor([200, 700])
    wanted = [screened.for_length(n) for n in (200, 700)]
    assert screened.for_lengths(lengths).tolist() == pytest.approx(wanted, rel=1e-4)
    plain = replace(profile, screened=None)
    plain.save(tmp_path / "plain.json")
    for given_profile in (plain, str(tmp_path / "plain.json")):
        with pytest.raises(ProfileError, match=r"prefill_screened: found nothing .*'prefill'.*--screen int8"):
            resolve_rules(given_profile, 0.5, None, None, screen="int8")
    with pytest.raises(ProfileError, match="found 'int8', wanted 'sink_first'"):
        resolve_rules(profile.for_screen("int8"), 0.5, None, None)
    with pytest.raises(ProfileError, match=r"prefill_screened\.tile"):
        other = replace(profile.screened, tile=TileShape(128, 128))
        replace(profile, screened=other).require_match()
    with pytest.raises(ValueError, match="int8"):
        profile.for_screen("int4")
    assert profile.for_screen(None) is profile


def test_counts_by_one_rule_are_not_held_against_the_other(profile):
    rows = achieved_on(profile.for_screen("int8"), SCREENED, targets=(0.3, 0.7))
    assert all(row["achieved"] == pytest.approx(row["target"], abs=0.01) for row in rows) and len(rows) == 8
    with pytest.raises(CalibrationError, match=r"counts of prefill: counted by .*int8"):
        achieved_on(profile, SCREENED)
    with pytest.raises(CalibrationError, match="counts of prefill"):
        achieved_on(profile.for_screen("int8"), OWN)
    with pytest.raises(ProfileError, match="found 'sink_first', wanted 'int8'"):
        build_profile(OWN, screened=OWN, **INFO)


def test_both_curves_must_reach_a_default_target():
    with pytest.raises(CalibrationError, match="out of reach"):
        build_profile(OWN, screened=Table(SCREENED_RULE, shift=-4.0), target_sparsity=0.9, **INFO)


def test_a_sparsity_is_predicted_as_its_threshold_was(profile):
    for fit in profile.fits.values():
        log_scale, exponent = fit.model.coefficients(0.6)
        assert fit.predicted_sparsity(math.exp(log_scale) * 700**exponent, 700) == pytest.approx(0.6)
        assert fit.predicted_sparsity(0.0, 700) == 0.0
        assert fit.predicted_sparsity(1.0, 700) <= fit.reachable_sparsity(700) < 1.0
    theirs = replace(profile.screened, selected="exponential")
    threshold = theirs.exponential.a * math.exp(theirs.exponential.b * 0.4) / 512
    assert theirs.predicted_sparsity(threshold, 512) == pytest.approx(0.4)


def test_costs_are_compared_at_one_threshold(profile):
    study = [PrefillCosts(0.01, 0.55, 0.40), PrefillCosts(0.03, 0.69, 0.57), PrefillCosts(0.1, 0.81, 0.73)]
    assert [round(c.fused, 2) for c in study] == [1.45, 1.31, 1.19]
    assert [round(c.screened, 2) for c in study] == [1.70, 1.36, 1.04]
    assert [c.screen for c in study] == [None, None, "int8"]
    costs = prefill_costs(profile, 0.6, 700)
    assert costs.threshold == profile.threshold("prefill", 0.6, 700)
    assert costs.sparsity == pytest.approx(0.6, abs=1e-6)
    assert costs.screened_sparsity == pytest.approx(1 / (1 + math.exp(0.7 - math.log(0.6 / 0.4))), abs=0.01)
    again = profile.for_screen("int8").threshold("prefill", costs.screened_sparsity, 700)
    assert again == pytest.approx(costs.threshold)
    assert [prefill_costs(profile, target, 700).screen for target in (0.3, 0.9)] == [None, "int8"]
    with pytest.raises(ProfileError, match="prefill_screened"):
        prefill_costs(replace(profile, screened=None), 0.5, 700)
