"""Prefixes from a file of conversations in the form of ShareGPT, chosen as appendix A.2 says."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from dasc.eval.horizons.prefixes import Prefix

TARGETS = (16_384, 8_192, 4_096, 1_024)
"""Target lengths of appendix A.2, tokens."""
CANDIDATES = 500
CHARACTERS_PER_TOKEN = 3.5

_USER = ("human", "user")
_ASSISTANT = ("gpt", "chatgpt", "assistant", "bing", "bard")


def select_prefixes(
    texts: Sequence[str],
    encode: Callable[[str], list[int]],
    targets: Sequence[int] = TARGETS,
    per_target: int = 8,
) -> list[Prefix]:
    """Choose prefixes of several lengths, without chance (appendix A.2).

    Targets are filled from the longest to the shortest, and a conversation serves once. Of those left with at least
    3.5 characters for each token of the target ``T``, the first 500 are encoded. Taken are the shortest of at least
    ``T`` tokens; if there are not enough of these, the longest there are. What is longer than ``T`` loses its
    beginning. Conversations of equally many tokens are ordered as in the file.

    Args:
        texts: the conversations in the order of the file.
        encode: turns a text into token ids.
        targets: tokens, in any order.
        per_target: prefixes of each target.

    Returns:
        By descending target and then by ascending length; fewer than wanted when conversations run out.

    Raises:
        ValueError: for no or wrong targets, or when no conversation is long enough for any.
    """
    if not targets or min(targets) < 1 or per_target < 1:
        raise ValueError(f"targets and per_target must be >= 1, got {list(targets)} and {per_target}")
    selected: list[Prefix] = []
    for target in sorted(targets, reverse=True):
        taken = {prefix.source for prefix in selected}
        long_enough = (
            index
            for index, text in enumerate(texts)
            if index not in taken and len(text) >= CHARACTERS_PER_TOKEN * target
        )
        candidates = [(index, encode(texts[index])) for index, _ in zip(long_enough, range(CANDIDATES))]
        candidates.sort(key=lambda candidate: len(candidate[1]))
        qualified = [candidate for candidate in candidates if len(candidate[1]) >= target][:per_target]
        chosen = qualified if len(qualified) == per_target else candidates[-per_target:]
        selected += [Prefix(index, target, tuple(ids[-target:]), len(ids)) for index, ids in chosen]
    if not selected:
        least = CHARACTERS_PER_TOKEN * min(targets)
        raise ValueError(f"no conversation has the {least:.0f} characters that {min(targets)} tokens need")
    return selected


def read_sharegpt(path: Path) -> list[str]:
    """The conversations of a JSON array ``[{"conversations": [{"from", "value"}, ..]}, ..]`` as texts.

    A conversation's turns become blocks, ``User: ..`` and ``Assistant: ..``, with an empty line between them. Turns of
    others, such as ``system``, are left out.

    Raises:
        ValueError: naming the file and, for a conversation of another form, its index.
        OSError: when the file cannot be read.
    """
    try:
        values = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: expected a JSON array, got broken JSON ({error})") from error
    if not isinstance(values, list) or not values:
        raise ValueError(f"{path}: expected a JSON array of conversations, got {type(values).__name__} {values!r:.40}")
    texts = []
    form = '{"conversations": [{"from", "value"}, ..]}'
    for index, value in enumerate(values):
        try:
            texts.append(_serialise(value["conversations"]))
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{path}: conversation {index} must be {form}, got {value!r:.80}") from error
    return texts


def _serialise(turns: list[dict[str, Any]]) -> str:
    speakers = dict.fromkeys(_USER, "User") | dict.fromkeys(_ASSISTANT, "Assistant")
    spoken = [(speakers[turn["from"]], turn["value"].strip()) for turn in turns if turn["from"] in speakers]
    return "\n\n".join(f"{speaker}: {text}" for speaker, text in spoken)
