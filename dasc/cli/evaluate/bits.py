from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from dasc.cli.options import result_options, task_options, threads_option
from dasc.cli.output import give_result, output_folder, table_console

if TYPE_CHECKING:
    from rich.table import Table

    from dasc.eval.bits import BitsReport

UNITS_FILE = "bits-units.jsonl"
_positive = click.IntRange(min=1)


def _shares(ctx: click.Context, param: click.Parameter, value: str) -> tuple[str, ...]:
    """Fractions with commas between them, as they were written."""
    parts = tuple(dict.fromkeys(part.strip() for part in value.split(",")))
    try:
        good = all(0 < Fraction(part) <= 1 for part in parts)
    except (ValueError, ZeroDivisionError):
        good = False
    if not good:
        raise click.BadParameter(f"expected fractions over 0 and at most 1, such as 1/8,1/4, got {value!r}", ctx, param)
    return parts


@click.command()
@click.argument("model")
@task_options(length=256, count=32)
@click.option("--calibration", type=_positive, default=8, show_default=True, help="Other examples, for magnitudes.")
@click.option(
    "--budgets", callback=_shares, default="1/32,1/16,1/8,1/4,1/2,1", show_default=True, help="Of dense temporal bytes."
)
@click.option("--seeds", type=click.IntRange(1, 5), default=5, show_default=True, help="Random masks.")
@click.option("--use-tokens", type=_positive, default=16, show_default=True, help="Continuation to allocate bits for.")
@threads_option
@result_options("bits.json and a figure", "tables", resumes=True)
def bits(
    model: str, tasks: tuple[str, ...] | None, output: Path | None, as_json: bool, threads: int, **options: Any
) -> None:
    """Compare bits by horizon with keep-or-drop on MODEL at equal bytes.

    MODEL is the name of a bundled model or a folder. Each unit has 32, 16, 8, 4 or 0 bits by its horizon, or by its
    horizon and its magnitude, whole or as a share of its head's, within a byte budget; keep-or-drop spends the same
    bytes on whole units in FP32 or INT8. What is dropped is zero on load (NR). Scales count, convolution rows, which
    are the same in all arms, do not.
    """
    if output is not None:  # better now than after the work
        from dasc.eval.bits.figures import draw_bits
    with output_folder(output):
        report = _run(model, tasks, None if output is None else output / UNITS_FILE, threads, **options)
    title = f"{report.settings['model']}: bits by horizon, {report.settings['count']} examples of each task"
    give_result(
        "bits.json",
        report.as_dict(),
        partial(_print, report, title),
        output=output,
        as_json=as_json,
        draw=lambda: draw_bits(report, title),
    )


def _run(
    model: str, tasks: tuple[str, ...] | None, units_path: Path | None, threads: int, *, length: int, **options: Any
) -> BitsReport:
    import torch

    from dasc.eval.bits import BitsSettings, measure_bits
    from dasc.eval.task_runs import fitting_tasks
    from dasc.models.zoo import model_folder

    torch.set_num_threads(threads)
    settings = BitsSettings(tasks=tasks or fitting_tasks(length), length=length, **options)
    with _progress() as progress:
        return measure_bits(model_folder(model), settings, units_path=units_path, progress=progress)


@contextmanager
def _progress() -> Iterator[Callable[[int, int], None]]:
    """A bar on standard error, a step for each allocation."""
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("allocations", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def _print(report: BitsReport, title: str) -> None:
    from dasc.eval.bits.results import ALL_TASKS

    console = table_console(150)
    dense = report.dense[ALL_TASKS]
    table = _table(
        title, "budget", "arm", "stored", "units of 32 / 16 / 8 / 4 / 0", "accuracy", "log-prob lost", "state error"
    )
    table.add_row("", "dense", "100.0%", "", f"{dense.accuracy:.1%}", "", "")
    for point in report.points:
        score = point.scores[ALL_TASKS]
        table.add_row(
            f"{point.budget_bytes / report.dense_bytes:.2%}",
            point.arm,
            f"{point.stored_bytes / report.dense_bytes:.2%}",
            " / ".join(str(point.units_of_bits[width]) for width in ("32", "16", "8", "4", "0")),
            f"{score.accuracy:.1%}",
            f"{dense.log_prob - score.log_prob:.4f}",
            f"{score.state_error:.2e}",
        )
    console.print(table)
    table = _table(
        "Differences by example, 95 % interval", "budget", "arm", "less", "accuracy (points)", "log-prob (nats)"
    )
    for accuracy, log_prob in zip(
        *([d for d in report.differences if d.task == ALL_TASKS and d.measure == m] for m in ("accuracy", "log_prob"))
    ):
        table.add_row(
            f"{accuracy.budget_bytes / report.dense_bytes:.2%}",
            accuracy.arm,
            accuracy.other,
            "{:+.1f} [{:+.1f}, {:+.1f}]".format(
                *(100 * x for x in (accuracy.paired.mean, accuracy.paired.low, accuracy.paired.high))
            ),
            f"{log_prob.paired.mean:+.3f} [{log_prob.paired.low:+.3f}, {log_prob.paired.high:+.3f}]",
        )
    console.print(table)


def _table(title: str, *columns: str) -> Table:
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    for column in columns:
        table.add_column(column, justify="left" if column in ("arm", "less") else "right", no_wrap=True)
    return table
