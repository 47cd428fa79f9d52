"""Figures of a comparison of allocations at equal bytes."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dasc.eval.states import Measure
from dasc.eval.statistics import Paired, paired

ExampleScores = dict[str, list[float]]
"""``accuracy``, ``log_prob`` and ``state_error`` of all examples, see :class:`Score`."""

MEASURES: tuple[Measure, ...] = ("accuracy", "log_prob")

ALL_TASKS = "all"
"""Examples of all tasks together; each task has as many."""

COMPARISONS = (
    ("bits-range", "keep-fp32"),
    ("bits-range", "keep-int8"),
    ("bits-range", "keep-int8-range"),
    ("bits-range", "keep-int4"),
    ("bits-range", "uniform-8"),
    ("bits-range", "uniform-4"),
    ("bits-range", "bits-horizon"),
    ("bits-share", "keep-int8"),
    ("bits-share", "bits-range"),
    ("bits-share", "uniform-4"),
    ("bits-horizon", "keep-fp32"),
    ("bits-horizon", "keep-int8"),
    ("bits-horizon", "keep-int4"),
    ("keep-int4", "keep-int8"),
    ("keep-int8", "random-int8"),
)
"""Differences reported: the first arm less the second, at the same budget."""


class Spent(NamedTuple):
    """An arm at a budget; a Random arm has an allocation for each seed, all of the same bytes.

    Attributes:
        arm: name.
        budget_bytes: most stored bytes.
        stored_bytes: of the allocation.
        units_of_bits: how many units have so many bits.
        modelled_loss: modelled cost with measured magnitudes, over that of dropping everything.
        scores: of each allocation.
    """

    arm: str
    budget_bytes: int
    stored_bytes: int
    units_of_bits: dict[str, int]
    modelled_loss: float
    scores: list[ExampleScores]


@dataclass(frozen=True)
class Score:
    """Means over examples.

    Attributes:
        accuracy: share of an example's questions that are answered right in every token.
        log_prob: log-probability of a whole right answer, nats, mean over an example's questions.
        state_error: Frobenius norm of the loaded temporal state less the dense one, over that of the dense one.
    """

    accuracy: float
    log_prob: float
    state_error: float


@dataclass(frozen=True)
class Point:
    """An arm at a budget: :class:`Spent`, with scores by task, and of all under :data:`ALL_TASKS`."""

    arm: str
    budget_bytes: int
    stored_bytes: int
    units_of_bits: dict[str, int]
    modelled_loss: float
    scores: dict[str, Score]


@dataclass(frozen=True)
class Difference:
    """Two arms at the same budget, by example.

    Attributes:
        arm: the one that is better when the mean is positive.
        other: the one that it is compared with.
        budget_bytes: of both.
        task: or :data:`ALL_TASKS`.
        measure: that is subtracted.
        paired: mean, interval and p-value, which is of this comparison alone.
    """

    arm: str
    other: str
    budget_bytes: int
    task: str
    measure: Measure
    paired: Paired


@dataclass(frozen=True)
class BitsReport:
    """All figures, and all that they depend on.

    Attributes:
        settings: plain JSON values.
        dense_bytes: of a dense temporal state. Convolution rows, the same in all arms, are left out everywhere.
        dense: scores by task of the dense state.
        points: by budget, and then by arm.
        differences: of :data:`COMPARISONS`.
    """

    settings: dict[str, Any]
    dense_bytes: int
    dense: dict[str, Score]
    points: tuple[Point, ...]
    differences: tuple[Difference, ...]

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return dataclasses.asdict(self)

    def point(self, arm: str, budget_bytes: int) -> Point | None:
        """If this arm has anything of this budget."""
        return next((p for p in self.points if (p.arm, p.budget_bytes) == (arm, budget_bytes)), None)


def summarise(
    settings: dict[str, Any],
    *,
    tasks: Sequence[str],
    dense_bytes: int,
    dense: ExampleScores,
    spending: Sequence[Spent],
) -> BitsReport:
    """Means by task, and paired differences.

    Args:
        settings: plain JSON values.
        tasks: of each example.
        dense_bytes: of a dense temporal state.
        dense: its scores.
        spending: what is compared.
    """
    rows = {task: np.array([t == task for t in tasks]) for task in dict.fromkeys(tasks)}
    rows[ALL_TASKS] = np.ones(len(tasks), dtype=bool)
    by = {
        (spent.arm, spent.budget_bytes): {
            name: np.mean([scores[name] for scores in spent.scores], axis=0) for name in spent.scores[0]
        }
        for spent in spending
    }
    points = [Point(*spent[:-1], scores=_by_task(by[spent.arm, spent.budget_bytes], rows)) for spent in spending]
    differences = [
        Difference(
            arm,
            other,
            budget,
            task,
            measure,
            paired((by[arm, budget][measure] - by[other, budget][measure])[of_task]),
        )
        for budget in dict.fromkeys(spent.budget_bytes for spent in spending)
        for arm, other in COMPARISONS
        if (arm, budget) in by and (other, budget) in by
        for task, of_task in rows.items()
        for measure in MEASURES
    ]
    dense_scores = _by_task({name: np.array(values) for name, values in dense.items()}, rows)
    return BitsReport(settings, dense_bytes, dense_scores, tuple(points), tuple(differences))


def _by_task(scores: dict[str, NDArray[np.float64]], rows: dict[str, NDArray[np.bool_]]) -> dict[str, Score]:
    return {
        task: Score(**{name: float(values[of_task].mean()) for name, values in scores.items()})
        for task, of_task in rows.items()
    }
