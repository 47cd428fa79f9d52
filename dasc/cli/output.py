from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import click

if TYPE_CHECKING:
    from rich.console import Console


def table_console(width: int) -> Console:
    """Standard output for tables of up to ``width`` columns: on a narrower terminal lines wrap, no figure is cut.

    Names of files and values from a config are printed as they are, never as markup.
    """
    from rich.console import Console

    console = Console(highlight=False, markup=False, emoji=False)
    is_terminal = sys.stdout is not None and sys.stdout.isatty()
    console.width = max(console.width, width) if is_terminal else width
    return console


@contextmanager
def output_folder(folder: Path | None) -> Iterator[None]:
    """Make ``folder`` before the work, which may be long, and take it away again if the work fails and it is empty."""
    if folder is None:
        yield
        return
    made = not folder.exists()
    folder.mkdir(parents=True, exist_ok=True)
    try:
        yield
    except BaseException:
        if made:
            with suppress(OSError):
                folder.rmdir()
        raise


class Advance(Protocol):
    """Moves a bar on."""

    def __call__(self, label: str, steps: int = 1) -> None: ...


@contextmanager
def progress_bar(total: int) -> Iterator[Advance]:
    """A bar on standard error; what it gives is called with a label when one or more of ``total`` steps are done."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=total)
        yield lambda label, steps=1: bar.update(task, description=label, advance=steps)


def give_result(
    name: str,
    values: Mapping[str, Any],
    show: Callable[[], None],
    *,
    output: Path | None,
    as_json: bool,
    draw: Callable[[], Mapping[str, bytes]] = dict,
) -> None:
    """Write a result's files together, and print JSON, or else tables and where the files are.

    Args:
        name: of the file of numbers in ``output``.
        values: the numbers.
        show: prints tables.
        output: folder; ``None`` writes nothing.
        as_json: print the numbers.
        draw: gives the other files by name; called only with an ``output``.
    """
    if output is not None:
        from dasc.eval.files import json_bytes, write_together

        write_together(output, {name: json_bytes(values), **draw()})
    if as_json:
        click.echo(json.dumps(values, indent=2, allow_nan=False))
        return
    show()
    if output is not None:
        click.echo(f"written to {output}")
