"""Questions about one of many documents, or about two that belong together; all of them are about invented things."""

from __future__ import annotations

from itertools import chain, islice
from random import Random
from typing import Literal

from dasc.eval.items.ruler.draft import Draft
from dasc.eval.items.ruler.invented import linked_passages

SENTENCES = 3  # of a passage


def question(rng: Random, hops: Literal[1, 2]) -> Draft:
    """An instance; its size is the number of sentences of other documents.

    With one hop a document says it. With two, a document about a thing names a person, and another one says what is
    asked about that person. The other documents are of the same kinds, and belong together in pairs as well.
    """
    seed = str(rng.getrandbits(64))
    pairs = linked_passages(Random(seed))
    thing, person = next(pairs)
    if hops == 1:
        passage = rng.choice((thing, person))
        asked, answers = rng.choice(passage.questions)
        told = [passage]
    else:
        asked, answers = rng.choice(person.questions)
        asked = asked.replace(person.name, thing.link)
        told = [thing, person]
    places = [rng.random() for _ in told]

    def context(size: int) -> str:
        others = linked_passages(Random(seed))
        next(others)
        needed = -(-size // SENTENCES)
        documents = list(zip(places, (passage.sentences for passage in told)))
        order = Random(seed)
        for i, passage in enumerate(islice(chain.from_iterable(others), needed)):
            documents.append((order.random(), passage.sentences[: size - SENTENCES * i]))
        listed = "\n\n".join(
            f"Document {i}:\n{' '.join(sentences)}" for i, (_, sentences) in enumerate(sorted(documents), start=1)
        )
        return f"Read these documents. A question about them follows.\n\n{listed}\n\n"

    instruction = "Answer the question by the documents above, with nothing but a name."
    return Draft(context, f"{instruction}\nQuestion: {asked}\nAnswer:", answers)
