"""Benchmarks of the paper: how their items are scored, how often replayed, and how long answers may be."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["choice", "final_answer", "expression", "f1", "match", "match_all", "exact"]

REASONING_TOKENS = 32_768


@dataclass(frozen=True)
class Family:
    """Defaults of a benchmark's items.

    Attributes:
        kind: of answer.
        replays: measured requests of a question after the unscored warm one (appendix C.2).
        max_new_tokens: most tokens of an answer; the paper does not say.
    """

    kind: Kind
    replays: int
    max_new_tokens: int


FAMILIES = {
    "aime": Family("final_answer", 31, REASONING_TOKENS),
    "hmmt": Family("expression", 31, REASONING_TOKENS),
    "imo": Family("expression", 3, REASONING_TOKENS),
    "gpqa": Family("choice", 15, REASONING_TOKENS),
    "mmlupro": Family("choice", 7, 8192),
    "locomo": Family("f1", 1, 64),
    "ruler": Family("match_all", 3, 128),
}
"""By the first letters of a task's name, once in lower case and without marks: "MMLU-Pro", "IMO-AnswerBench"."""


def family_of(task: str) -> Family | None:
    """The benchmark that a task's name begins with, if any."""
    name = "".join(letter for letter in task.lower() if letter.isalnum())
    return next((family for start, family in FAMILIES.items() if name.startswith(start)), None)


def default_replays(task: str) -> int:
    """Measured replays of a task: 31, 31, 3, 15 and 7 for AIME, HMMT, IMO-AnswerBench, GPQA and MMLU-Pro, 3 for RULER.

    LoCoMo is measured once, greedily; so is a task of another name, unless its items say otherwise.
    """
    family = family_of(task)
    return 1 if family is None else family.replays
