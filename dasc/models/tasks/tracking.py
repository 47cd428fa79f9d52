"""What changes on the way: variables, aliases, parity and the order of cups."""

from __future__ import annotations

from dasc.models.tasks.example import Example, Question, Rng, scatter
from dasc.models.tasks.vocabulary import (
    ALIAS,
    ASK,
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
)

_FILLER = (FILLER.start, FILLER.stop)
_MOST_QUESTIONS = 8
_MOST_HOPS = 3
_MOST_CHANGES = 12
_PERMUTATIONS = ((0, 2, 1), (1, 0, 2), (1, 2, 0), (2, 0, 1), (2, 1, 0))


def latest_value(rng: Rng, length: int) -> Example:
    """A few variables set again and again; each variable's last value is asked for."""
    names = rng.choice(KEYS, size=int(rng.integers(2, 9)), replace=False).tolist()
    count = int(rng.integers(len(names), max(len(names) + 1, min(40, length // 5))))
    chosen = rng.permutation([*names, *rng.choice(names, size=count - len(names))]).tolist()
    values = rng.integers(VALUES.start, VALUES.stop, size=count).tolist()
    latest = dict(zip(chosen, values))
    context = scatter(rng, [[SET, n, v] for n, v in zip(chosen, values)], length - 2 * len(names), _FILLER)
    return Example(tuple(context), tuple(Question((ASK, n), (latest[n],)) for n in rng.permutation(names).tolist()))


def variable_tracking(rng: Rng, length: int) -> Example:
    """Variables set to a value or, up to three steps from it, to an earlier variable; variables are asked for."""
    count = int(rng.integers(2, max(3, min(20, length // 7))))
    names = rng.choice(KEYS, size=count, replace=False).tolist()
    value: dict[int, int] = {}
    hops: dict[int, int] = {}
    runs = []
    for name in names:
        sources = [other for other in value if hops[other] < _MOST_HOPS]
        if sources and rng.random() < 0.6:
            source = int(rng.choice(sources))
            value[name], hops[name] = value[source], hops[source] + 1
            runs.append([ALIAS, name, source])
        else:
            value[name], hops[name] = int(rng.integers(VALUES.start, VALUES.stop)), 0
            runs.append([SET, name, value[name]])
    asked = rng.permutation(names)[:_MOST_QUESTIONS].tolist()
    context = scatter(rng, runs, length - 2 * len(asked), _FILLER)
    return Example(tuple(context), tuple(Question((ASK, n), (value[n],)) for n in asked))


def parity(rng: Rng, length: int) -> Example:
    """Flips among filler, at most 12: is their number even or odd? Asked on the way, too."""
    flips = int(rng.integers(0, _MOST_CHANGES + 1))
    marks = [FLIP] * flips + [PARITY] * (flips + 2)
    context = scatter(rng, [[mark] for mark in rng.permutation(marks).tolist()], length - 1, _FILLER)
    probes, odd = [], False
    for position, token in enumerate(context):
        odd ^= token == FLIP
        if token == PARITY:
            probes.append((position, ODD if odd else EVEN))
    return Example(tuple(context), (Question((PARITY,), (ODD if odd else EVEN,)),), tuple(probes))


def permutation(rng: Rng, length: int) -> Example:
    """The ball begins in the first cup, and cups are permuted, at most 12 times: where is it? Asked on the way, too."""
    changes = int(rng.integers(0, _MOST_CHANGES + 1))
    marks = [*rng.choice(SWAPS, size=changes).tolist(), *[WHERE] * (changes + 2)]
    context = scatter(rng, [[mark] for mark in rng.permutation(marks).tolist()], length - 1, _FILLER)
    probes, cup = [], 0
    for position, token in enumerate(context):
        if token in SWAPS:
            cup = _PERMUTATIONS[token - SWAPS.start][cup]
        elif token == WHERE:
            probes.append((position, CUPS[cup]))
    return Example(tuple(context), (Question((WHERE,), (CUPS[cup],)),), tuple(probes))
