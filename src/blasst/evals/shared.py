"""Task items under many settings, with one prompt pass for all settings that only decode differently.

`run_tasks` answers every condition from the start; here prompts run one at a time and unpadded, their caches
are put together, left-padded, and each way to decode begins from a copy of that. Work is cut into blocks of
items, every task kind in turn, so that a run that was stopped has about the same number of items of each.
"""

from __future__ import annotations

import json
import multiprocessing
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from blasst.calibrate.collect import evaluating
from blasst.calibrate.generate import cache_of
from blasst.core.types import PHASES
from blasst.evals.chat import item_tokens, newline_tokens, token_counter
from blasst.evals.methods import DENSE, Method, MethodHandler, method_session
from blasst.evals.models import LoadedModel
from blasst.evals.results import RowKey, TaskRow, append_rows, read_rows
from blasst.evals.tasks import TASKS, Item


@dataclass(frozen=True)
class Variant:
    """One setting of a model.

    Attributes:
        prefill: how prompts attend.
        decode: how steps attend.
    """

    prefill: Method = DENSE
    decode: Method = DENSE

    @property
    def settings(self) -> str | None:
        """For the rows; None = dense."""
        labels = {"prefill": self.prefill.label, "decode": self.decode.label}
        return None if self == Variant() else json.dumps(labels)


@dataclass(frozen=True)
class Block:
    """Items of one task kind and length that are answered together.

    Attributes:
        task: task kind.
        seqlen: token budget.
        first: number of the first item.
        count: items.
    """

    task: str
    seqlen: int
    first: int
    count: int


@dataclass(frozen=True)
class Prompt:
    """An item as the model sees it.

    Attributes:
        item: the item.
        tokens: token ids.
        hash: of the prompt's text, first 16 hex digits of the sha256.
    """

    item: Item
    tokens: tuple[int, ...]
    hash: str


def blocks_of(tasks: Sequence[str], seqlen: int, items: int, size: int, first: int = 0) -> list[Block]:
    """Blocks of one length, the first items of all kinds before the next ones.

    Args:
        tasks: task kinds.
        seqlen: token budget.
        items: per kind.
        size: items of a block.
        first: number of the first item.
    """
    starts = range(first, first + items, size)
    return [Block(task, seqlen, at, min(size, first + items - at)) for at in starts for task in tasks]


def make_prompts(tokenizer: Any, block: Block, seed: int) -> list[Prompt]:
    """The prompts of a block.

    Args:
        tokenizer: of the model.
        block: which items.
        seed: of the generators.
    """
    task, count = TASKS[block.task], token_counter(tokenizer)
    prompts = []
    for index in range(block.first, block.first + block.count):
        item = task.generate(seed, index, block.seqlen, count)
        digest = sha256(task.prompt(item).encode()).hexdigest()[:16]
        prompts.append(Prompt(item, tuple(item_tokens(tokenizer, task, item)), digest))
    return prompts


_worker_tokenizer: Any = None


def _start_worker(folder: str) -> None:
    global _worker_tokenizer
    from transformers import AutoTokenizer

    _worker_tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)


def _work(block: Block, seed: int) -> list[Prompt]:
    return make_prompts(_worker_tokenizer, block, seed)


@contextmanager
def prompt_source(
    loaded: LoadedModel, folder: Path, blocks: Sequence[Block], seed: int, workers: int
) -> Iterator[Callable[[Block], list[Prompt]]]:
    """A function that gives the prompts of a block; with workers other processes make them ahead.

    Args:
        loaded: its tokenizer makes them when there are no workers.
        folder: of the model, where workers read the tokenizer.
        blocks: in the order in which they will be asked for.
        seed: of the generators.
        workers: processes.
    """
    if workers < 1:
        yield lambda block: make_prompts(loaded.tokenizer, block, seed)
        return
    pool = ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"), _start_worker, (str(folder),))
    try:
        futures: dict[Block, Future[list[Prompt]]] = {b: pool.submit(_work, b, seed) for b in blocks}
        yield lambda block: futures.pop(block).result()
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


