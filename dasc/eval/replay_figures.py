"""A replay in one figure, as PNG and SVG. Needs matplotlib (the ``plot`` extra)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from dasc.eval.drawing import BLUE, GREY, Figure, figure_bytes
from dasc.eval.replay import ArmReport, SeedResult

POINT = "#222222"

_PANELS: tuple[tuple[str, Callable[[SeedResult], float]], ...] = (
    ("prompt tokens from the cache (%)", lambda seed: 100 * seed.token_hit_rate),
    ("mean time to first token (s)", lambda seed: seed.ttft_mean_s),
    ("mean end-to-end latency (s)", lambda seed: seed.e2e_mean_s),
    ("checkpoints held at the end", lambda seed: seed.checkpoints_held),
)


def draw_replay(reports: Sequence[ArmReport], title: str) -> dict[str, bytes]:
    """``replay.png`` and ``replay.svg``: a bar for the mean over the seeds, a dot for each seed."""
    figure = Figure(figsize=(3.0 * len(_PANELS), 3.6), layout="constrained")
    labels = [report.label for report in reports]
    colours = [GREY if report.w_max is None else BLUE for report in reports]
    for axes, (name, value) in zip(figure.subplots(1, len(_PANELS)), _PANELS, strict=True):
        points = [[value(seed) for seed in report.seeds] for report in reports]
        axes.bar(labels, [sum(values) / len(values) for values in points], color=colours, width=0.7)
        for x, values in enumerate(points):
            axes.plot([x] * len(values), values, "o", color=POINT, markersize=3)
        axes.set(title=name, ylim=(0, None))
        axes.title.set_fontsize(9)
        axes.tick_params(axis="x", rotation=30 if len(labels) > 3 else 0, labelsize=8)
        axes.grid(axis="y", linewidth=0.4, alpha=0.6)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle(title, fontsize=11)
    return figure_bytes("replay", figure)
