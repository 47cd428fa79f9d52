"""Runs every allocation of every arm on the same examples."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cache, partial
from pathlib import Path
from statistics import fmean

from torch import Tensor

from dasc.eval.bits.arms import ARMS, Units, quantised
from dasc.eval.bits.results import BitsReport, ExampleScores, Spent, summarise
from dasc.eval.provenance import described
from dasc.eval.states import Prefixes, ask
from dasc.eval.task_runs import TaskSettings, load_task_model, prefill
from dasc.eval.unit_file import UnitFile
from dasc.models import read_checkpoint
from dasc.models.hybrid import HybridModel
from dasc.models.tasks import Question
from dasc.reference import BITS, RANDOM_MASK_SEEDS, allocation_bytes, modelled_cost, static_horizons


@dataclass(frozen=True, kw_only=True)
class BitsSettings(TaskSettings):
    """What is measured.

    Attributes:
        calibration: other examples of each task, of the next seed, whose states give the magnitudes.
        budgets: shares of the dense temporal bytes, such as ``"1/8"``; those of all units at 8 and at 4 bits besides.
        seeds: Random masks.
        use_tokens: tokens after the hit that the allocation has in mind.
    """

    count: int = 32
    calibration: int = 8
    budgets: tuple[str, ...] = ("1/32", "1/16", "1/8", "1/4", "1/2", "1")
    seeds: int = len(RANDOM_MASK_SEEDS)
    use_tokens: int = 16

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("calibration", "use_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be >= 1, got {getattr(self, name)}")
        if not 1 <= self.seeds <= len(RANDOM_MASK_SEEDS):
            raise ValueError(f"seeds must be 1 to {len(RANDOM_MASK_SEEDS)}, got {self.seeds}")
        if not self.budgets or not all(0 < Fraction(share) <= 1 for share in self.budgets):
            raise ValueError(f"budgets must be over 0 and at most 1, got {', '.join(self.budgets) or 'none'}")


_Asked = tuple[Prefixes, list[tuple[Question, ...]]]
"""Examples of one task."""


def measure_bits(
    folder: Path,
    settings: BitsSettings,
    *,
    units_path: Path | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> BitsReport:
    """Prefill each context once, and ask its questions after every allocation on a copy.

    Args:
        folder: of a model that has the tasks' token ids.
        settings: what is measured.
        units_path: file of finished allocations, to go on from when interrupted.
        progress: called with the number of allocations done, and of all.

    Raises:
        ValueError: for a model or a file of finished allocations that does not fit, or a budget of less than a byte.
    """
    model = load_task_model(folder)
    everything = described(folder, dataclasses.asdict(settings))
    file = UnitFile(units_path, everything)
    units = _units(folder, model, settings)
    spending = [
        (arm, budget, several)
        for budget in _budgets(units, settings)
        for arm, allocate in ARMS.items()
        if (several := allocate(units, budget))
    ]
    dense = units.uniform(32)
    different = {_digest(bits): bits for bits in (dense, *(bits for _, _, several in spending for bits in several))}
    asked = cache(lambda: [prefill(model, settings, task) for task in settings.tasks])  # nobody asks if all is done
    scores: dict[str, ExampleScores] = {}
    for done, (digest, bits) in enumerate(different.items()):
        progress(done, len(different))
        scores[digest] = file.get(digest, partial(_score, asked, bits))
    progress(len(different), len(different))
    return summarise(
        everything,
        tasks=[task for task in settings.tasks for _ in range(settings.count)],
        dense_bytes=units.uniform_bytes(32),
        dense=scores[_digest(dense)],
        spending=[
            Spent(
                arm=arm,
                budget_bytes=budget,
                stored_bytes=allocation_bytes(units.geometry, several[0], units.temporal),
                units_of_bits={str(width): int((several[0] == width).sum()) for width in BITS},
                modelled_loss=fmean(modelled_cost(units.by_range, bits, units.geometry) for bits in several)
                / float(units.by_range.sum()),
                scores=[scores[_digest(bits)] for bits in several],
            )
            for arm, budget, several in spending
        ],
    )


def _units(folder: Path, model: HybridModel, settings: BitsSettings) -> Units:
    checkpoint = read_checkpoint(folder)
    others = dataclasses.replace(settings, count=settings.calibration, seed=settings.seed + 1)
    calibration = [prefill(model, others, task)[0] for task in settings.tasks]
    return Units.of(
        checkpoint.geometry,
        static_horizons(checkpoint.gate, checkpoint.family.default_gate_input),
        calibration,
        prefix_tokens=settings.length,
        use_tokens=settings.use_tokens,
        seeds=settings.seeds,
    )


def _budgets(units: Units, settings: BitsSettings) -> list[int]:
    """Bytes, ascending."""
    dense = units.uniform_bytes(32)
    shares = [int(Fraction(share) * dense) for share in settings.budgets]
    return sorted({*shares, *(min(units.uniform_bytes(width), dense) for width in (4, 8))})


def _digest(bits: Tensor) -> str:
    return hashlib.sha256(bits.numpy().astype("u1").tobytes()).hexdigest()


def _score(asked: Callable[[], Sequence[_Asked]], bits: Tensor) -> ExampleScores:
    """Of all examples of all tasks: means over an example's questions, and the error of its state."""
    found: ExampleScores = {"accuracy": [], "log_prob": [], "state_error": []}
    for prefixes, questions in asked():
        loaded = quantised(prefixes, bits)
        for measure, values in ask(loaded, questions).by_prefix().items():
            found[measure] += values
        error, norm = (
            x.double().square().sum(dim=(0, 2, 3, 4)) for x in (loaded.temporal - prefixes.temporal, prefixes.temporal)
        )
        found["state_error"] += (error / norm).sqrt().tolist()
    return found
