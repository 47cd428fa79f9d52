"""Loss against stored bytes, as PNG and SVG. Needs matplotlib (the ``plot`` extra)."""

from __future__ import annotations

from collections.abc import Callable

from dasc.eval.bits.results import ALL_TASKS, BitsReport, Score
from dasc.eval.drawing import BLUE, GREY, ORANGE, Figure, figure_bytes

_STYLES = {
    "bits-range": (ORANGE, "o-"),
    "bits-horizon": ("#e0a458", "o-"),
    "bits-share": ("#7b4b94", "o-"),
    "keep-int8-range": ("#588b8b", "s-"),
    "keep-int8": (BLUE, "s-"),
    "keep-int4": ("#1f3a5f", "s-"),
    "keep-fp32": ("#7a9cc6", "s--"),
    "random-int8": (GREY, "x:"),
    "uniform-8": ("#222222", "D"),
    "uniform-4": ("#222222", "v"),
}
_LINEAR = 1e-3  # losses below it are on a linear scale, as 0 and gains are


def draw_bits(report: BitsReport, title: str) -> dict[str, bytes]:
    """``bits.png`` and ``bits.svg``: accuracy, loss of log-probability and error of the state, all tasks together."""
    dense = report.dense[ALL_TASKS]
    panels: tuple[tuple[str, Callable[[Score], float]], ...] = (
        ("accuracy (%)", lambda score: 100 * score.accuracy),
        ("log-probability lost an answer (nats)", lambda score: dense.log_prob - score.log_prob),
        ("relative error of the state", lambda score: score.state_error),
    )
    figure = Figure(figsize=(13.0, 4.0), layout="constrained")
    for axes, (name, value) in zip(figure.subplots(1, len(panels)), panels, strict=True):
        for arm, (colour, style) in _STYLES.items():
            points = [point for point in report.points if point.arm == arm and point.stored_bytes]
            x = [100 * point.stored_bytes / report.dense_bytes for point in points]
            axes.plot(x, [value(p.scores[ALL_TASKS]) for p in points], style, color=colour, label=arm, markersize=4)
        axes.axhline(value(dense), color="#222222", linewidth=0.8, linestyle=(0, (1, 3)))
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter("{x:g}")
        axes.set(xlabel="stored bytes, scales included (% of the dense temporal state)", title=name)
        axes.title.set_fontsize(10)
        axes.xaxis.label.set_fontsize(8)
        axes.grid(linewidth=0.4, alpha=0.6)
        axes.spines[["top", "right"]].set_visible(False)
        if name != panels[0][0]:
            axes.set_yscale("symlog", linthresh=_LINEAR)
            lowest = min(value(point.scores[ALL_TASKS]) for point in report.points)
            axes.set_ylim(bottom=min(lowest, 0) - _LINEAR / 2)
    figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside right upper", fontsize=8, frameon=False)
    figure.suptitle(title, fontsize=11)
    return figure_bytes("bits", figure)
