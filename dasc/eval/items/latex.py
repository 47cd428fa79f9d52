"""The little LaTeX that answers are written in."""

from __future__ import annotations

import re

_BOX = re.compile(r"\\f?box(?:ed)?\s*\{")
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)  # \{ and \} are printed
_STYLE = re.compile(r"\\(?:text(?:bf|it|rm|tt|sf)?|math(?:rm|bf|it|sf|tt)|mbox|operatorname)\s*\{([^{}]*)\}")
_SPACES = re.compile(r"\\(?:[,;:!> ]|quad\b|qquad\b)|~")
_MARKS = re.compile(r"\\(?:left|right|displaystyle|limits)\b|\$|\\[()\[\]]")


def boxed(text: str) -> list[tuple[int, str]]:
    r"""Where each ``\boxed{..}`` starts and what is in it, in order.

    One whose braces do not close is none, and of one in another only the inner one is. Takes time in proportion to the
    text: a model may say the same over and over.
    """
    openings = {match.end() - 1: match.start() for match in _BOX.finditer(text)}
    open_braces: list[int] = []
    found: list[tuple[int, str]] = []
    for match in _BRACE.finditer(text):
        if match[0] == "{":
            open_braces.append(match.start())
        elif match[0] == "}" and open_braces:
            brace = open_braces.pop()
            if brace in openings and not (found and found[-1][0] > openings[brace]):
                found.append((openings[brace], text[brace + 1 : match.start()]))
    return found


def plain_text(text: str) -> str:
    r"""``text`` without dollar signs, sizes, spaces and styles: ``$\left(\text{B}\right)$`` is ``(B)``."""
    text = _MARKS.sub("", _SPACES.sub(" ", text))
    while (styled := _STYLE.sub(r"\1", text)) != text:
        text = styled
    return text.strip()
