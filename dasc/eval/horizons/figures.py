"""Horizons and how they agree with what is observed, in one figure. Needs matplotlib (the ``plot`` extra)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from dasc.eval.drawing import BLUE, ORANGE, Figure, figure_bytes
from dasc.eval.horizons.measure import HorizonReport

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def draw_horizons(report: HorizonReport) -> dict[str, bytes]:
    """``horizons.png`` and ``horizons.svg``: a histogram of horizons, and correlations by layer."""
    figure = Figure(figsize=(10.5, 3.8), layout="constrained")
    histogram, layers = figure.subplots(1, 2)
    _draw_histogram(histogram, report)
    _draw_layers(layers, report)
    name = report.settings["model"].replace("$", r"\$")
    figure.suptitle(f"{name}: static horizons (a_s = {report.fixed.gate_input:g}) against {_count(report)}")
    for axes in (histogram, layers):
        axes.spines[["top", "right"]].set_visible(False)
    return figure_bytes("horizons", figure)


def _count(report: HorizonReport) -> str:
    return f"{len(report.prefixes)} prefixes"


def _draw_histogram(axes: Axes, report: HorizonReport) -> None:
    edges = report.histogram["edges_tokens"]
    static, empirical = (np.sum(report.histogram[name], axis=0) for name in ("static", "empirical"))
    axes.stairs(100 * static / static.sum(), edges, fill=True, color=BLUE, label="from the weights, H_s")
    axes.stairs(100 * empirical / empirical.sum(), edges, color=ORANGE, label="observed, H_e (median)")
    axes.set(xscale="log", xlabel="horizon (tokens)", ylabel="share of units (%)")
    axes.legend(frameon=False)


def _draw_layers(axes: Axes, report: HorizonReport) -> None:
    pairs = ((report.fixed.empirical, BLUE, "H_s and H_e"), (report.fixed.magnitude, ORANGE, "H_s and M_S"))
    for shift, (agreement, colour, label) in zip((-0.1, 0.1), pairs):
        drawn = [(block + shift, layer) for block, layer in zip(report.blocks, agreement.layers) if layer is not None]
        medians = np.array([layer.median for _, layer in drawn])
        spread = [medians - [layer.q1 for _, layer in drawn], [layer.q3 for _, layer in drawn] - medians]
        axes.errorbar([x for x, _ in drawn], medians, yerr=spread, fmt="o", color=colour, capsize=2, label=label)
    axes.set(xlabel="model block", ylabel="Spearman correlation, median and quartiles", ylim=(-1.05, 1.05))
    axes.set_xticks(report.blocks)
    axes.axhline(0, color="#8a8a8a", linewidth=0.6)
    axes.legend(frameon=False, loc="lower left")
