"""What a task needs of a cached prefix: accuracy after parts of it were zeroed (section 3.2, table 1(a))."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from dasc.eval.provenance import described
from dasc.eval.states import Arm, ask, zero_both, zero_full_kv, zero_linear, zero_temporal
from dasc.eval.statistics import share_interval
from dasc.eval.task_runs import TaskSettings, load_task_model, prefill
from dasc.eval.unit_file import UnitFile
from dasc.models.hybrid import HybridModel

INTERVENTIONS: dict[str, Arm] = {
    "baseline": lambda prefixes: prefixes,
    "zero-full-kv": zero_full_kv,
    "zero-linear": zero_linear,
    "zero-temporal": zero_temporal,
    "zero-both": zero_both,
}
"""By name. ``zero-temporal``, which leaves the convolution rows, is not in the paper's table."""


@dataclass(frozen=True, kw_only=True)
class InterventionSettings(TaskSettings):
    """What is asked.

    Attributes:
        arms: names of :data:`INTERVENTIONS`.
    """

    arms: tuple[str, ...] = ("baseline", "zero-full-kv", "zero-linear", "zero-both")

    def __post_init__(self) -> None:
        super().__post_init__()
        unknown = [name for name in self.arms if name not in INTERVENTIONS]
        if unknown or not self.arms:
            raise ValueError(f"arms must be of {', '.join(INTERVENTIONS)}, got {unknown[0] if unknown else 'none'!r}")


@dataclass(frozen=True)
class Accuracy:
    """Answers to the questions of a task after one intervention.

    Attributes:
        questions: asked.
        right: of them, answered right in every token by greedy decoding.
        share: ``right / questions``.
        low: lower end of Wilson's 95 % interval of the share, over questions as if they were independent.
        high: upper end.
        token_share: share of the answers' tokens that are right, those before each being given.
        token_log_prob: mean log-probability of an answer's token, nats.
    """

    questions: int
    right: int
    share: float
    low: float
    high: float
    token_share: float
    token_log_prob: float


def accuracy(right: Tensor, token_right: Tensor, token_log_prob: Tensor) -> Accuracy:
    """Of ``[Q]`` and ``[T]`` bool and ``[T]`` nats, as :class:`~dasc.eval.states.Answers` holds them."""
    count, total = int(right.sum()), len(right)
    low, high = share_interval(count, total)
    return Accuracy(
        questions=total,
        right=count,
        share=count / total,
        low=low,
        high=high,
        token_share=float(token_right.double().mean()),
        token_log_prob=float(token_log_prob.mean()),
    )


@dataclass(frozen=True)
class InterventionReport:
    """The table: :class:`Accuracy` by task and arm, and all that it depends on."""

    settings: dict[str, Any]
    tasks: dict[str, dict[str, Accuracy]]

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return dataclasses.asdict(self)


def measure_interventions(
    folder: Path,
    settings: InterventionSettings,
    *,
    units_path: Path | None = None,
    progress: Callable[[str], None] = lambda task: None,
) -> InterventionReport:
    """Prefill each context once, and ask its questions after every intervention on a copy.

    Args:
        folder: of a model that has the tasks' token ids.
        settings: what is asked.
        units_path: file of finished tasks, to go on from when interrupted.
        progress: called with each task when it is done.

    Raises:
        ValueError: for a model or a file of finished tasks that does not fit.
    """
    model = load_task_model(folder)
    everything = described(folder, dataclasses.asdict(settings))
    units = UnitFile(units_path, everything)
    tasks = {}
    for task in settings.tasks:
        unit = units.get(task, partial(intervene, model, task, settings))
        tasks[task] = {arm: Accuracy(**values) for arm, values in unit.items()}
        progress(task)
    return InterventionReport(everything, tasks)


def intervene(model: HybridModel, task: str, settings: InterventionSettings) -> dict[str, dict[str, Any]]:
    """:class:`Accuracy` of each arm on one task, as plain values."""
    prefixes, questions = prefill(model, settings, task)
    found = {}
    for arm in settings.arms:
        answers = ask(INTERVENTIONS[arm](prefixes), questions)
        scores = accuracy(answers.right, answers.token_right, answers.token_log_prob)
        found[arm] = dataclasses.asdict(scores)
    return found
