"""Run the same task items under several named conditions and compare them pairwise."""

from __future__ import annotations

import hashlib
import json
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from os import PathLike
from pathlib import Path
from typing import Any

from torch import Tensor

from blasst.core.profile import Profile
from blasst.evals.chat import answer_batch, item_tokens, newline_tokens, token_counter
from blasst.evals.results import RowKey, SummaryRow, TaskResults, TaskRow, append_rows, read_rows
from blasst.evals.tasks import TASKS, CountTokens, Item, Task

__all__ = ["Settings", "SummaryRow", "TaskResults", "TaskRow", "run_tasks"]

#: Settings of one condition: None = the model as loaded (dense), otherwise the keyword arguments of
#: blasst.integrations.transformers.sparse_attention.
Settings = Mapping[str, Any] | None

#: Settings that change no output.
_OBSERVERS = ("collect_counts", "measure_skipped_mass")


@dataclass(frozen=True)
class _Prompt:
    """One item as the model sees it, and its row but for what a condition adds."""

    item: Item
    tokens: list[int]
    hash: str


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
        batch_size: prompts generated together, left-padded; the same for every condition.
        out: JSONL file; rows already there are kept and not run again. None = no file.
        model_name: goes into the rows, default the name in the model's config.
        progress: called as progress(done, total, label) after each batch, counted in answers.

    Returns:
        Rows, realised sparsity and times; .summary() gives the paired differences.

    Raises:
        ValueError: an unknown task, a length that a task cannot fill or the model cannot take, a model on
            which blasst is enabled already, or a results file whose rows come from another model, other
            settings or other items.
    """
    names = list(TASKS) if tasks is None else list(tasks)
    _check(model, conditions, names, seqlens, num_items, batch_size)
    run = _Run(model, tokenizer, conditions, model_name or _name_of(model), Path(out) if out else None)
    total = len(names) * len(seqlens) * num_items * len(conditions)
    done = 0
    for seqlen in seqlens:
        for name in names:
            prompts = [run.prompt(TASKS[name], seed, index, seqlen) for index in range(num_items)]
            for condition in conditions:
                for start in range(0, num_items, batch_size):
                    batch = prompts[start : start + batch_size]
                    run.answer(TASKS[name], condition, batch)
                    done += len(batch)
                    if progress is not None:
                        progress(done, total, f"{name} {seqlen} {condition}")
    return run.results()


class _Run:
    """One call of run_tasks: what stays the same, and what has been measured so far."""

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        conditions: Mapping[str, Settings],
        model_name: str,
        out: Path | None,
    ) -> None:
        self.model, self.tokenizer, self.conditions = model, tokenizer, conditions
        self.model_name, self.out = model_name, out
        self.known = read_rows(out) if out else {}
        self.settings = {name: _settings_text(value) for name, value in conditions.items()}
        self.count_tokens: CountTokens = token_counter(tokenizer)
        self.newlines: Tensor = newline_tokens(tokenizer)
        self.rows: dict[RowKey, TaskRow] = {}
        self.tiles: dict[tuple[str, int, str], list[int]] = defaultdict(lambda: [0, 0])
        self.seconds = dict.fromkeys(conditions, 0.0)

    def prompt(self, task: Task, seed: int, index: int, seqlen: int) -> _Prompt:
        item = task.generate(seed, index, seqlen, self.count_tokens)
        digest = hashlib.sha256(task.prompt(item).encode()).hexdigest()[:16]
        return _Prompt(item, item_tokens(self.tokenizer, task, item), digest)

    def answer(self, task: Task, condition: str, batch: Sequence[_Prompt]) -> None:
        """Answer a batch unless all its rows are known; a batch is never cut, so that answers repeat."""
        blank = [self._blank_row(prompt, condition) for prompt in batch]
        found = [self._known_row(row) for row in blank]
        if any(row is None for row in found):
            start = time.perf_counter()
            with self._condition(condition, batch[0].item.num_tokens):
                texts = answer_batch(
                    self.model,
                    self.tokenizer,
                    [prompt.tokens for prompt in batch],
                    max_new_tokens=max(prompt.item.max_new_tokens for prompt in batch),
                    newlines=self.newlines,
                    answer_lines=task.answer_lines,
                )
            self.seconds[condition] += time.perf_counter() - start
            answered = [
                replace(row, text=text, score=task.score(prompt.item, text))
                for row, text, prompt in zip(blank, texts, batch)
            ]
            if self.out:
                append_rows(self.out, [row for row, old in zip(answered, found) if old is None])
            found = [old or row for old, row in zip(found, answered)]
        self.rows |= {row.key: row for row in found if row is not None}

    def results(self) -> TaskResults:
        sparsity = {key: skipped / max(visited, 1) for key, (skipped, visited) in self.tiles.items()}
        return TaskResults(tuple(self.rows.values()), sparsity, self.seconds)

    def _blank_row(self, prompt: _Prompt, condition: str) -> TaskRow:
        item = prompt.item
        return TaskRow(
            task=item.task,
            index=item.index,
            seed=item.seed,
            seqlen=item.num_tokens,
            condition=condition,
            score=0.0,
            text="",
            answers=item.answers,
            prompt_tokens=len(prompt.tokens),
            prompt_hash=prompt.hash,
            settings=self.settings[condition],
            model=self.model_name,
        )

    def _known_row(self, row: TaskRow) -> TaskRow | None:
        known = self.known.get(row.key)
        if known is not None and replace(known, score=row.score, text=row.text) != row:
            raise ValueError(
                f"{self.out}: the row of {row.task} {row.index}, {row.condition!r}, comes from another model,"
                " other settings or another prompt; use another file"
            )
        return known

    @contextmanager
    def _condition(self, condition: str, seqlen: int) -> Iterator[None]:
        settings = self.conditions[condition]
        if settings is None:
            yield
            return
        from blasst.integrations.transformers import attention_stats, sparse_attention

        with sparse_attention(self.model, **settings):
            yield
            if settings.get("collect_counts"):
                for record in attention_stats(self.model):
                    tiles = self.tiles[condition, seqlen, record.phase]
                    tiles[0] += int(record.skipped.sum())
                    tiles[1] += int(record.visited.sum())


def _check(
    model: Any,
    conditions: Mapping[str, Settings],
    tasks: Sequence[str],
    seqlens: Sequence[int],
    num_items: int,
    batch_size: int,
) -> None:
    from blasst.integrations.transformers_attention import session_of

    if not conditions:
        raise ValueError("conditions: none given")
    if unknown := sorted(set(tasks) - set(TASKS)):
        raise ValueError(f"tasks: {', '.join(unknown)} unknown; known: {', '.join(TASKS)}")
    if num_items < 1 or batch_size < 1:
        raise ValueError(f"num_items {num_items}, batch_size {batch_size}: want at least 1")
    longest = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if longest is not None and max(seqlens) > longest:
        raise ValueError(f"seqlens: {max(seqlens)} is longer than the model takes ({longest})")
    if session_of(model) is not None:
        raise ValueError("model: blasst is enabled on it, so no condition would be dense; disable it first")


def _name_of(model: Any) -> str:
    return Path(model.config._name_or_path or type(model).__name__).name


def _settings_text(settings: Settings) -> str | None:
    """Settings that decide the output, as JSON; a profile appears as the digest of its contents."""
    if settings is None:
        return None

    def plain(value: Any) -> Any:
        if isinstance(value, Mapping):
            return dict(value)
        return list(value) if isinstance(value, Sequence) else str(value)

    deciding = {name: value for name, value in settings.items() if name not in _OBSERVERS}
    profile = deciding.get("profile")
    if isinstance(profile, Profile):
        deciding["profile"] = hashlib.sha256(repr(profile).encode()).hexdigest()[:16]
    elif isinstance(profile, str | PathLike):
        deciding["profile"] = hashlib.sha256(Path(profile).read_bytes()).hexdigest()[:16]
    return json.dumps(deciding, sort_keys=True, default=plain)
