import math
import random

import pytest

from blasst.evals.score import (
    mean_difference_over_tasks,
    paired_difference,
    string_match_all,
    string_match_part,
    t_quantile,
)


def test_string_scores_ignore_case_and_count_shares():
    assert string_match_all("It is ALPHA, then gamma.", ["alpha", "Beta", "Gamma", "delta"]) == 0.5
    assert string_match_part("It is ALPHA.", ["beta", "alpha"]) == 1.0
    assert string_match_part("nothing", ["beta", "alpha"]) == 0.0


@pytest.mark.parametrize(
    ("freedom", "expected"),
    [(1, 12.7062), (2, 4.3027), (3, 3.1824), (4, 2.7764), (49, 2.0096), (600, 1.9639)],
)
def test_t_quantiles_are_those_of_the_tables(freedom, expected):
    assert t_quantile(0.975, freedom) == pytest.approx(expected, abs=1e-4)


def test_difference_is_the_mean_of_the_pairs_and_lies_inside_its_interval():
    result = paired_difference([1.0, 0.5, 0.0, 1.0], [0.5, 0.5, 0.0, 1.0])
    assert (result.n, result.difference) == (4, -0.125)
    assert result.low < -0.125 < result.high


def test_ties_give_an_interval_of_honest_width():
    result = paired_difference([1.0] * 50, [1.0] * 50)
    assert result.difference == 0.0
    assert 0.03 < result.high == -result.low < 0.05
    wide = paired_difference([1.0] * 5, [1.0] * 5)
    assert wide.high > 2 * result.high


def test_mean_over_tasks_weighs_tasks_equally_and_narrows_the_interval():
    many, few = ([1.0] * 100, [0.0] * 100), ([1.0] * 10, [1.0] * 10)
    assert mean_difference_over_tasks({"a": many, "b": few}).difference == -0.5
    ties = ([1.0] * 50, [1.0] * 50)
    alone = mean_difference_over_tasks({"a": ties})
    together = mean_difference_over_tasks({str(i): ties for i in range(13)})
    assert together.n == 650
    assert together.high < alone.high / 10


def test_intervals_cover_the_true_difference_about_as_often_as_they_say():
    rng = random.Random(0)
    covered = 0
    for _ in range(400):
        tasks = {}
        for task, flips in enumerate((0.02, 0.1, 0.3)):  # P(sparse wrong | dense right) of each task
            tasks[str(task)] = ([1.0] * 40, [float(rng.random() >= flips) for _ in range(40)])
        result = mean_difference_over_tasks(tasks)
        covered += result.low <= -0.14 <= result.high
    assert 0.93 <= covered / 400 <= 1.0


def test_unpaired_or_missing_scores_are_an_error():
    with pytest.raises(ValueError, match="do not pair"):
        paired_difference([1.0], [1.0, 0.0])
    with pytest.raises(ValueError, match="do not pair"):
        paired_difference([], [])
    with pytest.raises(ValueError, match="no task"):
        mean_difference_over_tasks({})
    assert math.isfinite(paired_difference([1.0], [0.0]).low)


@pytest.mark.parametrize("score", [string_match_all, string_match_part])
@pytest.mark.parametrize("answers", [[], (), "", "42"])
def test_a_score_without_a_list_of_answers_is_refused(score, answers):
    with pytest.raises(ValueError, match="answers"):
        score("42 is the answer", answers)
