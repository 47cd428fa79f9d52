"""Batches of examples of several tasks, each sequence of a task by itself."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from dasc.models.tasks import EXERCISES, TASKS
from dasc.models.train.forward import OtherStates

# What predicting text counts beside answering.
_LANGUAGE_WEIGHT = 0.3
# Of replaced states. With zeros alone, states that are there would be in the way; of another sequence they are no help
# either, and what attends learns to overrule them.
_ZEROED_SHARE = 0.5


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
        others: recurrent states that sequences go on with in place of their own.
    """

    tokens: Tensor
    rows: Tensor
    positions: Tensor
    targets: Tensor
    weights: Tensor
    answers: Tensor
    names: tuple[str, ...]
    others: OtherStates


def draw_batch(
    names: Sequence[str], length: int, rng: np.random.Generator, without_states: Collection[str] = ()
) -> TrainingBatch:
    """One sequence of each named task.

    A sequence with ``n`` scored tokens weighs as ``sqrt(n)``, so that neither long answers nor short ones rule.

    Args:
        names: of :data:`~dasc.models.tasks.TASKS` and :data:`~dasc.models.tasks.EXERCISES`; may repeat.
        length: tokens of each sequence.
        rng: to draw from.
        without_states: tasks whose recurrent states are replaced before the questions, one half by zeros, the other
            by those of another sequence of the batch.
    """
    draws = TASKS | EXERCISES
    tokens, rows, positions, targets, weights, answers, at, donor = [], [], [], [], [], [], [], []
    for row, name in enumerate(names):
        example = draws[name](rng, length)
        sequence, scored, said = example.sequence()
        tokens.append(sequence)
        replaced = name in without_states
        at.append(len(example.context) if replaced else -1)
        donated = replaced and len(names) > 1 and rng.random() >= _ZEROED_SHARE
        donor.append((row + int(rng.integers(1, len(names)))) % len(names) if donated else -1)
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
        others=OtherStates(torch.tensor(at), torch.tensor(donor)),
    )
