"""The little LaTeX that answers are written in."""

from __future__ import annotations

import re
from collections.abc import Iterator

_BOX = re.compile(r"\\f?box(?:ed)?\s*\{")
_STYLE = re.compile(r"\\(?:text(?:bf|it|rm|tt|sf)?|math(?:rm|bf|it|sf|tt)|mbox|operatorname)\s*\{([^{}]*)\}")
_SPACES = re.compile(r"\\(?:[,;:!> ]|quad\b|qquad\b)|~")
_MARKS = re.compile(r"\\(?:left|right|displaystyle|limits)\b|\$|\\[()\[\]]")


def boxed(text: str) -> Iterator[tuple[int, str]]:
    r"""Where each ``\boxed{..}`` starts and what is in it. One whose braces do not close is none."""
    for match in _BOX.finditer(text):
        depth = 1
        for i in range(match.end(), len(text)):
            if text[i - 1] == "\\":  # \{ and \} are printed braces
                continue
            depth += (text[i] == "{") - (text[i] == "}")
            if depth == 0:
                yield match.start(), text[match.end() : i]
                break


def plain_text(text: str) -> str:
    r"""``text`` without dollar signs, sizes, spaces and styles: ``$\left(\text{B}\right)$`` is ``(B)``."""
    text = _MARKS.sub("", _SPACES.sub(" ", text))
    while (styled := _STYLE.sub(r"\1", text)) != text:
        text = styled
    return text.strip()
