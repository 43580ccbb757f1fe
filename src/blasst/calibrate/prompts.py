"""Prompts to calibrate on and prompts to check with, of exact token lengths; the two never share a text.

Four kinds, because content moves sparsity: prose (help texts of Python), code (source of the standard
library), noise (a few sentences over and over) and retrieval (needles in prose with a question at the end).
"""

from __future__ import annotations

import functools
import hashlib
import random
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

PromptKind = Literal["prose", "code", "noise", "retrieval"]
Split = Literal["calibration", "heldout"]

PROMPT_KINDS: tuple[PromptKind, ...] = ("prose", "code", "noise", "retrieval")
SPLITS: tuple[Split, ...] = ("calibration", "heldout")

#: One needle per so many tokens of a retrieval prompt, at least one.
TOKENS_PER_NEEDLE = 512

# Words of the two splits have nothing in common.
_NOUNS: dict[Split, tuple[str, ...]] = {
    "calibration": ("river", "garden", "castle", "engine", "teacher", "island", "market", "winter", "pencil"),
    "heldout": (
        "mountain",
        "kitchen",
        "harbour",
        "violin",
        "doctor",
        "desert",
        "village",
        "summer",
        "lantern",
    ),
}
_ADJECTIVES: dict[Split, tuple[str, ...]] = {
    "calibration": ("quiet", "golden", "narrow", "gentle", "distant", "wooden", "bright", "hollow"),
    "heldout": ("silent", "silver", "ancient", "frozen", "crooked", "velvet", "hidden", "sturdy"),
}


@dataclass(frozen=True)
class Prompt:
    """One prompt.

    Attributes:
        kind: label under which it is counted, for example "prose".
        text: the text; None when token ids are given.
        token_ids: the tokens; None when the text is given.
    """

    kind: str
    text: str | None = None
    token_ids: tuple[int, ...] | None = None

    def ids(self, tokenizer: Any) -> tuple[int, ...]:
        """Token ids.

        Args:
            tokenizer: needed for a text, else it may be None.

        Raises:
            ValueError: neither or both of text and token ids, or a text without a tokenizer.
        """
        if (self.text is None) == (self.token_ids is None):
            raise ValueError(f"prompt of kind {self.kind!r}: give text or token_ids, one of them")
        if self.token_ids is not None:
            return tuple(int(token) for token in self.token_ids)
        if tokenizer is None:
            raise ValueError(f"prompt of kind {self.kind!r} is a text: tokenizer is missing")
        return tuple(tokenizer(self.text).input_ids)


def prompts_hash(prompts: Sequence[tuple[int, ...]]) -> str:
    """First 32 hex digits of the SHA-256 of token sequences, in order."""
    digest = hashlib.sha256()
    for ids in prompts:
        digest.update(len(ids).to_bytes(8, "little"))
        digest.update(b"".join(int(token).to_bytes(4, "little") for token in ids))
    return digest.hexdigest()[:32]


def _split_of(name: str) -> Split:
    """A fixed half for every name: topics and files never change sides."""
    return SPLITS[hashlib.sha256(name.encode()).digest()[0] % 2]


@functools.cache
def _prose(split: Split) -> tuple[str, ...]:
    """Help topics of a split; a paragraph that several topics quote is kept once, in the first of them."""
    from pydoc_data.topics import topics

    seen: set[str] = set()
    texts: dict[Split, list[str]] = {name: [] for name in SPLITS}
    for name, topic in sorted(topics.items()):
        fresh = []
        for paragraph in topic.split("\n\n"):
            plain = " ".join(paragraph.split())
            if plain and plain not in seen:
                seen.add(plain)
                fresh.append(paragraph)
        if fresh:
            texts[_split_of(name)].append("\n\n".join(fresh))
    return tuple(texts[split])


