"""Common words, which come more often than all others, and frequent words, of a long-tailed distribution."""

from __future__ import annotations

import string
from itertools import count, takewhile
from math import pi
from random import Random

from dasc.eval.items.ruler.draft import Draft
from dasc.eval.items.ruler.texts import word_pair, words

COMMON, COMMON_TIMES, UNCOMMON_TIMES = 10, 30, 3
EXAMPLE_TIMES, EXAMPLE_UNCOMMON = 3, 10
LEAST_UNCOMMON = 10
COMMON_QUESTION = (
    f"Which {COMMON} words come most often in the list above?\nAnswer: The {COMMON} words that come most often are"
)

FREQUENT = 3
ALPHA = 2
ZETA = pi**2 / 6  # of 2
LEAST_CODED = 200
CODED_LETTERS = 6
IGNORED = "..."


def common_words(rng: Random) -> Draft:
    """10 words come 30 times each and others 3 times, after a short example; its size is the number of the others."""
    drawn = list(words("adjectives") + words("nouns") + words("verbs"))
    rng.shuffle(drawn)
    common, shown, drawn = drawn[:COMMON], drawn[COMMON : 2 * COMMON], drawn[2 * COMMON :]
    shown_others, others = drawn[:EXAMPLE_UNCOMMON], drawn[EXAMPLE_UNCOMMON:]
    seed = str(rng.getrandbits(64))
    example = _list(shown * EXAMPLE_TIMES + shown_others, seed)

    def context(size: int) -> str:
        more = _word_pairs(seed, size - len(others), {*common})
        listed = _list(common * COMMON_TIMES + (others[:size] + more) * UNCOMMON_TIMES, seed)
        return (
            "In each numbered list below, some words come more often than all others. First an example.\n\n"
            f"{example}\n{COMMON_QUESTION} {', '.join(shown)}\n\nNow the list that counts.\n\n{listed}\n"
        )

    return Draft(context, COMMON_QUESTION, tuple(common), LEAST_UNCOMMON)


def _list(entries: list[str], seed: str) -> str:
    shuffled = list(entries)
    Random(seed).shuffle(shuffled)
    return " ".join(f"{i}. {word}" for i, word in enumerate(shuffled, start=1))


def _word_pairs(seed: str, needed: int, not_in: set[str]) -> list[str]:
    """Pairs of words, for lists longer than the bundled words suffice for; no part of them is in ``not_in``."""
    rng = Random(seed)
    pairs: dict[str, None] = {}
    while len(pairs) < needed:
        pair = word_pair(rng)
        if not_in.isdisjoint(pair.split("-")):
            pairs[pair] = None
    return list(pairs)


def frequent_words(rng: Random) -> Draft:
    """Coded words, the ``k``-th as often as ``k ** -2`` says, the first being dots; its size is the number of words.

    The three after the dots are asked for.
    """
    seed = str(rng.getrandbits(64))

    def context(size: int) -> str:
        rng = Random(seed)
        counts = list(takewhile(bool, (int(size * rank**-ALPHA / ZETA) for rank in count(1))))
        text = [word for word, times in zip(_coded(seed, len(counts)), counts) for _ in range(times)]
        rng.shuffle(text)
        return (
            "The text below is in code, and what each word means is not known. Keep track of how often each word "
            f"comes; dots are not words.\n\n{' '.join(text)}\n"
        )

    question = (
        f"Which {FREQUENT} coded words come most often in the text above, dots left out?\n"
        f"Answer: The {FREQUENT} coded words that come most often are"
    )
    return Draft(context, question, tuple(_coded(seed, 1 + FREQUENT)[1:]), LEAST_CODED)


def _coded(seed: str, needed: int) -> list[str]:
    """Dots, and then words of random letters, the same first ones however many are needed."""
    rng = Random(seed)
    coded = {IGNORED: None}
    while len(coded) < needed:
        coded["".join(rng.choices(string.ascii_lowercase, k=CODED_LETTERS))] = None
    return list(coded)
