"""The prefixes that horizons are observed on, and those of the bundled models' own tasks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from dasc.eval.task_runs import check_task, fitting_tasks
from dasc.models.tasks import SHORTEST, TASKS
from dasc.models.train.evaluate import examples

SCALED_TARGETS = (512, 256, 128, 32)
"""Target lengths for the bundled models, in the proportions of appendix A.2: they learned at most 512 tokens."""


@dataclass(frozen=True)
class Prefix:
    """One prefix.

    Attributes:
        source: where it is from: the index in the file's array, or a task.
        target: length that was wanted, tokens.
        tokens: its ids.
        available: tokens of the source before it was cut.
    """

    source: int | str
    target: int
    tokens: tuple[int, ...] = field(repr=False)
    available: int


def task_prefixes(
    targets: Sequence[int], per_target: int, seed: int = 0, tasks: Sequence[str] | None = None
) -> list[Prefix]:
    """Contexts of the tasks in turn, text among them where it fits.

    Args:
        targets: tokens of an example with its questions, which are left out; prefixes are somewhat shorter.
        per_target: prefixes of each target.
        seed: of the examples.
        tasks: these; all when ``None``.

    Raises:
        ValueError: for a target that none of the tasks fits in, or an unknown task.
    """
    for name in tasks or ():
        check_task(name)
    prefixes: list[Prefix] = []
    for target in targets:
        names = [name for name in fitting_tasks(target) if tasks is None or name in tasks]
        if not names:
            shortest = min(SHORTEST[name] for name in tasks or TASKS)
            raise ValueError(f"targets must be at least {shortest} tokens, got {target}")
        for number in range(per_target):
            name = names[len(prefixes) % len(names)]
            context = examples(name, target, number + 1, seed)[number].context
            prefixes.append(Prefix(name, target, context, len(context)))
    return prefixes
