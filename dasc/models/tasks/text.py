"""Plain text with long dependence: some words of a passage are changed, and what they became is asked for later."""

from __future__ import annotations

import re
from functools import cache
from importlib import resources

from dasc.models.tasks.example import Example, Question, Rng
from dasc.models.tasks.vocabulary import RECALL

_QUESTIONS = 3
_CUE_WORDS = 2
_LONGEST_QUESTION = 40
_LEAST_CONTEXT = 64
_WORDS_BEFORE = 60  # as many letters as the questions leave free, and more

SHORTEST_TEXT = _LEAST_CONTEXT + _QUESTIONS * _LONGEST_QUESTION
"""Tokens of the shortest example of :func:`text`."""

SHORTEST_RECITATION = 96
"""Tokens of the shortest example of :func:`recitation`, whose half has room for the cue and another word."""


@cache
def passages() -> str:
    """Well-known poems and openings of books, all in the public domain, with single spaces between words."""
    text = (resources.files(__package__) / "passages.txt").read_text(encoding="ascii")
    return re.sub(r"\s+", " ", text).strip()


@cache
def _words() -> list[str]:
    return passages().split()


@cache
def _replacements() -> list[str]:
    """Words without marks, 4 to 8 letters long."""
    return sorted({word.lower() for word in _words() if re.fullmatch("[A-Za-z]{4,8}", word)})


def text(rng: Rng, length: int) -> Example:
    """Running text in which every sixth word or so is another; asked are such words after the two before them.

    The passages themselves can be learned by heart, these words cannot: they have to be remembered from the context.
    """
    if length < SHORTEST_TEXT:
        raise ValueError(f"length must be at least {SHORTEST_TEXT} tokens, got {length}")
    start = int(rng.integers(len(_words())))
    chosen, changed = _with_changes(rng, start, length - _QUESTIONS * _LONGEST_QUESTION, 1 / 6)
    questions = []
    for i in rng.permutation(changed)[:_QUESTIONS].tolist():
        questions.append(Question(_cue(chosen, i), _bytes([chosen[i]])))
    return _after_passage(start, chosen, questions, length)


def recitation(rng: Rng, length: int) -> Example:
    """Running text in which every third word or so is another; asked is all that follows two words in its first half.

    An exercise for :func:`text`: it asks for the same, to find two words again and to read on, but for ten times as
    many tokens.
    """
    if length < SHORTEST_RECITATION:
        raise ValueError(f"length must be at least {SHORTEST_RECITATION} tokens, got {length}")
    start = int(rng.integers(len(_words())))
    chosen, _ = _with_changes(rng, start, length // 2, 1 / 3)
    i = int(rng.integers(_CUE_WORDS, max(len(chosen) // 2, _CUE_WORDS + 1)))
    return _after_passage(start, chosen, [Question(_cue(chosen, i), _bytes(chosen[i:]))], length)


def _with_changes(rng: Rng, start: int, room: int, share: float) -> tuple[list[str], list[int]]:
    """Words from the passages' word ``start`` on, fewer than ``room`` letters, and which of them are others.

    The first word that has words enough before it is one of these, each later one with probability ``share``.
    """
    words, replacements = _words(), _replacements()
    chosen: list[str] = []
    changed: list[int] = []
    while len(" ".join(chosen)) < room:
        if len(chosen) == _CUE_WORDS or (len(chosen) > _CUE_WORDS and rng.random() < share):
            changed.append(len(chosen))
            chosen.append(str(rng.choice(replacements)))
        else:
            chosen.append(words[(start + len(chosen)) % len(words)])
    del chosen[-1]
    return chosen, [i for i in changed if i < len(chosen)]


def _bytes(words: list[str]) -> tuple[int, ...]:
    return tuple((" ".join(words) + " ").encode())


def _cue(chosen: list[str], i: int) -> tuple[int, ...]:
    return (RECALL, *_bytes(chosen[i - _CUE_WORDS : i]))


def _after_passage(start: int, chosen: list[str], questions: list[Question], length: int) -> Example:
    """An example of ``length`` tokens: as many letters as there is room for come before the ``chosen`` words."""
    words = _words()
    used = sum(len(q.prompt) + len(q.answer) - 1 for q in questions)
    before = _bytes([words[(start - i) % len(words)] for i in range(_WORDS_BEFORE, 0, -1)])
    return Example((before + _bytes(chosen))[used - length :], tuple(questions), language=True)
