"""How much of each task a model answers, given its whole context."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from dasc.models.hybrid.config import HybridConfig
from dasc.models.tasks import SHORTEST, TASKS, Example
from dasc.models.train.forward import logits

_BATCH_TOKENS = 8192
_LENGTHS = (128, 256, 512)
# Training draws from (seed, step); these examples are from elsewhere.
_STREAM = 2**32 - 1


@dataclass(frozen=True)
class Score:
    """Of one task at one length.

    Attributes:
        questions: asked.
        right: share of them whose answer is right in every token, the tokens before each being given.
        tokens: share of the answers' tokens that are right.
    """

    questions: int
    right: float
    tokens: float


def examples(name: str, length: int, count: int, seed: int = 0) -> list[Example]:
    """Examples of a task that no training saw.

    Args:
        name: of :data:`~dasc.models.tasks.TASKS`.
        length: tokens of each with all its questions.
        count: how many.
        seed: of the draw.
    """
    rng = np.random.default_rng((_STREAM, seed, length))
    return [TASKS[name](rng, length) for _ in range(count)]


@torch.no_grad()
def score(config: HybridConfig, weights: Mapping[str, Tensor], drawn: Sequence[Example]) -> Score:
    """Ask every question of ``drawn``, examples of equal length."""
    right_questions, right_tokens = [], []
    sequences = [example.sequence() for example in drawn]
    at_once = max(_BATCH_TOKENS // len(sequences[0][0]), 1)
    for first in range(0, len(drawn), at_once):
        part = sequences[first : first + at_once]
        said = logits(config, weights, torch.tensor([tokens for tokens, _, _ in part])).argmax(dim=-1)
        for example, (_, positions, wanted), row in zip(drawn[first:], part, said):
            right = (row[positions] == torch.tensor(wanted))[len(example.probes) :]
            right_tokens += right.tolist()
            for of_question in right.split([len(question.answer) for question in example.questions]):
                right_questions.append(bool(of_question.all()))
    return Score(len(right_questions), float(np.mean(right_questions)), float(np.mean(right_tokens)))


def score_all(
    config: HybridConfig, weights: Mapping[str, Tensor], names: Sequence[str], count: int
) -> dict[str, dict[int, Score]]:
    """Scores of some tasks at 128, 256 and 512 tokens, where these are enough, on ``count`` examples each."""
    return {
        name: {
            length: score(config, weights, examples(name, length, count))
            for length in _LENGTHS
            if length >= SHORTEST[name]
        }
        for name in names
    }
