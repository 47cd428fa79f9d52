"""Hit rate and time to first token against state memory, as PNG and SVG. Needs matplotlib (the ``plot`` extra)."""

from __future__ import annotations

from collections.abc import Sequence

from dasc.eval.drawing import BLUE, ORANGE, Figure, figure_bytes, ticker
from dasc.eval.simulate import ArmResult

_STYLES = {
    "dense": ("#555555", "s", "-"),
    "padded": (ORANGE, "v", "-"),
    "ragged": (BLUE, "o", "-"),
    "int8": ("#2a9d8f", "D", "-"),
    "int4": ("#7a4b2a", "X", "-"),
    "storage": ("#8d6cab", "P", "-"),
    "wr": ("#d9a441", "^", "--"),  # it hits what ragged hits
}


def draw_sweep(results: Sequence[ArmResult], title: str) -> dict[str, bytes]:
    """``sweep.png`` and ``sweep.svg``: a line for each arm."""
    figure = Figure(figsize=(9.6, 3.8), layout="constrained")
    hits, times = figure.subplots(1, 2)
    for arm in dict.fromkeys(result.arm for result in results):
        mine = sorted((r for r in results if r.arm == arm), key=lambda r: r.memory_bytes)
        memory = [r.memory_bytes / 2**30 for r in mine]
        colour, marker, line = _STYLES[arm]
        style = {"color": colour, "marker": marker, "linestyle": line, "markersize": 4, "linewidth": 1.3, "label": arm}
        hits.plot(memory, [100 * r.token_hit_rate for r in mine], **style)
        times.plot(memory, [r.ttft_mean_s for r in mine], **style)
    hits.set(ylabel="prompt tokens served from the cache (%)")
    times.set(ylabel="mean time to first token (s)")
    ticks = sorted({r.memory_bytes / 2**30 for r in results})
    for axes in (hits, times):
        axes.set_ylim(0, 1.05 * axes.get_ylim()[1])
        axes.set_xscale("log")
        axes.set_xlabel("state memory of a rank (GiB)")
        axes.set_xticks(ticks)
        axes.xaxis.set_major_formatter(ticker.FuncFormatter(lambda value, _: f"{value:g}"))
        axes.xaxis.set_minor_locator(ticker.NullLocator())
        axes.grid(axis="y", linewidth=0.4, alpha=0.6)
        axes.spines[["top", "right"]].set_visible(False)
    hits.legend(frameon=False)
    figure.suptitle(title, fontsize=11)
    return figure_bytes("sweep", figure)
