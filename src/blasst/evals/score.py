"""String scores, and paired differences with confidence intervals."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple


class PairedDifference(NamedTuple):
    """Mean of paired score differences with a confidence interval.

    Attributes:
        n: number of pairs.
        difference: mean of (condition - baseline); over several tasks the mean of the task means.
        low: lower end of the interval.
        high: upper end.
    """

    n: int
    difference: float
    low: float
    high: float


def string_match_all(text: str, answers: Sequence[str]) -> float:
    """Share of the reference strings that appear in the text, case ignored, 0..1.

    Raises:
        ValueError: no reference strings.

    Source: RULER (arXiv:2404.06654), the score of retrieval, tracing and aggregation tasks.
    """
    text, wanted = _lowered(text, answers)
    return sum(answer in text for answer in wanted) / len(wanted)


def string_match_part(text: str, answers: Sequence[str]) -> float:
    """1 when any of the reference strings appears in the text, case ignored, else 0.

    Raises:
        ValueError: no reference strings.

    Source: RULER (arXiv:2404.06654), the score of question answering.
    """
    text, wanted = _lowered(text, answers)
    return float(any(answer in text for answer in wanted))


def _lowered(text: str, answers: Sequence[str]) -> tuple[str, list[str]]:
    if isinstance(answers, str) or not answers:
        raise ValueError(f"answers: got {answers!r}, want at least one string in a sequence")
    return text.lower(), [answer.lower() for answer in answers]


def paired_difference(
    baseline: Sequence[float], condition: Sequence[float], *, confidence: float = 0.95
) -> PairedDifference:
    """Mean difference of paired scores in 0..1 with a Student t interval; see mean_difference_over_tasks.

    Raises:
        ValueError: no pairs, or sequences of different lengths.
    """
    return mean_difference_over_tasks({"": (baseline, condition)}, confidence=confidence)


def mean_difference_over_tasks(
    scores: Mapping[str, tuple[Sequence[float], Sequence[float]]], *, confidence: float = 0.95
) -> PairedDifference:
    """Mean over tasks of the mean paired difference, with a stratified Student t interval.

    Each task weighs the same, whatever its number of items. The variance of the mean is that of independent
    strata, sum(s_k^2 / n_k) / K^2, with Satterthwaite's degrees of freedom. Scores in 0..1 tie often, and
    n ties would give an interval of width 0; so the variances take in two pseudo-pairs that differ by +1 and
    -1 with weight 1/2 each and one more that ties with weight 1 (one half in each cell of a 2 x 2 table),
    spread evenly over the tasks. With n ties in one task the half-width is about t / (n + 2).

    Args:
        scores: per task (baseline scores, condition scores), paired by position.
        confidence: level of the interval, in (0, 1).

    Returns:
        The number of pairs over all tasks, the mean difference and its interval.

    Raises:
        ValueError: no task, a task without pairs, or sequences of different lengths.

    Source: Agresti and Min, "Simple improved confidence intervals for comparing matched proportions",
        Statistics in Medicine 24 (2005), for the pseudo-pairs.
    """
    if not scores:
        raise ValueError("scores: no task given")
    means: list[float] = []
    parts: list[tuple[float, float]] = []  # variance of a task's mean, degrees of freedom
    pseudo = 2.0 / len(scores)
    total = 0
    for task, (baseline, condition) in scores.items():
        if not baseline or len(baseline) != len(condition):
            raise ValueError(
                f"scores of {task or 'the task'}: {len(baseline)} and {len(condition)} do not pair"
            )
        differences = [c - b for b, c in zip(baseline, condition)]
        n = len(differences)
        mean = sum(differences) / n
        squares = sum((d - mean) ** 2 for d in differences) + pseudo / 2
        parts.append((squares / (n + pseudo - 1) / (n + pseudo), n + pseudo - 1))
        means.append(mean)
        total += n
    variance = sum(v for v, _ in parts)
    freedom = variance**2 / sum(v**2 / f for v, f in parts)
    centre = sum(means) / len(means)
    half = t_quantile(0.5 + confidence / 2, max(1, int(freedom + 1e-9))) * math.sqrt(variance) / len(means)
    return PairedDifference(total, centre, centre - half, centre + half)


def t_quantile(probability: float, freedom: int) -> float:
    """Quantile of Student's t distribution for a probability in [0.5, 1) and whole degrees of freedom.

    Raises:
        ValueError: probability outside [0.5, 1) or freedom below 1.
    """
    if not 0.5 <= probability < 1 or freedom < 1:
        raise ValueError(f"probability {probability}, freedom {freedom}: want [0.5, 1) and at least 1")
    low, high = 0.0, math.pi / 2
    for _ in range(60):  # bisection on the angle theta, t = sqrt(freedom) * tan(theta)
        middle = (low + high) / 2
        if 0.5 + _t_central(middle, freedom) / 2 < probability:
            low = middle
        else:
            high = middle
    return math.sqrt(freedom) * math.tan((low + high) / 2)


def _t_central(theta: float, freedom: int) -> float:
    """P(|T| < sqrt(freedom) * tan(theta)): the finite sums for odd and even degrees of freedom.

    Source: Abramowitz and Stegun, 26.7.3 and 26.7.4.
    """
    sine, cosine = math.sin(theta), math.cos(theta)
    odd = freedom % 2 == 1
    term = cosine if odd else 1.0
    total = 0.0
    for j in range(freedom // 2):
        total += term
        term *= cosine**2 * ((2 * j + 2) / (2 * j + 3) if odd else (2 * j + 1) / (2 * j + 2))
    return (theta + sine * total) * 2 / math.pi if odd else sine * total
