"""Observing how large the units of a model's states are, prefix by prefix."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

import dasc.fast
from dasc.eval.horizons import Prefix
from dasc.eval.horizons.measure import observe
from dasc.eval.provenance import described
from dasc.eval.unit_file import UnitFile
from dasc.magnitudes import UnitMagnitudes
from dasc.models import read_checkpoint
from dasc.models.hybrid import HybridModel, load_hybrid


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
    checkpoint = read_checkpoint(folder)
    config, weights = load_hybrid(folder)
    model = HybridModel(config, weights, dasc.fast)
    tokens = json.dumps([prefix.tokens for prefix in prefixes])
    everything = described(folder, {"source": source, "prefixes_sha256": hashlib.sha256(tokens.encode()).hexdigest()})
    units = UnitFile(units_path, everything)
    found = []
    for number, prefix in enumerate(prefixes):
        found.append(units.get(str(number), lambda tokens=prefix.tokens: observe(model, tokens)[1].tolist()))  # type: ignore[misc]
        progress(f"{len(prefix.tokens)} tokens")
    values = torch.tensor(found, dtype=torch.float64).square().mean(dim=0).sqrt()
    listed = [{"source": p.source, "tokens": len(p.tokens)} for p in prefixes]
    return UnitMagnitudes(values, checkpoint.gate.fingerprint(), {**everything, "prefixes": listed})
