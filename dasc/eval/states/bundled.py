"""Models that speak the tasks' token ids."""

from __future__ import annotations

from pathlib import Path

import torch

import dasc.fast
from dasc.models.hybrid import HybridModel, load_hybrid
from dasc.models.tasks import SHORTEST, TASKS, VOCABULARY


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


def check_tasks(tasks: tuple[str, ...], length: int) -> None:
    """Raise unless all are tasks that ``length`` tokens are enough for.

    Raises:
        ValueError: naming the first that is not.
    """
    if not tasks:
        raise ValueError(f"tasks must be of {', '.join(TASKS)}, got none")
    for task in tasks:
        if task not in TASKS:
            raise ValueError(f"tasks must be of {', '.join(TASKS)}, got {task!r}")
        if length < SHORTEST[task]:
            raise ValueError(f"length must be at least {SHORTEST[task]} tokens for task {task!r}, got {length}")
