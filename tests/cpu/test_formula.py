"""The evaluator of interchange formulas: what it computes, and what it refuses."""

from __future__ import annotations

import math
import time

import pytest

from blasst.calibrate.formula import MAX_FORMULA_LENGTH, parse_formula
from blasst.core.errors import ProfileError


@pytest.mark.parametrize(
    ("text", "values", "wanted"),
    [
        (
            "a * exp(b * target_sparsity)",
            {"a": 7.93, "b": 8.61, "target_sparsity": 0.5},
            7.93 * math.exp(4.305),
        ),
        ("exp(log_a + b * target_sparsity)", {"log_a": -1.0, "b": 2.0, "target_sparsity": 0.5}, 1.0),
        ("-2 ** 2", {}, -4.0),
        ("2 ** 3 ** 2", {}, 512.0),
        ("(a + 1) / 2 - sqrt(16) * log(1)", {"a": 3.0}, 2.0),
        ("  +1e3  ", {}, 1000.0),
        ("7 / 2", {}, 3.5),
    ],
)
def test_value_of_a_formula(text: str, values: dict[str, float], wanted: float) -> None:
    assert parse_formula(text).evaluate(values) == pytest.approx(wanted, rel=1e-15)


def test_names_leave_functions_out() -> None:
    assert parse_formula("a * exp(b * target_sparsity)").names == {"a", "b", "target_sparsity"}


@pytest.mark.parametrize(
    "text",
    [
        "__import__('os').system('true')",
        "a.b",
        "a[0]",
        "[a]",
        "lambda: 1",
        "a if b else c",
        "a < b",
        "a and b",
        "not a",
        "~1",
        "1 // 2",
        "5 % 3",
        "a @ b",
        "1j",
        "True",
        "'x'",
        "f'{a}'",
        "exp",
        "exp(1, 2)",
        "exp(x=1)",
        "exp(*a)",
        "sin(1)",
        "open('x')",
        "(a := 1)",
        "a; b",
        "a = 1",
        "",
        "   ",
        "1 +",
        "((1)",
    ],
)
def test_anything_else_is_refused(text: str) -> None:
    with pytest.raises(ProfileError, match="formula"):
        parse_formula(text)


def test_long_and_deep_formulas_are_refused() -> None:
    with pytest.raises(ProfileError, match="at most 256"):
        parse_formula("1 + " * MAX_FORMULA_LENGTH + "1")
    with pytest.raises(ProfileError, match="deeper"):
        parse_formula("-" * 100 + "1")
    with pytest.raises(ProfileError, match="deeper"):
        parse_formula("1" + "+1" * 100)
    with pytest.raises(ProfileError, match="formula"):
        parse_formula("(" * 127 + "1" + ")" * 127 + "+" + "-" * 1)


@pytest.mark.parametrize("text", ["9**9**9", "9**9**9**9", "exp(exp(exp(9)))", "10**400", "1e308 * 10"])
def test_power_bombs_end_at_once_in_an_error(text: str) -> None:
    start = time.perf_counter()
    with pytest.raises(ProfileError, match="formula"):
        parse_formula(text).evaluate({})
    assert time.perf_counter() - start < 1.0


@pytest.mark.parametrize("text", ["1 / 0", "log(0)", "log(-1)", "sqrt(-1)", "(-8) ** 0.5", "0 ** -1"])
def test_a_result_that_is_no_real_number_is_an_error(text: str) -> None:
    with pytest.raises(ProfileError, match="formula"):
        parse_formula(text).evaluate({})


def test_a_name_without_a_value_is_named() -> None:
    with pytest.raises(ProfileError, match=r"no value for \['b'\]"):
        parse_formula("a * exp(b * target_sparsity)").evaluate({"a": 1.0, "target_sparsity": 0.5})


def test_same_formula_with_other_spaces_is_recognised() -> None:
    assert parse_formula("a*exp(b*target_sparsity)").same_as("(a * exp((b * target_sparsity)))")
    assert not parse_formula("a*exp(b*target_sparsity)").same_as("a * exp(target_sparsity * b)")
