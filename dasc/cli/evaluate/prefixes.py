"""The prefixes that a model is observed on: of a file of conversations, or of the bundled models' tasks."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from dasc.cli.options import Decorator, IntList, NameList, together

if TYPE_CHECKING:
    from dasc.eval.horizons import Prefix


def prefix_options(*, seed: int) -> Decorator[Any]:
    """Which prefixes: ``conversations``, ``tasks``, ``targets``, ``per_target``, ``seed``.

    Args:
        seed: default.
    """
    positive = click.IntRange(min=1)
    return together(
        click.option(
            "--conversations",
            type=click.Path(path_type=Path),
            help='JSON array in the form of ShareGPT, [{"conversations": [{"from", "value"}, ..]}, ..], to take '
            "prefixes from.",
        ),
        click.option(
            "--tasks", type=NameList(), help="Without conversations: tasks to take them from, all by default."
        ),
        click.option(
            "--targets",
            type=IntList(),
            help="Tokens of the prefixes; 16384,8192,4096,1024 for conversations and a model with a tokenizer.json, "
            "512,256,128,32 otherwise.",
        ),
        click.option("--per-target", type=positive, default=8, show_default=True, help="Prefixes of each length."),
        click.option(
            "--seed", type=click.IntRange(min=0), default=seed, show_default=True, help="Of the tasks' examples."
        ),
    )


def chosen_prefixes(
    folder: Path,
    *,
    conversations: Path | None,
    tasks: tuple[str, ...] | None,
    targets: tuple[int, ...] | None,
    per_target: int,
    seed: int,
) -> tuple[list[Prefix], dict[str, Any]]:
    """The prefixes for the model in ``folder``, and where they are from as plain JSON values."""
    from dasc.eval.chat_tokens import TOKENIZER_FILE, chat_tokens
    from dasc.eval.horizons import SCALED_TARGETS, TARGETS, read_sharegpt, select_prefixes, task_prefixes
    from dasc.models.hybrid import load_hybrid

    if conversations is not None and tasks is not None:
        raise click.UsageError("give either --conversations or --tasks, not both")
    if conversations is None:
        targets = targets or SCALED_TARGETS
        source: dict[str, Any] = {"prefixes": "tasks", "seed": seed}
        if tasks is not None:
            source["tasks"] = list(tasks)
        prefixes = task_prefixes(targets, per_target, seed, tasks)
    else:
        targets = targets or (TARGETS if (folder / TOKENIZER_FILE).exists() else SCALED_TARGETS)
        source = {"prefixes": conversations.name}
        tokens = chat_tokens(folder, load_hybrid(folder)[0].vocab_size)
        prefixes = select_prefixes(read_sharegpt(conversations), tokens.text, targets, per_target)
    return prefixes, {**source, "targets": list(targets), "per_target": per_target}
