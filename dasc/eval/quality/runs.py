"""A whole evaluation: of a small model in the bundled engine, or of a server as it was started."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch

from dasc.eval.chat_tokens import TOKENIZER_FILE
from dasc.eval.items import Item
from dasc.eval.provenance import folder_sha256, versions
from dasc.eval.quality.arms import METHODS, ArmSpec, default_w_max, expand
from dasc.eval.quality.engine_backend import EngineBackend, EngineLimits, as_tokens, kv_tokens
from dasc.eval.quality.evaluate import evaluate
from dasc.eval.quality.protocol import Protocol, make_blocks
from dasc.eval.quality.results import QualityResult
from dasc.eval.quality.server_backend import ServerBackend
from dasc.eval.served_model import load_served
from dasc.models.zoo import model_folder

UNITS_FILE = "units.jsonl"

Progress = Callable[[str, int], None]
"""Called with the label of an arm and the number of requests just done."""


def bundled_arms(items: Sequence[Item], methods: Sequence[str], w_max: Sequence[int] | None) -> list[ArmSpec]:
    """The arms of methods over a grid of cutoffs, one that suits the prompts when ``None``."""
    longest = max(len(as_tokens(ask.prompt)) for item in items for ask in item.asks)
    return expand(methods, w_max or default_w_max(longest))


def run_bundled(
    items: Sequence[Item],
    model: str | Path,
    arms: Sequence[ArmSpec],
    protocol: Protocol,
    limits: EngineLimits,
    *,
    source: str = "",
    magnitudes: Path | None = None,
    output: Path | None = None,
    progress: Progress = lambda label, requests: None,
) -> QualityResult:
    """Measure arms of a small model on this machine.

    Args:
        items: in token ids, or text for a model that reads bytes.
        model: bundled, by its name, or the folder of a small Qwen3-Next, OLMo-Hybrid or Kimi-Linear.
        arms: to measure.
        protocol: with a number of slots.
        limits: of the engine.
        source: where the items come from, for the record.
        magnitudes: file of ``dasc observe``, for the method ``observed``.
        output: folder of the file of finished blocks; ``None`` keeps none.
        progress: told of requests done.

    Raises:
        ValueError: for a model, items or settings that do not go together.
    """
    if (magnitudes is not None) != any(METHODS[arm.method].observed for arm in arms):
        raise ValueError("magnitudes must be given for the method 'observed', and for no other")
    if protocol.slots is None:
        raise ValueError("slots must be given for the bundled engine")
    folder = model_folder(model)
    torch.set_num_threads(limits.threads)
    served = load_served(folder, importlib.import_module(f"dasc.{limits.ops}"), magnitudes=magnitudes)
    if any(isinstance(item.warm, str) for item in items) and (folder / TOKENIZER_FILE).exists():
        raise ValueError(
            f"items of text need a model that reads bytes; {folder} has a {TOKENIZER_FILE}: serve it, and take --url"
        )
    capacity = kv_tokens(make_blocks(items, protocol.block_items), limits.server_limit)

    run = {"source": source, "backend": "bundled engine", **vars(limits), "versions": versions()}
    if served.magnitudes is not None:
        run["magnitudes"] = served.magnitudes.sha256()
    return evaluate(
        items,
        arms,
        partial(EngineBackend, served, limits=limits, slots=protocol.slots, kv_tokens=capacity),
        protocol,
        model=folder.name,
        model_sha256=folder_sha256(folder),
        run=run,
        units_path=_units_path(output),
        progress=progress,
    )


def run_server(
    items: Sequence[Item],
    server: ServerBackend,
    arm: ArmSpec,
    protocol: Protocol,
    *,
    source: str = "",
    output: Path | None = None,
    progress: Progress = lambda label, requests: None,
) -> QualityResult:
    """Measure one arm: a server as it was started.

    Raises:
        ValueError: a :class:`~dasc.eval.quality.backend.BackendError` when it does not answer as it must.
    """
    run = {"source": source, "backend": "server", "versions": versions()}
    return evaluate(
        items,
        [arm],
        lambda spec: server,
        protocol,
        model=server.model.rstrip("/").rsplit("/", 1)[-1],
        model_sha256=None,
        run=run,
        units_path=_units_path(output),
        progress=progress,
    )


def _units_path(output: Path | None) -> Path | None:
    return None if output is None else output / UNITS_FILE
