"""The final answer of a problem in mathematics, and when two of them are the same."""

from __future__ import annotations

import re
import threading
from fractions import Fraction

from dasc.eval.items.latex import boxed, plain_text

_STATED = re.compile(r"\banswer\s*(?:is|:|=)[\s*_:]*", re.IGNORECASE)
_END = re.compile(r"\n|[.!?](?:\s|$)")
_INTEGER = r"\d+|\d{1,3}(?:,\d{3})+"
_NUMBER = re.compile(rf"(?P<sign>[+-]?)(?:(?P<number>(?:{_INTEGER})(?:\.\d+)?|\.\d+)|(?P<fraction>.+))")
_SLASH = re.compile(r"(\d+)/(\d+)")
_FRAC = re.compile(r"\\frac(?:\{(\d+)\}|(\d))(?:\{(\d+)\}|(\d))")

LONGEST = 1000
"""Characters of an answer; more is running text, and Python refuses to read numbers of some thousand digits."""

_NAMED = re.compile(r"[A-Za-z]\w*=(?=[^=])")


def stated_answer(answer: str) -> str | None:
    r"""What ``answer`` gives as its result, or ``None``.

    This is the last ``\boxed{..}``; without one, what follows the last ``answer is`` or ``answer:`` in its sentence;
    without either, the whole of an answer of one line. More than 1000 characters are none. No number is ever picked
    out of running text.
    """
    boxes, statements = boxed(answer), list(_STATED.finditer(answer))
    if boxes:
        stated = boxes[-1][1].strip()
    elif statements:
        stated = _END.split(answer[statements[-1].end() :], maxsplit=1)[0].strip(" *_")
    else:
        stated = answer.strip()
        if "\n" in stated:
            return None
    return stated if 0 < len(stated) <= LONGEST else None


def normalise(answer: str) -> str:
    r"""One way of writing for many: no dollar signs, styles, spaces, ``\dfrac``, final full stop or ``x =``."""
    text = plain_text(answer).replace("\\dfrac", "\\frac").replace("\\tfrac", "\\frac").replace("−", "-")
    text = re.sub(r"\s+", "", text).rstrip(".")
    text = re.sub(r"\^\{?\\circ\}?$", "", text)
    return _NAMED.sub("", text, count=1) if _NAMED.match(text) else text


def number(text: str) -> Fraction | None:
    r"""The exact value of ``12``, ``-1,234.5``, ``3/4`` or ``\frac{3}{4}``; ``None`` otherwise."""
    match = _NUMBER.fullmatch(text) if len(text) <= LONGEST else None
    if match is None:
        return None
    sign = -1 if match["sign"] == "-" else 1
    if match["number"]:
        return sign * Fraction(match["number"].replace(",", ""))
    fraction = _SLASH.fullmatch(match["fraction"]) or _FRAC.fullmatch(match["fraction"])
    if fraction is None:
        return None
    top, bottom = (int(part) for part in fraction.groups() if part is not None)
    return sign * Fraction(top, bottom) if bottom else None


def same_answer(given: str, reference: str) -> bool:
    """Equal as exact numbers if both are numbers, else letter by letter once normalised. 0.333 is not 1/3."""
    given, reference = normalise(given), normalise(reference)
    values = number(given), number(reference)
    if None not in values:
        return values[0] == values[1]
    return given == reference


def same_expression(given: str, reference: str) -> bool:
    """As :func:`same_answer`, and also when math-verify finds the two expressions equal.

    It rounds decimals to six places, and takes five seconds at most; its clock works in the main thread only.

    Raises:
        ImportError: without math-verify.
        ValueError: when called from another thread.
    """
    check_math_verify()
    from math_verify import LatexExtractionConfig, parse, verify

    if threading.current_thread() is not threading.main_thread():
        raise ValueError("expressions must be compared in the main thread: math-verify's clock works in no other")
    if same_answer(given, reference):
        return True
    config = (LatexExtractionConfig(),)
    parsed = [
        parse(f"${plain_text(text)}$", extraction_config=config, fallback_mode="no_fallback")
        for text in (reference, given)
    ]
    return bool(all(parsed) and verify(*parsed))


def check_math_verify() -> None:
    """Raise ``ImportError``, saying what to install, when math-verify is not there."""
    try:
        import math_verify  # noqa: F401
    except ImportError as error:
        raise ImportError(
            "items of kind 'expression' are compared by math-verify: pip install 'dasc[math]'; "
            "kind 'final_answer' needs no package, and takes numbers and equal text only"
        ) from error
