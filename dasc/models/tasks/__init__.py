"""Tasks on which the recurrent state of a small hybrid has to carry information, drawn from a seed."""

from __future__ import annotations

from dasc.models.tasks.aggregation import common_words, frequent_words
from dasc.models.tasks.copying import copying
from dasc.models.tasks.example import Draw, Example, Question
from dasc.models.tasks.recall import multi_value, recall_multi, recall_single
from dasc.models.tasks.text import SHORTEST_RECITATION, SHORTEST_TEXT, recitation, text
from dasc.models.tasks.tracking import latest_value, parity, permutation, swapping, variable_tracking
from dasc.models.tasks.vocabulary import VOCABULARY

TASKS: dict[str, Draw] = {
    draw.__name__: draw
    for draw in (
        recall_single,
        recall_multi,
        multi_value,
        latest_value,
        variable_tracking,
        common_words,
        frequent_words,
        parity,
        permutation,
        copying,
        text,
    )
}
"""Every task, by name."""

EXERCISES: dict[str, Draw] = {draw.__name__: draw for draw in (swapping, recitation)}
"""What is only trained on, by name, for the sake of a task."""

SHORTEST = dict.fromkeys([*TASKS, *EXERCISES], 32) | {"text": SHORTEST_TEXT, "recitation": SHORTEST_RECITATION}
"""Tokens of a sequence that every draw of a task or an exercise fits in."""

__all__ = ["EXERCISES", "SHORTEST", "TASKS", "VOCABULARY", "Draw", "Example", "Question"]
