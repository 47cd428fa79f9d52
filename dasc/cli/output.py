from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

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


@contextmanager
def progress_bar(total: int) -> Iterator[Callable[[str], None]]:
    """A bar on standard error; what it gives is called with a label for each of ``total`` steps done."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=total)
        yield lambda label: bar.update(task, description=label, advance=1)
