"""Table 2 and the paired comparisons behind it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dasc.eval.quality.arms import ArmSpec
from dasc.eval.quality.results import ArmResult, QualityResult
from dasc.eval.statistics import Paired, holm, mean_and_sd, paired

ALL_TASKS = "all items"
"""A row over the items of all tasks together, each of them counted once."""


@dataclass(frozen=True)
class Cell:
    """A method at a cutoff in one row.

    Attributes:
        method: of :data:`~dasc.eval.quality.arms.METHODS`.
        w_max: cutoff; ``None`` for methods that select nothing.
        score: mean over the items; of Random, over the masks besides.
        sd: sample standard deviation over the masks; ``None`` for other methods, and for a single mask.
        hit: of its own measured requests.
        ttft_mean_s: of its own measured requests.
    """

    method: str
    w_max: int | None
    score: float
    sd: float | None
    hit: float
    ttft_mean_s: float | None


@dataclass(frozen=True)
class Row:
    """One model and task.

    Attributes:
        model: its name.
        task: its name, or :data:`ALL_TASKS`.
        items: how many.
        hit: pooled over all arms, ``sum C / sum (C + N)``.
        cells: in the order of the arms.
    """

    model: str
    task: str
    items: int
    hit: float
    cells: tuple[Cell, ...]

    def cell(self, method: str, w_max: int | None) -> Cell | None:
        """The cell of a method at a cutoff."""
        return next((c for c in self.cells if (c.method, c.w_max) == (method, w_max)), None)


@dataclass(frozen=True)
class Comparison:
    """A paired difference between two methods, by item.

    Attributes:
        model: its name.
        task: its name, or :data:`ALL_TASKS`.
        first: method and cutoff; Random is averaged over its masks within each item.
        second: what it is compared with.
        difference: first less second.
        p_holm: adjusted over its family, see :func:`make_table`.
    """

    model: str
    task: str
    first: str
    second: str
    difference: Paired
    p_holm: float


@dataclass(frozen=True)
class QualityTable:
    """All rows and all comparisons.

    Attributes:
        rows: by model and task.
        comparisons: by model and task.
        failures: what makes an arm unfit, by model and arm, in words.
    """

    rows: tuple[Row, ...]
    comparisons: tuple[Comparison, ...]
    failures: tuple[str, ...]

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return asdict(self)


def make_table(results: Sequence[QualityResult]) -> QualityTable:
    """Rows, comparisons and failures of results, one for each model.

    Compared are: every method with dense, but for ``padded``, whose outputs must be those of ``nr``; ``nr`` with
    Random, and ``wr`` and ``observed`` with ``nr``, at the same cutoff. The family of Holm's adjustment is all
    comparisons of single tasks; those over all items, which are no further evidence, are a family of their own.

    Raises:
        ValueError: when arms of a model did not measure the same items.
    """
    rows, failures = [], []
    found: list[tuple[str, str, str, str, Paired]] = []
    for result in results:
        _check_items(result)
        tasks = [*result.tasks, ALL_TASKS] if len(result.tasks) > 1 else result.tasks
        for task in tasks:
            rows.append(_row(result, task))
            found += [(result.model, task, *pair) for pair in _pairs(result, task)]
        failures += [f"{result.model}, {arm.spec.label}: {text}" for arm in result.arms for text in arm.failures]
        failures += [f"{result.model}, {text}" for text in _layout_failures(result)]
    adjusted = [1.0] * len(found)
    for overall in (False, True):
        family = [i for i, (_, task, *_) in enumerate(found) if (task == ALL_TASKS) == overall]
        for i, p in zip(family, holm([found[i][4].p for i in family])):
            adjusted[i] = p
    comparisons = tuple(Comparison(*entry, p) for entry, p in zip(found, adjusted))
    return QualityTable(tuple(rows), comparisons, tuple(failures))


def _check_items(result: QualityResult) -> None:
    first = result.arms[0]
    items = {name: task.item_ids for name, task in first.tasks.items()}
    for arm in result.arms[1:]:
        if {name: task.item_ids for name, task in arm.tasks.items()} != items:
            raise ValueError(f"arms {first.spec.label!r} and {arm.spec.label!r} did not measure the same items")


def _tasks(arm: ArmResult, task: str) -> list[str]:
    return list(arm.tasks) if task == ALL_TASKS else [task]


def _scores(arm: ArmResult, task: str) -> NDArray[np.float64]:
    return np.concatenate([np.array(arm.tasks[name].scores) for name in _tasks(arm, task)])


def _groups(result: QualityResult) -> dict[tuple[str, int | None], list[ArmResult]]:
    """Arms by method and cutoff: several only where masks are random."""
    groups: dict[tuple[str, int | None], list[ArmResult]] = {}
    for arm in result.arms:
        groups.setdefault((arm.spec.method, arm.spec.w_max), []).append(arm)
    return groups


def _row(result: QualityResult, task: str) -> Row:
    cells = []
    for (method, w_max), arms in _groups(result).items():
        scores = [float(_scores(arm, task).mean()) for arm in arms]
        mean, sd = mean_and_sd(scores) if len(scores) > 1 else (scores[0], None)
        cells.append(Cell(method, w_max, mean, sd, _hit(arms, task), _ttft(arms, task)))
    items = len(_scores(result.arms[0], task))
    return Row(result.model, task, items, _hit(result.arms, task), tuple(cells))


def _hit(arms: Sequence[ArmResult], task: str) -> float:
    measured = [arm.tasks[name] for arm in arms for name in _tasks(arm, task)]
    cached = sum(t.cached_tokens for t in measured)
    return cached / (cached + sum(t.new_tokens for t in measured))


def _ttft(arms: Sequence[ArmResult], task: str) -> float | None:
    """Mean over all measured requests."""
    measured = [arm.tasks[name] for arm in arms for name in _tasks(arm, task)]
    timed = [(t.ttft_mean_s, t.requests) for t in measured if t.ttft_mean_s is not None]
    return sum(s * n for s, n in timed) / sum(n for _, n in timed) if timed else None


def _pairs(result: QualityResult, task: str) -> list[tuple[str, str, Paired]]:
    scores = {key: np.mean([_scores(arm, task) for arm in arms], axis=0) for key, arms in _groups(result).items()}
    wanted: list[tuple[tuple[str, int | None], tuple[str, int | None]]]
    wanted = [(key, ("dense", None)) for key in scores if key[0] not in ("dense", "padded")]
    wanted += [(key, ("random", key[1])) for key in scores if key[0] == "nr"]
    wanted += [(key, ("nr", key[1])) for key in scores if key[0] in ("wr", "observed")]
    return [
        (_name(first), _name(second), paired(scores[first] - scores[second]))
        for first, second in wanted
        if second in scores
    ]


def _name(key: tuple[str, int | None]) -> str:
    return " ".join(str(part) for part in key if part is not None)


def _layout_failures(result: QualityResult) -> list[str]:
    """Padded and ragged checkpoints hold the same values (appendix B), so the outputs must be the same."""
    found = []
    for arm in result.arms:
        ragged = result.arm(ArmSpec("nr", arm.spec.w_max).label) if arm.spec.method == "padded" else None
        if ragged is None:
            continue
        differing = [n for n, t in arm.tasks.items() if t.outputs_sha256 != ragged.tasks[n].outputs_sha256]
        if differing:
            found.append(
                f"{arm.spec.label}: outputs differ from those of {ragged.spec.label} on {', '.join(differing)}"
            )
    return found
