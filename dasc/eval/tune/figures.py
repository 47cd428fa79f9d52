"""Measured points in one figure, as PNG and SVG. Needs matplotlib (the ``plot`` extra)."""

from __future__ import annotations

from dasc.eval.drawing import BLUE, GOLD, GREY, ORANGE, Figure, figure_bytes
from dasc.eval.states import Measure
from dasc.eval.tune.choice import Choice
from dasc.eval.tune.measure import TuneReport

_MARKERS = {None: "o", "int8": "s", "int4": "^"}


def draw_tune(report: TuneReport, choice: Choice, measure: Measure, budget: float) -> dict[str, bytes]:
    """``tune.png`` and ``tune.svg``: loss against bytes, from the mean up to the upper limit, with front and budget."""
    figure = Figure(figsize=(7.2, 4.4), layout="constrained")
    axes = figure.subplots()
    unit, scale = ("points of accuracy", 100) if measure == "accuracy" else ("nats an answer", 1)
    for point in report.points:
        loss = point.loss(measure)
        x, mean, upper = point.checkpoint_bytes / 1024, scale * loss.mean, scale * loss.upper
        colour = GOLD if point.observed else BLUE if point.refresh else ORANGE
        axes.plot([x, x], [mean, upper], color=colour, linewidth=0.8, alpha=0.6)
        axes.plot(x, mean, _MARKERS[point.quantized], color=colour, markersize=5)
        if point.label in choice.front:
            axes.annotate(point.label, (x, mean), xytext=(4, -9), textcoords="offset points", fontsize=7)
        if point == choice.point:
            axes.plot(x, mean, "o", markersize=13, markerfacecolor="none", color="black", label="chosen")
    front = sorted((p for p in report.points if p.label in choice.front), key=lambda p: p.checkpoint_bytes)
    axes.plot(
        [p.checkpoint_bytes / 1024 for p in front],
        [scale * p.loss(measure).mean for p in front],
        color=GREY,
        linewidth=1,
        zorder=0,
        label="no other is smaller and better",
    )
    axes.axhline(scale * budget, color="black", linewidth=0.8, linestyle="--", label="budget")
    axes.axvline(report.dense_bytes / 1024, color=GREY, linewidth=0.8, linestyle=":", label="dense")
    shapes = (("s", GREY, "square: INT8"), ("^", GREY, "triangle: INT4"))
    for marker, colour, label in (("o", ORANGE, "NR"), ("o", BLUE, "WR"), ("o", GOLD, "observed"), *shapes):
        axes.plot([], [], marker, color=colour, label=label)
    axes.set(xlabel="KiB a checkpoint", ylabel=f"loss to dense ({unit}), up to its 95 % limit")
    axes.legend(frameon=False, fontsize=8)
    axes.grid(linewidth=0.4, alpha=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    return figure_bytes("tune", figure)
