"""A prompt whose context can be made longer and shorter, and how it is fitted to a number of tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

CountTokens = Callable[[str], int]

FIRST_STEP = 32


@dataclass(frozen=True)
class Draft:
    """One instance of a subtask.

    Attributes:
        context: text of a given size, in units of its own. Whatever the size, what is asked is in it; the larger, the
            more tokens.
        question: follows the context.
        references: right answers.
        least: smallest size.
    """

    context: Callable[[int], str]
    question: str
    references: tuple[str, ...]
    least: int = 0

    def prompt(self, size: int) -> str:
        return self.context(size) + self.question


def fitted(draft: Draft, count_tokens: CountTokens, most_tokens: int) -> str:
    """The longest context with which the prompt has at most ``most_tokens``.

    Raises:
        ValueError: when the smallest has more, or for a count that does not grow with the text.
    """
    low, low_tokens = draft.least, count_tokens(draft.prompt(draft.least))
    if low_tokens > most_tokens:
        raise ValueError(f"a prompt needs at least {low_tokens} tokens, and {most_tokens} are left for it")
    high, high_tokens = None, 0
    size = low + FIRST_STEP
    while True:
        tokens = count_tokens(draft.prompt(size))
        if size - FIRST_STEP == draft.least and tokens <= low_tokens:
            raise ValueError(f"count_tokens must give more than {low_tokens} for a longer text, got {tokens}")
        if tokens > most_tokens:
            high, high_tokens = size, tokens
        else:
            step, gained = size - low, max(tokens - low_tokens, 1)
            low, low_tokens = size, tokens
        if high is not None and high - low == 1:
            return draft.context(low)
        room = most_tokens - low_tokens  # tokens grow about evenly with size
        if high is None:
            size = low + 1 + room * step // gained
        else:
            size = min(max(low + room * (high - low) // (high_tokens - low_tokens), low + 1), high - 1)
