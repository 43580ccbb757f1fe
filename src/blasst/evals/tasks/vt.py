"""Variable tracking: name every variable that holds a value through a chain of assignments."""

from __future__ import annotations

from blasst.evals.haystack import hide, invented_numbers, noise, random_for
from blasst.evals.score import string_match_all
from blasst.evals.tasks.item import CountTokens, Item, Task, largest_item
from blasst.evals.words import NOUNS

NUM_HOPS = 4


def generate(seed: int, index: int, num_tokens: int, count_tokens: CountTokens) -> Item:
    """One chain of NUM_HOPS + 1 variables, its assignments in order at random depths of noise."""
    rng = random_for("vt", seed, index)
    names = [name.upper() for name in rng.sample(NOUNS, NUM_HOPS + 1)]
    value = invented_numbers(rng, 1, digits=5)[0]
    lines = [f"VAR {name} = {held}" for name, held in zip(names, [value, *names])]
    depths = sorted(rng.random() for _ in lines)

    def build(size: int) -> Item:
        return Item(
            task="vt",
            seed=seed,
            index=index,
            num_tokens=num_tokens,
            context="\n".join(hide(noise(size), lines, depths)),
            question=f"Which variables hold the value {value}?",
            answer_prefix=f"The {len(names)} variables that hold the value {value} are: VAR",
            answers=tuple(names),
            max_new_tokens=64,
        )

    return largest_item(build, lambda item: count_tokens(prompt(item)), num_tokens // 6)


def prompt(item: Item) -> str:
    """The user prompt followed by the answer prefix."""
    return (
        "The text below assigns values to variables. A variable may get its value from another variable."
        f" Follow the chain of assignments.\n\n{item.context}\n"
        f"Question: {item.question}\n{item.answer_prefix}"
    )


def score(item: Item, text: str) -> float:
    """Share of the chain's variables that the text names."""
    return string_match_all(text, item.answers)


TASKS = [Task("vt", generate, prompt, score, answer_lines=NUM_HOPS + 1)]
