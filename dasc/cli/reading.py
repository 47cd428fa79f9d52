from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dasc.models import Checkpoint


def read_with_progress(model: str, revision: str | None) -> Checkpoint:
    """Read MODEL's decay parameters, with a progress bar on standard error while it takes time.

    From here on torch works with one thread: tensors are small, and threads that share busy cores wait for each other.
    """
    import torch
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    from dasc.models import read_checkpoint

    torch.set_num_threads(1)
    console = Console(stderr=True)
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )
    with bar:
        tasks: dict[str, Any] = {}

        def progress(what: str, done: int, total: int) -> None:
            if what not in tasks:
                tasks[what] = bar.add_task(what, total=total)
            bar.update(tasks[what], completed=done, total=total)

        return read_checkpoint(model, revision=revision, progress=progress)
