"""Tables and files of ``dasc eval quality`` and ``dasc eval compare``."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click

from dasc.cli.output import give_result, table_console

if TYPE_CHECKING:
    from rich.console import Console

    from dasc.eval.quality.results import QualityResult
    from dasc.eval.quality.table import Cell, Comparison, QualityTable, Row

RESULT_FILE = "quality.json"
SIGNIFICANT = 0.05
_COLUMN_WIDTH = 17


def report(results: Sequence[QualityResult], output: Path | None, as_json: bool) -> bool:
    """Write the files of results, one for each model, and print a table or JSON.

    Returns:
        Whether every arm is fit to be reported.
    """
    from dasc.eval.quality.table import make_table

    table = make_table(results)
    if len(results) == 1:
        summary = {**results[0].as_dict(), "table": table.as_dict()}
    else:
        summary = {"results": [result.as_dict() for result in results], "table": table.as_dict()}
    give_result(
        RESULT_FILE,
        summary,
        partial(_print, results, table),
        output=output,
        as_json=as_json,
        draw=partial(_figures, results, table),
    )
    for failure in table.failures:
        click.echo(f"failed: {failure}", err=True)
    return not table.failures


def _figures(results: Sequence[QualityResult], table: QualityTable) -> dict[str, bytes]:
    """None of a single arm, which has nothing to be seen against."""
    if all(len(result.arms) == 1 for result in results):
        return {}
    from dasc.eval.quality.figures import draw_quality

    return draw_quality(table)


def _print(results: Sequence[QualityResult], table: QualityTable) -> None:
    for result in results:
        rows = [row for row in table.rows if row.model == result.model]
        failed = {arm.spec.label for arm in result.arms if arm.failures}
        console = table_console(50 + _COLUMN_WIDTH * len(rows[0].cells))
        _print_scores(result.model, rows, failed, console)
    _print_comparisons(table.comparisons, table_console(120))


def _print_scores(model: str, rows: Sequence[Row], failed: set[str], console: Console) -> None:
    from rich.table import Table

    table = Table(title=f"{model}: mean score of all measured answers", title_justify="left")
    table.add_column("task", no_wrap=True)
    for heading in ("items", "hit", *(_heading(cell) for cell in rows[0].cells)):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(row.task, str(row.items), f"{row.hit:.3f}", *(_score(cell) for cell in row.cells))
    console.print(table)
    if failed:
        console.print(f"not fit to be reported: {', '.join(sorted(failed))}")


def _heading(cell: Cell) -> str:
    return cell.method if cell.w_max is None else f"{cell.method} {cell.w_max}"


def _score(cell: Cell) -> str:
    return f"{cell.score:.4f}" if cell.sd is None else f"{cell.score:.4f} ± {cell.sd:.4f}"


def _print_comparisons(comparisons: Sequence[Comparison], console: Console) -> None:
    """Those over all items, or of a single task, and any other that is significant after adjustment."""
    from rich.table import Table

    from dasc.eval.quality.table import ALL_TASKS

    of_tasks = [c for c in comparisons if c.task != ALL_TASKS]
    overall = [c for c in comparisons if c.task == ALL_TASKS] or of_tasks
    others = [c for c in of_tasks if c not in overall and c.p_holm < SIGNIFICANT]
    if not overall:
        return
    table = Table(title="paired differences by item", title_justify="left")
    for heading in ("model", "task", "comparison"):
        table.add_column(heading, no_wrap=True)
    for heading in ("difference", "95 % interval", "p", "p (Holm)"):
        table.add_column(heading, justify="right", no_wrap=True)
    for c in [*overall, *others]:
        d = c.difference
        interval = f"{d.low:+.4f} to {d.high:+.4f}"
        against = f"{c.first} - {c.second}"
        table.add_row(c.model, c.task, against, f"{d.mean:+.4f}", interval, f"{d.p:.4f}", f"{c.p_holm:.4f}")
    console.print(table)
    if of_tasks is not overall:
        significant = sum(c.p_holm < SIGNIFICANT for c in of_tasks)
        console.print(f"{significant} of {len(of_tasks)} comparisons by task have an adjusted p below {SIGNIFICANT}")
