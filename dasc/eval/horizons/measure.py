"""Static horizons against observed decays and states, prefix by prefix and layer by layer."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dasc.eval.horizons.prefixes import Prefix
from dasc.eval.horizons.running import run_prefixes
from dasc.eval.profile import quantiles
from dasc.eval.states import Prefixes
from dasc.eval.states.recording import RecordingOps
from dasc.models import read_checkpoint
from dasc.models.hybrid import HybridModel
from dasc.reference import (
    MedianIQR,
    calibrate_gate_input,
    empirical_horizons,
    median_iqr,
    state_magnitude,
    static_horizons,
    within_layer_spearman,
)

GATE_INPUTS = tuple(step / 10 for step in range(-30, 31))
"""Candidates for ``a_s``."""
BINS_PER_DECADE = 8
"""Of the histogram of horizons."""


@dataclass(frozen=True)
class HorizonSettings:
    """How horizons are computed.

    Attributes:
        gate_input: ``a_s``; the family's own when ``None``.
        epsilon: decay that ends a horizon.
    """

    gate_input: float | None = None
    epsilon: float = 1e-3


@dataclass(frozen=True)
class Agreement:
    """Within-layer Spearman correlations of static horizons with an observed signal.

    Attributes:
        values: of each prefix and layer; ``None`` where a side is constant.
        pooled: median and quartiles over prefixes and layers, as in table 1(b).
        layers: the same for each layer over its prefixes; ``None`` for one without values.
    """

    values: tuple[tuple[float | None, ...], ...]
    pooled: MedianIQR
    layers: tuple[MedianIQR | None, ...]

    @classmethod
    def of(cls, static: Tensor, observed: Tensor) -> Agreement:
        """From ``[L, U]`` and ``[P, L, U]``."""
        values = within_layer_spearman(static, observed)
        return cls(
            values=tuple(tuple(None if math.isnan(v) else v for v in row) for row in values.tolist()),
            pooled=median_iqr(values),
            layers=tuple(None if column.isnan().all() else median_iqr(column) for column in values.T),
        )


@dataclass(frozen=True)
class Comparison:
    """Both observed signals against the horizons at one ``a_s``.

    Attributes:
        gate_input: ``a_s``.
        prefixes: numbers of the prefixes compared.
        empirical: with ``H_e`` (eq. 4).
        magnitude: with ``M_S`` (eq. 5).
    """

    gate_input: float
    prefixes: tuple[int, ...]
    empirical: Agreement
    magnitude: Agreement


@dataclass(frozen=True)
class HorizonReport:
    """Table 1(b) for one model, and what lies behind it.

    Attributes:
        settings: all that the figures depend on.
        blocks: block number of each recurrent layer.
        prefixes: source, target, length and length before the cut of each.
        fixed: at the ``a_s`` asked for, over all prefixes.
        calibrated: at the ``a_s`` that the even prefixes choose, over the odd ones, which had no part in it.
        objective: what the choice minimised, for each candidate (:func:`dasc.reference.calibrate_gate_input`).
        histogram: bin edges in tokens, and units in each bin by static horizon at the ``a_s`` asked for
            (``static``, a list for each layer) and by the median over prefixes of the empirical one (``empirical``).
        quantiles_tokens: of the static horizons (:data:`dasc.eval.profile.QUANTILES`); ``None`` for infinite.
    """

    settings: dict[str, Any]
    blocks: tuple[int, ...]
    prefixes: tuple[dict[str, Any], ...]
    fixed: Comparison
    calibrated: Comparison
    objective: tuple[float, ...]
    histogram: dict[str, Any]
    quantiles_tokens: tuple[float | None, ...]

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        values = dataclasses.asdict(self)
        for comparison in (values["fixed"], values["calibrated"]):
            for agreement in (comparison["empirical"], comparison["magnitude"]):
                agreement["pooled"] = agreement["pooled"]._asdict()
                agreement["layers"] = [None if layer is None else layer._asdict() for layer in agreement["layers"]]
        return values


def measure_horizons(
    folder: Path,
    prefixes: Sequence[Prefix],
    settings: HorizonSettings = HorizonSettings(),
    *,
    source: dict[str, Any],
    units_path: Path | None = None,
    progress: Callable[[str], None] = lambda prefix: None,
) -> HorizonReport:
    """Run each prefix by itself and compare what is observed with the horizons of the weights.

    Args:
        folder: of a small hybrid model.
        prefixes: at least two.
        settings: of the horizons.
        source: where the prefixes are from, for the report's settings; plain JSON values.
        units_path: file of finished prefixes, to go on from when interrupted.
        progress: called with a label when a prefix is done.

    Raises:
        ValueError: for fewer than two prefixes, token ids that the model does not have, an epsilon or gate input
            outside its range, or a file of finished prefixes that does not fit.
    """
    if len(prefixes) < 2:
        raise ValueError(f"prefixes must be at least two, to choose a_s and to validate it, got {len(prefixes)}")
    checkpoint = read_checkpoint(folder)
    gate_input = checkpoint.gate_input(settings.gate_input)
    static = static_horizons(checkpoint.gate, gate_input, settings.epsilon)
    in_force = {
        "gate_input": gate_input,
        "epsilon": settings.epsilon,
        "gate_inputs": list(GATE_INPUTS),
        "source": source,
    }
    listed = tuple(
        {"source": p.source, "target": p.target, "tokens": len(p.tokens), "available": p.available} for p in prefixes
    )
    seen = partial(_observe_plain, epsilon=settings.epsilon)
    everything, observed = run_prefixes(folder, prefixes, seen, in_force, units_path=units_path, progress=progress)
    empirical, magnitude = (torch.tensor([unit[i] for unit in observed], dtype=torch.float64) for i in (0, 1))
    calibration = calibrate_gate_input(checkpoint.gate, empirical, GATE_INPUTS, settings.epsilon)

    def compare(a_s: float, numbers: range) -> Comparison:
        horizons = static_horizons(checkpoint.gate, a_s, settings.epsilon)
        some = list(numbers)
        agreements = (Agreement.of(horizons, signal[some]) for signal in (empirical, magnitude))
        return Comparison(a_s, tuple(some), *agreements)

    return HorizonReport(
        settings=everything,
        blocks=checkpoint.geometry.recurrent_layers,
        prefixes=listed,
        fixed=compare(gate_input, range(len(prefixes))),
        calibrated=compare(calibration.gate_input, range(1, len(prefixes), 2)),
        objective=calibration.objective,
        histogram=_histogram(static, empirical.median(dim=0).values),
        quantiles_tokens=tuple(None if math.isinf(q) else q for q in quantiles(static)),
    )


def observe(model: HybridModel, tokens: Sequence[int], epsilon: float = 1e-3) -> tuple[Tensor, Tensor]:
    """Run a prefix and observe it.

    Args:
        model: computes in FP32 or better.
        tokens: of the prefix.
        epsilon: within ``(0, 1)``.

    Returns:
        Empirical horizons ``H_e`` of the decays of all its tokens (eq. 4) and magnitudes ``M_S`` of the state after the
        last (eq. 5), each ``[L, U]`` float64.
    """
    geometry = model.config.geometry
    ops = RecordingOps(model.ops)
    prefixes = Prefixes.of(model.with_ops(ops), [tokens])
    given = ops.take(geometry.num_layers, 1)
    horizons = [empirical_horizons(layer.g, epsilon=epsilon)[0].flatten() for layer in given]
    return torch.stack(horizons), state_magnitude(prefixes.temporal[:, 0], geometry.kind)


def _observe_plain(model: HybridModel, tokens: Sequence[int], epsilon: float) -> list[Any]:
    return [signal.tolist() for signal in observe(model, tokens, epsilon)]


def _histogram(static: Tensor, empirical: Tensor) -> dict[str, Any]:
    """Counts in bins that are equally wide on a log scale; infinite horizons are counted in the last."""
    finite = torch.cat([static.flatten(), empirical.flatten()])
    finite = finite[finite.isfinite()].log10() * BINS_PER_DECADE
    first, end = (int(finite.min().floor()), int(finite.max().floor()) + 1) if len(finite) else (0, 1)
    last = end - first - 1

    def counts(horizons: Tensor) -> list[int]:
        bins = (horizons.log10() * BINS_PER_DECADE).floor().sub(first).clamp(max=last).long()
        return torch.bincount(bins, minlength=last + 1).tolist()

    return {
        "edges_tokens": [10 ** (edge / BINS_PER_DECADE) for edge in range(first, end + 1)],
        "static": [counts(layer) for layer in static],
        "empirical": [counts(layer) for layer in empirical],
    }
