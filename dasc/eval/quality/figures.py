"""Accuracy against the cutoff, and against the time to the first token. Needs matplotlib (the ``plot`` extra)."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

from dasc.eval.drawing import BLUE, GOLD, ORANGE, Figure, figure_bytes, ticker
from dasc.eval.quality.arms import METHODS
from dasc.eval.quality.table import Comparison, QualityTable, Row

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLOURS = {
    "dense": "#222222",
    "nr": BLUE,
    "wr": "#4b9b6a",
    "random": ORANGE,
    "observed": GOLD,
    "int8": "#8a6fb0",
    "int8-all": "#a58a3b",
    "int4": "#7a4b2a",
    "int4-all": "#c2708f",
}
_COLUMNS = 4


def draw_quality(table: QualityTable) -> dict[str, bytes]:
    """``accuracy`` and, where times are known, ``ttft`` as PNG and SVG files by name.

    Bands are 95 % intervals of the paired difference from dense for NR and WR, drawn about dense's mean, and one sample
    standard deviation over the masks for Random.
    """
    files = figure_bytes("accuracy", _panels(table, _accuracy))
    if any(cell.ttft_mean_s is not None for row in table.rows for cell in row.cells):
        files |= figure_bytes("ttft", _panels(table, _ttft))
    return files


def _panels(table: QualityTable, draw: Callable[[Axes, Row, QualityTable], None]) -> Figure:
    columns = min(_COLUMNS, len(table.rows))
    lines = math.ceil(len(table.rows) / columns)
    figure = Figure(figsize=(3.6 * columns + 1.2, 3.0 * lines), layout="constrained")
    panels = figure.subplots(lines, columns, squeeze=False).flatten()
    for axes, row in zip(panels, table.rows):
        draw(axes, row, table)
        axes.set_title(f"{row.model}: {row.task}".replace("$", r"\$"), fontsize=9)
        axes.grid(linewidth=0.4, alpha=0.6)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(labelsize=8)
    for axes in panels[len(table.rows) :]:
        axes.set_visible(False)
    labelled = {label: handle for axes in panels for handle, label in zip(*axes.get_legend_handles_labels())}
    figure.legend(labelled.values(), labelled.keys(), loc="outside right upper", frameon=False, fontsize=8)
    return figure


def _accuracy(axes: Axes, row: Row, table: QualityTable) -> None:
    dense = row.cell("dense", None)
    if dense is not None:
        axes.axhline(dense.score, color=COLOURS["dense"], linewidth=1.0, linestyle="--", label="dense")
    for method in ("random", "nr", "wr", "observed", "int8", "int4"):
        found = [(c.w_max, c) for c in row.cells if c.method == method and c.w_max is not None]
        cells = sorted(found, key=lambda pair: pair[0])
        if not cells:
            continue
        w_max, scores = [w for w, _ in cells], [cell.score for _, cell in cells]
        quantized = METHODS[method].quantized
        style = ":" if quantized else "-"  # int8 lies on nr as a rule
        axes.plot(w_max, scores, style, marker="o", markersize=3, linewidth=1.2, color=COLOURS[method], label=method)
        low, high = [], []
        for w, cell in cells:
            comparison = _comparison(table, row, f"{method} {w}")
            if method == "random":
                low.append(cell.score - (cell.sd or 0))
                high.append(cell.score + (cell.sd or 0))
            elif not quantized and dense is not None and comparison is not None:
                low.append(dense.score + comparison.difference.low)
                high.append(dense.score + comparison.difference.high)
        if low:
            axes.fill_between(w_max, low, high, color=COLOURS[method], alpha=0.15, linewidth=0)
    cutoffs = sorted({c.w_max for c in row.cells if c.w_max is not None})
    if cutoffs:
        axes.set_xscale("log", base=2)
        axes.set_xticks(cutoffs)
        axes.xaxis.set_major_formatter(ticker.ScalarFormatter())
    axes.set_xlabel("W_max (tokens)", fontsize=8)
    axes.set_ylabel("score", fontsize=8)


def _comparison(table: QualityTable, row: Row, first: str) -> Comparison | None:
    wanted = (row.model, row.task, first, "dense")
    return next((c for c in table.comparisons if (c.model, c.task, c.first, c.second) == wanted), None)


def _ttft(axes: Axes, row: Row, table: QualityTable) -> None:
    for method, colour in COLOURS.items():
        points = [(1e3 * c.ttft_mean_s, c) for c in row.cells if c.method == method and c.ttft_mean_s is not None]
        if not points:
            continue
        axes.plot([x for x, _ in points], [c.score for _, c in points], "o", markersize=4, color=colour, label=method)
        for x, cell in points:
            if cell.w_max is not None:
                axes.annotate(
                    str(cell.w_max),
                    (x, cell.score),
                    xytext=(3, 3),
                    textcoords="offset points",
                    fontsize=6,
                    color=colour,
                )
    axes.set_xlabel("mean time to first token (ms)", fontsize=8)
    axes.set_ylabel("score", fontsize=8)
