"""The letter of a multiple-choice answer."""

from __future__ import annotations

import re
from collections.abc import Sequence
from operator import itemgetter

from dasc.eval.items.latex import boxed, plain_text

# What may follow a bare letter: the end of the statement, or a reason. "The answer is a matter of taste" has no letter.
_ENDS = r"(?=\s*(?:$|\n|[.,;:!?)\]}*_$\"|/&]|(?:because|since|as|and|but|with|which|or)\b))(?!['’])"
_LETTER = rf"(?:[(\[]\s*(?P<bracketed>[A-Z])\s*[)\]]|(?P<bare>[A-Z])\b{_ENDS})"
_SAYS = r"(?:is|would\ be|must\ be|should\ be|:|=)"
_STATEMENT = re.compile(
    rf"""\b(?:answer|(?:correct|right|best)\ (?:answer|option|choice))(?:\ (?:option|choice|letter))?
    [\s*_]*{_SAYS}[\s*_:$"]*(?:(?:option|choice|letter)\b[\s*_$]*)?{_LETTER}""",
    re.IGNORECASE | re.VERBOSE,
)
_ANOTHER = re.compile(
    r"""[)\]*_\s]*
    (?: (?:,?\s*\bor\b(?:\s+(?:maybe|perhaps|possibly)\b)?|/|&|,)\s*[*_]*
        (?:[(\[]\s*[A-Z]\s*[)\]]|[A-Z](?=\s*(?:$|[,.;/&)\n]|or\b)))
      | ,?\s*\band\s+[*_]*[(\[]?[A-Z][)\]]?(?=[*_]*\s*(?:$|[,.;)\n]))
    )""",
    re.IGNORECASE | re.VERBOSE,
)
"""What makes two letters of one: "or C", "/C", ", C." and "and C." but not "and C is wrong"."""
_BOX = re.compile(r"\(?([A-Z])(?:\)?$|\)|[.:]\s)", re.I)
LONGEST_BOX = 200
"""Characters; a letter comes first."""

_LONE = re.compile(r"[\s*_$(\[\"]*([A-Z])[\s*_$)\]\".]*", re.I)
_LONE_WITH_TEXT = re.compile(r"(?:\(([A-Z])\)|([A-Z])[).:])\s+\S.*")


def chosen_letter(answer: str, choices: Sequence[str]) -> str | None:
    r"""The letter that ``answer`` settles on, or ``None``.

    A statement is ``the answer is (B)``, ``Answer: B``, ``the correct option is B`` or ``\boxed{B}``; of several the
    last counts. One that names two letters (``B or C``) settles on none. An answer without a statement is read as a
    letter if it, or its last line, is nothing but a letter, or if it is one line that begins like ``B) ..``. No letter
    is ever picked out of running text.

    Args:
        answer: what a model said.
        choices: letters of the question, upper case.
    """
    found: list[tuple[int, str | None]] = []
    for match in _STATEMENT.finditer(answer):
        hedged = _ANOTHER.match(answer, match.end())
        found.append((match.start(), None if hedged else (match["bracketed"] or match["bare"]).upper()))
    for start, content in boxed(answer):
        content = plain_text(content[:LONGEST_BOX])
        if match_box := _BOX.match(content):
            found.append((start, None if _ANOTHER.match(content, match_box.end()) else match_box[1].upper()))
    letter = max(found, key=itemgetter(0))[1] if found else _lone_letter(answer.strip())
    return letter if letter in choices else None


def _lone_letter(answer: str) -> str | None:
    lines = answer.splitlines()
    if not lines:
        return None
    if match := _LONE.fullmatch(lines[-1]):
        return match[1].upper()
    if len(lines) == 1 and (match := _LONE_WITH_TEXT.fullmatch(answer)):
        return match[1] or match[2]
    return None
