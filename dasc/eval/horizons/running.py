"""Running a model on prefixes one by one, and going on where that was interrupted."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import dasc.fast
from dasc.eval.horizons.prefixes import Prefix
from dasc.eval.provenance import described
from dasc.eval.unit_file import UnitFile
from dasc.models.hybrid import HybridModel, load_hybrid


def run_prefixes(
    folder: Path,
    prefixes: Sequence[Prefix],
    seen: Callable[[HybridModel, Sequence[int]], Any],
    settings: Mapping[str, Any],
    *,
    units_path: Path | None = None,
    progress: Callable[[str], None] = lambda prefix: None,
) -> tuple[dict[str, Any], list[Any]]:
    """Run each prefix by itself.

    Args:
        folder: of a small hybrid model.
        prefixes: to run.
        seen: given the model and a prefix's tokens, what is seen of it, as plain JSON values.
        settings: that it depends on besides model and prefixes.
        units_path: file of finished prefixes, to go on from when interrupted.
        progress: called with a label when a prefix is done.

    Returns:
        Everything that the result depends on, and what was seen of each prefix.

    Raises:
        ValueError: for token ids that the model does not have, or a file of finished prefixes that does not fit.
    """
    model = HybridModel(*load_hybrid(folder), dasc.fast)
    tokens = json.dumps([prefix.tokens for prefix in prefixes])
    everything = described(folder, {**settings, "prefixes_sha256": hashlib.sha256(tokens.encode()).hexdigest()})
    units = UnitFile(units_path, everything)
    found = []
    for number, prefix in enumerate(prefixes):
        found.append(units.get(str(number), partial(seen, model, prefix.tokens)))
        progress(f"{len(prefix.tokens)} tokens")
    return everything, found
