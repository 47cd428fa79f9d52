"""Items of the bundled models' tasks, in token ids: the context is warmed, every question asked by itself."""

from __future__ import annotations

from collections.abc import Sequence

from dasc.eval.items.item import Ask, Item
from dasc.eval.task_runs import check_task
from dasc.models.tasks import SHORTEST, Example
from dasc.models.train.evaluate import examples


def item_of(example: Example, task: str, item_id: str, most_asks: int) -> Item:
    """An example with its first questions, at most ``most_asks``: tasks draw them in random order.

    An answer counts when its first tokens are the reference; questions asked on the way through the context are not
    asked here.

    Raises:
        ValueError: for ``most_asks`` below 1.
    """
    if most_asks < 1:
        raise ValueError(f"most_asks must be >= 1, got {most_asks}")
    asks = tuple(Ask(example.context + q.prompt, (q.answer,)) for q in example.questions[:most_asks])
    return Item(
        item_id=item_id,
        task=task,
        warm=example.context,
        asks=asks,
        scorer="exact",
        max_new_tokens=max(len(q.answer) for q in example.questions[:most_asks]),
    )


def task_items(names: Sequence[str], *, length: int, count: int, seed: int = 0, most_asks: int = 4) -> list[Item]:
    """Examples that no training saw. The task of an item is ``<name>/<length>``.

    Args:
        names: of :data:`~dasc.models.tasks.TASKS`.
        length: tokens of a whole example, all its questions included.
        count: examples of each task.
        seed: of the draw.
        most_asks: questions of an example that are asked.

    Raises:
        ValueError: for an unknown name, or a length that is too short for a task.
    """
    items = []
    for name in names:
        check_task(name)
        if length < SHORTEST[name]:
            raise ValueError(f"length must be >= {SHORTEST[name]} tokens for task {name!r}, got {length}")
        drawn = examples(name, length, count, seed)
        items += [item_of(example, f"{name}/{length}", f"{seed}-{i}", most_asks) for i, example in enumerate(drawn)]
    return items
