"""Conversations that bundled models were trained for: something is told, then questions about it, one a turn."""

from __future__ import annotations

import numpy as np

from dasc.eval.conversations import Limits, Turn
from dasc.models.tasks import TASKS, Example

_SEVERAL_QUESTIONS = ("recall_multi", "multi_value", "latest_value", "variable_tracking")
_MOST_TURNS = 8  # questions that examples of all these tasks can have
_MOST_ANSWER_TOKENS = 3

_STREAM = 2**32 - 2  # neither the examples of a training nor those of an evaluation


def question_conversations(count: int, limits: Limits, *, length: int = 256, seed: int = 0) -> list[list[Turn]]:
    """Examples of the tasks that ask several questions about one context, the tasks in turn.

    A prompt holds the context, the earlier questions and, as in training, all of their answers but the last tokens.

    Args:
        count: conversations.
        limits: turns in each; the others are checked, nothing is cut.
        length: tokens of an example with all its questions, the first of which are asked.
        seed: of everything drawn.

    Raises:
        ValueError: for no conversations, limits that they do not fit, or a length that is too short for the turns.
    """
    if count < 1:
        raise ValueError(f"count must be >= 1, got {count}")
    if not 1 <= limits.turns <= _MOST_TURNS:
        raise ValueError(f"turns must be 1 to {_MOST_TURNS} where questions are asked, got {limits.turns}")
    if length > limits.context_tokens or limits.answer_tokens < _MOST_ANSWER_TOKENS:
        raise ValueError(
            f"conversations of questions take up to {length} tokens and answers {_MOST_ANSWER_TOKENS}, "
            f"the limits are {limits.context_tokens} and {limits.answer_tokens}"
        )
    rng = np.random.default_rng((_STREAM, seed))
    tasks = [_SEVERAL_QUESTIONS[i % len(_SEVERAL_QUESTIONS)] for i in range(count)]
    return [_turns(_example(task, rng, length, limits.turns), limits.turns) for task in tasks]


def _example(task: str, rng: np.random.Generator, length: int, turns: int) -> Example:
    """With enough questions: how many an example has is drawn."""
    for _ in range(1000):
        example = TASKS[task](rng, length)
        if len(example.questions) >= turns:
            return example
    raise ValueError(f"length must be enough for {turns} questions of task {task!r}, got {length}")


def _turns(example: Example, count: int) -> list[Turn]:
    prompt, turns = example.context, []
    for question in example.questions[:count]:
        prompt += question.prompt
        turns.append(Turn(prompt, len(question.answer), question.answer))
        prompt += question.answer[:-1]
    return turns
