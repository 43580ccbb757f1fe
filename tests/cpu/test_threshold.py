"""Formulas that lead to a threshold."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from blasst.core import threshold as t

lengths = st.integers(1, 1_000_000)
targets = st.floats(0.0, 1.0)


@given(st.floats(0, 1e9), lengths)
def test_threshold_of_a_scale_factor_lies_in_zero_to_one_and_falls_with_length(factor, length):
    short, long = (t.threshold_from_scale_factor(factor, n) for n in (length, 2 * length))
    assert 0.0 <= long <= short <= 1.0


@given(st.floats(1e-3, 1e4), st.floats(0.1, 20), targets, targets)
def test_scale_factor_rises_with_the_target(a, b, first, second):
    low, high = sorted((first, second))
    assert t.scale_factor_from_target(a, b, low) <= t.scale_factor_from_target(a, b, high)


@pytest.mark.parametrize("target", [0.0, 0.5, 0.9, 0.99])
@pytest.mark.parametrize("length", [1, 127, 2048, 131072, 10**6])
def test_calibrated_curve_stays_a_ratio_at_any_length(target, length):
    assert (
        0.0 <= t.threshold_from_scale_factor(t.scale_factor_from_target(1000.0, 5.0, target), length) <= 1.0
    )


def test_scale_factor_of_a_huge_exponent_does_not_overflow():
    factor = t.scale_factor_from_target(1000.0, 800.0, 1.0)
    assert factor == math.inf
    assert t.threshold_from_scale_factor(factor, 4096) == 1.0
    assert t.threshold_from_scale_factor(torch.tensor([factor]), 4096).tolist() == [1.0]


def test_a_scale_factor_of_zero_is_a_threshold_of_zero():
    assert t.scale_factor_from_target(0.0, 5.0, 0.5) == 0.0
    assert t.threshold_log(0.0) == t.threshold_log2(0.0) == -math.inf


@given(st.floats(1e-30, 1.0))
def test_linear_log_and_log2_round_trip(value):
    assert t.threshold_from_log(t.threshold_log(value)) == pytest.approx(value, rel=1e-6)
    assert t.threshold_from_log2(t.threshold_log2(value)) == pytest.approx(value, rel=1e-6)
    factor = t.scale_factor_from_threshold(value, 4096)
    assert t.threshold_from_scale_factor(factor, 4096) == pytest.approx(value, rel=1e-6)


@given(st.floats(0.01, 1e3), st.floats(0.1, 12), st.floats(0.01, 0.99))
def test_target_and_scale_factor_round_trip(a, b, target):
    factor = t.scale_factor_from_target(a, b, target)
    assert t.target_from_scale_factor(a, b, factor) == pytest.approx(target, abs=1e-9)


def test_tensor_lengths_give_one_threshold_each():
    got = t.threshold_from_scale_factor(50.0, torch.tensor([10, 100, 0, 1000], dtype=torch.int32))
    assert got.dtype == torch.float32
    assert got.tolist() == pytest.approx([1.0, 0.5, 1.0, 0.05])
    per_sequence = t.threshold_from_scale_factor(torch.tensor([10.0, 20.0]), torch.tensor([100, 100]))
    assert per_sequence.tolist() == pytest.approx([0.1, 0.2])


def test_values_on_a_device_are_clamped_as_kernels_read_them():
    given_values = torch.tensor([2.0, 0.5, 0.0, -1.0, math.nan])
    expected = [0.0, math.log(0.5), -math.inf, -math.inf, -math.inf]
    assert t.effective_log_threshold(given_values).tolist() == pytest.approx(expected)


def test_ideal_speedup_of_a_sparsity():
    assert [t.max_speedup(s) for s in (0.0, 0.5, 1.0)] == pytest.approx([1.0, 4 / 3, 2.0])
