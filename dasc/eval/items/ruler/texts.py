"""Bundled text: filler and words.

``essays.txt`` holds passages of works in the public domain: the Declaration of Independence (1776), Bacon's *Of
Studies* (1597), Thoreau's *Walden* (1854), Emerson's *Self-Reliance* (1841), Melville's *Moby-Dick* (1851), Doyle's
*A Scandal in Bohemia* (1891), Dickens's *A Christmas Carol* (1843), Shelley's *Frankenstein* (1818), Wells's *The War
of the Worlds* (1898), Grahame's *The Wind in the Willows* (1908), Lincoln's second inaugural address (1865), Paine's
*The Crisis* (1776), Smith's *The Wealth of Nations* (1776) and Darwin's *On the Origin of Species* (1859). The
passages of :mod:`dasc.models.tasks.text` are taken too. The lists of words are our own; no word is part of another.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from importlib import resources
from random import Random

from dasc.models.tasks.text import passages

NOISE = ("The pond is still.", "The road is dry.", "The moon is pale.", "On we walk.", "Around and home again.")
"""Sentences that say nothing, to be repeated."""


@cache
def sentences() -> tuple[str, ...]:
    """All sentences of the bundled passages."""
    text = f"{_read('essays.txt')} {passages()}"
    return tuple(re.split(r"(?<=[.!?])\s+", re.sub(r"\s+", " ", text).strip()))


@cache
def words(kind: str) -> tuple[str, ...]:
    """``adjectives``, ``nouns`` or ``verbs``, in order."""
    return tuple(_read(f"{kind}.txt").split())


def essay(seed: str, count: int) -> list[str]:
    """Sentences of ``count`` words in all, the last one cut short: the passages in random order, again and again."""
    taken: list[str] = []
    for sentence in _shuffled_again_and_again(seed):
        parts = sentence.split(" ")[:count]
        if not parts:
            return taken
        taken.append(" ".join(parts))
        count -= len(parts)
    raise AssertionError("the passages never end")


def _shuffled_again_and_again(seed: str) -> Iterator[str]:
    rng = Random(seed)
    while True:
        yield from rng.sample(sentences(), len(sentences()))


def word_pair(rng: Random) -> str:
    """An adjective and a noun."""
    return f"{rng.choice(words('adjectives'))}-{rng.choice(words('nouns'))}"


def _read(name: str) -> str:
    return (resources.files(__package__) / name).read_text(encoding="ascii")