@functools.cache
def _code_files(split: Split) -> tuple[Path, ...]:
    """Top-level modules of the standard library of a split with at least 8000 bytes of source."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    found = [
        p for p in sorted(folder.glob("*.py")) if p.stat().st_size >= 8000 and _split_of(p.stem) == split
    ]
    if not found:
        raise FileNotFoundError(f"kinds: 'code' needs the sources of the standard library in {folder}")
    return tuple(found)


def _from_a_random_place(texts: Sequence[str], rng: random.Random) -> Iterator[str]:
    """Texts in random order, again and again; the first one from somewhere in its first half on."""
    first = True
    while True:
        for text in rng.sample(list(texts), len(texts)):
            begin = text.find("\n", rng.randrange(len(text) // 2 + 1)) + 1 if first else 0
            first = False
            yield text[begin:]


def _code(split: Split, rng: random.Random) -> Iterator[str]:
    files = list(_code_files(split))
    while True:
        for path in rng.sample(files, len(files)):
            source = path.read_text(encoding="utf-8", errors="replace")
            yield source[source.find("\n", rng.randrange(len(source) // 2)) + 1 :]


def _noise(split: Split, rng: random.Random) -> Iterator[str]:
    nouns, adjectives = rng.sample(_NOUNS[split], 5), rng.sample(_ADJECTIVES[split], 5)
    paragraph = " ".join(f"The {noun} is {adjective}." for noun, adjective in zip(nouns, adjectives))
    while True:
        yield " ".join([paragraph] * 20)


def _tokens_of(texts: Iterator[str], tokenizer: Any, count: int) -> list[int]:
    """The first `count` tokens of texts joined by blank lines."""
    ids: list[int] = []
    while len(ids) < count:
        ids += tokenizer(next(texts) + "\n\n", add_special_tokens=False).input_ids
    return ids[:count]


def _plain_prompt(
    source: Callable[[Split, random.Random], Iterator[str]],
    tokenizer: Any,
    count: int,
    split: Split,
    rng: random.Random,
) -> list[int]:
    return _tokens_of(source(split, rng), tokenizer, count)


def _retrieval_prompt(tokenizer: Any, count: int, split: Split, rng: random.Random) -> list[int]:
    """Prose with needles at random places, and the beginning of the answer at the end."""

    def encode(text: str) -> list[int]:
        return list(tokenizer(text, add_special_tokens=False).input_ids)

    keys = [f"{a}-{n}" for a in _ADJECTIVES[split] for n in _NOUNS[split]]
    needles = []
    chosen = rng.sample(keys, min(len(keys), max(1, count // TOKENS_PER_NEEDLE)))
    for key in chosen:
        needles.append(encode(f" The access code of the {key} is {rng.randrange(10**6, 10**7)}. "))
    key = rng.choice(chosen)
    tail = encode(f"\n\nWhat is the access code of the {key}? The access code of the {key} is")
    room = count - len(tail) - sum(map(len, needles))
    if room < len(needles):
        raise ValueError(f"lengths: a retrieval prompt needs at least {count - room + len(needles)} tokens")
    prose = _tokens_of(_from_a_random_place(_prose(split), rng), tokenizer, room)
    places = sorted(rng.sample(range(room), len(needles)))
    body: list[int] = []
    for begin, end, needle in zip([0, *places], places, needles):
        body += prose[begin:end] + needle
    return body + prose[places[-1] :] + tail


def calibration_prompts(
    tokenizer: Any,
    lengths: Sequence[int],
    *,
    kinds: Sequence[PromptKind] = PROMPT_KINDS,
    per_kind: int = 1,
    split: Split = "calibration",
    seed: int = 0,
) -> list[Prompt]:
    """A deterministic mix of prompts: every length and kind, `per_kind` of each.

    Args:
        tokenizer: transformers tokenizer; special tokens that it puts in front count towards the length.
        lengths: exact token lengths.
        kinds: kinds of content.
        per_kind: prompts per length and kind.
        split: "calibration" or "heldout"; texts, files and words of the two have nothing in common.
        seed: other seeds start at other places.

    Returns:
        Prompts with token ids, by length, then kind.

    Raises:
        ValueError: an unknown kind or split, a length that is too short, or nothing asked for.
    """
    if split not in SPLITS:
        raise ValueError(f"split: got {split!r}, wants one of {list(SPLITS)}")
    if unknown := set(kinds) - set(PROMPT_KINDS):
        raise ValueError(f"kinds: unknown {sorted(unknown)}, known are {list(PROMPT_KINDS)}")
    if not lengths or not kinds or per_kind < 1:
        raise ValueError("lengths, kinds and per_kind: nothing to build")
    prefix = list(tokenizer("").input_ids)
    prompts = []
    for length in lengths:
        count = length - len(prefix)
        if count < 1:
            raise ValueError(f"lengths: got {length}, wants at least {len(prefix) + 1} tokens")
        for kind in kinds:
            for index in range(per_kind):
                rng = random.Random(f"blasst-prompts/{split}/{kind}/{length}/{seed}/{index}")
                if kind == "retrieval":
                    ids = _retrieval_prompt(tokenizer, count, split, rng)
                elif kind == "code":
                    ids = _plain_prompt(_code, tokenizer, count, split, rng)
                elif kind == "noise":
                    ids = _plain_prompt(_noise, tokenizer, count, split, rng)
                else:
                    ids = _tokens_of(_from_a_random_place(_prose(split), rng), tokenizer, count)
                prompts.append(Prompt(kind, token_ids=(*prefix, *ids)))
    return prompts
