"""The fit of both models: on data that follow one of them, on published data, on samples that say nothing."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable

import numpy as np
import pytest

from blasst.calibrate.counts import achieved_sparsity, group_by_length
from blasst.calibrate.fit import CountPoint, fit_phase
from blasst.core.errors import CalibrationError
from blasst.core.phase_fit import PhaseFit
from blasst.core.profile import DataInfo, ModelInfo, Profile, ProfileWarning
from blasst.core.sparsity_model import ExponentialModel, LengthExponentModel
from blasst.core.types import Phase

GRID = np.exp(np.linspace(-14.0, 0.0, 57))
LENGTHS = (2048, 4096, 8192, 16384)


def _points(
    sparsity: Callable[[np.ndarray, float], np.ndarray],
    lengths: tuple[int, ...] = LENGTHS,
    kinds: tuple[str, ...] = ("prose", "code"),
    visited: int = 10**7,
) -> list[CountPoint]:
    """Counts that follow a function of ln(threshold) and the length."""
    return [
        CountPoint(
            kind,
            n,
            GRID,
            np.floor(np.clip(sparsity(np.log(GRID), n), 0.0, 1.0) * visited).astype(np.int64),
            visited,
        )
        for n in lengths
        for kind in kinds
    ]


def _exponential(log_threshold: np.ndarray, length: float) -> np.ndarray:
    return (log_threshold + math.log(length) - math.log(7.93)) / 8.61


def _saturating(log_threshold: np.ndarray, length: float) -> np.ndarray:
    """Saturates at 0.97 and follows length^-1.2, as published fixed-threshold data do."""
    return 0.97 / (1.0 + np.exp(-(log_threshold + 3.3 + 1.2 * math.log(length / 4096)) / 2.1))


def _achieved(fit: PhaseFit, target: float, length: float, truth: Callable[..., np.ndarray]) -> float:
    log_scale, exponent = fit.model.coefficients(target)
    log_threshold = min(0.0, log_scale + exponent * math.log(length))
    return float(np.clip(truth(np.array(log_threshold), length), 0.0, 1.0))


def _held_out_rms(fit: PhaseFit, model: str) -> float:
    rows = [row for row in fit.residuals if row.model == model and row.held_out]
    assert rows
    return math.sqrt(np.mean([r * r for row in rows for r in row.residual]))


def test_data_that_follow_the_exponential_give_its_coefficients_back_and_select_it() -> None:
    fit = fit_phase(_points(_exponential), phase="prefill")
    assert fit.exponential.a == pytest.approx(7.93, rel=1e-3)
    assert fit.exponential.b == pytest.approx(8.61, rel=1e-3)
    assert fit.exponential.r2 > 0.99999
    assert fit.selected == "exponential"
    assert fit.selected_by == "held_out_lengths"
    assert _held_out_rms(fit, "exponential") < 1e-3


def test_data_that_saturate_and_follow_length_to_the_minus_1_2_select_our_model() -> None:
    fit = fit_phase(_points(_saturating), phase="prefill")
    assert fit.selected == "length_exponent"
    assert fit.length_exponent is not None
    assert fit.length_exponent.c3 == pytest.approx(-1.2, abs=0.01)
    assert _held_out_rms(fit, "length_exponent") < 0.01
    assert _held_out_rms(fit, "exponential") > 3 * _held_out_rms(fit, "length_exponent")
    for length in (3000, 16384, 65536):  # inside, at the border and 4x beyond the fitted lengths
        for target in (0.3, 0.5, 0.7):
            assert _achieved(fit, target, length, _saturating) == pytest.approx(target, abs=0.015)


def test_published_fixed_threshold_data_fit_better_with_a_length_exponent() -> None:
    # Llama-3.1-8B, achieved sparsity in percent at 4K to 64K for thresholds 1e-3 and 3e-3 (BLASST, table 6).
    lengths = (4096, 8192, 16384, 32768, 65536)
    published = {
        1e-3: (23.09, 37.92, 52.38, 65.72, 74.63),
        3e-3: (42.35, 57.54, 69.83, 79.36, 84.63),
    }
    threshold = np.array(sorted(published))
    points = [
        CountPoint("ruler", n, threshold, np.array([round(published[t][i] * 100) for t in threshold]), 10_000)
        for i, n in enumerate(lengths)
    ]
    fit = fit_phase(points, phase="prefill")
    assert fit.selected == "length_exponent"
    assert fit.length_exponent is not None
    assert -1.4 < fit.length_exponent.c3 < -1.0
    assert fit.length_exponent.r2 > 0.98
    assert _held_out_rms(fit, "length_exponent") < 0.02
    assert _held_out_rms(fit, "exponential") > 2 * _held_out_rms(fit, "length_exponent")
    # docs/calibration.md quotes these errors at the ten published points.
    for model, wanted in ((fit.length_exponent, 0.003), (fit.exponential, 0.031)):
        errors = [
            _sparsity_of(model, t, n) - published[t][i] / 100
            for t in published
            for i, n in enumerate(lengths)
        ]
        assert math.sqrt(np.mean(np.square(errors))) == pytest.approx(wanted, abs=0.001)


def _sparsity_of(model: ExponentialModel | LengthExponentModel, threshold: float, length: float) -> float:
    """Target at which a model gives a threshold, by bisection."""
    low, high = 0.0, 1.0
    for _ in range(50):
        target = (low + high) / 2
        log_scale, exponent = model.coefficients(target)
        if log_scale + exponent * math.log(length) < math.log(threshold):
            low = target
        else:
            high = target
    return low


def test_two_lengths_are_compared_on_the_fitted_lengths_and_say_so() -> None:
    fit = fit_phase(_points(_saturating, lengths=(2048, 8192)), phase="prefill")
    assert fit.selected_by == "fitted_lengths"
    assert fit.selected == "length_exponent"
    assert not any(row.held_out for row in fit.residuals)


def test_one_length_fits_the_exponential_only_and_says_so() -> None:
    with pytest.warns(ProfileWarning, match="exponent of the length cannot be fitted"):
        fit = fit_phase(_points(_saturating, lengths=(4096,)), phase="prefill")
    assert fit.length_exponent is None
    assert fit.selected == "exponential"
    assert fit.selected_by == "single_length"


def test_lengths_that_hold_other_kinds_of_prompt_are_reported() -> None:
    points = _points(_saturating, lengths=(2048, 4096)) + _points(
        _saturating, lengths=(8192,), kinds=("prose",)
    )
    with pytest.warns(ProfileWarning, match="different kinds of prompt"):
        fit_phase(points, phase="prefill")


def test_counts_are_summed_before_they_are_divided() -> None:
    small = CountPoint("a", 4096, np.array([0.5]), np.array([10]), 10)
    large = CountPoint("a", 4096, np.array([0.5]), np.array([0]), 990)
    assert achieved_sparsity([small, large], 0.5) == pytest.approx(0.01)  # the mean of ratios would be 0.5


def test_achieved_sparsity_is_interpolated_in_the_logarithm_of_the_threshold() -> None:
    point = CountPoint("a", 4096, np.array([0.01, 1.0]), np.array([0, 100]), 100)
    assert achieved_sparsity([point], 0.1) == pytest.approx(0.5)
    assert achieved_sparsity([point], 0.0) == 0.0


def test_prompts_of_about_one_length_share_a_curve() -> None:
    points = _points(_saturating, lengths=(3900, 4000, 4100, 8000))
    assert [len(group) for group in group_by_length(points)] == [6, 2]
    fit = fit_phase(points, phase="prefill")
    assert [curve.samples for curve in fit.points] == [6, 2]
    assert fit.points[0].seqlen == pytest.approx(4000, abs=2)
    assert fit.points[0].visited == 6 * 10**7


def test_spread_per_kind_is_reported_at_the_threshold_of_one_half() -> None:
    def shifted(log_threshold: np.ndarray, length: float) -> np.ndarray:
        return _saturating(log_threshold - 2.0, length)

    points = _points(_saturating, kinds=("prose",)) + _points(shifted, kinds=("code",))
    fit = fit_phase(points, phase="decode")
    spread = {(row.kind, row.seqlen): row.achieved for row in fit.kind_spread}
    assert len(spread) == 2 * len(LENGTHS)
    for length in LENGTHS:
        prose, code = spread["prose", length], spread["code", length]
        assert prose > 0.55 > 0.45 > code
        assert (prose + code) / 2 == pytest.approx(0.5, abs=0.02)


def test_observed_ranges_are_those_of_the_fitted_points() -> None:
    fit = fit_phase(_points(_saturating), phase="prefill")
    assert 0.1 <= fit.observed.sparsity[0] < 0.2
    assert 0.8 < fit.observed.sparsity[1] <= 0.9
    assert fit.observed.seqlen == (2048, 16384)
    assert 0.0 < fit.observed.threshold[0] < fit.observed.threshold[1] <= 1.0


def _rises_and_never_with_length(fit: PhaseFit, phase: Phase) -> bool:
    profile = Profile("0", ModelInfo("m", "f"), DataInfo("h", 1, ()), {phase: fit})
    table = [
        [profile.threshold(phase, s, n) for n in (1, 500, 4096, 10**6)] for s in (0.0, 0.01, 0.5, 0.9, 1.0)
    ]
    values = np.array(table)
    return bool((np.diff(values, axis=0) >= 0).all() and (np.diff(values, axis=1) <= 0).all())


def test_data_whose_threshold_would_rise_with_the_length_give_a_monotone_fit() -> None:
    def odd(log_threshold: np.ndarray, length: float) -> np.ndarray:
        return _saturating(log_threshold - 2.4 * math.log(length / 4096), length)

    fit = fit_phase(_points(odd), phase="prefill")
    assert _rises_and_never_with_length(fit, "prefill")
    assert fit.length_exponent is not None
    assert fit.length_exponent.c3 == 0.0


@pytest.mark.parametrize("seed", range(8))
def test_noisy_counts_give_finite_monotone_models(seed: int) -> None:
    rng = np.random.default_rng(seed)
    points = []
    for n in LENGTHS[: 2 + seed % 3]:
        for kind in ("prose", "code"):
            shift, width = rng.normal(0.0, 1.0), rng.uniform(0.5, 4.0)
            share = 1.0 / (1.0 + np.exp(-(np.log(GRID) + 5.0 + shift) / width))
            points.append(CountPoint(kind, n, GRID, np.floor(share * 5000).astype(np.int64), 5000))
    fit = fit_phase(points, phase="decode")
    assert math.isfinite(fit.exponential.a) and math.isfinite(fit.exponential.b)
    assert _rises_and_never_with_length(fit, "decode")


def test_no_samples_and_one_sample_are_too_few() -> None:
    for points in ([], _points(_saturating, lengths=(4096,), kinds=("prose",))):
        with pytest.raises(
            CalibrationError, match=f"need at least 2 samples at 2 or more lengths, got {len(points)}"
        ):
            fit_phase(points, phase="prefill")


def test_samples_shorter_than_a_tile_have_no_skippable_tile() -> None:
    points = [CountPoint(kind, 20, GRID, np.zeros(57, dtype=np.int64), 270) for kind in ("a", "b", "c")]
    for phase, tiles in (("prefill", "one key tile of 128"), ("decode", "three key tiles of 64")):
        with pytest.raises(CalibrationError, match=f"no skippable tile.*20 keys.*{tiles}"):
            fit_phase(points, phase=phase)  # type: ignore[arg-type]


def test_a_target_out_of_reach_is_reported_with_the_reachable_value() -> None:
    points = _points(lambda t, n: 0.3 * np.exp(t / 6.0))
    fit = fit_phase(points, phase="prefill", target_sparsity=0.25)
    assert fit.reachable_sparsity(16384) == pytest.approx(0.3, abs=1e-3)
    with pytest.raises(CalibrationError, match=r"target sparsity 0.9 is out of reach.*0\.300"):
        fit_phase(points, phase="prefill", target_sparsity=0.9)
    profile = Profile("0", ModelInfo("m", "f"), DataInfo("h", 1, ()), {"prefill": fit})
    with pytest.warns(ProfileWarning) as caught:
        profile.check_request("prefill", 0.9, 4096)
    assert any("0.300" in str(item.message) for item in caught)


def test_too_few_points_in_the_fitted_range_are_an_error_that_says_how_far_the_counts_reach() -> None:
    with pytest.raises(CalibrationError, match=r"need at least 3 points.*reach a sparsity of 0\.050"):
        fit_phase(_points(lambda t, n: 0.05 * np.exp(t)), phase="prefill")


@pytest.mark.parametrize(
    ("threshold", "skipped", "visited", "named"),
    [
        ([0.1, 0.5], [1], 10, r"\(T,\)"),
        ([], [], 10, r"\(T,\)"),
        ([0.5, 0.1], [1, 2], 10, "must rise"),
        ([0.0, 0.1], [1, 2], 10, "must rise"),
        ([0.1, 1.5], [1, 2], 10, "must rise"),
        ([0.1, 0.5], [2, 1], 10, "must not fall"),
        ([0.1, 0.5], [-1, 1], 10, "must not fall"),
        ([0.1, 0.5], [1, 11], 10, "exceed visited"),
        ([0.1, 0.5], [0, 0], 0, "at least 1"),
    ],
)
def test_counts_that_cannot_be_are_refused(
    threshold: list[float], skipped: list[int], visited: int, named: str
) -> None:
    with pytest.raises(CalibrationError, match=named):
        CountPoint("prose", 4096, np.array(threshold), np.array(skipped, dtype=np.int64), visited)


def test_prompts_counted_at_different_thresholds_are_refused() -> None:
    points = _points(_saturating)
    other = CountPoint("prose", 2048, GRID[:-1], points[0].skipped[:-1], points[0].visited)
    with pytest.raises(CalibrationError, match="same thresholds"):
        fit_phase([*points, other], phase="prefill")


def test_a_plain_fit_gives_no_warning() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fit_phase(_points(_saturating), phase="prefill")
