"""The 13 subtasks of RULER (arXiv 2404.06654), with instances of our own making, fitted to a number of tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from random import Random

from dasc.eval.items.families import default_replays
from dasc.eval.items.item import Ask, Item
from dasc.eval.items.ruler.aggregation import common_words, frequent_words
from dasc.eval.items.ruler.draft import CountTokens, Draft, fitted
from dasc.eval.items.ruler.niah import Needles, needles
from dasc.eval.items.ruler.questions import question
from dasc.eval.items.ruler.tracking import variable_tracking


@dataclass(frozen=True)
class Subtask:
    """How an instance is drawn, how many tokens its answer may take, and how it is scored."""

    draw: Callable[[Random], Draft]
    max_new_tokens: int
    scorer: str


NEEDLES = {
    "niah_single_1": Needles("noise"),
    "niah_single_2": Needles("essay"),
    "niah_single_3": Needles("essay", values="uuid"),
    "niah_multikey_1": Needles("essay", others=3),
    "niah_multikey_2": Needles("needles"),
    "niah_multikey_3": Needles("needles", keys="uuid", values="uuid"),
    "niah_multivalue": Needles("essay", values_per_key=4),
    "niah_multiquery": Needles("essay", queries=4),
}

SUBTASKS: dict[str, Subtask] = {
    **{name: Subtask(partial(needles, task=task), 128, "string_match_all") for name, task in NEEDLES.items()},
    "vt": Subtask(variable_tracking, 30, "string_match_all"),
    "cwe": Subtask(common_words, 120, "string_match_all"),
    "fwe": Subtask(frequent_words, 50, "string_match_all"),
    "qa_1": Subtask(partial(question, hops=1), 32, "string_match_part"),
    "qa_2": Subtask(partial(question, hops=2), 32, "string_match_part"),
}
"""By the names that RULER gives them."""

SINGLE_NEEDLE = ("niah_single_1", "niah_single_2", "niah_single_3")


def ruler_items(
    length: int,
    count: int = 30,
    *,
    count_tokens: CountTokens,
    subtasks: Sequence[str] = tuple(SUBTASKS),
    seed: int = 0,
    depth: float | None = None,
) -> list[Item]:
    """``count`` instances of each subtask, the same ones on every machine.

    What is warmed is the prompt without its question. The task of an item is ``ruler/<length>/<subtask>``, with a depth
    ``ruler/<length>/<subtask>/depth-<percent>``. Instances at different depths are alike but for the place.

    Args:
        length: tokens of a prompt and of the longest answer together, never more and a few percent less at most.
        count: instances of each subtask.
        count_tokens: how many tokens a text has.
        subtasks: of :data:`SUBTASKS`.
        seed: of the draw.
        depth: where the needle is, 0 the beginning and 1 the end; for subtasks with a single needle only.

    Raises:
        ValueError: for an unknown subtask, one without a depth, or a length that is too short for one.
    """
    if count < 1:
        raise ValueError(f"count must be >= 1, got {count}")
    if depth is not None and not 0 <= depth <= 1:
        raise ValueError(f"depth must be from 0 to 1, got {depth}")
    for name in subtasks:
        if name not in SUBTASKS:
            raise ValueError(f"subtasks must be of {', '.join(SUBTASKS)}, got {name!r}")
        if depth is not None and name not in SINGLE_NEEDLE:
            raise ValueError(f"depth is for {', '.join(SINGLE_NEEDLE)}, not for {name!r}")
    return [
        _item(name, length, f"{name}-{length}-{seed}-{i}", count_tokens, depth)
        for name in subtasks
        for i in range(count)
    ]


def _item(name: str, length: int, seed: str, count_tokens: CountTokens, depth: float | None) -> Item:
    subtask = SUBTASKS[name]
    rng = Random(f"ruler-{seed}")
    task = f"ruler/{length}/{name}"
    if depth is None:
        draft = subtask.draw(rng)
    else:
        draft = needles(rng, NEEDLES[name], depth)
        task += f"/depth-{100 * depth:g}"
    try:
        warm = fitted(draft, count_tokens, length - subtask.max_new_tokens)
    except ValueError as error:
        answer = subtask.max_new_tokens
        raise ValueError(
            f"length {length} is too short for {name} and an answer of {answer} tokens: {error}"
        ) from error
    ask = Ask(warm + draft.question, draft.references)
    return Item(seed, task, warm, (ask,), subtask.scorer, subtask.max_new_tokens, replays=default_replays(task))
