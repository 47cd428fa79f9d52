"""From measured points to a choice, in plain words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dasc.accounting import usable_slots
from dasc.eval.states import Measure
from dasc.eval.tune.points import Loss, Point, fewest_examples
from dasc.units import format_bytes


@dataclass(frozen=True)
class Choice:
    """What was chosen and why.

    Attributes:
        point: ``None`` when none fits.
        front: labels of the points that no other beats, from the smallest.
        explanation: sentences.
    """

    point: Point | None
    front: tuple[str, ...]
    explanation: tuple[str, ...]


def pareto(points: Sequence[Point], measure: Measure) -> list[Point]:
    """Points that no other one beats: none takes no more bytes and loses no more, and less of one of them.

    Of points that are equal in both the one that replays least stays. From the smallest, by mean loss.
    """
    front: list[Point] = []
    for point in sorted(points, key=lambda p: (p.checkpoint_bytes, p.loss(measure).mean, p.replay_tokens)):
        if not front or point.loss(measure).mean < front[-1].loss(measure).mean:
            front.append(point)
    return front


def choose(
    points: Sequence[Point], *, budget: float, memory_bytes: int, dense_bytes: int, measure: Measure = "accuracy"
) -> Choice:
    """The point with most checkpoints in the memory whose loss stays within the budget by its upper limit.

    Of points with as many checkpoints the one that replays least is taken, then the one that may lose least.

    Args:
        points: at least one.
        budget: largest loss, in the unit of ``measure``, not negative.
        memory_bytes: of the checkpoint pool; slot 0 is reserved (appendix C.1).
        dense_bytes: of a dense checkpoint.
        measure: which loss counts.

    Raises:
        ValueError: for no points or a negative budget.
    """
    if not points or not budget >= 0:
        raise ValueError(f"points must hold at least one and budget be >= 0, got {len(points)} and {budget}")
    front = pareto(points, measure)
    labels = tuple(point.label for point in front)

    def slots(point: Point) -> int:
        return usable_slots(memory_bytes, [point.checkpoint_bytes])

    def size(point: Point) -> str:
        return f"{format_bytes(point.checkpoint_bytes)}, {slots(point):,} checkpoints"

    within = [point for point in points if point.loss(measure).upper <= budget]
    fitting = [point for point in within if slots(point)]
    dense = f"{usable_slots(memory_bytes, [dense_bytes]):,} dense ones"
    if not within:
        best = min(points, key=lambda p: (p.loss(measure).upper, p.checkpoint_bytes))
        least = f" (it takes {fewest_examples(budget):,} or more)" if measure == "accuracy" and 0 < budget < 1 else ""
        return Choice(
            None,
            labels,
            (
                f"No way of storing checkpoints is known to stay within a loss of {_amount(budget, measure)}.",
                f"{best.label} comes nearest: it loses {_told(best.loss(measure), measure)}.",
                f"Measure more examples{least}, allow a larger loss, or keep checkpoints dense: {dense} fit in "
                f"{format_bytes(memory_bytes)}.",
            ),
        )
    if not fitting:
        smallest = min(within, key=lambda p: p.checkpoint_bytes)
        return Choice(
            None,
            labels,
            (
                f"Nothing within a loss of {_amount(budget, measure)} fits in {format_bytes(memory_bytes)}: the "
                f"smallest, {smallest.label}, takes {format_bytes(smallest.checkpoint_bytes)} a checkpoint, and one "
                "more is reserved.",
            ),
        )
    point = min(fitting, key=lambda p: (-slots(p), p.replay_tokens, p.loss(measure).upper, p.checkpoint_bytes))
    replay = f" A hit replays up to {point.replay_tokens} tokens." if point.replay_tokens else ""
    lines = [
        f"{point.label}: {slots(point):,} checkpoints of {format_bytes(point.checkpoint_bytes)} fit in "
        f"{format_bytes(memory_bytes)}, where {dense} would.{replay}",
        f"It loses {_told(point.loss(measure), measure)}; the budget is {_amount(budget, measure)}.",
    ]
    cheaper = [p for p in front if slots(p) > slots(point)]
    if cheaper:
        following = max(cheaper, key=lambda p: p.checkpoint_bytes)
        lines.append(
            f"The next smaller one, {following.label} ({size(following)}), would lose "
            f"{_told(following.loss(measure), measure)}."
        )
    else:
        lines.append("No smaller one was measured that would lose less than others of its size.")
    return Choice(point, labels, tuple(lines))


def _amount(loss: float, measure: Measure) -> str:
    return f"{100 * loss:.2f} points of accuracy" if measure == "accuracy" else f"{loss:.3f} nats an answer"


def _told(loss: Loss, measure: Measure) -> str:
    return f"{_amount(loss.mean, measure)}, and at 95 % confidence no more than {_amount(loss.upper, measure)}"
