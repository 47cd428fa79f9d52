"""Token ids of the trained models: bytes and chat roles first, then the symbols of the tasks."""

from __future__ import annotations

BYTES = range(256)
"""UTF-8 bytes of text. The four ids after them are the heads of chat messages, by role, and a message's end."""

TEXT_IDS = 260

(
    ASK,  # the value of a key, told once
    ASK_NEXT,  # the values of a key, in the order told
    SET,  # key, value follow
    ALIAS,  # key, earlier key follow
    COMMON,  # the words that came often
    FREQUENT,  # the most frequent words
    FLIP,  # changes the parity
    PARITY,  # is it even or odd?
    EVEN,
    ODD,
    BEGIN,  # of what is to be copied
    REPEAT,
    WHERE,  # is the ball, in which cup?
    RECALL,  # text that stood before
) = range(TEXT_IDS, TEXT_IDS + 14)

SWAPS = range(274, 279)
"""The permutations of three cups but the identity."""

CUPS = range(279, 282)

ASK_NOW = 282  # the value of a key that may have changed

KEYS = range(288, 352)
VALUES = range(352, 416)
FILLER = range(416, 448)

VOCABULARY = 448

_FEWEST_SYMBOLS = 8


def symbols(ids: range, length: int) -> range:
    """The first ``length // 2`` of ``ids``, but at least 8: short sequences are about few symbols, to begin with."""
    return ids[: max(length // 2, _FEWEST_SYMBOLS)]
