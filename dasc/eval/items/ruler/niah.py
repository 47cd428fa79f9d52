"""Needles in a haystack: values of keys are told somewhere in a long text, and asked for at its end."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, islice
from random import Random
from typing import Literal
from uuid import UUID

from dasc.eval.items.ruler.draft import Draft
from dasc.eval.items.ruler.texts import NOISE, essay, word_pair

Kind = Literal["word", "number", "uuid"]


@dataclass(frozen=True)
class Needles:
    """A subtask of RULER.

    Attributes:
        haystack: repeated noise, essays, or needles like the one asked for.
        keys: kind of the keys, ``word`` is a pair of words.
        values: kind of the values, ``number`` has 7 digits.
        others: needles in the haystack whose keys are not asked for.
        values_per_key: told, and asked for.
        queries: keys asked for.
    """

    haystack: Literal["noise", "essay", "needles"]
    keys: Kind = "word"
    values: Kind = "number"
    others: int = 0
    values_per_key: int = 1
    queries: int = 1


def needles(rng: Random, task: Needles, depth: float | None = None) -> Draft:
    """An instance; its size is in words of essays, sentences of noise, or needles.

    Args:
        rng: to draw from.
        task: which subtask.
        depth: where in the haystack every needle is, 0 the beginning and 1 the end; random places when ``None``.
    """
    keys = list(islice(_different(rng, task.keys), task.queries + task.others))
    values = _different(rng, task.values)
    told = [(key, next(values)) for key in keys for _ in range(task.values_per_key)]
    asked = keys[: task.queries]
    places = [rng.random() if depth is None else depth for _ in told]
    seed = str(rng.getrandbits(64))
    haystack = _haystack(task, seed, taken={*keys, *(value for _, value in told)})
    lines = [_needle(task, key, value) for key, value in told]

    def context(size: int) -> str:
        separator = "\n" if task.haystack == "needles" else " "
        text = separator.join(_inserted(haystack(size), lines, places))
        return (
            f"Somewhere in the text below, {_plural(task)} are told. Remember them: you will be asked for them at the "
            f"end.\n\n{text}\n"
        )

    names = _listed(asked)
    one = task.queries * task.values_per_key == 1
    noun = f"secret {task.values}" if one else f"secret {task.values}s"
    are = "is" if one else "are"
    which = f"What {are} the {noun} of {names}" if one else f"What are all the {noun} of {names}"
    question = f"{which} that the text above tells?\nAnswer: The {noun} of {names} {are}"
    return Draft(context, question, tuple(value for key, value in told if key in asked))


def _haystack(task: Needles, seed: str, taken: set[str]) -> Callable[[int], Sequence[str]]:
    if task.haystack == "noise":
        return lambda size: [NOISE[i % len(NOISE)] for i in range(size)]
    if task.haystack == "essay":
        return lambda size: essay(seed, size)

    def more_needles(size: int) -> list[str]:
        rng = Random(seed)
        keys, values = _different(rng, task.keys, taken), _different(rng, task.values, taken)
        return [_needle(task, next(keys), next(values)) for _ in range(size)]

    return more_needles


def _needle(task: Needles, key: str, value: str) -> str:
    return f"The secret {task.values} of {key} is: {value}."


def _plural(task: Needles) -> str:
    return f"secret {task.values}s of {'pairs of words' if task.keys == 'word' else f'{task.keys}s'}"


def _listed(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def _inserted(haystack: Sequence[str], lines: Sequence[str], places: Sequence[float]) -> list[str]:
    """``lines`` between the sentences of ``haystack``, as near to their places, shares of its length, as can be."""
    letters = list(accumulate(map(len, haystack), initial=0))
    text = list(haystack)
    for place, line in sorted(zip(places, lines), reverse=True):
        wanted = place * letters[-1]
        text.insert(min(range(len(letters)), key=lambda i: abs(letters[i] - wanted)), line)
    return text


def _different(rng: Random, kind: Kind, taken: set[str] | None = None) -> Iterator[str]:
    """Random keys or values, none twice and none of ``taken``."""
    seen = set(taken or ())
    while True:
        drawn = _one(rng, kind)
        if drawn not in seen:
            seen.add(drawn)
            yield drawn


def _one(rng: Random, kind: Kind) -> str:
    if kind == "word":
        return word_pair(rng)
    if kind == "number":
        return str(rng.randrange(10**6, 10**7))
    return str(UUID(int=rng.getrandbits(128), version=4))
