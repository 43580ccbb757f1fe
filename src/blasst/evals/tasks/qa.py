"""Question answering over invented documents: one fact (qa_1), or two facts joined (qa_2)."""

from __future__ import annotations

import random
from functools import partial

from blasst.evals.haystack import prose, random_for
from blasst.evals.score import string_match_part
from blasst.evals.tasks.item import CountTokens, Item, Task, largest_item
from blasst.evals.words import FIRST_NAMES, HOBBIES, LAST_NAMES, PROFESSIONS, TOWN_ENDS, TOWN_STARTS

_SITES = ("museum", "theater", "library", "hospital", "school", "bakery", "brewery", "orchestra", "newspaper")


def generate(name: str, seed: int, index: int, num_tokens: int, count_tokens: CountTokens) -> Item:
    """The document or documents that answer the question, among others about other people and places."""
    two_hops = name == "qa_2"
    rng = random_for(name, seed, index)
    people = _people(rng, num_tokens // 200 + 2)
    towns = _towns(rng)
    birthplaces = [rng.choice(towns) for _ in people]
    documents = [_person(rng, person, town, towns) for person, town in zip(people, birthplaces)]
    if two_hops:
        sites = [f"{town} {site}" for town in towns for site in _SITES]
        founded = rng.sample(sites, min(len(people), len(sites)))
        documents = [
            text
            for person, document, site in zip(people, documents, founded)
            for text in (document, _site(rng, site, person))
        ]
        question = f"In which town was the founder of the {founded[0]} born?"
        prefix = f"The founder of the {founded[0]} was born in the town of"
    else:
        question = f"In which town was {people[0]} born?"
        prefix = f"{people[0]} was born in the town of"
    num_needed = 2 if two_hops else 1
    others = [" ".join(prose(rng, rng.randrange(30, 80))) for _ in range(num_tokens // 40)]
    documents[num_needed:] = _interleave(documents[num_needed:], others)
    filler = prose(rng, 100)
    places = [rng.random() for _ in range(len(documents) + 1)]

    def build(size: int) -> Item:
        chosen = _of_words(documents, num_needed, size, " ".join(filler).split())
        chosen = [text for _, text in sorted(zip(places, chosen))]
        return Item(
            task=name,
            seed=seed,
            index=index,
            num_tokens=num_tokens,
            context="\n\n".join(f"Document {number}:\n{text}" for number, text in enumerate(chosen, start=1)),
            question=question,
            answer_prefix=prefix,
            answers=(birthplaces[0],),
            max_new_tokens=12,
        )

    return largest_item(build, lambda item: count_tokens(prompt(item)), num_tokens // 2)


def prompt(item: Item) -> str:
    """The user prompt followed by the answer prefix."""
    return (
        "Answer the question from the documents below. Give only the answer.\n\n"
        f"{item.context}\n\nQuestion: {item.question}\n{item.answer_prefix}"
    )


def score(item: Item, text: str) -> float:
    """1 when the text names the town."""
    return string_match_part(text, item.answers)


def _people(rng: random.Random, count: int) -> list[str]:
    names = [f"{first} {last}" for first in FIRST_NAMES for last in LAST_NAMES]
    return rng.sample(names, min(count, len(names)))


def _towns(rng: random.Random) -> list[str]:
    return [start + rng.choice(TOWN_ENDS) for start in rng.sample(TOWN_STARTS, len(TOWN_STARTS))]


def _interleave(people: list[str], others: list[str]) -> list[str]:
    """Every fourth document tells of a person or a site."""
    mixed = []
    for position, other in enumerate(others):
        if position % 4 == 0 and people:
            mixed.append(people.pop(0))
        mixed.append(other)
    return mixed


def _of_words(documents: list[str], num_needed: int, num_words: int, filler: list[str]) -> list[str]:
    """The needed documents and so many words of others; what is left over becomes a document of filler."""
    chosen = documents[:num_needed]
    for text in documents[num_needed:]:
        words = len(text.split())
        if words > num_words:
            break
        chosen.append(text)
        num_words -= words
    if num_words >= 8:
        chosen.append(" ".join(filler[:num_words]))
    return chosen


def _person(rng: random.Random, person: str, birthplace: str, towns: list[str]) -> str:
    year = rng.randrange(1880, 1990)
    return (
        f"{person} was born in the town of {birthplace} in {year}. {person} worked as a"
        f" {rng.choice(PROFESSIONS)} in {rng.choice(towns)} and was fond of {rng.choice(HOBBIES)}."
    )


def _site(rng: random.Random, site: str, founder: str) -> str:
    year, members = rng.randrange(1900, 2020), rng.randrange(20, 900)
    return f"The {site} was founded in {year} by {founder}. It has {members} members."


TASKS = [Task(name, partial(generate, name), prompt, score) for name in ("qa_1", "qa_2")]