@dataclass(eq=False)
class SharedRun:
    """Answers blocks under all variants and appends rows; rows that exist are not answered again.

    Attributes:
        loaded: model and tokenizer.
        variants: by name of the condition.
        out: JSONL file of `TaskRow`s; beside it `*.sparsity.jsonl` gets what was left out, per block.
        seed: of the items.
        impl: backend of blasst's functions.
    """

    loaded: LoadedModel
    variants: Mapping[str, Variant]
    out: Path
    seed: int = 0
    impl: str = "auto"

    def __post_init__(self) -> None:
        self.out.parent.mkdir(parents=True, exist_ok=True)
        self.known: dict[RowKey, TaskRow] = read_rows(self.out)
        self.newlines = newline_tokens(self.loaded.tokenizer)
        self.handler = MethodHandler(impl=self.impl)
        eos = self.loaded.model.generation_config.eos_token_id
        self.eos = [] if eos is None else eos if isinstance(eos, list) else [eos]
        self.cache_name = "past_key_values"

    def key(self, block: Block, index: int, condition: str) -> RowKey:
        """Key of an item's row."""
        return (block.task, index, self.seed, block.seqlen, condition)

    def missing(self, block: Block) -> list[str]:
        """Conditions under which some item of a block has no row yet."""
        indices = range(block.first, block.first + block.count)
        return [
            name
            for name in self.variants
            if any(self.key(block, index, name) not in self.known for index in indices)
        ]

    def mean(self, task: str, seqlen: int, condition: str = "dense") -> float | None:
        """Mean score of the rows of a kind, length and condition; None without any."""
        scores = [
            row.score
            for row in self.known.values()
            if (row.task, row.seqlen, row.condition, row.seed) == (task, seqlen, condition, self.seed)
        ]
        return sum(scores) / len(scores) if scores else None

    def answer(self, block: Block, prompts: Sequence[Prompt], deadline: float | None = None) -> bool:
        """Answer a block under every variant that lacks rows.

        Args:
            block: which items.
            prompts: theirs.
            deadline: time.monotonic() after which no further prompt pass begins; None = none.

        Returns:
            Whether the block is complete.
        """
        groups: dict[Method, list[str]] = {}
        for name in self.missing(block):
            groups.setdefault(self.variants[name].prefill, []).append(name)
        with evaluating(self.loaded.model), method_session(self.loaded.model, self.handler):
            for prefill, names in groups.items():
                if deadline is not None and time.monotonic() > deadline:
                    return False
                self._answer_group(block, prompts, prefill, names)
        return True

    def _answer_group(
        self, block: Block, prompts: Sequence[Prompt], prefill: Method, names: list[str]
    ) -> None:
        handler = self.handler
        handler.keep_queries = any(self.variants[name].decode.selector is not None for name in names)
        handler.use("prefill", prefill)
        caches, firsts = [], []
        queries: dict[tuple[int, int], Tensor] = {}
        for index, prompt in enumerate(prompts):
            cache, token = self._prompt_pass(prompt.tokens)
            caches.append(cache)
            firsts.append(token)
            if handler.keep_queries:
                # Each prompt ran as sequence 0; in the batch it is sequence `index`.
                own = {key: handler.queries.pop(key) for key in list(handler.queries) if key[1] == 0}
                queries |= {(layer, index): q for (layer, _), q in own.items()}
        handler.queries = queries
        of_prompts = handler.take("prefill")
        lengths = torch.tensor([len(prompt.tokens) for prompt in prompts], device=firsts[0].device)
        merged = _left_padded(caches, int(lengths.max()))
        del caches
        for name in names:
            handler.use("decode", self.variants[name].decode)
            answers = self._decode(block, prompts, merged, lengths, torch.cat(firsts))
            self._write(block, prompts, name, answers, of_prompts, handler.take("decode"))
        handler.queries.clear()

    def _prompt_pass(self, tokens: Sequence[int]) -> tuple[list[tuple[Tensor, Tensor]], Tensor]:
        """Keys and values of each layer, (1, num_kv_heads, seqlen, head_dim), and the next token (1,)."""
        model = self.loaded.model
        ids = torch.tensor([tokens], device=model.device)
        output = model(ids, use_cache=True, logits_to_keep=1)
        self.cache_name, cache = cache_of(output)
        return [(layer.keys, layer.values) for layer in cache.layers], output.logits[:, -1].argmax(-1)

    def _decode(
        self,
        block: Block,
        prompts: Sequence[Prompt],
        merged: list[tuple[Tensor, Tensor]],
        lengths: Tensor,
        token: Tensor,
    ) -> list[list[int]]:
        """Greedy answers, cut at their end."""
        from transformers import DynamicCache

        model, task = self.loaded.model, TASKS[block.task]
        cache: Any = DynamicCache()
        for layer, (keys, values) in enumerate(merged):
            cache.update(keys, values, layer)
        width, device = merged[0][0].shape[2], token.device
        mask = (torch.arange(width, device=device) >= width - lengths[:, None]).long()
        newlines, eos = self.newlines.to(device), torch.tensor(self.eos, device=device).long()
        lines, done = torch.zeros_like(token), torch.zeros_like(token, dtype=torch.bool)
        written, ended = [], []
        longest = max(prompt.item.max_new_tokens for prompt in prompts)
        for step in range(longest):
            written.append(token)
            lines = lines + torch.isin(token, newlines)
            done = done | (lines >= task.answer_lines) | torch.isin(token, eos)
            ended.append(done)
            if step == longest - 1 or bool(done.all()):
                break
            mask = torch.cat([mask, mask.new_ones(len(prompts), 1)], dim=1)
            output = model(
                token[:, None],
                attention_mask=mask,
                position_ids=(lengths + step)[:, None],
                use_cache=True,
                **{self.cache_name: cache},
            )
            token = output.logits[:, -1].argmax(-1)
        tokens, stops = torch.stack(written, 1).tolist(), torch.stack(ended, 1).tolist()
        return [row[: stop.index(True) + 1] if True in stop else row for row, stop in zip(tokens, stops)]

    def _write(
        self,
        block: Block,
        prompts: Sequence[Prompt],
        name: str,
        answers: Sequence[Sequence[int]],
        of_prompts: tuple[int, int],
        of_steps: tuple[int, int],
    ) -> None:
        task = TASKS[block.task]
        texts = self.loaded.tokenizer.batch_decode([list(a) for a in answers], skip_special_tokens=True)
        rows = []
        for prompt, text in zip(prompts, texts):
            item = prompt.item
            row = TaskRow(
                task=item.task,
                index=item.index,
                seed=item.seed,
                seqlen=item.num_tokens,
                condition=name,
                score=task.score(item, text),
                text=text,
                answers=item.answers,
                prompt_tokens=len(prompt.tokens),
                prompt_hash=prompt.hash,
                settings=self.variants[name].settings,
                model=self.loaded.name,
            )
            known = self.known.get(row.key)
            if known is not None and replace(known, score=row.score, text=row.text) != row:
                raise ValueError(
                    f"{self.out}: the row of {row.task} {row.index}, {name!r}, comes from another model,"
                    " other settings or another prompt; use another file"
                )
            if known is None:
                rows.append(row)
        append_rows(self.out, rows)
        self.known |= {row.key: row for row in rows}
        tiles = dict(zip(PHASES, (of_prompts, of_steps)))
        line: dict[str, Any] = {"task": block.task, "seqlen": block.seqlen, "seed": self.seed}
        line |= {"first": block.first, "items": block.count, "condition": name}
        with self.out.with_suffix(".sparsity.jsonl").open("a", encoding="utf-8") as file:
            for phase, (left_out, visible) in tiles.items():
                if visible:
                    found = {**line, "phase": phase, "skipped": left_out, "visited": visible}
                    file.write(json.dumps(found) + "\n")


def _left_padded(caches: Sequence[list[tuple[Tensor, Tensor]]], width: int) -> list[tuple[Tensor, Tensor]]:
    """Keys and values of each layer of all sequences, (batch, num_kv_heads, width, head_dim)."""

    def together(layer: int, which: int) -> Tensor:
        parts = [cache[layer][which] for cache in caches]
        return torch.cat([torch.nn.functional.pad(x, (0, 0, width - x.shape[2], 0)) for x in parts])

    return [(together(layer, 0), together(layer, 1)) for layer in range(len(caches[0]))]
