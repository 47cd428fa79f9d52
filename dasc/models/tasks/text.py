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

SHORTEST = _LEAST_CONTEXT + _QUESTIONS * _LONGEST_QUESTION
"""Tokens of the shortest example."""


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
    words, replacements = _words(), _replacements()
    start = int(rng.integers(len(words)))
    chosen: list[str] = []
    changed: list[int] = []
    if length < SHORTEST:
        raise ValueError(f"length must be at least {SHORTEST} tokens, got {length}")
    room = length - _QUESTIONS * _LONGEST_QUESTION
    while len(" ".join(chosen)) < room:
        if len(chosen) == _CUE_WORDS or (len(chosen) > _CUE_WORDS and rng.random() < 1 / 6):
            changed.append(len(chosen))
            chosen.append(str(rng.choice(replacements)))
        else:
            chosen.append(words[(start + len(chosen)) % len(words)])
    del chosen[-1]
    changed = [i for i in changed if i < len(chosen)]
    questions = []
    for i in rng.permutation(changed)[:_QUESTIONS].tolist():
        cue = " ".join(chosen[i - _CUE_WORDS : i]) + " "
        questions.append(Question((RECALL, *cue.encode()), tuple((chosen[i] + " ").encode())))
    used = sum(len(q.prompt) + len(q.answer) - 1 for q in questions)
    context = (" ".join(chosen) + " ").encode()
    before = " ".join(words[(start - i) % len(words)] for i in range(_WORDS_BEFORE, 0, -1)) + " "
    return Example(tuple((before.encode() + context)[used - length :]), tuple(questions), language=True)
