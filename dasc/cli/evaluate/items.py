from __future__ import annotations

import json
from contextlib import AbstractContextManager
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from dasc.cli.options import IntList, NameList, together
from dasc.cli.output import table_console

if TYPE_CHECKING:
    from dasc.eval.items import Item

item_options = together(
    click.option("--tasks", type=NameList(), help="Only these, with commas between them."),
    click.option("--length", "lengths", type=IntList(), help="Tokens of generated items, prompt and answer."),
    click.option("--count", type=click.IntRange(min=1), help="Items of each task; 30, or all of a file, by default."),
    click.option("--item-seed", type=click.IntRange(min=0), default=0, show_default=True, help="Of generated items."),
    click.option(
        "--tokenizer",
        type=click.Path(path_type=Path),
        help="A tokenizer.json, or a folder with one, that counts RULER's tokens; bytes otherwise.",
    ),
    click.option("--depths", type=IntList(0), help="Of RULER's single needle, in percent, e.g. 0,25,50,75,100."),
)
"""Options that choose items of a source; :func:`chosen_items` takes their values."""


def chosen_items(
    source: str,
    *,
    tasks: tuple[str, ...] | None,
    lengths: tuple[int, ...] | None,
    count: int | None,
    item_seed: int,
    tokenizer: Path | None,
    depths: tuple[int, ...] | None,
) -> list[Item]:
    """Items of a source by the values of :data:`item_options`."""
    from dasc.eval.items import GENERATED, load_items

    with _status("making items" if source in GENERATED else f"reading {source}"):
        return load_items(
            source,
            tasks=tasks,
            lengths=lengths,
            count=count,
            seed=item_seed,
            tokenizer=tokenizer,
            depths=None if depths is None else [depth / 100 for depth in depths],
        )


def _status(what: str) -> AbstractContextManager[object]:
    from rich.console import Console
    from rich.text import Text

    return Console(stderr=True).status(Text(what))


@click.command()
@click.argument("source")
@item_options
@click.option("-o", "--output", type=click.Path(path_type=Path), help="Write the items to this file, as JSON lines.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
def items(source: str, output: Path | None, as_json: bool, **options: Any) -> None:
    """List or export the items of SOURCE: what a quality evaluation asks.

    SOURCE is "ruler", for the 13 subtasks of RULER made up here to a token length; "tasks", for those of the bundled
    models; or a file of JSON lines: {"question", "answer", "task", ..} in the style of AIME, HMMT, IMO-AnswerBench,
    GPQA and MMLU-Pro, {"conversation", "qa"} in that of LoCoMo, or items exported before. docs/items.md tells all keys.
    """
    found = chosen_items(source, **options)
    summary = {"source": source, "items": len(found), "tasks": [_row(list(g)) for _, g in groupby(found, _task)]}
    if output is not None:
        from dasc.eval.files import write_together
        from dasc.eval.items import item_line

        write_together(output.parent, {output.name: b"".join(map(item_line, found))})
    if as_json:
        click.echo(json.dumps(summary, indent=2))
        return
    _print(summary["tasks"])  # type: ignore[arg-type]
    if output is not None:
        click.echo(f"{len(found)} items written to {output}")


def _task(item: Item) -> str:
    return item.task


def _row(task_items: list[Item]) -> dict[str, Any]:
    first = task_items[0]
    sizes = [len(ask.prompt) for item in task_items for ask in item.asks]
    return {
        "task": first.task,
        "items": len(task_items),
        "asks": len(sizes),
        "replays": max(item.replays for item in task_items),
        "scorer": first.scorer,
        "max_new_tokens": max(item.max_new_tokens for item in task_items),
        "unit": "characters" if isinstance(first.warm, str) else "tokens",
        "shortest_prompt": min(sizes),
        "longest_prompt": max(sizes),
    }


def _print(rows: list[dict[str, Any]]) -> None:
    from rich.table import Table

    table = Table(box=None)
    table.add_column("task", no_wrap=True)
    for heading in ("items", "asks", "replays", "most new tokens", "prompts"):
        table.add_column(heading, justify="right")
    table.add_column("scorer")
    for row in rows:
        prompts = f"{row['shortest_prompt']:,} to {row['longest_prompt']:,} {row['unit']}"
        counts = (f"{row[key]:,}" for key in ("items", "asks", "replays", "max_new_tokens"))
        table.add_row(row["task"], *counts, prompts, row["scorer"])
    table_console(140).print(table)
