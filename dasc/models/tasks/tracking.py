"""What changes on the way: variables, aliases, parity and the order of cups."""

from __future__ import annotations

from collections.abc import Sequence

from dasc.models.tasks.example import Example, Question, Rng, scatter
from dasc.models.tasks.vocabulary import (
    ALIAS,
    ASK_NOW,
    CUPS,
    EVEN,
    FILLER,
    FLIP,
    KEYS,
    ODD,
    PARITY,
    SET,
    SWAPS,
    VALUES,
    WHERE,
    symbols,
)

_FILLER = (FILLER.start, FILLER.stop)
_MOST_QUESTIONS = 8
_MOST_HOPS = 3
_MOST_CHANGES = 12
_PERMUTATIONS = ((0, 2, 1), (1, 0, 2), (1, 2, 0), (2, 0, 1), (2, 1, 0))
_OF_TWO_CUPS = tuple(swap for swap, images in zip(SWAPS, _PERMUTATIONS) if any(a == b for a, b in enumerate(images)))


def latest_value(rng: Rng, length: int) -> Example:
    """A few variables set again and again; their last values are asked for, on the way, too."""
    names = rng.choice(
        symbols(KEYS, length), size=int(rng.integers(1, max(2, min(8, length // 12) + 1))), replace=False
    ).tolist()
    count = max(length // 8, len(names))
    runs: list[list[int]] = []
    for number, name in enumerate([*names, *rng.choice(names, size=count - len(names)).tolist()]):
        runs.append([SET, name, int(rng.choice(symbols(VALUES, length)))])
        runs.append([ASK_NOW, int(rng.choice(names[: number + 1]))])
    return _told(rng, runs, names, length)


def variable_tracking(rng: Rng, length: int) -> Example:
    """Variables set to a value or, up to three steps from it, to an earlier variable; asked for on the way, too."""
    count = max(min(20, length // 8), 1)
    names = rng.choice(symbols(KEYS, length), size=count, replace=False).tolist()
    hops: dict[int, int] = {}
    runs: list[list[int]] = []
    for name in names:
        sources = [other for other in hops if hops[other] < _MOST_HOPS]
        if sources and rng.random() < 0.6:
            source = int(rng.choice(sources))
            hops[name] = hops[source] + 1
            runs.append([ALIAS, name, source])
        else:
            hops[name] = 0
            runs.append([SET, name, int(rng.choice(symbols(VALUES, length)))])
        runs.append([ASK_NOW, int(rng.choice(list(hops)))])
    return _told(rng, runs, names, length)


def _told(rng: Rng, runs: list[list[int]], names: list[int], length: int) -> Example:
    """Statements and questions about what they made true, with questions about some of all names in the end."""
    asked = rng.permutation(names)[:_MOST_QUESTIONS].tolist()
    context = scatter(rng, runs, length - 2 * len(asked), _FILLER)
    value: dict[int, int] = {}
    probes = []
    for position, token in enumerate(context):
        if token == SET:
            value[context[position + 1]] = context[position + 2]
        elif token == ALIAS:
            value[context[position + 1]] = value[context[position + 2]]
        elif token == ASK_NOW:
            probes.append((position + 1, value[context[position + 1]]))
    questions = tuple(Question((ASK_NOW, name), (value[name],)) for name in asked)
    return Example(tuple(context), questions, tuple(probes))


def parity(rng: Rng, length: int) -> Example:
    """Flips among filler, at most 12: is their number even or odd? Asked on the way, too."""
    most = min(length // 8, _MOST_CHANGES)
    marks = [FLIP] * int(rng.integers(0, most + 1)) + [PARITY] * (most + 1)
    context = scatter(rng, [[mark] for mark in rng.permutation(marks).tolist()], length - 1, _FILLER)
    probes, odd = [], False
    for position, token in enumerate(context):
        odd ^= token == FLIP
        if token == PARITY:
            probes.append((position, ODD if odd else EVEN))
    return Example(tuple(context), (Question((PARITY,), (ODD if odd else EVEN,)),), tuple(probes))


def permutation(rng: Rng, length: int) -> Example:
    """The ball begins in the first cup, and cups are permuted, at most 12 times: where is it? Asked on the way, too."""
    return _permuted(rng, length, SWAPS)


def swapping(rng: Rng, length: int) -> Example:
    """:func:`permutation` with two cups moved at a time, which one reflection of a state can do."""
    return _permuted(rng, length, _OF_TWO_CUPS)


def _permuted(rng: Rng, length: int, permutations: Sequence[int]) -> Example:
    most = min(length // 8, _MOST_CHANGES)
    marks = [*rng.choice(permutations, size=rng.integers(0, most + 1)).tolist(), *[WHERE] * (most + 1)]
    context = scatter(rng, [[mark] for mark in rng.permutation(marks).tolist()], length - 1, _FILLER)
    probes, cup = [], 0
    for position, token in enumerate(context):
        if token in SWAPS:
            cup = _PERMUTATIONS[token - SWAPS.start][cup]
        elif token == WHERE:
            probes.append((position, CUPS[cup]))
    return Example(tuple(context), (Question((WHERE,), (CUPS[cup],)),), tuple(probes))
