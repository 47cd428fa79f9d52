"""Observing how large the units of a model's states are, prefix by prefix."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from dasc.eval.horizons import Prefix
from dasc.eval.horizons.running import run_prefixes
from dasc.eval.states import Prefixes
from dasc.magnitudes import UnitMagnitudes
from dasc.models import read_checkpoint
from dasc.models.hybrid import HybridModel
from dasc.reference import state_magnitude


def measure_magnitudes(
    folder: Path,
    prefixes: Sequence[Prefix],
    *,
    source: dict[str, Any],
    units_path: Path | None = None,
    progress: Callable[[str], None] = lambda prefix: None,
) -> UnitMagnitudes:
    """Run each prefix by itself, and take the root mean square of the states' magnitudes after them.

    Args:
        folder: of a small hybrid model.
        prefixes: at least one; like the prompts that will be served, since a unit that they leave empty is not kept.
        source: where the prefixes are from, for the record; plain JSON values.
        units_path: file of finished prefixes, to go on from when interrupted.
        progress: called with a label when a prefix is done.

    Raises:
        ValueError: for no prefixes, token ids that the model does not have, or a file of finished prefixes that does
            not fit.
    """
    if not prefixes:
        raise ValueError("prefixes must be at least one, got none")
    everything, found = run_prefixes(
        folder, prefixes, _magnitudes, {"source": source}, units_path=units_path, progress=progress
    )
    values = torch.tensor(found, dtype=torch.float64).square().mean(dim=0).sqrt()
    listed = [{"source": p.source, "tokens": len(p.tokens)} for p in prefixes]
    return UnitMagnitudes(values, read_checkpoint(folder).gate.fingerprint(), {**everything, "prefixes": listed})


def _magnitudes(model: HybridModel, tokens: Sequence[int]) -> list[list[float]]:
    """``M_S`` after the tokens, ``[L, U]``."""
    plain: list[list[float]] = state_magnitude(
        Prefixes.of(model, [tokens]).temporal[:, 0], model.config.geometry.kind
    ).tolist()
    return plain
