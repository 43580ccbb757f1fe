"""Needle in a haystack, RULER's eight kinds: find the values that the text gives for one or more keys."""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import partial
from typing import Literal

from blasst.evals import haystack
from blasst.evals.haystack import hide, needle_line, random_for
from blasst.evals.score import string_match_all
from blasst.evals.tasks.item import CountTokens, Item, Task, largest_item


@dataclass(frozen=True)
class NeedleKind:
    """What is hidden where.

    Attributes:
        haystack: noise sentences, prose, or nothing but other needles.
        value: number of 7 digits, or UUID.
        key: adjective-noun word, or UUID.
        num_keys: hidden keys (in a haystack of needles: the asked ones).
        num_values: values hidden under each key.
        num_asked: keys asked for.
    """

    haystack: Literal["noise", "prose", "needles"]
    value: Literal["number", "uuid"] = "number"
    key: Literal["word", "uuid"] = "word"
    num_keys: int = 1
    num_values: int = 1
    num_asked: int = 1


KINDS = {
    "niah_single_1": NeedleKind("noise"),
    "niah_single_2": NeedleKind("prose"),
    "niah_single_3": NeedleKind("prose", value="uuid"),
    "niah_multikey_1": NeedleKind("prose", num_keys=4),
    "niah_multikey_2": NeedleKind("needles"),
    "niah_multikey_3": NeedleKind("needles", value="uuid", key="uuid"),
    "niah_multivalue": NeedleKind("prose", num_values=4),
    "niah_multiquery": NeedleKind("prose", num_keys=4, num_asked=4),
}

_KEYS = {"word": haystack.invented_names, "uuid": haystack.invented_uuids}
_VALUES = {"number": haystack.invented_numbers, "uuid": haystack.invented_uuids}


def generate(name: str, seed: int, index: int, num_tokens: int, count_tokens: CountTokens) -> Item:
    """An item of kind `name`; the needles sit at random depths."""
    kind = KINDS[name]
    rng = random_for(name, seed, index)
    values = _VALUES[kind.value](rng, kind.num_keys * kind.num_values)
    # In a haystack of needles the hay comes from the same generator, so no key can appear twice.
    num_hay = num_tokens // 16 if kind.haystack == "needles" else 0
    keys = _KEYS[kind.key](rng, kind.num_keys + num_hay)
    lines = [needle_line(keys[i // kind.num_values], value, kind.value) for i, value in enumerate(values)]
    depths = [rng.random() for _ in lines]
    hay_seed = rng.random()
    hidden = zip(keys[kind.num_keys :], _VALUES[kind.value](rng, num_hay))
    hay = [needle_line(key, value, kind.value) for key, value in hidden]
    asked = keys[: kind.num_asked]
    answers = tuple(values[: kind.num_asked * kind.num_values])
    list_start = "" if len(answers) == 1 else ":\n1."

    def build(size: int) -> Item:
        if kind.haystack == "noise":
            text = haystack.noise(size)
        elif kind.haystack == "prose":
            text = haystack.prose(random.Random(hay_seed), size)
        else:
            text = hay[:size]
        return Item(
            task=name,
            seed=seed,
            index=index,
            num_tokens=num_tokens,
            context=(" " if kind.haystack == "prose" else "\n").join(hide(text, lines, depths)),
            question=f"What {_verb(answers)} the {_subject(kind, asked)} given in the text?",
            answer_prefix=f"The {_subject(kind, asked)} given in the text {_verb(answers)}{list_start}",
            answers=answers,
            max_new_tokens=(48 if kind.value == "uuid" else 16) * len(answers),
        )

    first_guess = {"noise": num_tokens // 6, "prose": num_tokens // 2, "needles": num_tokens // 80}
    return largest_item(build, lambda item: count_tokens(prompt(item)), first_guess[kind.haystack])


def prompt(item: Item) -> str:
    """The user prompt followed by the answer prefix."""
    noun = KINDS[item.task].value
    return (
        f"Some secret {noun}s are hidden in the text below. Remember them, I will ask for them later.\n\n"
        f"{item.context}\n\n{item.question}\n{item.answer_prefix}"
    )


def score(item: Item, text: str) -> float:
    """Share of the hidden values that the text names."""
    return string_match_all(text, item.answers)


def _verb(answers: tuple[str, ...]) -> str:
    return "is" if len(answers) == 1 else "are"


def _subject(kind: NeedleKind, asked: list[str]) -> str:
    """For example "secret numbers for calm-otter, loud-fox and wild-oak"."""
    plural = "" if kind.num_asked * kind.num_values == 1 else "s"
    keys = asked[0] if len(asked) == 1 else f"{', '.join(asked[:-1])} and {asked[-1]}"
    return f"secret {kind.value}{plural} for {keys}"


TASKS = [
    Task(name, partial(generate, name), prompt, score, answer_lines=kind.num_values * kind.num_asked)
    for name, kind in KINDS.items()
]
