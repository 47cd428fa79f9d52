"""Batches of examples of several tasks, each sequence of a task by itself."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from dasc.models.tasks import TASKS

# What predicting text counts beside answering.
_LANGUAGE_WEIGHT = 0.3
# Were states forgotten in every sequence of a task, they would be in the way when they are there.
_FORGOTTEN_SHARE = 0.5


@dataclass(frozen=True, eq=False)
class TrainingBatch:
    """Sequences and what is to be said in them.

    Attributes:
        tokens: ``[B, T]`` int64.
        rows: ``[S]`` int64, sequence of each scored token.
        positions: ``[S]`` int64, where it is to be said.
        targets: ``[S]`` int64, what is to be said.
        weights: ``[S]`` float32, of the loss; the sum is 1.
        answers: ``[S]`` bool, part of an answer rather than of running text.
        names: task of each sequence.
        forget_at: ``[B]`` int64, position at which the sequence's recurrent states begin anew; -1 for none.
    """

    tokens: Tensor
    rows: Tensor
    positions: Tensor
    targets: Tensor
    weights: Tensor
    answers: Tensor
    names: tuple[str, ...]
    forget_at: Tensor


def draw_batch(
    names: Sequence[str], length: int, rng: np.random.Generator, forgotten: Collection[str] = ()
) -> TrainingBatch:
    """One sequence of each named task.

    A sequence with ``n`` scored tokens weighs as ``sqrt(n)``, so that neither long answers nor short ones rule.

    Args:
        names: of :data:`~dasc.models.tasks.TASKS`; may repeat.
        length: tokens of each sequence.
        rng: to draw from.
        forgotten: tasks in half of whose sequences the recurrent states are zeroed before the questions.
    """
    tokens, rows, positions, targets, weights, answers, forget_at = [], [], [], [], [], [], []
    for row, name in enumerate(names):
        example = TASKS[name](rng, length)
        sequence, scored, said = example.sequence()
        tokens.append(sequence)
        forget = name in forgotten and rng.random() < _FORGOTTEN_SHARE
        forget_at.append(len(example.context) if forget else -1)
        parts = [(scored, said, 1.0)]
        if example.language:
            context = len(example.context)
            parts.append((list(range(context - 1)), sequence[1:context], _LANGUAGE_WEIGHT))
        for is_language, (where, what, weight) in enumerate(parts):
            rows += [row] * len(where)
            positions += where
            targets += what
            weights += [weight * len(where) ** -0.5] * len(where)
            answers += [not is_language] * len(where)
    weight_of = torch.tensor(weights)
    return TrainingBatch(
        tokens=torch.tensor(tokens),
        rows=torch.tensor(rows),
        positions=torch.tensor(positions),
        targets=torch.tensor(targets),
        weights=weight_of / weight_of.sum(),
        answers=torch.tensor(answers),
        names=tuple(names),
        forget_at=torch.tensor(forget_at),
    )
