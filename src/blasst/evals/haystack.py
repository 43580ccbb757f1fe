"""Deterministic texts to hide things in, or to calibrate on: noise, needle lines, prose, code, user files.

Nothing is fetched: prose and code come from the running Python's own standard library, so the same seed gives
the same text under the same Python version.
"""

from __future__ import annotations

import random
import re
import sysconfig
import uuid
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Literal

from blasst.evals.words import ADJECTIVES, NOUNS

TextKind = Literal["noise", "needles", "prose", "code"]

TEXT_KINDS: tuple[TextKind, ...] = ("noise", "needles", "prose", "code")

#: The sentences that noise repeats, in this order.
NOISE_SENTENCES = (
    "The road is long.",
    "The hills are green.",
    "The wind is soft.",
    "Day follows night.",
    "We walk up and we walk down.",
)

# Modules of plain Python present in every supported version, large enough to be cut into long samples.
_CODE_MODULES = (
    *("argparse", "ast", "configparser", "csv", "dataclasses", "difflib", "doctest", "enum", "fractions"),
    *("functools", "heapq", "inspect", "mailbox", "optparse", "pickle", "pickletools", "pydoc", "shutil"),
    *("statistics", "subprocess", "tarfile", "textwrap", "threading", "tokenize", "turtle", "typing", "uuid"),
)

_BROKEN_HYPHEN = re.compile(r"(?<=[a-z])- (?=[a-z])")
_NOT_PROSE = re.compile(r">>>|::=|\*\*\*|===|\+-|New in version|Changed in version|Added in version|\[\d+\]")
_SENTENCE_END = re.compile(r"(?<=[a-z)\"][.?!]) ")


def random_for(name: str, seed: int, index: int) -> random.Random:
    """The generator of one item: the same name, seed and index always give the same numbers."""
    return random.Random(f"blasst/{name}/{seed}/{index}")


def invented_names(rng: random.Random, count: int) -> list[str]:
    """Distinct keys such as "silent-meadow".

    Raises:
        ValueError: more keys asked for than adjectives times nouns.
    """
    total = len(ADJECTIVES) * len(NOUNS)
    if count > total:
        raise ValueError(f"count: {count} names asked for, {total} exist")
    picks = rng.sample(range(total), count)
    return [f"{ADJECTIVES[pick // len(NOUNS)]}-{NOUNS[pick % len(NOUNS)]}" for pick in picks]


def invented_numbers(rng: random.Random, count: int, digits: int = 7) -> list[str]:
    """Distinct decimal numbers of a number of digits, the first not 0."""
    low = 10 ** (digits - 1)
    return [str(low + pick) for pick in rng.sample(range(9 * low), count)]


def invented_uuids(rng: random.Random, count: int) -> list[str]:
    """Random version-4 UUIDs."""
    return [str(uuid.UUID(int=rng.getrandbits(128), version=4)) for _ in range(count)]


def needle_line(key: str, value: str, noun: str = "number") -> str:
    """The sentence that hides a value under a key."""
    return f"One of the secret {noun}s for {key} is: {value}."


def hide(text: Sequence[str], lines: Sequence[str], depths: Sequence[float]) -> list[str]:
    """The lines placed between the sentences of a text, each at its depth in 0..1."""
    placed = list(text)
    for depth, _, line in sorted(zip(depths, range(len(lines)), lines), reverse=True):
        placed.insert(round(depth * len(text)), line)
    return placed


def noise(num_sentences: int) -> list[str]:
    """Sentences without content, the same few over and over."""
    count = len(NOISE_SENTENCES)
    return [NOISE_SENTENCES[i % count] for i in range(num_sentences)]


@cache
def _prose_sentences() -> tuple[str, ...]:
    """Sentences of the plain paragraphs of pydoc_data.topics, in the order of the sorted topics."""
    from pydoc_data import topics

    sentences: list[str] = []
    for _, topic in sorted(topics.topics.items()):
        for paragraph in topic.split("\n\n"):
            line = _BROKEN_HYPHEN.sub("-", " ".join(paragraph.split()))
            # Headings, lists, grammar and code do not both start with a capital and end with a stop.
            if line[:1].isupper() and line.endswith(".") and not _NOT_PROSE.search(line):
                sentences += [s for s in _SENTENCE_END.split(line) if len(s.split()) >= 4]
    return tuple(sentences)


