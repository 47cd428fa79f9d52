"""How answers are scored: each scorer takes an item, one of its asks and what a model said, and gives 0 to 1."""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Callable

from dasc.eval.items.choice import chosen_letter
from dasc.eval.items.final_answer import same_answer, same_expression, stated_answer
from dasc.eval.items.item import Ask, Item, Text

Scorer = Callable[[Item, Ask, Text], float]

_ARTICLES = re.compile(r"\b(?:a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


def exact(item: Item, ask: Ask, answer: Text) -> float:
    """1 if the answer is a reference.

    Text is compared without regard to case and to the amount of white space. Of token ids the first count, as many as
    the reference has: a small model does not know where to stop.
    """
    for reference in ask.references:
        if isinstance(reference, str):
            if _folded(_text(item, answer)) == _folded(reference):
                return 1.0
        elif isinstance(answer, str):
            raise ValueError(f"answer to item {item.item_id!r} must be token ids, as its references are, got text")
        elif tuple(answer[: len(reference)]) == reference:
            return 1.0
    return 0.0


def string_match_all(item: Item, ask: Ask, answer: Text) -> float:
    """Share of the references that the answer contains, without regard to case (RULER)."""
    said = _text(item, answer).lower()
    references = _references(item, ask)
    return sum(reference.lower() in said for reference in references) / len(references)


def string_match_part(item: Item, ask: Ask, answer: Text) -> float:
    """1 if the answer contains a reference, without regard to case (RULER's question answering)."""
    said = _text(item, answer).lower()
    return float(any(reference.lower() in said for reference in _references(item, ask)))


def token_f1(item: Item, ask: Ask, answer: Text) -> float:
    """F1 of words, the best over the references: ordinary token F1, the same for every question (appendix C.2).

    Words are in lower case, without punctuation and articles, as SQuAD has it.
    """
    said = _words(_text(item, answer))
    return max(_f1(said, _words(reference)) for reference in _references(item, ask))


def choice(item: Item, ask: Ask, answer: Text) -> float:
    """1 if the letter that the answer settles on is a reference; see :func:`dasc.eval.items.choice.chosen_letter`."""
    if not item.choices:
        raise ValueError(f"choices of item {item.item_id!r} must name the letters, got none")
    return float(chosen_letter(_text(item, answer), item.choices) in _references(item, ask))


def final_answer(item: Item, ask: Ask, answer: Text) -> float:
    """1 if the stated result is a reference: equal as an exact number, or letter by letter once normalised."""
    said = stated_answer(_text(item, answer))
    return float(said is not None and any(same_answer(said, reference) for reference in _references(item, ask)))


def expression(item: Item, ask: Ask, answer: Text) -> float:
    """As ``final_answer``, and 1 also for an expression that math-verify finds equal to a reference.

    Raises:
        ImportError: without math-verify.
        ValueError: outside the main thread, where its clock does not work.
    """
    said = stated_answer(_text(item, answer))
    return float(said is not None and any(same_expression(said, reference) for reference in _references(item, ask)))


SCORERS: dict[str, Scorer] = {
    scorer.__name__: scorer
    for scorer in (exact, string_match_all, string_match_part, token_f1, choice, final_answer, expression)
}
"""Every scorer, by name; each gives 0 to 1, and raises ``ValueError`` for token ids where it takes text."""


def _text(item: Item, answer: Text) -> str:
    if not isinstance(answer, str):
        raise ValueError(f"answer to item {item.item_id!r} must be text for scorer {item.scorer!r}, got token ids")
    return answer


def _references(item: Item, ask: Ask) -> list[str]:
    texts = [reference for reference in ask.references if isinstance(reference, str)]
    if len(texts) < len(ask.references):
        raise ValueError(f"references of item {item.item_id!r} must be text for scorer {item.scorer!r}, got token ids")
    return texts


def _folded(text: str) -> str:
    return " ".join(text.casefold().split())


def _words(text: str) -> list[str]:
    return _ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split()


def _f1(said: list[str], reference: list[str]) -> float:
    if not said or not reference:
        return float(said == reference)
    common = sum((Counter(said) & Counter(reference)).values())
    return 2 * common / (len(said) + len(reference))
