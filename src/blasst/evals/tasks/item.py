"""What a task kind is made of, and how an item is grown to its token budget."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

#: Tokens of a prompt text as the model will see it, chat template included.
CountTokens = Callable[[str], int]


@dataclass(frozen=True)
class Item:
    """One question with its long context.

    Attributes:
        task: task kind.
        seed: seed of the generator.
        index: number of the item.
        num_tokens: token budget of prompt and answer together.
        context: the long text.
        question: the question about it.
        answer_prefix: beginning of the answer, given to the model; the end of the prompt.
        answers: reference strings.
        max_new_tokens: room for the answer.
    """

    task: str
    seed: int
    index: int
    num_tokens: int
    context: str
    question: str
    answer_prefix: str
    answers: tuple[str, ...]
    max_new_tokens: int


@dataclass(frozen=True)
class Task:
    """One task kind: the three functions of its file, and how an answer ends.

    Attributes:
        name: RULER's name of the kind.
        generate: (seed, index, num_tokens, count_tokens) -> Item.
        prompt: user prompt followed by the answer prefix.
        score: score of a text, 0..1.
        answer_lines: lines of a complete answer; generation may stop at the end of the last.
    """

    name: str
    generate: Callable[[int, int, int, CountTokens], Item]
    prompt: Callable[[Item], str]
    score: Callable[[Item, str], float]
    answer_lines: int = 1


def largest_item(build: Callable[[int], Item], count_tokens: Callable[[Item], int], first_guess: int) -> Item:
    """The item of the largest size whose prompt and answer fit its token budget.

    Interpolates between measured sizes, so it costs few token counts; only an item that was measured as
    fitting is ever returned.

    Args:
        build: item of a size (words, lines, documents); tokens grow with the size.
        count_tokens: prompt tokens of an item.
        first_guess: size to try first.

    Raises:
        ValueError: the item of size 0 does not fit, or the text does not grow to the budget.
    """
    best = build(0)
    limit = best.num_tokens - best.max_new_tokens
    low, low_tokens = 0, count_tokens(best)
    if low_tokens > limit:
        raise ValueError(
            f"num_tokens: {best.num_tokens} is too short for {best.task}: it takes at least "
            f"{low_tokens + best.max_new_tokens} tokens"
        )
    high: int | None = None
    guess = max(1, first_guess)
    while high is None or high - low > 1:
        if guess > 4 * limit:
            raise ValueError(f"num_tokens: {best.task} has no text for as many as {best.num_tokens} tokens")
        item = build(guess)
        tokens = count_tokens(item)
        slope = max((tokens - low_tokens) / (guess - low), 1e-3) if guess > low else 1.0
        if tokens <= limit:
            best, low, low_tokens = item, guess, tokens
            if limit - tokens < max(slope / 2, limit / 200):  # within 0.5%: not worth another count
                break
        else:
            high = guess
        # Rounded down: the next size is as close to the limit as the slope says, and still inside it.
        guess = low + max(1, int((limit - low_tokens) / slope))
        if high is not None:
            guess = min(guess, high - 1)
            if guess <= low:
                break
    return best
