"""The items of an evaluation, by where they come from."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from dasc.eval.chat_tokens import TOKENIZER_FILE, ByteTokens, FileTokens
from dasc.eval.items.from_tasks import task_items
from dasc.eval.items.item import Item
from dasc.eval.items.jsonl import read_items
from dasc.eval.items.ruler import SUBTASKS, CountTokens, ruler_items
from dasc.models.tasks import TASKS

GENERATED = ("ruler", "tasks")
"""Sources that are generated; any other is a file of JSON lines."""

DEFAULT_LENGTHS = {"ruler": (4096, 8192, 16_384), "tasks": (256,)}
DEFAULT_COUNT = 30  # appendix C.2, for RULER


def load_items(
    source: str | Path,
    *,
    tasks: Sequence[str] | None = None,
    lengths: Sequence[int] | None = None,
    count: int | None = None,
    seed: int = 0,
    tokenizer: Path | None = None,
    depths: Sequence[float] | None = None,
) -> list[Item]:
    """Items for a quality evaluation; those of a task follow each other. How often to replay one is in the item.

    Args:
        source: ``"ruler"``; ``"tasks"``, those of the bundled models, in token ids; or a file of JSON lines.
        tasks: RULER's subtasks, the bundled models' tasks, or tasks of the file; all when ``None``.
        lengths: tokens, for generated items; :data:`DEFAULT_LENGTHS` when ``None``.
        count: of each task and length, the first ones of a file; when ``None`` 30, or all of a file.
        seed: of what is generated.
        tokenizer: a ``tokenizer.json`` or a folder with one, which lengths of RULER's prompts are counted with; bytes
            when ``None``.
        depths: of the needle, 0 to 1, for RULER's subtasks with a single one.

    Raises:
        ValueError: for an option that the source does not have, and as its own functions.
        ImportError: without the tokenizers package, when ``tokenizer`` is given.
        OSError: when a file cannot be read.
    """
    if count is not None and count < 1:
        raise ValueError(f"count must be >= 1, got {count}")
    given = {"lengths": lengths, "tokenizer": tokenizer, "depths": depths}
    allowed = {"ruler": set(given), "tasks": {"lengths"}}.get(str(source), set())
    for name, value in given.items():
        if value is not None and name not in allowed:
            raise ValueError(f"{name} must not be given for items of {source}")
    if str(source) == "ruler":
        counter = token_counter(tokenizer)
        return [
            item
            for length in lengths or DEFAULT_LENGTHS["ruler"]
            for depth in depths or (None,)
            for item in ruler_items(
                length,
                count or DEFAULT_COUNT,
                count_tokens=counter,
                subtasks=tasks or tuple(SUBTASKS),
                seed=seed,
                depth=depth,
            )
        ]
    if str(source) == "tasks":
        return [
            item
            for length in lengths or DEFAULT_LENGTHS["tasks"]
            for item in task_items(tasks or tuple(TASKS), length=length, count=count or DEFAULT_COUNT, seed=seed)
        ]
    return _chosen(read_items(Path(source)), source, tasks, count)


def _chosen(items: list[Item], source: str | Path, tasks: Sequence[str] | None, count: int | None) -> list[Item]:
    there = list(dict.fromkeys(item.task for item in items))
    for task in tasks or ():
        if task not in there:
            raise ValueError(f"tasks must be of {', '.join(there)}, those of {source}, got {task!r}")
    chosen = []
    for task in there if tasks is None else dict.fromkeys(tasks):
        chosen += [item for item in items if item.task == task][:count]
    return chosen


def token_counter(tokenizer: Path | None) -> CountTokens:
    """Counts the tokens of a text: those of a ``tokenizer.json``, or bytes.

    Args:
        tokenizer: the file or the folder that it is in.

    Raises:
        ImportError: without the tokenizers package.
        ValueError: for a file that is none, or a folder without one.
    """
    if tokenizer is None:
        return lambda text: len(ByteTokens().text(text))
    path = tokenizer / TOKENIZER_FILE if tokenizer.is_dir() else tokenizer
    if not path.exists():
        raise ValueError(f"tokenizer must be a {TOKENIZER_FILE} or a folder with one, got {tokenizer}")
    tokens = FileTokens(path)
    return lambda text: len(tokens.text(text))
