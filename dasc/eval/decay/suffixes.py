"""Questions after a hit and some new tokens, and what it costs to refresh the hit or not."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from dasc.eval.states import Answers, Prefixes, advance, ask, refresh, retain
from dasc.models.hybrid import HybridModel
from dasc.models.tasks import Example

WAYS = ("nr", "wr", "rest")
"""Zero-fill; refresh the window; refresh what the new tokens leave of the window."""


def ask_after(
    model: HybridModel,
    mask: Tensor,
    window_tokens: int,
    examples: Sequence[Example],
    suffixes: Sequence[int],
    most_questions: int,
) -> dict[str, Any]:
    """Cut each context some tokens before its end, hit there in several ways, compute the rest anew, and ask.

    Args:
        model: is asked.
        mask: ``[L, U]`` bool, stored units.
        window_tokens: of a refresh, before the cap by the prefix.
        examples: with contexts longer than all suffixes.
        suffixes: new tokens before the question, not negative, each once.
        most_questions: of an example.

    Returns:
        Plain JSON values: for each question ``owner`` (number of the example) and ``prompt`` (its tokens); ``dense``
        and for each suffix, ``str(suffix)``, each of :data:`WAYS` with ``right`` (1 or 0) and ``log_prob`` (nats) of
        each question and ``replayed``, tokens replayed of each example.

    Raises:
        ValueError: for suffixes out of order of that, or as long as a context.
    """
    shortest = min(len(example.context) for example in examples)
    if not suffixes or len(set(suffixes)) != len(suffixes) or not 0 <= min(suffixes) <= max(suffixes) < shortest:
        raise ValueError(f"suffixes must be different numbers from 0 to {shortest - 1}, got {list(suffixes)}")
    contexts = [example.context for example in examples]
    questions = [example.questions[:most_questions] for example in examples]
    falling = sorted(suffixes, reverse=True)
    dense = Prefixes.of(model, [context[: len(context) - falling[0]] for context in contexts])
    results: dict[str, Any] = {}
    for suffix, following in zip(falling, [*falling[1:], 0]):
        new = [context[len(context) - suffix :] for context in contexts]
        stored = retain(dense, mask)
        rest = max(window_tokens - suffix, 0)
        windows = {"nr": 0, "wr": window_tokens, "rest": rest}
        results[str(suffix)] = {
            way: {
                **_scores(ask(_go_on(refresh(stored, mask, windows[way]), new), questions)),
                "replayed": [min(windows[way], len(tokens)) for tokens in dense.tokens],
            }
            for way in WAYS
        }
        dense = _go_on(dense, [tokens[: suffix - following] for tokens in new])
    answers = ask(dense, questions)
    return {
        "owner": answers.owner.tolist(),
        "prompt": [len(question.prompt) for group in questions for question in group],
        "dense": _scores(answers),
        **results,
    }


def _go_on(prefixes: Prefixes, tokens: Sequence[Sequence[int]]) -> Prefixes:
    return advance(prefixes, tokens)[1] if len(tokens[0]) else prefixes


def _scores(answers: Answers) -> dict[str, Any]:
    return {"right": answers.right.int().tolist(), "log_prob": answers.log_prob.tolist()}


def losses_by_example(
    unit: dict[str, Any], suffix: int, refresh_below: int | None
) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
    """What a policy loses to dense, and replays, of each example: means over its questions.

    Args:
        unit: of :func:`ask_after`.
        suffix: one of its suffixes.
        refresh_below: hits with fewer new prompt tokens, suffix and question, are refreshed, others zero-filled;
            ``None`` refreshes what the suffix leaves of the window.

    Returns:
        Loss of accuracy; loss of the log-probability of right answers in nats; replayed tokens.
    """
    owner, at = np.array(unit["owner"]), unit[str(suffix)]
    count = int(owner.max()) + 1
    if refresh_below is None:
        ways = ["rest"] * len(owner)
    else:
        ways = ["wr" if suffix + prompt < refresh_below else "nr" for prompt in unit["prompt"]]
    columns = [
        (
            unit["dense"]["right"][i] - at[way]["right"][i],
            unit["dense"]["log_prob"][i] - at[way]["log_prob"][i],
            at[way]["replayed"][owner[i]],
        )
        for i, way in enumerate(ways)
    ]
    questions = np.bincount(owner, minlength=count)
    accuracy, log_prob, replayed = (
        np.bincount(owner, weights=np.array(column, dtype=np.float64), minlength=count) / questions
        for column in zip(*columns)
    )
    return accuracy, log_prob, replayed
