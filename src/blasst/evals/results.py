"""Answered items as JSON lines, and their paired comparison."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from blasst.evals.score import PairedDifference, mean_difference_over_tasks

#: What tells rows of one file apart: task, index, seed, seqlen, condition.
RowKey = tuple[str, int, int, int, str]


@dataclass(frozen=True)
class TaskRow:
    """One answered item; also one line of the JSONL file.

    Attributes:
        task: task kind, for example "niah_single_1".
        index: number of the item within its task.
        seed: seed of the item generator.
        seqlen: token budget of the item, prompt and answer together.
        condition: name of the condition.
        score: 0..1.
        text: what the model wrote after the answer prefix.
        answers: the reference strings.
        prompt_tokens: tokens of the prompt as the model saw it.
        prompt_hash: first 16 hex digits of the sha256 of the prompt; equal across conditions.
        settings: the condition's settings as JSON; None = dense.
        model: name of the model.
    """

    task: str
    index: int
    seed: int
    seqlen: int
    condition: str
    score: float
    text: str
    answers: tuple[str, ...]
    prompt_tokens: int
    prompt_hash: str
    settings: str | None
    model: str

    @property
    def key(self) -> RowKey:
        """What tells this row from others of a file."""
        return (self.task, self.index, self.seed, self.seqlen, self.condition)


@dataclass(frozen=True)
class SummaryRow:
    """Paired comparison of one condition with the baseline.

    Attributes:
        seqlen: token budget of the items.
        task: task kind, or "mean" for the mean over tasks (each task weighs the same).
        condition: name of the condition.
        n: number of paired items.
        dense: mean score of the baseline, 0..1.
        sparse: mean score of the condition, 0..1.
        difference: sparse - dense.
        low: lower end of the 95% interval of the difference (score.mean_difference_over_tasks).
        high: upper end.
    """

    seqlen: int
    task: str
    condition: str
    n: int
    dense: float
    sparse: float
    difference: float
    low: float
    high: float


@dataclass(frozen=True)
class TaskResults:
    """Everything that run_tasks measured.

    Attributes:
        rows: one per (task, index, seqlen, condition), those found in the results file included.
        sparsity: skipped over visited tiles, {(condition, seqlen, phase): 0..1}, of the items run now; a
            condition appears only where its settings hold collect_counts=True.
        seconds: wall time of each condition, of the items run now.
    """

    rows: tuple[TaskRow, ...]
    sparsity: Mapping[tuple[str, int, str], float]
    seconds: Mapping[str, float]

    def summary(self, baseline: str = "dense", min_dense_score: float = 0.0) -> list[SummaryRow]:
        """Compare every other condition with the baseline, per task and over tasks.

        Args:
            baseline: name of the condition to compare with.
            min_dense_score: tasks whose mean score under the baseline is below this stay out of the mean
                row, 0..1, default 0 = none.

        Returns:
            Rows ordered by seqlen, condition, task; the mean over tasks last, where a task is left for it.

        Raises:
            ValueError: the baseline was not run, or not on the items of the condition.
        """
        conditions = list(dict.fromkeys(row.condition for row in self.rows))
        if baseline not in conditions:
            raise ValueError(f"baseline: {baseline!r} was not run; known: {', '.join(conditions) or 'none'}")
        summary = []
        for seqlen in sorted({row.seqlen for row in self.rows}):
            for condition in conditions:
                if condition != baseline:
                    pairs = self._pairs(seqlen, baseline, condition)
                    summary += _summary_rows(pairs, seqlen, condition, min_dense_score)
        return summary

    def _pairs(
        self, seqlen: int, baseline: str, condition: str
    ) -> dict[str, tuple[Sequence[float], Sequence[float]]]:
        """Per task the scores of the baseline and of the condition, item by item."""
        scores: dict[str, dict[str, dict[tuple[int, int, str], float]]] = {}
        for row in self.rows:
            if row.seqlen == seqlen and row.condition in (baseline, condition):
                by_condition = scores.setdefault(row.task, {baseline: {}, condition: {}})
                by_condition[row.condition][row.seed, row.index, row.prompt_hash] = row.score
        pairs: dict[str, tuple[Sequence[float], Sequence[float]]] = {}
        for task, both in scores.items():
            if both[baseline].keys() != both[condition].keys():
                raise ValueError(f"{task} at {seqlen}: {baseline!r} and {condition!r} hold different items")
            items = sorted(both[baseline])
            pairs[task] = ([both[baseline][i] for i in items], [both[condition][i] for i in items])
        return pairs


def _summary_rows(
    pairs: Mapping[str, tuple[Sequence[float], Sequence[float]]],
    seqlen: int,
    condition: str,
    min_dense_score: float,
) -> list[SummaryRow]:
    def row(task: str, dense: float, difference: PairedDifference) -> SummaryRow:
        n, mean, low, high = difference
        return SummaryRow(seqlen, task, condition, n, dense, dense + mean, mean, low, high)

    dense = {task: sum(baseline) / len(baseline) for task, (baseline, _) in pairs.items()}
    rows = [row(t, dense[t], mean_difference_over_tasks({t: pair})) for t, pair in pairs.items()]
    chosen = {task: pair for task, pair in pairs.items() if dense[task] >= min_dense_score}
    if chosen:
        mean = sum(dense[task] for task in chosen) / len(chosen)
        rows.append(row("mean", mean, mean_difference_over_tasks(chosen)))
    return rows


def read_rows(path: Path) -> dict[RowKey, TaskRow]:
    """Rows of a JSONL file; a last line that a killed run left unfinished is cut off the file.

    Raises:
        ValueError: a finished line is not a row.
    """
    if not path.exists():
        return {}
    content = path.read_bytes()
    complete = content[: content.rfind(b"\n") + 1]
    if len(complete) < len(content):
        path.write_bytes(complete)
    rows = {}
    for number, line in enumerate(complete.decode("utf-8").splitlines(), start=1):
        try:
            fields = json.loads(line)
            row = TaskRow(**{**fields, "answers": tuple(fields["answers"])})
        except (ValueError, TypeError, KeyError) as error:
            raise ValueError(f"{path}, line {number}: not a row of task results: {error}") from error
        rows[row.key] = row
    return rows


def append_rows(path: Path, rows: Iterable[TaskRow]) -> None:
    """Add rows to the end of a JSONL file."""
    with path.open("a", encoding="utf-8") as file:
        file.writelines(json.dumps(asdict(row), ensure_ascii=False) + "\n" for row in rows)
