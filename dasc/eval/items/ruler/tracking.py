"""Variable tracking: a value is handed on from variable to variable, and all that hold it are asked for."""

from __future__ import annotations

import string
from collections.abc import Sequence
from random import Random

from dasc.eval.items.ruler.draft import Draft
from dasc.eval.items.ruler.texts import NOISE

HOPS = 4
EXAMPLE_SENTENCES = 20


def variable_tracking(rng: Random) -> Draft:
    """One chain of 4 hops among repeated noise, after a short example; its size is in sentences of noise."""
    names = _names(rng, 2 * (HOPS + 1))
    values = [str(value) for value in rng.sample(range(10_000, 100_000), 2)]
    chains = names[: HOPS + 1], names[HOPS + 1 :]
    places = [sorted(rng.random() for _ in range(HOPS + 1)) for _ in chains]
    example = (
        f"{_text(chains[1], values[1], places[1], EXAMPLE_SENTENCES)}\n"
        f"{_question(values[1])} {', '.join(chains[1])}\n\n"
    )

    def context(size: int) -> str:
        return (
            "In each text below, variables are given values. Follow them from assignment to assignment. First an "
            f"example.\n\n{example}Now the text that counts.\n\n{_text(chains[0], values[0], places[0], size)}\n"
        )

    return Draft(context, _question(values[0]), tuple(chains[0]))


def _text(names: Sequence[str], value: str, places: Sequence[float], size: int) -> str:
    sources = [value, *(f"VAR {name}" for name in names)]
    sentences = [NOISE[i % len(NOISE)] for i in range(size)]
    for name, source, place in reversed(list(zip(names, sources, places))):
        sentences.insert(round(place * size), f"VAR {name} = {source}.")
    return " ".join(sentences)


def _question(value: str) -> str:
    return (
        f"Which variables of the text above have the value {value}?\n"
        f"Answer: The {HOPS + 1} variables with the value {value} are"
    )


def _names(rng: Random, count: int) -> list[str]:
    names: dict[str, None] = {}
    while len(names) < count:
        names["".join(rng.choices(string.ascii_uppercase, k=5))] = None
    return list(names)
