"""Copying a run of words from before a stretch of filler."""

from __future__ import annotations

from dasc.models.tasks.example import Example, Question, Rng, scatter
from dasc.models.tasks.vocabulary import BEGIN, FILLER, REPEAT, VALUES, symbols

_MOST_WORDS = 24


def copying(rng: Rng, length: int) -> Example:
    """Up to 24 words after a mark, somewhere among filler, are to be said again."""
    count = int(rng.integers(2, max(3, min(_MOST_WORDS, length // 4) + 1)))
    words = rng.choice(symbols(VALUES, length), size=count).tolist()
    context = scatter(rng, [[BEGIN, *words]], length - count, (FILLER.start, FILLER.stop))
    return Example(tuple(context), (Question((REPEAT,), tuple(words)),))
