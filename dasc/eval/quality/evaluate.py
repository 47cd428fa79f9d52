"""All arms over all blocks, resumable."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

from dasc.eval.items import SCORERS, Ask, Item, Text
from dasc.eval.quality.arms import ArmSpec
from dasc.eval.quality.backend import Backend
from dasc.eval.quality.protocol import BlockResult, Protocol, make_blocks, run_block
from dasc.eval.quality.results import QualityResult, summarise_arm
from dasc.eval.unit_file import UnitFile, check_unchanged


def score_answer(item: Item, ask: Ask, answer: Text) -> float:
    """By the item's own scorer."""
    return SCORERS[item.scorer](item, ask, answer)


def items_sha256(items: Sequence[Item]) -> str:
    """Of all that is asked and how it is scored."""
    values = json.dumps([dataclasses.asdict(item) for item in items], sort_keys=True)
    return hashlib.sha256(values.encode()).hexdigest()


def total_requests(items: Sequence[Item], arms: Sequence[ArmSpec], protocol: Protocol) -> int:
    """Of a whole run, warm ones included."""
    return len(arms) * sum(protocol.requests(block.items) for block in make_blocks(items, protocol.block_items))


def shared_settings(items: Sequence[Item], protocol: Protocol) -> dict[str, Any]:
    """What every result must have in common to be compared, as plain JSON values."""
    return {
        "items": len(items),
        "tasks": list(dict.fromkeys(item.task for item in items)),
        "items_sha256": items_sha256(items),
        **dataclasses.asdict(protocol),
    }


def evaluate(
    items: Sequence[Item],
    arms: Sequence[ArmSpec],
    make_backend: Callable[[ArmSpec], Backend],
    protocol: Protocol,
    *,
    model: str,
    model_sha256: str | None,
    run: dict[str, Any],
    units_path: Path | None = None,
    progress: Callable[[str, int], None] = lambda label, requests: None,
) -> QualityResult:
    """Measure arms one after the other, block by block.

    Args:
        items: the items of a task follow each other.
        arms: different ones.
        make_backend: starts the backend of an arm; called only for arms with a block that is not finished.
        protocol: how all of them are measured.
        model: name for tables.
        model_sha256: of its weights, ``None`` where they are not at hand.
        run: settings besides those of :func:`shared_settings`, as plain JSON values.
        units_path: of the file of finished blocks; ``None`` keeps none.
        progress: called with the label of an arm and the number of requests just done.

    Raises:
        ValueError: for no arms or one twice, items as :func:`~dasc.eval.quality.protocol.make_blocks`, a file of other
            settings; a :class:`~dasc.eval.quality.backend.BackendError` when a backend fails.
    """
    labels = [arm.label for arm in arms]
    if not labels or len(set(labels)) != len(labels):
        raise ValueError(f"arms must hold at least one and none twice, got {labels}")
    blocks = make_blocks(items, protocol.block_items)
    shared = {"model_sha256": model_sha256, **shared_settings(items, protocol)}
    units = UnitFile(units_path, {"model": model, "arms": labels, **shared, **run})
    results = []
    for spec in arms:
        label = spec.label
        named = {f"{label}: {block.key}": block for block in blocks}
        missing = {name: block for name, block in named.items() if name not in units}
        progress(label, sum(protocol.requests(block.items) for name, block in named.items() if name in units))
        if missing:
            on_reply = partial(progress, label, 1)
            with closing(make_backend(spec)) as backend:
                told = backend.settings()
                check_unchanged(f"arm {label!r}", units.keep(label, told), told)
                for name, block in missing.items():
                    units.keep(name, run_block(label, block, backend, protocol, score_answer, on_reply).as_dict())
        measured = [BlockResult.from_dict(units[name]) for name in named]
        results.append(summarise_arm(spec, units[label], measured, protocol.controls))
    return QualityResult(model, shared, run, tuple(results))