def prose(rng: random.Random, num_words: int) -> list[str]:
    """English sentences from the standard library's help texts, from a random place on.

    Args:
        rng: decides where to start.
        num_words: words in all; the last sentence is cut to meet it, and the text starts over at its end.

    Returns:
        Sentences in reading order.
    """
    return _cut_sentences(_prose_sentences(), rng.random(), num_words)


def _cut_sentences(sentences: Sequence[str], start: float, num_words: int) -> list[str]:
    position = int(start * len(sentences))
    taken: list[str] = []
    while num_words > 0:
        words = sentences[position % len(sentences)].split()
        if len(words) > num_words:
            words = [*words[: num_words - 1], words[num_words - 1].rstrip(",;:.") + "."]
        taken.append(" ".join(words))
        num_words -= len(words)
        position += 1
    return taken


def code(rng: random.Random, num_words: int) -> str:
    """Python source of the standard library: whole modules in random order, from a random line on.

    Args:
        rng: decides the order of the modules and the first line.
        num_words: words (runs of non-space) in all, met to within one line.

    Raises:
        FileNotFoundError: this Python carries no source of its standard library.
    """
    folder = Path(sysconfig.get_paths()["stdlib"])
    lines: list[str] = []
    words = 0
    modules = rng.sample(_CODE_MODULES, len(_CODE_MODULES))
    skipped_share = rng.random() / 2
    while words < num_words:
        for name in modules:
            source = (folder / f"{name}.py").read_text(encoding="utf-8").splitlines()
            for line in source[int(skipped_share * len(source)) :]:
                if words >= num_words:
                    return "\n".join(lines)
                lines.append(line)
                words += len(line.split())
            skipped_share = 0.0
    return "\n".join(lines)


def needles(rng: random.Random, num_words: int) -> list[str]:
    """Needle lines with random keys and numbers, as many as the words allow."""
    count = max(1, num_words // len(needle_line("a", "b").split()))
    keys = invented_names(rng, count)
    return [needle_line(key, value) for key, value in zip(keys, invented_numbers(rng, count))]


def read_files(paths: Sequence[str | Path]) -> str:
    """The text of the user's files, joined by blank lines.

    Raises:
        ValueError: a file is missing, empty or not UTF-8 text.
    """
    texts = []
    for path in paths:
        try:
            text = Path(path).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"text file {path}: cannot be read as UTF-8 text: {error}") from error
        if not text.strip():
            raise ValueError(f"text file {path}: empty")
        texts.append(text)
    return "\n\n".join(texts)


def sample_text(kind: TextKind, seed: int, index: int, num_words: int) -> str:
    """One deterministic text of a kind.

    Raises:
        ValueError: an unknown kind.
    """
    rng = random_for(f"text/{kind}", seed, index)
    makers: dict[str, Callable[[], str]] = {
        "noise": lambda: " ".join(noise(max(1, num_words // 4))),
        "needles": lambda: "\n".join(needles(rng, num_words)),
        "prose": lambda: " ".join(prose(rng, num_words)),
        "code": lambda: code(rng, num_words),
    }
    if kind not in makers:
        raise ValueError(f"kind: {kind!r} is unknown; known: {', '.join(makers)}")
    return makers[kind]()


def token_sequence(
    tokenizer: Any,
    kind: TextKind,
    *,
    seed: int,
    index: int,
    num_tokens: int,
    files: Sequence[str | Path] = (),
) -> list[int]:
    """Exactly num_tokens token ids of one text, for calibration and for comparison with dense.

    Args:
        tokenizer: a transformers tokenizer.
        kind: kind of text; not looked at when files are given.
        seed: seed of the text.
        index: number of the text.
        num_tokens: length of the result.
        files: the user's own text files in place of a kind; text `index` starts num_tokens x index in.

    Raises:
        ValueError: the user's files hold too few tokens.
    """
    if files:
        ids = tokenizer(read_files(files)).input_ids[num_tokens * index : num_tokens * (index + 1)]
        if len(ids) < num_tokens:
            raise ValueError(f"files: hold too few tokens for text {index} of {num_tokens} tokens")
        return list(ids)
    num_words = num_tokens
    while True:  # a word is at least about one token, so one round is the rule
        ids = tokenizer(sample_text(kind, seed, index, num_words)).input_ids
        if len(ids) >= num_tokens:
            return list(ids[:num_tokens])
        num_words *= 2
