"""Turn task items into token ids as the model sees them, and answer them greedily in batches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from blasst.evals.tasks import CountTokens, Item, Task


def render(tokenizer: Any, user: str, answer_prefix: str) -> str:
    """The text that the model continues: the user's turn, and the assistant's turn begun with the prefix.

    Without a chat template: the user prompt, "Answer:" and the prefix.
    """
    if not tokenizer.chat_template:
        return f"{user}\nAnswer: {answer_prefix}"
    message = [{"role": "user", "content": user}]
    return tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True) + answer_prefix


def encode(tokenizer: Any, text: str) -> list[int]:
    """Token ids of a rendered text; a chat template has already written the special tokens."""
    return list(tokenizer(text, add_special_tokens=not tokenizer.chat_template).input_ids)


def token_counter(tokenizer: Any) -> CountTokens:
    """A count of the tokens of a prompt text, chat template included, never below what the model sees.

    The answer prefix is counted as part of the user's turn; the few tokens by which the cut between the two
    can change the count are added.
    """
    overhead = len(encode(tokenizer, render(tokenizer, "", ""))) + 3
    return lambda text: overhead + len(tokenizer(text, add_special_tokens=False).input_ids)


def item_tokens(tokenizer: Any, task: Task, item: Item) -> list[int]:
    """Token ids of an item's prompt."""
    user = task.prompt(item).removesuffix(item.answer_prefix).rstrip()
    return encode(tokenizer, render(tokenizer, user, item.answer_prefix))


def newline_tokens(tokenizer: Any) -> Tensor:
    """Ids of the tokens whose text holds a newline, int64 (count,)."""
    texts = tokenizer.batch_decode([[i] for i in range(len(tokenizer))])
    return torch.tensor([i for i, text in enumerate(texts) if "\n" in text], dtype=torch.int64)


def answer_batch(
    model: Any,
    tokenizer: Any,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    newlines: Tensor,
    answer_lines: int,
) -> list[str]:
    """Continue prompts greedily, together, left-padded.

    Args:
        model: a transformers causal language model.
        tokenizer: its tokenizer.
        prompts: token ids of each prompt.
        max_new_tokens: longest answer.
        newlines: int64 (count,) ids of tokens that hold a newline, see newline_tokens.
        answer_lines: an answer has ended after so many newlines, or at an end-of-sequence token.

    Returns:
        The text written after each prompt.
    """
    from transformers import StoppingCriteria, StoppingCriteriaList

    class StopAfterLines(StoppingCriteria):  # in a function: its base comes from an optional package
        def __call__(self, input_ids: Tensor, scores: Tensor, **kwargs: Any) -> Tensor:
            return torch.isin(input_ids[:, width:], stop).sum(1) >= answer_lines

    width = max(len(ids) for ids in prompts)
    pad = tokenizer.pad_token_id
    input_ids = torch.tensor([[pad] * (width - len(ids)) + list(ids) for ids in prompts])
    lengths = torch.tensor([len(ids) for ids in prompts])
    attention_mask = (torch.arange(width) >= width - lengths[:, None]).long()
    stop = newlines.to(model.device)
    with torch.inference_mode():
        output = model.generate(
            input_ids=input_ids.to(model.device),
            attention_mask=attention_mask.to(model.device),
            max_new_tokens=max_new_tokens,
            do_sample=False,
            temperature=None,
            top_p=None,
            top_k=None,
            pad_token_id=pad,
            stopping_criteria=StoppingCriteriaList([StopAfterLines()]),
        )
    return list(tokenizer.batch_decode(output[:, width:], skip_special_tokens=True))
