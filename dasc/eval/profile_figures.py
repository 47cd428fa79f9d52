"""Figures 1 and 5 to 8 of the paper for any model, as PNG and SVG. Needs matplotlib (the ``plot`` extra)."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from dasc.eval.drawing import BLUE, ORANGE, Figure, colors, figure_bytes
from dasc.eval.profile import DECAY_BINS, ModelProfile

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from numpy.typing import NDArray

ATTENTION_GREY = "#d4d4d4"


def draw_profile(profile: ModelProfile) -> dict[str, bytes]:
    """The figures of ``profile`` as PNG and SVG files by name.

    ``decay`` and ``layers`` for every model; ``horizons`` for GDN (one horizon a head); ``retained`` and ``channels``
    for KDA.
    """
    figures = {"decay": _decay(profile), "layers": _layers(profile)}
    if profile.geometry.kind == "gdn":
        figures["horizons"] = _head_horizons(profile)
    else:
        figures["retained"] = _retained(profile)
        figures["channels"] = _channels(profile)
    files: dict[str, bytes] = {}
    for name, figure in figures.items():
        files |= figure_bytes(name, figure)
    return files


def _new(width: float, height: float) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.add_subplot()


def _name(profile: ModelProfile) -> str:
    """The model's name as plain text: ``$`` would start a formula, and what is not Unicode has no glyph."""
    name = Path(profile.source).name if "/" in profile.source else profile.source
    return name.encode(errors="replace").decode().replace("$", r"\$")


def _decay(profile: ModelProfile) -> Figure:
    """Figure 1: the share of units by one-step decay."""
    figure, axes = _new(6.4, 3.6)
    alpha = profile.alpha.flatten().numpy()
    median = float(np.median(alpha))
    weights = np.full(alpha.shape, 100 / alpha.size)
    axes.hist(alpha, bins=DECAY_BINS, range=(0, 1), weights=weights, color=BLUE)
    axes.axvline(median, color=ORANGE, linewidth=1.5)
    axes.annotate(
        f"median {median:.3f}",
        (median, 0.95),
        xycoords=("data", "axes fraction"),
        xytext=(-6 if median > 0.5 else 6, 0),
        textcoords="offset points",
        ha="right" if median > 0.5 else "left",
        color=ORANGE,
    )
    unit = "heads" if profile.geometry.kind == "gdn" else "key channels"
    axes.set(
        xlim=(0, 1),
        xlabel="one-step decay  alpha = exp(g_s)",
        ylabel=f"share of {unit} (%)",
        title=f"{_name(profile)}: decay of {alpha.size:,} {unit} in one token",
    )
    axes.spines[["top", "right"]].set_visible(False)
    return figure


def _layers(profile: ModelProfile) -> Figure:
    """Retained share of each recurrent layer at each cutoff: why ragged storage pays."""
    figure, axes = _new(7.0, 3.6)
    blocks = profile.geometry.recurrent_layers
    units = profile.geometry.units_per_layer
    for index, cutoff in enumerate(profile.cutoffs):
        share = [100 * count / units for count in cutoff.layer_counts]
        shade = 0.25 + 0.6 * index / max(len(profile.cutoffs) - 1, 1)
        axes.plot(blocks, share, marker="o", markersize=3, linewidth=1.2, color=_shade(shade), label=str(cutoff.w_max))
    axes.set(xlabel="model block", ylabel="units kept (%)", ylim=(0, 100), title=f"{_name(profile)}: kept by layer")
    axes.legend(
        title="W_max", frameon=False, ncols=1 + len(profile.cutoffs) // 16, loc="upper left", bbox_to_anchor=(1, 1)
    )
    axes.spines[["top", "right"]].set_visible(False)
    return figure


def _shade(fraction: float) -> tuple[float, float, float, float]:
    from matplotlib import colormaps

    red, green, blue, alpha = colormaps["viridis"](fraction)
    return float(red), float(green), float(blue), float(alpha)


def _block_map(
    profile: ModelProfile, values: NDArray[np.float64], norm: colors.Normalize, title: str, label: str
) -> Figure:
    """A map with one row a model block; full-attention blocks stay grey, as in figures 5, 6 and 8."""
    geometry = profile.geometry
    rows = np.full((geometry.num_blocks, values.shape[1]), np.nan)
    rows[list(geometry.recurrent_layers)] = values
    figure, axes = _new(max(5.0, 0.06 * values.shape[1] + 3.5), max(3.6, 0.075 * geometry.num_blocks + 1.8))
    axes.set_facecolor(ATTENTION_GREY)
    image = axes.imshow(np.ma.masked_invalid(rows), aspect="auto", norm=norm, cmap="viridis", interpolation="nearest")
    axes.set(xlabel="value head", ylabel="model block", title=title)
    extend = "neither" if norm.vmax == 1 else "max"
    figure.colorbar(image, ax=axes, label=label, fraction=0.05, pad=0.02, extend=extend)
    return figure


def _horizon_norm(horizons: NDArray[np.float64]) -> colors.LogNorm:
    finite = horizons[np.isfinite(horizons) & (horizons > 0)]
    low, high = (float(finite.min()), float(finite.max())) if finite.size else (1.0, 10.0)
    # colours past five decades tell nothing more; the ends are saturated
    low = max(low, 0.1)
    return colors.LogNorm(low, max(min(high, low * 1e5), low * 10), clip=True)


def _plottable(horizons: NDArray[np.float64]) -> NDArray[np.float64]:
    """Infinite horizons as the largest float, so that they take the last colour and not the grey of attention."""
    return np.nan_to_num(horizons, posinf=np.finfo(np.float64).max)


def _head_horizons(profile: ModelProfile) -> Figure:
    """Figure 5: the horizon of every GDN head."""
    horizons = profile.horizons.numpy()
    title = f"{_name(profile)}: retention horizon of each head (a_s = {profile.gate_input:g})"
    return _block_map(profile, _plottable(horizons), _horizon_norm(horizons), title, "horizon (tokens)")


def _retained(profile: ModelProfile) -> Figure:
    """Figures 6 and 8: the share of each head's channels that is kept."""
    title = f"{_name(profile)}: share of channels with a horizon over {profile.w_max} tokens"
    return _block_map(profile, profile.fractions.numpy(), colors.Normalize(0, 1), title, "share kept")


def _channels(profile: ModelProfile) -> Figure:
    """Figure 7: the horizons of all channels of the layer nearest to the median."""
    geometry = profile.geometry
    block = geometry.recurrent_layers[profile.median_layer]
    horizons = profile.horizons[profile.median_layer].reshape(geometry.num_value_heads, geometry.head_k_dim).numpy()
    kept = float(profile.fractions[profile.median_layer].mean())
    figure, axes = _new(7.6, max(3.2, 0.06 * geometry.num_value_heads + 2.0))
    image = axes.imshow(
        _plottable(horizons), aspect="auto", norm=_horizon_norm(horizons), cmap="viridis", interpolation="nearest"
    )
    axes.set(
        xlabel="key channel",
        ylabel="value head",
        title=f"{_name(profile)}, block {block}: channel horizons ({kept:.3f} kept)",
    )
    figure.colorbar(image, ax=axes, label="horizon (tokens)", fraction=0.05, pad=0.02, extend="max")
    return figure
