"""What came often: common words, and the most frequent ones in order."""

from __future__ import annotations

import numpy as np

from dasc.models.tasks.example import Example, Question, Rng
from dasc.models.tasks.vocabulary import COMMON, FREQUENT, KEYS

_WORDS = KEYS[:32]
_COMMON = 3
_SHARES = (0.36, 0.22, 0.12)


def common_words(rng: Rng, length: int) -> Example:
    """Three words make up half of the context, all others are about equally rare; the three are asked for, by id."""
    size = length - 1 - (_COMMON - 1)
    words = rng.permutation(_WORDS)
    each = max(size // (2 * _COMMON), 2)
    rest = size - _COMMON * each
    if rest < 0:
        raise ValueError(f"length must be at least {_COMMON * 2 + _COMMON} tokens, got {length}")
    rare = rng.permutation(np.resize(words[_COMMON:], rest))
    context = rng.permutation(np.concatenate([np.repeat(words[:_COMMON], each), rare]))
    return Example(tuple(context.tolist()), (Question((COMMON,), tuple(sorted(words[:_COMMON].tolist()))),))


def frequent_words(rng: Rng, length: int) -> Example:
    """Words of falling frequency; the three most frequent are asked for, the most frequent first."""
    size = length - 1 - (len(_SHARES) - 1)
    words = rng.permutation(_WORDS)
    counts = [round(share * size) for share in _SHARES]
    if len(set(counts)) < len(counts) or counts[-1] < 3:
        raise ValueError(f"length must be at least 30 tokens, got {length}")
    rare = np.resize(words[len(counts) :], size - sum(counts))
    context = rng.permutation(np.concatenate([*(np.repeat(w, c) for w, c in zip(words, counts)), rare]))
    return Example(tuple(context.tolist()), (Question((FREQUENT,), tuple(words[: len(counts)].tolist())),))
