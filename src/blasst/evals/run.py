"""Run the same task items under several named conditions and compare them pairwise."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

#: Settings of one condition: None = the model as loaded (dense), otherwise the keyword arguments of
#: blasst.integrations.transformers.sparse_attention.
Settings = Mapping[str, Any] | None


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
        settings: the condition's settings as text; None = dense.
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
        low: lower end of the 95% interval of the difference.
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
            min_dense_score: tasks in whose items the baseline scores less on average stay out of the mean
                row, 0..1, default 0 = none.

        Returns:
            Rows ordered by seqlen, condition, task, the mean over tasks last.

        Raises:
            ValueError: the baseline was not run, or its items are not those of the condition.
        """
        raise NotImplementedError


def run_tasks(
    model: Any,
    tokenizer: Any,
    conditions: Mapping[str, Settings],
    *,
    tasks: Sequence[str] | None = None,
    seqlens: Sequence[int] = (4096,),
    num_items: int = 50,
    seed: int = 0,
    batch_size: int = 8,
    out: str | Path | None = None,
    model_name: str | None = None,
    progress: Callable[[int, int, str], None] | None = None,
) -> TaskResults:
    """Answer the same items greedily under every condition.

    Args:
        model: a transformers causal language model, on its device, in eval mode.
        tokenizer: its tokenizer; a chat template is used where there is one.
        conditions: name to settings, for example {"dense": None, "50%": {"profile": p,
            "target_sparsity": 0.5}}; settings are the keyword arguments of sparse_attention.
        tasks: task kinds, default all 13 of blasst.evals.tasks.TASKS.
        seqlens: token budgets, each covers prompt, chat template and answer.
        num_items: items per task and length.
        seed: seed of the item generators; the same seed gives the same items.
        batch_size: prompts generated together, left-padded.
        out: JSONL file; rows already there are kept and not run again. None = no file.
        model_name: goes into the rows, default the name in the model's config.
        progress: called as progress(done, total, label) after each batch, counted in answers.

    Returns:
        Rows, realised sparsity and times; .summary() gives the paired differences.

    Raises:
        ValueError: an unknown task, a length that a task cannot fill or the model cannot take, or a results
            file whose rows come from another model, other settings or other items.
    """
    raise NotImplementedError
