"""Recall of what was told once: one needle, many pairs, and several values of a key."""

from __future__ import annotations

import numpy as np

from dasc.models.tasks.example import Example, Question, Rng, scatter
from dasc.models.tasks.vocabulary import ASK, ASK_NEXT, FILLER, KEYS, VALUES, symbols

_MOST_VALUES = 3
_FILLER = (FILLER.start, FILLER.stop)


def recall_single(rng: Rng, length: int) -> Example:
    """One pair of key and value among filler; the key is asked for."""
    (key,), (value,) = _draw(rng, symbols(KEYS, length), 1), _draw(rng, symbols(VALUES, length), 1)
    return Example(tuple(scatter(rng, [[key, value]], length - 2, _FILLER)), (Question((ASK, key), (value,)),))


def recall_multi(rng: Rng, length: int) -> Example:
    """Pairs of different keys among filler, at most 48; questions about them take up to a third of the tokens."""
    pairs = int(rng.integers(2, max(3, min(48, length // 5) + 1)))
    keys = _draw(rng, symbols(KEYS, length), pairs)
    values = rng.choice(symbols(VALUES, length), size=pairs).tolist()
    asked = rng.permutation(np.resize(rng.permutation(pairs), max(length // 6, 1)))
    context = scatter(rng, [[k, v] for k, v in zip(keys, values)], length - 2 * len(asked), _FILLER)
    return Example(tuple(context), tuple(Question((ASK, keys[i]), (values[i],)) for i in asked))


def multi_value(rng: Rng, length: int) -> Example:
    """Keys with up to three different values each, told at different places; all of a key's are asked for, in order."""
    count = int(rng.integers(1, max(2, min(8, length // 16) + 1)))
    keys = _draw(rng, symbols(KEYS, length), count)
    values = [_draw(rng, symbols(VALUES, length), int(rng.integers(1, _MOST_VALUES + 1))) for _ in keys]
    owners = rng.permutation([i for i in range(count) for _ in values[i]])
    left = [iter(v) for v in values]
    runs = [[keys[i], next(left[i])] for i in owners]
    questions = tuple(Question((ASK_NEXT, keys[i]), tuple(values[i])) for i in rng.permutation(count))
    room = length - sum(len(q.prompt) + len(q.answer) - 1 for q in questions)
    return Example(tuple(scatter(rng, runs, room, _FILLER)), questions)


def _draw(rng: Rng, ids: range, count: int) -> list[int]:
    """Different ids."""
    chosen: list[int] = rng.choice(len(ids), size=count, replace=False).tolist()
    return [ids[i] for i in chosen]
