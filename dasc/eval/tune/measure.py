"""Loss of every point of a grid on tasks, paired with dense checkpoints."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from dasc.eval.provenance import described
from dasc.eval.quality.arms import default_w_max
from dasc.eval.served_model import state_dtypes
from dasc.eval.states import Measure, ask, refresh, retain
from dasc.eval.task_runs import TaskSettings, load_task_model, prefill
from dasc.eval.tune.points import Loss, Point, point_label, upper_limit
from dasc.eval.unit_file import UnitFile
from dasc.geometry import QUANTIZATIONS, Quantization
from dasc.layout import RaggedLayout
from dasc.magnitudes import UnitMagnitudes
from dasc.models import Checkpoint, read_checkpoint
from dasc.models.hybrid import HybridModel
from dasc.planner import build_plan
from dasc.reference import replay_window


@dataclass(frozen=True, kw_only=True)
class TuneSettings(TaskSettings):
    """What is measured.

    Attributes:
        w_max: cutoffs in tokens; empty for the default of ``length``.
        gate_input: representative gate input ``a_s``; the family's own when ``None``.
    """

    count: int = 50
    w_max: tuple[int, ...] = ()
    gate_input: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.w_max:
            object.__setattr__(self, "w_max", default_w_max(self.length))


@dataclass(frozen=True)
class TuneReport:
    """Measured points.

    Attributes:
        settings: and everything else that the figures depend on.
        dense_bytes: of a dense checkpoint.
        dense_accuracy: share of right answers with dense checkpoints, mean over tasks.
        points: in the order of the grid.
        examples: of all tasks.
    """

    settings: dict[str, Any]
    dense_bytes: int
    dense_accuracy: float
    points: tuple[Point, ...]
    examples: int

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        values = dataclasses.asdict(self)
        values["points"] = [{"label": point.label, **dataclasses.asdict(point)} for point in self.points]
        return values


class _Way(NamedTuple):
    """One way to store: what a :class:`~dasc.eval.tune.points.Point` is before it is measured."""

    w_max: int | None
    mask: Tensor
    window: int
    quantized: Quantization | None
    observed: bool = False

    @property
    def label(self) -> str:
        return point_label(self.w_max, refresh=self.window > 0, observed=self.observed, quantized=self.quantized)


def measure_points(
    folder: Path,
    settings: TuneSettings,
    *,
    magnitudes: UnitMagnitudes | None = None,
    units_path: Path | None = None,
    progress: Callable[[str], None] = lambda task: None,
) -> TuneReport:
    """Measure NR and WR, FP32, INT8 and INT4, at every cutoff, and INT8 and INT4 of all units.

    With magnitudes also NR of as many units at every cutoff, those observed to be the largest.

    Questions follow the hit at once. WR is left out where its window is as long as the examples: to compute them again
    loses nothing and saves nothing.

    Args:
        folder: of a model that reads the tasks' tokens.
        settings: what to measure.
        magnitudes: of the model's units.
        units_path: file of finished tasks, to go on from when interrupted.
        progress: called after each task.

    Raises:
        ValueError: for a model, settings, magnitudes or a file of units that do not fit.
    """
    model, checkpoint = load_task_model(folder), read_checkpoint(folder)
    gate_input = checkpoint.gate_input(settings.gate_input)
    everything = described(folder, dataclasses.asdict(settings) | {"gate_input": gate_input})
    if magnitudes is not None:
        everything["magnitudes"] = magnitudes.sha256()
    units = UnitFile(units_path, everything)
    ways = _grid(checkpoint, settings, gate_input, magnitudes)
    measured = []
    for task in settings.tasks:
        measured.append(units.get(task, partial(_measure_task, model, ways, settings, task)))
        progress(task)
    geometry = checkpoint.geometry
    return TuneReport(
        settings=everything,
        dense_bytes=geometry.dense_bytes(state_dtypes(model)),
        dense_accuracy=float(np.mean([unit["dense"]["accuracy"] for unit in measured])),
        points=tuple(
            Point(
                w_max=way.w_max,
                refresh=way.window > 0,
                observed=way.observed,
                quantized=way.quantized,
                checkpoint_bytes=RaggedLayout.from_mask(
                    geometry, way.mask, state_dtypes(model, quantized=way.quantized)
                ).slot_bytes,
                replay_tokens=way.window,
                accuracy=_loss(measured, way.label, "accuracy"),
                log_prob=_loss(measured, way.label, "log_prob"),
            )
            for way in ways
        ),
        examples=settings.count * len(settings.tasks),
    )


def _grid(
    checkpoint: Checkpoint, settings: TuneSettings, gate_input: float, magnitudes: UnitMagnitudes | None
) -> list[_Way]:
    """Where nothing is omitted there is nothing to refresh, and the cutoff does not matter."""
    ways = []
    everything = torch.ones(checkpoint.geometry.num_layers, checkpoint.geometry.units_per_layer, dtype=torch.bool)
    for w_max in settings.w_max:
        plan = build_plan(checkpoint, w_max, gate_input=gate_input)
        window = replay_window(plan.windows, w_max)
        if window:
            windows = [0, window] if window < settings.length else [0]
            ways += [_Way(w_max, plan.mask, window, q) for q in (None, *QUANTIZATIONS) for window in windows]
        if window and magnitudes is not None:
            mask = build_plan(checkpoint, w_max, gate_input=gate_input, magnitudes=magnitudes).mask
            ways += [_Way(w_max, mask, 0, q, observed=True) for q in (None, *QUANTIZATIONS)]
    return [*ways, *(_Way(None, everything, 0, q) for q in QUANTIZATIONS)]


def _measure_task(model: HybridModel, ways: list[_Way], settings: TuneSettings, task: str) -> dict[str, Any]:
    """Means over the questions of each example, dense and in each way."""
    prefixes, questions = prefill(model, settings, task)
    scores = {"dense": ask(prefixes, questions).by_prefix()}
    for way in ways:
        loaded = refresh(retain(prefixes, way.mask, quantized=way.quantized), way.mask, way.window)
        scores[way.label] = ask(loaded, questions).by_prefix()
    return scores


def _loss(measured: list[dict[str, Any]], label: str, measure: Measure) -> Loss:
    """Tasks have equally many examples, so the mean over examples is the mean over tasks."""
    lost = np.concatenate([np.subtract(unit["dense"][measure], unit[label][measure]) for unit in measured])
    return Loss(float(lost.mean()), upper_limit(lost.tolist(), measure))
