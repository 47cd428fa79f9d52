"""The bundled models' tasks put to a model: which examples, and their contexts prefilled."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

import dasc.fast
from dasc.eval.states import Prefixes
from dasc.models.hybrid import HybridModel, load_hybrid
from dasc.models.tasks import SHORTEST, TASKS, VOCABULARY, Example, Question
from dasc.models.train.evaluate import examples


@dataclass(frozen=True, kw_only=True)
class TaskSettings:
    """What is asked.

    Attributes:
        tasks: names of :data:`~dasc.models.tasks.TASKS`.
        length: tokens of an example with all its questions.
        count: examples of each task.
        questions: of an example, the first so many: questions of one context are not independent.
        seed: of the examples.

    Raises:
        ValueError: naming the field.
    """

    tasks: tuple[str, ...] = tuple(TASKS)
    length: int = 256
    count: int = 100
    questions: int = 4
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.tasks:
            raise ValueError(f"tasks must be of {', '.join(TASKS)}, got none")
        for task in self.tasks:
            check_task(task)
            if self.length < SHORTEST[task]:
                raise ValueError(
                    f"length must be at least {SHORTEST[task]} tokens for task {task!r}, got {self.length}"
                )
        for name in ("count", "questions"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be >= 1, got {getattr(self, name)}")

    def examples(self, task: str) -> list[Example]:
        """Of one task."""
        return examples(task, self.length, self.count, self.seed)


def check_task(name: str) -> None:
    """Raise unless there is a task of this name.

    Raises:
        ValueError: naming those that there are.
    """
    if name not in TASKS:
        raise ValueError(f"tasks must be of {', '.join(TASKS)}, got {name!r}")


def fitting_tasks(length: int) -> tuple[str, ...]:
    """Names of the tasks that ``length`` tokens are enough for."""
    return tuple(task for task in TASKS if SHORTEST[task] <= length)


def load_task_model(folder: Path, dtype: torch.dtype = torch.float32) -> HybridModel:
    """The model in ``folder``, in FP32 unless told otherwise, on the CPU.

    Raises:
        ValueError: for a folder that is no small hybrid model, or one that does not have the tasks' token ids.
    """
    config, weights = load_hybrid(folder)
    if config.vocab_size < VOCABULARY:
        raise ValueError(
            f"{folder}: the model must have the {VOCABULARY} token ids of the tasks, it has {config.vocab_size}"
        )
    return HybridModel(config, weights, dasc.fast, dtype=dtype)


def prefill(model: HybridModel, settings: TaskSettings, task: str) -> tuple[Prefixes, list[tuple[Question, ...]]]:
    """Contexts of a task's examples, prefilled densely, and the questions of each."""
    drawn = settings.examples(task)
    prefixes = Prefixes.of(model, [example.context for example in drawn])
    return prefixes, [example.questions[: settings.questions] for example in drawn]
