"""One instance of a task: a context, questions about it, and where it can be asked on the way."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

Rng = np.random.Generator


@dataclass(frozen=True)
class Question:
    """A question that follows the context, by itself: no other question need come before it.

    Attributes:
        prompt: token ids.
        answer: token ids that the model should say next.
    """

    prompt: tuple[int, ...]
    answer: tuple[int, ...]


@dataclass(frozen=True)
class Example:
    """An instance of a task.

    Attributes:
        context: token ids, what a prefix cache would hold.
        questions: at least one.
        probes: ``(position, answer)``: asked at this position of the context, the model should say ``answer`` there.
            The context goes on as if nobody had answered.
        language: the context is text, so that each of its tokens is worth predicting.
    """

    context: tuple[int, ...]
    questions: tuple[Question, ...]
    probes: tuple[tuple[int, int], ...] = ()
    language: bool = False

    def sequence(self) -> tuple[list[int], list[int], list[int]]:
        """The context and all questions one after the other, for training and for quick scores.

        Returns:
            Token ids; positions scored, ascending; and the token that the model should say after each of these. An
            answer of one token is not part of the sequence, of a longer one all but the last token are.
        """
        tokens = list(self.context)
        scored = [position for position, _ in self.probes]
        said = [answer for _, answer in self.probes]
        for question in self.questions:
            first = len(tokens) + len(question.prompt) - 1
            tokens += [*question.prompt, *question.answer[:-1]]
            scored += range(first, len(tokens))
            said += question.answer
        return tokens, scored, said


Draw = Callable[[Rng, int], Example]
"""Draws an example of a task from a generator, with a sequence of exactly so many tokens.

It raises ``ValueError`` when so few tokens cannot hold one.
"""


def scatter(rng: Rng, runs: list[list[int]], length: int, filler: tuple[int, int]) -> list[int]:
    """``runs`` in order at random places among random filler tokens, ``length`` tokens in all.

    Args:
        rng: to draw from.
        runs: tokens that stay together.
        length: of the result.
        filler: first id of the filler tokens, and the id after the last.

    Raises:
        ValueError: when the runs alone are longer.
    """
    free = length - sum(map(len, runs))
    if free < 0:
        raise ValueError(f"length must be at least {sum(map(len, runs))} tokens to hold what is told, got {length}")
    noise: list[int] = rng.integers(*filler, size=free).tolist()
    gaps: list[int] = np.sort(rng.integers(0, free + 1, size=len(runs))).tolist()
    tokens: list[int] = []
    done = 0
    for gap, run in zip(gaps, runs):
        tokens += noise[done:gap] + run
        done = gap
    return tokens + noise[done:]
