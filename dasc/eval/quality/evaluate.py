"""All arms over all blocks, resumable."""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.metadata
import json
from collections.abc import Callable, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

from dasc import __version__
from dasc.eval.items import SCORERS, Ask, Item, Text
from dasc.eval.quality.arms import ArmSpec
from dasc.eval.quality.backend import Backend
from dasc.eval.quality.protocol import Protocol, make_blocks, run_block
from dasc.eval.quality.results import QualityResult, summarise_arm
from dasc.eval.quality.unit_log import UnitLog


def score_answer(item: Item, ask: Ask, answer: Text) -> float:
    """By the item's own scorer."""
    return SCORERS[item.scorer](item, ask, answer)


def items_sha256(items: Sequence[Item]) -> str:
    """Of all that is asked and how it is scored."""
    values = json.dumps([dataclasses.asdict(item) for item in items], sort_keys=True)
    return hashlib.sha256(values.encode()).hexdigest()


def folder_sha256(folder: Path) -> str:
    """Of a model's configuration, tokenizer and weights: names and bytes of its JSON and safetensors files."""
    total = hashlib.sha256()
    for path in sorted(p for p in folder.iterdir() if p.suffix in (".json", ".safetensors")):
        with open(path, "rb") as file:
            total.update(f"{path.name}\0{hashlib.file_digest(file, 'sha256').hexdigest()}\n".encode())
    return total.hexdigest()


def versions() -> dict[str, str]:
    """Of what measurements may depend on."""
    return {"dasc": __version__, **{name: importlib.metadata.version(name) for name in ("torch", "numpy")}}


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
    log_path: Path | None = None,
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
        log_path: of the file of finished blocks; ``None`` keeps none.
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
    log = UnitLog({"model": model, "arms": labels, **shared, **run}, log_path)
    results = []
    for spec in arms:
        label = spec.label
        keys = [(label, block.task, block.number) for block in blocks]
        missing = [block for key, block in zip(keys, blocks) if key not in log.blocks]
        finished = sum(protocol.requests(block.items) for key, block in zip(keys, blocks) if key in log.blocks)
        progress(label, finished)
        if missing:
            on_reply = partial(progress, label, 1)
            with closing(make_backend(spec)) as backend:
                log.add_arm(label, backend.settings())
                for block in missing:
                    log.add_block(run_block(label, block, backend, protocol, score_answer, on_reply))
        measured = [log.blocks[key] for key in keys]
        results.append(summarise_arm(spec, log.arms[label], measured, protocol.controls))
    return QualityResult(model, shared, run, tuple(results))
