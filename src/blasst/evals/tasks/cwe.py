"""Common words extraction: name the words that a numbered list repeats most often."""

from __future__ import annotations

import random

from blasst.evals.haystack import random_for
from blasst.evals.score import string_match_all
from blasst.evals.tasks.item import CountTokens, Item, Task, largest_item
from blasst.evals.words import ADJECTIVES, NOUNS

NUM_COMMON = 10
COMMON_COUNT = 30
RARE_COUNT = 3


def generate(seed: int, index: int, num_tokens: int, count_tokens: CountTokens) -> Item:
    """NUM_COMMON words COMMON_COUNT times each among words RARE_COUNT times each, shuffled."""
    rng = random_for("cwe", seed, index)
    words = rng.sample(NOUNS + ADJECTIVES, len(NOUNS) + len(ADJECTIVES))
    common, rare = words[:NUM_COMMON], words[NUM_COMMON:]
    # Long lists need more words than exist here: compounds, none of which holds a common word.
    rare += [first + second for first in rare for second in rare if first != second][: num_tokens // 12]
    order = rng.random()

    def build(size: int) -> Item:
        # A short budget repeats the common words less often, so that there is room for rare ones.
        repeats = min(COMMON_COUNT, max(RARE_COUNT + 2, num_tokens // 130))
        return Item(
            task="cwe",
            seed=seed,
            index=index,
            num_tokens=num_tokens,
            context=_numbered(common, repeats, rare[:size], RARE_COUNT, order),
            question=f"What are the {NUM_COMMON} words that appear most often in the list?",
            answer_prefix=f"The {NUM_COMMON} words that appear most often in the list are:\n1.",
            answers=tuple(common),
            max_new_tokens=80,
        )

    return largest_item(build, lambda item: count_tokens(prompt(item)), num_tokens // 30)


def prompt(item: Item) -> str:
    """The user prompt followed by the answer prefix."""
    return (
        "Below is a numbered list of words. Some words appear more often than the others. Remember the ones"
        f" that appear most often.\n\n{item.context}\n\nQuestion: {item.question}\n{item.answer_prefix}"
    )


def score(item: Item, text: str) -> float:
    """Share of the common words that the text names."""
    return string_match_all(text, item.answers)


def _numbered(common: list[str], repeats: int, rare: list[str], rare_repeats: int, order: float) -> str:
    words = common * repeats + rare * rare_repeats
    random.Random(order).shuffle(words)
    return " ".join(f"{number}. {word}" for number, word in enumerate(words, start=1))


TASKS = [Task("cwe", generate, prompt, score, answer_lines=NUM_COMMON)]
