"""How long an omission hurts in one figure, as PNG and SVG. Needs matplotlib (the ``plot`` extra)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dasc.eval.decay.measure import FOLLOWED, DecayReport
from dasc.eval.drawing import BLUE, GREY, ORANGE, Figure, figure_bytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLOURS = {"nr": ORANGE, "wr": BLUE, "int8": "#6a994e"}
LABELS = {"nr": "NR", "wr": "WR", "int8": "INT8"}


def draw_decay(report: DecayReport) -> dict[str, bytes]:
    """``decay.png`` and ``decay.svg``: states and bound, all layers, predictions, and what refreshing buys."""
    figure = Figure(figsize=(14.4, 3.8), layout="constrained")
    first, states, predictions, policies = figure.subplots(1, 4)
    _first_layer(first, report)
    _states(states, report)
    _predictions(predictions, report)
    _policies(policies, report)
    for axes in (first, states, predictions, policies):
        axes.title.set_fontsize(10)
        axes.grid(linewidth=0.4, alpha=0.6)
        axes.legend(frameon=False, fontsize=8)
        axes.spines[["top", "right"]].set_visible(False)
    return figure_bytes("decay", figure)


def _ticks(report: DecayReport) -> list[int]:
    ticks: list[int] = report.settings["ticks"]
    return list(ticks)


def _over_tokens(axes: Axes, title: str, ylabel: str) -> None:
    axes.set(title=title, xlabel="tokens since the hit", ylabel=ylabel, yscale="log")
    axes.set_xscale("symlog", linthresh=1)
    axes.set_xlim(left=0)


def _first_layer(axes: Axes, report: DecayReport) -> None:
    ticks, layer = _ticks(report), report.first_layer("nr")
    for name, style, colour in (("bound", "-", GREY), ("estimate", "--", GREY), ("error", "o-", COLOURS["nr"])):
        label = {"bound": "bound", "estimate": "channel by channel", "error": "NR"}[name]
        axes.plot(ticks, report.relative("nr", name, layer=layer), style, color=colour, markersize=3, label=label)
    _over_tokens(axes, "first layer that omits a unit", "error of the state, relative")


def _states(axes: Axes, report: DecayReport) -> None:
    for arm in FOLLOWED:
        axes.plot(
            _ticks(report), report.relative(arm, "error"), "o-", color=COLOURS[arm], markersize=3, label=LABELS[arm]
        )
    given = report.relative("nr", "given_inputs")
    axes.plot(_ticks(report), given, ":", color=COLOURS["nr"], label="NR, given the dense inputs")
    _over_tokens(axes, "all recurrent layers", "error of the state, relative")


def _predictions(axes: Axes, report: DecayReport) -> None:
    for arm in FOLLOWED:
        kl = report.traces["all"]["arms"][arm]["kl"]
        axes.plot(_ticks(report)[1:], kl, "o-", color=COLOURS[arm], markersize=3, label=LABELS[arm])
    _over_tokens(axes, "predictions", "divergence from dense (nats)")


def _policies(axes: Axes, report: DecayReport) -> None:
    by_name = {policy.name: policy for policy in report.policies}
    line = [policy for policy in report.policies if policy.name != "rest"]
    for policies, style, colour, label in (
        (line, "o-", COLOURS["wr"], "refresh below N new tokens"),
        ([by_name["rest"]], "D", COLOURS["nr"], "rest of the window"),
    ):
        x = [policy.replayed_tokens for policy in policies]
        y = [policy.log_prob_loss[0] for policy in policies]
        axes.plot(x, y, style, color=colour, markersize=4, label=label)
    for policy in line:
        axes.annotate(
            policy.name.removeprefix("below "),
            (policy.replayed_tokens, policy.log_prob_loss[0]),
            xytext=(3, 4),
            textcoords="offset points",
            fontsize=7,
        )
    axes.set(title="whom to refresh", xlabel="tokens replayed a hit", ylabel="loss of right answers (nats)")
