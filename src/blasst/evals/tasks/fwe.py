"""Frequent words extraction: name the three most frequent words of a text in an invented code."""

from __future__ import annotations

import random

from blasst.evals.haystack import random_for
from blasst.evals.score import string_match_all
from blasst.evals.tasks.item import CountTokens, Item, Task, largest_item

NUM_ASKED = 3
VOCABULARY_SIZE = 50
#: Exponent of the word frequencies, rank ** -EXPONENT. The most frequent "word" is the filler "...".
EXPONENT = 2.0


def generate(seed: int, index: int, num_tokens: int, count_tokens: CountTokens) -> Item:
    """Coded words with Zipf frequencies, shuffled; rank 1 is filler that does not count."""
    rng = random_for("fwe", seed, index)
    words = _coded_words(rng, VOCABULARY_SIZE)
    order = rng.random()
    weights = [(rank + 1) ** -EXPONENT for rank in range(VOCABULARY_SIZE + 1)]

    def build(size: int) -> Item:
        counts = [round(weight / sum(weights) * size) for weight in weights]
        text = [word for word, count in zip(["...", *words], counts) for _ in range(count)]
        random.Random(order).shuffle(text)
        return Item(
            task="fwe",
            seed=seed,
            index=index,
            num_tokens=num_tokens,
            context=" ".join(text),
            question=f"What are the {NUM_ASKED} words that appear most often in the coded text?",
            answer_prefix=f"The {NUM_ASKED} words that appear most often in the coded text are:\n1.",
            answers=tuple(words[:NUM_ASKED]),
            max_new_tokens=32,
        )

    return largest_item(build, lambda item: count_tokens(prompt(item)), num_tokens // 3)


def prompt(item: Item) -> str:
    """The user prompt followed by the answer prefix."""
    return (
        "Read the coded text below and note how often each coded word appears. The dots ... are"
        " not a word.\n\n"
        f"{item.context}\n\nQuestion: {item.question}\n{item.answer_prefix}"
    )


def score(item: Item, text: str) -> float:
    """Share of the three words that the text names."""
    return string_match_all(text, item.answers)


def _coded_words(rng: random.Random, count: int) -> list[str]:
    """Distinct words of three open syllables, such as "ronabi"."""
    syllables = [consonant + vowel for consonant in "bdfgklmnprstvz" for vowel in "aeiou"]
    words: dict[str, None] = {}
    while len(words) < count:
        words["".join(rng.choices(syllables, k=3))] = None
    return list(words)


TASKS = [Task("fwe", generate, prompt, score, answer_lines=NUM_ASKED)]
