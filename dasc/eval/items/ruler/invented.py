"""Passages about people, places and things that do not exist, so that no model knows the answers by heart."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from random import Random

from dasc.eval.items.ruler.texts import words

CONSONANTS, VOWELS, LAST = "bdfgklmnprstvz", "aeiou", "klmnrst"


@dataclass(frozen=True)
class Kind:
    """What passages of one kind say.

    Attributes:
        sentences: with fields; ``{name}`` is what the passage is about, ``{person}`` somebody it names.
        questions: ``(question, field that answers it)``.
        link: words for ``{person}`` that name only ``{name}``, for questions that need both passages.
    """

    sentences: tuple[str, ...]
    questions: tuple[tuple[str, str], ...]
    link: str = ""


THINGS = (
    Kind(
        (
            "The {name} Observatory was founded by {person} on a hill above the river {river}.",
            "Its largest telescope, with a mirror of {number} centimetres, was ground in {town}.",
            "On clear nights it is open to anyone who brings {article} {noun}.",
        ),
        (
            ("Who founded the {name} Observatory?", "person"),
            ("Above which river does the {name} Observatory stand?", "river"),
            ("In which town was the largest telescope of the {name} Observatory ground?", "town"),
        ),
        "the founder of the {name} Observatory",
    ),
    Kind(
        (
            "The sailing ship {name} was built in the yards of {town} and measured {number} feet.",
            "Her first captain was {person}, who painted {article} {noun} on the main sail.",
            "She was lost one winter in the Strait of {river}.",
        ),
        (
            ("In which town was the ship {name} built?", "town"),
            ("Who was the first captain of the ship {name}?", "person"),
            ("In which strait was the ship {name} lost?", "river"),
        ),
        "the first captain of the ship {name}",
    ),
    Kind(
        (
            "Mount {name} rises {number} metres above the valley of the {river}.",
            "{person} was the first to reach its summit, and left {article} {noun} there.",
            "The usual way up begins behind the church of {town}.",
        ),
        (
            ("Who was the first to reach the summit of Mount {name}?", "person"),
            ("In which town does the usual way up Mount {name} begin?", "town"),
            ("Above the valley of which river does Mount {name} rise?", "river"),
        ),
        "the first person on the summit of Mount {name}",
    ),
    Kind(
        (
            "The opera {name} was written by {person} in {number} days.",
            "It was first sung in {town}, where {article} {noun} fell onto the stage during the second act.",
            "Its heroine is drowned in the river {river}.",
        ),
        (
            ("Who wrote the opera {name}?", "person"),
            ("In which town was the opera {name} first sung?", "town"),
            ("In which river is the heroine of the opera {name} drowned?", "river"),
        ),
        "the composer of the opera {name}",
    ),
    Kind(
        (
            "The {name} bridge carries the road from {town} across the river {river}.",
            "It was designed by {person} and rests on {number} stone piers.",
            "By an old custom, nobody may cross it with {article} {noun}.",
        ),
        (
            ("Who designed the {name} bridge?", "person"),
            ("Which river does the {name} bridge cross?", "river"),
            ("From which town does the road over the {name} bridge come?", "town"),
        ),
        "the designer of the {name} bridge",
    ),
    Kind(
        (
            "The {name} school of weaving was opened in {town} by {person}.",
            "For {number} years its pupils wove nothing but blankets with {article} {noun} in the middle.",
            "Its dyes came down the river {river} on barges.",
        ),
        (
            ("Who opened the {name} school of weaving?", "person"),
            ("In which town was the {name} school of weaving opened?", "town"),
            ("Down which river did the dyes of the {name} school of weaving come?", "river"),
        ),
        "the person who opened the {name} school of weaving",
    ),
)

PEOPLE = (
    Kind(
        (
            "{name} was born in {town} as the youngest of {number} children.",
            "A first lesson in arithmetic came from {person}, a neighbour.",
            "Later years were spent by the river {river}, in a house with {article} {noun} over the door.",
        ),
        (
            ("In which town was {name} born?", "town"),
            ("Who gave {name} a first lesson in arithmetic?", "person"),
            ("By which river did {name} spend later years?", "river"),
        ),
    ),
    Kind(
        (
            "The birthplace of {name} is {town}, where {article} {noun} still keeps the memory.",
            "At the age of {number} came an apprenticeship with {person}.",
            "A fear of deep water began with an accident on the river {river}.",
        ),
        (
            ("Which town is the birthplace of {name}?", "town"),
            ("With whom did {name} serve an apprenticeship?", "person"),
            ("On which river did {name} have an accident?", "river"),
        ),
    ),
)


@dataclass(frozen=True)
class Passage:
    """Sentences about ``name`` and questions with right answers; ``link`` is another way to name its person."""

    name: str
    sentences: tuple[str, ...]
    questions: tuple[tuple[str, tuple[str, ...]], ...]
    link: str = ""


def linked_passages(rng: Random) -> Iterator[tuple[Passage, Passage]]:
    """A passage about a thing and one about the person that it names, without end; no name comes twice."""
    names = invented_names(rng)
    while True:
        person = _person(names)
        thing = _passage(rng, rng.choice(THINGS), next(names), person, names)
        yield thing, _passage(rng, rng.choice(PEOPLE), person, _person(names), names)


def _passage(rng: Random, kind: Kind, name: str, person: str, names: Iterator[str]) -> Passage:
    noun = rng.choice(words("nouns"))
    fields = {
        "name": name,
        "person": person,
        "town": next(names),
        "river": next(names),
        "number": str(rng.randrange(3, 90)),
        "article": "an" if noun[0] in "aeiou" else "a",
        "noun": noun,
    }
    return Passage(
        name,
        tuple(sentence.format(**fields) for sentence in kind.sentences),
        tuple((question.format(**fields), _answers(fields[field])) for question, field in kind.questions),
        kind.link.format(**fields),
    )


def _answers(name: str) -> tuple[str, ...]:
    """A whole name, or of a person the last part of it."""
    return tuple(dict.fromkeys((name, name.split(" ")[-1])))


def _person(names: Iterator[str]) -> str:
    first, last = next(names), next(names)
    return f"{first[:3]} {last}"


def invented_names(rng: Random) -> Iterator[str]:
    """Names of seven letters, so that none is part of another, none twice."""
    seen: set[str] = set()
    while True:
        syllables = [rng.choice(CONSONANTS) + rng.choice(VOWELS) for _ in range(3)]
        name = ("".join(syllables) + rng.choice(LAST)).capitalize()
        if name not in seen:
            seen.add(name)
            yield name
